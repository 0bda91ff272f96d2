"""Tell how a run is doing: phase, progress, memory, and what to do next.

    ./run.sh status --run runs/first
    ./run.sh status --run runs/first --watch
    ./run.sh status --run runs/first --json

Ends with 0 for a run that goes on or has finished, with 1 for one that needs somebody: a worker is dead, hangs, or has
ended before the run was done; with 2 for a folder that is no run. It only reads, on any host that sees the folder; on
the run's own host it also looks whether the processes live.
"""

import argparse
import dataclasses
import json
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, List, Mapping, Optional

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from cpu3d.guard.run_status import RunStatus, WorkerStatus, run_status
from memory_estimator.units import GIB, format_bytes, format_seconds

COLOURS = {"running": "green", "starting": "green", "finished": "green", "stopping": "yellow", "interrupted": "yellow"}
"""Of states; all others need somebody now, and are red."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", required=True, metavar="DIR", help="folder of the run")
    parser.add_argument("--json", action="store_true", help="print all that is known as JSON")
    parser.add_argument("--watch", action="store_true", help="show it anew until the run ends; Ctrl-C ends only this")
    parser.add_argument("--every", type=float, default=2.0, metavar="S", help="seconds between, with --watch (2)")


def run(args: argparse.Namespace) -> int:
    folder = Path(args.run)
    status = run_status(folder)
    if args.json:
        print(json.dumps(_as_json(status), indent=1))
    elif args.watch:
        status = _watch(folder, status, max(args.every, 0.1))
    else:
        Console().print(describe(status))
    return 0 if status.is_fine else 1


def describe(status: RunStatus) -> Group:
    """What is printed: the run, its workers, then what to do."""
    lines = [*_progress_lines(status), *_memory_notes(status)]
    parts: List[Any] = [_line("run", f"{status.folder}: {status.state}", _colour(status.state))]
    if status.workers:
        parts.append(_table(status.workers))
    parts += [_line(name, text) for name, text in lines]
    parts += [_line("note" if status.is_fine else "why", detail) for detail in status.details]
    if status.advice:
        parts.append(_line("next", status.advice))
    return Group(*parts)


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


def _as_json(status: RunStatus) -> Mapping[str, Any]:
    return dataclasses.asdict(status)


def _line(name: str, text: str, style: str = "") -> Text:
    return Text.assemble((f"{name}: ", "bold"), (text, style))


def _colour(state: str) -> str:
    return COLOURS.get(state, "red")


def _table(workers: Any) -> Table:
    table = Table(
        caption="a phase with how long it has gone on; memory, peak, plan and free in GiB", caption_justify="left"
    )
    for name in ("worker", "state"):
        table.add_column(name, no_wrap=True)
    table.add_column("phase", overflow="fold")
    for name in ("step", "memory", "peak", "plan", "free"):
        table.add_column(name, justify="right", no_wrap=True)
    for worker in workers:
        table.add_row(*_cells(worker))
    return table


def _cells(worker: WorkerStatus) -> List[str]:
    beat, state = worker.heartbeat, f"[{_colour(worker.state)}]{worker.state}[/]"
    if beat is None:
        return [str(worker.rank), state, *["-"] * 6]
    ended = beat.exit_code is not None
    lives = not ended and worker.state != "dead"
    now = None if beat.anonymous_bytes is None else beat.anonymous_bytes + (beat.file_bytes or 0)
    phase = f"ended, code {beat.exit_code}" if ended else f"{beat.phase}, {_rounded(worker.phase_s)}"
    sizes = (now if lives else None, beat.peak_bytes, beat.bound_bytes, beat.free_bytes if lives else None)
    return [str(worker.rank), state, escape(phase), str(beat.step), *map(_gib, sizes)]


def _progress_lines(status: RunStatus) -> List[Any]:
    """(name, text) of each line on progress."""
    of = f" of {status.steps:,} ({status.step / status.steps:.1%})" if status.steps else ""
    pace = f", {format_seconds(status.step_s)} a step" if status.step_s else ""
    lines = [("step", f"{status.step:,}{of}{pace}{_end_time(status.seconds_left)}")]
    if status.loss is not None:
        many = f"last {status.recent_steps} steps" if status.recent_steps > 1 else "last step"
        lines.append((many, f"loss {status.loss:.3f}, Dice {_dice(status.dice)}"))
    if status.validation:
        found, best = status.validation, status.best
        mean = found.get("mean_dice")
        told = "" if mean is None else f", mean {mean:.3f}"
        if best is not None and mean is not None:
            told += ", the best so far" if mean >= best else f"; the best was {best:.3f}"
        lines.append((f"validation after step {found.get('step')}", f"Dice {_dice(found.get('dice') or {})}{told}"))
    saved = status.checkpoint
    if saved is None:
        lines.append(("checkpoint", "none yet"))
    else:
        step = "step not told" if saved.step is None else f"step {saved.step:,}"
        lines.append(("checkpoint", f"{step}, {_rounded(saved.age_s)} ago, {format_bytes(saved.size_bytes)}"))
    return lines


def _memory_notes(status: RunStatus) -> List[Any]:
    """What the table does not say of memory."""
    living = [one for one in status.workers if one.heartbeat and one.state != "dead"]
    beats = [one.heartbeat for one in living if one.heartbeat.exit_code is None]
    known = [one for one in beats if one.free_bytes is not None]
    if not known:
        return []
    least = min(known, key=lambda one: one.free_bytes)
    lines = [("memory", f"{format_bytes(least.free_bytes)} free of {least.free_of}")]
    if least.limit_bytes:
        lines = [("memory", f"{lines[0][1]}, {format_bytes(least.limit_bytes)}")]
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


def _gib(size_bytes: Optional[int]) -> str:
    return (
        "-"
        if size_bytes is None
        else f"{size_bytes / GIB:.2f}"
        if size_bytes < 100 * GIB
        else f"{size_bytes / GIB:.0f}"
    )


def _dice(dice: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.3f}" for name, value in dice.items()) or "-"
