"""Boxes in a volume: cropping, padding and the way back."""

import math
import numbers
from dataclasses import dataclass
from typing import Any, Iterable, Optional, Sequence, Tuple, TypeVar, Union, cast

import numpy as np
from numpy.typing import NDArray

from cpu3d.errors import raise_if_any

T = TypeVar("T")
Shape3 = Tuple[int, int, int]
Multiple = Union[int, Shape3]  # of all sides, or of X, Y and Z each
Array = NDArray[Any]  # docstrings say its shape and dtype

# What of a case the network gets: its content box, "brain", or its whole grid.
EXTENTS = ("brain", "full")
NO_GRID = (0, 0, 0)


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
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        return False
    return int(value) >= at_least


def xyz(values: Iterable[T]) -> Tuple[T, T, T]:
    """Three values, along X, Y and Z, as a tuple; ValueError for more or fewer."""
    x, y, z = values
    return x, y, z


def by_axis(value: Any) -> Tuple[Any, Any, Any]:
    """Three numbers along X, Y and Z as a tuple, or the one that all axes have three times."""
    if isinstance(value, numbers.Real):
        return (value, value, value)
    return cast(Tuple[Any, Any, Any], tuple(value))


@dataclass(frozen=True)
class Region:
    """A box of voxels along X, Y, Z. Voxels outside the volume are zero."""

    start: Shape3
    size: Shape3

    @property
    def stop(self) -> Shape3:
        """One past the last voxel along X, Y, Z."""
        return xyz(start + size for start, size in zip(self.start, self.size))

    def slices(self, shape: Shape3) -> Tuple[slice, slice, slice]:
        """What of this box is inside a volume of `shape`."""

        def clipped(start: int, stop: int, limit: int) -> slice:
            return slice(min(max(start, 0), limit), min(max(stop, 0), limit))

        return xyz(map(clipped, self.start, self.stop, shape))

    def padding(self, shape: Shape3) -> Tuple[Tuple[int, int], ...]:
        """Zeros to add before and after `slices(shape)` along each axis to fill this box."""
        pairs = []
        for inside, start, stop in zip(self.slices(shape), self.start, self.stop):
            if inside.stop > inside.start:
                pairs.append((inside.start - start, stop - inside.stop))
            else:  # nothing of the volume
                pairs.append((0, stop - start))
        return tuple(pairs)

    def overlap(self, other: "Region") -> Optional["Region"]:
        """The common box of this and another; None if they do not meet."""
        start = xyz(map(max, self.start, other.start))
        stop = xyz(map(min, self.stop, other.stop))
        size = xyz(b - a for a, b in zip(start, stop))
        return Region(start, size) if min(size) > 0 else None

    def union(self, other: "Region") -> "Region":
        """The smallest box that holds this and another."""
        start = xyz(map(min, self.start, other.start))
        stop = xyz(map(max, self.stop, other.stop))
        return Region(start, xyz(b - a for a, b in zip(start, stop)))


def round_up(shape: Shape3, multiple: Multiple) -> Shape3:
    """The smallest shape that holds `shape` and is divisible by `multiple`."""
    return xyz(-(-side // each) * each for side, each in zip(shape, by_axis(multiple)))


def centred(inner: Region, size: Shape3, shape: Shape3) -> Region:
    """A region of `size` around the middle of `inner`, kept inside a volume of `shape` if it fits.

    Along an axis where `size` exceeds the volume, the volume is centred in the region and padded on
    both sides."""

    def start_of(inner_start: int, inner_size: int, wanted: int, limit: int) -> int:
        if wanted >= limit:
            return -((wanted - limit) // 2)
        start = inner_start - (wanted - inner_size) // 2
        return min(max(start, 0), limit - wanted)

    return Region(xyz(map(start_of, inner.start, inner.size, size, shape)), xyz(size))


def whole(shape: Sequence[int]) -> Region:
    """The whole volume."""
    return Region((0, 0, 0), xyz(shape))


def bounding_box(mask: Array) -> Region:
    """The smallest region that holds every true voxel of a 3D `mask`. An empty mask gives the whole
    volume."""
    hits = [np.flatnonzero(mask.any(axis=axes)) for axes in ((1, 2), (0, 2), (0, 1))]
    if not hits[0].size:
        return whole(mask.shape)
    start = xyz(int(hit[0]) for hit in hits)
    size = xyz(int(hit[-1] - hit[0] + 1) for hit in hits)
    return Region(start, size)


def crop(volume: Array, region: Region) -> Array:
    """Cut `region` out of a volume `(X, Y, Z, ...)`; voxels outside it are zero. A view if nothing
    is padded."""
    shape = xyz(volume.shape[:3])
    padding = region.padding(shape)
    cut = volume[region.slices(shape)]
    if not any(map(any, padding)):
        return cut
    return np.pad(cut, [*padding, *[(0, 0)] * (volume.ndim - 3)])


def paste(box: Array, region: Region, shape: Shape3, around: Sequence[float] = ()) -> Array:
    """The way back from `crop`: a zero volume of `shape`, or one of values `around` along the last
    axis, with the voxels of a box in its place; padding is dropped."""
    full = np.zeros(xyz(shape) + box.shape[3:], box.dtype)
    if around:
        full[...] = around
    inside = xyz(
        slice(before, size - after)
        for (before, after), size in zip(region.padding(shape), region.size)
    )
    full[region.slices(shape)] = box[inside]
    return full
