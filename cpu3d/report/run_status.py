"""The present state of a run and of its workers, read from the files of its folder.

status = run_status(run)
status.state, status.advice       # "silent", "when its process has ended, ..."
"""

import contextlib
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from cpu3d.data.store import open_store
from cpu3d.errors import ENDINGS, DivergedError, InputError, ending_of
from cpu3d.inference.postprocessing.run_rules import OPEN, why_without_rules
from cpu3d.plan import read_plan
from cpu3d.run.checkpoint import best_score, checkpoints, step_of
from cpu3d.run.config_json import half_rates, load_config
from cpu3d.run.folds import WEIGHTS as FOLD_WEIGHTS
from cpu3d.run.heartbeat import (
    BEAT_S,
    DECIDING,
    SILENT_S,
    Heartbeat,
    Life,
    beat_age_s,
    heartbeat_path,
    life_of,
    read_heartbeat,
    read_heartbeats,
)
from cpu3d.run.log import FINISHED, recent_events
from cpu3d.run.summary import History, known, median
from cpu3d.run.transfer import start_words
from cpu3d.settings import RunConfig
from memory_estimator.common.units import format_seconds

TO_MEND = ("diverged", "out of memory", "too large", "failed", "stalled")
GONE = ("killed", "silent")  # no end is noted, and no life is known
LOST = (*GONE, "broken off", "unknown", "interrupted")
UNDECIDED = "undecided"  # a run whose steps are done and whose post-processing is not decided
FINE = ("stopping", "starting", "running", "finished")  # these need no attention
WORST_FIRST = (*TO_MEND, *LOST, *FINE)
"""States of a worker, a cause before its effects on other workers: those of `cpu3d.errors.ENDINGS`,
and those of workers that have noted no end. The run's state is that of its worst worker."""
DECIDES = "the run's `train`, or `choose_rules(run)` from Python, decides it"
IDLE = (*LOST, "finished")  # of no effect on a finished run
ALIVE = ("running", "starting")


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
        has_ended = self.heartbeat is None or self.heartbeat.exit_code is not None
        return not has_ended and self.state not in GONE


@dataclass(frozen=True)
class RunStatus:
    """The present state of a run."""

    folder: str
    # the worst of its workers', see WORST_FIRST; "unknown" without heartbeats and end; or UNDECIDED
    state: str
    details: Tuple[str, ...]  # on states that need attention, a sentence each
    advice: str  # what to do next; "" for nothing
    is_fine: bool  # whether it runs or has finished
    workers: Tuple[WorkerStatus, ...]
    step: int
    steps: Optional[int]
    step_s: Optional[float]  # median of the recent ones
    # From `step`, or from the checkpoint if it has to be continued; 0 once it decides its
    # post-processing, None after that, or if it is not known.
    steps_left: Optional[int]
    # Of these, at the pace of the recent ones, validations and saves included; None if not known.
    seconds_left: Optional[float]
    all_s: Optional[float]  # of all its steps, at the pace of its own; None for too few
    recent_steps: int  # that loss and Dice are means of
    loss: Optional[float]
    dice: Dict[str, float]
    validation: Optional[Dict[str, Any]]  # the last one: step, mean_dice, dice, best
    init: str  # the weights that it has started from, and what of them stays; "" for its own
    # The mean Dice of the best weights, from their file; None without validation.
    best: Optional[float]
    checkpoint: Optional[Dict[str, Any]]  # the last one: step, age_s, size_bytes


def run_status(run: Path, now: Optional[float] = None, *, of_folds: bool = False) -> RunStatus:
    """Look at a run; one `of_folds` needs no decision of its own, as the folds decide together.
    Raises InputError for a folder without config.json and heartbeat, or with a
    damaged config."""
    run = Path(run)
    if now is None:
        now = time.time()
    heartbeats = read_heartbeats(run)
    config = None
    if not heartbeats or (run / "config.json").is_file():
        config = load_config(run)
    history = History(recent_events(run))
    workers = workers_of(run, heartbeats, now)
    checkpoint = _checkpoint(run, now)
    beats = [worker.heartbeat for worker in workers if worker.heartbeat]
    step, steps = _length(history, beats, config, checkpoint)
    judged = _judged(history, workers, step, steps)
    undecided = ""
    if judged[0].state == "finished" and config and not of_folds:
        undecided = why_without_rules(run, config)
    if undecided == OPEN:
        judged = [WorkerStatus(0, UNDECIDED)]
    worst = judged[0]
    begin = step
    if worst.state not in FINE:
        begin = checkpoint["step"] if checkpoint else 0
    details = [f"worker {worker.rank}: {worker.detail}" for worker in judged if worker.detail]
    if undecided:
        details = [undecided, *_noted_failure(workers)]
    return RunStatus(
        folder=str(run),
        state=worst.state,
        details=tuple(details),
        advice=_advice(run, config, worst, checkpoint),
        is_fine=all(worker.state in FINE for worker in judged),
        workers=tuple(workers),
        step=step,
        steps=steps,
        **_left(history, beats, worst.state, begin, steps),
        **_recent(history),
        validation=history.last_validation or None,
        init=start_words(config) if config else "",
        best=best_score(run),
        checkpoint=checkpoint,
    )


def worker_status(run: Path, beat: Heartbeat, now: float) -> WorkerStatus:
    """The state of a worker by its heartbeat: its noted end, else whether it is alive, else the
    beat's content."""
    life = life_of(run, beat, now)
    if life is Life.ENDED and beat.exit_code is None:
        # It may have noted its end since the heartbeat was read.
        latest = read_heartbeat(run, beat.rank)
        if isinstance(latest, Heartbeat):
            beat = latest
            life = life_of(run, beat, now)
    age = beat_age_s(run, beat, now)
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
        silence = f"no heartbeat for {format_seconds(age)}; one is due every {BEAT_S:g} s"
        process = f"on {beat.host_name} for process {beat.pid}"
        detail = f"{silence}; look {process}, and in `dmesg` whether it was killed"
    elif beat.stalled:
        state = "stalled"
        detail = beat.stalled
    elif beat.stop:
        state = "stopping"
        detail = beat.stop
    else:
        state = "starting" if beat.phase == "starting" else "running"
    phase_s = max(0.0, beat.beat - beat.phase_since)
    return WorkerStatus(beat.rank, state, detail, age, phase_s, beat)


def workers_of(run: Path, heartbeats: Mapping[int, Any], now: float) -> List[WorkerStatus]:
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
            detail = f"{heartbeat_path(run, rank)} was never written"
            workers.append(WorkerStatus(rank, "unknown", detail))
    return workers


def has_test_cases(store: str) -> bool:
    """Whether a store has untouched cases to evaluate; also if it cannot be read, as it may have
    been moved."""
    try:
        return bool(open_store(store).manifest.split["test"])
    except (InputError, OSError):
        return True


# --- Private helpers ---


def _length(
    history: History,
    beats: Sequence[Heartbeat],
    config: Optional[RunConfig],
    checkpoint: Optional[Dict[str, Any]],
) -> Tuple[int, Optional[int]]:
    """Steps that are done, by the newest that tells, and those of the run, None if not known."""
    done = [history.last.get("step", 0), history.last_step, *(beat.step for beat in beats)]
    if checkpoint:
        done.append(checkpoint["step"])
    lengths = [beat.steps for beat in beats]
    if config:
        lengths.append(config.steps)
    lengths += [start.get("steps") for start in reversed(history.starts)]
    return max(done), next(filter(None, lengths), None)


def _judged(
    history: History, workers: Sequence[WorkerStatus], step: int, steps: Optional[int]
) -> List[WorkerStatus]:
    """The workers, the worst first; one that stands for all of them where the log tells more."""
    last = history.last
    finished = last.get("event") == "end" and last["reason"] in FINISHED
    if finished and (not workers or _stays_finished(last, workers, step, steps)):
        return [WorkerStatus(0, "finished")]
    if last.get("event") == "diverged" and all(worker.state in IDLE for worker in workers):
        return [WorkerStatus(0, "diverged", last["reason"])]
    if not workers:
        return [WorkerStatus(0, "unknown", "there is no heartbeat")]
    return sorted(workers, key=lambda worker: WORST_FIRST.index(worker.state))


def _left(
    history: History, beats: Sequence[Heartbeat], state: str, begin: int, steps: Optional[int]
) -> Dict[str, Any]:
    """Fields of `RunStatus` by what is left after step `begin`."""
    steps_left: Optional[int] = None
    if steps and state not in ("finished", UNDECIDED):
        steps_left = max(steps - begin, 0)
        if any(beat.phase == DECIDING for beat in beats):
            steps_left = 0  # also of one that has stopped early
    pace = history.pace
    knows_pace = pace.own_steps(coarse=True) or pace.own_steps(coarse=False)
    return {
        "steps_left": steps_left,
        "seconds_left": pace.seconds_left(begin, steps) if steps_left else None,
        "all_s": pace.seconds_left(0, steps) if knows_pace else None,
    }


def _noted_failure(workers: Sequence[WorkerStatus]) -> List[str]:
    """What the chief has noted at a good end of a run that failed to decide its post-processing."""
    beat = workers[0].heartbeat if workers else None
    if beat is None or beat.exit_code != 0 or beat.reason in ("", *FINISHED):
        return []
    return [beat.reason]


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
    state = worst.state
    beat = worst.heartbeat
    if state in ("running", "starting", "stopping"):
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
    if state in ("stalled", "silent"):
        advice = f"when its process has ended, {again}"
    elif state == "diverged" or (beat and beat.exit_code is not None):
        code = DivergedError.exit_code if state == "diverged" else beat.exit_code
        growth = read_plan(run).get("rate_growth")
        if not isinstance(growth, float) or growth <= 0:
            growth = 1.0
        rates = f" with {half_rates(config, growth=growth)}" if config else ""
        advice = ending_of(code).advice.format(again=again, rates=rates)
    log = run / "logs" / f"worker-{worst.rank}.log"
    return f"{advice}; its last lines are in {log}" if log.is_file() else advice


def _recent(history: History) -> Dict[str, Any]:
    """Fields of `RunStatus` by its recent steps; the time of a step is that of the steps on the
    last one's grid, but for those that compile."""
    steps = history.steps
    voxels = np.nan_to_num(steps["voxels"])  # 0 where it was not logged
    of_one_grid = voxels == voxels[-1:]
    loss = known(steps["loss"])
    latest = {region: known(dice) for region, dice in steps.dice.items() if not np.isnan(dice[-1])}
    return {
        "step_s": median(known(steps["step_s"][of_one_grid & history.is_warm])),
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
