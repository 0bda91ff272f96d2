"""Augmentation: its settings, and the numbers drawn for a sample, which normalise.py applies.

Gain and offset fold into the normalisation and cost nothing. Rotation and scaling, off by default, are in millimetres,
so that a rotation does not shear on a grid of unequal spacing.
"""

import math
from dataclasses import dataclass
from typing import Dict, Sequence, Tuple

import numpy as np

from cpu3d.data.sampling import random_units
from memory_estimator.common.schema import option


@dataclass(frozen=True)
class AugmentConfig:
    """The settings of augmentation. All zero (and no flips) turns it off."""

    flip: bool = option(True, "no mirroring, for data whose left and right differ", group="augmentation")
    """Mirror along X, Y and Z, each with probability 1/2; not X if labels pair left and right."""
    gain: float = 0.1  # multiply each channel by 1 + U(-gain, gain), in normalised units
    offset: float = 0.1  # add U(-offset, offset) to each channel, in standard deviations
    rotation_deg: float = option(0.0, "small rotations up to A degrees; they cost time", "A", group="augmentation")
    """Turn about Z and about X by U(-rotation, rotation) each, in degrees. Costs two resamplings of the volume."""
    scaling: float = option(0.0, "zoom by up to 1 +- S; it costs time", "S", group="augmentation")
    """Zoom X and Y by one factor 1 + U(-scaling, scaling), and Z by another. Shares the resamplings of rotation."""

    def __post_init__(self):
        for name, limit in {"gain": 1, "offset": 10, "rotation_deg": 45, "scaling": 0.5}.items():
            if not 0 <= getattr(self, name) < limit:
                raise ValueError(f"augment {name} must be in [0, {limit}), got {getattr(self, name)}; 0 turns it off")

    @property
    def resamples(self) -> bool:
        """Whether the volume is resampled: the part of augmentation that costs time."""
        return bool(self.rotation_deg or self.scaling)


NO_AUGMENT = AugmentConfig(flip=False, gain=0.0, offset=0.0)

FLOATS = ("float32", (None,))
# Name -> dtype and shape of the arrays that `draw` gives and `Finish` applies.
DRAWN = {"scale": FLOATS, "shift": FLOATS, "flips": ("bool", (3,)), "planes": ("float32", (2, 4))}


def draw(
    config: AugmentConfig,
    scale: np.ndarray,
    shift: np.ndarray,
    spacing_mm: Sequence[float],
    *,
    seed: int,
    position: int,
    mirrored: Sequence[int] = (0, 1, 2),
) -> Dict[str, np.ndarray]:
    """The arrays of `DRAWN` for the sample at `position`: the same numbers on every machine.

    scale, shift (C,): normalisation of the case's channels, with the drawn intensity folded into
    it. flips (3,): mirror X, Y, Z, of which `mirrored` are those that may be. planes (2, 4):
    inverse maps (m00, m01, m10, m11), output offset -> input offset in voxels of `spacing_mm`, of
    the turn about Z with the zoom of X and Y, and of the turn about X with the zoom of Z.
    """
    units = random_units(seed, position, 0x61756721)

    def within(limit: float) -> float:
        return (2 * next(units) - 1) * limit

    # Every number is always drawn, so that one option does not shift the others.
    flips = [next(units) < 0.5 and config.flip and axis in mirrored for axis in range(3)]
    about_z, about_x = (math.radians(within(config.rotation_deg)) for _ in range(2))
    zoom_xy, zoom_z = (1 + within(config.scaling) for _ in range(2))
    gain = [1 + within(config.gain) for _ in scale]
    offset = [within(config.offset) for _ in scale]
    size_x, size_y, size_z = spacing_mm
    planes = _inverse(about_z, zoom_xy, zoom_xy, size_y / size_x), _inverse(about_x, 1.0, zoom_z, size_z / size_y)
    arrays = np.float32(scale * gain), np.float32(shift * gain + offset), np.array(flips), np.float32(planes)
    return dict(zip(DRAWN, arrays))


def _inverse(angle_rad: float, zoom_first: float, zoom_second: float, ratio: float) -> Tuple[float, ...]:
    """Rows of the 2x2 matrix, in voxels, from output to input that undoes a zoom after a turn, both in mm.

    `ratio` is a voxel's size along the second axis over the first, taken to six digits: a header may give 0.9999999.
    """
    cos, sin, ratio = math.cos(angle_rad), math.sin(angle_rad), float(f"{ratio:.6g}")
    return cos / zoom_first, sin / zoom_first * ratio, -sin / zoom_second / ratio, cos / zoom_second
