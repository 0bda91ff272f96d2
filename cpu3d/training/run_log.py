"""A run's log.jsonl: one event a line, appended as it happens."""

import collections
import contextlib
import json
import os
from pathlib import Path
from typing import Any, Deque, Dict, List, Tuple

from cpu3d.util.atomic import atomic_write, sync, sync_folder
from memory_estimator.files import open_regular, parse_json, read_regular

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
    """All whole lines; [] for a run that has none yet. Raises as `open_regular`."""
    path = Path(run) / "log.jsonl"
    if not path.exists():
        return []
    events = []
    for line in read_regular(path).decode(errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            events.append(parse_json(line))
    return events


def recent_events(run: Path, steps: int = 100) -> List[Dict[str, Any]]:
    """All whole lines but those of steps, and of these the last `steps`; in order. Quick on the log of a long run."""
    path = Path(run) / "log.jsonl"
    if not path.exists():
        return []
    others: List[Tuple[int, bytes]] = []
    last: Deque[Tuple[int, bytes]] = collections.deque(maxlen=steps)
    with os.fdopen(open_regular(path), "rb") as file:
        for numbered in enumerate(file):
            (last if numbered[1].startswith(b'{"event": "step"') else others).append(numbered)
    events = []
    for _, line in sorted([*others, *last]):
        with contextlib.suppress(ValueError):
            events.append(parse_json(line))
    return [event for event in events if isinstance(event, dict) and "event" in event]


def forget_after(run: Path, step: int, *, owes_validation: bool = False) -> None:
    """Drop what a killed run logged past its last checkpoint, for those steps are about to be done again.

    Steps and validations after `step` go, torn lines and, before the first checkpoint, everything. The validation of
    `step` goes too where the checkpoint is from before it.
    """
    path = Path(run) / "log.jsonl"
    if not path.is_file():
        return

    def is_kept(event: Dict[str, Any]) -> bool:
        again = owes_validation and event.get("event") == "validation" and event["step"] == step
        return bool(step) and event.get("step", 0) <= step and not again

    kept = [event for event in read_events(run) if is_kept(event)]
    with atomic_write(path, "w") as file:
        file.writelines(json.dumps(event) + "\n" for event in kept)
