"""A run's log.jsonl: one event a line, appended as it happens; and the bar that shows the events."""

import collections
import contextlib
import json
import os
import statistics
from pathlib import Path
from typing import Any, Callable, Deque, Dict, Iterable, Iterator, List, Mapping, Optional

from rich.console import Console
from rich.progress import Progress, TextColumn

from cpu3d.util.atomic import atomic_write, sync, sync_folder
from cpu3d.util.progress import columns
from cpu3d.util.records import duration
from memory_estimator.common.files import open_regular, parse_json, read_regular
from memory_estimator.common.units import format_bytes

RECENT = 50
"""Steps that losses and times are of."""

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


def recent_events(run: Path, steps: int = RECENT) -> List[Dict[str, Any]]:
    """All events but those of steps, and of these the last `steps`; in order. Quick on the log of a long run."""
    path, others, last = Path(run) / "log.jsonl", [], collections.deque(maxlen=steps)
    if not path.exists():
        return []
    with os.fdopen(open_regular(path), "rb") as file:
        for numbered in enumerate(file):
            (last if numbered[1].startswith(b'{"event": "step"') else others).append(numbered)
    return _events(line for _, line in sorted([*others, *last]))


def forget_after(run: Path, step: int, *, owes_validation: bool = False) -> None:
    """Drop what a run logged past the checkpoint that it goes on from, for those steps are about to be done again.

    What was logged after `step` goes, and torn lines; the validation of `step` where the checkpoint is from before it.
    """
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


class Pace:
    """How fast the last attempt of a run goes, by the events of its log: coarse steps and full ones apart."""

    def __init__(self, events: Iterable[Mapping[str, Any]] = ()):
        self._begin = self._step = self._coarse_steps = 0
        self._beside_s = 0.0
        self._predicted_s: Dict[bool, Optional[float]] = {}
        self._steps_s: Dict[bool, Deque[float]] = {coarse: collections.deque(maxlen=RECENT) for coarse in (True, False)}
        for event in events:
            self.note(event)

    def note(self, event: Mapping[str, Any]) -> None:
        """Count an event; whatever may be missing from it."""
        kind, step = event["event"], event.get("step")
        if kind == "start":
            self.__init__()
            self._begin = self._step = step if isinstance(step, int) else 0
            self._coarse_steps = event.get("coarse_steps") or 0
            full = event.get("predicted") or {}
            self._predicted_s = {False: full.get("step_s"), True: (full.get("coarse") or {}).get("step_s")}
        elif kind == "step" and "step_s" in event and isinstance(step, int):
            if step - 1 not in (self._begin, self._coarse_steps):  # these compile
                self._steps_s[step <= self._coarse_steps].append(event["step_s"])
            self._step = step
        elif kind in ("validation", "checkpoint"):
            self._beside_s += event.get("seconds", 0.0)

    def seconds_left(self, step: int, steps: Optional[int]) -> Optional[float]:
        """From `step` to the end at the median of the recent steps, and where there are none yet as predicted, by as
        much too low or high as the others were; with the time that validations and saves have had, for each step. None
        where neither is known."""
        if not steps or step > steps:
            return None
        seen = {coarse: statistics.median(each) for coarse, each in self._steps_s.items() if each}
        off = [seen[coarse] / self._predicted_s[coarse] for coarse in seen if self._predicted_s.get(coarse)]
        left, left_s = {True: max(min(self._coarse_steps, steps) - step, 0)}, 0.0
        left[False] = steps - step - left[True]
        for coarse, count in left.items():
            predicted_s = self._predicted_s.get(coarse)
            step_s = seen.get(coarse, predicted_s and predicted_s * (off[0] if off else 1.0))
            if count and step_s is None:
                return None
            left_s += count * (step_s or 0.0)
        done = self._step - self._begin
        return left_s + (steps - step) * (self._beside_s / done if done > 0 else 0.0)


# --- What a person watches ---


@contextlib.contextmanager
def shown(
    run: Path, *, steps: int, done: int, steps_per_epoch: int, batch: int
) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Yields a function that shows an event of the log on stderr, as a bar on a terminal."""
    console, pace = Console(stderr=True), Pace(recent_events(run))
    shows = columns(TextColumn("{task.fields[state]}"), left=TextColumn("{task.fields[left]}"))
    bar = Progress(*shows, console=console, disable=not console.is_terminal)
    seen: List[Optional[int]] = [None]
    task = bar.add_task("train", total=steps, completed=done, state="", left=duration(pace.seconds_left(done, steps)))

    def show(event: Mapping[str, Any]) -> None:
        group, step, line = event["event"], event["step"], ""
        pace.note(event)
        dice = "  ".join(f"{name} {value:.3f}" for name, value in event.get("dice", {}).items())
        if group == "step":
            speed = f"{event['step_s'] / batch:.2f} s/volume  {format_bytes(event['rss_bytes'])}"
            state = f"loss {event['loss']:.3f}  {dice}  {speed}"
            left = duration(pace.seconds_left(step, steps))
            bar.update(task, completed=step, state=state, left=left)
            before, seen[0] = seen[0], event.get("voxels", seen[0])
            if before not in (None, seen[0]):
                bar.console.print(f"step {step}: {seen[0]:,} voxels a step from here on", highlight=False)
            if not console.is_terminal and step % steps_per_epoch == 0:
                line = f"epoch {event['epoch'] + 1}, step {step}: {state}" + f"  {left} left" * (step < steps)
        elif group == "validation":
            took = f"{event['seconds']:.1f} s{', best so far' if event['best'] else ''}"
            line = f"validation after step {step}: Dice {dice} on {event['cases']} whole volumes, {took}"
        elif group == "diverged":
            line = event["reason"]
        elif group == "end":
            peak = (
                f"{event['wait_share']:.1%} of the steps waiting for data, peak {format_bytes(event['peak_rss_bytes'])}"
            )
            line = f"{event['reason']} after step {step}: {event['seconds']:.0f} s in all, {peak}"
        if line:
            bar.console.print(line, highlight=False, soft_wrap=True)

    with bar:
        yield show


# --- Private helpers ---

_NEEDED = {
    "validation": {"mean_dice"},
    "end": {"reason"},
    "diverged": {"reason"},
}
"""What an event of a kind is nothing without, besides its step."""

_KINDS = {
    **dict.fromkeys(("step", "steps", "coarse_steps", "epoch", "cases", "workers", "cores", "parameters"), int),
    "voxels": int,
    **dict.fromkeys(("seconds", "bytes", "mean_dice", "learning_rate"), float),
    **dict.fromkeys(("wait_share", "exchange_share"), float),
    **dict.fromkeys(("dice", "host", "threads", "versions", "predicted", "coarse"), dict),
    **dict.fromkeys(("event", "reason", "engine"), str),
    "grid": list,
}
"""What is written under a name; float also under what ends in _s or _bytes."""

_UNKNOWN = ("peak_rss_bytes", "allocator_peak_bytes")
"""Those that may be null."""


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
