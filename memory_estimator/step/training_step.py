"""The training step as a list of operations: those of models/program.py and the update, with the
bytes of their tensors, their multiply-adds and their traffic.

Forward, loss, backward, update. For a batch in micro-batches the program is one of them, and the
update. A validation is the forward part alone, and its scores.
"""

import math
from dataclasses import replace
from typing import Any, Callable, Dict, Optional, Sequence, Tuple

from memory_estimator.job import Job
from memory_estimator.step.timeline import Group, NativeOperation, Program, StepOp
from memory_estimator.step.update import reset_sums, update
from memory_estimator.step.writer import Writer
from models.network import network_program
from models.plain import PLAIN
from models.program import Kind, NetworkProgram, Op, Value, ValueKind, loss_program, needed

COSTS = {
    Kind.CONVOLVE: "convolve",
    Kind.INPUT_GRADIENT: "input_gradient",
    Kind.FILTER_GRADIENT: "filter_gradient",
    Kind.UP_CONVOLVE: "up",
    Kind.UP_INPUT_GRADIENT: "up",
    Kind.UP_FILTER_GRADIENT: "up",
    Kind.PROJECT: "project",
    Kind.PROJECT_GRADIENT: "project",
    Kind.PROJECT_SUMS: "project",
    Kind.PROJECT_TO_RAW: "project",
    Kind.LOSS_SUMS: "loss",
    Kind.LOSS_SLOPE: "loss",
}
"""Kinds of operations whose work counts -> what they cost, of `calibration.FEATURES`; the others
pass over maps."""
TAPS = {"pass": 0, "project": 1, "up": 1}
"""Of filters for a voxel of the finer grid, by the kind of costs; others have 27."""
SCORED_SLABS = 8  # of X: so many parts of a held-out volume are painted, one after the other
SLAB_MAPS = 2  # of one, in float32: logits and probabilities


def training_step(job: Job) -> Program:
    """The program of `job`. Raises ValueError for a shape that the network cannot take."""
    writer = Writer(job)
    reset_sums(writer)
    step = StepWriter(writer)
    network = step.network
    step.write(network.forward)
    writer.phase = "loss"
    for ops in loss_program(network.logits):
        step.write(ops)
    writer.phase = "backward pass"
    step.write(_needed_backward(network, [op.name for op in writer.trained_kernels]))
    writer.phase = "update"
    update(writer, step.kernel_gradients())
    return writer.program()


def validation_pass(job: Job) -> Tuple[StepOp, ...]:
    """The operations of `cpu3d.training.validation` on a volume or window: the network forward, and
    the scores. Besides the resident tensors, the held-out volume that comes next is ready."""
    unet = replace(job.unet, deep_supervision=False)
    writer = Writer(replace(job, unet=unet, batch=1, micro_batch=1))
    ready = [
        writer.tensor(f"validation/{tensor.name}", tensor.bytes, Group.INPUT)
        for tensor in writer.resident[-2:]
    ]
    writer.run("validation/next", "pass", [], ready)
    step = StepWriter(writer, keeps=False)
    network = step.network
    step.write(network.forward)
    (logits,) = network.logits
    values = writer.job.voxels * logits.channels
    slab = writer.tensor("validation/slab", SLAB_MAPS * 4 * values // SCORED_SLABS)
    reads = [*step.tensors(logits), "target", *(tensor.name for tensor in ready)]
    writer.run("validation/paint", "pass", reads, scratch=(slab,))
    step.write(loss_program(network.logits).sums)
    return writer.program().ops


def costs_of(kind: Kind) -> str:
    """What a kind of operations costs, of `calibration.FEATURES`."""
    return COSTS.get(kind, "pass")


def _needed_backward(network: NetworkProgram, trained: Sequence[str]) -> Sequence[Op]:
    """The backward pass up to the last kernel gradient of a layer that learns. Each operation waits
    for the one before, so nothing before that is left out."""
    wanted = {gradient for layer, gradient in network.kernel_gradients if layer in trained}
    last = max(index for index, op in enumerate(network.backward) if wanted & set(op.makes))
    return network.backward[: last + 1]


class StepWriter:
    """Writes a network's operations down."""

    def __init__(self, writer: Writer, keeps: bool = True):
        """Whether maps are kept for a backward pass."""
        self.writer = writer
        self.job = writer.job
        self.network: NetworkProgram = network_program(writer.job.unet)
        self.keeps = keeps
        unet = self.job.unet
        # Voxels X, Y, Z of each level.
        levels = (unet.image_level, *range(unet.depth))
        self.grids = {level: unet.grid(self.job.shape, level) for level in levels}
        self._tensors: Dict[Value, Tuple[str, ...]] = {self.network.image: ("image",)}

    def write(self, ops: Sequence[Op]) -> None:
        for op in ops:
            WRITE[op.kind](self, op)

    def kernel_gradients(self) -> Dict[str, str]:
        """Layer -> the tensor of its kernel's gradient."""
        gradients = self.network.kernel_gradients
        return {layer: self.tensors(gradient)[0] for layer, gradient in gradients}

    def tensors(self, value: Value) -> Tuple[str, ...]:
        """The names of the tensors that a value is in: of a gradient that is formed on reading
        there are two."""
        return self._tensors.get(value, (value.name,))

    def stands_in(self, value: Value, tensors: Tuple[str, ...]) -> None:
        self._tensors[value] = tensors

    def make(self, op: Op, value: Value, size_bytes: int, group: Group, **more: Any) -> None:
        """An operation that makes one value; `more` as of `Writer.make`."""
        options = {
            "kind": costs_of(op.kind),
            "reads": [tensor for read in op.reads for tensor in self.tensors(read)],
            "over": [self.tensors(each)[0] for each in op.over],
            **more,
        }
        made = self.writer.make(value.name, size_bytes=size_bytes, group=group, **options)
        self.stands_in(value, (made,))

    def make_map(self, op: Op, native: Optional[NativeOperation]) -> None:
        """An operation that makes a map or its gradient."""
        more: Dict[str, Any] = self.counts(op, self.read_channels(op), op.made.channels)
        group = Group.TRANSIENTS
        if op.kept and self.keeps:
            group = Group.ACTIVATIONS
            more["level"] = op.made.level
        self.make(op, op.made, self.map_bytes(op.made), group, native=native, **more)

    def make_kernel_gradient(self, op: Op, value: Value, **more: Any) -> None:
        """A whole kernel's gradient without multiply-adds: the operation beside it has them, or
        there are none."""
        size = 4 * self.writer.layers[op.layer].kernel_elements
        self.make(op, value, size, Group.GRADIENTS, **more)

    def read_channels(self, op: Op) -> int:
        """Channels that the filters of an operation meet: of all joined maps, else of the first
        that it reads."""
        if op.kind is Kind.CONVOLVE:
            return sum(each.channels for each in op.maps)
        return op.reads[0].channels

    def counts(self, op: Op, inputs: int, outputs: int) -> Dict[str, int]:
        """Of a `StepOp`: multiply-adds, as 2, on the coarser grid, and channels."""
        products = 0
        if op.kernel is not None or op.made.kind is ValueKind.KERNEL_GRADIENT:
            taps = TAPS.get(costs_of(op.kind), 27) * math.prod(op.strides)
            products = taps * self.job.micro * math.prod(self._grid(op)) * inputs * outputs
        return {"flops": 2 * products, "in_channels": inputs, "out_channels": outputs}

    def native(self, op: Op, channels: int, outputs: int) -> NativeOperation:
        return NativeOperation(
            kind=op.kind.value,
            batch=self.job.micro,
            grid=self._grid(op),
            channels=channels,
            outputs=outputs,
            value_bytes=self.writer.value_bytes,
            strides=op.strides,
        )

    def map_bytes(self, made: Value, value_bytes: int = 0) -> int:
        voxels = self.job.micro * math.prod(self.grids[made.level])
        return voxels * made.channels * (value_bytes or self.writer.value_bytes)

    def _grid(self, op: Op) -> Tuple[int, int, int]:
        """The grid of what it computes with and of what it makes; of two the coarser."""
        made = op.made
        if made.kind is ValueKind.KERNEL_GRADIENT:
            made = needed(op.gradient)
        return self.grids[max(op.reads[0].level, made.level)]


# --- Operations: forward and backward ---


def _write_map(step: StepWriter, op: Op) -> None:
    step.make_map(op, step.native(op, step.read_channels(op), op.made.channels))


def _write_input_gradient(step: StepWriter, op: Op) -> None:
    step.make_map(op, step.native(op, op.made.channels, needed(op.gradient).channels))


def _write_project_gradient(step: StepWriter, op: Op) -> None:
    _write_input_gradient(step, op)
    # The gradients of a kernel's parts are padded and added up.
    kernel_gradient = op.makes[1]
    size = 4 * step.writer.layers[op.layer].kernel_elements
    name = step.writer.make(kernel_gradient.name, "pass", [], size, Group.GRADIENTS)
    step.stands_in(kernel_gradient, (name,))


def _write_project_to_raw(step: StepWriter, op: Op) -> None:
    # The raw gradient is formed from the slope, and the map.
    slope, _ = step.tensors(needed(op.gradient))
    native = step.native(op, op.made.channels, step.network.logits[0].channels)
    counts = step.counts(op, op.made.channels, op.made.channels)
    reads = [*step.tensors(op.maps[0]), slope, *step.tensors(needed(op.kernel))]
    size = step.map_bytes(op.made)
    step.make(op, op.made, size, Group.TRANSIENTS, reads=reads, native=native, **counts)


def _write_project_sums(step: StepWriter, op: Op) -> None:
    sums, kernel_gradient = op.makes
    slope = needed(op.gradient)
    step.stands_in(sums, step.tensors(slope))
    (source,) = op.maps
    native = step.native(op, source.channels, slope.channels)
    reads = [*step.tensors(source), *step.tensors(slope)]
    step.make_kernel_gradient(op, kernel_gradient, reads=reads, native=native)


def _write_norm_gradient(step: StepWriter, op: Op) -> None:
    (source,) = op.maps
    step.stands_in(op.made, (*step.tensors(needed(op.gradient)), *step.tensors(source)))


def _write_add(step: StepWriter, op: Op) -> None:
    step.make_map(op, native=None)


def _write_filter_gradient(step: StepWriter, op: Op) -> None:
    layer = step.writer.layers[op.layer]
    inputs = sum(each.channels for each in op.maps)
    outputs = needed(op.gradient).channels
    whole = layer.in_channels * layer.shape[3]
    size = 4 * layer.kernel_elements * inputs * outputs // whole
    counts = step.counts(op, inputs, outputs)
    step.make(op, op.made, size, Group.GRADIENTS, native=step.native(op, inputs, outputs), **counts)


def _write_plain(step: StepWriter, op: Op) -> None:
    """By TensorFlow, so with a bound of what it takes on the way."""
    plain = PLAIN[op.plain]
    value_bytes = 4 if plain.in_float32 else step.writer.value_bytes
    sizes = [step.map_bytes(each, value_bytes) for each in (*op.reads, *op.makes)]
    maps = step.writer.tensor(
        f"{op.made.name}/maps",
        round(plain.held_maps * sum(sizes)),
        Group.SCRATCH,
    )
    group = Group.ACTIVATIONS if op.kept and step.keeps else Group.TRANSIENTS
    level = op.made.level if group is Group.ACTIVATIONS else None
    made = []
    for value in op.makes:
        tensor = step.writer.tensor(value.name, step.map_bytes(value), group, level)
        made.append(tensor)
        step.stands_in(value, (tensor.name,))
    reads = [tensor for read in op.reads for tensor in step.tensors(read)]
    traffic = 2 * maps.bytes
    step.writer.run(op.made.name, "pass", reads, made, scratch=(maps,), traffic_bytes=traffic)


# --- Operations: kernels ---


def _write_kernel_rows(step: StepWriter, op: Op) -> None:
    layer = step.writer.layers[op.layer]
    size = 4 * layer.kernel_elements * op.made.channels // layer.kernel_shape[3]
    step.make(op, op.made, size, Group.WEIGHTS_PARTS, kind="update")


def _write_kernel_taps(step: StepWriter, op: Op) -> None:
    layer = step.writer.layers[op.layer]
    taps = math.prod(op.strides)
    size = 4 * layer.kernel_elements * taps * op.made.channels // layer.shape[3]
    step.make(op, op.made, size, Group.WEIGHTS_PARTS, kind="update")


def _write_join_gradients(step: StepWriter, op: Op) -> None:
    if len(op.parts) == 1:
        step.stands_in(op.made, step.tensors(op.parts[0]))
    else:
        step.make_kernel_gradient(op, op.made)


# --- Operations: the loss ---


def _write_loss_sums(step: StepWriter, op: Op) -> None:
    logits, target = op.maps
    step.writer.run(
        op.made.name,
        costs_of(op.kind),
        [*step.tensors(logits), target.name],
        native=step.native(op, logits.channels, 0),
        traffic_bytes=_read_by_loss(step, logits),
    )


def _write_loss_slope(step: StepWriter, op: Op) -> None:
    logits, _ = op.maps
    size = step.map_bytes(logits)
    native = step.native(op, logits.channels, 0)
    traffic = _read_by_loss(step, logits) + size
    step.make(op, op.made, size, Group.TRANSIENTS, native=native, traffic_bytes=traffic)


def _read_by_loss(step: StepWriter, logits: Value) -> int:
    """Bytes of the logits, and of the target's rows along Z that count for them."""
    _, _, along_z = step.job.unet.reduction(logits.level)
    return step.map_bytes(logits) + step.map_bytes(logits, 1) * along_z


WRITE: Dict[Kind, Callable[[StepWriter, Op], None]] = {
    Kind.CONVOLVE: _write_map,
    Kind.INPUT_GRADIENT: _write_map,
    Kind.FILTER_GRADIENT: _write_filter_gradient,
    Kind.MAX_POOL: _write_map,
    Kind.MAX_POOL_GRADIENT: _write_map,
    Kind.UP_CONVOLVE: _write_map,
    Kind.UP_INPUT_GRADIENT: _write_input_gradient,
    Kind.UP_FILTER_GRADIENT: _write_filter_gradient,
    Kind.PROJECT: _write_map,
    Kind.PROJECT_GRADIENT: _write_project_gradient,
    Kind.PROJECT_SUMS: _write_project_sums,
    Kind.PROJECT_TO_RAW: _write_project_to_raw,
    Kind.RESIDUAL_SUM: _write_map,
    Kind.RESIDUAL_GRADIENT: _write_map,
    Kind.PLAIN: _write_plain,
    Kind.PLAIN_GRADIENT: _write_plain,
    Kind.NORM_GRADIENT: _write_norm_gradient,
    Kind.TO_RAW: _write_map,
    Kind.ADD: _write_add,
    Kind.KERNEL_ROWS: _write_kernel_rows,
    Kind.KERNEL_TAPS: _write_kernel_taps,
    Kind.JOIN_GRADIENTS: _write_join_gradients,
    Kind.LOSS_SUMS: _write_loss_sums,
    Kind.LOSS_SLOPE: _write_loss_slope,
}
"""Kind -> the tensors and counts of an operation."""
