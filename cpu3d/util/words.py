"""Lists, numbers and tables as pages, the terminal and the docs tell them."""

import datetime
from typing import Any, Iterable, List, Optional, Sequence


def listed(items: Iterable[Any]) -> str:
    """ "a, b and c"; one item alone as it is."""
    words = [str(item) for item in items]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def number(value: Optional[float], unit: float = 1) -> str:
    """Three digits of `value` in units of `unit`, and "-" for what is not known."""
    if value is None:
        return "-"
    return f"{value / unit:.3g}" if value / unit < 100 else f"{value / unit:,.0f}"


def plus_minus(mean: float, sd: Optional[float], digits: int) -> str:
    """ "0.912 ± 0.004", or the mean alone where there is no deviation."""
    return f"{mean:.{digits}f}" + ("" if sd is None else f" \u00b1 {sd:.{digits}f}")


def seconds(value: Optional[float]) -> str:
    """ "12.3 s", from 100 s on "0:02:03", and "-" for what is not known."""
    if value is None:
        return "-"
    return f"{value:.3g} s" if value < 99.95 else duration(value)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]], bold: Sequence[int] = ()) -> List[str]:
    """The lines of a table; the rows of these numbers are bold."""
    lines = [_row(header), "|" + "---|" * len(header)]
    for position, cells in enumerate(rows):
        lines.append(_row([f"**{cell}**" for cell in cells] if position in bold else cells))
    return lines


def duration(seconds: Any) -> str:
    """ "1:02:03", and "-" for nothing or what is not known."""
    return str(datetime.timedelta(seconds=round(seconds))) if seconds else "-"


# --- Private helpers ---


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
