"""The pictures of a report, training curves and score plots, and how a chart is drawn, as PNG bytes.

Nothing here touches pyplot or any other state of the process: every function makes a figure, draws and encodes it.
"""

from dataclasses import dataclass
from typing import Any, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from cpu3d.inference.scores import METRICS
from cpu3d.run.summary import Events, numbers, of_kind
from memory_estimator.common.table import PALETTE, new_figure, plain, png
from memory_estimator.common.units import GIB

Figures = List[Tuple[str, bytes]]  # (title, PNG) each
YRange = Optional[Tuple[float, Optional[float]]]  # (bottom, top) of an axis; a top of None leaves room above the data


@dataclass(frozen=True)
class Line:
    """One curve of a chart."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str
    measured: bool = True  # drawn as it is; False for a dense noisy series: faint, with a running median over it
    marks: str = "o-"  # of a measured line, in matplotlib's notation: "-" without dots, "o" dots alone


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
    """Curves over a common x axis, as PNG bytes, with a dashed line at x = `switch`; `log` is of both axes.

    Points that are not finite are left out; no line at all is fine. A legend appears if a line has a name.
    """
    from scipy.ndimage import median_filter  # on use: importing this module stays cheap

    figure = new_figure(5.4, 2.8)
    axes = figure.add_subplot()
    for line in lines:
        x, y = np.asarray(line.x, float), np.asarray(line.y, float)
        good = np.isfinite(x) & np.isfinite(y)
        x, y = x[good], y[good]
        if line.measured or x.size < 8:
            axes.plot(x, y, line.marks, color=line.colour, markersize=3.2, linewidth=1.6, label=line.name)
        else:
            axes.plot(x, y, color=line.colour, alpha=0.22, linewidth=0.8)
            axes.plot(x, median_filter(y, y.size // 20 + 5), color=line.colour, linewidth=1.4, label=line.name)
    if switch:
        axes.axvline(switch, color="#888888", linewidth=0.8, linestyle="--")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_ylim(y_range)
    if log:
        axes.set(xscale="log", yscale="log")
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
        # Golden-ratio offsets: dots stay apart and the picture is the same every time.
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


def curves(events: Events, coarse_steps: int) -> Figures:
    """A chart of every curve that has points, with a dashed line where full steps begin."""
    steps, validations = of_kind(events, "step"), of_kind(events, "validation")
    charts: Figures = []

    def add(title: str, lines: Sequence[Line], **axis: Any) -> None:
        lines = [line for line in lines if len(line.x)]
        if lines:
            charts.append((title, chart(lines, title=title, switch=coarse_steps, **axis)))

    loss = [_line("training", steps, "loss", PALETTE[0]), _line("validation", validations, "loss", PALETTE[1])]
    add("Loss", loss, y_label="loss")
    regions = dict.fromkeys(name for event in (*validations, *steps) for name in event.get("dice", {}))
    for kind, source in (("validation, whole volumes", validations), ("training steps", steps)):
        dice = [{**event, **event.get("dice", {})} for event in source]
        lines = [_line(name, dice, name, colour) for name, colour in zip(regions, PALETTE * len(regions))]
        add(f"Dice, {kind}", lines, y_label="Dice", y_range=(0, 1))
    from_zero = {"y_range": (0, None)}
    times = [_line("step", steps, "step_s", PALETTE[0]), _line("waiting for data", steps, "wait_s", PALETTE[1])]
    add("Time of a step", times, y_label="s", **from_zero)
    add("Learning rate", [_line("", steps, "learning_rate", PALETTE[2])], y_label="learning rate", **from_zero)
    add("Memory of the process", [_line("", steps, "rss_bytes", PALETTE[2], GIB)], y_label="GiB", **from_zero)
    return charts


def score_pictures(scores: Mapping[str, Any]) -> Figures:
    """Every case as a dot, a picture a metric."""
    figures = []
    for name, metric in METRICS.items():
        values = {region: [case["regions"][region][name] for case in scores["cases"]] for region in scores["summary"]}
        y_range = (-0.02, 1.02) if metric.larger_is_better else (0, None)
        title = metric.label if metric.larger_is_better else f"{metric.label} (less is better)"
        figures.append((f"{title} of every case", strips(values, title=title, y_label=metric.unit, y_range=y_range)))
    return figures


def _line(name: str, events: Events, key: str, colour: str, unit: float = 1) -> Line:
    """The values of a key over the events' steps: with a name those of steps are noisy, those of validations dots."""
    known = [event for event in events if numbers([event], key)]
    x, y = [event["step"] for event in known], [event[key] / unit for event in known]
    of_steps = bool(known) and known[0]["event"] == "step"
    return Line(name, x, y, colour, measured=not (of_steps and name), marks="-" if of_steps else "o-")
