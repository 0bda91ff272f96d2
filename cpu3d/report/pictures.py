"""How charts and plots of scores are drawn, as PNG bytes.

Nothing here touches pyplot or any other state of the process: every function makes a figure, draws
and encodes it."""

from dataclasses import dataclass
from typing import Any, List, Mapping, Optional, Sequence, Tuple

import numpy as np
from scipy.ndimage import median_filter

from cpu3d.inference.scores import METRICS
from memory_estimator.common.table import PALETTE, new_figure, plain, png

Figures = List[Tuple[str, bytes]]  # (title, PNG) each
# (bottom, top) of an axis; a top of None leaves room above the data.
YRange = Optional[Tuple[float, Optional[float]]]

GROUPS = 2000
"""The most points of a running median: more are not to be told apart."""


@dataclass(frozen=True)
class Line:
    """One curve of a chart."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str
    is_dense: bool = False  # a dense noisy series: faint, with a running median over it
    marks: str = "o-"  # of other lines, in matplotlib's notation: "-" no dots, "o" dots alone


def chart(
    lines: Sequence[Line],
    *,
    title: str,
    y_label: str,
    x_label: str = "step",
    y_range: YRange = None,
    switch: Optional[float] = None,
    log: bool = False,
) -> bytes:
    """Curves over a common x axis, as PNG bytes, with a dashed line at x = `switch`; `log` is of
    both axes, which fit the data without `y_range`.

    Points that are not finite are left out; no line at all is fine. A legend appears if a line has
    a name."""
    figure = new_figure(5.4, 2.8)
    axes = figure.add_subplot()
    for line in lines:
        x = np.asarray(line.x, float)
        y = np.asarray(line.y, float)
        good = np.isfinite(x) & np.isfinite(y)
        x = x[good]
        y = y[good]
        style = {"color": line.colour, "label": line.name}
        if line.is_dense and x.size >= 8:
            axes.plot(x, y, color=line.colour, alpha=0.22, linewidth=0.8)
            groups = np.array_split(np.arange(x.size), min(x.size, GROUPS))
            medians = [np.median(y[group]) for group in groups]
            middle = median_filter(medians, len(groups) // 20 + 5)
            axes.plot([x[group[0]] for group in groups], middle, linewidth=1.4, **style)
        else:
            axes.plot(x, y, line.marks, markersize=3.2, linewidth=1.6, **style)
    if switch:
        axes.axvline(switch, color="#888888", linewidth=0.8, linestyle="--")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    _set_height(axes, y_range)
    if log:
        axes.set(xscale="log", yscale="log")
    plain(axes, title)
    if any(line.name for line in lines):
        axes.legend(frameon=False, fontsize=8)
    figure.tight_layout(pad=0.6)
    return png(figure)


def _set_height(axes: Any, y_range: YRange) -> None:
    """The range of the y axis; an open top has a margin of the whole height, as Matplotlib's, of
    the values' range, cuts lines that are nearly level."""
    axes.set_ylim(y_range)
    if y_range is not None and y_range[1] is None:
        axes.set_ylim(top=1.05 * axes.get_ylim()[1])


def strips(
    values: Mapping[str, Sequence[float]],
    *,
    title: str,
    y_label: str,
    y_range: YRange = None,
) -> bytes:
    """One column per name: every value as a dot, and the quartiles as a box. PNG bytes."""
    figure = new_figure(3.3, 2.6)
    axes = figure.add_subplot()
    median = {"color": "#222222"}
    for position, column in enumerate(values.values()):
        y = np.asarray(column, float)
        colour = PALETTE[position % len(PALETTE)]
        x = np.full(y.size, float(position))
        if y.size > 1:
            # Golden-ratio offsets: dots stay apart and the picture is the same every time.
            x += 0.34 * ((np.arange(y.size) * 0.618034) % 1.0 - 0.5)
        axes.plot(x, y, "o", color=colour, alpha=0.75, markersize=4.5, markeredgewidth=0)
        axes.boxplot([y], positions=[position], widths=0.55, showfliers=False, medianprops=median)
    axes.set_xticks(range(len(values)), list(values))
    axes.set_xlim(-0.6, max(len(values), 1) - 0.4)
    axes.set_ylabel(y_label)
    _set_height(axes, y_range)
    plain(axes, title)
    figure.tight_layout(pad=0.6)
    return png(figure)


def score_pictures(scores: Mapping[str, Any]) -> Figures:
    """Every case as a dot, a picture a metric."""
    figures = []
    for name, metric in METRICS.items():
        values = {
            region: [case["regions"][region][name] for case in scores["cases"]]
            for region in scores["summary"]
        }
        y_range = (-0.02, 1.02) if metric.larger_is_better else (0, None)
        title = metric.labelled
        picture = strips(values, title=title, y_label=metric.unit, y_range=y_range)
        figures.append((f"{title} of every case", picture))
    return figures
