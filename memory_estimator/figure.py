"""The look that all charts share: colours, an empty figure, plain axes, PNG."""

import io
from typing import Any

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito's colours, which a colour-blind reader can tell apart."""


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
