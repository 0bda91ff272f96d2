"""From stored voxels to what the network is fed: the part of the data path that may run anywhere, as TensorFlow ops.

    finish = Finish(codes=((1, 2, 3), (3,)), dtype="bfloat16")
    image, target = finish(raw)

`raw` holds integers and a few drawn numbers, half the bytes of what it becomes: a GPU is better fed raw, and finishes
within the `tf.function` of its step. On a CPU the dataset does it, in slabs that stay in the cache. Both give the same
bits. Nothing is drawn here: what was drawn comes with `raw`.

raw["bits"]     (..., X, Y, Z, C) int16: the stored values, or where raw["is_half"] is true the bits of float16
raw["label"]    (..., X, Y, Z) uint8, label codes
raw["is_half"]  (...) bool
raw["scale"], raw["shift"]  (..., C) float32: normalisation and drawn intensity in one, value * scale + shift
raw["flips"]    (..., 3) bool: mirror X, Y, Z
raw["planes"]   (..., 2, 4) float32: drawn rotation and scaling, as AugmentParams.planes gives them

`...` is nothing or a batch.
"""

from dataclasses import dataclass
from typing import Any, Dict, Tuple

import numpy as np
import tensorflow as tf

from cpu3d.data.augment import flip, resample
from cpu3d.errors import InputError
from models.config import DTYPES

SLAB_VALUES = 1 << 19
"""Values that are computed at a time on the way: 2 MiB of float32. A whole volume at once took twice as long."""


@dataclass(frozen=True)
class Finish:
    """How raw samples are finished: everything that is the same for all of them."""

    codes: Tuple[Tuple[int, ...], ...]
    """Label codes of each region, in the order of the target's last axis."""
    dtype: str = "float32"
    """Of the image, one of DTYPES. Everything before is computed in float32."""
    resamples: bool = False
    """Whether to rotate and scale by raw["planes"]. It is costly, so it is not done where nothing was drawn."""

    def __post_init__(self):
        if not self.codes or not all(codes and 0 not in codes for codes in self.codes):
            raise ValueError(f"codes must be labels of each region, 0 (background) not among them, got {self.codes}")
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
        label = flip(tf.cast(label, tf.float32), raw["flips"])  # not every operation on uint8 has a GPU's kernel
        inside = [tf.reduce_any([tf.equal(label, code) for code in codes], 0) for codes in self.codes]
        return image, tf.cast(tf.stack(inside, -1), tf.uint8)

    def from_box(self, box: Dict[str, Any]) -> Tuple[tf.Tensor, tf.Tensor]:
        """One sample from a box of its case's arrays: the same as `self(padded(box))`, in a third of the time on a CPU.

        `box` is as a raw sample, but says what of its arrays to take: from box["start"] (3,) on box["size"] (3,) voxels
        of the channels in the tuple box["channels"], with box["padding"] (3, 2) zeros around. No temporary is as large
        as a volume, but where rotation or scaling asks for it.
        """
        if self.resamples:
            return self(padded(box))
        return self._image_in_slabs(box), self._target_by_rows(box)

    def _image_in_slabs(self, box: Dict[str, Any]) -> tf.Tensor:
        """Slabs of a few X planes, each finished before the next is begun, then put together along X."""
        size, padding, flips = box["size"], box["padding"], box["flips"]
        channels = len(box["channels"])
        grid = size + tf.reduce_sum(padding, 1)
        before, after = tf.unstack(tf.where(flips[0], padding[0, ::-1], padding[0]))
        across = tf.concat([[[0, 0]], padding[1:], [[0, 0]]], 0)
        planes = tf.maximum(SLAB_VALUES // (size[1] * size[2] * channels), 1)
        slabs = -(-size[0] // planes)
        scale, shift = (tf.gather(box[name], box["channels"]) for name in ("scale", "shift"))

        def zeros(count):
            return tf.zeros(tf.stack([count, grid[1], grid[2], channels]), self.dtype)

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
        """Only rows along Z with a label in them are looked up: a tumour crosses one in ten."""
        label = flip(tf.pad(_take(box["label"], box["start"], box["size"]), box["padding"]), box["flips"])
        shape = tf.shape(label, tf.int64)
        rows = tf.reshape(label, (shape[0] * shape[1], shape[2]))
        labelled = tf.where(tf.reduce_max(rows, 1) > 0)
        regions_of = np.array([[code in codes for codes in self.codes] for code in range(256)], np.uint8)
        found = tf.gather(regions_of, tf.cast(tf.gather_nd(rows, labelled), tf.int32))
        depth = shape[2] * len(self.codes)
        target = tf.scatter_nd(labelled, tf.reshape(found, (-1, depth)), tf.stack([shape[0] * shape[1], depth]))
        return tf.reshape(target, tf.concat([shape, [len(self.codes)]], 0))


def padded(box: Dict[str, Any]) -> Dict[str, tf.Tensor]:
    """The raw sample of a box: cut out of its case's arrays, and surrounded by zeros."""
    bits = _take(box["bits"], box["start"], box["size"], box["channels"])
    return {
        "bits": tf.pad(bits, tf.concat([box["padding"], [[0, 0]]], 0)),
        "label": tf.pad(_take(box["label"], box["start"], box["size"]), box["padding"]),
        **{name: tf.gather(box[name], box["channels"]) for name in ("scale", "shift")},
        **{name: box[name] for name in ("is_half", "flips", "planes")},
    }


# --- Private helpers ---


def _take(array, start, size, channels=None):
    """A box of (X, Y, Z), or of the picked channels of (X, Y, Z, C). Channels side by side are part of the box."""
    if channels is None:
        return tf.slice(array, start, size)
    low, high = min(channels), max(channels) + 1
    part = tf.slice(array, tf.concat([start, [low]], 0), tf.concat([size, [high - low]], 0))
    if tuple(channels) == tuple(range(low, high)):
        return part
    return tf.gather(part, [channel - low for channel in channels], axis=-1)


def _normalise(bits, is_half, scale, shift):
    """Stored bits (..., X, Y, Z, C) -> float32, background exactly 0.

    Rows of Z * C values are scaled at once: broadcasting four values over the last axis is several times slower.
    """

    def half():
        return tf.cast(tf.bitcast(bits, tf.float16), tf.float32)

    def whole():
        return tf.cast(bits, tf.float32)

    if is_half.shape.rank:
        value = tf.where(is_half[:, None, None, None, None], half(), whole())
    else:
        value = tf.cond(is_half, half, whole)
    shape = tf.shape(bits)
    batch, x, y, z, channels = shape[:-4], *tf.split(shape[-4:], 4)
    rows = tf.reshape(value, tf.concat([batch, x * y, z * channels], 0))
    along_rows = tf.concat([batch, z, channels], 0), tf.concat([batch, [1], z * channels], 0)
    scale, shift = (
        tf.reshape(tf.broadcast_to(one[..., None, :], along_rows[0]), along_rows[1]) for one in (scale, shift)
    )
    return tf.reshape(tf.where(tf.equal(rows, 0), 0.0, rows * scale + shift), shape)
