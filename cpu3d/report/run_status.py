"""The present state of a run and of its workers, read from the files of its folder.

status = run_status(run)
status.state, status.advice       # "silent", "when its process has ended, ..."
"""

import contextlib
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np

from cpu3d.errors import ENDINGS, DivergedError, WorkerLostError, ending_of
from cpu3d.inference.postprocessing.run_rules import OPEN, why_without_rules
from cpu3d.plan import reasons_of
from cpu3d.run.checkpoint import best_score, checkpoints, step_of
from cpu3d.run.config_json import half_rates, load_config
from cpu3d.run.heartbeat import (
    BEAT_S,
    SILENT_S,
    Heartbeat,
    Life,
    beat_age_s,
    heartbeat_path,
    is_of_this_place,
    life_of,
    read_heartbeats,
)
from cpu3d.run.log import FINISHED, read_events
from cpu3d.run.summary import RECENT, History, finite, numbers
from cpu3d.settings import RunConfig
from memory_estimator.common.units import format_seconds

ALIVE = ("running", "starting", "stopping")
FINE = (*ALIVE, "finished")  # states that need no attention
GONE = ("killed", "silent")  # of a worker that has noted no end
UNDECIDED = "undecided"  # a run whose steps are done and whose post-processing is not decided
IDLE = (*GONE, "broken off", "unknown", "interrupted", "finished")  # of no effect on a finished run


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
    detail: str  # more on a state that needs attention
    advice: str  # what to do next; "" for nothing
    is_fine: bool  # whether it runs or has finished
    workers: Tuple[WorkerStatus, ...]
    step: int
    steps: Optional[int]
    step_s: Optional[float]  # median of the recent ones on its grid
    # From `step`, or from the checkpoint if the run has to be continued; None if not known.
    steps_left: Optional[int]
    seconds_left: Optional[float]  # of these, validations and saves included
    loss: Optional[float]  # mean of the recent steps, as the Dice of each region
    dice: Dict[str, float]
    validation: Optional[Dict[str, Any]]  # the last one: step, mean_dice, dice, best
    best: Optional[float]  # the mean Dice of the best weights; None without validation
    reasons: Tuple[str, ...]  # why the plan decided so what was left open, a line each
    checkpoint: Optional[Dict[str, Any]]  # the last one: step, age_s, size_bytes


def run_status(run: Path, *, is_fold: bool = False) -> RunStatus:
    """Look at a run; a fold needs no post-processing of its own, as the folds decide it together.
    Raises InputError for a folder without config.json and heartbeat, or with a damaged config."""
    run = Path(run)
    now = time.time()
    heartbeats = read_heartbeats(run)
    config = None
    if not heartbeats or (run / "config.json").is_file():
        config = load_config(run)
    history = History(read_events(run))
    workers = workers_of(run, heartbeats, now)
    checkpoint = _checkpoint(run, now)
    step, steps = _length(history, workers, config, checkpoint)
    worst = _worst(history, workers, step, steps)
    undecided = ""
    if worst.state == "finished" and config and not is_fold:
        undecided = why_without_rules(run, config)
        state = UNDECIDED if undecided == OPEN else "finished"
        worst = WorkerStatus(0, state, undecided, worst.heartbeat)
    begin = step
    if worst.state not in FINE:
        begin = checkpoint["step"] if checkpoint else 0
    steps_left = None
    if steps and worst.state not in ("finished", UNDECIDED):
        steps_left = max(steps - begin, 0)
    detail = worst.detail
    beat = worst.heartbeat
    if undecided and beat and beat.reason not in ("", FINISHED):
        detail += f": {beat.reason}"  # why the chief, at a good end, could not decide
    recent = history.steps.events[-RECENT:]
    losses = numbers(recent, "loss")
    dice = {region: finite(each[-RECENT:]) for region, each in history.steps.dice.items()}
    validations = history.validations.events
    return RunStatus(
        folder=str(run),
        state=worst.state,
        detail=detail,
        advice=_advice(run, config, worst, checkpoint),
        is_fine=worst.state in FINE,
        workers=tuple(workers),
        step=step,
        steps=steps,
        step_s=history.pace.step_s(step),
        steps_left=steps_left,
        seconds_left=history.pace.seconds_left(begin, steps) if steps_left else None,
        loss=statistics.fmean(losses) if losses else None,
        dice={region: float(np.mean(each)) for region, each in dice.items() if len(each)},
        validation=dict(validations[-1]) if validations else None,
        best=best_score(run),
        reasons=reasons_of(run),
        checkpoint=checkpoint,
    )


def workers_of(run: Path, heartbeats: Dict[int, Any], now: float) -> List[WorkerStatus]:
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


# --- Private helpers ---


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
    is_finished = last.get("event") == "end" and last["reason"] == FINISHED
    # Also of a run that was begun again with nothing to do, however that attempt ended; not of one
    # that was made longer.
    if are_idle and is_finished and last["step"] >= max(step, steps or 0):
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
        more = f"`report --run {run}` shows it; {ENDINGS[0].advice}"
        return f"`evaluate --run {run}` scores it, {more}"
    if state == UNDECIDED:
        return "the run's `train`, or `choose_rules(run)` from Python, decides it"
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
