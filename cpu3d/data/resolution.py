"""Trains at half the store's resolution: averages a volume down, and interpolates predictions back.

Network voxel j of an axis is centred at store voxel 2 j + 1/2: n of them cover 2 n store voxels. An
axis of resolution 1 keeps its voxels."""

import math
from typing import Any, Sequence

import numpy as np

from cpu3d.data.region import Array, Resolution, Shape3, by_axis, xyz

TIE = 1e-4  # rounding error of a mask's mean: a mean of 1/2 counts as inside


def field_of(seen: Shape3, resolution: Resolution) -> Shape3:
    """Return the store voxels X, Y, Z that `seen` network voxels cover."""
    return xyz(int(side / share) for side, share in zip(seen, by_axis(resolution)))


def shrinking(seen: int, field: int, resolution: float) -> Array:
    """Return the weights (seen, field) float32 by which one axis of store voxels becomes network
    voxels: at 1/2 each is the mean of two, at 1 a store voxel itself."""
    if resolution == 1:
        return np.eye(seen, field, dtype=np.float32)
    pairs = np.arange(field) // 2 == np.arange(seen)[:, None]
    return pairs.astype(np.float32) / 2


def growing(field: int, seen: int, resolution: float) -> Array:
    """(field, seen) float32: the weights of linear interpolation, or of the last centre, back to
    store voxels."""
    position = np.clip((np.arange(field)[:, None] + 0.5) * resolution - 0.5, 0, seen - 1)
    return np.maximum(1 - np.abs(position - np.arange(seen)[None, :]), 0).astype(np.float32)


class Resizing:
    """Between the store voxels of a field and the network's fewer voxels, for a resolution of 1/2
    along some axis.

    `seen` are the voxels X, Y, Z of the network's grid, `field` those that are to be read from the
    store."""

    def __init__(self, seen: Shape3, resolution: Resolution):
        self._down = []
        self._up = []
        field = field_of(seen, resolution)
        for few, many, share in zip(seen, field, by_axis(resolution)):
            self._down.append(shrinking(few, many, share))
            self._up.append(growing(many, few, share))

    def shrink(self, image: Any) -> Any:
        """Image (N, X, Y, Z, C) of the field -> (N, x, y, z, C) of the network, same dtype,
        computed in float32."""
        return _along(image, self._down, (1, 2, 3), image.dtype)

    def grow(self, logits: Any) -> Any:
        """Logits (N, x, y, z, R) of the network -> float32 (N, X, Y, Z, R) of the field."""
        return _along(logits, self._up, (3, 2, 1), "float32")  # Z first, while there is least


def _along(volume: Any, matrices: Sequence[Array], axes: Sequence[int], dtype: Any) -> Any:
    """(N, X, Y, Z, C) with the matrix (to, from) of X, of Y and of Z applied in float32, in the
    order of `axes`."""
    import tensorflow as tf

    volume = tf.cast(volume, tf.float32)
    for axis in axes:
        matrix = matrices[axis - 1]
        sizes = volume.shape.as_list()
        if len(matrix) == sizes[axis]:  # an axis that keeps its voxels
            continue
        behind = sizes[axis + 1 :]
        if axis == 3:  # all channels at once: products of short rows take ten times as long
            both = np.kron(matrix.T, np.eye(sizes[4], dtype=np.float32))
            volume = tf.reshape(volume, (-1, sizes[3] * sizes[4])) @ both
        else:
            rows = tf.reshape(volume, (-1, sizes[axis], math.prod(behind)))
            volume = tf.matmul(matrix, rows)
        volume = tf.reshape(volume, (-1, *sizes[1:axis], len(matrix), *behind))
    return tf.cast(volume, dtype)
