"""The checkpoints of a run: its last few, each a whole file named by its step, and the best weights.

    write_next(run, 120, arrays, state, keep=3)      run/checkpoints/step-00000120.npz; older ones than the last 3 go
    found = newest(run)                              the newest whole one, and what was passed over; None where none is
    path = weights_file(run, "last")                 what prediction reads: "best", or the newest whole one

A file is there whole or not at all (`cpu3d.util.atomic`). A damaged one is passed over for the one before.
"""

import contextlib
import itertools
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Tuple

from cpu3d.errors import InputError
from cpu3d.training.checkpoint import DamagedCheckpointError, SavedArrays, load_checkpoint, save_checkpoint
from cpu3d.training.run_log import flush_log

BEST = "best.npz"

_OLD = "last.npz"
"""The only checkpoint of runs from before several were kept; it counts as older than all others."""


@dataclass(frozen=True)
class Found:
    """A checkpoint that is whole."""

    path: Path
    arrays: SavedArrays
    state: Dict[str, Any]
    passed_over: Tuple[str, ...]
    """What is wrong with newer ones, a line each."""
    damaged: Tuple[Path, ...]
    """Those newer ones."""


def write_next(run: Path, step: int, arrays: Mapping[str, Any], state: Dict[str, Any], *, keep: int) -> int:
    """Add the checkpoint of `step` and remove all but the last `keep`; returns its size in bytes.

    The log is on the disk before it: after a power cut no checkpoint is there whose steps the log does not have. Raises
    OSError where it cannot be written, as on a full disk: those before stay as they are.
    """
    flush_log(run)
    size = save_checkpoint(_folder(run) / f"step-{step:08d}.npz", arrays, state)
    for old in checkpoints(run)[keep:]:
        with contextlib.suppress(OSError):  # one too many does no harm
            old.unlink()
    return size


def write_best(run: Path, weights: Mapping[str, Any], state: Dict[str, Any]) -> None:
    """Keep the network's weights alone as the best so far."""
    save_checkpoint(_folder(run) / BEST, weights, state)


def checkpoints(run: Path) -> List[Path]:
    """The files that a run could go on from, the newest first; not looked into.

    Raises OSError where the folder is there and cannot be listed: that is not to have none.
    """
    try:
        names = os.listdir(_folder(run))
    except FileNotFoundError:
        return []
    found = [_folder(run) / name for name in names if name == _OLD or re.fullmatch(r"step-\d{8,}\.npz", name)]
    return sorted(found, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    """The step that a checkpoint's name tells; -1 for one whose name tells none."""
    digits = re.search(r"\d+", path.stem)
    return int(digits[0]) if digits else -1


def newest(run: Path) -> Optional[Found]:
    """The newest checkpoint that is whole; None where there is none at all.

    Raises InputError where there are some and none is whole, or where one is of another version. Raises OSError or
    MemoryError where one could not be read: it is not passed over for that.
    """
    there = checkpoints(run)
    problems, damaged = [], []
    for path in there:
        try:
            arrays, state = load_checkpoint(path)
            return Found(path, arrays, state, tuple(problems), tuple(damaged))
        except DamagedCheckpointError as error:
            problems.extend(error.problems)
            damaged.append(path)
        except (InputError, FileNotFoundError):
            if path.is_file():
                raise
    if there and not set(there) & set(checkpoints(run)):
        return newest(run)  # a run that is going on has meanwhile written others, and removed these
    if problems:
        raise InputError(*problems)
    return None


def set_aside(found: Found) -> List[str]:
    """Rename damaged checkpoints, so that they are never in the way again; returns a line for each to print."""
    for path in found.damaged:
        names = (path.with_suffix(f".damaged{number or ''}") for number in itertools.count())
        path.rename(next(name for name in names if not name.exists()))
    return [f"warning: {problem}; now .damaged, going on from {found.path.name}" for problem in found.passed_over]


def weights_file(run: Path, weights: str) -> Path:
    """The file that holds the "best" weights of a run, or its "last": the newest whole checkpoint.

    Raises InputError where there is none.
    """
    path = _folder(run) / BEST
    if weights == "last":
        found = newest(run)
        path = found and found.path
    if path is None or not path.is_file():
        raise InputError(f"run {run} must hold its {weights} weights, found none; train it first, or name another run")
    return path


# --- Private helpers ---


def _folder(run: Path) -> Path:
    return Path(run) / "checkpoints"
