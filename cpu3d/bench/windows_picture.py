"""The record of `bench windows` as a picture: the difference by distance to a tile border, and what each way takes."""

from typing import Any, Dict, List, Sequence

from memory_estimator.figure import PALETTE, new_figure, plain, png
from memory_estimator.units import GIB

ONE_PASS_COLOUR = "#888888"

LEAST = 1e-6
"""The logarithmic axis ends here: a smaller difference of probabilities is rounding."""

FEW = 100
"""Of fewer voxels than this no 99th percentile is drawn."""


def draw_windows(result: Dict[str, Any], title: str) -> bytes:
    """Mean and 99th percentile over distance on the left, seconds and memory of all ways on the right. PNG.

    A way that died has a place without a bar; one without a border inside the volume has no curve.
    """
    rows = result["rows"]
    colours = [ONE_PASS_COLOUR, *(PALETTE[number % len(PALETTE)] for number in range(len(rows) - 1))]
    figure = new_figure(11.2, max(3.4, 0.42 * len(rows) + 1.9))
    curves, seconds, memory = figure.subplots(1, 3, gridspec_kw={"width_ratios": (5, 3, 3)})
    _curves(curves, rows, colours)
    _bars(seconds, rows, colours, [row["seconds"] for row in rows], "seconds a case", named=True)
    peaks = [row["process_peak_bytes"] and row["process_peak_bytes"] / GIB for row in rows]
    _bars(memory, rows, colours, peaks, "process peak, GiB", named=False)
    figure.suptitle(title, fontsize=10, fontweight="bold", x=0.01, ha="left")
    figure.tight_layout(pad=0.6, w_pad=1.4, rect=(0, 0, 1, 0.98))
    return png(figure)


# --- Private helpers ---


def _curves(axes: Any, rows: Sequence[Dict[str, Any]], colours: Sequence[str]) -> None:
    plain(axes, "")
    for row, colour in zip(rows, colours):
        places = row["difference"]["by_distance"] if row["difference"] else []
        places = [one for one in places if one["voxels"] >= FEW]
        if len(places) < 2:
            continue
        distances = [one["distance"] for one in places]
        for name, style in (("mean", "-"), ("p99", "--")):
            values = [max(one[name], LEAST) for one in places]
            label = row["name"] if name == "mean" else None
            axes.plot(distances, values, style, color=colour, linewidth=1.6, label=label)
    axes.set_yscale("log")
    axes.set_xlabel("voxels to the nearest tile border", fontsize=9)
    axes.set_ylabel("difference of probabilities from one pass", fontsize=9)
    axes.plot([], [], "--", color="#444444", linewidth=1.2, label="99th percentile")
    axes.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(-0.02, 0.99), ncols=2)


def _bars(
    axes: Any, rows: Sequence[Dict[str, Any]], colours: Sequence[str], values: List[Any], label: str, *, named: bool
) -> None:
    plain(axes, "")
    axes.grid(False, axis="y")
    bars = axes.barh(range(len(rows)), [value or 0 for value in values], 0.62, color=colours)
    axes.bar_label(bars, ["died" if value is None else f"{value:.2f}" for value in values], padding=3, fontsize=8)
    names = [row["name"].replace(", ", "\n") for row in rows] if named else [""] * len(rows)
    axes.set_yticks(range(len(rows)), names, fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, 1.25 * max([value for value in values if value], default=1))
    axes.set_xlabel(label, fontsize=9)
