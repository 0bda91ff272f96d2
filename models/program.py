"""What a training step does, as data: lists of operations, in the order in which they run. No
TensorFlow.

models/network.py writes those of a network's forward and backward pass, `loss_program` those of a
loss. Whoever needs the step reads the lists through a table from kind to function: models/step.py
computes them, models/layer_plan.py makes Keras' layers of them, and the memory estimator adds up
bytes, scratch, multiply-adds and seconds (memory_estimator/step/training_step.py).
"""

from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Optional, Sequence, Tuple


class Kind(Enum):
    """What an operation does. Those of native operations are named as in models/native/native.h."""

    # 3x3x3 convolutions of maps side by side, plus `add`
    CONVOLVE = "convolve"
    INPUT_GRADIENT = "input_gradient"  # with `maps`, those sums that the norm of the map needs too
    FILTER_GRADIENT = "filter_gradient"
    # between the grids of two levels
    MAX_POOL = "max_pool"
    MAX_POOL_GRADIENT = "max_pool_gradient"  # plus `add`, the gradient that comes from the skip
    UP_CONVOLVE = "up_convolve"
    UP_INPUT_GRADIENT = "up_input_gradient"
    UP_FILTER_GRADIENT = "up_filter_gradient"
    # voxel by voxel: a head, or a block's shortcut
    PROJECT = "project"  # plus `add`
    PROJECT_GRADIENT = "project_gradient"  # of the map, plus `add`, and of the kernel
    PROJECT_SUMS = "project_sums"  # of the kernel, and the sums that the norm of the map needs
    PROJECT_TO_RAW = "project_to_raw"  # of the raw sum of the map
    RESIDUAL_SUM = "residual_sum"
    RESIDUAL_GRADIENT = "residual_gradient"  # of both terms, from that of `maps[1]`, their sum
    NORM_GRADIENT = "norm_gradient"  # through norm and ReLU, to be formed on reading: no memory
    TO_RAW = "to_raw"  # that, as a map of its own
    ADD = "add"  # two gradients of one map
    # by TensorFlow: models/plain.py
    PLAIN = "plain"
    PLAIN_GRADIENT = "plain_gradient"  # of each map
    # kernels
    KERNEL_ROWS = "kernel_rows"  # those channels of a kernel that one of several maps meets
    KERNEL_TAPS = "kernel_taps"  # those of a 1x1x1 kernel, for each voxel of an up-sampled one
    JOIN_GRADIENTS = "join_gradients"  # of the parts of a kernel
    # the loss
    LOSS_SUMS = "loss_sums"  # a few numbers
    LOSS_SLOPE = "loss_slope"  # the gradient of the logits


class ValueKind(Enum):
    """What a value is."""

    MAP = "map"  # of a layer: its raw sum, with its norm if it has one
    GRADIENT = "gradient"  # of a map's values
    FORMED_GRADIENT = "formed gradient"  # of a raw sum: what it is formed of on reading
    RAW_GRADIENT = "raw gradient"  # of a raw sum
    KERNEL = "kernel"
    KERNEL_GRADIENT = "kernel gradient"
    NUMBERS = "numbers"


@dataclass(frozen=True)
class Value:
    """What an operation reads or makes."""

    name: str  # unique in its program, such as "decoder0_conv1" or "decoder0_conv1/gradient"
    kind: ValueKind
    level: int = 0  # of the grid of a map or gradient; 0 is the finest, or IMAGE_LEVEL
    channels: int = 0  # of a map or gradient; of a kernel's part those that it has of `span`
    layer: str = ""  # of a whole kernel, the layer that has it


@dataclass(frozen=True)
class Op:
    """One operation. Gradients of norms and biases are made beside the others, and not listed."""

    kind: Kind
    layer: str  # of models/layer_plan.py, whose weights it reads or whose gradient it makes
    makes: Tuple[Value, ...]
    maps: Tuple[Value, ...] = ()
    gradient: Optional[Value] = None
    add: Optional[Value] = None
    kernel: Optional[Value] = None
    over: Tuple[Value, ...] = ()
    """Values that it reads: the result takes the memory of the first that no later operation
    reads and that is as large."""
    kept: bool = False  # whether the result is kept for the backward pass
    again: bool = False  # whether it was made before: batch norm's statistics do not move twice
    block: str = ""  # that it belongs to, such as "encoder0"; "" for heads and between two levels
    norm: str = ""  # of a convolution, the layer that follows it
    has_relu: bool = False  # whether that layer ends in a ReLU: not before a residual's sum
    parts: Tuple[Value, ...] = ()  # of JOIN_GRADIENTS
    plain: str = ""  # of PLAIN and its gradient, the name in models/plain.py
    strides: Tuple[int, int, int] = (1, 1, 1)
    """Between the grids of two levels: voxels of the finer one along X, Y, Z for one of the
    coarser."""
    span: Tuple[int, int] = (0, 0)
    """Of a kernel's part, or of its gradient: the first of its channels, and the one past them."""

    @property
    def made(self) -> Value:
        return self.makes[0]

    @property
    def reads(self) -> Tuple[Value, ...]:
        """All values that it reads; first the map, or the gradient, that is computed with."""
        gradient = given(self.gradient)
        others = (*self.parts, *given(self.add, self.kernel))
        if self.kind in (Kind.INPUT_GRADIENT, Kind.UP_INPUT_GRADIENT):
            return (*gradient, *self.maps, *others)
        return (*self.maps, *gradient, *others)


@dataclass(frozen=True)
class NetworkProgram:
    """A network's operations."""

    image: Value
    logits: Tuple[Value, ...]  # of each head, the finest first
    slopes: Tuple[Value, ...]  # the gradients of the loss by them
    forward: Tuple[Op, ...]
    backward: Tuple[Op, ...]
    to_image: Tuple[Op, ...]  # the image's gradient, last; training does not ask for it
    kernel_gradients: Tuple[Tuple[str, Value], ...]  # of each layer with a kernel


TARGET = Value("target", ValueKind.NUMBERS)  # what a loss compares logits with


class LossProgram(NamedTuple):
    """A loss's operations, one for each head."""

    sums: Tuple[Op, ...]
    slopes: Tuple[Op, ...]  # the gradients of the logits, from what is made of the sums


def loss_program(logits: Sequence[Value]) -> LossProgram:
    """A loss of the logits of each head: the sums of all heads, one after the other; and then
    their gradients, each over the logits themselves."""
    sums = []
    slopes = []
    for head in logits:
        name = head_of(head.level)
        maps = (head, TARGET)
        numbers = Value(f"{name}/loss_sums", ValueKind.NUMBERS, head.level)
        sums.append(Op(Kind.LOSS_SUMS, name, (numbers,), maps))
        slopes.append(Op(Kind.LOSS_SLOPE, name, (slope_of(head),), maps, over=(head,)))
    return LossProgram(tuple(sums), tuple(slopes))


def kernel_of(layer: str) -> Value:
    return Value(f"{layer}/kernel", ValueKind.KERNEL, layer=layer)


def slope_of(logits: Value) -> Value:
    """The gradient of a loss by the logits of a head."""
    name = f"{head_of(logits.level)}/slope"
    return Value(name, ValueKind.RAW_GRADIENT, logits.level, logits.channels)


def given(*values: Optional[Value]) -> Tuple[Value, ...]:
    """Those of some values that are there."""
    return tuple(value for value in values if value is not None)


def needed(value: Optional[Value]) -> Value:
    """What every operation of a kind has, such as the gradient of FILTER_GRADIENT."""
    if value is None:
        raise ValueError("an operation must have all values of its kind, got one without; add it")
    return value


def head_of(level: int) -> str:
    """The layer that makes the logits of a level."""
    return f"head{level}" if level > 0 else "head"


class UniqueNames:
    """Names that are given once each: the second of one name ends in /2."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def unique(self, name: str) -> str:
        self._counts[name] += 1
        count = self._counts[name]
        return name if count == 1 else f"{name}/{count}"
