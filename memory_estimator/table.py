"""One table for the terminal, Markdown and HTML, from the same rows.

table = Table(("policy", "peak, GiB"), [("speed", "5.25"), (Bold("lean"), Bold("2.29"))], title="One step")
console.print(table)
lines = table.markdown()
page.write(table.html())
"""

import html
from dataclasses import dataclass
from typing import TYPE_CHECKING, List, Sequence

if TYPE_CHECKING:
    import rich.console
    import rich.table

WIDTH = 120
"""Columns where the output is no terminal, as in a log."""


class Bold(str):
    """A cell that stands out."""

    style = "bold"


class Good(str):
    """A cell that tells of something as it should be: green on a terminal."""

    style = "green"


class Poor(Bold):
    """A cell to look at: yellow on a terminal."""

    style = "yellow"


class Bad(Bold):
    """A cell that tells of a failure: red on a terminal."""

    style = "bold red"


@dataclass(frozen=True)
class Table:
    """Rows of text under a header. The first `names` columns are words, aligned left; the others numbers."""

    columns: Sequence[str]
    """Header cells; all "" for no header."""
    rows: Sequence[Sequence[str]]
    title: str = ""
    caption: str = ""
    """What holds for all rows, below the table."""
    names: int = 1

    def rich(self) -> "rich.table.Table":
        """For a `rich` console; brackets in cells are text, not markup."""
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(
            title=Text(self.title) if self.title else None,
            caption=Text(self.caption) if self.caption else None,
            title_justify="left",
            caption_justify="left",
            show_header=any(self.columns),
            box=box.SIMPLE_HEAD,
            collapse_padding=True,
            pad_edge=False,
        )
        for position, name in enumerate(self.columns):
            left = position < self.names
            table.add_column(Text(name), justify="left" if left else "right", overflow="fold")
        for row in self.rows:
            table.add_row(*(Text(cell, getattr(cell, "style", "")) for cell in row))
        return table

    def __rich__(self) -> "rich.table.Table":
        return self.rich()

    def markdown(self) -> List[str]:
        """Lines of a GitHub table; the title stands above it and the caption below it, each a paragraph."""
        marked = [[f"**{cell}**" if isinstance(cell, Bold) else cell for cell in row] for row in self.rows]
        dashes = ["---" if position < self.names else "---:" for position in range(len(self.columns))]
        lines = [
            f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in (self.columns, *marked)
        ]
        lines.insert(1, f"|{'|'.join(dashes)}|")
        above = [self.title, ""] if self.title else []
        return [*above, *lines, *(["", self.caption] if self.caption else [])]

    def html(self) -> str:
        """A <table> with everything escaped; its title and caption are the <caption>."""
        words = " ".join(html.escape(part) for part in (self.title, self.caption) if part)
        head = "".join(f"<th>{html.escape(name)}</th>" for name in self.columns)
        body = "".join(f"<tr>{''.join(map(_html_cell, row))}</tr>\n" for row in self.rows)
        return (
            f'<div class="scroll"><table class="names{self.names}">\n'
            + (f"<caption>{words}</caption>\n" if words else "")
            + (f"<thead><tr>{head}</tr></thead>\n" if any(self.columns) else "")
            + f"<tbody>\n{body}</tbody></table></div>"
        )


def new_console() -> "rich.console.Console":
    """For printing text as it is and tables: as wide as the terminal, or as WIDTH."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, soft_wrap=True)
    return console if console.is_terminal else Console(width=WIDTH, highlight=False, markup=False, soft_wrap=True)


def _html_cell(cell: str) -> str:
    text = html.escape(cell)
    return f"<td><b>{text}</b></td>" if isinstance(cell, Bold) else f"<td>{text}</td>"
