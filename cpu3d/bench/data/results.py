"""What a row of `bench data` found: its lines, the targets they meet or miss, remarks. Plain values, kept as JSON."""

import statistics
from dataclasses import dataclass
from typing import Any, Dict, Optional, Sequence, Tuple

WARM, COLD = "warm", "cold"
"""Whether the files' pages were in memory before the work began, or had been dropped from it."""


@dataclass(frozen=True)
class Line:
    """One way to do a thing, and what it took."""

    name: str
    state: str
    """WARM, COLD or "" where pages play no part."""
    values: Tuple[float, ...]
    """One a round."""
    unit: str = "s"
    note: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def to_json(self) -> Dict[str, Any]:
        return {
            "name": self.name,
            "state": self.state,
            "unit": self.unit,
            "median": self.median,
            "min": min(self.values),
            "max": max(self.values),
            "n": len(self.values),
            "note": self.note,
        }


@dataclass(frozen=True)
class Target:
    """What a figure should come to."""

    name: str
    value: float
    rule: str
    """ ">=" or "<="."""
    bound: float
    unit: str = "x"
    mark: Optional[Tuple[str, str, float]] = None
    """Name and state of a line and the figure at which it would just meet the target; None where it is no line's."""

    @property
    def met(self) -> bool:
        return self.value >= self.bound if self.rule == ">=" else self.value <= self.bound

    def to_json(self) -> Dict[str, Any]:
        return {**vars(self), "met": self.met}


@dataclass(frozen=True)
class Outcome:
    """One row of the benchmark."""

    row: str
    title: str
    lines: Tuple[Line, ...]
    targets: Tuple[Target, ...] = ()
    notes: Tuple[str, ...] = ()

    def to_json(self) -> Dict[str, Any]:
        return {
            "row": self.row,
            "title": self.title,
            "lines": [line.to_json() for line in self.lines],
            "targets": [target.to_json() for target in self.targets],
            "notes": list(self.notes),
        }


def ratio(slow: Line, fast: Line) -> float:
    """How many times longer `slow` takes: the median over the rounds, which saw the same moments of the host."""
    if len(slow.values) == len(fast.values):
        return statistics.median(a / b for a, b in zip(slow.values, fast.values))
    return slow.median / fast.median


def times_slower(name: str, slow: Line, fast: Line, rule: str, bound: float) -> Target:
    """The target that `slow` takes at least, or at most, `bound` times as long as `fast`."""
    return Target(name, ratio(slow, fast), rule, bound, mark=(slow.name, slow.state, bound * fast.median))


def find(lines: Sequence[Line], name: str, state: str) -> Line:
    """The line of a name and state; LookupError where there is none."""
    for line in lines:
        if (line.name, line.state) == (name, state):
            return line
    raise LookupError(f"no line {name!r}, {state!r}")
