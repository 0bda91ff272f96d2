"""Augmentation in two halves: draw the parameters as plain numbers, then apply them in the TensorFlow graph.

Flips mirror image and label. Intensity scales and shifts each channel's normalised values, which costs nothing: both
fold into the normalisation. Rotation and scaling, off by default, resample the volume twice, once a plane. They are
drawn in millimetres, so that a rotation is one on a grid of any spacing.
"""

import math
from dataclasses import dataclass
from typing import Dict, Sequence, Tuple

import numpy as np

from cpu3d.data.sampling import random_units
from memory_estimator.schema import option


@dataclass(frozen=True)
class AugmentConfig:
    """How far augmentation goes. All zero (and no flips) turns it off."""

    flip: bool = option(True, "no mirroring: where left and right differ", group="augmentation")
    """Mirror along X, Y and Z, each with probability 1/2."""
    gain: float = 0.1
    """Multiply each channel by 1 + U(-gain, gain), in normalised units."""
    offset: float = 0.1
    """Add U(-offset, offset) to each channel, in standard deviations."""
    rotation_deg: float = option(0.0, "small rotations up to A degrees; they cost time", "A", group="augmentation")
    """Turn about Z and about X by U(-rotation, rotation) each, in degrees. Costs two resamplings of the volume."""
    scaling: float = option(0.0, "zoom by up to 1 +- S; it costs time", "S", group="augmentation")
    """Zoom X and Y by one factor 1 + U(-scaling, scaling), and Z by another. Shares the resamplings of rotation."""

    def __post_init__(self):
        for name, limit in (("gain", 1), ("offset", 10), ("rotation_deg", 45), ("scaling", 0.5)):
            value = getattr(self, name)
            if not 0 <= value < limit:
                raise ValueError(f"augment {name} must be in [0, {limit}), got {value}; 0 turns it off")

    @property
    def resamples(self) -> bool:
        """Whether the volume is resampled: the part of augmentation that costs time."""
        return bool(self.rotation_deg or self.scaling)


NO_AUGMENT = AugmentConfig(flip=False, gain=0.0, offset=0.0)

DRAWN = {
    "scale": ("float32", (None,)),
    "shift": ("float32", (None,)),
    "flips": ("bool", (3,)),
    "planes": ("float32", (2, 4)),
}
"""Name -> dtype and shape of what comes with a raw sample, `AugmentParams.arrays`, and is applied by `Finish`."""


@dataclass(frozen=True)
class AugmentParams:
    """What was drawn for one sample."""

    flips: Tuple[bool, bool, bool]
    gain: Tuple[float, ...]
    offset: Tuple[float, ...]
    plane_xy: Tuple[float, ...]
    """Inverse map of the turn about Z and the zoom of X and Y: (m00, m01, m10, m11), output offset -> input offset, in
    mm."""
    plane_yz: Tuple[float, ...]
    """The same for the turn about X and the zoom of Z."""

    def arrays(self, scale: np.ndarray, shift: np.ndarray, spacing_mm: Sequence[float]) -> Dict[str, np.ndarray]:
        """The arrays of `DRAWN` for a case that `scale` and `shift` normalise, with this spacing along X, Y, Z."""
        return {
            "scale": np.float32(scale * self.gain),
            "shift": np.float32(shift * self.gain + self.offset),
            "flips": np.array(self.flips),
            "planes": self.planes(spacing_mm),
        }

    def planes(self, spacing_mm: Sequence[float]) -> np.ndarray:
        """Float32 (2, 4): plane_xy and plane_yz from voxels to voxels, of a grid with this spacing along X, Y, Z."""
        size_x, size_y, size_z = spacing_mm
        return np.float32([_in_voxels(self.plane_xy, size_y / size_x), _in_voxels(self.plane_yz, size_z / size_y)])


def sample_params(config: AugmentConfig, *, seed: int, position: int, channels: int) -> AugmentParams:
    """Draw the parameters of the sample at `position`: the same numbers on every machine."""
    units = random_units(seed, position, 0x61756721)

    def draw(limit: float) -> float:
        return (2 * next(units) - 1) * limit

    # Every number is drawn whether it is used or not, so that one option does not shift the others' streams.
    flips = tuple(next(units) < 0.5 and config.flip for _ in range(3))
    about_z, about_x = (math.radians(draw(config.rotation_deg)) for _ in range(2))
    zoom_xy, zoom_z = (1 + draw(config.scaling) for _ in range(2))
    gain = tuple(1 + draw(config.gain) for _ in range(channels))
    offset = tuple(draw(config.offset) for _ in range(channels))
    return AugmentParams(flips, gain, offset, _inverse(about_z, zoom_xy, zoom_xy), _inverse(about_x, 1.0, zoom_z))


def flip(volume, flips):
    """Mirror a tensor (X, Y, Z, ...) along the axes whose entry in the boolean tensor `flips` (3,) is true.

    With `flips` (B, 3) the tensor is a batch (B, X, Y, Z, ...), and each sample is mirrored as its row says.
    """
    import tensorflow as tf

    if flips.shape.rank == 1:
        axes = tf.boolean_mask(tf.range(3), flips)
        return tf.cond(tf.size(axes) > 0, lambda: tf.reverse(volume, axes), lambda: volume)
    for axis in range(3):
        mirrored = tf.reshape(flips[:, axis], (-1, *[1] * (volume.shape.rank - 1)))
        volume = tf.where(mirrored, tf.reverse(volume, [axis + 1]), volume)
    return volume


def resample(volume, plane_xy, plane_yz, *, linear: bool):
    """Turn and zoom a tensor (X, Y, Z, C) about its centre: first in the XY plane, then in the YZ plane.

    `plane_xy` and `plane_yz` are float tensors (4,), the rows of AugmentParams.planes; with (B, 4) the tensor is a
    batch (B, X, Y, Z, C). Linear interpolation for images, the nearest voxel for labels; what comes from outside is
    zero. Two 2D passes of TensorFlow's own kernel, no 3D gather.
    """
    import tensorflow as tf

    whole, plane_xy, plane_yz = tf.shape(volume), tf.reshape(plane_xy, (-1, 4)), tf.reshape(plane_yz, (-1, 4))
    size_x, size_y, size_z, channels = tf.unstack(whole[-4:])
    slabs = tf.reshape(volume, (-1, size_x, size_y, size_z * channels))
    turned = tf.reshape(_transform_plane(slabs, plane_xy, linear), (-1, size_y, size_z, channels))
    return tf.reshape(_transform_plane(turned, tf.repeat(plane_yz, size_x, axis=0), linear), whole)


# --- Private helpers ---


def _inverse(angle_rad: float, zoom_first: float, zoom_second: float) -> Tuple[float, float, float, float]:
    """Rows of the 2x2 matrix from output to input: undo the zoom after the turn."""
    cos, sin = math.cos(angle_rad), math.sin(angle_rad)
    return (cos / zoom_first, sin / zoom_first, -sin / zoom_second, cos / zoom_second)


def _in_voxels(plane: Tuple[float, ...], ratio: float) -> Tuple[float, float, float, float]:
    """A map of offsets in mm as one of voxels, whose size along the second axis is `ratio` times that of the first.

    The ratio is taken to six digits: a header's affine gives 0.9999999 for 1, and 1 changes no bit.
    """
    m00, m01, m10, m11 = plane
    ratio = float(f"{ratio:.6g}")
    return (m00, m01 * ratio, m10 / ratio, m11)


def _transform_plane(images, planes, linear: bool):
    """Apply to every image (N, H, W, C) its own 2x2 inverse map about the centre, `planes` (N, 4)."""
    import tensorflow as tf

    height, width = tf.shape(images)[1], tf.shape(images)[2]
    centre_row, centre_column = (tf.cast(n - 1, tf.float32) / 2 for n in (height, width))
    m00, m01, m10, m11 = tf.unstack(planes, axis=1)
    zero = tf.zeros_like(m00)
    # The kernel's transform maps an output (column, row) to an input one: x' = a0 x + a1 y + a2, y' = b0 x + b1 y + b2.
    to_column = (m11, m10, centre_column - m11 * centre_column - m10 * centre_row)
    to_row = (m01, m00, centre_row - m01 * centre_column - m00 * centre_row)
    return tf.raw_ops.ImageProjectiveTransformV3(
        images=images,
        transforms=tf.stack([*to_column, *to_row, zero, zero], axis=1),
        output_shape=tf.stack([height, width]),
        interpolation="BILINEAR" if linear else "NEAREST",
        fill_mode="CONSTANT",
        fill_value=0.0,
    )
