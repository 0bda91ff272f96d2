"""How a run is doing: phase, progress, memory, and what to do next.

    ./run.sh status --run runs/first
    watch ./run.sh status --run runs/first
    ./run.sh status --run runs/first --json

Ends with 0 for a run that goes on or has finished, with 1 for one that needs somebody: a worker gives no sign of life,
hangs, or has ended before the run was done; with 2 for a folder that is no run. It reads heartbeats, config.json,
log.jsonl and checkpoints, on any host that sees the folder, and changes nothing. A worker is alive while its heartbeat
is younger than SILENT_S. Everything may be missing or half-written, and is then unknown.
"""

import contextlib
import dataclasses
import json
import statistics
import time
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from rich.console import Console, Group
from rich.text import Text

from cpu3d.run.checkpoint import checkpoints, step_of
from cpu3d.run.heartbeat import BEAT_S, SILENT_S, Heartbeat, beat_age_s, heartbeat_path, read_heartbeats
from cpu3d.run.log import FINISHED, recent_events
from cpu3d.run.summary import Events, Pace, median, numbers, of_kind
from cpu3d.settings import RunConfig, command_at_half_rate, load_config
from memory_estimator.common.schema import option
from memory_estimator.common.table import Bad, Good, Poor, Table
from memory_estimator.common.units import format_bytes, format_seconds

BY_EXIT_CODE = {
    0: "finished",
    3: "too large",
    4: "diverged",
    5: "out of memory",
    6: "broken off",
    130: "interrupted",
    143: "interrupted",
}
"""State of a worker that noted its end; "failed" for other codes."""

FINE = ("stopping", "starting", "running", "finished")
"""States that need nobody."""

WORST_FIRST = ("diverged", "out of memory", "too large", "failed", "stalled", "silent", "broken off", "unknown")
WORST_FIRST += ("interrupted", *FINE)
"""The run's state is the first of these that a worker is in: causes come before what others suffer from them."""

IDLE = ("silent", "broken off", "unknown", "interrupted", "finished")
"""States of workers that do nothing for a run whose log says that it is finished."""

WORKERS_DIFFER = "weights must be the same on all workers"
"""So begins WorkersDifferError: a host computes wrong, which no settings mend."""


STYLES = {"running": Good, "starting": Good, "finished": Good, "stopping": Poor, "interrupted": Poor}
"""Of states; all others need somebody now."""

COLUMNS = ("worker", "state", "phase", "step", "memory", "peak", "plan", "free")


@dataclass(frozen=True)
class Options:
    """Command-line options of `status`."""

    run: Path = option(help="folder of the run", metavar="DIR")
    json: bool = option(False, help="print all that is known as JSON")


OPTIONS = (Options,)


def run(options: Options) -> int:
    status = run_status(options.run)
    if options.json:
        print(json.dumps(dataclasses.asdict(status), indent=1))
    else:
        Console().print(describe(status))
    return 0 if status.is_fine else 1


@dataclass(frozen=True)
class WorkerStatus:
    """One worker."""

    rank: int
    state: str
    """One of WORST_FIRST."""
    detail: str = ""
    """What is known besides, and what to look at."""
    beat_age_s: Optional[float] = None
    phase_s: Optional[float] = None
    """How long the phase had gone on at the last beat."""
    heartbeat: Optional[Heartbeat] = None


@dataclass(frozen=True)
class Saved:
    """The last checkpoint."""

    step: int
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
    """The mean Dice of the best weights."""
    checkpoint: Optional[Saved]


def run_status(run: Path, now: Optional[float] = None) -> RunStatus:
    """Look at a run. Raises InputError for a folder without config.json and heartbeat, or with a damaged config."""
    run, now = Path(run), time.time() if now is None else now
    heartbeats = read_heartbeats(run)
    config = None if heartbeats and not (run / "config.json").is_file() else load_config(run)
    events = recent_events(run)
    workers = _workers(run, heartbeats, now)
    beats = [one.heartbeat for one in workers if one.heartbeat]
    starts, recent, validations = (of_kind(events, kind) for kind in ("start", "step", "validation"))
    step = max(map(_whole, [*(event.get("step") for event in events), *(beat.step for beat in beats)]), default=0)
    known = [beat.steps for beat in beats] + [config.steps if config else None]
    steps = next(filter(None, [*known, *(_whole(event.get("steps")) for event in reversed(starts))]), None)
    checkpoint = _checkpoint(run, now)
    judged = sorted(workers, key=lambda one: WORST_FIRST.index(one.state))
    by_log = _state_by_log(events)
    if not workers or (by_log.state == "finished" and _is_left_finished(events[-1], workers, step, steps)):
        judged = [by_log]
    first = judged[0]
    alike = [event for event in recent if event.get("voxels") == recent[-1].get("voxels")]  # of one grid
    step_s = median(numbers(alike, "step_s"))
    return RunStatus(
        folder=str(run),
        state=first.state,
        details=tuple(dict.fromkeys(_named(one, len(workers)) for one in judged if one.detail)),
        advice=_advice(run, config, first, [one.detail for one in judged if one.state == first.state], checkpoint),
        is_fine=all(one.state in FINE for one in judged),
        workers=tuple(workers),
        step=step,
        steps=steps,
        step_s=step_s,
        seconds_left=Pace(events).seconds_left(step, steps) if first.state in ("running", "starting") else None,
        recent_steps=len(recent),
        loss=_mean(numbers(recent, "loss")),
        dice=_mean_of_each([event.get("dice") or {} for event in recent]),
        validation=validations[-1] if validations else None,
        best=next(iter(numbers([one for one in reversed(validations) if one.get("best")], "mean_dice")), None),
        checkpoint=checkpoint,
    )


def worker_status(run: Path, beat: Heartbeat, now: float) -> WorkerStatus:
    """Judge a worker by its heartbeat: the end it noted, else the age of its last beat, else what that says."""
    age = beat_age_s(run, beat, now)
    if beat.exit_code is not None:
        state = BY_EXIT_CODE.get(beat.exit_code, "failed")
        detail = "" if state == "finished" else beat.reason
    elif age > SILENT_S:
        state = "silent"
        detail = (
            f"no beat for {format_seconds(age)}, where one comes every {BEAT_S:g} s; look on {beat.host_name} whether "
            f"process {beat.pid} lives, and in `dmesg` whether it was killed"
        )
    elif beat.stalled or beat.stop:
        state, detail = ("stalled", beat.stalled) if beat.stalled else ("stopping", beat.stop)
    else:
        state, detail = "starting" if beat.phase == "starting" else "running", ""
    return WorkerStatus(beat.rank, state, detail, age, max(0.0, beat.beat - beat.phase_since), beat)


def describe(status: RunStatus) -> Group:
    """What is printed: the run in a line, its workers in a table, then progress and what to do."""
    lines = [*_progress(status), *_memory_notes(status)]
    lines += [("note" if status.is_fine else "why", detail) for detail in status.details]
    lines += [("next", status.advice)] if status.advice else []
    state = STYLES.get(status.state, Bad)(status.state)
    first = Text.assemble(("run: ", "bold"), f"{status.folder}: ", (state, state.style))
    rows = [_cells(worker) for worker in status.workers]
    table = [Table(COLUMNS, rows, caption="phase: and how long it has gone on; G is GiB", names=3)] if rows else []
    return Group(first, *table, *(Text.assemble((f"{name}: ", "bold"), text) for name, text in lines))


# --- Private helpers: what is known ---


def _workers(run: Path, heartbeats: Mapping[int, Any], now: float) -> List[WorkerStatus]:
    """Of the latest attempt: one with fewer workers leaves the files of more behind."""
    readable = [one for one in heartbeats.values() if isinstance(one, Heartbeat)]
    latest = max(readable, key=lambda one: one.started, default=None)
    found = []
    for rank in range(latest.workers) if latest else sorted(heartbeats):
        one = heartbeats.get(rank)
        if isinstance(one, Heartbeat):
            found.append(worker_status(run, one, now))
        elif one is not None:
            found.append(WorkerStatus(rank, "unknown", str(one)))
        elif now - latest.started < SILENT_S:
            found.append(WorkerStatus(rank, "starting"))
        else:
            found.append(WorkerStatus(rank, "unknown", f"{heartbeat_path(run, rank)} was never written"))
    return found


def _state_by_log(events: Events) -> WorkerStatus:
    """Of a run without heartbeats: whether it has finished."""
    last = events[-1] if events else {"event": ""}
    if last["event"] == "end" and last.get("reason") in FINISHED:
        return WorkerStatus(0, "finished")
    return WorkerStatus(0, "unknown", "there is no heartbeat")


def _is_left_finished(end: Mapping[str, Any], workers: Sequence[WorkerStatus], step: int, steps: Optional[int]) -> bool:
    """Whether a run that has finished was begun again with nothing to do, whatever became of those who found that out.

    Not for one that was made longer, nor where somebody works, or says why he could not.
    """
    longer = end.get("reason") == "finished" and bool(steps) and _whole(end.get("step")) < steps
    return _whole(end.get("step")) >= step and not longer and all(one.state in IDLE for one in workers)


def _named(worker: WorkerStatus, workers: int) -> str:
    named = workers < 2 or worker.detail.startswith(f"worker {worker.rank} ")
    return worker.detail if named else f"worker {worker.rank}: {worker.detail}"


def _advice(
    run: Path,
    config: Optional[RunConfig],
    first: WorkerStatus,
    reasons: Sequence[str],
    checkpoint: Optional[Saved],
) -> str:
    """What to do next, a line; "" where nothing is. `reasons` are those of the workers in the state of the `first`."""
    state = first.state
    if state in ("running", "starting", "stopping"):
        return ""
    if state == "finished":
        return f"`evaluate --run {run}` scores it, `report --run {run}` shows it; a larger --epochs or --steps goes on"
    again = "there is no checkpoint yet: the same command starts anew"
    if checkpoint:
        again = f"the same command goes on from step {checkpoint.step}"
    if state in ("stalled", "silent"):
        again = f"when its process has ended, {again}"
    elif any(reason.startswith(WORKERS_DIFFER) for reason in reasons):
        again = f"take the host that is named out of the run; then {again}"
    elif state == "diverged":
        workers = first.heartbeat.workers if first.heartbeat else 1
        again = f"half the rate: {command_at_half_rate(config, run, workers)}" if config else again
    log = run / "logs" / f"worker-{first.rank}.log"
    return f"{again}; its last words are in {log}" if log.is_file() else again


def _checkpoint(run: Path, now: float) -> Optional[Saved]:
    for path in checkpoints(run):
        with contextlib.suppress(OSError):  # it may be removed for newer ones just now
            stat = path.stat()
            return Saved(step_of(path), max(0.0, now - stat.st_mtime), stat.st_size)
    return None


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _mean(values: Sequence[float]) -> Optional[float]:
    return statistics.fmean(values) if values else None


def _mean_of_each(dicts: Events) -> Dict[str, float]:
    means = {name: _mean(numbers(dicts, name)) for one in dicts for name in one}
    return {name: mean for name, mean in means.items() if mean is not None}


# --- Private helpers: what is printed ---


def _cells(worker: WorkerStatus) -> Tuple[str, ...]:
    beat, state = worker.heartbeat, STYLES.get(worker.state, Bad)(worker.state)
    if beat is None:
        return (str(worker.rank), state, *["-"] * 6)
    lives = _lives(worker)
    phase = f"{beat.phase}, {_rounded(worker.phase_s)}" if beat.exit_code is None else f"ended, code {beat.exit_code}"
    now = None if beat.anonymous_bytes is None else beat.anonymous_bytes + (beat.file_bytes or 0)
    sizes = (now if lives else None, beat.peak_bytes, beat.bound_bytes, beat.free_bytes if lives else None)
    return (str(worker.rank), state, phase, str(beat.step), *map(_short, sizes))


def _lives(worker: WorkerStatus) -> bool:
    return worker.heartbeat is not None and worker.heartbeat.exit_code is None and worker.state != "silent"


def _progress(status: RunStatus) -> List[Tuple[str, str]]:
    """(name, text) of each line on progress."""
    of = f" of {status.steps:,} ({status.step / status.steps:.1%})" if status.steps else ""
    pace = f", {format_seconds(status.step_s)} a step" if status.step_s else ""
    lines = [("step", f"{status.step:,}{of}{pace}{_end_time(status.seconds_left)}")]
    if status.loss is not None:
        lines.append((f"mean of {status.recent_steps} steps", f"loss {status.loss:.3f}, Dice {_dice(status.dice)}"))
    if status.validation:
        mean = status.validation.get("mean_dice")
        text = f"Dice {_dice(status.validation.get('dice') or {})}"
        if mean is not None and status.best is not None:
            text += f", mean {mean:.3f}, best {status.best:.3f}"
        lines.append((f"validation after step {status.validation.get('step')}", text))
    saved, text = status.checkpoint, "none yet"
    if saved:
        step = "unknown step" if saved.step is None else f"step {saved.step:,}"
        text = f"{step}, {_rounded(saved.age_s)} ago, {format_bytes(saved.size_bytes)}"
    return [*lines, ("checkpoint", text)]


def _memory_notes(status: RunStatus) -> List[Tuple[str, str]]:
    """What the table does not hold of memory."""
    beats = [one.heartbeat for one in status.workers if _lives(one)]
    least = min((one for one in beats if one.free_bytes is not None), key=lambda one: one.free_bytes, default=None)
    if least is None:
        return []
    limit = f", {format_bytes(least.limit_bytes)}" if least.limit_bytes else ""
    lines = [("memory", f"{format_bytes(least.free_bytes)} free of {least.free_of}{limit}")]
    over = {one.rank: one.peak_bytes - one.bound_bytes for one in beats if one.bound_bytes and one.peak_bytes}
    worst = max(over, key=over.get, default=None)
    if worst is not None and over[worst] > 0:
        more = format_bytes(over[worst])
        lines.append(("memory", f"worker {worst} has held {more} above the plan's upper bound, mapped files included"))
    return lines


def _end_time(seconds: Optional[float]) -> str:
    if seconds is None:
        return ""
    end = datetime.now() + timedelta(seconds=seconds)
    day = "" if end.date() == datetime.now().date() else f"{end:%a %d %b} "
    return f", about {_rounded(seconds)} to go, until {day}{end:%H:%M}"


def _rounded(seconds: Optional[float]) -> str:
    return "-" if seconds is None else format_seconds(round(seconds) if seconds < 120 else seconds)


def _short(size_bytes: Optional[int]) -> str:
    """As 14.00G, for a column."""
    return "-" if size_bytes is None else format_bytes(size_bytes).replace(" ", "").replace("iB", "")


def _dice(dice: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.3f}" for name, value in dice.items()) or "-"
