"""Which worker processes of this host are silent: their heartbeats do not change any more, though they live.

A worker reports its own stalls (`cpu3d.training.watchdog`); one that was suspended, or holds Python's lock, cannot.
"""

import contextlib
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Callable, Dict, Sequence, Tuple

from cpu3d.distributed.beats import is_here
from cpu3d.training.heartbeat import Heartbeat, is_suspended, read_heartbeats
from cpu3d.util.child import family

SUSPENDED_S = 60.0
"""A worker that a signal has stopped, and that nobody lets go on for so long, holds up all others."""

SILENT_S = 300.0
"""For any other: there is a beat every few seconds, but importing a library from a slow disk may take long."""


class Silence:
    """Ask it now and then, with the process ids. Silence counts from the first time that a beat was seen.

    By a clock of its own, as the time of day may jump, and never on a disk that takes no files, where beats are lost.
    """

    def __init__(
        self,
        run: Path,
        suspended_s: float = SUSPENDED_S,
        silent_s: float = SILENT_S,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._run, self._clock = run, clock
        self._suspended_s, self._silent_s = suspended_s, silent_s
        self._seen: Dict[int, Tuple[float, float]] = {}
        """Process -> its last beat, and when that was seen first."""

    def __call__(self, pids: Sequence[int]) -> Dict[int, str]:
        """Those that hang, and how one knows. A process without a heartbeat of its own is none of them.

        Nor is one that has noted its end: it beats no more, and waits for the chief, who may save for long.
        """
        found = {}
        for beat in read_heartbeats(self._run).values():
            if not isinstance(beat, Heartbeat) or beat.pid not in pids or not is_here(beat):
                continue
            before = self._seen.get(beat.pid)
            if before is None or before[0] != beat.beat:
                self._seen[beat.pid] = (beat.beat, self._clock())
                continue
            silent_s = self._clock() - before[1]
            suspended = is_suspended(beat.pid)
            if beat.exit_code is not None and not suspended:
                continue
            if silent_s > (self._suspended_s if suspended else self._silent_s) and (suspended or self._takes_files()):
                why = "as a signal has stopped it" if suspended else "though it lives"
                found[beat.pid] = f"silent for {silent_s:.0f} s while {beat.phase}, {why}"
        return found

    def _takes_files(self) -> bool:
        try:
            with tempfile.TemporaryFile(dir=self._run) as file:
                file.write(bytes(2**16))
            return True
        except OSError:
            return False


class SilenceBelow:
    """The same for workers that are below a launcher which ends all of them when one has ended, as Horovod's does.

    So that one is killed here, and no process named to the asker.
    """

    def __init__(self, run: Path, say: Callable[[str], None]):
        self._silence, self._say = Silence(run), say

    def __call__(self, pids: Sequence[int]) -> Dict[int, str]:
        members = [member for pid in pids for member in family(pid)]
        for worker, why in self._silence(members).items():
            self._say(f"launch: process {worker} hangs, {why}; it is ended")
            with contextlib.suppress(OSError):
                os.kill(worker, signal.SIGKILL)
        return {}
