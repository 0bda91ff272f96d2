"""A run's log.jsonl: one event a line, appended as it happens; and the bar that shows the events.

What an event of each kind holds is declared here once. A line that holds anything else is left out
with a warning, so that every event that is read holds these types."""

import contextlib
import json
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Callable,
    Dict,
    Iterator,
    List,
    Mapping,
    Optional,
)

import msgspec
from msgspec import Meta
from rich.console import Console
from rich.progress import Progress, TextColumn

from cpu3d.run.summary import PROGRESS_KINDS, Event, Pace
from cpu3d.util.atomic import sync, sync_folder, write_bytes
from cpu3d.util.progress import columns, say
from cpu3d.util.records import count
from memory_estimator.common.files import read_regular
from memory_estimator.common.units import counted, format_bytes, format_seconds

# The reason in the last line of a run that is over; others were stopped.
FINISHED = "finished"

# --- What events hold ---

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Number = Annotated[float, Meta(ge=-1e18, le=1e18)]
Amount = Annotated[float, Meta(ge=0, le=1e18)]  # seconds or bytes

_FIGURE_NAMES = (
    "step_s",
    "allocator_peak_bytes",
    "run_allocator_peak_bytes",
    "process_peak_bytes",
    "run_process_peak_bytes",
    "upper_bound_bytes",
    "card_bytes",
)
_FIGURES: List[Any] = [(name, Amount, None) for name in _FIGURE_NAMES]
Coarse: Any = msgspec.defstruct("Coarse", _FIGURES)
Predicted: Any = msgspec.defstruct("Predicted", [*_FIGURES, ("coarse", Coarse, None)])
"""What a plan predicts of a step, and of a coarse one."""

FIELDS: Dict[str, Any] = {
    "event": str,  # start, step, validation, checkpoint, diverged or end
    "step": Count,  # that are done
    # Of an attempt that starts: where and with what it runs.
    **dict.fromkeys(("time", "engine", "read_mode", "device", "precision", "policy"), str),
    **dict.fromkeys(("steps", "coarse_steps", "parameters", "micro_batch", "workers"), Count),
    "grids": str,
    **dict.fromkeys(("host", "threads"), Dict[str, Any]),
    "versions": Dict[str, str],
    "predicted": Predicted,
    # Of steps and validations.
    "case_id": str,  # of all cases of a step, with spaces between
    **dict.fromkeys(("epoch", "cases", "voxels"), Count),
    **dict.fromkeys(("loss", "learning_rate", "mean_dice"), Number),
    "dice": Dict[str, Number],  # by region; soft of a step, hard of a validation
    "best": bool,
    # Of a step, and of it waiting for data, and for workers.
    **dict.fromkeys(("step_s", "wait_s", "exchange_s"), Amount),
    **dict.fromkeys(("rss_bytes", "bytes"), Amount),
    "seconds": Amount,  # of a validation or checkpoint; at the end, of all attempts
    "reason": str,  # of a divergence or an end
    **dict.fromkeys(("peak_rss_bytes", "allocator_peak_bytes"), Optional[Amount]),
}
NEEDED = {"validation": "mean_dice", "end": "reason"}
"""Kind of event -> the field that it must have; of the others each may be missing."""

# --- The file ---


def append_event(run: Path, event: Dict[str, Any]) -> None:
    """Add one line. A crash in between can tear the last line, which readers skip and the next run
    drops."""
    with _path(run).open("a", encoding="utf-8") as file:
        file.write(json.dumps(event) + "\n")


def flush_log(run: Path) -> None:
    """Flush the lines of the log, and the file if it is new, to the disk. Raises OSError if that
    fails."""
    with contextlib.suppress(FileNotFoundError):
        sync(_path(run))
    sync_folder(run)


def read_events(run: Path) -> List[Event]:
    """The events of a run, in order. A line that is no event is left out, with one warning for all
    of them; a last line that was cut off without one."""
    lines = _read(run).splitlines(keepends=True)
    events = []
    wrong = []
    for number, line in enumerate(lines, 1):
        try:
            events.append(_event(line))
        except NO_EVENT as error:
            if line.endswith(b"\n"):
                wrong.append(f"line {number}: {error}")
    if wrong:
        say(
            f"warning: log {_path(run)} must hold events alone, got {count(wrong, 'line')} with "
            f"none, such as {wrong[0]}; left out"
        )
    return events


def last_event(run: Path, *kinds: str) -> Event:
    """The last event of a run, or the last of these kinds; {} if there is none."""
    for line in reversed(_read(run).splitlines()):
        with contextlib.suppress(*NO_EVENT):
            event = _event(line)
            if not kinds or event["event"] in kinds:
                return event
    return {}


def last_end(run: Path) -> Event:
    """The event that ended the last attempt; {} if it has not ended, or was killed."""
    last = last_event(run, *PROGRESS_KINDS)
    return last if last.get("event") == "end" else {}


def forget_after(run: Path, step: int, *, owes_validation: bool = False) -> None:
    """Drop what a run logged after `step`, the checkpoint that it continues from, and torn lines;
    the validation of `step` too if the checkpoint is from before it."""
    content = _read(run)
    lines = []
    for line in content.splitlines():
        try:
            event = _event(line)
        except NO_EVENT:
            continue
        kind = event["event"]
        is_repeated = owes_validation and kind == "validation" and event["step"] == step
        if kind != "diverged" and event["step"] <= step and not is_repeated:
            lines.append(line + b"\n")
    kept = b"".join(lines)
    if kept != content:
        write_bytes(_path(run), kept)


# --- What a person watches ---


@contextlib.contextmanager
def shown(
    run: Path, *, steps: int, done: int, steps_per_epoch: int, batch: int
) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Yields a function that shows an event of the log on stderr, as a bar on a terminal."""
    console = Console(stderr=True)
    pace = Pace(read_events(run))
    state_column = TextColumn("{task.fields[state]}", markup=False)
    shows = columns(state_column, left=TextColumn("{task.fields[left]}"))
    bar = Progress(*shows, console=console, disable=not console.is_terminal)
    left = format_seconds(pace.seconds_left(done, steps))
    task = bar.add_task("train", total=steps, completed=done, state="", left=left)

    def show(event: Mapping[str, Any]) -> None:
        kind = event["event"]
        step = event["step"]
        line = ""
        pace.note(event)
        dice = "  ".join(f"{name} {value:.3f}" for name, value in event.get("dice", {}).items())
        if kind == "step":
            state = f"loss {event['loss']:.3f}  {dice}  "
            step_s = pace.step_s(step)
            if step_s is not None:
                state += f"{step_s / batch:.2f} s/volume  "
            state += format_bytes(event["rss_bytes"])
            left = format_seconds(pace.seconds_left(step, steps))
            bar.update(task, completed=step, state=state, left=left)
            if not console.is_terminal and step % steps_per_epoch == 0:
                line = f"epoch {event['epoch'] + 1}, step {step}: {state}"
                if step < steps:
                    line += f"  {left} left"
        elif kind == "validation":
            scores = f"Dice {dice} on {counted(event['cases'], 'whole volume')}"
            line = f"validation after step {step}: {scores}, {event['seconds']:.1f} s"
            if event["best"]:
                line += ", best so far"
        elif kind == "diverged":
            line = event["reason"]
        elif kind == "end":
            took = f"{event['seconds']:.0f} s of steps, validations and saves"
            peak = format_bytes(event["peak_rss_bytes"])
            line = f"{event['reason']} after step {step}: {took}, peak {peak}"
        if line:
            bar.console.print(line, emoji=False, highlight=False, markup=False, soft_wrap=True)

    with bar:
        yield show


# --- Private helpers ---


_REQUIRED = ("event", "step")
_FIELDS = [(key, kind) if key in _REQUIRED else (key, kind, None) for key, kind in FIELDS.items()]
_EVENT: Any = msgspec.json.Decoder(msgspec.defstruct("Event", _FIELDS, kw_only=True))
NO_EVENT = (msgspec.MsgspecError, ValueError, RecursionError)  # what `_event` raises


def _event(line: bytes) -> Event:
    """The event of a line, undeclared fields included. Raises NO_EVENT."""
    _EVENT.decode(line)
    event = msgspec.json.decode(line)
    needed = NEEDED.get(event["event"])
    if needed and needed not in event:
        raise ValueError(f"no {needed}")
    return event


def _path(run: Path) -> Path:
    return Path(run) / "log.jsonl"


def _read(run: Path) -> bytes:
    """The content of a log; empty if there is none."""
    path = _path(run)
    return read_regular(path) if path.exists() else b""
