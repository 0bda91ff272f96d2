"""Boxes in a volume: cropping, padding and the way back."""

import math
import numbers
from dataclasses import dataclass
from typing import Any, Optional, Tuple

import numpy as np
from numpy.typing import NDArray

from cpu3d.errors import raise_if_any

Shape3 = Tuple[int, int, int]
Array = NDArray[Any]  # docstrings say its shape and dtype

EXTENTS = (
    "brain",
    "full",
)  # the part of a case that the network gets: its brain's box or its whole grid


def require(*rules: Tuple[str, str, Any, bool]) -> None:
    """Raise one InputError with a line for every (name, rule, value, whether it holds) that does
    not hold."""
    raise_if_any(
        f"{name} must be {rule}, got {value!r}; give another"
        for name, rule, value, holds in rules
        if not holds
    )


def is_integer(value: Any, at_least: float = -math.inf) -> bool:
    """Whether a value, which may be NumPy's, is a whole number and no bool."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and value >= at_least


@dataclass(frozen=True)
class Region:
    """A box of voxels along X, Y, Z. Voxels outside the volume are zero."""

    start: Shape3
    size: Shape3

    def __post_init__(self):
        if len(self.start) != 3 or len(self.size) != 3 or min(self.size) < 1:
            raise ValueError(
                f"Region size must be three positive numbers, got start={self.start}, size={self.size}"
            )

    @property
    def stop(self) -> Shape3:
        """One past the last voxel along X, Y, Z."""
        return tuple(a + n for a, n in zip(self.start, self.size))

    def slices(self, shape: Shape3) -> Tuple[slice, slice, slice]:
        """The part of this box that is inside a volume of `shape`."""
        ends = zip(self.start, self.stop, shape)
        return tuple(slice(min(max(a, 0), limit), min(max(b, 0), limit)) for a, b, limit in ends)

    def padding(self, shape: Shape3) -> Tuple[Tuple[int, int], ...]:
        """Zeros to add before and after `slices(shape)` along each axis to fill this box."""
        ends = zip(self.slices(shape), self.start, self.stop)
        return tuple(
            (p.start - a, b - p.stop) if p.stop > p.start else (0, b - a) for p, a, b in ends
        )

    def overlap(self, other: "Region") -> Optional["Region"]:
        """The common box of this and another; None if they do not meet."""
        start = tuple(map(max, self.start, other.start))
        size = tuple(b - a for a, b in zip(start, map(min, self.stop, other.stop)))
        return Region(start, size) if min(size) > 0 else None


def round_up(shape: Shape3, multiple: int) -> Shape3:
    """The smallest shape that holds `shape` and is divisible by `multiple` along every axis."""
    return tuple(-(-n // multiple) * multiple for n in shape)


def centred(inner: Region, size: Shape3, shape: Shape3) -> Region:
    """A region of `size` around the middle of `inner`, kept inside a volume of `shape` if it fits.

    Along an axis where `size` exceeds the volume, the volume is centred in the region and padded on
    both sides."""
    start = tuple(
        -((want - limit) // 2) if want >= limit else min(max(a - (want - n) // 2, 0), limit - want)
        for a, n, want, limit in zip(inner.start, inner.size, size, shape)
    )
    return Region(start, tuple(size))


def whole(shape: Shape3) -> Region:
    """The whole volume."""
    return Region((0, 0, 0), tuple(shape))


def bounding_box(mask: Array) -> Region:
    """The smallest region that holds every true voxel of a 3D `mask`. An empty mask gives the whole
    volume."""
    hits = [np.flatnonzero(mask.any(axis=axes)) for axes in ((1, 2), (0, 2), (0, 1))]
    if not hits[0].size:
        return whole(mask.shape)
    return Region(
        tuple(int(hit[0]) for hit in hits), tuple(int(hit[-1] - hit[0] + 1) for hit in hits)
    )


def crop(volume: Array, region: Region) -> Array:
    """Cut `region` out of a volume `(X, Y, Z, ...)`; voxels outside it are zero. A view if nothing
    is padded."""
    padding = region.padding(volume.shape[:3])
    part = volume[region.slices(volume.shape[:3])]
    if not any(map(any, padding)):
        return part
    return np.pad(part, [*padding, *[(0, 0)] * (volume.ndim - 3)])


def paste(part: Array, region: Region, shape: Shape3) -> Array:
    """The way back from `crop`: a zero volume of `shape` with `part` in its place; padding is
    dropped."""
    full = np.zeros(tuple(shape) + part.shape[3:], part.dtype)
    inside = tuple(
        slice(before, n - after) for (before, after), n in zip(region.padding(shape), region.size)
    )
    full[region.slices(shape)] = part[inside]
    return full
