"""What must hold of a folder after a kill, and at the end beside one that nothing was ever done to."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Mapping, Tuple

import numpy as np

from cpu3d.bench.faults.watch import partials
from cpu3d.data.store import open_store
from cpu3d.errors import InputError
from cpu3d.training.checkpoint import load_checkpoint
from cpu3d.training.checkpoint_history import BEST, checkpoints, newest
from cpu3d.training.run_log import read_events

EXACT = {
    "step": ("step", "epoch", "case_id", "loss", "dice", "learning_rate"),
    "validation": ("step", "epoch", "loss", "dice", "mean_dice", "best", "cases"),
}
"""Event -> what of it follows from the run alone. JSON keeps a float to the bit."""

OF_THE_CLOCK = ("trained_s",)
"""In a checkpoint's state what no two runs share."""


@dataclass(frozen=True)
class Left:
    """What a kill has left of a run."""

    saved_step: int
    """Of the newest whole checkpoint; 0 for none."""
    logged_step: int
    problems: Tuple[str, ...]

    @property
    def redone(self) -> int:
        """Steps that are to be done again."""
        return max(self.logged_step - self.saved_step, 0)


def left_of_run(run: Path) -> Left:
    """Look at a run folder after a kill: every checkpoint whole, none older than the log says, no step skipped."""
    problems, saved = [], 0
    events = read_events(run)
    logged = [event["step"] for event in events if event["event"] == "step"]
    saves = [event["step"] for event in events if event["event"] == "checkpoint"]
    for path in (run / "checkpoints").glob("*.npz"):  # what is being written has another name
        problems += _problems_of(path)
    if not problems:
        found = newest(run)
        saved = found.state["step"] if found else 0
        if found and found.path not in checkpoints(run)[:1]:
            problems.append(f"the checkpoint taken must be the newest, got {found.path.name}")
    if saved < max(saves, default=0):
        problems.append(f"step {max(saves)} was logged as saved and must be there, got step {saved}")
    if logged != list(range(1, len(logged) + 1)):
        problems.append(f"logged steps must be 1, 2, 3 and so on, got {_where_broken(logged)}")
    return Left(saved, logged[-1] if logged else 0, tuple(problems))


def left_of_store(store: Path) -> Tuple[int, Tuple[str, ...]]:
    """Look at a store after a kill: how many cases are finished, and what is wrong. A manifest means all is there."""
    done = len(list((store / "cases").glob("*.json"))) if (store / "cases").is_dir() else 0
    if not (store / "manifest.json").exists():
        return done, ()
    try:
        open_store(store)
    except InputError as error:
        return done, error.problems
    return done, ()


def run_differences(reference: Path, run: Path, keep: int) -> List[str]:
    """In what a finished run is not that of `reference`, to the bit, and what is left in its folder beyond it."""
    found = []
    for event, names in EXACT.items():
        wanted, got = _exact(reference, event, names), _exact(run, event, names)
        if wanted != got:
            found.append(f"{event}s must be the {len(wanted)} of the reference, got {_first_difference(wanted, got)}")
    last = read_events(run)[-1:]
    if [event.get("event") for event in last] != ["end"] or last[0].get("reason") != "finished":
        found.append(f"the log must end with the end, got {last}")
    wanted, got = newest(reference), newest(run)
    if wanted is None or got is None:
        return [*found, "both runs must have a checkpoint"]
    found += _differences("last", (wanted.arrays, wanted.state), (got.arrays, got.state))
    best = [folder / "checkpoints" / BEST for folder in (reference, run)]
    if not all(path.is_file() for path in best):
        found.append("both runs must have best weights")
    else:
        found += _differences("best", *map(load_checkpoint, best))
    if len(checkpoints(run)) > keep:
        found.append(f"at most {keep} checkpoints must be kept, got {len(checkpoints(run))}")
    found += [f"nothing half-written must stay, got {path.name}" for path in partials(run / "checkpoints")]
    return found


def store_differences(reference: Path, store: Path) -> List[str]:
    """Files that one of two stores has alone or that differ, by their hash."""
    wanted, got = _hashes(reference), _hashes(store)
    names = sorted(name for name in {**wanted, **got} if wanted.get(name) != got.get(name))
    return [f"file {name} must be as in a store prepared at once" for name in names]


# --- Private helpers ---


def _problems_of(path: Path) -> Tuple[str, ...]:
    try:
        load_checkpoint(path)
    except InputError as error:
        return error.problems
    return ()


def _where_broken(steps: List[int]) -> str:
    before, here = next((a, b) for a, b in zip([0, *steps], steps) if b != a + 1)
    return f"{here} after {before}"


def _exact(run: Path, event: str, names: Tuple[str, ...]) -> List[Dict[str, Any]]:
    return [{name: found[name] for name in names} for found in read_events(run) if found["event"] == event]


def _first_difference(wanted: List[Dict[str, Any]], got: List[Dict[str, Any]]) -> str:
    for one, other in zip(wanted, got):
        if one != other:
            return f"{other} for {one}"
    return f"{len(got)} of them"


def _differences(
    name: str,
    wanted: Tuple[Mapping[str, np.ndarray], Dict[str, Any]],
    got: Tuple[Mapping[str, np.ndarray], Dict[str, Any]],
) -> List[str]:
    (arrays, state), (other_arrays, other_state) = wanted, got
    odd = [key for key in sorted({*arrays, *other_arrays}) if not _same_bits(arrays.get(key), other_arrays.get(key))]
    found = []
    if odd:
        found.append(f"{name}: {len(odd)} of {len(arrays)} arrays differ, the first {odd[0]}")
    states = [{key: value for key, value in one.items() if key not in OF_THE_CLOCK} for one in (state, other_state)]
    if states[0] != states[1]:
        found.append(f"{name}: state must be {states[0]}, got {states[1]}")
    return found


def _same_bits(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return False
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def _hashes(folder: Path) -> Dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
