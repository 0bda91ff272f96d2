"""What a run folder holds, read back: settings, log, scores and the store they rest on."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Optional, Tuple

from cpu3d.config import load_config
from cpu3d.data.store import Store, open_store
from cpu3d.errors import InputError
from cpu3d.evaluate import SCHEMA as SCORES_SCHEMA
from cpu3d.evaluate import UNTOUCHED, scores_path
from cpu3d.run_log import read_events


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
    """None when it is not where it was."""


def gather(run_dir: Path) -> RunFiles:
    """Read a run folder.

    Raises InputError for a folder that is no run, and for a config.json or scores.json that is damaged or of another
    version.
    """
    config = dataclasses.asdict(load_config(run_dir))
    events = [event for event in read_events(run_dir) if isinstance(event, dict) and "event" in event]
    paths = [scores_path(run_dir, split) for split in (UNTOUCHED, "val", "train")]
    scores = next((_read_scores(path) for path in paths if path.is_file()), None)
    store = None
    for folder in (scores["store"] if scores else None, config.get("store")):
        if folder and store is None:
            try:
                store = open_store(folder)
            except InputError:
                store = None  # moved or deleted since: the page says so
    return RunFiles(run_dir, config, tuple(events), scores, store)


# --- Private helpers ---


def _read_scores(path: Path) -> Dict[str, Any]:
    try:
        scores = json.loads(path.read_text(encoding="utf-8"))
        schema = scores["schema"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} must be JSON with a schema, got {error!r}; run `evaluate` again") from None
    if schema != SCORES_SCHEMA:
        raise InputError(
            f"{path} must have schema {SCORES_SCHEMA}, got {schema}; run `evaluate` again with this version"
        )
    return scores
