"""The charts of a comparison: intervals, learning curves, scores against cost. PNG bytes, no state."""

from typing import Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np

from cpu3d.compare.comparison import Comparison
from cpu3d.compare.gather import MEAN, Point
from cpu3d.compare.limits import unlike_devices
from cpu3d.compare.statistics import LARGER_IS_BETTER
from cpu3d.compare.verdict import NAMES
from cpu3d.report.pictures import strips
from memory_estimator.figure import PALETTE, new_figure, plain, png
from memory_estimator.units import GIB

Reading = Callable[[Point], float]


def colours(comparison: Comparison) -> Dict[str, str]:
    """The colour of each variant in every picture."""
    return {name: PALETTE[position % len(PALETTE)] for position, name in enumerate(comparison.variants)}


def forest(comparison: Comparison, metric: str) -> bytes:
    """Every difference to the baseline with its interval, a line each; 0 is the baseline."""
    rows = [(variant, region) for variant in comparison.variants[1:] for region in comparison.regions]
    of_variant = colours(comparison)
    figure = new_figure(3.9, 0.9 + 0.26 * len(rows))
    axes = figure.add_subplot()
    axes.axvline(0, color="#222222", linewidth=1)
    for y, (variant, region) in enumerate(rows):
        difference = comparison.differences[variant][region][metric]
        if difference.interval:
            axes.plot(difference.interval, [y, y], color=of_variant[variant], linewidth=2, solid_capstyle="butt")
        filled = of_variant[variant] if difference.is_clear else "white"
        size = 7 if region == MEAN else 5.5
        marker = "D" if region == MEAN else "o"
        axes.plot(
            [difference.mean], [y], marker, color=of_variant[variant], markerfacecolor=filled, markersize=size,
            markeredgewidth=1.5,
        )  # fmt: skip
    axes.set_yticks(range(len(rows)), [_row_name(comparison, *row) for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    _make_room_around_zero(axes)
    better = "better" if LARGER_IS_BETTER[metric] else "worse"
    unit = " in mm" if metric == "hd95_mm" else ""
    axes.set_xlabel(f"difference to {comparison.baseline}{unit}; right of 0 is {better}", fontsize=8)
    plain(axes, f"Difference in {NAMES[metric]}")
    figure.tight_layout(pad=0.6)
    return png(figure)


def case_strips(comparison: Comparison, region: str, metric: str) -> bytes:
    """Every case by variant, the mean over its seeds."""
    columns = {variant: comparison.values(variant, region, metric).mean(0).tolist() for variant in comparison.variants}
    share = metric != "hd95_mm"
    title = f"{NAMES[metric]}, {'mean of regions' if region == MEAN else region}"
    return strips(
        columns, title=title, y_label="share" if share else "mm", y_range=(-0.02, 1.02) if share else (0, None)
    )


def learning_curves(comparison: Comparison, x_label: str, x_of: Reading) -> Optional[bytes]:
    """Validation Dice on the way: a thin line a seed, a strong one through their means. None without validations."""
    if not any(run.curve for runs in comparison.runs.values() for run in runs):
        return None
    figure = new_figure(5.4, 2.8)
    axes = figure.add_subplot()
    for variant, colour in colours(comparison).items():
        curves = [run.curve for run in comparison.runs[variant] if run.curve]
        for curve in curves:
            axes.plot(list(map(x_of, curve)), [p.mean_dice for p in curve], color=colour, alpha=0.35, linewidth=0.8)
        shared = min(map(len, curves), default=0)
        if shared:
            x = np.mean([[x_of(point) for point in curve[:shared]] for curve in curves], 0)
            y = np.mean([[point.mean_dice for point in curve[:shared]] for curve in curves], 0)
            axes.plot(x, y, "o-", color=colour, linewidth=1.8, markersize=3.4, label=variant)
    axes.set_xlabel(x_label)
    axes.set_ylabel("mean Dice")
    axes.set_ylim(0, 1)
    axes.set_xlim(left=0)
    plain(axes, "Validation on whole volumes")
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout(pad=0.6)
    return png(figure)


def dice_against(comparison: Comparison, cost: str, x_label: str, unit: float = 1) -> Optional[bytes]:
    """Mean Dice of every run over one of its costs, the variant's mean larger. None where no run knows the cost."""
    region = MEAN if MEAN in comparison.regions else comparison.regions[0]
    figure = new_figure(5.4, 2.8)
    axes = figure.add_subplot()
    every: List[Tuple[float, float]] = []
    for variant, colour in colours(comparison).items():
        points = []
        for run, dice in zip(comparison.runs[variant], comparison.values(variant, region, "dice").mean(1)):
            value = getattr(run.costs, cost)
            if value is not None:
                points.append((value / unit, dice))
        if points:
            every += points
            x, y = zip(*points)
            axes.plot(x, y, "o", color=colour, alpha=0.5, markersize=4.5, markeredgewidth=0)
            axes.plot([np.mean(x)], [np.mean(y)], "D", color=colour, markersize=8, label=variant)
    if not every:
        return None
    axes.set_xlim(0, 1.08 * max(x for x, _ in every))
    axes.set_ylim(*_dice_range([y for _, y in every]))
    axes.set_xlabel(x_label)
    axes.set_ylabel("Dice" if region != MEAN else "mean Dice")
    plain(axes, f"Dice against {x_label.split(',')[0]}")
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout(pad=0.6)
    return png(figure)


def all_curves(comparison: Comparison) -> List[Tuple[str, bytes]]:
    """(what it shows, PNG) of the learning curves."""
    readings: Sequence[Tuple[str, Reading]] = (
        ("voxels seen, millions", lambda point: point.voxels / 1e6),
        ("seconds of steps", lambda point: point.seconds),
    )
    pairs = ((f"Validation Dice over {name}", learning_curves(comparison, name, x_of)) for name, x_of in readings)
    return [(text, picture) for text, picture in pairs if picture]


def all_costs(comparison: Comparison) -> List[Tuple[str, bytes]]:
    """(what it shows, PNG) of Dice against what it took."""
    pairs = [("Dice against seconds of training", dice_against(comparison, "steps_s", "seconds of steps, one run"))]
    configs = [runs[0].config for runs in comparison.runs.values()]
    if not unlike_devices(configs):
        peak, of = ("train_peak_bytes", "training") if configs[0].device == "cpu" else ("card_peak_bytes", "the card")
        pairs.append(("Dice against peak memory", dice_against(comparison, peak, f"peak memory of {of}, GiB", GIB)))
    return [(text, picture) for text, picture in pairs if picture]


# --- Private helpers ---


def _row_name(comparison: Comparison, variant: str, region: str) -> str:
    name = "mean" if region == MEAN else region
    return f"{variant}  {name}" if len(comparison.variants) > 2 else name


def _dice_range(dice: Sequence[float]) -> Tuple[float, float]:
    """What shows these values apart, without blowing up the last thousandth."""
    middle, half = (min(dice) + max(dice)) / 2, max(0.6 * (max(dice) - min(dice)), 0.1)
    low = min(max(middle - half, 0), 1 - 2 * half) if half < 0.5 else 0
    return low, min(low + 2 * half, 1)


def _make_room_around_zero(axes) -> None:
    """0 is in the picture, and differences of nothing are not blown up to its width."""
    low, high = axes.get_xlim()
    least = 0.01
    axes.set_xlim(min(low, -least), max(high, least))
