"""A run's log.jsonl: one event a line, appended as it happens; and the bar that shows the events.

What an event of each kind holds is declared here once. A line that holds anything else is left out
with a warning, so that every event that is read holds these types."""

import codecs
import contextlib
import json
import os
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
from cpu3d.util.atomic import atomic_write, sync, sync_folder
from cpu3d.util.progress import columns, say
from cpu3d.util.records import count
from memory_estimator.common.files import read_regular
from memory_estimator.common.units import counted, format_bytes, format_seconds

# The reason in the last line of a run that is over; others were stopped.
FINISHED = "finished"

# --- What events hold ---

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Number = Annotated[float, Meta(ge=-1e9, le=1e9)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Bytes = Annotated[float, Meta(ge=0, le=1e18)]

PREDICTED = {
    "step_s": Seconds,
    **dict.fromkeys(("allocator_peak_bytes", "run_allocator_peak_bytes", "card_bytes"), Bytes),
    **dict.fromkeys(("process_peak_bytes", "run_process_peak_bytes", "upper_bound_bytes"), Bytes),
}

KINDS: Dict[str, Dict[str, Any]] = {
    "start": {  # of an attempt: where and with what it runs
        **dict.fromkeys(("time", "engine", "store", "split_hash", "read_mode"), str),
        **dict.fromkeys(("mode", "device", "precision", "policy"), str),
        **dict.fromkeys(("steps", "coarse_steps", "parameters", "micro_batch", "workers"), Count),
        "grid": List[Count],
        "host": {"cores": Count},
        "versions": Dict[str, str],
        "threads": Dict[str, Any],
        "predicted": {**PREDICTED, "coarse": PREDICTED},
    },
    "step": {
        "epoch": Count,
        "case_id": str,  # of all its cases, with spaces between
        **dict.fromkeys(("loss", "learning_rate"), Number),
        "dice": Dict[str, Number],  # soft, by region
        "voxels": Count,
        # Of a step, and of it waiting for data, and for workers.
        **dict.fromkeys(("step_s", "wait_s", "exchange_s"), Seconds),
        "rss_bytes": Bytes,
    },
    "validation": {
        **dict.fromkeys(("epoch", "cases"), Count),
        **dict.fromkeys(("loss", "mean_dice"), Number),
        "dice": Dict[str, Number],  # hard, by region
        "seconds": Seconds,
        "best": bool,
    },
    "checkpoint": {"seconds": Seconds, "bytes": Bytes},
    "diverged": {"reason": str},
    "end": {  # of an attempt that was not killed
        "reason": str,
        "seconds": Seconds,  # of all attempts
        **dict.fromkeys(("peak_rss_bytes", "allocator_peak_bytes"), Optional[Bytes]),
    },
}
"""Kind of event -> its fields, besides its kind under "event" and the steps done by then under
"step"."""

NEEDED = ("event", "step", "mean_dice", "reason")
"""The fields that an event must have, if its kind has them. All else may be missing."""

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
        got = f"{count(wrong, 'line')} with none, such as {wrong[0]}"
        say(f"warning: log {_path(run)} must hold events alone, got {got}; left out")
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
    if content.startswith(kept):  # as a rule: then no second file of that size is written
        if kept != content:
            os.truncate(_path(run), len(kept))
        return
    with atomic_write(_path(run)) as file:
        file.write(kept)


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


def _struct(name: str, content: Mapping[str, Any]) -> type:
    """A type of msgspec that holds such content."""
    fields: List[Any] = []
    for key, kind in content.items():
        if isinstance(kind, dict):
            kind = _struct(key, kind)
        if key in NEEDED:
            fields.append((key, kind))
        else:
            fields.append((key, kind, None))
    return msgspec.defstruct(name, fields, kw_only=True)


_COMMON: Dict[str, Any] = {"event": str, "step": Count}
_DECODERS: Dict[Any, Any] = {
    kind: msgspec.json.Decoder(_struct(kind, {**_COMMON, **content}))
    for kind, content in KINDS.items()
}
_OTHER: Any = msgspec.json.Decoder(_struct("event", _COMMON))


NO_EVENT = (msgspec.MsgspecError, ValueError, RecursionError)  # what `_event` raises


def _event(line: bytes) -> Event:
    """The event of a line, undeclared fields included. Raises NO_EVENT."""
    line = line.removeprefix(codecs.BOM_UTF8)  # as an editor on Windows puts before the first one
    event = msgspec.json.decode(line)
    decoder = _OTHER
    if isinstance(event, dict) and isinstance(event.get("event"), str):
        decoder = _DECODERS.get(event["event"], _OTHER)
    decoder.decode(line)
    return event


def _path(run: Path) -> Path:
    return Path(run) / "log.jsonl"


def _read(run: Path) -> bytes:
    """The content of a log; empty if there is none."""
    path = _path(run)
    return read_regular(path) if path.exists() else b""
