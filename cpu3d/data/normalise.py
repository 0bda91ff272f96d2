"""Normalises stored voxels to z-scores over the brain, and applies the drawn augmentation: the network's input.

A raw sample holds integers and a few drawn numbers, half the bytes of the result. TensorFlow ops finish it: on a GPU
within the `tf.function` of its step, on a CPU in the dataset, in slabs that stay in the cache, to the same bits.

raw["bits"]     (..., X, Y, Z, C) int16, `...` nothing or a batch: stored values; with raw["is_half"] bits of float16
raw["label"]    (..., X, Y, Z) uint8, label codes
raw["is_half"]  (...) bool
raw["scale"], raw["shift"]  (..., C) float32: normalisation and drawn intensity in one, value * scale + shift
raw["flips"]    (..., 3) bool: mirror X, Y, Z
raw["planes"]   (..., 2, 4) float32: drawn rotation and scaling, as `draw` gives them
"""

from dataclasses import dataclass
from typing import Any, Dict, Tuple

import numpy as np
import tensorflow as tf

from cpu3d.data.records import CaseRecord
from cpu3d.data.region import Region, crop
from cpu3d.errors import InputError
from models.config import DTYPES

SLAB_VALUES = 1 << 19  # computed at a time: 2 MiB of float32. A whole volume at once took twice as long.


def normalisation(record: CaseRecord) -> Tuple[np.ndarray, np.ndarray]:
    """(scale, shift), float64, so that scale * value + shift has mean 0 and standard deviation 1 over the brain."""
    scale = 1 / np.array(record.channel_std)
    return scale, -np.array(record.channel_mean) * scale


def normalise(image: np.ndarray, record: CaseRecord, region: Region) -> np.ndarray:
    """A `region` of an image (X, Y, Z, C) as float32, normalised as the graph does it; for prediction."""
    scale, shift = normalisation(record)
    part = crop(image, region)
    return np.where(part == 0, np.float32(0), part.astype(np.float32) * np.float32(scale) + np.float32(shift))


@dataclass(frozen=True)
class Finish:
    """Finishes raw samples by settings that are the same for all of them."""

    codes: Tuple[Tuple[int, ...], ...]  # label codes of each region, in the order of the target's last axis
    dtype: str = "float32"  # of the image; it is computed in float32
    resamples: bool = False  # whether to rotate and scale by raw["planes"], which is costly

    def __post_init__(self):
        if self.dtype not in DTYPES:
            raise InputError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}; pick one")

    def __call__(self, raw: Dict[str, tf.Tensor]) -> Tuple[tf.Tensor, tf.Tensor]:
        """One sample, or a batch, all at once: image (..., X, Y, Z, C) in `dtype`, target (..., X, Y, Z, R) uint8."""
        image, label = _normalise(raw["bits"], raw["is_half"], raw["scale"], raw["shift"]), raw["label"]
        if self.resamples:
            planes = tf.unstack(raw["planes"], axis=-2)
            image = resample(image, *planes, linear=True)
            label = resample(label[..., None], *planes, linear=False)[..., 0]
        image = flip(tf.cast(image, self.dtype), raw["flips"])
        label = flip(tf.cast(label, tf.float32), raw["flips"])  # some operations on uint8 have no GPU kernel
        inside = [tf.reduce_any([tf.equal(label, code) for code in codes], 0) for codes in self.codes]
        return image, tf.cast(tf.stack(inside, -1), tf.uint8)

    def from_box(self, box: Dict[str, Any]) -> Tuple[tf.Tensor, tf.Tensor]:
        """One sample from a box of its case's arrays: the bits of `self(padded(box))` in a third of the time on a CPU.

        `box` is a raw sample with the part of its arrays to take: from box["start"] (3,) on box["size"] (3,) voxels of
        the channels in the tuple box["channels"], with box["padding"] (3, 2) zeros around.
        """
        if self.resamples:
            return self(padded(box))
        return self._image_in_slabs(box), self._target_by_rows(box)

    def _image_in_slabs(self, box: Dict[str, Any]) -> tf.Tensor:
        """Slabs of a few X planes, finished one after another and put together along X."""
        size, padding, flips, channels = box["size"], box["padding"], box["flips"], len(box["channels"])
        before, after = tf.unstack(tf.where(flips[0], padding[0, ::-1], padding[0]))
        across = tf.concat([[[0, 0]], padding[1:], [[0, 0]]], 0)
        planes = tf.maximum(SLAB_VALUES // (size[1] * size[2] * channels), 1)
        slabs = -(-size[0] // planes)
        scale, shift = (tf.gather(box[name], box["channels"]) for name in ("scale", "shift"))

        def zeros(count):
            return tf.zeros(tf.concat([[count], size[1:] + tf.reduce_sum(padding[1:], 1), [channels]], 0), self.dtype)

        def add(index, parts):
            first = index * planes
            count = tf.minimum(planes, size[0] - first)
            first = tf.where(flips[0], size[0] - first - count, first)  # a mirrored X axis is taken from its end
            start = tf.concat([box["start"][:1] + first, box["start"][1:]], 0)
            bits = _take(box["bits"], start, tf.concat([[count], size[1:]], 0), box["channels"])
            image = tf.cast(_normalise(bits, box["is_half"], scale, shift), self.dtype)
            return index + 1, parts.write(tf.cast(index, tf.int32) + 1, flip(tf.pad(image, across), flips))

        count = tf.cast(slabs, tf.int32)
        parts = tf.TensorArray(self.dtype, count + 2, infer_shape=False, element_shape=(None, None, None, channels))
        begin = (tf.constant(0, tf.int64), parts.write(0, zeros(before)))
        _, parts = tf.while_loop(lambda index, _: index < slabs, add, begin, parallel_iterations=1)
        return parts.write(count + 1, zeros(after)).concat()

    def _target_by_rows(self, box: Dict[str, Any]) -> tf.Tensor:
        """The target, looked up in the rows along Z that have a label: a tumour crosses one in ten."""
        label = flip(tf.pad(tf.slice(box["label"], box["start"], box["size"]), box["padding"]), box["flips"])
        shape = tf.shape(label, tf.int64)
        rows = tf.reshape(label, (shape[0] * shape[1], shape[2]))
        labelled = tf.where(tf.reduce_max(rows, 1) > 0)
        regions_of = np.array([[code in codes for codes in self.codes] for code in range(256)], np.uint8)
        inside = tf.gather(regions_of, tf.cast(tf.gather_nd(rows, labelled), tf.int32))
        depth = shape[2] * len(self.codes)
        target = tf.scatter_nd(labelled, tf.reshape(inside, (-1, depth)), tf.stack([shape[0] * shape[1], depth]))
        return tf.reshape(target, tf.concat([shape, [len(self.codes)]], 0))


def padded(box: Dict[str, Any]) -> Dict[str, tf.Tensor]:
    """The raw sample of a box: cut out of its case's arrays, and surrounded by zeros."""
    bits = _take(box["bits"], box["start"], box["size"], box["channels"])
    return {
        "bits": tf.pad(bits, tf.concat([box["padding"], [[0, 0]]], 0)),
        "label": tf.pad(tf.slice(box["label"], box["start"], box["size"]), box["padding"]),
        **{name: tf.gather(box[name], box["channels"]) for name in ("scale", "shift")},
        **{name: box[name] for name in ("is_half", "flips", "planes")},
    }


def _take(array, start, size, channels):
    """A box of the picked channels of (X, Y, Z, C). Channels side by side are part of the box."""
    low, high = min(channels), max(channels) + 1
    part = tf.slice(array, tf.concat([start, [low]], 0), tf.concat([size, [high - low]], 0))
    side_by_side = tuple(channels) == tuple(range(low, high))
    return part if side_by_side else tf.gather(part, [channel - low for channel in channels], axis=-1)


def _normalise(bits, is_half, scale, shift):
    """Stored bits (..., X, Y, Z, C) -> float32, background exactly 0.

    Rows of Z * C values are scaled at once: broadcasting four values over the last axis is several times slower.
    """

    both = (lambda: tf.cast(tf.bitcast(bits, tf.float16), tf.float32), lambda: tf.cast(bits, tf.float32))
    if is_half.shape.rank:
        value = tf.where(is_half[:, None, None, None, None], both[0](), both[1]())
    else:
        value = tf.cond(is_half, *both)
    shape = tf.shape(bits)
    batch, x, y, z, channels = shape[:-4], *tf.split(shape[-4:], 4)
    rows = tf.reshape(value, tf.concat([batch, x * y, z * channels], 0))
    along, one_row = tf.concat([batch, z, channels], 0), tf.concat([batch, [1], z * channels], 0)
    scale, shift = (tf.reshape(tf.broadcast_to(line[..., None, :], along), one_row) for line in (scale, shift))
    return tf.reshape(tf.where(tf.equal(rows, 0), 0.0, rows * scale + shift), shape)


def flip(volume, flips):
    """Mirror a tensor (X, Y, Z, ...) along the axes for which the boolean `flips` (3,) is true, or with (B, 3) each
    sample of a batch (B, X, Y, Z, ...) by its row."""
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
    (B, X, Y, Z, C). Linear interpolation for images, the nearest voxel for labels; outside is zero.
    """
    whole, plane_xy, plane_yz = tf.shape(volume), tf.reshape(plane_xy, (-1, 4)), tf.reshape(plane_yz, (-1, 4))
    size_x, size_y, size_z, channels = tf.unstack(whole[-4:])
    slabs = tf.reshape(volume, (-1, size_x, size_y, size_z * channels))
    turned = tf.reshape(_transform_plane(slabs, plane_xy, linear), (-1, size_y, size_z, channels))
    return tf.reshape(_transform_plane(turned, tf.repeat(plane_yz, size_x, axis=0), linear), whole)


def _transform_plane(images, planes, linear: bool):
    """Apply to every image (N, H, W, C) its own 2x2 inverse map about the centre, `planes` (N, 4)."""
    size = tf.shape(images)[1:3]
    row, column = tf.unstack(tf.cast(size - 1, tf.float32) / 2)
    m00, m01, m10, m11 = tf.unstack(planes, axis=1)
    # The kernel's transform maps an output (column, row) to an input one: x' = a0 x + a1 y + a2, y' = b0 x + b1 y + b2.
    to_column, to_row = (m11, m10, column - m11 * column - m10 * row), (m01, m00, row - m01 * column - m00 * row)
    return tf.raw_ops.ImageProjectiveTransformV3(
        images=images,
        transforms=tf.stack([*to_column, *to_row, tf.zeros_like(m00), tf.zeros_like(m00)], axis=1),
        output_shape=size,
        interpolation="BILINEAR" if linear else "NEAREST",
        fill_mode="CONSTANT",
        fill_value=0.0,
    )
