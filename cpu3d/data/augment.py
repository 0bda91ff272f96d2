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
"""Name -> dtype and shape of what `draw` gives and `Finish` applies."""


def draw(
    config: AugmentConfig,
    *,
    seed: int,
    position: int,
    scale: np.ndarray,
    shift: np.ndarray,
    spacing_mm: Sequence[float],
) -> Dict[str, np.ndarray]:
    """The arrays of `DRAWN` for the sample at `position`: the same numbers on every machine.

    scale, shift (C,): what normalises the case's channels, into which the drawn intensity is folded. flips (3,): mirror
    X, Y, Z. planes (2, 4): inverse maps (m00, m01, m10, m11), output offset -> input offset in voxels of `spacing_mm`,
    of the turn about Z with the zoom of X and Y, and of the turn about X with the zoom of Z.
    """
    units = random_units(seed, position, 0x61756721)

    def within(limit: float) -> float:
        return (2 * next(units) - 1) * limit

    # Every number is drawn whether it is used or not, so that one option does not shift the others' streams.
    flips = [next(units) < 0.5 and config.flip for _ in range(3)]
    about_z, about_x = (math.radians(within(config.rotation_deg)) for _ in range(2))
    zoom_xy, zoom_z = (1 + within(config.scaling) for _ in range(2))
    gain = [1 + within(config.gain) for _ in scale]
    offset = [within(config.offset) for _ in scale]
    size_x, size_y, size_z = spacing_mm
    plane_xy = _inverse_map(about_z, (zoom_xy, zoom_xy), size_y / size_x)
    plane_yz = _inverse_map(about_x, (1.0, zoom_z), size_z / size_y)
    return {
        "scale": np.float32(scale * gain),
        "shift": np.float32(shift * gain + offset),
        "flips": np.array(flips),
        "planes": np.float32([plane_xy, plane_yz]),
    }


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

    `plane_xy` and `plane_yz` are float tensors (4,), the rows of `planes`; with (B, 4) the tensor is a batch
    (B, X, Y, Z, C). Linear interpolation for images, the nearest voxel for labels; what comes from outside is
    zero. Two 2D passes of TensorFlow's own kernel, no 3D gather.
    """
    import tensorflow as tf

    whole, plane_xy, plane_yz = tf.shape(volume), tf.reshape(plane_xy, (-1, 4)), tf.reshape(plane_yz, (-1, 4))
    size_x, size_y, size_z, channels = tf.unstack(whole[-4:])
    slabs = tf.reshape(volume, (-1, size_x, size_y, size_z * channels))
    turned = tf.reshape(_transform_plane(slabs, plane_xy, linear), (-1, size_y, size_z, channels))
    return tf.reshape(_transform_plane(turned, tf.repeat(plane_yz, size_x, axis=0), linear), whole)


# --- Private helpers ---


def _inverse_map(angle_rad: float, zoom: Tuple[float, float], ratio: float) -> Tuple[float, ...]:
    """Rows of the 2x2 matrix from output to input that undoes a zoom after a turn, both in mm, as one of voxels.

    Their size along the second axis is `ratio` times that along the first. It is taken to six digits: a header's affine
    gives 0.9999999 for 1, and 1 changes no bit.
    """
    cos, sin, ratio = math.cos(angle_rad), math.sin(angle_rad), float(f"{ratio:.6g}")
    return (cos / zoom[0], sin / zoom[0] * ratio, -sin / zoom[1] / ratio, cos / zoom[1])


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
