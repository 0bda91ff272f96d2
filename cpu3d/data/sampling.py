"""Which case comes at which position of a run: a pure function of (seed, position), so that a restart is one integer.

Everything random about a training sample hangs on its position, never on threads, workers or the time of day. The
generator is SplitMix64 (Steele, Lea, Flood 2014), written out here because NumPy's streams may change between versions.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Iterator, Tuple

MASK = 2**64 - 1


@dataclass(frozen=True)
class Sample:
    """What is drawn at one position of the run."""

    position: int
    """Samples drawn before this one, from the run's first step on."""
    epoch: int
    """Passes over the cases completed before this one."""
    index: int
    """Which of the split's cases."""


def sample_at(position: int, *, cases: int, seed: int, shuffle: bool = True) -> Sample:
    """The sample at `position` of an endless stream over `cases` cases: every epoch holds each case once.

    Raises ValueError for a negative position or no cases.
    """
    if position < 0 or cases < 1:
        raise ValueError(f"position must be >= 0 and cases >= 1, got position {position} of {cases} cases")
    epoch, place = divmod(position, cases)
    index = permutation(cases, seed=seed, epoch=epoch)[place] if shuffle else place
    return Sample(position, epoch, index)


@lru_cache(maxsize=4)
def permutation(count: int, *, seed: int, epoch: int) -> Tuple[int, ...]:
    """0 .. count - 1 in the order of one epoch: Fisher-Yates, the same on every machine."""
    order = list(range(count))
    stream = random_words(seed, epoch, 0x6F72646572)
    for last in range(count - 1, 0, -1):
        # The modulo's bias is below count / 2**64.
        pick = next(stream) % (last + 1)
        order[last], order[pick] = order[pick], order[last]
    return tuple(order)


def random_words(*key: int) -> Iterator[int]:
    """An endless stream of 64-bit words that depends on every integer of `key` and nothing else."""
    state = 0
    for part in key:
        state = _mix((state ^ (int(part) & MASK)) + 0x9E3779B97F4A7C15 & MASK)
    while True:
        state = state + 0x9E3779B97F4A7C15 & MASK
        yield _mix(state)


def random_units(*key: int) -> Iterator[float]:
    """An endless stream of numbers in [0, 1), 53 bits each, keyed as `random_words`."""
    for word in random_words(*key):
        yield (word >> 11) / 2**53


# --- Private helpers ---


def _mix(word: int) -> int:
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & MASK
    word = (word ^ word >> 27) * 0x94D049BB133111EB & MASK
    return word ^ word >> 31
