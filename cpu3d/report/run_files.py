"""What a run folder holds, read back: settings, log, scores and the store they rest on."""

import dataclasses
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from cpu3d.data.splits import with_fold
from cpu3d.data.store import Store, open_store
from cpu3d.errors import InputError
from cpu3d.inference.evaluate import UNTOUCHED, read_scores, scores_path
from cpu3d.settings import load_config
from cpu3d.training.run_log import read_events

Events = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class RunFiles:
    """What a run folder holds, read and not yet judged."""

    folder: Path
    config: Dict[str, Any]
    events: Tuple[Dict[str, Any], ...]
    """The events of log.jsonl, in order; a line that was cut off is left out."""
    scores: Optional[Dict[str, Any]]
    """scores.json of the test cases, else of "val", else of "train"; None before any evaluation."""
    store: Optional[Store]
    """As a run of this fold sees it; None when it is not where it was."""


def gather(run_dir: Path) -> RunFiles:
    """Read a run folder.

    Raises InputError for a folder that is no run, and for a config.json or scores.json that is damaged or of another
    version.
    """
    config = dataclasses.asdict(load_config(run_dir))
    events = read_events(run_dir)
    paths = [scores_path(run_dir, split) for split in (UNTOUCHED, "val", "train")]
    scores = next((read_scores(path) for path in paths if path.is_file()), None)
    store = None
    for folder in (scores["store"] if scores else None, config.get("store")):
        if folder and store is None:
            try:
                store = with_fold(open_store(folder), config["fold"])
            except InputError:
                store = None  # moved or deleted since: the page says so
    return RunFiles(run_dir, config, tuple(events), scores, store)


def of_kind(events: Events, *kinds: str) -> List[Mapping[str, Any]]:
    """The events of these kinds, in order."""
    return [event for event in events if event["event"] in kinds]


def numbers(events: Events, key: str) -> List[float]:
    """What events hold under a key, where that is a number; True and False are none."""
    values = [event.get(key) for event in events]
    return [value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]


def median(values: Sequence[float]) -> Optional[float]:
    """None for none."""
    return float(statistics.median(values)) if values else None


def last_end(events: Events) -> Mapping[str, Any]:
    """The event that ended the last attempt; empty when it has not ended, or was killed."""
    last = next((event for event in reversed(events) if event["event"] in ("start", "step", "end")), {})
    return last if last.get("event") == "end" else {}
