"""Where two variants differ: truth, both predictions and their errors on one slice, for the cases that differ most."""

from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from cpu3d.compare.comparison import Comparison
from cpu3d.compare.gather import MEAN, RunResult
from cpu3d.config import RunConfig
from cpu3d.data.labels import code_meanings, label_from_regions, region_mask
from cpu3d.data.nifti import read_volume, to_ras
from cpu3d.data.region import bounding_box
from cpu3d.data.store import Store
from cpu3d.errors import InputError
from cpu3d.report.pictures import grey_window, plane_of, plane_spacing
from memory_estimator.figure import PALETTE, new_figure, png

MOST = 6
"""Error maps on a page, shared between the variants: it is to be mailed."""

FIRST, SECOND, BOTH = "#e69f00", "#56b4e9", "#d8d8d8"
"""Wrong in the baseline alone, in the variant alone, in both."""


@dataclass(frozen=True)
class ErrorMap:
    """One case of one variant beside the baseline."""

    caption: str
    picture: bytes


def error_maps(comparison: Comparison, store: Optional[Store]) -> List[ErrorMap]:
    """The maps of the cases that differ most, of every variant some; none without a store. What is gone is left out."""
    if store is None or len(comparison.variants) < 2:
        return []
    each = max(MOST // (len(comparison.variants) - 1), 1)
    maps = []
    for variant in comparison.variants[1:]:
        for case_id, seed in most_different(comparison, variant)[:each]:
            found = _error_map(comparison, variant, case_id, seed, store)
            maps += [found] if found else []
    return maps


def most_different(comparison: Comparison, variant: str) -> List[Tuple[str, int]]:
    """(case, seed) from the case whose mean Dice differs most from the baseline's, without those that do not differ.

    A case is told by the mean over its seeds, and shown for the seed that is nearest to that mean.
    """
    region = MEAN if MEAN in comparison.regions else comparison.regions[0]
    seeds = comparison.shared_seeds(variant)
    values, baseline = (comparison.values(name, region, "dice", seeds) for name in (variant, comparison.baseline))
    difference = values - baseline
    of_cases = difference.mean(0)
    order = sorted(range(len(comparison.cases)), key=lambda i: (-abs(of_cases[i]), comparison.cases[i]))
    nearest = np.abs(difference - of_cases).argmin(0)
    return [(comparison.cases[i], seeds[nearest[i]]) for i in order if of_cases[i] != 0]


def in_regions(label: np.ndarray, regions: Mapping[str, Sequence[int]]) -> np.ndarray:
    """A label `(X, Y, Z)` in the codes that the regions are painted in: what none of them tells apart is equal.

    A network that learnt WT alone writes one code for all of it, and the truth's core is no error of it.
    """
    return label_from_regions(np.stack([region_mask(label, codes) for codes in regions.values()], -1), regions)


def label_colours(config: RunConfig) -> Dict[int, Tuple[str, str]]:
    """Code -> (colour, what it stands for) of what the maps draw: the codes that the learnt regions are painted in."""
    meanings = code_meanings(_regions(config), config.label_names)
    codes = [code for code in meanings if code != 0]
    return {code: (PALETTE[at % len(PALETTE)], meanings[code]) for at, code in enumerate(codes)}


def draw(
    image: np.ndarray,
    truth: np.ndarray,
    first: np.ndarray,
    second: np.ndarray,
    spacing_mm: Sequence[float],
    names: Tuple[str, str],
    colour_of: Mapping[int, str],
) -> bytes:
    """Truth, both predictions and their errors on the axial slice where the predictions differ most.

    All volumes are `(X, Y, Z)` in axes R A S; labels hold codes, `colour_of` those that are drawn.
    """
    head = bounding_box(image != 0).slices(image.shape)
    image, truth, first, second = (np.asarray(volume[head]) for volume in (image, truth, first, second))
    unlike = (first != second).sum(axis=(0, 1))
    at = (0, 0, int(unlike.argmax() if unlike.any() else (truth != 0).sum(axis=(0, 1)).argmax()))
    grey = plane_of(grey_window(image), "axial", at)
    truth, first, second = (plane_of(volume, "axial", at) for volume in (truth, first, second))
    column_mm, row_mm = plane_spacing("axial", spacing_mm)
    wide = 8.2  # inches
    high = wide / 4 * (grey.shape[0] * row_mm) / (grey.shape[1] * column_mm)
    figure = new_figure(wide, high + 0.55, facecolor="black")
    grid = figure.add_gridspec(
        1, 4, left=0.003, right=0.997, bottom=0.28 / (high + 0.55), top=1 - 0.27 / (high + 0.55), wspace=0.012
    )
    panels = (
        ("truth", _labels(truth, colour_of)),
        (names[0], _labels(first, colour_of)),
        (names[1], _labels(second, colour_of)),
        ("errors", _errors(truth, first, second)),
    )
    for position, (title, tint) in enumerate(panels):
        axes = figure.add_subplot(grid[position])
        show = {"aspect": row_mm / column_mm, "interpolation": "nearest"}
        axes.imshow(grey, cmap="gray", vmin=0, vmax=1, **show)
        axes.imshow(tint, **show)
        axes.set_title(title, color="white", fontsize=11, pad=4)
        axes.set_axis_off()
    x = 0.27
    for colour, text in (
        (FIRST, f"wrong in {names[0]} alone"),
        (SECOND, f"wrong in {names[1]} alone"),
        (BOTH, "in both"),
    ):
        figure.text(x, 0.13 / (high + 0.55), "\u25a0", color=colour, fontsize=11, va="center")
        figure.text(x + 0.018, 0.13 / (high + 0.55), text, color="white", fontsize=8, va="center")
        x += 0.035 + 0.0088 * len(text)
    figure.text(0.005, 0.13 / (high + 0.55), "axial, R on the left", color="#b8b8b8", fontsize=8, va="center")
    return png(figure)


# --- Private helpers ---


def _error_map(comparison: Comparison, variant: str, case_id: str, seed: int, store: Store) -> Optional[ErrorMap]:
    baseline = comparison.baseline
    pair = [_run(comparison, name, seed) for name in (baseline, variant)]
    try:
        labels = [np.asarray(store.label(case_id)), *(_prediction(run, case_id) for run in pair)]
        record, image = store.case(case_id), store.image(case_id)
    except (InputError, KeyError, OSError):
        return None
    if len({label.shape for label in labels}) > 1:
        return None
    config = pair[0].config
    truth, first, second = (in_regions(label, _regions(config)) for label in labels)
    channels = [name.lower() for name in store.manifest.channels]
    channel = channels.index("flair") if "flair" in channels else 0
    colour_of = {code: colour for code, (colour, _) in label_colours(config).items()}
    picture = draw(
        np.asarray(image[..., channel]), truth, first, second, record.spacing_mm, (baseline, variant), colour_of
    )
    dice = [
        f"{name} {run.scores[region]['dice'][case_id]:.3f}"
        for region in comparison.regions[-1:]
        for name, run in zip((baseline, variant), pair)
    ]
    what = "mean Dice" if comparison.regions[-1] == MEAN else f"{comparison.regions[-1]} Dice"
    return ErrorMap(f"{variant}, case {case_id}, seed {seed}: {what} {', '.join(dice)}", picture)


def _run(comparison: Comparison, variant: str, seed: int) -> RunResult:
    return next(run for run in comparison.runs[variant] if run.seed == seed)


def _prediction(run: RunResult, case_id: str) -> np.ndarray:
    return to_ras(*read_volume(run.evaluation / "predictions" / f"{case_id}.nii.gz"))


def _regions(config: RunConfig) -> Dict[str, Tuple[int, ...]]:
    """Those that were learnt."""
    return {name: tuple(config.region_codes[name]) for name in config.regions or config.region_codes}


def _labels(label: np.ndarray, colour_of: Mapping[int, str]) -> np.ndarray:
    return _tint(label.shape, {colour: label == code for code, colour in colour_of.items()}, 0.6)


def _errors(truth: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    wrong, also = first != truth, second != truth
    return _tint(truth.shape, {FIRST: wrong & ~also, SECOND: also & ~wrong, BOTH: wrong & also}, 0.85)


def _tint(shape: Tuple[int, int], masks: Dict[str, np.ndarray], opacity: float) -> Any:
    """RGBA `(rows, columns, 4)`, see-through where there is no mask."""
    from matplotlib.colors import to_rgba

    tint = np.zeros((*shape, 4), np.float32)
    for colour, mask in masks.items():
        tint[mask] = to_rgba(colour, opacity)
    return tint
