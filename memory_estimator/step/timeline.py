"""A training step as a list of operations that make and read tensors, and its live memory over
time.

A tensor lives from the operation that writes it to the last one that reads it.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

GRANULE_BYTES = 256  # TensorFlow's allocator rounds every request up to this


class Group(Enum):
    """What a tensor is held for: a line of the bill, or one for each level."""

    WEIGHTS = "weights"
    WEIGHTS_PARTS = "weights, parts"
    SLOTS = "optimizer slots"
    GRADIENTS = "gradients"
    GRADIENT_SUMS = "gradient sums"
    ACTIVATIONS = "activations"
    TRANSIENTS = "transients"
    SCRATCH = "scratch"
    INPUT = "input"
    NEXT_BATCH = "input pipeline, next batch"  # that a store holds ready


@dataclass(frozen=True)
class Tensor:
    """A buffer of the allocator."""

    name: str  # unique in its program, such as "decoder0_conv1" or "decoder0_conv1/filter_gradient"
    bytes: int
    group: Group
    level: Optional[int] = None  # that the group is split by

    @property
    def line(self) -> str:
        """The line of the bill that it counts under, such as "activations, level 0"."""
        if self.level is None:
            return self.group.value
        return f"{self.group.value}, level {self.level}"


@dataclass(frozen=True)
class NativeOperation:
    """A native operation in the terms of models/native/native.h, for its memory besides the
    maps."""

    kind: str  # of `models.native.shared.KINDS`
    batch: int
    grid: Tuple[int, int, int]  # voxels X, Y, Z; of two grids the coarser
    channels: int  # of the maps, those of two that are joined together
    outputs: int  # channels of the filters' output, or of the gradient
    value_bytes: int  # of a map: 2 is bfloat16
    # between two grids: voxels of the finer along X, Y, Z for one of the coarser
    strides: Tuple[int, int, int] = (1, 1, 1)


@dataclass(frozen=True)
class StepOp:
    """One operation of the step. Operations run one after the other, in the order of the
    program."""

    # unique in its program: the names of layer and operation, such as
    # "decoder0_conv1/filter_gradient"
    name: str
    kind: str  # of operations with the same costs: of `calibration.FEATURES`
    # names of tensors that must live until it is done; a tensor goes with its last reader
    reads: Tuple[str, ...] = ()
    writes: Tuple[Tensor, ...] = ()
    scratch: Tuple[Tensor, ...] = ()  # live during this operation alone
    takes_over: Optional[str] = None
    """A tensor it reads last and writes its result into: the first of `writes` then takes no new
    memory."""
    native: Optional[NativeOperation] = None  # None for TensorFlow's operations
    flops: int = 0  # multiply-adds counted as 2
    # bytes read and written, each tensor once: the least any implementation moves
    traffic_bytes: int = 0
    in_channels: int = 0
    out_channels: int = 0
    phase: str = ""  # of the step: "forward pass", "loss", "backward pass" or "update"
    graph_ops: int = 1  # so many operations of TensorFlow's graph, each with some memory

    @property
    def is_in_place(self) -> bool:
        """Whether it writes over the first tensor that it reads."""
        return bool(self.reads) and self.takes_over == self.reads[0]

    @property
    def taken(self) -> Tuple[Tensor, ...]:
        """The tensors that it takes memory for."""
        if self.takes_over:
            return self.writes[1:] + self.scratch
        return self.writes + self.scratch


@dataclass(frozen=True)
class Program:
    """A whole training step, and the operations before and after it."""

    # that live before, during and after the step: weights, slots, the input batch
    resident: Tuple[Tensor, ...]
    ops: Tuple[StepOp, ...]  # the step
    # run once to make the resident tensors, in an order that shapes the regions
    before: Tuple[StepOp, ...] = ()
    after: Tuple[StepOp, ...] = ()  # now and then between two steps: a validation
    # resident ones that are not in TensorFlow's allocator: samples
    outside: Tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class Timeline:
    """A step's memory."""

    # during each operation: outputs and scratch taken, nothing given back yet
    live_bytes: Tuple[int, ...]
    peak_op: str  # the operation that runs when most is live; the first of equals
    peak_tensors: Tuple[Tensor, ...]  # everything live then, the largest first
    peak_phase: str = ""  # of `peak_op`

    @property
    def peak_bytes(self) -> int:
        return max(self.live_bytes)


def rounded(size_bytes: int) -> int:
    """Bytes that the allocator counts for a request of so many, if it finds a chunk that fits."""
    return -(-size_bytes // GRANULE_BYTES) * GRANULE_BYTES


def timeline(program: Program) -> Timeline:
    """Live bytes of a step, from the second on. Raises ValueError if an operation reads a tensor
    that is gone."""
    live_bytes: List[int] = []
    peak_bytes = -1
    peak_op = program.ops[0]
    peak_tensors: List[Tensor] = []
    live = {tensor.name: tensor for tensor in program.resident}
    held = sum(rounded(tensor.bytes) for tensor in live.values())
    for op, freed in walk(program.ops, {tensor.name for tensor in program.resident}):
        missing = [name for name in op.reads if name not in live]
        if missing:
            rule = f"{op.name} must read tensors that are live"
            raise ValueError(f"{rule}, got {missing[0]}; correct the program")
        if op.takes_over:
            held -= rounded(live.pop(op.takes_over).bytes)
        for tensor in op.writes + op.scratch:
            live[tensor.name] = tensor
            held += rounded(tensor.bytes)
        if held > peak_bytes:
            peak_bytes = held
            peak_op = op
            peak_tensors = list(live.values())
        live_bytes.append(held)
        for name in freed:
            held -= rounded(live.pop(name).bytes)
    peak_tensors.sort(key=lambda tensor: -tensor.bytes)
    return Timeline(tuple(live_bytes), peak_op.name, tuple(peak_tensors), peak_op.phase)


class Turn(NamedTuple):
    """An operation's turn."""

    op: StepOp
    freed: List[str]  # names of those that give theirs back after it


def walk(ops: Sequence[StepOp], stays: Set[str]) -> List[Turn]:
    """The operations in order; tensors named in `stays` give nothing back."""
    last: Dict[str, int] = {}
    for index, op in enumerate(ops):
        for name in (*op.reads, *(tensor.name for tensor in op.writes)):
            last[name] = index
    gone: Dict[int, List[str]] = {}
    for name, index in last.items():
        if name not in stays:
            gone.setdefault(index, []).append(name)
    turns = []
    for index, op in enumerate(ops):
        freed = [tensor.name for tensor in reversed(op.scratch)]
        freed += [name for name in gone.get(index, ()) if name != op.takes_over]
        turns.append(Turn(op, freed))
    return turns


def kernel_made(kernel: Tensor) -> List[StepOp]:
    """Glorot's three operations in float32: numbers drawn, scaled, and shifted into place."""
    drawn, wide = (
        Tensor(f"{kernel.name}/{part}", kernel.bytes, kernel.group)
        for part in ("uniform", "scaled")
    )
    return [_made(drawn), _made(wide, drawn), _made(kernel, drawn, wide)]


def inputs_made(image: Tensor, target: Tensor, values: int) -> List[StepOp]:
    """The operations of `cpu3d.bench.step_costs.made_up`: an image of so many values is noise
    scaled and shifted, in float32 the image already; a target is numbers compared with one of them.
    Both are drawn, in four bytes a value, then both are cast, and the drawn ones go when that is
    done."""
    wide = [
        Tensor(f"{image.name}/{name}", 4 * values, image.group)
        for name in ("noise", "scaled", "shifted")
    ]
    noise, scaled, shifted = wide
    cast = [_made(image)]
    if image.bytes == 4 * values:
        shifted = image
        cast = []
    numbers = Tensor(f"{target.name}/drawn", 4 * target.bytes, target.group)
    hits = Tensor(f"{target.name}/hits", target.bytes, target.group)
    drawn = [_made(noise), _made(scaled, noise), _made(shifted, scaled, noise), _made(numbers)]
    done = StepOp("inputs made", "update", (shifted.name, numbers.name))
    return [*drawn, *cast, _made(hits), _made(target, hits), done]


def _made(written: Tensor, *read: Tensor) -> StepOp:
    return StepOp(written.name, "update", tuple(tensor.name for tensor in read), (written,))
