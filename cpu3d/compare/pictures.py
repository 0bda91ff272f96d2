"""The pictures of a comparison: intervals, cases, learning curves, and error maps of the cases that differ most.

PNG bytes, each beside what it shows; no state.
"""

from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from cpu3d.compare.run import MEAN, RunResult
from cpu3d.compare.statistics import LARGER_IS_BETTER, Comparison
from cpu3d.config import RunConfig
from cpu3d.data.labels import code_meanings, label_from_regions, region_mask
from cpu3d.data.nifti import read_volume, to_ras
from cpu3d.data.region import bounding_box
from cpu3d.data.store import Store
from cpu3d.errors import InputError
from cpu3d.report.pictures import grey_window, plane_of, plane_spacing, strips
from memory_estimator.figure import PALETTE, new_figure, plain, png

NAMES = {"dice": "Dice", "hd95_mm": "HD95", "surface_dice": "surface Dice"}
"""Metric -> its name for people."""

MOST = 6
"""Error maps on a page, shared between the variants: it is to be mailed."""

FIRST, SECOND, BOTH = "#e69f00", "#56b4e9", "#d8d8d8"
"""Wrong in the baseline alone, in the variant alone, in both."""

Named = List[Tuple[str, bytes]]
"""(what it shows, PNG) each."""


def forest(comparison: Comparison, metric: str) -> bytes:
    """Every difference to the baseline with its interval, a line each; 0 is the baseline; what is filled counts."""
    rows = [(variant, region) for variant in comparison.variants[1:] for region in comparison.regions]
    colours = _colours(comparison)
    figure = new_figure(3.9, 0.9 + 0.26 * len(rows))
    axes = figure.add_subplot()
    axes.axvline(0, color="#222222", linewidth=1)
    for y, (variant, region) in enumerate(rows):
        difference, colour = comparison.differences[variant][region][metric], colours[variant]
        if difference.interval:
            axes.plot(difference.interval, [y, y], color=colour, linewidth=2, solid_capstyle="butt")
        marker, size = ("D", 7) if region == MEAN else ("o", 5.5)
        filled = colour if difference.is_clear else "white"
        axes.plot([difference.mean], [y], marker, color=colour, markerfacecolor=filled, markersize=size)
    names = [f"{variant}  {region}" if len(comparison.variants) > 2 else region for variant, region in rows]
    axes.set_yticks(range(len(rows)), names)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, -0.01), max(high, 0.01))  # 0 is in it, and differences of nothing stay small
    better = "better" if LARGER_IS_BETTER[metric] else "worse"
    unit = " in mm" if metric == "hd95_mm" else ""
    axes.set_xlabel(f"difference to {comparison.baseline}{unit}; right of 0 is {better}", fontsize=8)
    plain(axes, f"Difference in {NAMES[metric]}")
    figure.tight_layout(pad=0.6)
    return png(figure)


def case_strips(comparison: Comparison, region: str) -> bytes:
    """Dice of every case by variant, the mean over its seeds."""
    columns = {name: comparison.values(name, region, "dice").mean(0).tolist() for name in comparison.variants}
    return strips(columns, title=f"Dice, {region}", y_label="share", y_range=(-0.02, 1.02))


def learning_curves(comparison: Comparison) -> Named:
    """Validation Dice over voxels seen and over seconds: a thin line a seed, a strong one through their means.

    None without validations.
    """
    if not any(run.curve for runs in comparison.runs.values() for run in runs):
        return []
    found = []
    for label, unit, name in (("voxels seen, millions", 1e6, "voxels"), ("seconds of steps", 1, "seconds")):
        figure = new_figure(5.4, 2.8)
        axes = figure.add_subplot()
        for variant, colour in _colours(comparison).items():
            curves = [
                np.array([(getattr(point, name) / unit, point.mean_dice) for point in run.curve])
                for run in comparison.runs[variant]
                if run.curve
            ]
            for curve in curves:
                axes.plot(*curve.T, color=colour, alpha=0.35, linewidth=0.8)
            if curves:
                shared = min(map(len, curves))
                mean = np.mean([curve[:shared] for curve in curves], 0)
                axes.plot(*mean.T, "o-", color=colour, linewidth=1.8, markersize=3.4, label=variant)
        axes.set_xlabel(label)
        axes.set_ylabel("mean Dice")
        axes.set_ylim(0, 1)
        axes.set_xlim(left=0)
        plain(axes, "Validation on whole volumes")
        axes.legend(frameon=False, fontsize=8)
        figure.tight_layout(pad=0.6)
        found.append((f"Validation Dice over {label}", png(figure)))
    return found


# --- Error maps ---


def error_maps(comparison: Comparison, store: Optional[Store]) -> Named:
    """The maps of the cases that differ most, of every variant some; none without a store. What is gone is left out."""
    if store is None or len(comparison.variants) < 2:
        return []
    each = max(MOST // (len(comparison.variants) - 1), 1)
    found = []
    for variant in comparison.variants[1:]:
        for case_id, seed in most_different(comparison, variant)[:each]:
            both = (comparison.baseline, variant)
            pair = [next(run for run in comparison.runs[name] if run.seed == seed) for name in both]
            picture = _error_map(pair, case_id, store)
            if picture:
                region = comparison.headline
                dice = [f"{run.variant} {run.scores[region]['dice'][case_id]:.3f}" for run in pair]
                found.append((f"{variant}, case {case_id}, seed {seed}: {region} Dice {', '.join(dice)}", picture))
    return found


def most_different(comparison: Comparison, variant: str) -> List[Tuple[str, int]]:
    """(case, seed) from the case whose mean Dice differs most from the baseline's, without those that do not differ.

    A case is judged by the mean over its seeds, and shown for the seed that is nearest to that mean.
    """
    seeds = comparison.shared_seeds(variant)
    own, base = (comparison.values(name, comparison.headline, "dice", seeds) for name in (variant, comparison.baseline))
    difference = own - base
    of_cases = difference.mean(0)
    order = sorted(range(len(comparison.cases)), key=lambda i: (-abs(of_cases[i]), comparison.cases[i]))
    nearest = np.abs(difference - of_cases).argmin(0)
    return [(comparison.cases[i], seeds[nearest[i]]) for i in order if of_cases[i] != 0]


def in_regions(label: np.ndarray, regions: Mapping[str, Sequence[int]]) -> np.ndarray:
    """A label `(X, Y, Z)` in the codes that the regions are painted in: what none of them tells apart is equal.

    A network that learnt WT alone writes one code for all of it, and the truth's core is no error of it.
    """
    return label_from_regions(np.stack([region_mask(label, codes) for codes in regions.values()], -1), regions)


def label_key(config: RunConfig) -> List[Tuple[str, str]]:
    """(name, colour) of what the maps draw: the codes that the learnt regions are painted in."""
    return list(_label_colours(config).values())


def draw(
    image: np.ndarray,
    labels: Sequence[np.ndarray],
    spacing_mm: Sequence[float],
    names: Tuple[str, str],
    colour_of: Mapping[int, str],
) -> bytes:
    """Truth, both predictions (`labels`) and their errors on the axial slice where the predictions differ most.

    All volumes are `(X, Y, Z)` in axes R A S; labels hold codes, `colour_of` those that are drawn.
    """
    head = bounding_box(image != 0).slices(image.shape)
    image, truth, first, second = (np.asarray(volume[head]) for volume in (image, *labels))
    unlike = (first != second).sum(axis=(0, 1))
    at = (0, 0, int(unlike.argmax() if unlike.any() else (truth != 0).sum(axis=(0, 1)).argmax()))
    grey = plane_of(grey_window(image), "axial", at)
    truth, first, second = (plane_of(volume, "axial", at) for volume in (truth, first, second))
    wrong, also = first != truth, second != truth
    errors = {FIRST: wrong & ~also, SECOND: also & ~wrong, BOTH: wrong & also}
    column_mm, row_mm = plane_spacing("axial", spacing_mm)
    wide = 8.2  # inches
    high = wide / 4 * (grey.shape[0] * row_mm) / (grey.shape[1] * column_mm) + 0.55
    figure = new_figure(wide, high, facecolor="black")
    edges = {"left": 0.003, "right": 0.997, "bottom": 0.28 / high, "top": 1 - 0.27 / high}
    grid = figure.add_gridspec(1, 4, wspace=0.012, **edges)
    coloured = [{colour: label == code for code, colour in colour_of.items()} for label in (truth, first, second)]
    for position, (title, masks) in enumerate(zip(("truth", *names, "errors"), (*coloured, errors))):
        axes = figure.add_subplot(grid[position])
        show = {"aspect": row_mm / column_mm, "interpolation": "nearest"}
        axes.imshow(grey, cmap="gray", vmin=0, vmax=1, **show)
        axes.imshow(_tint(grey.shape, masks, 0.85 if masks is errors else 0.6), **show)
        axes.set_title(title, color="white", fontsize=11, pad=4)
        axes.set_axis_off()
    x, y = 0.27, 0.13 / high
    for colour, text in zip(errors, (f"wrong in {names[0]} alone", f"wrong in {names[1]} alone", "in both")):
        figure.text(x, y, "\u25a0", color=colour, fontsize=11, va="center")
        figure.text(x + 0.018, y, text, color="white", fontsize=8, va="center")
        x += 0.035 + 0.0088 * len(text)
    figure.text(0.005, y, "axial, R on the left", color="#b8b8b8", fontsize=8, va="center")
    return png(figure)


# --- Private helpers ---


def _colours(comparison: Comparison) -> Dict[str, str]:
    """The colour of each variant in every picture."""
    return {name: PALETTE[position % len(PALETTE)] for position, name in enumerate(comparison.variants)}


def _error_map(pair: Sequence[RunResult], case_id: str, store: Store) -> Optional[bytes]:
    config = pair[0].config
    try:
        paths = [run.evaluation / "predictions" / f"{case_id}.nii.gz" for run in pair]
        labels = [np.asarray(store.label(case_id)), *(to_ras(*read_volume(path)) for path in paths)]
        record, image = store.case(case_id), store.image(case_id)
    except (InputError, KeyError, OSError):
        return None
    if len({label.shape for label in labels}) > 1:
        return None
    channels = [name.lower() for name in store.manifest.channels]
    channel = channels.index("flair") if "flair" in channels else 0
    return draw(
        np.asarray(image[..., channel]),
        [in_regions(label, _regions(config)) for label in labels],
        record.spacing_mm,
        (pair[0].variant, pair[1].variant),
        {code: colour for code, (_, colour) in _label_colours(config).items()},
    )


def _regions(config: RunConfig) -> Dict[str, Tuple[int, ...]]:
    """Those that were learnt."""
    return {name: tuple(config.region_codes[name]) for name in config.regions or config.region_codes}


def _label_colours(config: RunConfig) -> Dict[int, Tuple[str, str]]:
    """Code -> (what it stands for, colour)."""
    meanings = {code: name for code, name in code_meanings(_regions(config), config.label_names).items() if code != 0}
    return {code: (name, PALETTE[at % len(PALETTE)]) for at, (code, name) in enumerate(meanings.items())}


def _tint(shape: Tuple[int, ...], masks: Mapping[str, np.ndarray], opacity: float) -> Any:
    """RGBA `(rows, columns, 4)`, see-through where there is no mask."""
    from matplotlib.colors import to_rgba  # on use: importing this module stays cheap

    tint = np.zeros((*shape, 4), np.float32)
    for colour, mask in masks.items():
        tint[mask] = to_rgba(colour, opacity)
    return tint
