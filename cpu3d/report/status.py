"""Tell how a run is doing: phase, progress, memory, and what to do next.

    ./run.sh status --run runs/first
    ./run.sh status --run runs/first --watch
    ./run.sh status --run runs/first --json

Ends with 0 for a run that goes on or has finished, with 1 for one that needs somebody: a worker gives no sign of life,
hangs, or has ended before the run was done; with 2 for a folder that is no run. It only reads, on any host that sees
the folder.
"""

import dataclasses
import json
import time
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import List, Mapping, Optional, Tuple

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from cpu3d.report.run_status import RunStatus, WorkerStatus, run_status
from memory_estimator.schema import option
from memory_estimator.table import Bad, Good, Poor, Table
from memory_estimator.units import format_bytes, format_seconds

STYLES = {"running": Good, "starting": Good, "finished": Good, "stopping": Poor, "interrupted": Poor}
"""Of states; all others need somebody now."""

COLUMNS = ("worker", "state", "phase", "step", "memory", "peak", "plan", "free")


@dataclass(frozen=True)
class Options:
    """Command-line options of `status`."""

    run: Path = option(help="folder of the run", metavar="DIR")
    json: bool = option(False, help="print all that is known as JSON")
    watch: bool = option(False, help="show it anew until the run ends; Ctrl-C ends only this")
    every: float = option(2.0, help="seconds between, with --watch", at_least=0.1, metavar="S")


OPTIONS = (Options,)


def run(options: Options) -> int:
    status = run_status(options.run)
    if options.json:
        print(json.dumps(dataclasses.asdict(status), indent=1))
    elif options.watch:
        status = _watch(options.run, status, options.every)
    else:
        Console().print(describe(status))
    return 0 if status.is_fine else 1


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


# --- Private helpers ---


def _watch(folder: Path, status: RunStatus, every_s: float) -> RunStatus:
    """Show it until nothing goes on any more; returns the last one. Ctrl-C is a way to end it, not an interruption."""
    try:
        with Live(describe(status), console=Console(), auto_refresh=False) as live:
            while status.is_fine and status.state != "finished":
                time.sleep(every_s)
                status = run_status(folder)
                live.update(describe(status), refresh=True)
    except KeyboardInterrupt:
        pass
    return status


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
