"""Print the state of a run: phase, progress, memory, and what to do next.

    ./run.sh status --run runs/first
    watch ./run.sh status --run runs/first
    ./run.sh status --run runs/first --json
    ./run.sh status --run runs/folds

The exit code is 0 while a run trains and once it has finished, 1 for a run that needs attention: a
worker sends no heartbeat, hangs, or has ended before the run was done; 2 for a folder that is no
run. It reads heartbeats, config.json, log.jsonl and checkpoints, on any host that sees the folder,
and changes nothing. A worker is alive while its heartbeat is younger than a minute. Any file may be
missing or half-written; its values are then unknown. Of the folder of `train --folds` it prints
every fold, and the time left in all."""

import contextlib
import dataclasses
import json
import statistics
import time
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np
from rich.console import Group
from rich.text import Text

from cpu3d.data.store import open_store
from cpu3d.errors import ENDINGS, DivergedError, InputError, ending_of
from cpu3d.inference.evaluate import read_scores, scores_path
from cpu3d.inference.out_of_fold import SPLIT, is_scored
from cpu3d.plan import read_plan
from cpu3d.run.checkpoint import best_score, checkpoints, step_of
from cpu3d.run.config_json import half_rates, load_config
from cpu3d.run.folds import WEIGHTS as FOLD_WEIGHTS
from cpu3d.run.folds import fold_folder, read_folds
from cpu3d.run.heartbeat import (
    BEAT_S,
    SILENT_S,
    Heartbeat,
    beat_age_s,
    heartbeat_path,
    read_heartbeats,
)
from cpu3d.run.log import FINISHED, last_end, recent_events
from cpu3d.run.summary import Columns, History, known, median
from cpu3d.settings import RunConfig
from cpu3d.util.records import listed
from memory_estimator.common.schema import option
from memory_estimator.common.table import Bad, Good, Poor, Table, new_console
from memory_estimator.common.units import format_bytes, format_seconds

WORST_FIRST = (
    *(
        "diverged",
        "out of memory",
        "too large",
        "failed",
        "stalled",
        "silent",
        "broken off",
        "unknown",
        "interrupted",
    ),
    *("stopping", "starting", "running", "finished"),
)
"""States of a worker, a cause before its effects on other workers: those of `cpu3d.errors.ENDINGS`,
and those of workers that have noted no end. The run's state is that of its worst worker."""

FINE = WORST_FIRST[-4:]  # these need no attention
IDLE = (
    "silent",
    "broken off",
    "unknown",
    "interrupted",
    "finished",
)  # of no effect on a finished run


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
class WorkerStatus:
    """The state of a worker."""

    rank: int
    state: str  # one of WORST_FIRST
    detail: str = ""  # more on the state, and what to look at
    beat_age_s: Optional[float] = None
    phase_s: Optional[float] = None  # duration of the phase up to the last beat
    heartbeat: Optional[Heartbeat] = None

    @property
    def lives(self) -> bool:
        """Whether it holds memory, as far as is known."""
        return (
            self.heartbeat is not None
            and self.heartbeat.exit_code is None
            and self.state != "silent"
        )


@dataclass(frozen=True)
class RunStatus:
    """The present state of a run."""

    folder: str
    state: str  # the worst of its workers', see WORST_FIRST; "unknown" without heartbeats and end
    details: Tuple[str, ...]  # on states that need attention, a sentence each
    advice: str  # what to do next; "" for nothing
    is_fine: bool  # whether it runs or has finished
    workers: Tuple[WorkerStatus, ...]
    step: int
    steps: Optional[int]
    step_s: Optional[float]  # median of the recent ones
    seconds_left: Optional[
        float
    ]  # at the pace of this attempt, validations and saves included; None unless it runs
    recent_steps: int  # that loss and Dice are means of
    loss: Optional[float]
    dice: Dict[str, float]
    validation: Optional[Dict[str, Any]]  # the last one: step, mean_dice, dice, best
    best: Optional[
        float
    ]  # the mean Dice of the best weights, from their file; None without validation
    checkpoint: Optional[Dict[str, Any]]  # the last one: step, age_s, size_bytes


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
    folds: Tuple[FoldStatus, ...]
    seconds_left: Optional[float]  # in all; None unless it runs


def folds_status(folder: Path, now: Optional[float] = None) -> FoldsStatus:
    """Look at a folder of folds. Raises InputError for one that is none, or is damaged."""
    folder = Path(folder)
    now = time.time() if now is None else now
    folds = read_folds(folder)
    if folds is None:
        rule = f"folder {folder} must be one of `train --folds`, got another"
        raise InputError(f"{rule}; name a run or such a folder")
    runs = {fold: fold_folder(folder, fold) for fold in folds.names}
    ends = [last_end(run) for run in runs.values()]
    taken_s = [end.get("seconds") for end in ends if end.get("reason") in FINISHED]
    usual_s = median([seconds for seconds in taken_s if seconds]) or folds.training_s
    statuses = []
    each = []
    for fold, run in runs.items():
        has_begun = (run / "config.json").is_file() or bool(read_heartbeats(run))
        statuses.append(run_status(run, now) if has_begun else None)
        each.append(_fold_status(fold, run, statuses[-1], usual_s, folds.beside_s))
    workers = _workers(folder, read_heartbeats(folder), now)
    worker = workers[0] if workers else WorkerStatus(0, "unknown", "there is no heartbeat")
    is_done = all(fold.state == "scored" for fold in each)
    if is_done and worker.state in IDLE:
        worker = replace(worker, state="finished", detail="")
    elif not is_done and worker.state == "finished":
        lacking = listed(fold.fold for fold in each if fold.state != "scored")
        worker = replace(worker, state="unknown", detail=f"folds have no current scores: {lacking}")
    beat = worker.heartbeat
    is_alive = worker.state in ("running", "starting")
    left_s = [fold.seconds_left for fold in each]
    advice = ""
    failed = [status for status in statuses if status and not status.is_fine]
    if worker.state == "finished":
        advice = f"`predict --run {folder}` takes the folds together"
        if _has_test_cases(folds.store):
            advice = (
                f"`predict --run {folder}` and `evaluate --run {folder}` take the folds together"
            )
        else:
            advice += f", {folder / 'report.html'} has the scores of every case"
    elif worker.state in ("silent", "stalled"):
        advice = "when its process has ended, the same command continues"
    elif worker.state not in FINE:
        advice = failed[0].advice if failed else "the same command continues"
    if worker.state == "interrupted":  # the reason that it noted is the advice
        lacking = listed(fold.fold for fold in each if fold.state != "scored")
        worker = replace(worker, detail=f"it was stopped before these folds were scored: {lacking}")
    return FoldsStatus(
        folder=str(folder),
        state=worker.state,
        detail=worker.detail,
        advice=advice,
        is_fine=worker.state in FINE,
        phase=beat.phase if beat and is_alive else "",
        phase_s=worker.phase_s if is_alive else None,
        folds=tuple(each),
        seconds_left=sum(left_s) if is_alive and None not in left_s else None,
    )


def describe_folds(status: FoldsStatus) -> Group:
    """The text to print: the folder in a line, its folds in a table, progress and what to do."""
    rows = []
    for fold in status.folds:
        of = f" of {fold.steps:,}" if fold.steps else ""
        dice = "-" if fold.mean_dice is None else f"{fold.mean_dice:.3f}"
        left = "-" if fold.seconds_left is None else format_seconds(round(fold.seconds_left))
        rows.append((fold.fold, fold.state, f"{fold.step:,}{of}", left, dice))
    columns = ("fold", "state", "step", "left", "mean Dice")
    caption = "mean Dice: of the cases that the fold held out"
    table = Table(columns, rows, caption=caption, names=2)
    lines = []
    if status.phase:
        lines.append(("phase", f"{status.phase}, {format_seconds(round(status.phase_s))}"))
    if status.seconds_left is not None:
        end = datetime.now() + timedelta(seconds=status.seconds_left)
        left = format_seconds(round(status.seconds_left))
        lines.append(("left", f"about {left}, until {end:%a %d %b %H:%M}"))
    lines += [("why", status.detail)] if status.detail else []
    lines += [("next", status.advice)] if status.advice else []
    state = _styled(status.state)
    first = Text.assemble(("folds: ", "bold"), f"{status.folder}: ", (state, state.style))
    texts = [Text.assemble((f"{name}: ", "bold"), text) for name, text in lines]
    return Group(first, table, *texts)


def run_status(run: Path, now: Optional[float] = None) -> RunStatus:
    """Look at a run. Raises InputError for a folder without config.json and heartbeat, or with a
    damaged config."""
    run, now = Path(run), time.time() if now is None else now
    heartbeats = read_heartbeats(run)
    config = None if heartbeats and not (run / "config.json").is_file() else load_config(run)
    history = History(recent_events(run))
    workers, checkpoint = _workers(run, heartbeats, now), _checkpoint(run, now)
    beats = [worker.heartbeat for worker in workers if worker.heartbeat]
    last = history.last
    step = max(last.get("step", 0), history.last_step, *(beat.step for beat in beats))
    lengths = [beat.steps for beat in beats] + [config.steps if config else None]
    lengths += [start.get("steps") for start in reversed(history.starts)]
    steps = next(filter(None, lengths), None)
    judged = sorted(workers, key=lambda worker: WORST_FIRST.index(worker.state))
    finished = last.get("event") == "end" and last["reason"] in FINISHED
    if finished and (not workers or _stays_finished(last, workers, step, steps)):
        judged = [WorkerStatus(0, "finished")]
    elif last.get("event") == "diverged" and all(worker.state in IDLE for worker in workers):
        judged = [WorkerStatus(0, "diverged", last["reason"])]
    judged = judged or [WorkerStatus(0, "unknown", "there is no heartbeat")]
    worst = judged[0]
    is_alive = worst.state in ("running", "starting")
    return RunStatus(
        folder=str(run),
        state=worst.state,
        details=tuple(
            f"worker {worker.rank}: {worker.detail}" for worker in judged if worker.detail
        ),
        advice=_advice(run, config, worst, checkpoint),
        is_fine=all(worker.state in FINE for worker in judged),
        workers=tuple(workers),
        step=step,
        steps=steps,
        seconds_left=history.pace.seconds_left(step, steps) if is_alive else None,
        **_recent(history.steps),
        validation=history.last_validation or None,
        best=best_score(run),
        checkpoint=checkpoint,
    )


def worker_status(run: Path, beat: Heartbeat, now: float) -> WorkerStatus:
    """The state of a worker by its heartbeat: its noted end, else the age of its last beat, else
    the beat's content."""
    age, detail = beat_age_s(run, beat, now), ""
    if beat.exit_code is not None:
        state = ending_of(beat.exit_code).state
        detail = "" if state == "finished" else beat.reason
    elif age > SILENT_S:
        state, silence = (
            "silent",
            f"no heartbeat for {format_seconds(age)}; one is due every {BEAT_S:g} s",
        )
        detail = f"{silence}; look on {beat.host_name} for process {beat.pid}, and in `dmesg` whether it was killed"
    elif beat.stalled:
        state, detail = "stalled", beat.stalled
    elif beat.stop:
        state, detail = "stopping", beat.stop
    else:
        state = "starting" if beat.phase == "starting" else "running"
    return WorkerStatus(beat.rank, state, detail, age, max(0.0, beat.beat - beat.phase_since), beat)


def describe(status: RunStatus) -> Group:
    """The text to print: the run in a line, its workers in a table, then progress and what to
    do."""
    lines = [
        *_progress(status),
        *(("note" if status.is_fine else "why", detail) for detail in status.details),
    ]
    lines += [("next", status.advice)] if status.advice else []
    state = _styled(status.state)
    first = Text.assemble(("run: ", "bold"), f"{status.folder}: ", (state, state.style))
    columns = ("worker", "state", "phase", "step", "memory", "peak", "plan", "free")
    rows = [_cells(worker) for worker in status.workers]
    table = (
        [Table(columns, rows, caption="phase and its duration; G is GiB", names=3)] if rows else []
    )
    return Group(
        first, *table, *(Text.assemble((f"{name}: ", "bold"), text) for name, text in lines)
    )


# --- Private helpers: the state ---


def _fold_status(
    fold: str,
    run: Path,
    status: Optional[RunStatus],
    usual_s: Optional[float],
    beside_s: Optional[float],
) -> FoldStatus:
    """The state of a fold, by that of its run if it has begun. A fold's training usually takes
    `usual_s`, and its scoring at most `beside_s`."""
    state = status.state if status else "waiting"
    mean_dice = None
    left_s = None
    if state == "finished":
        left_s = beside_s
        if last_end(run).get("reason") in FINISHED and is_scored(run):
            state = "scored"
            left_s = 0.0
            mean_dice = read_scores(scores_path(run, SPLIT))["mean_dice"]
    elif status and status.seconds_left is not None:
        left_s = status.seconds_left + (beside_s or 0.0)
    elif usual_s is not None:
        share = status.step / status.steps if status and status.steps else 0.0
        left_s = usual_s * (1 - share) + (beside_s or 0.0)
    step = status.step if status else 0
    steps = status.steps if status else None
    return FoldStatus(fold, str(run), state, step, steps, mean_dice, left_s)


def _workers(run: Path, heartbeats: Mapping[int, Any], now: float) -> List[WorkerStatus]:
    """The workers of the latest attempt: one with fewer workers leaves files of the others
    behind."""
    readable = [beat for beat in heartbeats.values() if isinstance(beat, Heartbeat)]
    latest = max(readable, key=lambda beat: beat.started, default=None)
    workers = []
    for rank in range(latest.workers) if latest else sorted(heartbeats):
        beat = heartbeats.get(rank)
        if isinstance(beat, Heartbeat):
            workers.append(worker_status(run, beat, now))
        elif beat is not None:  # the problem of its file
            workers.append(WorkerStatus(rank, "unknown", beat))
        elif now - latest.started < SILENT_S:
            workers.append(WorkerStatus(rank, "starting"))
        else:
            workers.append(
                WorkerStatus(rank, "unknown", f"{heartbeat_path(run, rank)} was never written")
            )
    return workers


def _stays_finished(
    end: Mapping[str, Any], workers: Sequence[WorkerStatus], step: int, steps: Optional[int]
) -> bool:
    """Whether a run that has finished was begun again with nothing to do, however that attempt
    ended. Not so for one that was made longer, nor if a worker is busy or has noted an error."""
    longer = end["reason"] == "finished" and bool(steps) and end["step"] < steps
    return end["step"] >= step and not longer and all(worker.state in IDLE for worker in workers)


def _advice(
    run: Path,
    config: Optional[RunConfig],
    worst: WorkerStatus,
    checkpoint: Optional[Dict[str, Any]],
) -> str:
    """What to do next about the worker that decides the run's state, a line; "" for nothing."""
    state, beat = worst.state, worst.heartbeat
    if state in ("running", "starting", "stopping"):
        return ""
    if state == "finished":
        words = f"evaluate --run {run}"
        if config and not _has_test_cases(config.store):
            words += (
                f" --split val --weights {FOLD_WEIGHTS} --raw" if config.fold else " --split val"
            )
        return f"`{words}` scores it, `report --run {run}` shows it; {ENDINGS[0].advice}"
    again = "the same command starts from step 0, as there is no checkpoint yet"
    if checkpoint:
        again = f"the same command continues from step {checkpoint['step']}"
    advice = again
    if state in ("stalled", "silent"):
        advice = f"when its process has ended, {again}"
    elif state == "diverged" or (beat and beat.exit_code is not None):
        code = DivergedError.exit_code if state == "diverged" else beat.exit_code
        growth = read_plan(run).get("rate_growth")
        growth = growth if isinstance(growth, float) and growth > 0 else 1.0
        rates = f" with {half_rates(config, growth=growth)}" if config else ""
        advice = ending_of(code).advice.format(again=again, rates=rates)
    log = run / "logs" / f"worker-{worst.rank}.log"
    return f"{advice}; its last lines are in {log}" if log.is_file() else advice


def _has_test_cases(store: str) -> bool:
    """Whether a store has untouched cases to evaluate; also if it cannot be read, as it may have
    been moved."""
    try:
        return bool(open_store(store).manifest.split["test"])
    except (InputError, OSError):
        return True


def _recent(steps: Columns) -> Dict[str, Any]:
    """Fields of `RunStatus` by its recent steps; the time of a step is that of the steps on the
    last one's grid."""
    voxels = np.nan_to_num(steps["voxels"])  # 0 where it was not logged
    of_one_grid = voxels == voxels[-1:]
    loss = known(steps["loss"])
    latest = {region: known(dice) for region, dice in steps.dice.items() if not np.isnan(dice[-1])}
    return {
        "step_s": median(known(steps["step_s"][of_one_grid])),
        "recent_steps": len(steps),
        "loss": statistics.fmean(loss) if len(loss) else None,
        "dice": {region: statistics.fmean(dice) for region, dice in latest.items()},
    }


def _checkpoint(run: Path, now: float) -> Optional[Dict[str, Any]]:
    for path in checkpoints(run):
        with contextlib.suppress(OSError):  # it may be removed for a newer one at the same time
            stat = path.stat()
            return {
                "step": step_of(path),
                "age_s": max(0.0, now - stat.st_mtime),
                "size_bytes": stat.st_size,
            }
    return None


# --- Private helpers: the text ---


def _styled(state: str) -> str:
    """The state in its colour."""
    return (Poor if state in ("interrupted", "stopping") else Good if state in FINE else Bad)(state)


def _cells(worker: WorkerStatus) -> Tuple[str, ...]:
    beat, state = worker.heartbeat, _styled(worker.state)
    if beat is None:
        return (str(worker.rank), state, *["-"] * 6)
    phase = f"{beat.phase}, {format_seconds(round(worker.phase_s))}"
    phase = phase if beat.exit_code is None else f"ended, code {beat.exit_code}"
    now = None if beat.anonymous_bytes is None else beat.anonymous_bytes + (beat.file_bytes or 0)
    now, free = (now, beat.free_bytes) if worker.lives else (None, None)
    sizes = (now, beat.peak_bytes, beat.bound_bytes, free)
    return (str(worker.rank), state, phase, str(beat.step), *map(_short, sizes))


def _progress(status: RunStatus) -> List[Tuple[str, str]]:
    """(name, text) of each line on progress."""
    of = f" of {status.steps:,} ({status.step / status.steps:.1%})" if status.steps else ""
    pace = f", {format_seconds(status.step_s)} a step" if status.step_s else ""
    if status.seconds_left is not None:
        end = datetime.now() + timedelta(seconds=status.seconds_left)
        pace += (
            f", about {format_seconds(round(status.seconds_left))} left, until {end:%a %d %b %H:%M}"
        )
    lines = [("step", f"{status.step:,}{of}{pace}")]
    if status.loss is not None:
        lines.append(
            (
                f"mean of {status.recent_steps} steps",
                f"loss {status.loss:.3f}, Dice {_dice(status.dice)}",
            )
        )
    if status.validation:
        mean = status.validation.get("mean_dice")
        text = f"Dice {_dice(status.validation.get('dice') or {})}"
        text += "" if mean is None else f", mean {mean:.3f}"
        text += "" if status.best is None else f", best {status.best:.3f}"
        lines.append((f"validation after step {status.validation.get('step')}", text))
    saved, text = status.checkpoint, "none yet"
    if saved:
        age = format_seconds(round(saved["age_s"]))
        text = f"step {saved['step']:,}, {age} ago, {format_bytes(saved['size_bytes'])}"
    lines.append(("checkpoint", text))
    free = [
        worker.heartbeat
        for worker in status.workers
        if worker.lives and worker.heartbeat.free_bytes is not None
    ]
    for beat in sorted(free, key=lambda beat: beat.free_bytes)[
        :1
    ]:  # the least, whose limit the table does not name
        limit = f", {format_bytes(beat.limit_bytes)}" if beat.limit_bytes else ""
        lines.append(("memory", f"{format_bytes(beat.free_bytes)} free of {beat.free_of}{limit}"))
    return lines


def _short(size_bytes: Optional[int]) -> str:
    """Bytes for a column, as 14.00G."""
    return (
        "-" if size_bytes is None else format_bytes(size_bytes).replace(" ", "").replace("iB", "")
    )


def _dice(dice: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.3f}" for name, value in dice.items()) or "-"
