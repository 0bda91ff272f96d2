"""Which files to bring into memory and which to give back, at each position of a run whose order is known for ever.

The kernel drops what was used longest ago. In a run that passes over its files again and again that is what comes next,
so with more data than memory every read would go to the disk. Giving back what is needed furthest from now (Belady,
1966) keeps as much from one pass to the next as fits. Pure: this says what to do, `look_ahead` does it.
"""

import heapq
import itertools
import threading
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Callable, Deque, Dict, Hashable, List, Optional, Tuple

NOT_IN_SIGHT = 2**62
"""Beyond every position: added to the last use of a file whose next use is not known."""


@dataclass(frozen=True)
class Use:
    """What a position of the run reads."""

    file: Hashable
    """Stands for the case's files; cases that share them have the same."""
    size_bytes: int
    """Of the files, also where only parts of them are read."""


@dataclass(frozen=True)
class Step:
    """What to do at a position."""

    ahead: Tuple[int, ...]
    """Positions whose files to bring in now, the nearest first. They may be in memory: asking again costs little."""
    give_back: Tuple[Hashable, ...]
    """Files to drop from memory."""


class PagePlans:
    """The plans of those who read the same files in one process, for as long as they live. Threads may share it."""

    def __init__(self):
        self._plans: weakref.WeakSet[PagePlan] = weakref.WeakSet()
        self._lock = threading.Lock()

    def add(self, plan: "PagePlan") -> None:
        with self._lock:
            self._plans.add(plan)

    def keep(self, file: Hashable) -> bool:
        """Whether one of the plans keeps `file`: another must not drop it from memory."""
        with self._lock:
            return any(plan.keeps(file) for plan in self._plans)


class PagePlan:
    """The steps of a run, one position after another. Its memory depends on the horizon and the budget alone.

    use_at: position -> Use; a file may come at any number of positions.
    budget_bytes: what may stay in memory. The file in use does in any case, so one that is larger exceeds the budget.
    horizon: positions looked into for a file's next use. Twice the cases of a run shows the next use of every file; a
      file that is not in sight goes before all that are, and of those the one used last, because in a run of epochs it
      comes last.
    ahead: positions to bring in before they come, fewer where the budget does not hold them.
    stop: where the run ends; None if it does not.
    """

    def __init__(
        self,
        use_at: Callable[[int], Use],
        *,
        budget_bytes: int,
        horizon: int,
        ahead: int = 2,
        stop: Optional[int] = None,
    ):
        self._use_at, self._budget_bytes, self._stop = use_at, budget_bytes, stop
        self._ahead, self._horizon = ahead, max(horizon, ahead + 1)
        self._kept: Dict[Hashable, int] = {}
        self._kept_bytes = 0
        # The kept files, the one needed last on top: (-next use, -number of the entry, file). A file whose next use
        # changes gets one more entry; the old ones are dropped as they come to the top.
        self._needed: List[Tuple[int, int, Hashable]] = []
        self._numbers = itertools.count()
        self._seek(0)

    @property
    def kept_bytes(self) -> int:
        """Of the files that were brought in and not given back."""
        return self._kept_bytes

    def keeps(self, file: Hashable) -> bool:
        """Whether `file` was brought in and not given back."""
        return file in self._kept

    def needs(self, file: Hashable, before: int) -> bool:
        """Whether `file` is known to be used before a position, from the current one on."""
        return self._next_use(file) < before

    def at(self, position: int) -> Step:
        """What to do as `position` is about to be read. Any position may follow any other; the next one costs least."""
        if position != self._position + 1:
            self._seek(position)
        self._position = position
        self._look()
        ahead: List[int] = []
        give_back: List[Hashable] = []
        for place, use in itertools.islice(self._uses, 1 + self._ahead):
            if use.file not in self._kept:
                found = self._victims(use.size_bytes, place)
                if found is None:
                    break
                for file in found:
                    self._kept_bytes -= self._kept.pop(file)
                    self._last_use.pop(file, None)
                give_back += found
                self._kept[use.file] = use.size_bytes
                self._kept_bytes += use.size_bytes
                self._rank(use.file)
            if place > self._brought:
                self._brought = place
                ahead.append(place)
        return Step(tuple(ahead), tuple(give_back))

    # --- Private helpers ---

    def _seek(self, position: int) -> None:
        """Begin anew at `position`: what is kept stays so; what was known of the future does not."""
        self._position = self._brought = position - 1
        self._seen = position
        self._uses: Deque[Tuple[int, Use]] = deque()  # from the current position up to the horizon
        self._coming: Dict[Hashable, Deque[int]] = {}  # file -> its positions among them
        self._last_use: Dict[Hashable, int] = {}
        self._rank_all()

    def _look(self) -> None:
        """Forget the uses before the current position, and see those up to the horizon."""
        while self._uses and self._uses[0][0] < self._position:
            place, use = self._uses.popleft()
            self._coming[use.file].popleft()
            if not self._coming[use.file]:
                del self._coming[use.file]
            if use.file in self._kept:
                self._last_use[use.file] = place
                self._rank(use.file)
        end = self._position + self._horizon
        for place in range(self._seen, end if self._stop is None else min(end, self._stop)):
            use = self._use_at(place)
            self._uses.append((place, use))
            coming = self._coming.setdefault(use.file, deque())
            coming.append(place)
            self._seen = place + 1
            if len(coming) == 1 and use.file in self._kept:
                self._rank(use.file)

    def _next_use(self, file: Hashable) -> int:
        coming = self._coming.get(file)
        return coming[0] if coming else NOT_IN_SIGHT + self._last_use.get(file, 0)

    def _rank(self, file: Hashable) -> None:
        """Note when a kept file is needed next."""
        heapq.heappush(self._needed, (-self._next_use(file), -next(self._numbers), file))
        if len(self._needed) > 2 * len(self._kept) + 64:
            self._rank_all()

    def _rank_all(self) -> None:
        self._needed = [(-self._next_use(file), -next(self._numbers), file) for file in self._kept]
        heapq.heapify(self._needed)

    def _victims(self, size_bytes: int, place: int) -> Optional[List[Hashable]]:
        """Files to give back so that `size_bytes` more fit, none of them needed before `place`.

        None where they cannot fit so; the file in use is brought in all the same.
        """
        over = self._kept_bytes + size_bytes - self._budget_bytes
        victims: List[Hashable] = []
        while over > 0 and self._needed and -self._needed[0][0] > place:
            next_use, _, file = heapq.heappop(self._needed)
            if file in self._kept and file not in victims and -next_use == self._next_use(file):
                victims.append(file)
                over -= self._kept[file]
        if over <= 0 or place == self._position:
            return victims
        for file in victims:
            self._rank(file)
        return None
