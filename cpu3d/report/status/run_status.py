"""How a run is doing, gathered from its folder: heartbeats, config.json, log.jsonl and checkpoints.

Everything may be missing, half-written or of an earlier version, and is then told as not known.
"""

import contextlib
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from cpu3d.config import RunConfig, load_config
from cpu3d.data.splits import with_fold
from cpu3d.data.store import open_store
from cpu3d.errors import InputError
from cpu3d.report.status.advice import advice, without_advice
from cpu3d.report.status.worker_state import SILENT_S, WorkerState, beat_age_s, state_of
from cpu3d.training.checkpoint_history import checkpoints, step_of
from cpu3d.training.guard.heartbeat import Heartbeat, heartbeat_path, read_heartbeats
from cpu3d.training.run_log import FINISHED, recent_events
from memory_estimator.units import format_seconds

RECENT = 50
"""Steps that losses and times are told of."""

WORST_FIRST = (
    *(
        "diverged",
        "out of memory",
        "too large",
        "dead",
        "failed",
        "stalled",
        "suspended",
        "silent",
        "broken off",
        "unknown",
    ),
    *("interrupted", "stopping", "starting", "running", "finished"),
)
"""The run's state is the first of these that a worker is in: what others suffer from comes before what they suffer."""

NOT_AT_WORK = ("dead", "silent", "broken off", "unknown", "interrupted", "finished")
"""States of workers that do nothing for a run whose log says that it is finished."""


@dataclass(frozen=True)
class WorkerStatus:
    """One worker."""

    rank: int
    state: str
    detail: str
    beat_age_s: Optional[float] = None
    phase_s: Optional[float] = None
    """How long the phase had gone on at the last beat."""
    heartbeat: Optional[Heartbeat] = None


@dataclass(frozen=True)
class Saved:
    """The last checkpoint."""

    step: Optional[int]
    """None where neither its name nor the log tells."""
    age_s: float
    size_bytes: int


@dataclass(frozen=True)
class RunStatus:
    """A run, now."""

    folder: str
    state: str
    """The worst of its workers', see WORST_FIRST; of a run without heartbeats by its log."""
    details: Tuple[str, ...]
    """What is known of a state that needs somebody, a sentence each."""
    advice: str
    """What to do next; "" for nothing."""
    is_fine: bool
    """Whether it runs or has finished."""
    workers: Tuple[WorkerStatus, ...]
    step: int
    steps: Optional[int]
    step_s: Optional[float]
    """Median of the recent ones."""
    seconds_left: Optional[float]
    """At the pace of this attempt, its validations and saves included; None unless it runs."""
    recent_steps: int
    """Steps that loss and Dice are means of."""
    loss: Optional[float]
    dice: Dict[str, float]
    validation: Optional[Dict[str, Any]]
    """The last one: step, mean_dice, dice, best."""
    best: Optional[float]
    """The best mean Dice."""
    checkpoint: Optional[Saved]


def run_status(run: Path, now: Optional[float] = None) -> RunStatus:
    """Gather. Raises InputError for a folder that holds neither a config.json nor a heartbeat, or a damaged config."""
    run, now = Path(run), time.time() if now is None else now
    heartbeats = read_heartbeats(run)
    config = None if heartbeats and not (run / "config.json").is_file() else load_config(run)
    events = recent_events(run, RECENT)
    workers = _workers(run, heartbeats, now)
    steps_told = [event.get("step") for event in events] + [one.heartbeat.step for one in workers if one.heartbeat]
    step = max(map(_whole, steps_told), default=0)
    steps = _steps(config, events, workers)
    checkpoint = _checkpoint(run, events, now)
    by_log = _state_by_log(run, events, now)
    if workers and not (by_log.state == "finished" and _is_left_at_the_end(events, workers, step, steps)):
        first = sorted(workers, key=lambda one: WORST_FIRST.index(one.state))
        state, is_fine = first[0].state, all(WorkerState(one.state).is_fine for one in workers)
        rank, reasons = first[0].rank, [one.detail for one in first if one.state == first[0].state]
        details = [_told(one, len(workers)) for one in first if one.detail]
    else:
        state, is_fine, rank, reasons, details = by_log.state, by_log.is_fine, 0, [], [by_log.detail]
    next_steps = advice(run, state, _again(checkpoint), rank, reasons)
    if next_steps:
        details = [without_advice(detail) for detail in details]
    recent = [event for event in events if event["event"] == "step"]
    step_s = _median([event.get("step_s") for event in recent])
    validations = [event for event in events if event["event"] == "validation"]
    return RunStatus(
        folder=str(run),
        state=state,
        details=tuple(dict.fromkeys(filter(None, details))),
        advice=next_steps,
        is_fine=is_fine,
        workers=tuple(workers),
        step=step,
        steps=steps,
        step_s=step_s,
        seconds_left=_seconds_left(events, step, steps, step_s) if state in ("running", "starting") else None,
        recent_steps=len(recent),
        loss=_mean([event.get("loss") for event in recent]),
        dice=_mean_of_each([event.get("dice") for event in recent]),
        validation=validations[-1] if validations else None,
        best=max((event["mean_dice"] for event in validations if _is_number(event.get("mean_dice"))), default=None),
        checkpoint=checkpoint,
    )


# --- Private helpers ---


def _workers(run: Path, heartbeats: Dict[int, Any], now: float) -> List[WorkerStatus]:
    """Of the latest attempt: one with fewer workers leaves the files of more behind."""
    readable = [one for one in heartbeats.values() if isinstance(one, Heartbeat)]
    latest = max(readable, key=lambda one: one.started, default=None)
    ranks = range(latest.workers) if latest else sorted(heartbeats)
    found = []
    for rank in ranks:
        one = heartbeats.get(rank)
        if isinstance(one, Heartbeat):
            state = state_of(run, one, now)
            found.append(
                WorkerStatus(
                    rank=rank,
                    state=state.state,
                    detail=state.detail if state.state != "finished" else "",
                    beat_age_s=beat_age_s(run, one, now),
                    phase_s=max(0.0, one.beat - one.phase_since),
                    heartbeat=one,
                )
            )
        elif one is not None:
            found.append(WorkerStatus(rank, "unknown", str(one)))
        elif now - latest.started < SILENT_S:
            found.append(WorkerStatus(rank, "starting", ""))
        else:
            found.append(WorkerStatus(rank, "unknown", f"{heartbeat_path(run, rank)} was never written"))
    return found


def _told(worker: WorkerStatus, workers: int) -> str:
    named = workers == 1 or worker.detail.startswith(f"worker {worker.rank} ")
    return worker.detail if named else f"worker {worker.rank}: {worker.detail}"


def _state_by_log(run: Path, events: Sequence[Dict[str, Any]], now: float) -> WorkerState:
    """Of a run without heartbeats, as earlier versions have made them."""
    if not events:
        return WorkerState("unknown", "nothing is logged and there is no heartbeat")
    last = events[-1]
    if last["event"] == "end":
        finished = last.get("reason") in FINISHED
        return WorkerState("finished" if finished else "interrupted", "" if finished else str(last.get("reason")))
    age = now - (run / "log.jsonl").stat().st_mtime
    slow = 10 * (_median([event.get("step_s") for event in events if event["event"] == "step"]) or 0)
    told = f"there is no heartbeat; the last line of the log came {format_seconds(max(0, age))} ago"
    return WorkerState("running" if age < max(5 * SILENT_S, slow) else "unknown", told)


def _is_left_at_the_end(
    events: Sequence[Dict[str, Any]], workers: Sequence[WorkerStatus], step: int, steps: Optional[int]
) -> bool:
    """Whether a run that has finished was begun again with nothing to do, whatever became of those who found that out.

    Not for one that was made longer, nor where somebody works, or says why he could not.
    """
    end = _whole(events[-1].get("step"))
    longer = events[-1].get("reason") == "finished" and bool(steps) and end < steps
    return end >= step and not longer and all(one.state in NOT_AT_WORK for one in workers)


def _checkpoint(run: Path, events: Sequence[Dict[str, Any]], now: float) -> Optional[Saved]:
    logged = [event.get("step") for event in events if event["event"] == "checkpoint"]
    for path in checkpoints(run):
        with contextlib.suppress(OSError):  # it may be removed for newer ones just now
            stat = path.stat()
            step = step_of(path)
            step = step if step >= 0 else next(reversed(logged), None)
            return Saved(step, max(0.0, now - stat.st_mtime), stat.st_size)
    return None


def _again(checkpoint: Optional[Saved]) -> str:
    """What the same command does next."""
    if checkpoint is None:
        return "there is no checkpoint yet: the same command starts anew"
    return f"the same command goes on from step {'?' if checkpoint.step is None else checkpoint.step}"


def _steps(
    config: Optional[RunConfig], events: Sequence[Dict[str, Any]], workers: Sequence[WorkerStatus]
) -> Optional[int]:
    """Steps of the run: by heartbeat, config or log, else counted in the store where that can be found."""
    told = [one.heartbeat.steps for one in workers if one.heartbeat]
    told += [config.steps] if config else []
    told += [_whole(event.get("steps")) for event in reversed(events) if event["event"] == "start"]
    known = next(filter(None, told), None)
    if known or config is None:
        return known
    with contextlib.suppress(InputError, OSError):
        cases = with_fold(open_store(config.store), config.fold).cases("train")
        return config.epochs * (len(cases) * config.patches_per_case // config.batch)
    return None


def _seconds_left(
    events: Sequence[Dict[str, Any]], step: int, steps: Optional[int], step_s: Optional[float]
) -> Optional[float]:
    """At the median step, with the share of time that this attempt has spent on other things."""
    if not steps or not step_s or step > steps:
        return None
    begin = max((number for number, event in enumerate(events) if event["event"] == "start"), default=0)
    attempt = events[begin:]
    done = step - _whole(attempt[0].get("step"))
    beside = sum(event["seconds"] for event in attempt[1:] if _is_number(event.get("seconds")))
    return (steps - step) * (step_s + (beside / done if done > 0 else 0.0))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _median(values: Sequence[Any]) -> Optional[float]:
    known = [value for value in values if _is_number(value)]
    return statistics.median(known) if known else None


def _mean(values: Sequence[Any]) -> Optional[float]:
    known = [value for value in values if _is_number(value)]
    return statistics.fmean(known) if known else None


def _mean_of_each(dicts: Sequence[Any]) -> Dict[str, float]:
    known = [one for one in dicts if isinstance(one, dict)]
    names = dict.fromkeys(name for one in known for name in one)
    means = {name: _mean([one.get(name) for one in known]) for name in names}
    return {name: mean for name, mean in means.items() if mean is not None}
