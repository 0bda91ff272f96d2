"""Which files to bring into memory and which to give back, at each position of a run whose order is known for ever.

The kernel drops what was used longest ago. In a run that passes over its files again and again that is what comes next,
so with more data than memory every read would go to the disk. Giving back what is needed furthest from now (Belady,
1966) keeps as much from one pass to the next as fits. Pure: this says what to do, `look_ahead` does it.
"""

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
        self._seek(0)

    @property
    def kept_bytes(self) -> int:
        """Of the files that were brought in and not given back."""
        return sum(self._kept.values())

    def keeps(self, file: Hashable) -> bool:
        """Whether `file` was brought in and not given back."""
        return file in self._kept

    def at(self, position: int) -> Step:
        """What to do as `position` is about to be read. Any position may follow any other; the next one costs least."""
        if position != self._position + 1:
            self._seek(position)
        self._position = position
        self._look()
        ahead: List[int] = []
        give_back: List[Hashable] = []
        for place, use in list(self._uses)[: 1 + self._ahead]:
            if use.file not in self._kept:
                found = self._victims(use.size_bytes, place)
                if found is None:
                    break
                for file in found:
                    del self._kept[file]
                    self._last_use.pop(file, None)
                give_back += found
                self._kept[use.file] = use.size_bytes
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

    def _look(self) -> None:
        """Forget the uses before the current position, and see those up to the horizon."""
        while self._uses and self._uses[0][0] < self._position:
            place, use = self._uses.popleft()
            self._coming[use.file].popleft()
            if not self._coming[use.file]:
                del self._coming[use.file]
            if use.file in self._kept:
                self._last_use[use.file] = place
        end = self._position + self._horizon
        for place in range(self._seen, end if self._stop is None else min(end, self._stop)):
            use = self._use_at(place)
            self._uses.append((place, use))
            self._coming.setdefault(use.file, deque()).append(place)
            self._seen = place + 1

    def _next_use(self, file: Hashable) -> int:
        coming = self._coming.get(file)
        return coming[0] if coming else NOT_IN_SIGHT + self._last_use.get(file, 0)

    def _victims(self, size_bytes: int, place: int) -> Optional[List[Hashable]]:
        """Files to give back so that `size_bytes` more fit, none of them needed before `place`.

        None where they cannot fit so; the file in use is brought in all the same.
        """
        over = self.kept_bytes + size_bytes - self._budget_bytes
        victims: List[Hashable] = []
        if over > 0:
            later = [file for file in self._kept if self._next_use(file) > place]
            later.sort(key=self._next_use)
            while over > 0 and later:
                victims.append(later.pop())
                over -= self._kept[victims[-1]]
        return victims if over <= 0 or place == self._position else None
