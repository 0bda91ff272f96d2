"""The comparison of `bench memory --policies` as a picture: memory on the left, time on the right, row by row."""

from typing import Any, Dict, List

from cpu3d.bench.policies import BASELINE
from memory_estimator.figure import PALETTE, new_figure, plain, png
from memory_estimator.units import GIB

PROCESS, ALLOCATOR, SECONDS = PALETTE[5], PALETTE[0], PALETTE[4]

ROOM = 1.42
"""How far an axis goes, in lengths of its longest bar: the label stands behind it."""


def draw_policies(result: Dict[str, Any], title: str) -> bytes:
    """A record's rows from top to bottom, as PNG. A row that died shows its reason instead of bars."""
    rows = result["rows"]
    figure = new_figure(9.4, 0.5 * len(rows) + 1.35)
    memory, seconds = figure.subplots(1, 2, sharey=True, gridspec_kw={"width_ratios": (5, 4)})
    for axes in (memory, seconds):
        plain(axes, "")
        axes.grid(False, axis="y")
        axes.tick_params(axis="y", length=0)
    _memory(memory, rows)
    _seconds(seconds, rows)
    memory.set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize=9)
    memory.set_ylim(len(rows) - 0.5, -0.5)
    for at, row in enumerate(rows):
        if row["error"]:
            memory.text(0, at, f"  {row['error'][:70]}", va="center", fontsize=8, color="#888888", style="italic")
    figure.suptitle(title, fontsize=10.5, fontweight="bold", x=0.01, ha="left")
    figure.tight_layout(pad=0.6, w_pad=1.6, rect=(0, 0, 1, 0.99))
    return png(figure)


# --- Private helpers ---


def _memory(axes: Any, rows: List[Dict[str, Any]]) -> None:
    longest = 0.0
    for name, label, colour, shift in (
        ("process_peak_bytes", "process peak", PROCESS, -0.19),
        ("allocator_peak_bytes", "allocator peak (units)", ALLOCATOR, 0.19),
    ):
        there = [(at, row) for at, row in enumerate(rows) if row[name] and not row["error"]]
        # A peer knows one peak alone, whose bar then stands in the middle.
        places = [at + (shift if row["allocator_peak_bytes"] else 0) for at, row in there]
        sizes = [row[name] / GIB for _, row in there]
        units = [f" ({row['units']:.1f})" if shift > 0 else "" for _, row in there]
        bars = axes.barh(places, sizes, 0.36, color=colour, label=label)
        axes.bar_label(bars, [f"{size:.2f}{more}" for size, more in zip(sizes, units)], padding=3, fontsize=8)
        longest = max([longest, *sizes])
    axes.set_xlim(0, ROOM * (longest or 1))
    axes.set_xlabel("peak memory, GiB", fontsize=9)
    axes.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(-0.015, 0.985), ncols=2)


def _seconds(axes: Any, rows: List[Dict[str, Any]]) -> None:
    """Seconds themselves where the baseline died."""
    name = "ratio" if any(row["ratio"] for row in rows) else "step_s"
    there = [(at, row) for at, row in enumerate(rows) if row[name] and not row["error"]]
    values = [row[name] for _, row in there]
    around = [[abs(row[f"{name}_{end}"] - row[name]) for _, row in there] for end in ("min", "max")]
    more = [f" ({row['step_s']:.2f} s)" if name == "ratio" else "" for _, row in there]
    line = {"elinewidth": 1.1, "ecolor": "#444444", "capsize": 2}
    bars = axes.barh(
        [at for at, _ in there],
        values,
        0.5,
        color=SECONDS,
        xerr=around if any(map(any, around)) else None,
        error_kw=line,
    )
    axes.bar_label(bars, [f"{value:.2f}{text}" for value, text in zip(values, more)], padding=4, fontsize=8)
    axes.set_xlim(0, ROOM * max((row[f"{name}_max"] for _, row in there), default=1))
    if name == "ratio":
        axes.axvline(1, color="#333333", linewidth=0.9, linestyle="--")
    axes.set_xlabel("seconds a step" + (f", relative to {BASELINE}" if name == "ratio" else ""), fontsize=9)
