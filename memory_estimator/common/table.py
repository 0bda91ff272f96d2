"""One table for the terminal, Markdown and HTML, from the same rows, and the look that all charts
share.

table = Table(("policy", "peak, GiB"), [("speed", "5.25"), (Bold("lean"), Bold("2.29"))], title="One
step") console.print(table), table.markdown(), table.html()"""

import html
import io
import textwrap
from dataclasses import dataclass
from typing import Any, Dict, List, Sequence

WIDTH = 120  # columns if the output is no terminal, as in a log


class Bold(str):
    """A cell that stands out."""

    style = "bold"


class Good(str):
    style = "green"  # something is as it should be


class Poor(Bold):
    style = "yellow"  # to be looked at


class Bad(Bold):
    style = "bold red"  # a failure


@dataclass(frozen=True)
class Table:
    """Rows of text under a header. The first `names` columns are words, aligned left; the others
    numbers."""

    columns: Sequence[str]  # header cells; all "" for no header
    rows: Sequence[Sequence[str]]
    title: str = ""
    caption: str = ""  # a note on all rows, below the table
    names: int = 1

    def rich(self) -> Any:
        """A table of `rich`, for its console; brackets in cells are text, not markup."""
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(
            title=Text(self.title) if self.title else None,
            caption=Text(self.caption) if self.caption else None,
            title_justify="left",
            caption_justify="left",
            box=box.SIMPLE_HEAD,
            show_header=any(self.columns),
            collapse_padding=True,
            pad_edge=False,
        )
        for index, name in enumerate(self.columns):
            justify: Any = "left" if index < self.names else "right"
            table.add_column(Text(name), justify=justify, overflow="fold")
        for row in self.rows:
            table.add_row(*(Text(cell, getattr(cell, "style", "")) for cell in row))
        return table

    __rich__ = rich

    def lines(self) -> List[str]:
        """Lines of plain text, of WIDTH at most, as `train` prints among others."""
        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=WIDTH).print(self)
        lines = textwrap.dedent(text.getvalue()).splitlines()
        return [line.rstrip() for line in lines if line.strip()]

    def markdown(self) -> List[str]:
        """Lines of a GitHub table; the title stands above it and the caption below it, each a
        paragraph."""

        def line(row: Sequence[str]) -> str:
            cells = (f"**{cell}**" if isinstance(cell, Bold) else cell for cell in row)
            return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"

        numbers = len(self.columns) - self.names
        dashes = ["---"] * min(self.names, len(self.columns)) + ["---:"] * numbers
        lines = [line(self.columns), f"|{'|'.join(dashes)}|", *map(line, self.rows)]
        if self.title:
            lines = [self.title, "", *lines]
        if self.caption:
            lines += ["", self.caption]
        return lines

    def html(self) -> str:
        """A <table> with everything escaped; its title and caption are the <caption>."""
        words = ". ".join(html.escape(part) for part in (self.title, self.caption) if part)
        head = "".join(f"<th>{html.escape(name)}</th>" for name in self.columns)

        def cell(text: str) -> str:
            escaped = html.escape(text)
            if isinstance(text, Bold):
                escaped = f"<b>{escaped}</b>"
            return f"<td>{escaped}</td>"

        body = "".join(f"<tr>{''.join(map(cell, row))}</tr>\n" for row in self.rows)
        caption = f"<caption>{words}</caption>\n" if words else ""
        header = f"<thead><tr>{head}</tr></thead>\n" if any(self.columns) else ""
        start = f'<div class="scroll"><table class="names{self.names}">\n'
        return f"{start}{caption}{header}<tbody>\n{body}</tbody></table></div>"


def new_console() -> Any:
    """A `rich` console for printing text as it is and tables: as wide as the terminal, or as
    WIDTH."""
    from rich.console import Console

    as_it_is: Dict[str, Any] = {"highlight": False, "markup": False, "soft_wrap": True}
    console = Console(**as_it_is)
    return console if console.is_terminal else Console(width=WIDTH, **as_it_is)


PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito's colours, which a colour-blind reader can tell apart."""


def new_figure(width: float, height: float) -> Any:
    """An empty figure without pyplot or any other state of the process, sizes in inches at 130 dots
    each."""
    # Imported on first use: matplotlib takes half a second and may write a font cache.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=130, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def png(figure: Any) -> bytes:
    """The figure as PNG; equal figures give equal bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def plain(axes: Any, title: str) -> None:
    """A bold title on the left, a faint grid, no frame on top and right."""
    axes.set_title(title, fontsize=10, loc="left", fontweight="bold")
    axes.grid(True, color="#e4e4e4", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(labelsize=8)
