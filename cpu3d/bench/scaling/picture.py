"""The record of `bench scaling` as a picture: where the seconds of a step go."""

from typing import Any, Dict, List, Tuple

from cpu3d.bench.scaling.table import gap, name_of
from memory_estimator.figure import PALETTE, new_figure, plain, png
from memory_estimator.scaling.costs import ALONE, APART, IN_PARTS, TOGETHER, row_of

COLOURS = {"step of one": PALETTE[5], "in parts": "#cccccc", "contention": PALETTE[0], "rest": "#999999",
           "packing": PALETTE[3], "all-reduce": PALETTE[1], "waiting": PALETTE[4]}  # fmt: skip


def draw_scaling(result: Dict[str, Any], title: str) -> bytes:
    """A bar each way, seconds of a step; those of several workers in their parts. PNG.

    A part below zero, which is noise, shortens the bar and is not drawn.
    """
    rows = result["rows"]
    figure = new_figure(9.6, 0.45 * len(rows) + 1.6)
    axes = figure.add_subplot()
    plain(axes, "")
    axes.grid(False, axis="y")
    named = set()
    for place, row in enumerate(rows):
        left = 0.0
        for name, seconds in _parts(result, row):
            if seconds > 0:
                label = None if name in named else name
                axes.barh(place, seconds, 0.62, left=left, color=COLOURS[name], label=label)
                named.add(name)
                left += seconds
        axes.plot([row["step_s_min"], row["step_s_max"]], [place, place], color="#333333", linewidth=1.0)
        end = max(left, row["step_s_max"])
        told = "" if row["name"] == ALONE else f", efficiency {row['efficiency']:.0%}"
        axes.annotate(f"{row['step_s']:.2f} s{told}", (end, place), (4, 0), textcoords="offset points", fontsize=8,
                      va="center")  # fmt: skip
    axes.set_yticks(range(len(rows)), [name_of(row) for row in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, 1.28 * max(row["step_s_max"] for row in rows))
    axes.set_xlabel("seconds of a step (line: shortest to longest step)", fontsize=9)
    axes.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(-0.02, 0.98), ncols=7)
    figure.suptitle(title, fontsize=9, fontweight="bold", x=0.01, ha="left")
    figure.tight_layout(pad=0.6, rect=(0, 0, 1, 0.98))
    return png(figure)


# --- Private helpers ---


def _parts(result: Dict[str, Any], row: Dict[str, Any]) -> List[Tuple[str, float]]:
    """In the order they are stacked; they add up to the row's step."""
    alone_s = row_of(result, ALONE, 1)["step_s"]
    if row["name"] == TOGETHER:
        parts = gap(result, row["workers"])
        return [("step of one", alone_s), *((name, parts[name]) for name in COLOURS if name in parts)]
    if row["name"] in (IN_PARTS, APART):
        more_s = row_of(result, IN_PARTS, 1)["compute_s"] - alone_s
        slower_s = row["compute_s"] - alone_s - more_s  # 0 of one
        parts = [("in parts", more_s), ("contention", slower_s), ("packing", row["packing_s"])]
        return [("step of one", alone_s + min(0.0, more_s) + min(0.0, slower_s)), *parts]
    return [("step of one", row["step_s"])]
