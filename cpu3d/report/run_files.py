"""The content of a run folder, read back: settings, log, scores, predictions and the store that they rest on."""

import contextlib
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

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
    """The content of a run folder."""

    folder: Path
    config: Dict[str, Any]
    events: Tuple[Dict[str, Any], ...]
    """The events of log.jsonl, in order."""
    scores: Optional[Dict[str, Any]]
    """scores.json of the test cases, else of "val", else of "train"; None before any evaluation."""
    store: Optional[Store]
    """With the run's fold; None when it is not where it was."""
    postprocessing: PostProcessing
    """Of the answers of its best weights, or why there is none."""
    decision: Optional[Decision]
    """The scores behind it; None where nothing was decided."""


def gather(run_dir: Path) -> RunFiles:
    """Read a run folder.

    Raises InputError for a folder that is no run, and for a config.json, postprocessing.json or scores.json that is
    damaged or of another version.
    """
    settings = load_config(run_dir)
    config = dataclasses.asdict(settings)
    decision = read_decision(run_dir, settings)
    postprocessing = postprocessing_of(run_dir, settings)
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


def shown_cases(
    store: Store,
    scores: Mapping[str, str],
    regions: Mapping[str, Sequence[int]],
    predictions: Mapping[str, Path],
) -> Iterator[ViewedCase]:
    """The best, the median and the worst case, under the files in folders of `predictions`.

    `scores` is case id -> its scores in words, the best case first. A prediction that is damaged or on another grid is
    left out, and a case that has none or that the store no longer has.
    """
    notes: Dict[str, List[str]] = {}
    ids, labels = list(scores), store.manifest.labels
    for note, place in (("best", 0), ("median", len(ids) // 2), ("worst", len(ids) - 1)):
        notes.setdefault(ids[place], []).append(note)
    for case_id, of_case in notes.items():
        try:
            record, image, truth = store.case(case_id), store.image(case_id), np.asarray(store.label(case_id))
        except (InputError, KeyError):
            continue
        answers = {}
        for name, folder in predictions.items():
            with contextlib.suppress(InputError):
                answer = to_ras(*read_volume(folder / f"{case_id}.nii.gz"))
                if answer.shape == truth.shape:
                    answers[name] = answer.astype(np.uint8)
        if answers:
            note, unit = " and ".join(of_case) if len(ids) > 1 else "", SCORES if image.dtype.kind == "f" else ""
            volumes = (image, store.manifest.channels, record.geometry, regions, labels, truth, answers)
            yield ViewedCase(case_id, *volumes, note=note, scores=scores[case_id], unit=unit)
