"""A process's memory over time: watched from outside, written as an `mprof` trace, drawn.

The trace is the text format of the memory-profiler package: `mprof plot FILE` and `mprof peak FILE` read it too.
"""

from pathlib import Path
from typing import Optional, Sequence, Tuple

from cpu3d.host.memory import Resident
from cpu3d.util.atomic import atomic_write
from memory_estimator.figure import PALETTE, new_figure, plain, png

MIB, GIB = 2**20, 2**30

Moment = Tuple[str, float, float]
"""A part of the work: (name, begin, end) in seconds of `time.time`."""


def write_trace(path: Path, seen: Sequence[Resident], moments: Sequence[Moment], command: str) -> None:
    """Write an mprof trace: resident MiB over time, and what each part of the work began and ended with."""
    lines = [f"CMDLINE {command}"]
    for name, begin, end in moments:
        lines.append(f"FUNC {name} {_at(seen, begin):.4f} {begin:.4f} {_at(seen, end):.4f} {end:.4f} 0")
    lines += [f"MEM {one.total_bytes / MIB:.6f} {one.time_s:.4f}" for one in seen]
    with atomic_write(path, "w") as file:
        file.write("\n".join(lines) + "\n")


def draw_process(
    seen: Sequence[Resident],
    moments: Sequence[Moment],
    *,
    title: str,
    predicted_bytes: Optional[int] = None,
) -> bytes:
    """Anonymous memory and file pages over time, the steps as grey bands, the predicted peak as a line. PNG."""
    figure = new_figure(7.2, 3.2)
    axes = figure.add_subplot()
    start = seen[0].time_s if seen else 0
    times = [one.time_s - start for one in seen]
    length = (times[-1] if times else 0) or 1
    anonymous = [one.anonymous_bytes / GIB for one in seen]
    total = [one.total_bytes / GIB for one in seen]
    axes.fill_between(times, anonymous, color=PALETTE[0], alpha=0.9, linewidth=0, label="anonymous")
    axes.fill_between(times, anonymous, total, color=PALETTE[4], alpha=0.9, linewidth=0, label="file pages")
    # Room above the highest for the names of the parts, which stand at its top.
    highest = max([*total, (predicted_bytes or 0) / GIB, 1e-3])
    axes.set_ylim(0, 1.18 * highest)
    for number, (name, begin, end) in enumerate(moments):
        axes.axvspan(begin - start, end - start, color="#000000", alpha=0.10 if number % 2 else 0.05, linewidth=0,
                     zorder=0)  # fmt: skip
        if end - begin > 0.035 * length:
            middle = (begin + end) / 2 - start
            axes.text(middle, 1.165 * highest, name, fontsize=7.5, ha="center", va="top", color="#444444")
    if predicted_bytes:
        axes.axhline(predicted_bytes / GIB, color=PALETTE[1], linewidth=1.4, linestyle="--",
                     label=f"predicted peak, {predicted_bytes / GIB:.2f} GiB")  # fmt: skip
    axes.set_xlim(0, length)
    axes.set_xlabel("seconds since the start of the process")
    axes.set_ylabel("resident, GiB")
    plain(axes, title)
    axes.legend(frameon=False, fontsize=8, loc="lower right", ncols=3)
    figure.tight_layout(pad=0.6)
    return png(figure)


# --- Private helpers ---


def _at(seen: Sequence[Resident], time_s: float) -> float:
    """MiB resident at a time: the last look before it."""
    before = [one.total_bytes for one in seen if one.time_s <= time_s]
    return (before[-1] if before else 0) / MIB
