"""A run's status as it is printed: the run in a line, its workers in a table, then progress and what to do."""

from datetime import datetime, timedelta
from typing import Any, List, Mapping, Optional, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from cpu3d.report.status.run_status import RunStatus, WorkerStatus
from memory_estimator.units import format_bytes, format_seconds

COLOURS = {"running": "green", "starting": "green", "finished": "green", "stopping": "yellow", "interrupted": "yellow"}
"""Of states; all others need somebody now, and are red."""

SIZES = ("step", "memory", "peak", "plan", "free")
"""Columns of the workers' table behind their phase."""

NARROWER = (SIZES, SIZES[1:], ("memory", "free"), ())
"""Those of ever narrower terminals."""

LEAST_PHASE = 10
"""Characters a line for a phase: most of its words need no more."""


def describe(status: RunStatus) -> Group:
    """What is printed: the run, its workers, then what to do."""
    lines = [*_progress_lines(status), *_memory_notes(status)]
    parts: List[Any] = [_line("run", f"{status.folder}: {status.state}", _colour(status.state))]
    if status.workers:
        parts.append(_Workers(status.workers))
    parts += [_line(name, text) for name, text in lines]
    parts += [_line("note" if status.is_fine else "why", detail) for detail in status.details]
    if status.advice:
        parts.append(_line("next", status.advice))
    return Group(*parts)


# --- Private helpers ---


def _line(name: str, text: str, style: str = "") -> Text:
    return Text.assemble((f"{name}: ", "bold"), (text, style))


def _colour(state: str) -> str:
    return COLOURS.get(state, "red")


class _Workers:
    """The workers' table, with fewer columns where a terminal is too narrow for all."""

    def __init__(self, workers: Sequence[WorkerStatus]):
        self._workers = workers

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for sizes in NARROWER:
            rows = [("worker", "state", "", *sizes), *(_cells(worker, sizes) for worker in self._workers)]
            widths = [max(len(Text.from_markup(cell)) for cell in column) for column in zip(*rows)]
            widths[2] = LEAST_PHASE  # it is folded
            if sum(widths) + 3 * len(widths) + 1 <= options.max_width:
                break
        yield _table(self._workers, sizes)


def _table(workers: Sequence[WorkerStatus], sizes: Sequence[str]) -> Table:
    left_out = "" if sizes == SIZES else "; a wider terminal shows all"
    table = Table(
        caption=f"phase: and how long it has gone on; sizes: G is GiB{left_out}",
        caption_justify="left",
    )
    for name in ("worker", "state"):
        table.add_column(name, no_wrap=True)
    table.add_column("phase", overflow="fold", min_width=LEAST_PHASE)
    for name in sizes:
        table.add_column(name, justify="right", no_wrap=True)
    for worker in workers:
        table.add_row(*_cells(worker, sizes))
    return table


def _cells(worker: WorkerStatus, sizes: Sequence[str]) -> List[str]:
    beat, state = worker.heartbeat, f"[{_colour(worker.state)}]{worker.state}[/]"
    if beat is None:
        return [str(worker.rank), state, *["-"] * (1 + len(sizes))]
    ended = beat.exit_code is not None
    lives = not ended and worker.state != "dead"
    now = None if beat.anonymous_bytes is None else beat.anonymous_bytes + (beat.file_bytes or 0)
    phase = f"ended, code {beat.exit_code}" if ended else f"{escape(beat.phase)}, {_rounded(worker.phase_s)}"
    told = {
        "step": str(beat.step),
        "memory": _short(now if lives else None),
        "peak": _short(beat.peak_bytes),
        "plan": _short(beat.bound_bytes),
        "free": _short(beat.free_bytes if lives else None),
    }
    return [str(worker.rank), state, phase, *(told[name] for name in sizes)]


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


def _short(size_bytes: Optional[int]) -> str:
    """As 14.00G, for a column."""
    return "-" if size_bytes is None else format_bytes(size_bytes).replace(" ", "").replace("iB", "")


def _dice(dice: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.3f}" for name, value in dice.items()) or "-"
