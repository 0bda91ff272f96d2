"""The scores of a run's cases, evaluation/scores.json: where it is, what it holds, its summary.

scores = read_scores(scores_path(run))
scores["summary"]["WT"]["dice"]["mean"], scores["cases"][0]["regions"]["WT"]["dice"]
"""

from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, TypedDict

import numpy as np

from cpu3d.errors import InputError
from cpu3d.inference.postprocessing.rules import PostProcessing
from cpu3d.inference.runs import Inference, applied
from cpu3d.inference.scores import METRICS, metric_notes
from cpu3d.run.config_json import load_config
from cpu3d.run.rules import weights_hashes
from cpu3d.util.records import count, plus_minus
from memory_estimator.common.files import read_record, typed
from memory_estimator.common.table import Table

SCHEMA = 1  # version of scores.json
PREDICTIONS = "predictions"  # folder of the label maps, <case_id>.nii.gz, beside scores.json
FILES = (PREDICTIONS, "scores.json")  # all files of an evaluation; the scores are written last
UNTOUCHED = "test"  # the split that neither training nor the choice of the best checkpoint has seen

# Statistics of a metric over the cases; the deviation is of these cases, n in the denominator.
STATISTICS = {"mean": np.mean, "median": np.median, "std": np.std, "min": np.min, "max": np.max}


def scores_path(run_dir: Path, split: str = UNTOUCHED) -> Path:
    """The file of the scores of `split`; "predictions" is beside it."""
    folder = Path(run_dir) / "evaluation"
    return (folder if split == UNTOUCHED else folder / split) / "scores.json"


def read_scores(path: Path) -> Dict[str, Any]:
    """The content of a scores.json. Raises InputError if it is missing, damaged, or of another
    version."""
    if not path.is_file():
        raise InputError(f"run must have scores in {path}, found none; run `evaluate`")
    return read_record(path, SCHEMA, _checked, "run `evaluate` again", InputError)


def has_current_scores(
    run: Path,
    split: str,
    tolerance_mm: float,
    weights: str = "best",
    postprocessing: Optional[PostProcessing] = None,
) -> bool:
    """Whether a run has scores of this kind, of its present weights, of the network applied as it
    was trained, and of answers with `postprocessing`; None: with any."""
    try:
        scores = read_scores(scores_path(run, split))
    except InputError:
        return False
    config = load_config(run)
    wanted = {
        "split_hash": config.split_hash,
        "tolerance_mm": tolerance_mm,
        "weights": weights,
        "inference": applied(config, Inference()),
    }
    if any(scores.get(name) != value for name, value in wanted.items()):
        return False
    words = {case["postprocessing"] for case in scores["cases"]}
    if postprocessing is None:
        is_same = True
    elif postprocessing.off:  # all that are off are alike
        is_same = all(each.startswith("off: ") for each in words)
    else:
        is_same = words == {postprocessing.words}
    return is_same and are_of_weights(scores, [run])


def are_of_weights(scores: Mapping[str, Any], runs: Sequence[Path]) -> bool:
    """Whether scores are of the weights that these runs have now."""
    scored = [origin["weights_sha256"] for origin in scores.get("runs", [scores])]
    return tuple(sorted(scored)) == weights_hashes(runs, scores["weights"])


def warning(split: str) -> str:
    """The warning beside scores of a split that is not untouched."""
    seen = "trained on" if split == "train" else "chosen by its scores on"
    return (
        f'These are NOT untouched cases: split "{split}". The network was {seen} these cases; '
        'quote the scores of "test" instead.'
    )


def summarise(cases: Sequence[Mapping[str, Any]]) -> Dict[str, Dict[str, Any]]:
    """The STATISTICS per region and metric over the "cases" of scores.json, empty masks too;
    "empty" counts these."""
    summary: Dict[str, Dict[str, Any]] = {}
    for region in cases[0]["regions"]:
        rows = [case["regions"][region] for case in cases]
        statistics: Dict[str, Any] = {}
        for metric in METRICS:
            values = [row[metric] for row in rows]
            statistics[metric] = {
                name: float(compute(values)) for name, compute in STATISTICS.items()
            }
        kinds = [row["empty"] for row in rows]
        statistics["empty"] = {kind: kinds.count(kind) for kind in ("both", "truth", "prediction")}
        summary[region] = statistics
    return summary


def ranked(cases: Sequence[Mapping[str, Any]]) -> List[Mapping[str, Any]]:
    """The "cases" of scores.json from the worst to the best by mean Dice over the regions; ties by
    case id."""
    return sorted(cases, key=lambda case: (case["mean_dice"], case["case_id"]))


def summary_fields(cases: Sequence[Mapping[str, Any]]) -> Dict[str, Any]:
    """The fields of scores.json that follow from its "cases"."""
    return {
        "mean_dice": float(np.mean([case["mean_dice"] for case in cases])),
        "summary": summarise(cases),
        "cases": cases,
    }


def scores_table(scores: Mapping[str, Any]) -> Table:
    """Every metric of every region: mean, standard deviation and median over the cases."""
    kind = "untouched case" if scores["untouched"] else "NOT untouched case"
    cases = count(scores["cases"], kind)
    rows = []
    for region, summary in scores["summary"].items():
        for name, metric in METRICS.items():
            values = summary[name]
            digits = metric.digits
            deviation = values["std"] if len(scores["cases"]) > 1 else None
            mean = plus_minus(values["mean"], deviation, digits)
            median = f"{values['median']:.{digits}f}"
            rows.append((region, metric.heading, mean, median))
            region = ""  # in its first row
    return Table(
        ("region", "score", "mean \u00b1 sd", "median"),
        rows,
        title=f'{cases} of {scores["name"]}, split "{scores["split"]}"',
        caption=metric_notes(scores["tolerance_mm"]),
        names=2,
    )


# --- The fields that are read ---

# The fields of scores.json that are read.
_Statistics = TypedDict("_Statistics", dict.fromkeys(STATISTICS, float))

_Summary = TypedDict("_Summary", dict.fromkeys(METRICS, _Statistics))

_Region = TypedDict(
    "_Region", {**dict.fromkeys((*METRICS, "truth_ml", "prediction_ml"), float), "empty": str}
)


class _Case(TypedDict):
    case_id: str
    mean_dice: float
    predict_s: float
    score_s: float
    postprocessing: str
    regions: Dict[str, _Region]


class _Run(TypedDict, total=False):
    weights_sha256: str
    inference: TypedDict(
        "_Inference", {"window": Optional[List[int]], "overlap": float, "flips": bool}
    )
    held_out: List[str]
    runs: List["_Run"]


class _Scores(_Run):
    name: str
    weights: str
    store: str
    split: str
    untouched: bool
    split_hash: str
    tolerance_mm: float
    peak_rss_bytes: Optional[int]
    regions: Dict[str, List[int]]
    summary: Dict[str, _Summary]
    cases: List[_Case]


def _checked(scores: Dict[str, Any]) -> Dict[str, Any]:
    """The content of scores.json as it was read. Raises ValueError if it is damaged."""
    typed(scores, _Scores, "scores")
    names = set(scores["regions"])
    scored = [scores["summary"], *(case["regions"] for case in scores["cases"])]
    is_of_regions = all(set(regions) == names for regions in scored)
    if not scores["cases"] or not is_of_regions:
        raise ValueError("no cases, or cases of other regions")
    if not all({"inference", "weights_sha256"} <= set(run) for run in scores.get("runs", [scores])):
        raise ValueError("a run without inference or weights")
    return scores
