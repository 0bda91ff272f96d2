"""How long a launch waits for what: a worker that computes hears of nothing before its step is done."""

from dataclasses import dataclass
from typing import Iterable, Sequence

from cpu3d.errors import MemoryRunsOutError, WorkerLostError
from cpu3d.training.heartbeat import STEP_PHASES, Heartbeat

TOGETHER = (MemoryRunsOutError.exit_code, 130, 143)
"""How workers end that have agreed to: they do so after the same step, and the chief saves."""

IDLE = ("starting", "ended")
"""Phases of workers that have nothing to save."""


@dataclass(frozen=True)
class Patience:
    """How long each wait may take. One that hangs is ended by its watchdog, or by a second Ctrl-C."""

    poll_s: float = 0.2
    look_s: float = 5.0
    """Between two looks for workers that hang."""
    settle_s: float = 8.0
    """From the first that lost another worker until that one is looked for elsewhere: a failing process takes a while
    to end, and the others are told before it has."""
    saving_s: float = 300.0
    """From the first that ended by agreement until the others are asked to end as well."""
    hears_s: float = 20.0
    """From any other failure while training, besides the step in flight: the others hear of it."""
    grace_s: float = 300.0
    """From the request to end to SIGKILL, besides what is in flight."""
    unforeseen_s: float = 3600.0
    """For what is in flight where nothing tells how long it takes: a first step, a validation, a checkpoint."""
    dies_s: float = 30.0
    """From SIGKILL until a process counts as one that nothing ends, as where the kernel waits for a file system."""

    def before_stop_s(self, code: int, others: Sequence[Heartbeat]) -> float:
        """From a worker's end by `code` until the others, whose heartbeats these are, are asked to end."""
        if code in TOGETHER:
            return self.saving_s
        if code == WorkerLostError.exit_code:
            return self.settle_s
        busy = _busy(others)
        return self.hears_s + max(beat.longest_step_s or 0.0 for beat in busy) if busy else 0.0

    def before_kill_s(self, beats: Sequence[Heartbeat]) -> float:
        """From the request to end to SIGKILL, of the process with these heartbeats."""
        return self.grace_s + max(map(self._in_flight_s, _busy(beats)), default=0.0)

    def _in_flight_s(self, beat: Heartbeat) -> float:
        if beat.phase in STEP_PHASES and beat.longest_step_s is not None:
            return 2 * beat.longest_step_s
        return self.unforeseen_s


PATIENCE = Patience()
"""Of every launch."""


# --- Private helpers ---


def _busy(beats: Iterable[Heartbeat]) -> Sequence[Heartbeat]:
    return [beat for beat in beats if beat.phase not in IDLE]
