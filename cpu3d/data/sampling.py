"""The case and the patch of it at each position of a run, and the worker that takes it. No
TensorFlow.

Everything random about a sample is a pure function of (seed, position), so that a restart needs one
integer. The generator is SplitMix64 (Steele, Lea, Flood 2014), as NumPy's streams may change
between versions.

The order of samples depends on the batch and never on the workers. Step s takes the positions s *
batch up to (s + 1) * batch in contiguous blocks, in the order of the ranks: of batch 6, 2 workers
take 0 0 0 1 1 1."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Iterator, List, NamedTuple, Optional, Sequence, Tuple, TypeVar

from cpu3d.data.manifest import CaseRecord
from cpu3d.data.region import (
    EXTENTS,
    Region,
    Shape3,
    is_integer,
    require,
    round_up,
    xyz,
)
from cpu3d.data.store import case_box, case_region

T = TypeVar("T")
MASK = 2**64 - 1
SAMPLINGS = ("random", "foreground")
ATTEMPTS = 16  # most patches that are drawn for a position, if nothing in them is annotated
WHOLE_EVERY = 20  # steps of which one is on whole volumes, the others on crops around the labels
LABEL_MARGIN = 4  # voxels that a crop has at least on each side of its labels
# Keys of the random streams of an epoch's order, and of a patch: anywhere, and around a label.
_ORDER = 0x6F72646572
_PLACE = 0x706C616365
_CENTRE = 0x63656E747265

# --- Volumes ---


def case_at(position: int, *, cases: int, seed: int, shuffle: bool = True) -> int:
    """Return the index of the case at `position` of an endless stream over `cases` cases: every
    epoch holds each case once."""
    epoch, index = divmod(position, cases)
    if not shuffle:
        return index
    return permutation(cases, seed=seed, epoch=epoch)[index]


@lru_cache(maxsize=4)
def permutation(count: int, *, seed: int, epoch: int) -> Tuple[int, ...]:
    """Shuffle 0 .. count - 1 to the order of one epoch, by Fisher-Yates."""
    order = list(range(count))
    words = random_words(seed, epoch, _ORDER)
    for last in range(count - 1, 0, -1):
        pick = next(words) % (last + 1)  # the modulo's bias is below count / 2**64
        order[last], order[pick] = order[pick], order[last]
    return tuple(order)


def random_words(*key: int) -> Iterator[int]:
    """Yield 64-bit words without end, a function of the integers of `key`."""
    state = 0
    for number in key:
        state = _mix((state ^ (int(number) & MASK)) + 0x9E3779B97F4A7C15 & MASK)
    while True:
        state = state + 0x9E3779B97F4A7C15 & MASK
        yield _mix(state)


def random_units(*key: int) -> Iterator[float]:
    """Yield numbers in [0, 1) without end, 53 bits each, keyed as `random_words`."""
    return ((word >> 11) / 2**53 for word in random_words(*key))


def _mix(word: int) -> int:
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & MASK
    word = (word ^ word >> 27) * 0x94D049BB133111EB & MASK
    return word ^ word >> 31


@dataclass(frozen=True)
class VolumeSampling:
    """The rule by which cases become whole volumes."""

    extent: str = "brain"
    grid: Optional[Shape3] = None
    """Voxels X, Y, Z of all volumes. None: of each the least that hold its extent."""
    multiple: Shape3 = (1, 1, 1)  # of the voxels along each axis
    seed: int = 0
    shuffle: bool = True  # whether cases come in another order every epoch
    whole_every: int = 1  # steps of which the last is on whole volumes, the others on crops
    batch: int = 1  # samples of a step
    is_crop: bool = False  # whether all volumes are crops around the labels

    def at(self, position: int) -> "VolumeSampling":
        """The rule of the step that a position is in: all of its volumes are crops, or none."""
        is_crop = (position // self.batch + 1) % self.whole_every > 0
        return replace(self, whole_every=1, is_crop=self.is_crop or is_crop)

    def box_of(self, record: CaseRecord) -> Region:
        """What of a case its volume holds: its extent, of which a crop is the box of the labels."""
        extent = case_box(record, self.extent)
        if not self.is_crop or record.label_box is None:
            return extent
        start = xyz(side - LABEL_MARGIN for side in record.label_box.start)
        size = xyz(side + 2 * LABEL_MARGIN for side in record.label_box.size)
        return extent.overlap(Region(start, size)) or extent

    def grid_of(self, record: CaseRecord) -> Shape3:
        """Voxels X, Y, Z of a case's volume on its own."""
        if self.grid is not None:
            return self.grid
        return round_up(self.box_of(record).size, self.multiple)


def volume_at(
    position: int,
    sampling: VolumeSampling,
    records: Sequence[CaseRecord],
    together: Sequence[int] = (),
) -> "Patch":
    """Return the whole volume at `position` of an endless stream over `records`, or the crop around
    its labels. One that is computed `together` with those of other positions has the least grid
    that holds them all."""

    def index_at(position: int) -> int:
        return case_at(position, cases=len(records), seed=sampling.seed, shuffle=sampling.shuffle)

    sampling = sampling.at(min((position, *together)))
    grids = [sampling.grid_of(records[index_at(each)]) for each in (position, *together)]
    grid = xyz(map(max, zip(*grids)))
    index = index_at(position)
    record = records[index]
    if not sampling.is_crop:
        return Patch(index, case_region(record, grid, sampling.extent))
    box = sampling.box_of(record)
    units = random_units(sampling.seed, position, _CENTRE)
    starts = []
    for axis, (low, high) in enumerate(_starts(record, sampling.extent, grid)):
        # Between those that hold the whole box, or that the box holds.
        ends = (box.start[axis], box.stop[axis] - grid[axis])
        first, last = sorted(min(max(end, low), high) for end in ends)
        starts.append(first + int(next(units) * (last - first + 1)))
    return Patch(index, Region(xyz(starts), grid))


# --- Patches ---


class Patch(NamedTuple):
    """A patch or a whole volume at a position."""

    case_index: int  # among the cases of the split
    region: Region  # of the case's grid


@dataclass(frozen=True)
class PatchSampling:
    """The rule by which patches are drawn from cases."""

    shape: Shape3  # voxels X, Y, Z of a patch
    sampling: str = "random"
    """ "random": anywhere in the case's extent. "foreground": a share of them around labelled
    voxels, the others random."""
    foreground: float = 1 / 3
    """With "foreground": share of patches around labelled voxels, 0 to 1; nnU-Net's."""
    codes: Tuple[Tuple[int, ...], ...] = ()
    """Label codes of each region, around whose voxels patches are drawn."""
    extent: str = "brain"
    seed: int = 0
    shuffle: bool = True  # whether cases come in another order every epoch

    def __post_init__(self) -> None:
        is_sampling = self.sampling in SAMPLINGS
        is_extent = self.extent in EXTENTS
        is_shape = len(self.shape) == 3 and all(is_integer(n, 1) for n in self.shape)
        is_share = 0 <= self.foreground <= 1
        require(
            ("sampling", f"one of {', '.join(SAMPLINGS)}", self.sampling, is_sampling),
            ("extent", f"one of {', '.join(EXTENTS)}", self.extent, is_extent),
            ("patch_shape", "three positive integers, voxels X, Y, Z", self.shape, is_shape),
            ("foreground", "in [0, 1], a share of the patches", self.foreground, is_share),
        )


def patch_at(
    position: int, sampling: PatchSampling, records: Sequence[CaseRecord], attempt: int = 0
) -> Patch:
    """Return the patch at `position` of an endless stream over `records`: an epoch takes one patch
    of each.

    With "foreground", any number of successive positions has its share of foreground patches, to
    the nearest one; a case without the regions gives a random patch. That is of the first
    `attempt`. Where voxels are to be ignored and nothing in a patch is annotated, the loader takes
    the next one below ATTEMPTS, another patch of the same case; the last one is around a labelled
    voxel, also with "random"."""
    index = case_at(position, cases=len(records), seed=sampling.seed, shuffle=sampling.shuffle)
    record = records[index]
    shape = xyz(sampling.shape)
    # Positions with a foreground patch are evenly spread, so that every batch has its share.
    share = sampling.foreground if sampling.sampling == "foreground" else 0
    is_foreground = math.floor((position + 1) * share) > math.floor(position * share)
    codes: List[List[int]] = []  # those that the case has, of each region with some
    if is_foreground or attempt == ATTEMPTS - 1:
        occurring = ([code for code in own if record.centres.get(code)] for own in sampling.codes)
        codes = [own for own in occurring if own]
    key = _CENTRE if codes else _PLACE
    again = (attempt,) if attempt else ()  # the first attempt has no number of its own
    units = random_units(sampling.seed, position, key, *again)
    starts = _starts(record, sampling.extent, shape)
    if not codes:
        start = xyz(low + int(next(units) * (high - low + 1)) for low, high in starts)
        return Patch(index, Region(start, shape))
    code_unit = next(units)
    region_unit = next(units)
    centre_unit = next(units)
    # A region and then its code, so that small ones come up.
    code = _picked(_picked(codes, region_unit), code_unit)
    around = []
    for voxel, size, (low, high) in zip(_picked(record.centres[code], centre_unit), shape, starts):
        before = size // 4 + int(next(units) * max(size // 2, 1))
        around.append(min(max(voxel - before, low), high))
    return Patch(index, Region(xyz(around), shape))


def _picked(choices: Sequence[T], unit: float) -> T:
    """Return the choice at a number in [0, 1)."""
    return choices[int(unit * len(choices))]


def _starts(record: CaseRecord, kind: str, shape: Shape3) -> List[Tuple[int, int]]:
    """Return the first and the last start of a patch of `shape` along each axis: within the extent
    of this kind, or the one around a shorter extent."""
    extent = case_box(record, kind)
    around = case_region(record, shape, kind)
    starts = []
    for axis, size in enumerate(shape):
        low = extent.start[axis]
        high = extent.stop[axis] - size
        if high <= low:
            low = around.start[axis]
            high = low
        starts.append((low, high))
    return starts


# --- Shares of several workers ---


@dataclass(frozen=True)
class Share:
    """The samples of one worker. Their indices count this worker's own samples from the run's first
    step on."""

    rank: int = 0
    workers: int = 1
    batch: int = 0
    """Samples of a step over all workers, equally many for each. 0 for a validation, which has no
    steps: samples are dealt one at a time, and some workers may have one fewer."""

    def __post_init__(self) -> None:
        n = self.workers
        is_rank = 0 <= self.rank < n
        is_multiple = self.batch % max(n, 1) == 0
        require(
            ("workers", "at least 1", n, n >= 1),
            ("rank", f"at least 0 and below the {n} workers", self.rank, is_rank),
            ("batch", f"a multiple of the {n} workers", self.batch, is_multiple),
        )

    @property
    def per_step(self) -> int:
        """Own samples of a step; 1 if there are no steps."""
        return max(self.batch // self.workers, 1)

    def singly(self) -> "Share":
        """The same worker's share of a validation."""
        return replace(self, batch=0)

    def position(self, index: int) -> int:
        """The position, in the order of all samples, of this worker's sample `index`."""
        step, rest = divmod(index, self.per_step)
        return (step * self.workers + self.rank) * self.per_step + rest

    def indices(self, start: int, stop: int) -> range:
        """The indices of this worker's samples at the positions `start` up to `stop`."""
        return range(self._count_before(start), self._count_before(stop))

    def positions(self, start: int, stop: int) -> Tuple[int, ...]:
        """The positions from `start` up to `stop` that are this worker's."""
        return tuple(map(self.position, self.indices(start, stop)))

    def _count_before(self, position: int) -> int:
        """This worker's samples at the positions below this one."""
        step, rest = divmod(position, self.workers * self.per_step)
        in_last_step = min(max(rest - self.rank * self.per_step, 0), self.per_step)
        return step * self.per_step + in_last_step


ALL = Share()  # of a single worker: all samples
