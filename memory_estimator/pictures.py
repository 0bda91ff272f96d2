"""Pictures of an estimate, as PNG: memory over the input's size (the paper's Fig. 1) and over the time of one step."""

import dataclasses
import math
import re
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any, Callable, List, Optional, Sequence, Tuple

from memory_estimator.figure import PALETTE, new_figure, plain, png
from memory_estimator.job import Job
from memory_estimator.units import format_bytes
from memory_estimator.validation import Measured

GIB = 2**30

SIDES = (64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 240, 288, 352, 432, 512)
"""Cubes that a line goes through, each rounded up to what the network can halve."""

BATCHES = (1, 2, 4, 8, 16)
FILTERS = (8, 16, 32, 64)

NAMED_SIZES = {"64³": 64**3, "96³": 96**3, "128³": 128**3, "240x240x160": 240 * 240 * 160, "512³": 512**3}
"""Marks of the size axis."""

LEVEL_COLOURS = ("#08519c", "#3182bd", "#6baed6", "#9ecae1", "#c6dbef", "#deebf7", "#eff3ff", "#f7fbff")
"""A level's colour, the finest first; what belongs to none is grey."""

NO_LEVEL_COLOUR = "#c8c8c8"


@dataclass(frozen=True)
class Point:
    """A measured peak."""

    voxels: int
    """Of one volume."""
    bytes: int
    alike: bool
    """Whether the line was computed with its settings; False where depth, norm, channels or such differ."""


@dataclass(frozen=True)
class SizeLine:
    """Predicted memory over the voxels of one volume, with what was measured of it."""

    name: str
    voxels: Tuple[int, ...]
    bytes: Tuple[int, ...]
    points: Tuple[Point, ...] = ()


@dataclass(frozen=True)
class SizePanel:
    """One chart of lines."""

    title: str
    lines: Tuple[SizeLine, ...]


def size_panels(
    job: Job, predict: Callable[[Job], int], measured: Sequence[Measured] = (), sides: Sequence[int] = SIDES
) -> Tuple[SizePanel, SizePanel]:
    """Lines by batch computed at once at the job's filters, and by filters at the job's own. `predict` gives a job's
    process peak."""
    grids = sorted({_cube(side, job.unet.divisor) for side in sides})
    by_batch = [dataclasses.replace(job, batch=batch, micro_batch=batch) for batch in BATCHES]
    by_filters = [dataclasses.replace(job, unet=dataclasses.replace(job.unet, filters=filters)) for filters in FILTERS]
    return (
        SizePanel(
            f"by batch at once, {job.unet.filters} filters",
            tuple(_line(f"batch {one.batch}", one, grids, predict, measured) for one in by_batch),
        ),
        SizePanel(
            f"by filters, batch {job.batch}{f', {job.micro} at a time' if job.parts > 1 else ''}",
            tuple(_line(f"{one.unet.filters} filters", one, grids, predict, measured) for one in by_filters),
        ),
    )


def draw_sizes(panels: Sequence[SizePanel], *, title: str, host_bytes: Optional[int] = None) -> bytes:
    """Charts side by side, both axes logarithmic; a horizontal line where the host's memory ends. PNG."""
    figure = new_figure(4.7 * len(panels) + 0.2, 3.9)
    every = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, panel in zip(every, panels):
        for line, colour in zip(panel.lines, PALETTE):
            axes.plot(line.voxels, _gib(line.bytes), color=colour, linewidth=1.5, label=line.name)
            for alike in (False, True):
                points = [point for point in line.points if point.alike == alike]
                axes.plot(
                    [point.voxels for point in points], _gib([point.bytes for point in points]), "o", color=colour,
                    markerfacecolor=colour if alike else "white", markersize=4.5, markeredgewidth=1.1, zorder=3,
                )  # fmt: skip
        _size_axes(axes, panel.title)
        if host_bytes:
            axes.axhline(host_bytes / GIB, color="#333333", linewidth=1.1, linestyle="--")
            axes.text(
                0.015, host_bytes / GIB * 1.06, f"{format_bytes(host_bytes)} of memory", fontsize=8, color="#333333",
                transform=axes.get_yaxis_transform(), va="bottom",
            )  # fmt: skip
        axes.legend(frameon=False, fontsize=8, loc="lower right")
    every[0].set_ylabel("process peak")
    figure.suptitle(title, fontsize=10.5, fontweight="bold", x=0.01, ha="left")
    has_points = any(line.points for panel in panels for line in panel.lines)
    if has_points:
        told = "lines: predicted   ● measured   ○ measured, with another depth, norm, channels, outputs or optimizer"
        figure.text(0.99, 0.012, told, fontsize=7.5, color="#555555", ha="right")
    figure.tight_layout(pad=0.6, rect=(0, 0.025 if has_points else 0, 1, 0.99))
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
    compared here. Without either the axes stay empty. The strip on top shows the level of resolution at work, by the
    prediction.
    """
    figure = new_figure(9.4, 3.9)
    strip, axes = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": (1, 15), "hspace": 0.04})
    length = measured[-1][0] if measured else sum(seconds)
    notes = []
    if measured:
        live = [size for _, _, size in measured]
        times = [time for time, _, _ in measured]
        axes.fill_between(times, _gib(live), step="post", color=PALETTE[0], alpha=0.16, linewidth=0)
        axes.step(times, _gib(live), where="post", color=PALETTE[0], linewidth=1.3, label="measured")
        notes.append(f"measured peak {max(live) / GIB:.3f} GiB")
    if ops:
        stretch = length / (sum(seconds) or 1)
        ends = [end * stretch for end in accumulate(seconds)]
        begins = [0.0, *ends[:-1]]
        peak = max(range(len(ops)), key=lambda index: live_bytes[index])
        axes.step(
            [*begins, ends[-1]], _gib([*live_bytes, live_bytes[-1]]), where="post", color=PALETTE[1], linewidth=1.3,
            label="predicted",
        )  # fmt: skip
        axes.plot([begins[peak]], [live_bytes[peak] / GIB], "v", color=PALETTE[1], markersize=6)
        notes.insert(0, f"predicted peak {live_bytes[peak] / GIB:.3f} GiB in {ops[peak]}")
        _level_strip(strip, ops, begins, ends, length)
    strip.set_axis_off()
    plain(axes, "")
    strip.set_title(title, fontsize=10, loc="left", fontweight="bold", pad=6)
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, length or 1)
    axes.set_xlabel("seconds into the step, which the profiler slows" if measured else "seconds into the step")
    axes.set_ylabel("live bytes, GiB")
    if notes:
        axes.legend(frameon=False, fontsize=8, loc="lower center", title="\n".join(notes), title_fontsize=8,
                    alignment="left")  # fmt: skip
    figure.subplots_adjust(left=0.065, right=0.99, top=0.90, bottom=0.12)
    return png(figure)


def level_of(name: str) -> Optional[int]:
    """The level of resolution that an operation's name tells, as in "decoder0_conv1/filter_gradient"; None for none."""
    found = re.search(r"(?:encoder|decoder|head)(\d+)(?:_|/|$)", name)
    if found:
        return int(found[1])
    return 0 if re.search(r"(?:^|/)head(?:/|_|$)", name) else None


# --- Private helpers ---


def _cube(side: int, divisor: int) -> Tuple[int, int, int]:
    return (-(-side // divisor) * divisor,) * 3


def _line(
    name: str,
    job: Job,
    grids: Sequence[Tuple[int, int, int]],
    predict: Callable[[Job], int],
    measured: Sequence[Measured],
) -> SizeLine:
    return SizeLine(
        name,
        tuple(math.prod(grid) for grid in grids),
        tuple(predict(dataclasses.replace(job, shape=grid)) for grid in grids),
        tuple(
            Point(math.prod(one.job.shape), one.process_peak_bytes, _settings(one.job) == _settings(job))
            for one in measured
            if not one.failure and _family(one.job) == _family(job)
        ),
    )


def _family(job: Job) -> Tuple[Any, ...]:
    """What memory depends on most: steps that agree in it lie near one line."""
    unet = job.unet
    plain_net = (unet.network, unet.up, unet.residual, unet.deep_supervision)
    return (unet.filters, unet.dtype, plain_net, job.micro, job.engine, job.policy)


def _settings(job: Job) -> Job:
    """All but the shape, the number of micro-batches, the threads, the data and the seed."""
    unet = dataclasses.replace(job.unet, seed=0)
    return Job(unet, (unet.divisor,) * 3, job.micro, job.micro, job.optimizer, job.engine)


def _gib(sizes_bytes: Sequence[int]) -> List[float]:
    return [size / GIB for size in sizes_bytes]


def _size_axes(axes: Any, title: str) -> None:
    from matplotlib.ticker import FuncFormatter

    plain(axes, title)
    axes.set_xscale("log")
    axes.set_yscale("log", base=2)
    axes.set_xticks(list(NAMED_SIZES.values()), list(NAMED_SIZES))
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(FuncFormatter(lambda gib, _: _tick(gib)))
    axes.set_xlabel("volume")


def _tick(gib: float) -> str:
    if gib >= 1024:
        return f"{gib / 1024:g} TiB"
    return f"{gib:g} GiB" if gib >= 1 else f"{1024 * gib:g} MiB"


def _level_strip(
    axes: Any, names: Sequence[str], begins: Sequence[float], ends: Sequence[float], length: float
) -> None:
    """A coloured band for every run of operations of one level, named where there is room."""
    axes.set_ylim(0, 1)
    # An operation without a level, such as a cast of weights between two convolutions, counts to the one before it
    # when it is short; the loss and the update are long enough to show.
    runs = groupby(zip(_smoothed(names, begins, ends, length), begins, ends), key=lambda item: item[0])
    for level, run in runs:
        parts = list(run)
        begin, end = parts[0][1], parts[-1][2]
        colour = NO_LEVEL_COLOUR if level is None else LEVEL_COLOURS[min(level, len(LEVEL_COLOURS) - 1)]
        axes.axvspan(begin, end, color=colour, linewidth=0)
        text = "-" if level is None else f"level {level}" if end - begin > 0.07 * length else str(level)
        if end - begin > 0.012 * length and level is not None:
            axes.text((begin + end) / 2, 0.47, text, fontsize=7, ha="center", va="center",
                      color="white" if level <= 1 else "#222222")  # fmt: skip


def _smoothed(
    names: Sequence[str], begins: Sequence[float], ends: Sequence[float], length: float
) -> List[Optional[int]]:
    levels: List[Optional[int]] = []
    for name, begin, end in zip(names, begins, ends):
        level = level_of(name)
        if level is None and levels and end - begin < 0.004 * length:
            level = levels[-1]
        levels.append(level)
    return levels
