"""Training at a share of the store's resolution: averaging a volume, and interpolating predictions
back.

Network voxel j of an axis is centred at store voxel (j + 1/2) / resolution - 1/2: n of them cover n
/ resolution store voxels."""

import math
from typing import Optional, Tuple

import numpy as np

from cpu3d.data.region import Array, Shape3, round_up

TIE = 1e-4  # rounding error of a mask's mean: a mean of 1/2 counts as inside


def network_grid(grid: Shape3, resolution: float, divisor: int) -> Shape3:
    """The network's voxels X, Y, Z for an extent of `grid`, rounded up to the network's divisor."""
    return round_up(tuple(max(_ceil(n * resolution), 1) for n in grid), divisor)


def field_of(seen: Shape3, resolution: float, at_least: Shape3 = (1, 1, 1)) -> Shape3:
    """Store voxels X, Y, Z, at least `at_least`, that `seen` network voxels cover in full or in
    part."""
    return tuple(max(_ceil(n / resolution), least) for n, least in zip(seen, at_least))


def shrinking(seen: int, field: int, resolution: float) -> Array:
    """(seen, field) float32: the weights with which one axis of store voxels becomes network
    voxels; rows sum to 1.

    A network voxel is the mean, over 1 / resolution - 1 voxels around its centre, of the linear
    interpolation between store voxels: at 1/2 the mean of two, at 1/3 of three by 1/4, 1/2, 1/4.
    Ramps stay ramps."""

    def integral(at: Array) -> Array:  # of max(1 - |x|, 0) from -infinity to `at`
        at = np.clip(at, -1, 1)
        return 0.5 + at - 0.5 * at * np.abs(at)

    length, voxel = 1 / resolution - 1, np.arange(field)[None, :]
    centre = (np.arange(seen)[:, None] + 0.5) / resolution - 0.5
    weights = integral(centre + length / 2 - voxel) - integral(centre - length / 2 - voxel)
    return (weights / weights.sum(1, keepdims=True)).astype(np.float32)


def growing(field: int, seen: int, resolution: float) -> Array:
    """(field, seen) float32: the weights of linear interpolation, or of the last centre, back to
    store voxels."""
    at = np.clip((np.arange(field)[:, None] + 0.5) * resolution - 0.5, 0, seen - 1)
    return np.maximum(1 - np.abs(at - np.arange(seen)[None, :]), 0).astype(np.float32)


class Resizing:
    """Between the store voxels of a field and the network's fewer voxels, for a resolution below
    1."""

    def __init__(self, seen: Shape3, resolution: float, at_least: Shape3 = (1, 1, 1)):
        self.seen: Shape3 = tuple(seen)  # voxels X, Y, Z of the network's grid
        self.field = field_of(
            seen, resolution, at_least
        )  # voxels X, Y, Z that are to be read from the store
        self._down = [shrinking(m, n, resolution) for n, m in zip(self.field, self.seen)]
        self._up = [growing(n, m, resolution) for n, m in zip(self.field, self.seen)]

    def shrink(self, image):
        """Image (N, X, Y, Z, C) of the field -> (N, x, y, z, C) of the network, same dtype,
        computed in float32."""
        return _along(image, self._down, (1, 2, 3), image.dtype)

    def grow(self, logits):
        """Logits (N, x, y, z, R) of the network -> float32 (N, X, Y, Z, R) of the field."""
        return _along(logits, self._up, (3, 2, 1), "float32")  # Z first, while there is least


def resizing_for(
    grid: Shape3, resolution: float, divisor: int, at_least: Optional[Shape3] = None
) -> Resizing:
    """The resizing of an extent of `grid`, to at least `at_least` network voxels."""
    seen = network_grid(grid, resolution, divisor)
    return Resizing(tuple(map(max, seen, at_least or seen)), resolution, grid)


def _ceil(length: float) -> int:
    """The next whole number, but for a rounding error: 7 for 0.7 * 10."""
    return math.ceil(length - 1e-9)


def _along(volume, matrices, axes: Tuple[int, ...], dtype):
    """(N, X, Y, Z, C) with the matrix (to, from) of X, of Y and of Z applied in float32, in the
    order of `axes`."""
    import tensorflow as tf

    volume = tf.cast(volume, tf.float32)
    for axis in axes:
        matrix, sizes = matrices[axis - 1], volume.shape.as_list()
        if axis == 3:  # all channels at once: products of short rows take ten times as long
            both = np.kron(matrix.T, np.eye(sizes[4], dtype=np.float32))
            volume = tf.reshape(volume, (-1, sizes[3] * sizes[4])) @ both
        else:
            volume = tf.matmul(
                matrix, tf.reshape(volume, (-1, sizes[axis], int(np.prod(sizes[axis + 1 :]))))
            )
        volume = tf.reshape(volume, (-1, *sizes[1:axis], len(matrix), *sizes[axis + 1 :]))
    return tf.cast(volume, dtype)
