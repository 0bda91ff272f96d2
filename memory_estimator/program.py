"""A training step as a list of operations that make and read tensors: what both engines of the estimator produce.

The closed form (`training_step.py`, rules in closed_form/) writes it down from the layer plan, the replay (replay/)
reads it off a traced graph. `liveness.py` turns it into memory over time, `timing.py` into seconds.
"""

from dataclasses import dataclass
from typing import Optional, Tuple


@dataclass(frozen=True)
class Tensor:
    """A buffer of the allocator."""

    name: str
    """Unique in its program, such as "decoder0_conv1" or "decoder0_conv1/filter_gradient"."""
    bytes: int
    group: str
    """The line of the bill it counts under, such as "activations, level 0"."""
    touched: Tuple[Tuple[int, int], ...] = ()
    """Where bytes are written, as (first, past the last) offsets; () is everywhere. No other page becomes resident."""


@dataclass(frozen=True)
class StepOp:
    """One operation of the step. Operations run one after the other, in the order of the program."""

    name: str
    """Unique in its program: the layer's name and what is done, such as "decoder0_conv1/filter_gradient"."""
    kind: str
    """What decides its speed: one of KINDS."""
    reads: Tuple[str, ...] = ()
    """Names of tensors that must live until it is done. A tensor goes with the last operation that reads it."""
    writes: Tuple[Tensor, ...] = ()
    scratch: Tuple[Tensor, ...] = ()
    """Live during this operation alone, taken after its outputs."""
    takes_over: Optional[str] = None
    """A tensor it reads last and writes its result into: the first of `writes` then takes no new memory."""
    keeps: Tuple[Tensor, ...] = ()
    """Taken when the operation runs for the first time and never given back: weights in the layout oneDNN prefers."""
    hidden_bytes: int = 0
    """Scratch outside the allocator: in the process's memory, not in the allocator's count."""
    flops: int = 0
    """Multiply-adds counted as 2."""
    traffic_bytes: int = 0
    """Bytes read and written, each tensor once: the least any implementation moves."""
    in_channels: int = 0
    out_channels: int = 0


KINDS = (
    "conv",
    "conv_filter_gradient",
    "conv_input_gradient",
    "up_conv",
    "up_conv_filter_gradient",
    "up_conv_input_gradient",
    "norm",
    "norm_gradient",
    "narrow_norm",
    "narrow_norm_gradient",
    "pool",
    "pool_gradient",
    "join",
    "slice",
    "pointwise",
    "reduce",
    "bias_gradient",
    "update",
)
"""Kinds of operations, by what limits their speed."""


@dataclass(frozen=True)
class Program:
    """A whole training step, and what was made before it."""

    resident: Tuple[Tensor, ...]
    """What lives before, during and after the step: weights, slots, the input batch."""
    ops: Tuple[StepOp, ...]
    """The step."""
    before: Tuple[StepOp, ...] = ()
    """What ran once to make the resident tensors; a resident tensor that none of these writes is simply there. The
    order matters to the allocator alone, whose regions it shapes."""
    region_bytes: int = 0
    """Taken in one piece before all else and given back at once, so that the allocator has a region of this size."""
    after: Tuple[StepOp, ...] = ()
    """What runs between two steps now and then: a validation. Its `keeps` are other tensors than those of `ops`."""
