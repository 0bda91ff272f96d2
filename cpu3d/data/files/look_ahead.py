"""Have the kernel read what a run needs next, and let go of what it needs last: the order of samples is known for ever.

A thread of its own turns the steps of a `PagePlan` into advice. No voxel passes through it, nothing waits for it, and
when it fails a run is slower and nothing else.

The workers of a host share its pages. So each plans for the reads of all of them, in their common order, and with the
same budget comes to the same plan: what it gives back, none of them needs soon. It asks for its own files alone, the
others do so for theirs. A worker whose budget is smaller keeps a part of what the others keep, as Belady's rule has it
(Mattson et al. 1970), so that the smallest budget is what holds.
"""

import contextlib
import os
import queue
import threading
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Callable, Deque, Hashable, Optional, Tuple

from cpu3d.data.files import page_cache
from cpu3d.data.files.page_plan import PagePlan, Use
from cpu3d.data.files.reader import Reader, Slices, parts_of
from cpu3d.data.records import CaseRecord, array_path
from cpu3d.errors import InputError
from memory_estimator.files import open_regular

LINGER = 8
"""Samples after which a file is given back a second time: pages that a map was still using stayed the first time."""

OUT_OF_ORDER = 64
"""A sample this far behind the last is a new pass; nearer, it is a thread that came late."""


class LookAhead:
    """Advice ahead of the sample that is being read. Begins at the first `at`, ends when it is collected or closed.

    record_at: place -> the case that is read there; called from another thread. Sample n is at place n, unless other
      workers read as well: a place each in turn, sample n of the worker whose turn is t at place n * workers + t.
    box_at: place -> the box (three slices in the stored array's voxels) that is read of it; None for whole arrays.
    start, stop: samples of the pass; it may be passed through again and again.
    page_budget_bytes, horizon: see `PagePlan`; both are of all workers, and the same for each. Look-aheads of one
      reader leave each other's files alone; a budget that they share is to be divided between them.
    ahead: samples to bring in before they come.
    in_flight: samples that may be in use at once.
    workers, turn, apart: of the workers that read here, their number, this one's place among them, and the samples by
      which one may be ahead of another.

    In mode "ram" the files are loaded ahead; they stay mapped, and so nothing of them can be given back.
    """

    def __init__(
        self,
        reader: Reader,
        record_at: Callable[[int], CaseRecord],
        *,
        page_budget_bytes: int,
        horizon: int,
        start: int = 0,
        stop: Optional[int] = None,
        box_at: Optional[Callable[[int], Slices]] = None,
        ahead: int = 2,
        in_flight: int = 2,
        workers: int = 1,
        turn: int = 0,
        apart: int = 0,
    ):
        behind = in_flight - 1 + apart
        window = workers * (behind + 1 + ahead)
        self._samples: queue.SimpleQueue[Optional[int]] = queue.SimpleQueue()
        plan = PagePlan(
            lambda place: _use(reader, record_at(place)),
            budget_bytes=page_budget_bytes,
            horizon=horizon,
            ahead=window - 1,
            stop=None if stop is None else workers * stop,
        )
        rounds = _Rounds(start, workers, turn, behind, reach=window + workers * apart)
        self._adviser = _Adviser(reader, plan, record_at, box_at, rounds)
        # The thread must not know this object, or it would keep it, and itself, alive.
        self._thread = threading.Thread(
            target=_run, args=(self._samples, self._adviser), name="cpu3d look-ahead", daemon=True
        )
        self._begun = threading.Lock()
        weakref.finalize(self, self._samples.put, None).atexit = False

    def at(self, sample: int) -> None:
        """Tell that `sample` is about to be read. Never waits and never raises."""
        if self._begun.acquire(blocking=False):  # once, and never released
            self._thread.start()
        self._samples.put(sample)

    def close(self) -> None:
        """End the thread, after the advice for what it was told so far."""
        self._samples.put(None)
        if self._thread.is_alive():
            self._thread.join()


# --- Private helpers ---


def _use(reader: Reader, record: CaseRecord) -> Use:
    paths = tuple(str(array_path(reader.folder, record, part)) for part in parts_of(record))
    return Use(paths, record.image_bytes + record.label_bytes)


@dataclass(frozen=True)
class _Rounds:
    """How the samples of one worker lie among the places of all that read here: a round of one each."""

    start: int
    """First sample of a pass."""
    workers: int
    turn: int
    behind: int
    """Samples before the newest that a worker may still be using."""
    reach: int
    """Places from the oldest in use that some worker has brought in already, or soon will."""


class _Adviser:
    """What the thread knows."""

    def __init__(
        self,
        reader: Reader,
        plan: PagePlan,
        record_at: Callable[[int], CaseRecord],
        box_at: Optional[Callable[[int], Slices]],
        rounds: _Rounds,
    ):
        self._reader, self._plan, self._record_at, self._box_at = reader, plan, record_at, box_at
        self._rounds, self._linger = rounds, LINGER * rounds.workers
        self._newest: Optional[int] = None
        self._planned = -1
        self._given: Deque[Tuple[int, Hashable]] = deque()  # (place to give it back again at, file)
        reader.plans.add(plan)

    def at(self, sample: int) -> None:
        """All advice that is due as `sample` is about to be read."""
        rounds = self._rounds
        new_pass = sample == rounds.start or self._newest is None or abs(sample - self._newest) > OUT_OF_ORDER
        if new_pass:
            self._newest = sample
            self._step(sample * rounds.workers)
        self._newest = max(self._newest, sample)
        oldest = (self._newest - rounds.behind) * rounds.workers
        for place in range(self._planned + 1, oldest + 1):
            self._step(place)

    def _step(self, place: int) -> None:
        """The advice as `place` becomes the oldest in use."""
        self._planned = place
        step = self._plan.at(place)
        again = []
        while self._given and not place < self._given[0][0] <= place + self._linger:  # a new pass makes all of them due
            again.append(self._given.popleft()[1])
        for file in (*step.give_back, *again):
            if not self._reader.plans.keep(file) and not self._soon(file, place):
                self._give_back(file)
        self._given.extend((place + self._linger, file) for file in step.give_back)
        for ahead in step.ahead:
            if ahead % self._rounds.workers == self._rounds.turn:
                with contextlib.suppress(OSError, InputError):  # who reads it is told
                    self._reader.advise(self._record_at(ahead), self._box_at(ahead) if self._box_at else None)

    def _soon(self, file: Hashable, place: int) -> bool:
        """Whether another worker, further on than this one, may have brought in what is given back here."""
        return self._rounds.workers > 1 and self._plan.needs(file, place + self._rounds.reach)

    @staticmethod
    def _give_back(paths: Tuple[str, ...]) -> None:
        for path in paths:
            with contextlib.suppress(OSError), os.fdopen(open_regular(path), "rb", buffering=0) as file:
                page_cache.give_back(file.fileno())


def _run(samples: "queue.SimpleQueue[Optional[int]]", adviser: _Adviser) -> None:
    while True:
        sample = samples.get()
        if sample is None:
            return
        with contextlib.suppress(Exception):  # advice only: a run goes on without it
            adviser.at(sample)
