"""What a run folder holds, read back: settings, log, scores, predictions and the store they rest on."""

import contextlib
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from cpu3d.data.nifti import read_volume, to_ras
from cpu3d.data.splits import with_fold
from cpu3d.data.store import Store, open_store
from cpu3d.errors import InputError
from cpu3d.inference.evaluate import UNTOUCHED, read_scores, scores_path
from cpu3d.inference.postprocessing import Decision, PostProcessing, postprocessing_of, read_decision
from cpu3d.pages.viewer import SCORES, ViewedCase
from cpu3d.run.log import read_events
from cpu3d.settings import load_config


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
    postprocessing: PostProcessing
    """What is done to the answers of its best weights, or why nothing is."""
    decision: Optional[Decision]
    """What that rests on; None where nothing was decided."""


def gather(run_dir: Path) -> RunFiles:
    """Read a run folder.

    Raises InputError for a folder that is no run, and for a config.json, postprocessing.json or scores.json that is
    damaged or of another version.
    """
    settings = load_config(run_dir)
    config = dataclasses.asdict(settings)
    decision = read_decision(run_dir, settings)
    (postprocessing,) = postprocessing_of([run_dir], [settings])
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
    return RunFiles(run_dir, config, tuple(events), scores, store, postprocessing, decision)


def best_median_worst(case_ids: Sequence[str]) -> Dict[str, str]:
    """Of cases, the best first: which to show -> "best", "median", "worst" or several of them."""
    chosen: Dict[str, List[str]] = {}
    for note, place in (("best", 0), ("median", len(case_ids) // 2), ("worst", len(case_ids) - 1)):
        chosen.setdefault(case_ids[place], []).append(note)
    return {case_id: " and ".join(notes) if len(case_ids) > 1 else "" for case_id, notes in chosen.items()}


def viewed_case(
    store: Store, case_id: str, regions: Mapping[str, Sequence[int]], predictions: Mapping[str, Path], **about: str
) -> Optional[ViewedCase]:
    """A case of a store under what lies in folders of `predictions`; what is damaged or of another grid is left out.

    None where no prediction is left, or the store no longer has the case.
    """
    try:
        record, image, truth = store.case(case_id), store.image(case_id), np.asarray(store.label(case_id))
    except (InputError, KeyError):
        return None
    answers = {}
    for name, folder in predictions.items():
        with contextlib.suppress(InputError):
            answer = to_ras(*read_volume(folder / f"{case_id}.nii.gz"))
            if answer.shape == truth.shape:
                answers[name] = answer.astype(np.uint8)
    if not answers:
        return None
    names, unit = store.manifest.labels, SCORES if image.dtype.kind == "f" else ""
    of_case = (image, store.manifest.channels, record.geometry, regions, names, truth, answers)
    return ViewedCase(case_id, *of_case, unit=unit, **about)
