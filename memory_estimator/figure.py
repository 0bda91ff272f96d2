"""The look that all charts share, and the estimator's own: memory over the input's size and over the time of a step."""

import io
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Optional, Sequence, Tuple

from memory_estimator.units import GIB, format_bytes

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito's colours, which a colour-blind reader can tell apart."""

NAMED_SIZES = {"64³": 64**3, "96³": 96**3, "128³": 128**3, "240x240x160": 240 * 240 * 160, "512³": 512**3}
"""Marks of the size axis."""


@dataclass(frozen=True)
class SizeLine:
    """Predicted memory over the voxels of one volume, with what was measured of it."""

    name: str
    points: Sequence[Tuple[int, int]]
    """(voxels, bytes)."""
    measured: Sequence[Tuple[int, int]] = ()


def new_figure(width: float, height: float, facecolor: str = "white") -> Any:
    """An empty figure without pyplot or any other state of the process, sizes in inches at 130 dots each."""
    # Imported on first use: matplotlib takes half a second and may write a font cache.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=130, facecolor=facecolor)
    FigureCanvasAgg(figure)
    return figure


def png(figure: Any) -> bytes:
    """The figure as PNG; equal figures give equal bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", facecolor=figure.get_facecolor(), metadata={"Software": None})
    return buffer.getvalue()


def plain(axes: Any, title: str) -> None:
    """A bold title on the left, a faint grid, no frame on top and right."""
    axes.set_title(title, fontsize=10, loc="left", fontweight="bold")
    axes.grid(True, color="#e4e4e4", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(labelsize=8)


def draw_sizes(
    panels: Sequence[Tuple[str, Sequence[SizeLine]]], *, title: str, host_bytes: Optional[int] = None
) -> bytes:
    """Charts of (title, lines) side by side, both axes logarithmic, measured points as dots; PNG.

    A horizontal line shows where the host's memory ends.
    """
    from matplotlib.ticker import FuncFormatter

    figure = new_figure(4.7 * len(panels) + 0.2, 3.9)
    every = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (name, lines) in zip(every, panels):
        plain(axes, name)
        for line, colour in zip(lines, PALETTE):
            for points, style in ((line.points, "-"), (line.measured, "o")):
                label = line.name if style == "-" else None
                voxels, sizes = [one for one, _ in points], [size / GIB for _, size in points]
                axes.plot(voxels, sizes, style, color=colour, linewidth=1.5, markersize=4.5, label=label)
        if host_bytes:
            label = f"{format_bytes(host_bytes)} of memory"
            axes.axhline(host_bytes / GIB, color="#333333", linewidth=1.1, linestyle="--", label=label)
        axes.set_xscale("log")
        axes.set_yscale("log", base=2)
        axes.set_xticks(list(NAMED_SIZES.values()), list(NAMED_SIZES))
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(FuncFormatter(lambda gib, _: _tick(gib)))
        axes.set_xlabel("volume; dots are measured")
        axes.legend(frameon=False, fontsize=8, loc="lower right")
    every[0].set_ylabel("process peak")
    figure.suptitle(title, fontsize=10.5, fontweight="bold", x=0.01, ha="left")
    figure.tight_layout(pad=0.6, rect=(0, 0, 1, 0.99))
    return png(figure)


def draw_timeline(
    ops: Sequence[str],
    live_bytes: Sequence[int],
    seconds: Sequence[float],
    *,
    title: str,
    measured: Sequence[Tuple[float, str, int]] = (),
) -> bytes:
    """Live bytes over the time of one step, predicted and, where given, measured; PNG.

    `ops`, `live_bytes` and `seconds` are the predicted operations, the most that each finds live (`counted_by_op`) and
    their times; `measured` are the allocator's calls as (seconds into the step, operation, bytes live after it). With
    both, the prediction is stretched to the measured length, so that like stands over like: it is the memory that is
    compared here. Without either the axes stay empty.
    """
    figure = new_figure(9.4, 3.9)
    axes = figure.subplots()
    length = measured[-1][0] if measured else sum(seconds)
    notes = []
    if measured:
        times, live = [time for time, _, _ in measured], [size / GIB for _, _, size in measured]
        axes.fill_between(times, live, step="post", color=PALETTE[0], alpha=0.16, linewidth=0)
        axes.step(times, live, where="post", color=PALETTE[0], linewidth=1.3, label="measured")
        notes.append(f"measured peak {max(live):.3f} GiB")
    if ops:
        stretch = length / (sum(seconds) or 1)
        edges = [0.0, *(end * stretch for end in accumulate(seconds))]
        live = [size / GIB for size in (*live_bytes, live_bytes[-1])]
        peak = live.index(max(live))
        axes.step(edges, live, where="post", color=PALETTE[1], linewidth=1.3, label="predicted")
        axes.plot([edges[peak]], [live[peak]], "v", color=PALETTE[1], markersize=6)
        notes.insert(0, f"predicted peak {live[peak]:.3f} GiB in {ops[peak]}")
    plain(axes, title)
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, length or 1)
    axes.set_xlabel("seconds into the step, which the profiler slows" if measured else "seconds into the step")
    axes.set_ylabel("live bytes, GiB")
    if notes:
        axes.legend(frameon=False, fontsize=8, loc="lower center", title="\n".join(notes), title_fontsize=8)
    figure.tight_layout(pad=0.6)
    return png(figure)


# --- Private helpers ---


def _tick(gib: float) -> str:
    if gib >= 1024:
        return f"{gib / 1024:g} TiB"
    return f"{gib:g} GiB" if gib >= 1 else f"{1024 * gib:g} MiB"
