"""A run's log.jsonl: one event a line, appended as it happens; and the bar that shows the events.

What an event of each kind holds is declared here once. A line that holds anything else is left out with a warning, so
that every event that is read holds these types.
"""

import codecs
import collections
import contextlib
import json
import os
from pathlib import Path
from typing import Annotated, Any, Callable, Dict, Iterator, List, Mapping, Optional

import msgspec
from msgspec import Meta
from rich.console import Console
from rich.progress import Progress, TextColumn

from cpu3d.run.summary import RECENT, Pace
from cpu3d.util.atomic import atomic_write, sync, sync_folder
from cpu3d.util.progress import columns, say
from cpu3d.util.records import count
from memory_estimator.common.files import open_regular
from memory_estimator.common.units import format_bytes, format_seconds

FINISHED = ("finished", "early stop")  # the reasons in the last line of a run that is over; others were stopped

# --- What events hold ---

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Number = Annotated[float, Meta(ge=-1e9, le=1e9)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Bytes = Annotated[float, Meta(ge=0, le=1e18)]

PREDICTED = {
    "step_s": Seconds,
    **dict.fromkeys(("allocator_peak_bytes", "process_peak_bytes", "upper_bound_bytes", "card_bytes"), Bytes),
}

KINDS = {
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
        **dict.fromkeys(("step_s", "wait_s", "exchange_s"), Seconds),  # of a step, and of it waiting for data, workers
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
"""Kind of event -> its fields, besides its kind under "event" and the steps done by then under "step"."""

NEEDED = ("event", "step", "mean_dice", "reason")
"""The fields that an event must have, if its kind has them. All else may be missing."""

# --- The file ---


def append_event(run: Path, event: Dict[str, Any]) -> None:
    """Add one line. A crash in between can tear the last line, which `read_events` skips and the next run drops."""
    with (Path(run) / "log.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(event) + "\n")


def flush_log(run: Path) -> None:
    """Flush the lines of the log, and the file if it is new, to the disk. Raises OSError if that fails."""
    with contextlib.suppress(FileNotFoundError):
        sync(Path(run) / "log.jsonl")
    sync_folder(run)


def read_events(run: Path, steps: Optional[int] = None) -> List[Dict[str, Any]]:
    """The events of a run, in order; of those of steps only the last `steps`, if that is given: quick on a long log.
    A line that is no event is left out, with one warning for all; a last line that was cut off without one."""
    path, rare, last = Path(run) / "log.jsonl", [], collections.deque(maxlen=steps)
    if not path.exists():
        return []
    with os.fdopen(open_regular(path), "rb") as file:
        for numbered in enumerate(file, 1):
            (last if numbered[1].startswith(b'{"event": "step"') else rare).append(numbered)
    events, problems = [], []
    for number, line in sorted([*rare, *last]):
        try:
            events.append(_event(line))
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            if line.endswith(b"\n"):
                problems.append(f"line {number}: {error}")
    if problems:
        rule = f"log {path} must hold events alone, got {count(problems, 'line')} with none, such as {problems[0]}"
        say(f"warning: {rule}; left out")
    return events


def recent_events(run: Path) -> List[Dict[str, Any]]:
    """All events but those of steps, and of these the last RECENT."""
    return read_events(run, steps=RECENT)


def forget_after(run: Path, step: int, *, owes_validation: bool = False) -> None:
    """Drop what a run logged after `step`, the checkpoint that it continues from, and torn lines; the validation of
    `step` too if the checkpoint is from before it."""
    path = Path(run) / "log.jsonl"
    if not path.is_file():
        return
    kept = [
        event
        for event in read_events(run)
        if event["step"] <= step
        and event["event"] != "diverged"
        and not (owes_validation and event["event"] == "validation" and event["step"] == step)
    ]
    with atomic_write(path, "w") as file:
        file.writelines(json.dumps(event) + "\n" for event in kept)


# --- What a person watches ---


@contextlib.contextmanager
def shown(
    run: Path, *, steps: int, done: int, steps_per_epoch: int, batch: int
) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Yields a function that shows an event of the log on stderr, as a bar on a terminal."""
    console, pace = Console(stderr=True), Pace(recent_events(run))
    shows = columns(TextColumn("{task.fields[state]}", markup=False), left=TextColumn("{task.fields[left]}"))
    bar = Progress(*shows, console=console, disable=not console.is_terminal)
    left = format_seconds(pace.seconds_left(done, steps))
    task = bar.add_task("train", total=steps, completed=done, state="", left=left)

    def show(event: Mapping[str, Any]) -> None:
        group, step, line = event["event"], event["step"], ""
        pace.note(event)
        dice = "  ".join(f"{name} {value:.3f}" for name, value in event.get("dice", {}).items())
        if group == "step":
            speed = f"{event['step_s'] / batch:.2f} s/volume  {format_bytes(event['rss_bytes'])}"
            state = f"loss {event['loss']:.3f}  {dice}  {speed}"
            left = format_seconds(pace.seconds_left(step, steps))
            bar.update(task, completed=step, state=state, left=left)
            if not console.is_terminal and step % steps_per_epoch == 0:
                line = f"epoch {event['epoch'] + 1}, step {step}: {state}" + f"  {left} left" * (step < steps)
        elif group == "validation":
            took = f"{event['seconds']:.1f} s{', best so far' if event['best'] else ''}"
            line = f"validation after step {step}: Dice {dice} on {event['cases']} whole volumes, {took}"
        elif group == "diverged":
            line = event["reason"]
        elif group == "end":
            peak = format_bytes(event["peak_rss_bytes"])
            line = f"{event['reason']} after step {step}: {event['seconds']:.0f} s in all, peak {peak}"
        if line:
            bar.console.print(line, emoji=False, highlight=False, markup=False, soft_wrap=True)

    with bar:
        yield show


# --- Private helpers ---


def _struct(name: str, content: Mapping[str, Any]) -> type:
    """A type of msgspec that holds such content."""
    fields = []
    for key, kind in content.items():
        kind = _struct(key, kind) if isinstance(kind, dict) else kind
        fields.append((key, kind) if key in NEEDED else (key, kind, None))
    return msgspec.defstruct(name, fields, kw_only=True)


_COMMON = {"event": str, "step": Count}
_DECODERS = {kind: msgspec.json.Decoder(_struct(kind, {**_COMMON, **content})) for kind, content in KINDS.items()}
_OTHER = msgspec.json.Decoder(_struct("event", _COMMON))


def _event(line: bytes) -> Dict[str, Any]:
    """The event of a line, undeclared fields included. Raises MsgspecError, ValueError and RecursionError."""
    line = line.removeprefix(codecs.BOM_UTF8)  # as an editor on Windows puts before the first one
    event = msgspec.json.decode(line)
    _DECODERS.get(_OTHER.decode(line).event, _OTHER).decode(line)
    return event
