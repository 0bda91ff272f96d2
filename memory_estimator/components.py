"""The lines of the memory bill: one pure function each. Bytes of one process, from the plan on paper."""

from dataclasses import dataclass
from typing import Dict, List, Sequence, Tuple

from models.config import UNetConfig
from models.layer_plan import LayerOp, layer_plan

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}

OPTIMIZER_SLOTS = {"sgd": 1, "adam": 2}
"""Float32 copies of every weight that the optimizer keeps: momentum; mean and variance of the gradient."""

READS_INPUT = ("conv", "head", "up_conv", "norm", "norm_act", "pool")
"""Layers whose gradient reads what they were given: convolutions for the filter, norms, the pool for its winners."""

READS_OUTPUT = ("act", "norm_act")
"""Layers whose gradient reads what they gave: ReLU passes where its output is positive."""


@dataclass(frozen=True)
class Component:
    """One line of the memory bill."""

    name: str
    """Such as "optimizer slots"."""
    bytes: int
    source: str
    """ "exact", or "derived: " and the rule."""


def weight_bytes(plan: Sequence[LayerOp]) -> Component:
    """The weights, moving statistics included, in float32 whatever the network computes in. Exact."""
    return Component("weights", 4 * sum(op.trainable + op.frozen for op in plan), "exact")


def gradient_bytes(plan: Sequence[LayerOp]) -> Component:
    """One float32 gradient a trainable weight, all held until the optimizer applies them. Exact."""
    return Component("gradients", 4 * sum(op.trainable for op in plan), "exact")


def optimizer_bytes(plan: Sequence[LayerOp], optimizer: str) -> Component:
    """What the optimizer keeps between steps. Excludes its step counter (8 bytes) and any averaged weights."""
    slots = OPTIMIZER_SLOTS[optimizer]
    return Component("optimizer slots", 4 * slots * sum(op.trainable for op in plan), "exact")


def activation_bytes(plan: Sequence[LayerOp], batch: int) -> List[Component]:
    """Maps kept from the forward pass for the backward pass, a line a level.

    Excludes what lives only during one op: its scratch, the gradients on their way down, the loss.
    """
    # Without a norm, "norm_act" is a bare ReLU, whose gradient reads its output alone.
    bare = {op.name for op in plan if op.kind == "norm_act" and not op.trainable}
    read = {name for op in plan if op.kind in READS_INPUT and op.name not in bare for name in op.inputs}
    levels: Dict[int, int] = {}
    for op in plan:
        kept = op.kind != "input" and (op.name in read or op.kind in READS_OUTPUT)
        levels[op.level] = levels.get(op.level, 0) + batch * kept * map_bytes(op)
    rule = "derived: the maps that some gradient reads"
    return [Component(f"activations, level {level}", size, rule) for level, size in sorted(levels.items())]


def input_bytes(config: UNetConfig, shape: Tuple[int, int, int], batch: int) -> Component:
    """The batch in use and the one ahead: images in the compute dtype, targets in one byte an output."""
    voxels = batch * shape[0] * shape[1] * shape[2]
    size = 2 * voxels * (config.channels * DTYPE_BYTES[config.dtype] + config.outputs)
    return Component("input batches", size, "derived: two batches")


def map_bytes(op: LayerOp) -> int:
    """One sample's output of a layer."""
    return op.elements * DTYPE_BYTES[op.dtype]


def bill(config: UNetConfig, shape: Tuple[int, int, int], *, batch: int, optimizer: str) -> List[Component]:
    """Everything that is held at the end of the forward pass. The step's peak is higher: see `activation_bytes`."""
    plan = layer_plan(config, shape)
    return [
        weight_bytes(plan),
        gradient_bytes(plan),
        optimizer_bytes(plan, optimizer),
        *activation_bytes(plan, batch),
        input_bytes(config, shape, batch),
    ]
