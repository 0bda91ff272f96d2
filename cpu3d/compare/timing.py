"""What a step of each variant takes, told by short runs before a budget of minutes becomes steps."""

import shutil
import statistics
from pathlib import Path
from typing import Any, Dict, List, Mapping, Sequence

from cpu3d.compare.budget import TIMED_STEPS
from cpu3d.compare.plan import Json, run_options
from cpu3d.compare.planned import PlannedRun, is_trained
from cpu3d.compare.runner import carry_out
from cpu3d.errors import InputError
from cpu3d.training.run_log import read_events
from cpu3d.util.atomic import PARTIAL

FOLDER = f".warm-up{PARTIAL}"
"""In the comparison's folder, until the steps are kept."""


def step_seconds(plan: Sequence[Json], store: Path, out: Path, *, force: bool = False) -> Dict[str, float]:
    """Seconds a step by variant, the waiting for data aside: the median of two runs' later halves.

    The runs go through the variants and back, A B B A, so that a host that slows down or speeds up is the same to all.
    Those that are there are kept, but for one that was cut off: its compilation is in its midst.
    """
    runs = [
        PlannedRun(course["name"], 0, out / FOLDER / f"{course['name']}-timed{turn}", _options(course))
        for turn, order in enumerate((plan, plan[::-1]))
        for course in order
    ]
    for run in runs:
        if run.folder.exists() and not _is_whole(run):
            shutil.rmtree(run.folder)
    carry_out(runs, store, out, force=force)
    seconds: Dict[str, List[float]] = {course["name"]: [] for course in plan}
    for run in runs:
        seconds[run.variant] += computing_seconds(read_events(run.folder))
    return {name: statistics.median(values) for name, values in seconds.items()}


def computing_seconds(events: Sequence[Mapping[str, Any]]) -> List[float]:
    """Those of each step in the later half of a log, less what it waited for data."""
    steps = [event for event in events if event.get("event") == "step"]
    return [event["step_s"] - event.get("wait_s", 0.0) for event in steps[len(steps) // 2 :]]


def forget(out: Path) -> None:
    """Remove the short runs, once what they told is kept."""
    shutil.rmtree(Path(out) / FOLDER, ignore_errors=True)


# --- Private helpers ---


def _options(course: Json) -> tuple:
    return run_options({**course, "validate_every": None}, 0, TIMED_STEPS, 1)


def _is_whole(run: PlannedRun) -> bool:
    try:
        return is_trained(run)
    except InputError:
        return False  # of other options, or damaged
