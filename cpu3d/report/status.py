"""Print the state of a run: phase, progress, memory, and what to do next.

    ./run.sh status --run runs/first
    watch ./run.sh status --run runs/first
    ./run.sh status --run runs/first --json
    ./run.sh status --run runs/folds

The exit code is 0 while a run trains and once it has finished, 1 for a run that needs attention: a
worker sends no heartbeat, hangs, or has ended before the run was done or its post-processing
decided; 2 for a folder that is no run. It reads heartbeats, config.json, log.jsonl, checkpoints and
the decision, on any host that sees the folder, and changes nothing. A worker of this host is alive
while its process is there, one of another host while its heartbeat is younger than a minute: then
the heartbeat's age is printed. Any file may be missing or half-written; its values are then
unknown. Of the folder of `train --folds` it prints every fold, and the time left in all."""

import dataclasses
import json
import time
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import List, Mapping, Optional, Sequence, Tuple

from rich.console import Group
from rich.text import Text

from cpu3d.errors import InputError
from cpu3d.inference.out_of_fold import SPLIT, is_scored
from cpu3d.inference.scores_file import read_scores, scores_path
from cpu3d.report.run_status import (
    ALIVE,
    FINE,
    IDLE,
    RunStatus,
    WorkerStatus,
    has_test_cases,
    run_status,
    workers_of,
)
from cpu3d.run.folds import START_S, Folds, fold_folder, read_folds
from cpu3d.run.heartbeat import DECIDING, is_of_this_place, read_heartbeats
from cpu3d.run.log import FINISHED, last_end
from cpu3d.run.summary import median
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
    if read_folds(options.run):
        status = folds_status(options.run)
        shown = describe_folds(status)
    else:
        status = run_status(options.run)
        shown = describe(status)
    if options.json:
        print(json.dumps(dataclasses.asdict(status), indent=1))
    else:
        new_console().print(shown)
    return 0 if status.is_fine else 1


@dataclass(frozen=True)
class FoldStatus:
    """The present state of a fold."""

    fold: str  # as "2/5"
    run: str  # its folder
    state: str  # "waiting", one of WORST_FIRST, or "scored"
    step: int
    steps: Optional[int]
    mean_dice: Optional[float]  # of the cases that it held out
    seconds_left: Optional[float]  # until it is scored; None if that is not known


@dataclass(frozen=True)
class FoldsStatus:
    """The present state of a folder of folds."""

    folder: str
    state: str  # of the process that trains them, see WORST_FIRST; "unknown" without a heartbeat
    detail: str  # more on a state that needs attention
    advice: str  # what to do next; "" for nothing
    is_fine: bool  # whether it runs or has finished
    phase: str  # what it does, such as "training fold 2/5"
    phase_s: Optional[float]
    heard: str  # how old its heartbeat is, if it lives on another host; else ""
    folds: Tuple[FoldStatus, ...]
    seconds_left: Optional[float]  # in all; None if it has finished, or that is not known


def folds_status(folder: Path, now: Optional[float] = None) -> FoldsStatus:
    """Look at a folder of folds. Raises InputError for one that is none, or is damaged."""
    folder = Path(folder)
    if now is None:
        now = time.time()
    folds = read_folds(folder)
    if folds is None:
        rule = f"folder {folder} must be one of `train --folds`, got another"
        raise InputError(f"{rule}; name a run or such a folder")
    runs = {fold: fold_folder(folder, fold) for fold in folds.names}
    ends = [last_end(run) for run in runs.values()]
    taken_s = [end.get("seconds") for end in ends if end.get("reason") in FINISHED]
    taken_s = [seconds for seconds in taken_s if seconds]
    begun = {}
    for fold, run in runs.items():
        if (run / "config.json").is_file() or read_heartbeats(run):
            begun[fold] = run_status(run, now, of_folds=True)
    usual = _Usual.of(folds, taken_s, list(begun.values()))
    trains = _worker_of(folder, now)
    each = [_fold_status(fold, run, begun.get(fold), usual, trains) for fold, run in runs.items()]
    lacking = [fold.fold for fold in each if fold.state != "scored"]
    worker = _judged(trains, lacking)
    is_alive = worker.state in ALIVE
    left_s = [fold.seconds_left for fold in each]
    failed = [status for status in begun.values() if not status.is_fine]
    if worker.state == "finished":
        advice = _advice_on_scored_folds(folder, folds.store)
    elif worker.state in FINE:
        advice = ""
    elif failed and worker.state not in ("silent", "stalled"):
        advice = failed[0].advice
    else:
        advice = "the same command continues"
        if worker.state in ("silent", "stalled"):
            advice = f"when its process has ended, {advice}"
    return FoldsStatus(
        folder=str(folder),
        state=worker.state,
        detail=worker.detail,
        advice=advice,
        is_fine=worker.state in FINE,
        phase=worker.heartbeat.phase if worker.heartbeat and is_alive else "",
        phase_s=worker.phase_s if is_alive else None,
        heard=_heard_from([worker]),
        folds=tuple(each),
        seconds_left=sum(left_s) if lacking and None not in left_s else None,
    )


def describe_folds(status: FoldsStatus) -> Group:
    """The text to print: the folder in a line, its folds in a table, progress and what to do."""
    rows = []
    for fold in status.folds:
        of = f" of {fold.steps:,}" if fold.steps else ""
        dice = "-" if fold.mean_dice is None else f"{fold.mean_dice:.3f}"
        if fold.seconds_left is None:
            left = "-"
        else:
            left = format_seconds(round(fold.seconds_left))
        rows.append((fold.fold, fold.state, f"{fold.step:,}{of}", left, dice))
    columns = ("fold", "state", "step", "left", "mean Dice")
    caption = "mean Dice: of the cases that the fold held out"
    table = Table(columns, rows, caption=caption, names=2)
    lines = []
    if status.phase:
        lines.append(("phase", f"{status.phase}, {format_seconds(round(status.phase_s))}"))
    if status.heard:
        lines.append(("heartbeat", status.heard))
    if status.seconds_left is not None:
        until = _until(status.seconds_left) if status.phase else ""
        lines.append(("left", f"about {format_seconds(round(status.seconds_left))}{until}"))
    if status.detail:
        lines.append(("why", status.detail))
    if status.advice:
        lines.append(("next", status.advice))
    first = _heading("folds", status.folder, status.state)
    return Group(first, table, *map(_named_line, lines))


def describe(status: RunStatus) -> Group:
    """The text to print: the run in a line, its workers in a table, then progress and what to
    do."""
    lines = _progress(status)
    name = "note" if status.is_fine else "why"
    lines += [(name, detail) for detail in status.details]
    if status.steps_left and not status.is_fine:
        begin = status.steps - status.steps_left
        text = f"{status.steps_left:,} of {status.steps:,} steps, from step {begin:,}"
        if status.seconds_left is not None:
            text += f", about {format_seconds(round(status.seconds_left))}"
        lines.append(("left", text))
    if status.advice:
        lines.append(("next", status.advice))
    shown = [_heading("run", status.folder, status.state)]
    if status.workers:
        columns = ("worker", "state", "phase", "memory", "peak", "plan", "free")
        rows = [_cells(worker) for worker in status.workers]
        caption = "phase, and how long it lasts; M is MiB, G is GiB"
        shown.append(Table(columns, rows, caption=caption, names=3))
    return Group(*shown, *map(_named_line, lines))


# --- Private helpers: the state ---


def _worker_of(folder: Path, now: float) -> WorkerStatus:
    """The process that trains folds, by its heartbeat."""
    workers = workers_of(folder, read_heartbeats(folder), now)
    return workers[0] if workers else WorkerStatus(0, "unknown", "there is no heartbeat")


def _judged(worker: WorkerStatus, lacking: Sequence[str]) -> WorkerStatus:
    """The state of the process that trains folds, of which some have no current scores yet."""
    if not lacking and worker.state in IDLE:
        return replace(worker, state="finished", detail="")
    if lacking and worker.state == "finished":
        detail = f"folds have no current scores: {listed(lacking)}"
        return replace(worker, state="unknown", detail=detail)
    if worker.state == "interrupted":  # the reason that it noted is the advice
        detail = f"it was stopped before these folds were scored: {listed(lacking)}"
        return replace(worker, detail=detail)
    return worker


def _advice_on_scored_folds(folder: Path, store: str) -> str:
    if has_test_cases(store):
        return f"`predict --run {folder}` and `evaluate --run {folder}` take the folds together"
    page = folder / "report.html"
    return f"`predict --run {folder}` takes the folds together, {page} has the scores of every case"


@dataclass(frozen=True)
class _Usual:
    """Seconds of a fold that has not begun."""

    training_s: Optional[float]  # None if that is not known
    validation_s: float  # 0 where `training_s` was measured, as it is with them
    deciding_s: float  # its post-processing
    scoring_s: Optional[float]  # with START_S; None if that is not known

    @classmethod
    def of(cls, folds: Folds, taken_s: Sequence[float], begun: Sequence[RunStatus]) -> "_Usual":
        """By the folds that are trained, which took `taken_s`, else at the pace of one that has
        begun, else as it was predicted."""
        validation_s = folds.validation_s or 0.0
        scoring_s = folds.scoring_s
        deciding_s = 0.0
        if scoring_s is None:  # a file of an earlier version has their sum alone
            scoring_s = folds.beside_s
        elif folds.beside_s is not None:
            deciding_s = folds.beside_s - validation_s - scoring_s
        if taken_s:
            return cls(median(taken_s), 0.0, deciding_s, scoring_s)
        for status in begun:
            if status.all_s is not None:
                if status.validation:  # their seconds are in its pace
                    validation_s = 0.0
                return cls(status.all_s, validation_s, deciding_s, scoring_s)
        return cls(folds.training_s, validation_s, deciding_s, scoring_s)


def _seconds_in(worker: WorkerStatus, phase: str) -> float:
    """For how many seconds a worker has been in a phase; 0 if it is in another, or not alive."""
    beat = worker.heartbeat
    if beat is None or beat.phase != phase or worker.state not in ALIVE:
        return 0.0
    return worker.phase_s + worker.beat_age_s


def _fold_status(
    fold: str,
    run: Path,
    status: Optional[RunStatus],
    usual: _Usual,
    trains: WorkerStatus,
) -> FoldStatus:
    """The state of a fold, by that of its run if it has begun, and of the process that trains
    folds."""
    state = status.state if status else "waiting"
    mean_dice = None
    left_s: Optional[float]
    if state == "finished" and last_end(run).get("reason") in FINISHED and is_scored(run):
        state = "scored"
        left_s = 0.0
        mean_dice = read_scores(scores_path(run, SPLIT))["mean_dice"]
    elif state == "finished":
        left_s = usual.scoring_s
    else:
        left_s = _training_left_s(status, usual)
        if left_s is not None:
            left_s += usual.scoring_s or 0.0
    if left_s is not None:
        # What no step counts: the starts of both processes, and scoring.
        spent_s = min(_seconds_in(trains, f"training fold {fold}"), START_S / 2)
        scoring_s = _seconds_in(trains, f"scoring fold {fold}")
        if scoring_s:
            spent_s = START_S / 2 + scoring_s
        left_s = max(left_s - spent_s, 0.0)
    step = status.step if status else 0
    steps = status.steps if status else None
    return FoldStatus(fold, str(run), state, step, steps, mean_dice, left_s)


def _training_left_s(status: Optional[RunStatus], usual: _Usual) -> Optional[float]:
    """Seconds until a fold is trained and its post-processing decided, START_S aside; None if that
    is not known."""
    done_share = 0.0
    if status and status.steps and status.steps_left is not None:
        done_share = 1 - status.steps_left / status.steps
    validations_s = usual.validation_s * (1 - done_share)
    if status and status.seconds_left is not None:
        steps_s = status.seconds_left
        if status.validation:  # their seconds are in its pace
            validations_s = 0.0
    elif usual.training_s is not None:
        steps_s = usual.training_s * (1 - done_share)
    else:
        return None
    deciding_s = usual.deciding_s
    if status and status.workers:
        deciding_s = max(deciding_s - _seconds_in(status.workers[0], DECIDING), 0.0)
    return steps_s + validations_s + deciding_s


# --- Private helpers: the text ---


def _heard_from(workers: Sequence[WorkerStatus]) -> str:
    """How old the oldest heartbeat is of the workers that live on other hosts, as only that tells
    whether they live; "" if all are of this one."""
    elsewhere = [
        worker for worker in workers if worker.lives and not is_of_this_place(worker.heartbeat)
    ]
    if not elsewhere:
        return ""
    oldest = max(elsewhere, key=lambda worker: worker.beat_age_s)
    age = format_seconds(round(oldest.beat_age_s))
    return f"{age} ago, of worker {oldest.rank} on {oldest.heartbeat.host_name}"


def _styled(state: str) -> str:
    """The state in its colour."""
    if state in ("interrupted", "stopping"):
        return Poor(state)
    if state in FINE:
        return Good(state)
    return Bad(state)


def _heading(kind: str, folder: str, state: str) -> Text:
    styled = _styled(state)
    return Text.assemble((f"{kind}: ", "bold"), f"{folder}: ", (styled, styled.style))


def _named_line(line: Tuple[str, str]) -> Text:
    name, text = line
    return Text.assemble((f"{name}: ", "bold"), text)


def _cells(worker: WorkerStatus) -> Tuple[str, ...]:
    beat = worker.heartbeat
    state = _styled(worker.state)
    if beat is None:
        return (str(worker.rank), state, *["-"] * 5)
    if beat.exit_code is None:
        phase = f"{beat.phase}, {format_seconds(round(worker.phase_s))}"
    else:
        phase = f"ended, code {beat.exit_code}"
    now_bytes = None
    free_bytes = None
    if worker.lives:
        free_bytes = beat.free_bytes
        if beat.anonymous_bytes is not None:
            now_bytes = beat.anonymous_bytes + (beat.file_bytes or 0)
    sizes = (now_bytes, beat.peak_bytes, beat.bound_bytes, free_bytes)
    return (str(worker.rank), state, phase, *map(_short, sizes))


def _until(seconds: float) -> str:
    """When so many seconds will have passed."""
    end = datetime.now() + timedelta(seconds=seconds)
    return f", until {end:%a %d %b %H:%M}"


def _progress(status: RunStatus) -> List[Tuple[str, str]]:
    """(name, text) of each line on progress."""
    text = f"{status.step:,}"
    if status.steps:
        text += f" of {status.steps:,} ({status.step / status.steps:.1%})"
    if status.step_s:
        text += f", {format_seconds(status.step_s)} a step"
    if status.seconds_left is not None and status.state in ALIVE:
        left = format_seconds(round(status.seconds_left))
        text += f", about {left} left{_until(status.seconds_left)}"
    lines = [("step", text)]
    if status.loss is not None:
        text = f"loss {status.loss:.3f}, Dice {_dice(status.dice)}"
        lines.append((f"mean of {status.recent_steps} steps", text))
    if status.validation:
        mean = status.validation.get("mean_dice")
        text = f"Dice {_dice(status.validation.get('dice') or {})}"
        left_out = status.validation.get("left_out_of_mean")
        if left_out:
            text += f" (no case has {listed(left_out)})"
        if mean is not None:
            text += f", mean {mean:.3f}"
        if status.best is not None:
            text += f", best {status.best:.3f}"
        lines.append((f"validation after step {status.validation.get('step')}", text))
    if status.init:
        lines.append(("init", status.init))
    saved = status.checkpoint
    text = "none yet"
    if saved:
        age = format_seconds(round(saved["age_s"]))
        text = f"step {saved['step']:,}, {age} ago, {format_bytes(saved['size_bytes'])}"
    lines.append(("checkpoint", text))
    heard = _heard_from(status.workers)
    if heard:
        lines.append(("heartbeat", heard))
    beats = [worker.heartbeat for worker in status.workers if worker.lives]
    beats = [beat for beat in beats if beat.free_bytes is not None]
    if beats:  # the least, whose limit the table does not name
        beat = min(beats, key=lambda beat: beat.free_bytes)
        text = f"{format_bytes(beat.free_bytes)} free of {beat.free_of}"
        if beat.limit_bytes:
            text += f", {format_bytes(beat.limit_bytes)}"
        lines.append(("memory", text))
    return lines


def _short(size_bytes: Optional[int]) -> str:
    """Bytes for a column, as 14.00G."""
    if size_bytes is None:
        return "-"
    return format_bytes(size_bytes).replace(" ", "").replace("iB", "")


def _dice(dice: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.3f}" for name, value in dice.items()) or "-"
