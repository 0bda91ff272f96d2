"""What a run folder holds, read back: settings, log, scores and the store they rest on."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Tuple

from cpu3d.config import load_config
from cpu3d.data.folds import with_fold
from cpu3d.data.store import Store, open_store
from cpu3d.errors import InputError
from cpu3d.inference.evaluate import METRICS, UNTOUCHED, scores_path
from cpu3d.inference.evaluate import SCHEMA as SCORES_SCHEMA
from cpu3d.inference.scores import RegionScores
from cpu3d.training.run_log import read_events
from memory_estimator.files import read_json


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
    scores = next((_read_scores(path) for path in paths if path.is_file()), None)
    store = None
    for folder in (scores["store"] if scores else None, config.get("store")):
        if folder and store is None:
            try:
                store = with_fold(open_store(folder), config["fold"])
            except InputError:
                store = None  # moved or deleted since: the page says so
    return RunFiles(run_dir, config, tuple(events), scores, store)


# --- Private helpers ---


def _read_scores(path: Path) -> Dict[str, Any]:
    try:
        scores = read_json(path)
        schema = scores["schema"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} must be JSON with a schema, got {error!r}; run `evaluate` again") from None
    if schema != SCORES_SCHEMA:
        raise InputError(
            f"{path} must have schema {SCORES_SCHEMA}, got {schema}; run `evaluate` again with this version"
        )
    lacking = _lacking(scores, _NEEDED) or [name for part in _parts(scores) for name in _lacking(*part)]
    if lacking:
        raise InputError(f"{path} must be complete, got none of {', '.join(lacking[:8])}; run `evaluate` again")
    return scores


_NEEDED: Mapping[str, Any] = {
    "name": {}, "weights": {}, "store": {}, "split": {}, "untouched": {}, "split_hash": {}, "tolerance_mm": {},
    "regions": {}, "label_codes": {}, "summary": {}, "cases": {},
}  # fmt: skip
"""Keys of scores.json that a report asks for; `_parts` has what it asks for below them."""


def _parts(scores: Dict[str, Any]) -> Iterator[Tuple[Any, Mapping[str, Any], str]]:
    """(part of the scores, what is needed of it, its name): the summary and every case, for each region."""
    statistics = {name: {} for name in ("mean", "median", "std", "min", "max")}
    empty = {kind: {} for kind in ("both", "truth", "prediction")}
    summary = {**dict.fromkeys(METRICS, statistics), "empty": empty}
    values = {field.name: {} for field in dataclasses.fields(RegionScores)}
    regions = tuple(scores["regions"])
    yield scores["summary"], dict.fromkeys(regions, summary), "summary."
    for number, case in enumerate(scores["cases"]):
        yield case, {"case_id": {}, "mean_dice": {}, "regions": dict.fromkeys(regions, values)}, f"cases[{number}]."


def _lacking(found: Any, needed: Mapping[str, Any], prefix: str = "") -> List[str]:
    """Dotted names of what is needed and not there."""
    there = found if isinstance(found, dict) else {}
    return [
        name
        for key, below in needed.items()
        for name in ([prefix + key] if key not in there else _lacking(there[key], below, f"{prefix}{key}."))
    ]
