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


NEXT_BATCH = "input pipeline, next batch"
"""The group of what a store holds ready."""

RULES: Dict[str, str] = {
    "weights": "exact: float32",
    "weights, bfloat16 copies": "exact: copies that the convolutions read",
    "weights, parts": "exact: copies that convolutions of one of two joined maps read",
    "weights, reordered": "exact: copies that the convolutions read",
    "optimizer slots": "exact: float32 copies of the trainable weights",
    "averaged weights": "exact: a float32 copy of the trainable weights",
    "gradients": "exact: float32, one a trainable weight that has it by then",
    "gradient sums": "exact: a float32 copy of the trainable weights, for the micro-batches of a step",
    "activations": "derived: the maps that a gradient still reads",
    "transients": "derived: the maps on their way down the backward pass",
    "scratch": "derived: oneDNN's buffers for this operation",
    "input": "exact: images in the compute dtype, targets in one byte",
    NEXT_BATCH: "exact: images in the compute dtype, targets in one byte",
}
"""The groups that a `Tensor.group` may name, in the order of the bill, and how each is known. A group may be told apart
by level, as in "activations, level 0"."""

NAMED_SINGLY = ("transients", "scratch")
"""Groups that live during few operations alone: the bill says which tensors they are."""


def resident_bytes(tensor: Tensor) -> int:
    """What of a tensor lies in memory: all of it, but for scratch that is written in part."""
    return sum(last - first for first, last in tensor.touched) if tensor.touched else rounded(tensor.bytes)


def bill(
    line: Timeline, *, overhead_bytes: int, hidden_bytes: int, baseline_bytes: int, baseline: str
) -> List[Component]:
    """Every byte of the process's peak, once: the tensors live at the peak by group, then what lies around them.

    `baseline` says where `baseline_bytes` come from. Lines of nothing are left out.
    Raises ValueError for a tensor of no declared group.
    """
    groups: Dict[str, List[Tensor]] = {}
    for tensor in line.peak_tensors:
        groups.setdefault(tensor.group, []).append(tensor)
    lines = [
        Component(group, sum(map(resident_bytes, groups[group])), _source(group, groups[group]))
        for group in sorted(groups, key=_place)
    ]
    lines += [
        Component("scratch outside the allocator", hidden_bytes, "derived: oneDNN's buffers, at their largest"),
        Component("allocator overhead", overhead_bytes, "derived: TensorFlow's allocator replayed"),
        Component("runtime baseline", baseline_bytes, baseline),
    ]
    return [component for component in lines if component.bytes]


# --- Private helpers ---


def _rule(group: str) -> str:
    """The key of RULES. Raises ValueError for a group that is not declared: it would stand unexplained on the bill."""
    rule = group.partition(", level ")[0]
    if rule not in RULES:
        raise ValueError(f"group must be one of {', '.join(RULES)}, got {group!r}; declare it in components.RULES")
    return rule


def _place(group: str) -> Tuple[int, str]:
    return list(RULES).index(_rule(group)), group


def _source(group: str, tensors: Sequence[Tensor]) -> str:
    """The group's rule; for what lives during few operations alone, the tensors as well."""
    rule = RULES[_rule(group)]
    if group not in NAMED_SINGLY:
        return rule
    names = [tensor.name for tensor in sorted(tensors, key=lambda tensor: -tensor.bytes)]
    return f"{rule}: {', '.join(names[:3])}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")
