"""Parts of a page, and the page: what reports of a run, folds and a comparison have in common."""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Sequence, Tuple, Union

import numpy as np

from cpu3d.data.nifti import read_volume, to_ras
from cpu3d.data.store import Store
from cpu3d.errors import InputError
from cpu3d.inference.evaluate import ranked
from cpu3d.inference.scores import METRICS
from cpu3d.pages.page import render_page
from cpu3d.pages.viewer import SCORES, ViewedCase
from cpu3d.report.pictures import Figures
from cpu3d.util.atomic import atomic_write
from memory_estimator.common.table import Table


@dataclass(frozen=True)
class Folded:
    """A table that opens on a click on its title."""

    title: str
    table: Table


# A part of a section: a table, pictures beside each other, a paragraph, or the cases of `viewer`.
# Empty parts are left out, and so is a section, a heading and its parts, without any.
Part = Union[Table, Folded, Figures, str, Mapping[str, Any]]
Section = Tuple[str, Sequence[Part]]


def write_page(
    out: Path,
    title: str,
    command: str,
    sections: Sequence[Section],
    *,
    notes: Sequence[str] = (),
    alert: str = "",
) -> None:
    """Write a self-contained page of sections, atomically; `alert` and `notes` are above them."""
    filled = [
        (heading, [part for part in parts if _is_filled(part)]) for heading, parts in sections
    ]
    content = {
        "sections": [section for section in filled if section[1]],
        "notes": notes,
        "alert": alert,
    }
    page = render_page(
        Path(__file__).with_name("report.html.j2"), title=title, command=command, **content
    )
    with atomic_write(out, "w") as file:
        file.write(page)


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
    labels = store.manifest.labels
    for note, place in (("best", 0), ("median", len(ids) // 2), ("worst", len(ids) - 1)):
        notes.setdefault(ids[place], []).append(note)
    for case_id, of_case in notes.items():
        try:
            record = store.case(case_id)
            image = store.image(case_id)
            truth = np.asarray(store.label(case_id))
        except (InputError, KeyError):
            continue
        answers = {}
        for name, folder in predictions.items():
            with contextlib.suppress(InputError):
                answer = to_ras(*read_volume(folder / f"{case_id}.nii.gz"))
                if answer.shape == truth.shape:
                    answers[name] = answer.astype(np.uint8)
        if answers:
            note = " and ".join(of_case) if len(ids) > 1 else ""
            unit = SCORES if image.dtype.kind == "f" else ""
            volumes = (
                image,
                store.manifest.channels,
                record.geometry,
                regions,
                labels,
                truth,
                answers,
            )
            yield ViewedCase(case_id, *volumes, note=note, scores=scores[case_id], unit=unit)


def cases_table(scores: Mapping[str, Any]) -> Table:
    """Every region of every case, the worst case first."""
    rows = []
    for case in ranked(scores["cases"]):
        case_id = case["case_id"]  # in its first row
        for region, scored in case["regions"].items():
            values = [f"{scored[name]:.{metric.digits}f}" for name, metric in METRICS.items()]
            ml = f"{scored['truth_ml']:.1f} \u2192 {scored['prediction_ml']:.1f}"
            rows.append((case_id, region + "*" * bool(scored["empty"]), *values, ml))
            case_id = ""
    return Table(
        ("case", "region", *(metric.heading for metric in METRICS.values()), "ml"),
        rows,
        caption="Worst first. ml: volume of the truth \u2192 of the prediction. * truth, "
        "prediction or both are empty.",
        names=2,
    )


# --- Private helpers ---


def _is_filled(part: Part) -> bool:
    """Whether a part has anything to show."""
    table = part.table if isinstance(part, Folded) else part
    if isinstance(table, Table):
        return bool(table.rows)
    return bool(part["cases"] if isinstance(part, dict) else part)
