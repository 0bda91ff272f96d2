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

import contextlib
import dataclasses
import json
import statistics
import time
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np
from rich.console import Group
from rich.text import Text

from cpu3d.data.store import open_store
from cpu3d.errors import ENDINGS, DivergedError, InputError, WorkerLostError, ending_of
from cpu3d.inference.out_of_fold import is_scored
from cpu3d.inference.postprocessing.run_rules import OPEN, why_without_rules
from cpu3d.inference.scores_file import are_of_weights, read_scores, scores_path
from cpu3d.plan import reasons_of
from cpu3d.run.checkpoint import best_score, checkpoints, step_of
from cpu3d.run.config_json import half_rates, load_config
from cpu3d.run.folds import WEIGHTS as FOLD_WEIGHTS
from cpu3d.run.folds import RunSet, read_run_set
from cpu3d.run.heartbeat import (
    BEAT_S,
    DECIDING,
    SILENT_S,
    Heartbeat,
    Life,
    beat_age_s,
    heartbeat_path,
    is_of_this_place,
    life_of,
    read_heartbeats,
)
from cpu3d.run.log import FINISHED, last_end, read_events
from cpu3d.run.summary import RECENT, History, known, median
from cpu3d.run.transfer import start_words
from cpu3d.settings import RunConfig
from cpu3d.util.records import listed
from memory_estimator.common.schema import option
from memory_estimator.common.table import Bad, Good, Poor, Table, new_console
from memory_estimator.common.units import format_bytes, format_seconds

ALIVE = ("running", "starting", "stopping")
FINE = (*ALIVE, "finished")  # states that need no attention
GONE = ("killed", "silent")  # of a worker that has noted no end
UNDECIDED = "undecided"  # a run whose steps are done and whose post-processing is not decided
DECIDES = "the run's `train`, or `choose_rules(run)` from Python, decides it"
IDLE = (*GONE, "broken off", "unknown", "interrupted", "finished")  # of no effect on a finished run


@dataclass(frozen=True)
class Options:
    """Options of `status`."""

    run: Path = option(help="folder of the run", metavar="DIR")
    json: bool = option(False, help="print everything as JSON")


OPTIONS = (Options,)


def run(options: Options) -> int:
    status: Any
    if read_run_set(options.run):
        status = set_status(options.run)
        shown = describe_set(status)
    else:
        status = run_status(options.run)
        shown = describe(status)
    if options.json:
        print(json.dumps(dataclasses.asdict(status), indent=1))
    else:
        new_console().print(shown)
    return 0 if status.is_fine else 1


# --- A run ---


@dataclass(frozen=True)
class WorkerStatus:
    """The state of a worker."""

    rank: int
    state: str  # one of ALIVE or GONE, a state of `cpu3d.errors.ENDINGS`, or "unknown"
    detail: str = ""  # more on the state, and what to look at
    heartbeat: Optional[Heartbeat] = None


@dataclass(frozen=True)
class RunStatus:
    """The present state of a run."""

    folder: str
    state: str  # that of its worst worker; "finished" and UNDECIDED are of the run itself
    details: Tuple[str, ...]  # on states that need attention, a sentence each
    advice: str  # what to do next; "" for nothing
    is_fine: bool  # whether it runs or has finished
    workers: Tuple[WorkerStatus, ...]
    step: int
    steps: Optional[int]
    step_s: Optional[float]  # median of the recent ones
    # From `step`, or from the checkpoint if the run has to be continued; None if not known.
    steps_left: Optional[int]
    seconds_left: Optional[float]  # of these, validations and saves included
    loss: Optional[float]  # mean of the recent steps, as the Dice of each region
    dice: Dict[str, float]
    validation: Optional[Dict[str, Any]]  # the last one: step, mean_dice, dice, best
    best: Optional[float]  # the mean Dice of the best weights; None without validation
    init: str  # the weights that it has started from, and what of them stays; "" for its own
    reasons: Tuple[str, ...]  # why the plan decided so what was left open, a line each
    checkpoint: Optional[Dict[str, Any]]  # the last one: step, age_s, size_bytes


def run_status(run: Path, now: Optional[float] = None, *, of_folds: bool = False) -> RunStatus:
    """Look at a run; one `of_folds` needs no decision of its own, as the folds decide together.
    Raises InputError for a folder without config.json and heartbeat, or with a damaged config."""
    run = Path(run)
    if now is None:
        now = time.time()
    heartbeats = read_heartbeats(run)
    config = None
    if not heartbeats or (run / "config.json").is_file():
        config = load_config(run)
    history = History(read_events(run))
    workers = _workers(run, heartbeats, now)
    checkpoint = _checkpoint(run, now)
    step, steps = _length(history, workers, config, checkpoint)
    worst = _worst(history, workers, step, steps)
    undecided = ""
    if worst.state == "finished" and config and not of_folds:
        undecided = why_without_rules(run, config)
        state = UNDECIDED if undecided == OPEN else "finished"
        worst = WorkerStatus(0, state, undecided, worst.heartbeat)
    begin = step
    if worst.state not in FINE:
        begin = checkpoint["step"] if checkpoint else 0
    steps_left = None
    if steps and worst.state not in ("finished", UNDECIDED):
        steps_left = max(steps - begin, 0)
        if worst.heartbeat and worst.heartbeat.phase == DECIDING:
            steps_left = 0  # also of one that has stopped early
    details = [worst.detail] if worst.detail else []
    beat = worst.heartbeat
    if undecided and beat and beat.reason not in ("", *FINISHED):
        details.append(beat.reason)  # why the chief, at a good end, could not decide
    recent = history.steps.events[-RECENT:]
    # The time of a step is that of the steps on the last one's grid, but for those that compile.
    on_grid = [event for event in recent if event.get("voxels") == recent[-1].get("voxels")]
    timed = [event for event in on_grid if "step_s" in event and not event["compiles"]]
    losses = [event["loss"] for event in recent if "loss" in event]
    dice = {region: known(each[-RECENT:]) for region, each in history.steps.dice.items()}
    return RunStatus(
        folder=str(run),
        state=worst.state,
        details=tuple(details),
        advice=_advice(run, config, worst, checkpoint),
        is_fine=worst.state in FINE,
        workers=tuple(workers),
        step=step,
        steps=steps,
        step_s=median([event["step_s"] for event in timed]),
        steps_left=steps_left,
        seconds_left=history.pace.seconds_left(begin, steps) if steps_left else None,
        loss=statistics.fmean(losses) if losses else None,
        dice={region: float(np.mean(each)) for region, each in dice.items() if len(each)},
        validation=dict(history.last_validation) or None,
        best=best_score(run),
        init=start_words(config) if config else "",
        reasons=reasons_of(run),
        checkpoint=checkpoint,
    )


def describe(status: RunStatus) -> Group:
    """The text to print: the run in a line, its workers in a table, then progress and what to
    do."""
    lines = _progress(status)
    lines += [("plan", reason) for reason in status.reasons]
    lines += [("note" if status.is_fine else "why", detail) for detail in status.details]
    if status.steps_left and not status.is_fine:
        begin = status.steps - status.steps_left
        text = f"{status.steps_left:,} of {status.steps:,} steps, from step {begin:,}"
        if status.seconds_left is not None:
            text += f", about {format_seconds(round(status.seconds_left))}"
        lines.append(("left", text))
    if status.advice:
        lines.append(("next", status.advice))
    shown: List[Any] = [_heading("run", status.folder, status.state)]
    if status.workers:
        columns = ("worker", "state", "phase", "memory", "peak", "plan", "free")
        rows = [_cells(worker) for worker in status.workers]
        caption = "phase, and how long it lasts; M is MiB, G is GiB"
        shown.append(Table(columns, rows, caption=caption, names=3))
    return Group(*shown, *map(_named_line, lines))


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


def set_status(folder: Path, now: Optional[float] = None) -> SetStatus:
    """Look at a folder of folds, or of a comparison. Raises InputError for one that is none, or is
    damaged."""
    folder = Path(folder)
    if now is None:
        now = time.time()
    several = read_run_set(folder)
    if several is None:
        rule = f"folder {folder} must be one of `train --folds` or `compare`, got another"
        raise InputError(f"{rule}; name a run or such a folder")
    ends = map(last_end, several.runs.values())
    usual_s = median([end["seconds"] for end in ends if _is_end(end)])
    if usual_s is None:
        usual_s = several.run_s
    each = [_part_status(name, several, usual_s, now) for name in several.runs]
    failed = [part.advice for part in each if part.advice]
    lacking = [part.name for part in each if part.state != "scored"]
    workers = _workers(folder, read_heartbeats(folder), now)
    worker = workers[0] if workers else WorkerStatus(0, "unknown", "there is no heartbeat")
    if not lacking and worker.state in IDLE:
        worker = replace(worker, state="finished", detail="")
    elif lacking and worker.state in ("finished", "interrupted"):
        state = "unknown" if worker.state == "finished" else worker.state
        detail = f"no current scores: {listed(lacking)}"
        worker = replace(worker, state=state, detail=detail)
    advice = ""
    if worker.state == "finished" and several.kind == "comparison":
        advice = f"{folder / 'report.html'} has all results"
    elif worker.state == "finished":
        advice = f"`predict --run {folder}` takes the folds together, {folder / 'report.html'}"
        advice += " has the scores of every case"
        if has_test_cases(several.store):
            advice = f"`predict --run {folder}` and `evaluate --run {folder}` take them together"
    elif worker.state == "silent":
        advice = "when its process has ended, the same command continues"
    elif worker.state not in FINE:
        advice = failed[0] if failed else "the same command continues"
    left_s = [part.seconds_left for part in each if part.seconds_left is not None]
    return SetStatus(
        folder=str(folder),
        kind=several.kind,
        state=worker.state,
        detail=worker.detail,
        advice=advice,
        is_fine=worker.state in FINE,
        phase=worker.heartbeat.phase if worker.heartbeat and worker.state in ALIVE else "",
        runs=tuple(each),
        seconds_left=sum(left_s) if lacking and len(left_s) == len(each) else None,
    )


def describe_set(status: SetStatus) -> Group:
    """The text to print: the folder in a line, its runs in a table, progress and what to do."""
    rows = []
    for part in status.runs:
        of = f" of {part.steps:,}" if part.steps else ""
        dice = "-" if part.mean_dice is None else f"{part.mean_dice:.3f}"
        left = "-" if part.seconds_left is None else format_seconds(round(part.seconds_left))
        rows.append((part.name, part.state, f"{part.step:,}{of}", left, dice))
    columns = ("run", "state", "step", "left", "mean Dice")
    caption = "mean Dice: of the cases that the run is scored on"
    lines = []
    if status.phase:
        lines.append(("phase", status.phase))
    if status.seconds_left is not None:
        until = _until(status.seconds_left) if status.phase else ""
        lines.append(("left", f"about {format_seconds(round(status.seconds_left))}{until}"))
    if status.detail:
        lines.append(("why", status.detail))
    if status.advice:
        lines.append(("next", status.advice))
    table = Table(columns, rows, caption=caption, names=2)
    first = _heading(status.kind, status.folder, status.state)
    return Group(first, table, *map(_named_line, lines))


def has_test_cases(store: str) -> bool:
    """Whether a store has untouched cases to evaluate; also if it cannot be read, as it may have
    been moved."""
    try:
        return bool(open_store(store).manifest.split["test"])
    except (InputError, OSError):
        return True


# --- Private helpers: the state ---


def _worker_status(run: Path, beat: Heartbeat, now: float) -> WorkerStatus:
    """The state of a worker by its heartbeat: its noted end, else whether it is alive, else the
    beat's content."""
    life = life_of(run, beat, now)
    if life is Life.ENDED and beat.exit_code is None:
        # It may have noted its end since the heartbeat was read.
        latest = read_heartbeats(run).get(beat.rank)
        beat = latest if isinstance(latest, Heartbeat) else beat
    state = "starting" if beat.phase == "starting" else "running"
    detail = ""
    if beat.exit_code is not None:
        state = ending_of(beat.exit_code).state
        detail = "" if state == "finished" else beat.reason
    elif life is Life.ENDED:
        state = "killed"
        ended = f"process {beat.pid} of this host has ended and could note no reason"
        detail = f"{ended}; look in `dmesg` whether it was killed for its memory"
    elif life is Life.SILENT:
        state = "silent"
        age = format_seconds(beat_age_s(run, beat, now))
        silence = f"no heartbeat for {age}; one is due every {BEAT_S:g} s"
        process = f"on {beat.host_name} for process {beat.pid}"
        detail = f"{silence}; look {process}, and in `dmesg` whether it was killed"
    elif beat.stop:
        state = "stopping"
        detail = beat.stop
    elif not is_of_this_place(beat):
        age = format_seconds(round(beat_age_s(run, beat, now)))
        detail = f"heard {age} ago from {beat.host_name}"
    if detail:
        detail = f"worker {beat.rank}: {detail}"
    return WorkerStatus(beat.rank, state, detail, beat)


def _workers(run: Path, heartbeats: Dict[int, Any], now: float) -> List[WorkerStatus]:
    """The workers of the latest attempt: one with fewer workers leaves files of the others
    behind."""
    readable = [beat for beat in heartbeats.values() if isinstance(beat, Heartbeat)]
    latest = max(readable, key=lambda beat: beat.started, default=None)
    workers = []
    for rank in range(latest.workers) if latest else sorted(heartbeats):
        beat = heartbeats.get(rank)
        if isinstance(beat, Heartbeat):
            workers.append(_worker_status(run, beat, now))
        elif beat is not None:  # the problem of its file
            workers.append(WorkerStatus(rank, "unknown", beat))
        elif latest and now - latest.started < SILENT_S:
            workers.append(WorkerStatus(rank, "starting"))
        else:
            detail = f"{heartbeat_path(run, rank)} was never written"
            workers.append(WorkerStatus(rank, "unknown", detail))
    return workers


def _length(
    history: History,
    workers: Sequence[WorkerStatus],
    config: Optional[RunConfig],
    checkpoint: Optional[Dict[str, Any]],
) -> Tuple[int, Optional[int]]:
    """Steps that are done, by the newest that tells, and those of the run, None if not known."""
    beats = [worker.heartbeat for worker in workers if worker.heartbeat]
    done = [history.last.get("step", 0), *(beat.step for beat in beats)]
    if checkpoint:
        done.append(checkpoint["step"])
    lengths = [beat.steps for beat in beats]
    if config:
        lengths.append(config.steps)
    lengths += [start.get("steps", 0) for start in reversed(history.starts)]
    return max(done), next(filter(None, lengths), None)


def _worst(
    history: History, workers: Sequence[WorkerStatus], step: int, steps: Optional[int]
) -> WorkerStatus:
    """The worker that tells the state of the run: a cause comes before its effects on others. One
    that stands for all of them where the log tells more."""
    last = history.last
    are_idle = all(worker.state in IDLE for worker in workers)
    if are_idle and last.get("event") == "end" and last["reason"] in FINISHED:
        # Also of a run that was begun again with nothing to do, however that attempt ended; not of
        # one that was made longer.
        is_longer = last["reason"] == "finished" and bool(steps) and last["step"] < steps
        if last["step"] >= step and not is_longer:
            beat = workers[0].heartbeat if workers else None
            return WorkerStatus(0, "finished", heartbeat=beat)
    if are_idle and last.get("event") == "diverged":
        return WorkerStatus(0, "diverged", last["reason"])
    if not workers:
        return WorkerStatus(0, "unknown", "there is no heartbeat")
    lost_another = ending_of(WorkerLostError.exit_code).state

    def rank(worker: WorkerStatus) -> int:
        if worker.state in FINE:
            return 3
        if worker.state == lost_another:
            return 2
        return 1 if worker.state == "interrupted" else 0

    return min(workers, key=rank)


def _is_end(end: Any) -> bool:
    return end.get("reason") in FINISHED and bool(end.get("seconds"))


def _part_status(name: str, several: RunSet, usual_s: Optional[float], now: float) -> PartStatus:
    """The state of a run of several; of one whose pace is not known `usual_s` seconds are left."""
    run = several.runs[name]
    if not ((run / "config.json").is_file() or read_heartbeats(run)):
        return PartStatus(name, str(run), "waiting", 0, None, None, usual_s)
    status = run_status(run, now, of_folds=several.is_out_of_fold)
    steps = (status.step, status.steps)
    if status.state != "finished":
        left_s = usual_s if status.seconds_left is None else status.seconds_left
        advice = "" if status.is_fine else status.advice
        return PartStatus(name, str(run), status.state, *steps, None, left_s, advice)
    is_over = last_end(run).get("reason") in FINISHED
    mean_dice = _mean_dice(run, several) if is_over else None
    state = "finished" if mean_dice is None else "scored"
    return PartStatus(name, str(run), state, *steps, mean_dice, 0.0)


def _mean_dice(run: Path, several: RunSet) -> Optional[float]:
    """The mean Dice of a run's current scores; None if there are none."""
    if several.is_out_of_fold and not is_scored(run):
        return None
    try:
        scores = read_scores(scores_path(run, several.split))
    except InputError:
        return None
    return scores["mean_dice"] if are_of_weights(scores, [run]) else None


def _advice(
    run: Path,
    config: Optional[RunConfig],
    worst: WorkerStatus,
    checkpoint: Optional[Dict[str, Any]],
) -> str:
    """What to do next about the worker that decides the run's state, a line; "" for nothing."""
    state = worst.state
    if state in ALIVE:
        return ""
    if state == "finished":
        words = f"evaluate --run {run}"
        if config and not has_test_cases(config.store):
            words += " --split val"
            if config.fold:
                words += f" --weights {FOLD_WEIGHTS} --raw"
        return f"`{words}` scores it, `report --run {run}` shows it; {ENDINGS[0].advice}"
    if state == UNDECIDED:
        return DECIDES
    again = "the same command starts from step 0, as there is no checkpoint yet"
    if checkpoint:
        again = f"the same command continues from step {checkpoint['step']}"
    advice = again
    beat = worst.heartbeat
    if state == "silent":
        advice = f"when its process has ended, {again}"
    elif state == "diverged" or (beat and beat.exit_code is not None):
        code = DivergedError.exit_code if state == "diverged" else beat.exit_code
        rates = f" with {half_rates(config)}" if config else ""
        advice = ending_of(code).advice.format(again=again, rates=rates)
    log = run / "logs" / f"worker-{worst.rank}.log"
    return f"{advice}; its last lines are in {log}" if log.is_file() else advice


def _checkpoint(run: Path, now: float) -> Optional[Dict[str, Any]]:
    for path in checkpoints(run):
        with contextlib.suppress(OSError):  # it may be removed for a newer one at the same time
            stat = path.stat()
            age_s = max(0.0, now - stat.st_mtime)
            return {"step": step_of(path), "age_s": age_s, "size_bytes": stat.st_size}
    return None


# --- Private helpers: the text ---


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
    phase = f"{beat.phase}, {format_seconds(round(max(0.0, beat.beat - beat.phase_since)))}"
    now_bytes = beat.own_bytes
    free_bytes = beat.free_bytes
    if beat.exit_code is not None:
        phase = f"ended, code {beat.exit_code}"
    if worker.state not in ALIVE:  # it holds no memory, as far as is known
        now_bytes = None
        free_bytes = None
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
        lines.append((f"mean of {RECENT} steps", f"loss {status.loss:.3f}, {_dice(status.dice)}"))
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
    if status.init:
        lines.append(("init", status.init))
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
