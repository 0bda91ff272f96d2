"""How long the steps and saves of a training take, added up from its phases as they end."""

import collections
import statistics
from typing import Deque, Optional

from cpu3d.training.guard.heartbeat import STEP_PHASES


class Pace:
    """Told of every phase that ends, and of every step that is done."""

    def __init__(self):
        self.last_step_s: Optional[float] = None
        self.longest_step_s: Optional[float] = None
        self.longest_had_s: Optional[float] = None
        """The longest step without the time in which this process was suspended."""
        self.longest_save_s = 0.0
        self._recent: Deque[float] = collections.deque(maxlen=100)
        self._so_far_s = self._had_so_far_s = 0.0

    def ended(self, phase: str, spent_s: float, had_s: float) -> None:
        """Note a phase that took `spent_s`, of which this process had `had_s`."""
        if phase in STEP_PHASES:
            self._so_far_s += spent_s
            self._had_so_far_s += had_s
        elif phase == "saving":
            self.longest_save_s = max(self.longest_save_s, spent_s)

    def step_ended(self, *, is_done: bool) -> None:
        """Note the end of a step; one that is not done, as where a run takes up a checkpoint, is forgotten."""
        if is_done and self._so_far_s:
            self.last_step_s = self._so_far_s
            self._recent.append(self._so_far_s)
            self.longest_step_s = max(self.longest_step_s or 0.0, self._so_far_s)
            self.longest_had_s = max(self.longest_had_s or 0.0, self._had_so_far_s)
        self._so_far_s = self._had_so_far_s = 0.0

    @property
    def median_step_s(self) -> Optional[float]:
        """Of the last hundred."""
        recent = list(self._recent)
        return statistics.median(recent) if recent else None
