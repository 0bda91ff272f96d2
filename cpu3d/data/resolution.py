"""Training at a share of the store's resolution: averaging a volume, and interpolating predictions
back.

Network voxel j of an axis is centred at store voxel (j + 1/2) / resolution - 1/2: n of them cover n
/ resolution store voxels."""

import math
from typing import Any, Optional, Sequence

import numpy as np

from cpu3d.data.region import Array, Multiple, Shape3, round_up, xyz

TIE = 1e-4  # rounding error of a mask's mean: a mean of 1/2 counts as inside


def network_grid(grid: Shape3, resolution: float, divisors: Multiple) -> Shape3:
    """The network's voxels X, Y, Z for an extent of `grid`, rounded up to the network's
    divisors."""
    return round_up(xyz(max(_ceil(n * resolution), 1) for n in grid), divisors)


def field_of(seen: Shape3, resolution: float, at_least: Shape3 = (1, 1, 1)) -> Shape3:
    """Store voxels X, Y, Z, at least `at_least`, that `seen` network voxels cover wholly or
    partly."""
    return xyz(max(_ceil(n / resolution), least) for n, least in zip(seen, at_least))


def shrinking(seen: int, field: int, resolution: float) -> Array:
    """(seen, field) float32: the weights with which one axis of store voxels becomes network
    voxels; rows sum to 1.

    A network voxel is the mean, over 1 / resolution - 1 voxels around its centre, of the linear
    interpolation between store voxels: at 1/2 the mean of two, at 1/3 of three by 1/4, 1/2, 1/4.
    Ramps stay ramps."""

    def integral(stop: Array) -> Array:  # of max(1 - |x|, 0) from -infinity to `stop`
        stop = np.clip(stop, -1, 1)
        return 0.5 + stop - 0.5 * stop * np.abs(stop)

    length = 1 / resolution - 1
    voxel = np.arange(field)[None, :]
    centre = (np.arange(seen)[:, None] + 0.5) / resolution - 0.5
    weights = integral(centre + length / 2 - voxel) - integral(centre - length / 2 - voxel)
    return (weights / weights.sum(1, keepdims=True)).astype(np.float32)


def growing(field: int, seen: int, resolution: float) -> Array:
    """(field, seen) float32: the weights of linear interpolation, or of the last centre, back to
    store voxels."""
    place = np.clip((np.arange(field)[:, None] + 0.5) * resolution - 0.5, 0, seen - 1)
    return np.maximum(1 - np.abs(place - np.arange(seen)[None, :]), 0).astype(np.float32)


class Resizing:
    """Between the store voxels of a field and the network's fewer voxels, for a resolution below
    1.

    `seen` are the voxels X, Y, Z of the network's grid, `field` those that are to be read from the
    store."""

    def __init__(self, seen: Shape3, resolution: float, at_least: Shape3 = (1, 1, 1)):
        self.seen = xyz(seen)
        self.field = field_of(seen, resolution, at_least)
        self._down = [shrinking(n, m, resolution) for n, m in zip(self.seen, self.field)]
        self._up = [growing(m, n, resolution) for n, m in zip(self.seen, self.field)]

    def shrink(self, image: Any) -> Any:
        """Image (N, X, Y, Z, C) of the field -> (N, x, y, z, C) of the network, same dtype,
        computed in float32."""
        return _along(image, self._down, (1, 2, 3), image.dtype)

    def grow(self, logits: Any) -> Any:
        """Logits (N, x, y, z, R) of the network -> float32 (N, X, Y, Z, R) of the field."""
        return _along(logits, self._up, (3, 2, 1), "float32")  # Z first, while there is least


def resizing_for(
    grid: Shape3, resolution: float, divisors: Multiple, at_least: Optional[Shape3] = None
) -> Resizing:
    """The resizing of an extent of `grid`, to at least `at_least` network voxels."""
    seen = network_grid(grid, resolution, divisors)
    if at_least is not None:
        seen = xyz(map(max, seen, at_least))
    return Resizing(seen, resolution, grid)


def _ceil(length: float) -> int:
    """The next whole number, but for a rounding error: 7 for 0.7 * 10."""
    return math.ceil(length - 1e-9)


def _along(volume: Any, matrices: Sequence[Array], axes: Sequence[int], dtype: Any) -> Any:
    """(N, X, Y, Z, C) with the matrix (to, from) of X, of Y and of Z applied in float32, in the
    order of `axes`."""
    import tensorflow as tf

    volume = tf.cast(volume, tf.float32)
    for axis in axes:
        matrix = matrices[axis - 1]
        sizes = volume.shape.as_list()
        behind = sizes[axis + 1 :]
        if axis == 3:  # all channels at once: products of short rows take ten times as long
            both = np.kron(matrix.T, np.eye(sizes[4], dtype=np.float32))
            volume = tf.reshape(volume, (-1, sizes[3] * sizes[4])) @ both
        else:
            rows = tf.reshape(volume, (-1, sizes[axis], math.prod(behind)))
            volume = tf.matmul(matrix, rows)
        volume = tf.reshape(volume, (-1, *sizes[1:axis], len(matrix), *behind))
    return tf.cast(volume, dtype)
