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
from typing import Iterator, NamedTuple, Optional, Sequence, Tuple

from cpu3d.data.records import CaseRecord
from cpu3d.data.region import EXTENTS, Region, Shape3, centred, is_integer, require, whole
from cpu3d.data.store import case_region

MASK = 2**64 - 1
SAMPLINGS = ("random", "foreground", "centre")
_PLACE, _CENTRE = 0x706C616365, 0x63656E747265  # keys of the random streams of a patch

# --- Volumes ---


class Sample(NamedTuple):
    """The sample at a position: the pass over the cases, the index of the case, and the place of a
    patch."""

    position: int
    epoch: int
    index: int
    region: Optional[Region] = None


def sample_at(position: int, *, cases: int, seed: int, shuffle: bool = True) -> Sample:
    """The sample at `position` of an endless stream over `cases` cases: every epoch holds each case
    once."""
    epoch, place = divmod(position, cases)
    return Sample(
        position, epoch, permutation(cases, seed=seed, epoch=epoch)[place] if shuffle else place
    )


@lru_cache(maxsize=4)
def permutation(count: int, *, seed: int, epoch: int) -> Tuple[int, ...]:
    """0 .. count - 1 in the order of one epoch, by Fisher-Yates."""
    order = list(range(count))
    words = random_words(seed, epoch, 0x6F72646572)
    for last in range(count - 1, 0, -1):
        pick = next(words) % (last + 1)  # the modulo's bias is below count / 2**64
        order[last], order[pick] = order[pick], order[last]
    return tuple(order)


def random_words(*key: int) -> Iterator[int]:
    """An endless stream of 64-bit words, a function of the integers of `key`."""
    state = 0
    for part in key:
        state = _mix((state ^ (int(part) & MASK)) + 0x9E3779B97F4A7C15 & MASK)
    while True:
        state = state + 0x9E3779B97F4A7C15 & MASK
        yield _mix(state)


def random_units(*key: int) -> Iterator[float]:
    """An endless stream of numbers in [0, 1), 53 bits each, keyed as `random_words`."""
    return ((word >> 11) / 2**53 for word in random_words(*key))


# --- Patches ---


@dataclass(frozen=True)
class PatchSampling:
    """The rule by which patches are drawn from cases."""

    shape: Shape3  # voxels X, Y, Z of a patch
    sampling: str = "random"
    """ "random": anywhere in the case's extent. "foreground": a share of them around labelled
    voxels, the others random. "centre": the one around the extent's middle."""
    foreground: float = (
        1 / 3
    )  # with "foreground": share of patches around labelled voxels, 0 to 1; nnU-Net's
    codes: Tuple[Tuple[int, ...], ...] = ()  # with "foreground": label codes of each region
    extent: str = "brain"
    seed: int = 0
    shuffle: bool = True  # whether cases come in another order every epoch

    def __post_init__(self):
        size = len(self.shape) == 3 and all(is_integer(n, 1) for n in self.shape)
        require(
            (
                "sampling",
                f"one of {', '.join(SAMPLINGS)}",
                self.sampling,
                self.sampling in SAMPLINGS,
            ),
            ("extent", f"one of {', '.join(EXTENTS)}", self.extent, self.extent in EXTENTS),
            ("patch_shape", "three positive integers, voxels X, Y, Z", self.shape, size),
            (
                "foreground",
                "in [0, 1], a share of the patches",
                self.foreground,
                0 <= self.foreground <= 1,
            ),
        )


def patch_at(position: int, sampling: PatchSampling, records: Sequence[CaseRecord]) -> Sample:
    """The patch at `position` of an endless stream over `records`: an epoch takes one patch of
    each.

    With "foreground", any number of successive positions has its share of foreground patches, to
    the nearest one; a case without the regions gives a random patch."""
    drawn = sample_at(position, cases=len(records), seed=sampling.seed, shuffle=sampling.shuffle)
    record, shape = records[drawn.index], tuple(sampling.shape)
    if sampling.sampling == "centre":
        return drawn._replace(region=case_region(record, shape, sampling.extent))
    return drawn._replace(region=Region(_drawn_start(position, sampling, record), shape))


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

    def __post_init__(self):
        require(
            ("workers", "at least 1", self.workers, self.workers >= 1),
            (
                "rank",
                f"at least 0 and below the {self.workers} workers",
                self.rank,
                0 <= self.rank < self.workers,
            ),
            (
                "batch",
                f"a multiple of the {self.workers} workers",
                self.batch,
                self.batch % max(self.workers, 1) == 0,
            ),
        )

    @property
    def part(self) -> int:
        """Own samples of a step; 1 if there are no steps."""
        return self.batch // self.workers or 1

    def singly(self) -> "Share":
        """The same worker's share of a validation."""
        return replace(self, batch=0)

    def position(self, index: int) -> int:
        """The position, in the order of all samples, of this worker's sample `index`."""
        step, place = divmod(index, self.part)
        return (step * self.workers + self.rank) * self.part + place

    def indices(self, start: int, stop: int) -> range:
        """The indices of this worker's samples at the positions `start` up to `stop`."""
        steps = [divmod(position, self.workers * self.part) for position in (start, stop)]
        return range(
            *(
                step * self.part + min(max(n - self.rank * self.part, 0), self.part)
                for step, n in steps
            )
        )

    def positions(self, start: int, stop: int) -> Tuple[int, ...]:
        """The positions from `start` up to `stop` that are this worker's."""
        return tuple(map(self.position, self.indices(start, stop)))


ALL = Share()  # of a single worker: all samples


def _drawn_start(position: int, sampling: PatchSampling, record: CaseRecord) -> Shape3:
    """The first voxel of a patch: anywhere in the extent, or around a voxel of a region that occurs
    in the case."""
    shape, inside = (
        sampling.shape,
        record.box if sampling.extent == "brain" else whole(record.shape),
    )
    # First and last place along each axis: within the extent, or the one place around a shorter
    # extent.
    room = [
        (start, start) if want >= n else (a, a + n - want)
        for start, want, a, n in zip(
            centred(inside, shape, record.shape).start, shape, inside.start, inside.size
        )
    ]
    present, share = [], sampling.foreground if sampling.sampling == "foreground" else 0
    # Evenly spread, so that every batch has its part.
    if math.floor((position + 1) * share) > math.floor(position * share):
        present = [[code for code in codes if record.centres.get(code)] for codes in sampling.codes]
        present = [codes for codes in present if codes]
    if not present:
        units = random_units(sampling.seed, position, _PLACE)
        return tuple(low + int(next(units) * (high - low + 1)) for low, high in room)
    units = random_units(sampling.seed, position, _CENTRE)
    of_code, of_region, of_centre = (next(units) for _ in range(3))
    codes = present[
        int(of_region * len(present))
    ]  # a region and then its code, so that small ones come up
    centres = record.centres[codes[int(of_code * len(codes))]]
    centre = centres[int(of_centre * len(centres))]
    before = [size // 4 + int(next(units) * max(size // 2, 1)) for size in shape]
    return tuple(
        min(max(voxel - n, low), high) for voxel, n, (low, high) in zip(centre, before, room)
    )


def _mix(word: int) -> int:
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & MASK
    word = (word ^ word >> 27) * 0x94D049BB133111EB & MASK
    return word ^ word >> 31
