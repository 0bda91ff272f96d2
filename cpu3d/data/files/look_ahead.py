"""Have the kernel read what a run needs next, and let go of what it needs last: the order of samples is known for ever.

A thread of its own turns the steps of a `PagePlan` into advice. No voxel passes through it, nothing waits for it, and
when it fails a run is slower and nothing else.
"""

import contextlib
import queue
import threading
import weakref
from collections import deque
from typing import Callable, Deque, Hashable, Optional, Tuple

from cpu3d.data.files import page_cache
from cpu3d.data.files.page_plan import PagePlan, Use
from cpu3d.data.files.reader import Reader, Slices, parts_of
from cpu3d.data.records import CaseRecord, array_path
from cpu3d.errors import InputError

LINGER = 8
"""Positions after which a file is given back a second time: pages that a map was still using stayed the first time."""

OUT_OF_ORDER = 64
"""A position this far behind the last is a new pass; nearer, it is a thread that came late."""


class LookAhead:
    """Advice ahead of the position that is being read. Begins at the first `at`, ends when it is collected or closed.

    record_at: position -> the case that is read there; called from another thread.
    box_at: position -> the box (three slices in the stored array's voxels) that is read of it; None for whole arrays.
    start, stop: positions of the pass; it may be passed through again and again.
    page_budget_bytes, horizon, ahead: see `PagePlan`. Workers that share a host's memory should all be given the
      positions of all of them, so that none gives back what another needs next. Look-aheads of one reader leave each
      other's files alone; a budget that they share is to be divided between them.
    in_flight: samples that may be in use at once.

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
    ):
        self._positions: queue.SimpleQueue[Optional[int]] = queue.SimpleQueue()
        plan = PagePlan(
            lambda position: _use(reader, record_at(position)),
            budget_bytes=page_budget_bytes,
            horizon=horizon,
            ahead=ahead + in_flight - 1,
            stop=stop,
        )
        adviser = _Adviser(reader, plan, record_at, box_at, start, in_flight)
        # The thread must not know this object, or it would keep it, and itself, alive.
        self._thread = threading.Thread(
            target=_run, args=(self._positions, adviser), name="cpu3d look-ahead", daemon=True
        )
        self._begun = threading.Lock()
        weakref.finalize(self, self._positions.put, None).atexit = False

    def at(self, position: int) -> None:
        """Tell that `position` is about to be read. Never waits and never raises."""
        if self._begun.acquire(blocking=False):  # once, and never released
            self._thread.start()
        self._positions.put(position)

    def close(self) -> None:
        """End the thread, after the advice for what it was told so far."""
        self._positions.put(None)
        if self._thread.is_alive():
            self._thread.join()


# --- Private helpers ---


def _use(reader: Reader, record: CaseRecord) -> Use:
    paths = tuple(str(array_path(reader.folder, record, part)) for part in parts_of(record))
    return Use(paths, record.image_bytes + record.label_bytes)


class _Adviser:
    """What the thread knows."""

    def __init__(
        self,
        reader: Reader,
        plan: PagePlan,
        record_at: Callable[[int], CaseRecord],
        box_at: Optional[Callable[[int], Slices]],
        start: int,
        in_flight: int,
    ):
        self._reader, self._plan, self._record_at, self._box_at = reader, plan, record_at, box_at
        self._start, self._behind = start, in_flight - 1
        self._newest: Optional[int] = None
        self._planned = start - 1
        self._given: Deque[Tuple[int, Hashable]] = deque()  # (position to give it back again at, file)
        reader.plans.add(plan)

    def at(self, position: int) -> None:
        """All advice that is due as `position` is about to be read."""
        new_pass = position == self._start or self._newest is None or abs(position - self._newest) > OUT_OF_ORDER
        if new_pass:
            self._newest = position
            self._step(position)
        self._newest = max(self._newest, position)
        for place in range(self._planned + 1, self._newest - self._behind + 1):
            self._step(place)

    def _step(self, place: int) -> None:
        """The advice as `place` becomes the oldest position in use."""
        self._planned = place
        step = self._plan.at(place)
        again = []
        while self._given and not place < self._given[0][0] <= place + LINGER:  # a new pass makes all of them due
            again.append(self._given.popleft()[1])
        for file in (*step.give_back, *again):
            if not self._reader.plans.keep(file):
                self._give_back(file)
        self._given.extend((place + LINGER, file) for file in step.give_back)
        for ahead in step.ahead:
            with contextlib.suppress(OSError, InputError):  # who reads it is told
                self._reader.advise(self._record_at(ahead), self._box_at(ahead) if self._box_at else None)

    @staticmethod
    def _give_back(paths: Tuple[str, ...]) -> None:
        for path in paths:
            with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
                page_cache.give_back(file.fileno())


def _run(positions: "queue.SimpleQueue[Optional[int]]", adviser: _Adviser) -> None:
    while True:
        position = positions.get()
        if position is None:
            return
        with contextlib.suppress(Exception):  # advice only: a run goes on without it
            adviser.at(position)
