"""Are these the arguments of a dataset? Everything that is wrong with them at once, before a file is opened."""

import numbers
from typing import Any, Callable, List, Optional, Sequence

from cpu3d.data.extent import grid_size
from cpu3d.data.region import Shape3
from cpu3d.data.sharding import ALL, Share
from cpu3d.data.store import Store
from cpu3d.data.words import by
from cpu3d.errors import InputError


class Checks:
    """Gathers what several checks refuse, so that one InputError tells it all."""

    def __init__(self):
        self._problems: List[str] = []

    def of(self, check: Callable, *arguments: Any, **named: Any) -> Any:
        """What `check` returns; None where it raises InputError, which is kept for `done`."""
        try:
            return check(*arguments, **named)
        except InputError as error:
            self._problems.extend(problem for problem in error.problems if problem not in self._problems)
            return None

    def done(self) -> None:
        """Raise InputError unless all was well."""
        if self._problems:
            raise InputError(*self._problems)


def check_stream(
    *,
    start: int,
    stop: Optional[int],
    seed: int,
    batch: int,
    threads: int,
    page_budget_bytes: Optional[int],
    share: Share = ALL,
) -> None:
    """Raise InputError unless these are integers in their ranges, and the stream one that `share` can deal."""
    least = {"start": (start, 0), "batch": (batch, 1), "threads": (threads, 1)}
    if stop is not None:
        least["stop"] = (stop, 0)
    if page_budget_bytes is not None:
        least["page_budget_bytes"] = (page_budget_bytes, 0)
    problems = [
        f"{name} must be an integer of at least {low}, got {value!r}; give another"
        for name, (value, low) in least.items()
        if not is_integer(value) or value < low
    ]
    if not is_integer(seed):
        problems.append(f"seed must be an integer, got {seed!r}; give another")
    problems = problems or share.problems(start=start, stop=stop, batch=batch)
    if problems:
        raise InputError(*problems)


def volume_size(store: Store, grid: Optional[Sequence[int]], *, extent: str, multiple: int) -> Shape3:
    """The size of every volume: `grid`, or what holds all cases. Raises InputError for a grid that would lose voxels.

    What a grid must hold is the largest brain's box with extent "brain" and the largest grid with "full".
    """
    fitting = grid_size(store, extent=extent, multiple=multiple)
    if grid is None:
        return fitting
    least = grid_size(store, extent=extent, multiple=1)
    size = tuple(grid)
    if len(size) != 3 or not all(map(is_integer, size)) or any(n < m for n, m in zip(size, least)):
        what = "brain's box" if extent == "brain" else "grid"
        raise InputError(
            f"grid must be three integers of at least {by(least)}, the largest {what} of the store, got {by(size)};"
            f" give {by(fitting)}, or take patches (patch_dataset)"
        )
    return size


def is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
