"""Every case of a folder of folds once, by the fold that held it out.

if not is_scored(run): ...                    # `evaluate` scores the cases that it held out
answers = read_out_of_fold(folder)            # of the folds that are scored; None if there are none
write_out_of_fold(folder, answers)            # folder/evaluation/val, as `evaluate` writes it
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional

from cpu3d.errors import InputError
from cpu3d.inference.postprocessing.evidence import Evidence
from cpu3d.inference.scores import TOLERANCE_MM
from cpu3d.inference.scores_file import (
    FILES,
    PREDICTIONS,
    SCHEMA,
    has_current_scores,
    read_scores,
    scores_path,
    summary_fields,
)
from cpu3d.run.config_json import load_config
from cpu3d.run.folds import WEIGHTS, trained_folds
from cpu3d.util.atomic import replace_files, write_bytes, write_json
from memory_estimator.common.files import typed

SPLIT = "val"  # where a fold has the cases that it holds out
EVALUATION = ("--split", SPLIT, "--weights", WEIGHTS, "--raw", "--evidence")
"""Options of `evaluate` that score a fold on them."""


@dataclass(frozen=True)
class OutOfFold:
    """The cases of the folds that are scored."""

    scores: Dict[str, Any]  # as scores.json has them, of all folds
    held_out: Dict[str, List[str]]  # fold -> its case ids
    evidence: Dict[str, Dict[str, Evidence]]  # fold -> case id -> for post-processing
    predictions: Dict[str, Path]  # case id -> its label map


def is_scored(run: Path) -> bool:
    """Whether a fold's last weights are scored on the cases that it held out, and their label maps
    are there."""
    path = scores_path(run, SPLIT)
    try:
        if not has_current_scores(run, SPLIT, TOLERANCE_MM, WEIGHTS):
            return False
        scores = read_scores(path)
        evidence = _evidence(scores)
        is_native = scores.get("fold") == load_config(run).fold
    except (InputError, KeyError, ValueError):  # damaged, or of another version
        return False
    return is_native and all(_label_map(path, case_id).is_file() for case_id in evidence)


def read_out_of_fold(folder: Path) -> Optional[OutOfFold]:
    """The answers of all folds that are trained and scored; None if there are none. Raises
    InputError for a folder that is none of folds."""
    runs = {fold: run for fold, run in trained_folds(folder).items() if is_scored(run)}
    if not runs:
        return None
    cases: List[Dict[str, Any]] = []
    origins = []
    peaks = []
    evidence = {}
    predictions = {}
    for fold, run in runs.items():
        path = scores_path(run, SPLIT)
        scores = read_scores(path)
        evidence[fold] = _evidence(scores)
        # What is of this fold alone.
        how = {name: scores.pop(name) for name in ("fold", "weights_sha256", "inference")}
        origins.append({"run": str(run), **how, "held_out": list(evidence[fold])})
        peaks.append(scores["peak_rss_bytes"] or 0)
        for case in scores["cases"]:
            del case["evidence"]
            cases.append(case)
            predictions[case["case_id"]] = _label_map(path, case["case_id"])
    cases.sort(key=lambda case: case["case_id"])
    joined = {
        **scores,
        "run": str(folder),
        "runs": origins,
        "peak_rss_bytes": max(peaks),
        **summary_fields(cases),
    }
    return OutOfFold(
        scores=joined,
        held_out={origin["fold"]: origin["held_out"] for origin in origins},
        evidence=evidence,
        predictions=predictions,
    )


def write_out_of_fold(folder: Path, answers: OutOfFold) -> Path:
    """Write scores and predictions of all folds together; returns the file of the scores."""
    path = scores_path(folder, SPLIT)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replace_files(path.parent, FILES) as new:
        (new / PREDICTIONS).mkdir()
        for prediction in answers.predictions.values():
            write_bytes(new / PREDICTIONS / prediction.name, prediction.read_bytes())
        write_json(new / path.name, {"schema": SCHEMA, **answers.scores})
    return path


def _label_map(path: Path, case_id: str) -> Path:
    """The prediction of a case beside the scores in `path`."""
    return path.parent / PREDICTIONS / f"{case_id}.nii.gz"


def _evidence(scores: Dict[str, Any]) -> Dict[str, Evidence]:
    """Case id -> its evidence. Raises KeyError or ValueError if a case has none that can be
    read."""
    return {case["case_id"]: typed(case["evidence"], Evidence) for case in scores["cases"]}
