"""Smooth random fields and soft edges, of which phantoms are drawn."""

from typing import Any, Iterable

import numpy as np

from cpu3d.data.region import Array, Shape3


class Space:
    """The coordinates of a volume's voxels, from -1 to 1: u to the right, v to the front, w up."""

    def __init__(self, shape: Shape3):
        axes = [((np.arange(n) + 0.5) / n * 2 - 1).astype(np.float32) for n in shape]
        self.u, self.v, self.w = np.ix_(*axes)  # each of length 1 along the others' axes
        self.voxel = 2 / min(shape)  # the longest side of one

    def ball(self, centre: Iterable[float], radii: Iterable[float]) -> Array:
        """Squared distance from `centre` in units of `radii`: below 1 within the ellipsoid."""
        u, v, w = (((x - c) / r) ** 2 for x, c, r in zip((self.u, self.v, self.w), centre, radii))
        return (u + v + w).astype(np.float32)


def smooth_field(rng: np.random.Generator, shape: Shape3, cells: int) -> Array:
    """A smooth random field of about unit spread, float32, with `cells` cubic B-spline cells along
    every axis."""
    values = rng.standard_normal((cells + 3,) * 3, dtype=np.float32)
    for axis in (2, 1, 0):  # the largest step last: along the first axis it moves whole planes
        values = _interpolate(values, axis, shape[axis], cells)
    return values * np.float32(2.6)  # the spline averages: 2.6 restores the spread


def _interpolate(values: Array, axis: int, size: int, cells: int) -> Array:
    """`cells + 3` uniform cubic B-spline coefficients along `axis`, sampled at the middles of
    `size` voxels.

    No matrix product: its rounding changes with the threads.
    """
    position = (np.arange(size) + 0.5) / size * cells
    cell = np.minimum(position.astype(int), cells - 1)
    t = position - cell
    weights = ((1 - t) ** 3, 3 * t**3 - 6 * t**2 + 4, -3 * t**3 + 3 * t**2 + 3 * t + 1, t**3)
    along = [1, 1, 1]
    along[axis] = size
    total: Any = 0
    for offset, weight in enumerate(weights):
        term = values.take(cell + offset, axis)
        term *= (weight / 6).astype(np.float32).reshape(along)
        term += total
        total = term
    return total


def soft(limit: float, values: Array, width: float) -> Array:
    """1 well below `limit`, 0 well above, a linear ramp over `width` on both sides."""
    return np.clip((limit - values) * np.float32(0.5 / width) + np.float32(0.5), 0, 1)
