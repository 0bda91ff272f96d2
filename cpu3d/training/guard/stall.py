"""When a run hangs: no sign of life for far longer than anything before has taken.

Time is that of the watching thread's own samples. A process that is stopped (SIGSTOP), a laptop that sleeps and a host
too busy to run us leave a gap between two samples; a gap is nobody's phase.
"""

from dataclasses import dataclass, field
from typing import Dict, Optional

from cpu3d.training.guard.heartbeat import WAITING_PHASES
from memory_estimator.units import format_seconds

LONGER_THAN_BEFORE = 10
"""A wait counts as a stall beyond so many times the longest step, or the longest wait in the same phase, so far."""

FIRST_TIME = 4
"""What has never been done yet is given so many times the limit: the first step is compiled, a cold store read."""

WHILE_OTHERS_WORK = 1.5
"""A wait for other workers is given so many times the most that any phase of theirs is given: the one that hangs is
found first, by itself, and the chief can save when it has gone."""

_UNSEEN_S = 5.0
"""A wait may be longer than what was seen of it, by the time to the next look on a busy host."""

ADVICE = {
    "waiting for data": "look whether the store's file system answers, as with `ls` in the store",
    **dict.fromkeys(
        WAITING_PHASES,
        "another worker is late or gone: look at their logs and heartbeats, and at the network between them",
    ),
    "computing": "the stacks above say where",
    "validating": "look whether the store's file system answers; the stacks above say where",
    "saving": "look whether the run's file system answers, as with `ls` in the run",
    "starting": "look whether the store's file system answers, and whether all workers have started",
}
"""What to look at, by the phase that a run hangs in."""


@dataclass
class StallClock:
    """How long the run has given no sign of life, counted in time that this process really had."""

    limit_s: float
    """Nothing shorter is a stall. 0 never finds one."""
    silent_s: float = 0.0
    """Since the last sign of life."""
    longest_s: Dict[str, float] = field(default_factory=dict)
    """By phase, the longest time between two signs of life; of waits that have ended."""
    _last: Optional[float] = None
    _sign: int = 0

    def look(self, now_s: float, sign: int, expected_s: float) -> float:
        """Count up to `now_s`, about `expected_s` after the look before; returns the silence.

        `sign` is a number that changes with every sign of life.
        """
        passed = 0.0 if self._last is None else min(max(0.0, now_s - self._last), 4 * expected_s + 0.5)
        self._last = now_s
        self.silent_s = self.silent_s + passed if sign == self._sign else 0.0
        self._sign = sign
        return self.silent_s

    def ended(self, phase: str, seconds: float) -> float:
        """Note that a wait of `seconds` in `phase` has ended; returns how much of them this process really had."""
        had = min(seconds, self.silent_s + _UNSEEN_S)
        self.longest_s[phase] = max(self.longest_s.get(phase, 0.0), had)
        return had

    def allowed_s(self, phase: str, longest_step_s: Optional[float]) -> float:
        """The silence that is no stall in `phase`.

        What other workers do in the meantime, such as the chief's first save, is not known: all that any phase has
        taken here stands for it.
        """
        if phase in WAITING_PHASES:
            # The others have started, however long that has taken. A list, for the loop may add a phase meanwhile.
            waits = [seconds for name, seconds in list(self.longest_s.items()) if name != "starting"]
            longest = max([*waits, longest_step_s or 0.0])
            return WHILE_OTHERS_WORK * max(FIRST_TIME * self.limit_s, LONGER_THAN_BEFORE * longest)
        before = self.longest_s.get(phase)
        limit = self.limit_s * (1 if before is not None and longest_step_s is not None else FIRST_TIME)
        return max(limit, LONGER_THAN_BEFORE * max(before or 0.0, longest_step_s or 0.0))

    def is_stalled(self, phase: str, longest_step_s: Optional[float]) -> bool:
        """Whether the silence so far is a stall."""
        return self.limit_s > 0 and self.silent_s > self.allowed_s(phase, longest_step_s)


def stall_message(phase: str, silent_s: float, allowed_s: float, rank: int, workers: int) -> str:
    """The sentence for a stall."""
    who = f"worker {rank} of {workers}" if workers > 1 else "the run"
    advice = ADVICE.get(phase, "the stacks above say where")
    return (
        f"{who} must give a sign of life within {format_seconds(allowed_s)}, got none for {format_seconds(silent_s)}, "
        f"{phase}; {advice}. The same command goes on from the last checkpoint"
    )
