"""run/heartbeats/worker-RANK.json: the state of a worker of a run, written every few seconds while
it is alive.

It is written atomically but not flushed to the disk. `life_of` says whether its worker is alive, on
the worker's host by its process, on another one that sees the folder by the heartbeat's age.
"""

import contextlib
import dataclasses
import enum
import json
import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Optional

from cpu3d.util.atomic import atomic_write
from memory_estimator.common.files import read_record, typed

SCHEMA = 1

# The phases in which a worker waits for the others.
WAITING_PHASES = (
    "summing gradients",
    "waiting for the others' validation",
    "waiting for the last checkpoint",
)
DECIDING = "deciding post-processing"  # the phase after the last step
BEAT_S = 5.0  # between two beats, and the most between a change of phase and the file
# A worker that has sent another host nothing for so long, as one that a signal has stopped, is
# lost.
LOST_S = 20.0
# A worker whose last beat is older is not known to be alive; network file systems lag by seconds.
SILENT_S = 60.0
# Without a beat, until `launch` kills it: importing a library from a slow disk may take long.
HANGING_S = 300.0


@dataclass
class Heartbeat:
    """A worker, as it was at its last beat. Times of day are seconds since 1970 by the worker's
    host."""

    rank: int
    workers: int  # of the run
    pid: int
    process_start: int  # a later process of the same pid has another; see `process_start`
    place: str  # the system and pid namespace that the pid is of; see `this_place`
    host_name: str
    started: float
    beat: float
    phase: str
    phase_since: float
    step: int  # steps done
    steps: int  # of the run; 0 if that is not known
    longest_step_s: Optional[float] = None  # of this attempt; the first compiles the step
    own_bytes: Optional[int] = None  # in the process's memory; None if the system does not show it
    peak_bytes: Optional[int] = None  # the most that was there, files included
    bound_bytes: Optional[int] = None  # the plan's upper bound
    free_bytes: Optional[int] = None  # left by the tightest limit
    stop: str = ""  # why the run is to stop after this step
    reason: str = ""  # how it ended, in a sentence or a word; "" while it runs
    exit_code: Optional[int] = None  # of the process; None while it runs


def heartbeat_path(run: Path, rank: int) -> Path:
    """The file of a worker's heartbeat."""
    return Path(run) / "heartbeats" / f"worker-{rank}.json"


def write_heartbeat(run: Path, heartbeat: Heartbeat) -> None:
    """Replace the worker's file. Raises OSError, with the old file unchanged, if that fails."""
    path = heartbeat_path(run, heartbeat.rank)
    path.parent.mkdir(exist_ok=True)
    with atomic_write(path, "w", flush=False, token="beat") as file:
        file.write(json.dumps({"schema": SCHEMA, **dataclasses.asdict(heartbeat)}, indent=1))


def read_heartbeats(run: Path) -> Dict[int, Any]:
    """Rank -> the worker's Heartbeat, or a str, the problem of its file; {} for a run without
    any."""
    heartbeats: Dict[int, Any] = {}
    with contextlib.suppress(OSError):
        for path in sorted((Path(run) / "heartbeats").iterdir()):
            rank = re.fullmatch(r"worker-(\d+)\.json", path.name)
            if rank:
                heartbeats[int(rank[1])] = _read(path)
    return heartbeats


class Life(enum.Enum):
    """What is known of a worker that has noted no end."""

    ALIVE = "its heartbeat is young"
    SILENT = "its heartbeat is old"
    ENDED = "its process was of this host, and is not there any more"


def life_of(run: Path, beat: Heartbeat, now: float) -> Life:
    """Whether the worker of a heartbeat is alive."""
    if is_of_this_place(beat) and beat.process_start and not is_here(beat):
        return Life.ENDED
    if beat_age_s(run, beat, now) > SILENT_S:
        return Life.SILENT
    return Life.ALIVE


def beat_age_s(run: Path, beat: Heartbeat, now: float) -> float:
    """Seconds since the last beat, by the clock of the worker's host or of the file system: the
    smaller of the two."""
    ages = [now - beat.beat]
    with contextlib.suppress(OSError):
        ages.append(now - os.stat(heartbeat_path(run, beat.rank)).st_mtime)
    return max(0.0, min(ages))


def is_here(beat: Heartbeat) -> bool:
    """Whether the heartbeat's process runs at this place: pids repeat on other hosts, and here
    after its end."""
    return is_of_this_place(beat) and process_start(beat.pid) == beat.process_start


def is_of_this_place(beat: Heartbeat) -> bool:
    """Whether the heartbeat's pid is one of this running system and pid namespace."""
    return beat.place == this_place()


def this_place() -> str:
    """The running system and its pid namespace; host names may repeat, as those of containers
    do."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def process_start(pid: int) -> Optional[int]:
    """When a process of this place began, in a unit of its own; None when there is none, or it has
    ended (a zombie)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # "123 (a name) S ...": the name may hold anything, so count from its end.
    fields = text.rpartition(")")[2].split()
    if len(fields) < 20 or fields[0] in "ZX":
        return None
    return int(fields[19])


# --- Private helpers ---


def _read(path: Path) -> Any:
    todo = "a running worker soon replaces it"
    try:
        return read_record(path, SCHEMA, lambda content: typed(content, Heartbeat), todo)
    except (OSError, ValueError) as error:
        return str(error)
