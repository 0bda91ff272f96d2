"""Which samples of a run are whose, when several workers train together: pure, and no TensorFlow.

The order of all samples depends on the batch and never on the workers: step s takes the positions s * batch up to
(s + 1) * batch, whoever computes them. They are dealt in contiguous blocks, in the order of the ranks:

    batch 6     step 0              step 1
    position    0  1  2  3  4  5    6  7  8  9 10 11
    1 worker    0  0  0  0  0  0    0  0  0  0  0  0
    2 workers   0  0  0  1  1  1    0  0  0  1  1  1
    3 workers   0  0  1  1  2  2    0  0  1  1  2  2
"""

import dataclasses
import numbers
from dataclasses import dataclass
from typing import List, Optional, Tuple

from cpu3d.errors import InputError


@dataclass(frozen=True)
class Share:
    """The samples of one worker. A sample's index counts this worker's own, from the run's first step on."""

    rank: int = 0
    """Of this worker, 0 to `workers` - 1."""
    workers: int = 1
    """Of the run, on all hosts."""
    batch: int = 0
    """Samples of a step over all workers, equally many for each. 0 where there are no steps, as in a validation:
    samples are dealt one at a time, none is left out, and some workers may have one fewer."""
    here: Tuple[int, ...] = ()
    """Ranks of the workers on this one's host, who share its memory; () for this one alone."""

    def __post_init__(self):
        object.__setattr__(self, "here", tuple(sorted(self.here)) or (self.rank,))
        problems = [
            f"{name} must be an integer of at least {low}, got {value!r}; give another"
            for name, value, low in (("rank", self.rank, 0), ("workers", self.workers, 1), ("batch", self.batch, 0))
            if not isinstance(value, numbers.Integral) or value < low
        ]
        problems = problems or self._rules_broken()
        if problems:
            raise InputError(*problems)

    @property
    def part(self) -> int:
        """Own samples of a step; 1 where there are no steps."""
        return self.batch // self.workers or 1

    @property
    def in_step(self) -> Tuple[int, ...]:
        """Ranks here that read as far as this one at any time, by a step at most, because every step waits for all.

        Without steps nobody waits: this one alone.
        """
        return self.here if self.batch else (self.rank,)

    def singly(self) -> "Share":
        """The same workers, where there are no steps."""
        return dataclasses.replace(self, batch=0)

    def position(self, index: int, rank: Optional[int] = None) -> int:
        """Where in the order of all samples the sample `index` of this worker is, or of the worker `rank`."""
        step, place = divmod(index, self.part)
        return (step * self.workers + (self.rank if rank is None else rank)) * self.part + place

    def position_here(self, place: int) -> int:
        """The position that the workers `in_step` read at `place` of their common order: in turn, a sample each.

        Not in the order of positions: that would be a step's block of one after the other's, while they read at the
        same time.
        """
        index, turn = divmod(place, len(self.in_step))
        return self.position(index, self.in_step[turn])

    def indices(self, start: int, stop: int) -> range:
        """This worker's samples at the positions `start` up to `stop`."""
        return range(self._before(start), self._before(stop))

    def positions(self, start: int, stop: int) -> Tuple[int, ...]:
        """The positions from `start` up to `stop` that are this worker's; without steps, rank, rank + workers, ..."""
        return tuple(map(self.position, self.indices(start, stop)))

    def whole_steps(self, count: int) -> int:
        """Of the first `count` positions, those that make up whole steps; without steps all of them."""
        return count - count % self.batch if self.batch else count

    def problems(self, *, start: int, stop: Optional[int], batch: int) -> List[str]:
        """What is wrong with a stream over these positions in batches of `batch`: it must be made of whole steps."""
        if not self.batch:
            return []
        found = [
            f"{name} must be a multiple of the {self.batch} samples of a step, got {value};"
            f" give {value // self.batch * self.batch}, where the step begins"
            for name, value in (("start", start), ("stop", stop))
            if value is not None and value % self.batch
        ]
        if self.part % batch:
            found.append(
                f"batch must divide a worker's {self.part} samples of a step, got {batch}; give another, or a larger"
                " step"
            )
        return found

    # --- Private helpers ---

    def _rules_broken(self) -> List[str]:
        problems = []
        if self.rank >= self.workers:
            problems.append(f"rank must be below the {self.workers} workers, got {self.rank}; ranks begin at 0")
        if self.batch % self.workers:
            least = self.batch // self.workers * self.workers
            problems.append(
                f"batch must be a multiple of the {self.workers} workers, got {self.batch};"
                f" give {least + self.workers}, or another number of workers"
            )
        ranks = {rank for rank in self.here if 0 <= rank < self.workers}
        if not problems and (self.rank not in ranks or len(ranks) < len(self.here)):
            problems.append(
                f"here must hold rank {self.rank} and others of the {self.workers} workers, each once,"
                f" got {self.here}; give the ranks on this host"
            )
        return problems

    def _before(self, position: int) -> int:
        """This worker's samples before a position."""
        step, place = divmod(position, self.workers * self.part)
        return step * self.part + min(max(place - self.rank * self.part, 0), self.part)


ALL = Share()
"""Of a single worker: all samples, in any number."""
