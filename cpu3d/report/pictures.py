"""Pictures for people: training curves and score plots, as PNG bytes.

Nothing here touches pyplot or any other state of the process: every function makes a figure, draws and encodes it.
"""

from dataclasses import dataclass
from typing import List, Mapping, Optional, Sequence, Tuple

import numpy as np

from memory_estimator.common.table import PALETTE, new_figure, plain, png

Figures = List[Tuple[str, bytes]]  # (what it shows, PNG) each
YRange = Optional[Tuple[float, Optional[float]]]  # (bottom, top) of an axis; a top of None leaves room above the data


@dataclass(frozen=True)
class Line:
    """One curve of a chart."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str
    measured: bool = True  # drawn as it is; False for a dense noisy series: faint, with a running median over it
    dots: bool = True  # whether a measured line shows its points


def chart(
    lines: Sequence[Line],
    *,
    title: str,
    y_label: str,
    x_label: str = "step",
    y_range: YRange = None,
    switch: Optional[float] = None,
) -> bytes:
    """Curves over a common x axis, as PNG bytes, with a dashed line at x = `switch`.

    Points that are not finite are left out; no line at all is fine. A legend appears where a line has a name.
    """
    from scipy.ndimage import median_filter  # on use: importing this module stays cheap

    figure = new_figure(5.4, 2.8)
    axes = figure.add_subplot()
    for line in lines:
        x, y = np.asarray(line.x, float), np.asarray(line.y, float)
        good = np.isfinite(x) & np.isfinite(y)
        x, y = x[good], y[good]
        if line.measured or x.size < 8:
            marks = "o-" if line.dots else "-"
            axes.plot(x, y, marks, color=line.colour, markersize=3.2, linewidth=1.6, label=line.name)
        else:
            axes.plot(x, y, color=line.colour, alpha=0.22, linewidth=0.8)
            axes.plot(x, median_filter(y, y.size // 20 + 5), color=line.colour, linewidth=1.4, label=line.name)
    if switch:
        axes.axvline(switch, color="#888888", linewidth=0.8, linestyle="--")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_ylim(y_range)
    plain(axes, title)
    if any(line.name for line in lines):
        axes.legend(frameon=False, fontsize=8)
    figure.tight_layout(pad=0.6)
    return png(figure)


def strips(values: Mapping[str, Sequence[float]], *, title: str, y_label: str, y_range: YRange = None) -> bytes:
    """One column per name: every value as a dot, and the quartiles as a box. PNG bytes."""
    figure = new_figure(3.3, 2.6)
    axes = figure.add_subplot()
    for position, (name, column) in enumerate(values.items()):
        y = np.asarray(column, float)
        colour = PALETTE[position % len(PALETTE)]
        # Golden-ratio offsets: dots keep apart and the picture is the same every time.
        x = position + 0.34 * ((np.arange(y.size) * 0.618034) % 1.0 - 0.5) * (y.size > 1)
        axes.plot(x, y, "o", color=colour, alpha=0.75, markersize=4.5, markeredgewidth=0, label=name)
        axes.boxplot(
            [y], positions=[position], widths=0.55, showfliers=False,
            medianprops={"color": "#222222", "linewidth": 1.6}, boxprops={"color": "#555555"},
            whiskerprops={"color": "#555555"}, capprops={"color": "#555555"},
        )  # fmt: skip
    axes.set_xticks(range(len(values)), list(values))
    axes.set_xlim(-0.6, max(len(values), 1) - 0.4)
    axes.set_ylabel(y_label)
    axes.set_ylim(y_range)
    plain(axes, title)
    figure.tight_layout(pad=0.6)
    return png(figure)
