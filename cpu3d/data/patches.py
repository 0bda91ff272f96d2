"""Which patch of which case comes at a position: random, around foreground, of a grid, in the middle. No TensorFlow.

Like the order of whole volumes it is a pure function of (seed, position), so a patch run restarts anywhere, and whoever
uses a patch dataset, to blend a sliding window say, knows the case and the place of everything that comes.
"""

import itertools
import math
import numbers
from dataclasses import dataclass
from functools import cached_property
from typing import Sequence, Tuple

from cpu3d.data.extent import EXTENTS, case_region
from cpu3d.data.records import CaseRecord
from cpu3d.data.region import Region, Shape3, centred, whole
from cpu3d.data.sampling import random_units, sample_at
from cpu3d.errors import InputError

SAMPLINGS = ("random", "foreground", "grid", "centre")

OVERLAP = 0.5
"""Of the patches of a grid, and of the windows that a network slides, where nothing else is asked for: nnU-Net's."""


@dataclass(frozen=True)
class PatchSampling:
    """How patches are drawn from cases."""

    shape: Shape3
    """Voxels X, Y, Z of a patch."""
    sampling: str = "random"
    """ "random": anywhere in the case's extent. "foreground": a share of them around labelled voxels, the others
    random. "grid": one after another until the extent is covered. "centre": the one around the extent's middle."""
    foreground: float = 1 / 3
    """Share of patches around labelled voxels with "foreground", 0 to 1. A third is what nnU-Net and MONAI's examples
    come to."""
    codes: Tuple[Tuple[int, ...], ...] = ()
    """Label codes of each region to be found with "foreground"."""
    overlap: float = OVERLAP
    """With "grid": least share of a patch that the next one along an axis covers again, 0 or more and below 1."""
    extent: str = "brain"
    """What patches are taken from: the brain's box or the whole grid of a case."""
    grid: Shape3 = (1, 1, 1)
    """With "grid": the common size of all cases' extents, so that each has equally many patches."""
    seed: int = 0
    shuffle: bool = True
    """Whether cases come in another order every epoch. The patches of a grid stay together and in order."""

    def __post_init__(self):
        problems = []
        for name, allowed in (("sampling", SAMPLINGS), ("extent", EXTENTS)):
            if getattr(self, name) not in allowed:
                problems.append(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}; pick one")
        if len(self.shape) != 3 or not all(isinstance(n, numbers.Integral) and n >= 1 for n in self.shape):
            problems.append(f"patch_shape must be three positive integers, got {self.shape}; give voxels X, Y, Z")
        if not 0 <= self.foreground <= 1:
            problems.append(f"foreground must be in [0, 1], got {self.foreground}; it is a share of the patches")
        if not 0 <= self.overlap < 1:
            problems.append(f"overlap must be in [0, 1), got {self.overlap}; it is a share of a patch")
        if problems:
            raise InputError(*problems)

    @cached_property
    def per_case(self) -> int:
        """Patches of a case in one epoch: 1, or as many as cover the grid."""
        if self.sampling != "grid":
            return 1
        return math.prod(map(len, grid_starts(self.grid, self.shape, self.overlap)))


@dataclass(frozen=True)
class PatchSample:
    """What is drawn at one position of the run."""

    position: int
    """Patches drawn before this one, from the run's first step on."""
    epoch: int
    """Passes over the cases completed before this one."""
    index: int
    """Which of the split's cases."""
    region: Region
    """Where in the case. It may reach outside of the volume, where there is nothing but zeros."""


def patch_at(position: int, sampling: PatchSampling, records: Sequence[CaseRecord]) -> PatchSample:
    """The patch at `position` of an endless stream over `records`: an epoch takes `per_case` patches of each.

    With "foreground", any number of successive positions has its share of foreground patches, to the nearest one. A
    case in which none of the regions occurs gives a random patch instead. Raises ValueError for a negative position or
    no records.
    """
    per_case = sampling.per_case
    visit, place = divmod(position, per_case)
    drawn = sample_at(visit, cases=len(records), seed=sampling.seed, shuffle=sampling.shuffle)
    record = records[drawn.index]
    if sampling.sampling == "grid":
        region = _grid_region(place, sampling, record)
    elif sampling.sampling == "centre":
        region = case_region(record, tuple(sampling.shape), sampling.extent)
    elif sampling.sampling == "foreground" and wants_foreground(position, sampling.foreground):
        region = _foreground_region(position, sampling, record)
    else:
        region = _random_region(position, sampling, record)
    return PatchSample(position, drawn.epoch, drawn.index, region)


def wants_foreground(position: int, share: float) -> bool:
    """Whether the patch at `position` is to be one of the `share`: evenly spread, so that every batch has its part."""
    return math.floor((position + 1) * share) > math.floor(position * share)


def grid_starts(size: Shape3, patch: Shape3, overlap: float) -> Tuple[Tuple[int, ...], ...]:
    """First voxels, along X, Y and Z, of the fewest evenly spread patches that cover `size` with at least `overlap`.

    The first patch begins where the volume begins and the last ends where it ends. An axis that is no longer than the
    patch takes one patch, which lies around it.
    """
    return tuple(_axis_starts(n, want, overlap) for n, want in zip(size, patch))


def patch_grid(region: Region, patch: Shape3, overlap: float) -> Tuple[Region, ...]:
    """The patches that cover `region`, X slowest, as the "grid" sampling takes them."""
    starts = grid_starts(region.size, patch, overlap)
    offsets = itertools.product(*starts)
    return tuple(Region(tuple(a + b for a, b in zip(region.start, offset)), tuple(patch)) for offset in offsets)


# --- Private helpers ---

_PLACE, _CENTRE = 0x706C616365, 0x63656E747265
"""Keys of the random streams, so that one draw does not shift another's."""


def _axis_starts(size: int, patch: int, overlap: float) -> Tuple[int, ...]:
    if size <= patch:
        return (-((patch - size) // 2),)
    stride = max(int(patch * (1 - overlap)), 1)
    steps = -(-(size - patch) // stride)
    return tuple(step * (size - patch) // steps for step in range(steps + 1))


def _grid_region(place: int, sampling: PatchSampling, record: CaseRecord) -> Region:
    region = case_region(record, sampling.grid, sampling.extent)
    starts = grid_starts(sampling.grid, sampling.shape, sampling.overlap)
    start = []
    for axis in reversed(starts):
        place, step = divmod(place, len(axis))
        start.insert(0, axis[step])
    return Region(tuple(a + b for a, b in zip(region.start, start)), tuple(sampling.shape))


def _random_region(position: int, sampling: PatchSampling, record: CaseRecord) -> Region:
    units = random_units(sampling.seed, position, _PLACE)
    start = [low + int(next(units) * (high - low + 1)) for low, high in _room(sampling, record)]
    return Region(tuple(start), tuple(sampling.shape))


def _foreground_region(position: int, sampling: PatchSampling, record: CaseRecord) -> Region:
    """Around a voxel of a region that occurs: the region is drawn first, then its code, so that small ones come up."""
    units = random_units(sampling.seed, position, _CENTRE)
    present = [[code for code in codes if record.centres.get(code)] for codes in sampling.codes]
    present = [codes for codes in present if codes]
    if not present:
        return _random_region(position, sampling, record)
    code = _pick(next(units), _pick(next(units), present))
    centre = _pick(next(units), record.centres[code])
    start = []
    for voxel, size, (low, high) in zip(centre, sampling.shape, _room(sampling, record)):
        before = size // 4 + int(next(units) * max(size // 2, 1))
        start.append(min(max(voxel - before, low), high))
    return Region(tuple(start), tuple(sampling.shape))


def _pick(unit: float, choices: Sequence):
    return choices[int(unit * len(choices))]


def _room(sampling: PatchSampling, record: CaseRecord) -> Tuple[Tuple[int, int], ...]:
    """First and last place for a patch to start along each axis: within the extent, or one place around it."""
    inside = record.box if sampling.extent == "brain" else whole(record.shape)
    around = centred(inside, sampling.shape, record.shape)
    return tuple(
        (start, start) if want >= n else (a, a + n - want)
        for start, want, a, n in zip(around.start, sampling.shape, inside.start, inside.size)
    )
