"""The elements of a page, and the page: what reports of a run, folds and a comparison share."""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Union

import numpy as np

from cpu3d.data.cases.resample import grid_of, resample_label
from cpu3d.data.nifti import ras_shape, read_volume, to_ras
from cpu3d.data.normalise import in_units
from cpu3d.data.store import Store
from cpu3d.errors import InputError
from cpu3d.inference.postprocessing.evidence import Means
from cpu3d.inference.postprocessing.rules import PostProcessing
from cpu3d.inference.scores import METRICS
from cpu3d.inference.scores_file import PREDICTIONS, ranked, scores_path
from cpu3d.pages.viewer import ViewedCase, viewer
from cpu3d.report.pictures import Figures
from memory_estimator.common.table import Table


@dataclass(frozen=True)
class Folded:
    """A table that opens on a click on its title."""

    title: str
    table: Table


# An element of a section: a table, pictures beside each other, a paragraph, or the cases of
# `viewer`. Empty ones are left out, and so is a section without any.
Element = Union[Table, Folded, Figures, str, Mapping[str, Any]]


def shown_cases(
    store: Store,
    scores: Mapping[str, str],
    regions: Mapping[str, Sequence[int]],
    predictions: Mapping[str, Path],
) -> Iterator[ViewedCase]:
    """The best, the median and the worst case, under the files in folders of `predictions`.

    `scores` is case id -> its scores in words, the best case first. A prediction that is damaged or
    on another grid is left out, and a case without predictions or that the store no longer has."""
    notes: Dict[str, List[str]] = {}
    ids = list(scores)
    for note, place in (("best", 0), ("median", len(ids) // 2), ("worst", len(ids) - 1)):
        notes.setdefault(ids[place], []).append(note)
    for case_id, case_notes in notes.items():
        try:
            record = store.case(case_id)
            image = store.image(case_id)
            truth = np.asarray(store.label(case_id))
        except (InputError, KeyError):
            continue
        answers = {}
        source_shape = ras_shape(record.geometry)
        for name, folder in predictions.items():
            with contextlib.suppress(InputError):
                answer = to_ras(*read_volume(folder / f"{case_id}.nii.gz"))
                if answer.shape == source_shape:
                    answers[name] = resample_label(answer.astype(np.uint8), record.shape)
        if answers:
            yield ViewedCase(
                name=case_id,
                image=in_units(image, record.units),
                channels=store.manifest.channels,
                geometry=grid_of(record),
                regions=regions,
                labels=store.manifest.labels,
                ignore=store.manifest.ignore,
                truth=truth,
                predictions=answers,
                note=" and ".join(case_notes) if len(ids) > 1 else "",
                scores=scores[case_id],
                normalisation=store.manifest.normalisation,
            )


def best_and_worst(store: Optional[Store], scores: Mapping[str, Any], folder: Path) -> Element:
    """The `viewer` of the best, median and worst case of a folder's scores.json by mean Dice, with
    the truth and the predictions beside the scores; nothing without a store."""
    if store is None:
        return ""
    words = {}
    for case in reversed(ranked(scores["cases"])):
        dice = [f"{name} {region['dice']:.3f}" for name, region in case["regions"].items()]
        words[case["case_id"]] = f"Dice {', '.join(dice)}"
    predictions = scores_path(folder, scores["split"]).parent / PREDICTIONS
    return viewer(shown_cases(store, words, scores["regions"], {"prediction": predictions}))


def cases_table(scores: Mapping[str, Any]) -> Table:
    """Every region of every case, the worst case first."""
    rows = []
    for case in ranked(scores["cases"]):
        case_id = case["case_id"]  # in its first row
        for region, scored in case["regions"].items():
            values = [f"{scored[name]:.{metric.digits}f}" for name, metric in METRICS.items()]
            ml = f"{scored['truth_ml']:.1f} \u2192 {scored['prediction_ml']:.1f}"
            name = f"{region}*" if scored["empty"] else region
            rows.append((case_id, name, *values, ml))
            case_id = ""
    return Table(
        ("case", "region", *(metric.heading for metric in METRICS.values()), "ml"),
        rows,
        caption="Worst first. ml: volume of the truth \u2192 of the prediction. "
        "* truth, prediction or both are empty.",
        names=2,
    )


CHANGED = ("lesion_dice", "false_positives", "dice")  # the METRICS that evidence gives
CHANGED_LABELS = tuple(METRICS[name].label for name in CHANGED)


def changed_by_rules(
    chosen: PostProcessing, region: str, before: Sequence[Means], after: Sequence[Means]
) -> List[str]:
    """Cells: what of a region is removed, and its CHANGED scores, each the mean over cases before
    and after."""
    rule = chosen.rules.get(region)
    cells = [f"below {rule}" if rule else "none"]
    for name in CHANGED:
        digits = METRICS[name].digits
        means = [np.mean([getattr(case, name) for case in cases]) for cases in (before, after)]
        cells.append(" \u2192 ".join(f"{mean:.{digits}f}" for mean in means))
    return cells


def is_filled(element: Element) -> bool:
    """Whether an element has anything to show."""
    if isinstance(element, Folded):
        element = element.table
    if isinstance(element, Table):
        return bool(element.rows)
    if isinstance(element, dict):
        return bool(element["cases"])
    return bool(element)
