"""The rows of `bench data` for the terminal: every line of a row, losing ones too, then all targets."""

from typing import List, Sequence

from rich.markup import escape
from rich.table import Table

from cpu3d.bench.data.results import Line, Outcome


def outcome_table(outcome: Outcome) -> Table:
    """One row's lines, the fastest not put first: they stand as they were measured."""
    table = Table(title=escape(f"{outcome.row}: {outcome.title}"), title_justify="left", caption_justify="left")
    table.caption = escape("\n".join(outcome.notes)) or None
    for column in ("", "pages"):
        table.add_column(column)
    for column in ("median", "least to most", "n"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("")
    for line in outcome.lines:
        table.add_row(escape(line.name), line.state, *_figures(line), escape(line.note))
    return table


def targets_table(outcomes: Sequence[Outcome]) -> Table:
    """What was to be shown, and what was."""
    table = Table(title="Targets", title_justify="left")
    for column in ("row", "", "found", "target", ""):
        table.add_column(column, justify="right" if column in ("found", "target") else "left")
    for outcome in outcomes:
        for target in outcome.targets:
            found, bound = (f"{value:.3g} {target.unit}" for value in (target.value, target.bound))
            rule = "at least" if target.rule == ">=" else "at most"
            table.add_row(outcome.row, escape(target.name), found, f"{rule} {bound}", "met" if target.met else "MISSED")
    return table


def amount(value: float, unit: str) -> str:
    """For reading: seconds below one as ms, or as us below one of these."""
    if unit != "s":
        return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"
    for size, name in ((1, "s"), (1e-3, "ms")):
        if value >= size:
            return f"{value / size:.3g} {name}"
    return f"{value * 1e6:.0f} us"


# --- Private helpers ---


def _figures(line: Line) -> List[str]:
    spread = f"{amount(min(line.values), line.unit)} to {amount(max(line.values), line.unit)}"
    return [amount(line.median, line.unit), spread, str(len(line.values))]
