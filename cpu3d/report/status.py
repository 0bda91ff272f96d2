"""Print the state of a run: phase, progress, memory, and what to do next.

    ./run.sh status --run runs/first
    watch ./run.sh status --run runs/first
    ./run.sh status --run runs/first --json
    ./run.sh status --run runs/folds
    ./run.sh status --run comparison

The exit code is 0 while a run trains and once it has finished, 1 for a run that needs attention: a
worker sends no heartbeat, or has ended before the run was done or its post-processing decided; 2
for a folder that is no run. It reads heartbeats, config.json, plan.json, log.jsonl, checkpoints and
the decision, on any host that sees the folder, and changes nothing. A worker of this host is alive
while its process is there, one of another host while its heartbeat is younger than a minute. Any
file may be missing or half-written; its values are then unknown. Of the folder of `train --folds`
or `compare` it prints every run, and the time left in all."""

import dataclasses
import json
import time
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from rich.console import Group
from rich.text import Text

from cpu3d.errors import InputError
from cpu3d.inference.out_of_fold import SPLIT, is_scored
from cpu3d.inference.scores_file import UNTOUCHED, are_of_weights, read_scores, scores_path
from cpu3d.report.run_status import (
    ALIVE,
    FINE,
    IDLE,
    RunStatus,
    WorkerStatus,
    run_status,
    workers_of,
)
from cpu3d.run.folds import RunSet, read_run_set
from cpu3d.run.heartbeat import read_heartbeats
from cpu3d.run.log import FINISHED, last_end
from cpu3d.run.summary import median, numbers
from cpu3d.util.records import listed
from memory_estimator.common.schema import option
from memory_estimator.common.table import Bad, Good, Poor, Table, new_console
from memory_estimator.common.units import format_bytes, format_seconds


@dataclass(frozen=True)
class Options:
    """Options of `status`."""

    run: Path = option(help="folder of the run", metavar="DIR")
    json: bool = option(False, help="print everything as JSON")


OPTIONS = (Options,)


def run(options: Options) -> int:
    look: Any = run_status
    show: Any = describe
    if read_run_set(options.run):
        look = set_status
        show = describe_set
    status = look(options.run)
    if options.json:
        print(json.dumps(dataclasses.asdict(status), indent=1))
    else:
        new_console().print(show(status))
    return 0 if status.is_fine else 1


def describe(status: RunStatus) -> Group:
    """The text to print: the run in a line, its workers in a table, then progress and what to
    do."""
    left = _left(status.seconds_left, is_alive=status.state in ALIVE)
    if status.steps_left and not status.is_fine:
        begin = status.steps - status.steps_left
        steps = f"{status.steps_left:,} of {status.steps:,} steps, from step {begin:,}"
        left = f"{steps}, {left}" if left else steps
    columns = ("worker", "state", "phase", "memory", "peak", "plan", "free")
    rows = [_cells(worker) for worker in status.workers]
    caption = "phase, and how long it lasts; M is MiB, G is GiB"
    lines = [
        *_progress(status),
        *(("plan", reason) for reason in status.reasons),
        ("note" if status.is_fine else "why", status.detail),
        ("left", left),
        ("next", status.advice),
    ]
    table = Table(columns, rows, caption=caption, names=3)
    return _shown("run", status.folder, status.state, table, lines)


# --- Several runs ---


@dataclass(frozen=True)
class PartStatus:
    """The present state of a run of several."""

    name: str  # as "2/5" of a fold
    run: str  # its folder
    state: str  # "waiting", that of its run, or "scored"
    step: int
    steps: Optional[int]
    mean_dice: Optional[float]  # of the cases that it is scored on
    seconds_left: Optional[float]  # until it is scored; None if that is not known
    advice: str = ""  # what to do about one that has failed


@dataclass(frozen=True)
class SetStatus:
    """The present state of folds, or of the runs of a comparison."""

    folder: str
    kind: str  # "folds" or "comparison"
    state: str  # of the process that trains them
    detail: str  # more on a state that needs attention
    advice: str  # what to do next; "" for nothing
    is_fine: bool  # whether it runs or has finished
    phase: str  # what it does, such as "training fold 2/5"
    runs: Tuple[PartStatus, ...]
    seconds_left: Optional[float]  # in all; None if it has finished, or that is not known


def set_status(folder: Path) -> SetStatus:
    """Look at a folder of folds, or of a comparison. Raises InputError for one that is damaged."""
    run_set = read_run_set(folder)
    ends = map(last_end, run_set.runs.values())
    finished = [end for end in ends if end.get("reason") == FINISHED]
    usual_s = run_set.run_s
    if finished:
        usual_s = median(numbers(finished, "seconds"))
    parts = [_part_status(name, run_set, usual_s) for name in run_set.runs]
    lacking = [part.name for part in parts if part.state != "scored"]
    workers = workers_of(folder, read_heartbeats(folder), time.time())
    worker = workers[0] if workers else WorkerStatus(0, "unknown", "there is no heartbeat")
    if not lacking and worker.state in IDLE:
        worker = replace(worker, state="finished", detail="")
    elif lacking and worker.state in ("finished", "interrupted"):
        state = "unknown" if worker.state == "finished" else worker.state
        detail = f"runs without scores of their present weights: {listed(lacking)}"
        worker = replace(worker, state=state, detail=detail)
    advice = ""
    if worker.state == "finished":
        advice = f"{folder / 'report.html'} has all results"
        if run_set.kind == "folds":
            advice += f"; `predict --run {folder}` takes the folds together"
    elif worker.state == "silent":
        advice = "when its process has ended, the same command continues"
    elif worker.state not in FINE:
        failed = [part.advice for part in parts if part.advice]
        advice = failed[0] if failed else "the same command continues"
    left_s = [part.seconds_left for part in parts]
    return SetStatus(
        folder=str(folder),
        kind=run_set.kind,
        state=worker.state,
        detail=worker.detail,
        advice=advice,
        is_fine=worker.state in FINE,
        phase=worker.heartbeat.phase if worker.heartbeat and worker.state in ALIVE else "",
        runs=tuple(parts),
        seconds_left=None if not lacking or None in left_s else sum(left_s),
    )


def describe_set(status: SetStatus) -> Group:
    """The text to print: the folder in a line, its runs in a table, progress and what to do."""
    rows = []
    for part in status.runs:
        of = f" of {part.steps:,}" if part.steps else ""
        dice = "-" if part.mean_dice is None else f"{part.mean_dice:.3f}"
        left = "-" if part.seconds_left is None else format_seconds(round(part.seconds_left))
        rows.append((part.name, part.state, f"{part.step:,}{of}", left, dice))
    left = _left(status.seconds_left, is_alive=bool(status.phase))
    columns = ("run", "state", "step", "left", "mean Dice")
    caption = "mean Dice: of the cases that the run is scored on"
    table = Table(columns, rows, caption=caption, names=2)
    lines = [("phase", status.phase), ("left", left), ("why", status.detail)]
    lines.append(("next", status.advice))
    return _shown(status.kind, status.folder, status.state, table, lines)


# --- Private helpers ---


def _part_status(name: str, run_set: RunSet, usual_s: Optional[float]) -> PartStatus:
    """The state of a run of several; of one whose pace is not known `usual_s` seconds are left."""
    run = run_set.runs[name]
    if not ((run / "config.json").is_file() or read_heartbeats(run)):
        return PartStatus(name, str(run), "waiting", 0, None, None, usual_s)
    status = run_status(run, is_fold=run_set.is_out_of_fold)
    steps = (status.step, status.steps)
    if status.state != "finished":
        left_s = usual_s if status.seconds_left is None else status.seconds_left
        advice = "" if status.is_fine else status.advice
        return PartStatus(name, str(run), status.state, *steps, None, left_s, advice)
    mean_dice = _mean_dice(run, run_set)
    state = "finished" if mean_dice is None else "scored"
    return PartStatus(name, str(run), state, *steps, mean_dice, 0.0)


def _mean_dice(run: Path, run_set: RunSet) -> Optional[float]:
    """The mean Dice of a run's current scores; None if there are none."""
    split = UNTOUCHED
    if run_set.is_out_of_fold:
        split = SPLIT
        if not is_scored(run):
            return None
    try:
        scores = read_scores(scores_path(run, split))
    except InputError:
        return None
    return scores["mean_dice"] if are_of_weights(scores, [run]) else None


def _styled(state: str) -> str:
    """The state in its colour."""
    if state in ("interrupted", "stopping"):
        return Poor(state)
    if state in FINE:
        return Good(state)
    return Bad(state)


def _shown(
    kind: str, folder: str, state: str, table: Table, lines: Sequence[Tuple[str, str]]
) -> Group:
    """A line of state, a table if it has rows, and lines as (name, text), if they have one."""
    styled = _styled(state)
    shown: List[Any] = [Text.assemble((f"{kind}: ", "bold"), f"{folder}: ", (styled, styled.style))]
    if table.rows:
        shown.append(table)
    for name, text in lines:
        if text:
            shown.append(Text.assemble((f"{name}: ", "bold"), text))
    return Group(*shown)


def _cells(worker: WorkerStatus) -> Tuple[str, ...]:
    beat = worker.heartbeat
    state = _styled(worker.state)
    if beat is None:
        return (str(worker.rank), state, *["-"] * 5)
    phase = f"{beat.phase}, {format_seconds(round(max(0.0, beat.beat - beat.phase_since)))}"
    if beat.exit_code is not None:
        phase = f"ended, code {beat.exit_code}"
    sizes = [beat.own_bytes, beat.peak_bytes, beat.bound_bytes, beat.free_bytes]
    if worker.state not in ALIVE:  # it holds no memory, as far as is known
        sizes[0] = None
        sizes[3] = None
    return (str(worker.rank), state, phase, *map(_short, sizes))


def _left(seconds: Optional[float], *, is_alive: bool) -> str:
    """What is left of a run, and when a run that is alive will have ended; "" if it is not
    known."""
    if seconds is None:
        return ""
    left = f"about {format_seconds(round(seconds))}"
    if is_alive:
        left += f", until {datetime.now() + timedelta(seconds=seconds):%a %d %b %H:%M}"
    return left


def _progress(status: RunStatus) -> List[Tuple[str, str]]:
    """(name, text) of each line on progress."""
    text = f"{status.step:,}"
    if status.steps:
        text += f" of {status.steps:,} ({status.step / status.steps:.1%})"
    if status.step_s:
        text += f", {format_seconds(status.step_s)} a step"
    lines = [("step", text)]
    if status.loss is not None:
        lines.append(("recent steps", f"loss {status.loss:.3f}, {_dice(status.dice)}"))
    validation = status.validation
    if validation:
        text = _dice(validation.get("dice") or {})
        left_out = validation.get("left_out_of_mean")
        if left_out:
            text += f" (no case has {listed(left_out)})"
        if validation.get("mean_dice") is not None:
            text += f", mean {validation['mean_dice']:.3f}"
        if status.best is not None:
            text += f", best {status.best:.3f}"
        lines.append((f"validation after step {validation.get('step')}", text))
    saved = status.checkpoint
    text = "none yet"
    if saved:
        age = format_seconds(round(saved["age_s"]))
        text = f"step {saved['step']:,}, {age} ago, {format_bytes(saved['size_bytes'])}"
    lines.append(("checkpoint", text))
    return lines


def _short(size_bytes: Optional[int]) -> str:
    """Bytes for a column, as 14.00G."""
    if size_bytes is None:
        return "-"
    return format_bytes(size_bytes).replace(" ", "").replace("iB", "")


def _dice(dice: Dict[str, float]) -> str:
    return "Dice " + ("  ".join(f"{name} {value:.3f}" for name, value in dice.items()) or "-")
