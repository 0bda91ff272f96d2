"""Training at a share of the store's resolution: what the network sees of a volume, and the way back to the full grid.

Network voxel j of an axis is centred at store voxel (j + 1/2) / resolution - 1/2, so n of them cover n / resolution
store voxels, and nothing drifts along a volume. Seeing averages, so that nothing folds over; answers are interpolated
linearly.
"""

import math
from typing import Optional, Tuple

import numpy as np

from cpu3d.data.region import Shape3, round_up

TIE = 1e-4
"""Rounding that a mean of a mask may be off: one that is a half counts as one on every engine."""


def network_grid(grid: Shape3, resolution: float, divisor: int) -> Shape3:
    """Voxels X, Y, Z in which the network sees an extent of `grid`: all of it, rounded up to the network's divisor."""
    return round_up(tuple(max(_ceil(n * resolution), 1) for n in grid), divisor)


def field_of(seen: Shape3, resolution: float, at_least: Shape3 = (1, 1, 1)) -> Shape3:
    """Store voxels X, Y, Z, `at_least` so many, that `seen` network voxels cover; those covered in part among them."""
    return tuple(max(_ceil(n / resolution), least) for n, least in zip(seen, at_least))


def shrinking(seen: int, field: int, resolution: float) -> np.ndarray:
    """(seen, field) float32: the weights with which one axis of store voxels becomes network voxels; rows sum to 1.

    A network voxel is the mean, over 1 / resolution - 1 voxels around its centre, of the linear interpolation between
    store voxels: at 1/2 of pairs, at 1/3 of three by 1/4, 1/2, 1/4. Ramps stay ramps; area weights shift one at 3/4.
    """
    length = 1 / resolution - 1
    centre = (np.arange(seen)[:, None] + 0.5) / resolution - 0.5
    voxel = np.arange(field)[None, :]
    weights = _hat_integral(centre + length / 2 - voxel) - _hat_integral(centre - length / 2 - voxel)
    return (weights / weights.sum(1, keepdims=True)).astype(np.float32)


def growing(field: int, seen: int, resolution: float) -> np.ndarray:
    """(field, seen) float32: the weights of linear interpolation back to store voxels; rows sum to 1.

    Beyond the centres of the first and the last network voxel their values are kept.
    """
    at = np.clip((np.arange(field)[:, None] + 0.5) * resolution - 0.5, 0, seen - 1)
    return np.maximum(1 - np.abs(at - np.arange(seen)[None, :]), 0).astype(np.float32)


class Resizing:
    """Between the store voxels of a field and the fewer voxels that the network sees of it: a resolution below 1."""

    def __init__(self, seen: Shape3, resolution: float, at_least: Shape3 = (1, 1, 1)):
        self.seen: Shape3 = tuple(seen)
        """Voxels X, Y, Z of the network's grid."""
        self.field = field_of(seen, resolution, at_least)
        """Voxels X, Y, Z that are to be read from the store."""
        self._down = [shrinking(m, n, resolution) for n, m in zip(self.field, self.seen)]
        self._up = [growing(n, m, resolution) for n, m in zip(self.field, self.seen)]

    def shrink(self, image):
        """Image (N, X, Y, Z, C) of the field -> (N, x, y, z, C) of the network, same dtype, computed in float32."""
        return _along(image, self._down, (1, 2, 3), image.dtype)

    def shrink_pair(self, image, target) -> Tuple:
        """`shrink`, and with it a target (N, X, Y, Z, R) uint8 of masks: 1 where half a voxel's mean or more is."""
        import tensorflow as tf

        means = _along(target, self._down, (1, 2, 3), tf.float32)
        return self.shrink(image), tf.cast(means >= 0.5 - TIE, target.dtype)

    def grow(self, logits):
        """Logits (N, x, y, z, R) of the network -> float32 (N, X, Y, Z, R) of the field."""
        return _along(logits, self._up, (3, 2, 1), "float32")  # the axis that is one flat product while there is least


def resizing_for(grid: Shape3, resolution: float, divisor: int, at_least: Optional[Shape3] = None) -> Resizing:
    """The resizing that lets the network see an extent of `grid`, in no fewer network voxels than `at_least`."""
    seen = network_grid(grid, resolution, divisor)
    return Resizing(tuple(map(max, seen, at_least or seen)), resolution, grid)


def _ceil(length: float) -> int:
    """Up to the next whole number, but not for a rounding error: 0.7 * 10 is 7."""
    return math.ceil(length - 1e-9)


def _hat_integral(at: np.ndarray) -> np.ndarray:
    at = np.clip(at, -1, 1)
    return 0.5 + at - 0.5 * at * np.abs(at)  # of max(1 - |x|, 0) from -infinity to `at`


def _along(volume, matrices, axes: Tuple[int, ...], dtype):
    """(N, X, Y, Z, C) with the matrix (to, from) of X, of Y and of Z applied in float32, in the order of `axes`."""
    import tensorflow as tf

    volume = tf.cast(volume, tf.float32)
    for axis in axes:
        matrix, sizes = matrices[axis - 1], volume.shape.as_list()
        if axis == 3:  # with the channels at once: products of rows as short as they would take ten times as long
            both = np.kron(matrix.T, np.eye(sizes[4], dtype=np.float32))
            volume = tf.reshape(volume, (-1, sizes[3] * sizes[4])) @ both
        else:
            volume = tf.matmul(matrix, tf.reshape(volume, (-1, sizes[axis], int(np.prod(sizes[axis + 1 :])))))
        volume = tf.reshape(volume, (-1, *sizes[1:axis], len(matrix), *sizes[axis + 1 :]))
    return tf.cast(volume, dtype)
