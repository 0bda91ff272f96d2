"""A run's log.jsonl: one event a line, appended as it happens; and what shows the events, a bar and TensorBoard."""

import collections
import contextlib
import json
import os
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping

from rich.console import Console
from rich.progress import Progress, TextColumn

from cpu3d.util.atomic import atomic_write, sync, sync_folder
from cpu3d.util.progress import columns
from memory_estimator.files import open_regular, parse_json, read_regular
from memory_estimator.units import GIB

FINISHED = ("finished", "early stop")
"""Reasons in the last line of a run that is over. Any other one was stopped, and goes on."""


def append_event(run: Path, event: Dict[str, Any]) -> None:
    """Add one line. A crash in between can tear the last line, which `read_events` skips and the next run drops."""
    with (Path(run) / "log.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(event) + "\n")


def flush_log(run: Path) -> None:
    """Have the lines of the log, and the file where it is new, on the disk. Raises OSError where that cannot be."""
    with contextlib.suppress(FileNotFoundError):
        sync(Path(run) / "log.jsonl")
    sync_folder(run)


def read_events(run: Path) -> List[Dict[str, Any]]:
    """All lines that are events; [] for a run that has none yet. Raises as `open_regular`."""
    path = Path(run) / "log.jsonl"
    return _events(read_regular(path).splitlines()) if path.exists() else []


def recent_events(run: Path, steps: int = 100) -> List[Dict[str, Any]]:
    """All events but those of steps, and of these the last `steps`; in order. Quick on the log of a long run."""
    path, others, last = Path(run) / "log.jsonl", [], collections.deque(maxlen=steps)
    if not path.exists():
        return []
    with os.fdopen(open_regular(path), "rb") as file:
        for numbered in enumerate(file):
            (last if numbered[1].startswith(b'{"event": "step"') else others).append(numbered)
    return _events(line for _, line in sorted([*others, *last]))


def forget_after(run: Path, step: int, *, owes_validation: bool = False) -> None:
    """Drop what a killed run logged past its last checkpoint, for those steps are about to be done again.

    Steps and validations after `step` go, torn lines and, before the first checkpoint, everything. The validation of
    `step` goes too where the checkpoint is from before it.
    """
    path = Path(run) / "log.jsonl"
    if not path.is_file():
        return

    def is_kept(event: Dict[str, Any]) -> bool:
        again = owes_validation and event["event"] == "validation" and event["step"] == step
        return bool(step) and event["step"] <= step and not again

    kept = [event for event in read_events(run) if is_kept(event)]
    with atomic_write(path, "w") as file:
        file.writelines(json.dumps(event) + "\n" for event in kept)


# --- What a person watches ---


class TrainingBar:
    """A context manager that shows steps and validations as they come, on stderr."""

    def __init__(self, steps: int, done: int, steps_per_epoch: int, batch: int):
        self._console = Console(stderr=True)
        self._steps_per_epoch, self._batch = steps_per_epoch, batch
        state = columns(TextColumn("{task.fields[state]}"))
        self._progress = Progress(*state, console=self._console, disable=not self._console.is_terminal)
        self._task = self._progress.add_task("train", total=steps, completed=done, state="")

    def __enter__(self) -> "TrainingBar":
        self._progress.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._progress.stop()

    def show(self, event: Mapping[str, Any]) -> None:
        """Take an event of the run's log: steps move the bar, validations and the end are printed."""
        if event["event"] == "step":
            state = (
                f"loss {event['loss']:.3f}  {_dice(event['dice'])}  {event['step_s'] / self._batch:.2f} s/volume  "
                f"{event['rss_bytes'] / GIB:.1f} GiB"
            )
            self._progress.update(self._task, completed=event["step"], state=state)
            if not self._console.is_terminal and event["step"] % self._steps_per_epoch == 0:
                self._print(f"epoch {event['epoch'] + 1}, step {event['step']}: {state}")
        elif event["event"] == "validation":
            best = ", best so far" if event["best"] else ""
            self._print(
                f"validation after step {event['step']}: Dice {_dice(event['dice'])} on {event['cases']} whole "
                f"volumes, {event['seconds']:.1f} s{best}"
            )
        elif event["event"] == "end":
            self._print(
                f"{event['reason']} after step {event['step']}: {event['seconds']:.0f} s in all, "
                f"{event['wait_share']:.1%} of the steps waiting for data, peak {event['peak_rss_bytes'] / GIB:.1f} GiB"
            )

    def _print(self, line: str) -> None:
        self._progress.console.print(line, highlight=False, soft_wrap=True)


class TensorBoard:
    """A context manager that writes steps and validations as scalars below `folder`."""

    def __init__(self, folder: Path):
        self._folder = folder

    def __enter__(self) -> "TensorBoard":
        import tensorflow as tf

        self._writer, self._scalar = tf.summary.create_file_writer(str(self._folder)), tf.summary.scalar
        return self

    def __exit__(self, *error: Any) -> None:
        self._writer.close()

    def show(self, event: Mapping[str, Any]) -> None:
        """Take an event of the run's log."""
        names = {"step": ("loss", "learning_rate", "step_s", "wait_s"), "validation": ("loss", "mean_dice")}
        group = event["event"]
        with self._writer.as_default(step=event["step"]):
            for name in names.get(group, ()):
                self._scalar(f"{group}/{name}", event[name])
            for region, value in event.get("dice", {}).items():
                self._scalar(f"{group}/dice/{region}", value)


# --- Private helpers ---

_NEEDED = {"validation": {"mean_dice"}, "end": {"reason"}}
"""What an event of a kind is nothing without, besides its step."""

_KINDS = {
    **dict.fromkeys(("step", "steps", "epoch", "cases", "workers", "cores", "parameters"), int),
    **dict.fromkeys(("seconds", "bytes", "mean_dice", "learning_rate", "wait_share", "exchange_share"), float),
    **dict.fromkeys(("dice", "host", "threads", "versions", "predicted"), dict),
    **dict.fromkeys(("event", "reason", "engine"), str),
    "grid": list,
}
"""What is written under a name; float also under what ends in _s or _bytes."""

_UNKNOWN = ("peak_rss_bytes", "allocator_peak_bytes")
"""Those that may be null."""


def _dice(dice: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.3f}" for name, value in dice.items())


def _events(lines: Iterable[bytes]) -> List[Dict[str, Any]]:
    """The events in lines; one that was torn or damaged since is left out."""
    events = []
    for line in lines:
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
            event = parse_json(line)
            whole = {"step", *_NEEDED.get(event["event"], ())} <= set(event)
            if whole and all(_is_as_logged(name, value) for name, value in event.items()):
                events.append(event)
    return events


def _is_as_logged(name: str, value: Any) -> bool:
    """Whether a value is of the kind that is written under its name, so that readers can count with it."""
    kind = _KINDS.get(name, float if name.endswith(("_s", "_bytes")) else None)
    if kind in (int, float):
        is_number = isinstance(value, (int, kind)) and not isinstance(value, bool) and abs(value) < 2**63
        return (value is None and name in _UNKNOWN) or (is_number and (kind is float or value >= 0))
    if kind is dict and isinstance(value, dict):
        return all(_is_as_logged("seconds" if name == "dice" else below, one) for below, one in value.items())
    return kind is None or isinstance(value, kind)
