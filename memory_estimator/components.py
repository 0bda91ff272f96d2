"""The lines of the memory bill: what a process holds when the step is at its peak, grouped by cause."""

from dataclasses import dataclass
from typing import Dict, List, Sequence, Tuple

from memory_estimator.liveness import Timeline, rounded
from memory_estimator.program import Tensor


@dataclass(frozen=True)
class Component:
    """One line of the memory bill."""

    name: str
    """Such as "optimizer slots"."""
    bytes: int
    source: str
    """How it is known: "exact", "derived: " and the rule, or "measured: " and where."""


RULES: Tuple[Tuple[str, str], ...] = (
    ("weights", "exact: float32"),
    ("weights,", "exact: copies that the convolutions read"),
    ("optimizer slots", "exact: float32 copies of the trainable weights"),
    ("averaged weights", "exact: a float32 copy of the trainable weights"),
    ("gradients", "exact: float32, one a trainable weight that has it by then"),
    ("activations", "derived: the maps that a gradient still reads"),
    ("transients", "derived: the maps on their way down the backward pass"),
    ("scratch", "derived: oneDNN's buffers for this operation"),
    ("input", "exact: images in the compute dtype, targets in one byte"),
)
"""Groups of tensors by how their names begin, in the order of the bill, and how each is known. The longest fits."""


def bill(
    line: Timeline, *, overhead_bytes: int, hidden_bytes: int, baseline_bytes: int, baseline: str
) -> List[Component]:
    """Every byte of the process's peak, once: the tensors live at the peak by group, then what lies around them.

    `baseline` says where `baseline_bytes` come from. Lines of nothing are left out.
    """
    groups: Dict[str, List[Tensor]] = {}
    for tensor in line.peak_tensors:
        groups.setdefault(tensor.group, []).append(tensor)
    lines = [
        Component(group, sum(rounded(tensor.bytes) for tensor in groups[group]), _source(group, groups[group]))
        for group in sorted(groups, key=_place)
    ]
    lines += [
        Component("scratch outside the allocator", hidden_bytes, "derived: oneDNN's buffers, at their largest"),
        Component("allocator overhead", overhead_bytes, "derived: TensorFlow's allocator replayed"),
        Component("runtime baseline", baseline_bytes, baseline),
    ]
    return [component for component in lines if component.bytes]


# --- Private helpers ---


def _rule(group: str) -> int:
    starts = [(len(start), index) for index, (start, _) in enumerate(RULES) if group.startswith(start)]
    return max(starts, default=(0, len(RULES)))[1]


def _place(group: str) -> Tuple[int, str]:
    return _rule(group), group


def _source(group: str, tensors: Sequence[Tensor]) -> str:
    """The group's rule; for what lives during few operations alone, the tensors as well."""
    index = _rule(group)
    rule = RULES[index][1] if index < len(RULES) else "derived"
    if not group.startswith(("transients", "scratch")):
        return rule
    names = [tensor.name for tensor in sorted(tensors, key=lambda tensor: -tensor.bytes)]
    return f"{rule}: {', '.join(names[:3])}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")
