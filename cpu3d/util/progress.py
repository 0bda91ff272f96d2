"""Printing of a command: lines, and on stderr one progress bar for everything that takes long."""

import contextlib
from typing import Callable, Iterator, List, Optional, Tuple

from rich import progress
from rich.console import Console

_shown: List[progress.Progress] = []  # the bars that are shown now


def say(*lines: str, stderr: bool = True) -> None:
    """Print lines as they are: not wrapped, nothing in them taken for markup or a smiley, as `:b:`
    in an address."""
    console = Console(stderr=stderr)
    if stderr and _shown:
        console = _shown[-1].console  # which prints above its bar
    for line in lines:
        console.print(line, emoji=False, highlight=False, markup=False, soft_wrap=True)


def columns(
    *more: progress.ProgressColumn, left: Optional[progress.ProgressColumn] = None
) -> Tuple[progress.ProgressColumn, ...]:
    """The columns of every bar, with `more` before the times; `left`, by default, follows from the
    last half minute."""
    return (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        *more,
        progress.TimeElapsedColumn(),
        progress.TextColumn("left"),
        left or progress.TimeRemainingColumn(),
    )


@contextlib.contextmanager
def bar(description: str, total: int) -> Iterator[Callable[..., None]]:
    """Show a bar on stderr and yield `advance(steps=1)`.

    If stderr is no terminal, only the final state is printed, so that a log file holds one line and
    not thousands.

        with bar("prepare", total=3) as advance:
            advance()
    """
    with progress.Progress(*columns(), console=Console(stderr=True)) as shown:
        task = shown.add_task(description, total=total)
        _shown.append(shown)
        try:
            yield lambda steps=1: shown.advance(task, steps)
        finally:
            _shown.remove(shown)
