"""Workers of an earlier attempt on this host that have not ended yet: those of a launch that was killed still save."""

import time
from pathlib import Path
from typing import List

from cpu3d.distributed.beats import is_here
from cpu3d.distributed.follow import say
from cpu3d.errors import InputError
from cpu3d.training.heartbeat import Heartbeat, read_heartbeats

MOST_S = 60.0
"""So long is waited for them, and as long as three of their steps: they finish the one they are in, and save."""


def wait_for_earlier(run: Path) -> None:
    """Return when `run` has no workers here. Raises InputError where they go on, as a run that lives does."""
    begin_s = time.monotonic()
    said = False
    while True:
        left = _living(run)
        if not left:
            return
        names = ", ".join(f"worker {beat.rank} (process {beat.pid})" for beat in left)
        longest_s = max(beat.longest_step_s or 0.0 for beat in left)
        if time.monotonic() > begin_s + MOST_S + 3 * longest_s:
            raise InputError(f"run {run} must have no other workers, got {names}; wait for them, or end them")
        if not said:
            say(f"launch: waiting for {names} of an earlier attempt to end")
            said = True
        time.sleep(0.2)


# --- Private helpers ---


def _living(run: Path) -> List[Heartbeat]:
    """The last beats of processes of this host that live."""
    return [beat for beat in read_heartbeats(run).values() if isinstance(beat, Heartbeat) and is_here(beat)]
