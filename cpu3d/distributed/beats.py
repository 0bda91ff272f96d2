"""The newest heartbeats of processes that a launch has started, from a file system that may stop to answer."""

import functools
from pathlib import Path
from typing import Dict, Tuple

from cpu3d.distributed.patiently import Patiently
from cpu3d.training.heartbeat import Heartbeat, process_start, read_heartbeats, this_place
from cpu3d.util.child import family


class Beats:
    """Ask it with a process id: it tells the last known heartbeats of that process and of all that it has started."""

    def __init__(self, run: Path):
        self._read = Patiently(functools.partial(read_heartbeats, run), 1.0, {})
        self._known: Dict[int, Heartbeat] = {}

    def __call__(self, pid: int) -> Tuple[Heartbeat, ...]:
        for beat in self._read().values():
            if isinstance(beat, Heartbeat) and is_here(beat):
                self._known[beat.pid] = beat
        members = (pid,) if pid in self._known else family(pid)
        return tuple(self._known[member] for member in members if member in self._known)


def is_here(beat: Heartbeat) -> bool:
    """Whether the heartbeat is of a process that lives, and of this place: numbers repeat on other hosts."""
    return beat.place == this_place() and process_start(beat.pid) == beat.process_start
