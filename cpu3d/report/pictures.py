"""Pictures for people: overlays in three views as in the paper's Fig. 3, training curves and score plots, as PNG bytes.

Nothing here touches pyplot or any other state of the process: every function makes a figure, draws and encodes it.
"""

from dataclasses import dataclass
from typing import Any, Mapping, Optional, Sequence, Tuple

import numpy as np

from cpu3d.data.region import bounding_box
from memory_estimator.table import PALETTE, new_figure, plain, png

PREDICTION_ONLY, TRUTH_ONLY, BOTH = "#ff4a33", "#2a66ff", "#c388ff"
"""Red, blue and purple as in the paper, set apart by lightness too, so that a colour-blind reader can tell them."""

VIEWS = ("axial", "coronal", "sagittal")


@dataclass(frozen=True)
class Line:
    """One curve of a chart."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str
    measured: bool = True
    """Drawn as it is; False for a dense noisy series: faint, with a running median over it."""
    dots: bool = True
    """Whether a measured line shows its points."""


def overlay(
    image: np.ndarray,
    truth: Optional[np.ndarray],
    prediction: np.ndarray,
    spacing_mm: Sequence[float],
    title: str = "",
) -> bytes:
    """Prediction over truth on three orthogonal slices through the most of it, as PNG bytes.

    `image` is one channel `(X, Y, Z)` with axes R A S and zero background; `truth` (None where there is none) and
    `prediction` are boolean masks of its shape. Each view goes through the slice with most truth, or most prediction
    where the truth is empty, or the middle of the head. Radiological convention: the patient's right is on the
    viewer's left; in the sagittal view anterior is on the left. All three views have one scale in mm.
    """
    truth = np.zeros(image.shape, bool) if truth is None else truth
    head = bounding_box(image != 0).slices(image.shape)
    image, truth, prediction = (np.asarray(volume[head]) for volume in (image, truth, prediction))
    grey = grey_window(image)
    at = _most_of(truth if truth.any() else prediction)
    planes = [plane_of(grey, view, at) for view in VIEWS]
    sizes_mm = [_plane_size_mm(plane, view, spacing_mm) for plane, view in zip(planes, VIEWS)]
    widths, height = [w for w, _ in sizes_mm], max(h for _, h in sizes_mm)
    wide = 10.2  # inches; the height follows from the views' extents in mm
    figure = new_figure(wide, wide * height / sum(widths) + 0.62, facecolor="black")
    grid = figure.add_gridspec(
        1, 3, width_ratios=widths, left=0.005, right=0.995, top=1 - 0.30 / figure.get_figheight(),
        bottom=0.30 / figure.get_figheight(), wspace=0.015,
    )  # fmt: skip
    for position, (view, plane) in enumerate(zip(VIEWS, planes)):
        axes = figure.add_subplot(grid[position])
        sizes = plane_spacing(view, spacing_mm)
        show = {"aspect": sizes[1] / sizes[0], "interpolation": "nearest"}
        axes.imshow(plane, cmap="gray", vmin=0, vmax=1, **{**show, "interpolation": "bilinear"})
        t, p = plane_of(truth, view, at), plane_of(prediction, view, at)
        axes.imshow(_tint(t, p), **show)
        for mask, colour in ((t, TRUTH_ONLY), (p, PREDICTION_ONLY)):
            if mask.any() and not mask.all():
                axes.contour(mask, levels=[0.5], colors=[colour], linewidths=0.9)
        _letters(axes, view)
    _legend_of_overlay(figure, title)
    return png(figure)


def chart(
    lines: Sequence[Line],
    *,
    title: str,
    y_label: str,
    x_label: str = "step",
    y_range: Optional[Tuple[float, Optional[float]]] = None,
) -> bytes:
    """Curves over a common x axis, as PNG bytes.

    Points that are not finite are left out; no line at all is fine. A legend appears where a line has a name.
    """
    figure = new_figure(5.4, 2.8)
    axes = figure.add_subplot()
    for line in lines:
        x, y = np.asarray(line.x, float), np.asarray(line.y, float)
        good = np.isfinite(x) & np.isfinite(y)
        x, y = x[good], y[good]
        if line.measured or x.size < 8:
            axes.plot(
                x, y, "o-" if line.dots else "-", color=line.colour, markersize=3.2, linewidth=1.6, label=line.name
            )
        else:
            axes.plot(x, y, color=line.colour, alpha=0.22, linewidth=0.8)
            axes.plot(x, _running_median(y), color=line.colour, linewidth=1.4, label=line.name)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    _limit(axes, y_range)
    plain(axes, title)
    if any(line.name for line in lines):
        axes.legend(frameon=False, fontsize=8, ncols=min(3, len(lines)))
    figure.tight_layout(pad=0.6)
    return png(figure)


def strips(
    values: Mapping[str, Sequence[float]],
    *,
    title: str,
    y_label: str,
    y_range: Optional[Tuple[float, Optional[float]]] = None,
) -> bytes:
    """One column per name: every value as a dot, and a box of the quartiles from five values on. PNG bytes."""
    figure = new_figure(3.3, 2.6)
    axes = figure.add_subplot()
    for position, (name, column) in enumerate(values.items()):
        y = np.asarray(column, float)
        colour = PALETTE[position % len(PALETTE)]
        # Golden-ratio offsets: dots keep apart and the picture is the same every time.
        x = position + 0.34 * ((np.arange(y.size) * 0.618034) % 1.0 - 0.5) * (y.size > 1)
        axes.plot(x, y, "o", color=colour, alpha=0.75, markersize=4.5, markeredgewidth=0, label=name)
        if y.size >= 5:
            axes.boxplot(
                [y], positions=[position], widths=0.55, showfliers=False,
                medianprops={"color": "#222222", "linewidth": 1.6}, boxprops={"color": "#555555"},
                whiskerprops={"color": "#555555"}, capprops={"color": "#555555"},
            )  # fmt: skip
        elif y.size:
            axes.plot([position - 0.25, position + 0.25], [np.median(y)] * 2, color="#222222", linewidth=1.6)
    axes.set_xticks(range(len(values)), list(values))
    axes.set_xlim(-0.6, max(len(values), 1) - 0.4)
    axes.set_ylabel(y_label)
    _limit(axes, y_range)
    plain(axes, title)
    figure.tight_layout(pad=0.6)
    return png(figure)


def grey_window(image: np.ndarray) -> np.ndarray:
    """Grey values 0..1: the 0.5th to 99.5th percentile of the head. Background, zero in the store, is black.

    The store's z-scores are negative in half of the head, so black is known by position, not by value.
    """
    inside = image != 0
    if not inside.any():
        return np.zeros(image.shape, np.float32)
    low, high = np.percentile(image[inside].astype(np.float32), (0.5, 99.5))
    grey = (image.astype(np.float32) - low) / max(high - low, 1e-6)
    return np.where(inside, np.clip(0.06 + 0.94 * grey, 0, 1), 0)


def plane_of(volume: np.ndarray, view: str, at: Tuple[int, int, int]) -> np.ndarray:
    """A slice as rows and columns of a picture: right or anterior on the left, anterior or superior on top."""
    if view == "axial":
        return volume[::-1, ::-1, at[2]].T
    if view == "coronal":
        return volume[::-1, at[1], ::-1].T
    return volume[at[0], ::-1, ::-1].T


def plane_spacing(view: str, spacing_mm: Sequence[float]) -> Tuple[float, float]:
    """mm per (column, row)."""
    x, y, z = spacing_mm
    return {"axial": (x, y), "coronal": (x, z), "sagittal": (y, z)}[view]


# --- Private helpers ---


def _most_of(mask: np.ndarray) -> Tuple[int, int, int]:
    """Per axis, the slice with most voxels of `mask`; the middle one when it is empty."""
    if not mask.any():
        return tuple(n // 2 for n in mask.shape)
    return tuple(int(mask.sum(axis=tuple(a for a in range(3) if a != axis)).argmax()) for axis in range(3))


def _plane_size_mm(plane: np.ndarray, view: str, spacing_mm: Sequence[float]) -> Tuple[float, float]:
    column, row = plane_spacing(view, spacing_mm)
    return plane.shape[1] * column, plane.shape[0] * row


def _tint(truth: np.ndarray, prediction: np.ndarray) -> np.ndarray:
    """RGBA `(rows, columns, 4)`: the three colours where there is a mask, see-through elsewhere."""
    from matplotlib.colors import to_rgba

    tint = np.zeros((*truth.shape, 4), np.float32)
    tint[prediction & ~truth] = to_rgba(PREDICTION_ONLY, 0.62)
    tint[truth & ~prediction] = to_rgba(TRUTH_ONLY, 0.62)
    tint[truth & prediction] = to_rgba(BOTH, 0.42)
    return tint


def _letters(axes: Any, view: str) -> None:
    left, right, top, bottom = {"axial": "RLAP", "coronal": "RLSI", "sagittal": "APSI"}[view]
    for text, x, y in ((left, 0.02, 0.5), (right, 0.98, 0.5), (top, 0.5, 0.98), (bottom, 0.5, 0.02)):
        axes.text(
            x, y, text, transform=axes.transAxes, color="#ffe9a8", fontsize=9, fontweight="bold",
            ha={0.02: "left", 0.98: "right"}.get(x, "center"), va={0.98: "top", 0.02: "bottom"}.get(y, "center"),
        )  # fmt: skip
    axes.set_axis_off()


def _legend_of_overlay(figure: Any, title: str) -> None:
    high = figure.get_figheight()
    figure.text(0.01, 1 - 0.15 / high, title, color="white", fontsize=10, ha="left", va="center")
    x = 0.01
    for colour, text in ((BOTH, "both"), (PREDICTION_ONLY, "prediction only"), (TRUTH_ONLY, "truth only")):
        figure.text(x, 0.15 / high, "\u25a0", color=colour, fontsize=12, ha="left", va="center")
        figure.text(x + 0.018, 0.15 / high, text, color="white", fontsize=9, ha="left", va="center")
        x += 0.045 + 0.0062 * len(text)
    note = "axial \u00b7 coronal \u00b7 sagittal, radiological convention (R on the left)"
    figure.text(0.99, 0.15 / high, note, color="#b8b8b8", fontsize=8, ha="right", va="center")


def _limit(axes: Any, y_range: Optional[Tuple[float, Optional[float]]]) -> None:
    """Set the y axis to (bottom, top); a top of None leaves some room above the data."""
    if y_range:
        bottom, top = y_range
        highest = axes.dataLim.y1 if np.isfinite(axes.dataLim.y1) and axes.dataLim.y1 > bottom else bottom + 1
        axes.set_ylim(bottom, bottom + 1.08 * (highest - bottom) if top is None else top)


def _running_median(y: np.ndarray) -> np.ndarray:
    """Median over about a twentieth of the series around every point; ends use what there is."""
    half = max(2, y.size // 40)
    padded = np.pad(y, half, mode="reflect") if y.size > half else y
    if padded.size == y.size:
        return y
    return np.median(np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1), axis=1)
