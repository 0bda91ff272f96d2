"""A run seen from outside while it works, and what its folder tells of the moment at which it was killed."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, FrozenSet, List, Optional, Tuple

from cpu3d.bench.faults.aims import (
    ANYWHERE,
    COMPUTING,
    ENDED,
    PREPARING,
    SAVING,
    SAVING_BY_TIME,
    STARTING,
    VALIDATING,
    Aim,
)
from cpu3d.training.checkpoint_history import checkpoints, step_of

POLL_S = 0.0005
"""Between two looks: phases of a small run last milliseconds."""


@dataclass(frozen=True)
class Usual:
    """How the work goes undisturbed."""

    seconds: Dict[str, float]
    """Phase -> how long it takes, of those that come again the shortest; ANYWHERE is the whole process, PREPARING from
    the first case on."""
    steps: int
    validations: FrozenSet[int]
    """Steps after which there is one."""


class LogTail:
    """The events that a run adds to its log from now on, taken line by line, across its being written anew."""

    def __init__(self, run: Path):
        self._path = Path(run) / "log.jsonl"
        self._inode, self._read = _inode_and_size(self._path)
        self._starts = [line for line in _lines(self._path) if _is_start(line)]
        self.started = False
        """Whether this attempt has said that it begins."""
        self.last: Optional[Dict[str, Any]] = None
        """The newest whole event of this attempt, or of what it has kept of earlier ones."""

    def look(self) -> None:
        """Take what is new."""
        inode, size = _inode_and_size(self._path)
        if inode != self._inode or size < self._read:
            self._inode, self._read = inode, 0
        if size == self._read:
            return
        with self._path.open("rb") as file:
            file.seek(self._read)
            whole = file.read().rpartition(b"\n")[0]
        self._read += len(whole) + 1 if whole else 0
        lines = whole.splitlines()
        self.started |= any(_is_start(line) and line not in self._starts for line in lines)
        if lines:
            self.last = _parsed(lines[-1]) or self.last

    @property
    def step(self) -> int:
        return self.last["step"] if self.last else 0


def wait_for(aim: Aim, usual: Usual, folder: Path, tail: LogTail, begin: float, alive: Callable[[], bool]) -> bool:
    """Wait until the moment that `aim` means; False when the process that began at `begin` has ended before."""
    if aim.phase in (STARTING, ANYWHERE):
        come = lambda: True  # noqa: E731
    elif aim.phase == PREPARING:
        come = (folder / "cases").is_dir
    else:
        come = lambda: _is_in(aim, usual, folder, tail)  # noqa: E731
    from_start = aim.phase in (STARTING, ANYWHERE)
    while alive():
        tail.look()
        if come():
            moment = (begin if from_start else time.monotonic()) + aim.delay * usual.seconds[aim.phase]
            while alive() and time.monotonic() < moment:
                time.sleep(max(min(POLL_S, moment - time.monotonic()), 0))
            return alive()
        time.sleep(POLL_S)
    return False


def phase_hit(run: Path, tail: LogTail, usual: Usual) -> str:
    """In which phase a training was that is dead now, by what it has left."""
    tail.look()
    if not tail.started or tail.last is None:
        return STARTING
    if tail.last["event"] == "end":
        return ENDED
    if any(partials(run / "checkpoints")):
        return SAVING
    if tail.last["event"] == "validation" or _is_unlogged(run, tail):
        return SAVING
    if tail.last["event"] == "step" and tail.step in usual.validations:
        return VALIDATING
    return COMPUTING


def partials(folder: Path) -> List[Path]:
    """What is being written in a folder, or was when its writer died."""
    return sorted(Path(folder).glob(".*.partial"))


# --- Private helpers ---


def _is_in(aim: Aim, usual: Usual, run: Path, tail: LogTail) -> bool:
    if not tail.started or tail.last is None or tail.step < aim.not_before * usual.steps:
        return False
    event = tail.last["event"]
    if aim.phase == SAVING:
        return event == "validation"
    if aim.phase == SAVING_BY_TIME:
        return event == "step" and tail.step not in usual.validations and any(partials(run / "checkpoints"))
    if aim.phase == VALIDATING:
        return event == "step" and tail.step in usual.validations
    return event == "step"


def _is_unlogged(run: Path, tail: LogTail) -> bool:
    """Whether the newest checkpoint is of the last step, and no line says so yet."""
    newest = checkpoints(run)[:1]
    return bool(newest) and tail.last["event"] == "step" and step_of(newest[0]) == tail.step


def _inode_and_size(path: Path) -> Tuple[int, int]:
    try:
        status = path.stat()
    except FileNotFoundError:
        return 0, 0
    return status.st_ino, status.st_size


def _lines(path: Path) -> List[bytes]:
    return path.read_bytes().splitlines() if path.is_file() else []


def _is_start(line: bytes) -> bool:
    return line.startswith(b'{"event": "start"')


def _parsed(line: bytes) -> Optional[Dict[str, Any]]:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None
