"""The training step as TensorFlow's own layers compute it (models/layers.py), where own
operations do not run.

TensorFlow keeps the output of every layer for the backward pass, under each policy alike, and
orders the operations itself: memory is known roughly, so the bound on it is wide.
"""

from typing import Any, Dict, List, Tuple

from memory_estimator.job import Job
from memory_estimator.step.timeline import Group, Program, Tensor
from memory_estimator.step.training_step import StepWriter, training_step
from memory_estimator.step.update import reset_sums, update
from memory_estimator.step.writer import Writer
from models.layer_plan import NORM_KINDS, LayerKind, LayerOp
from models.program import Kind, Op, Value, ValueKind, loss_program

COPIES = {
    ("itex", "float32"): 2,
    ("itex", "bfloat16"): 3,
    ("stock", "float32"): 1,
    ("stock", "bfloat16"): 2,
}
"""Engine, dtype -> copies of a convolution's maps that the process holds beside them, in oneDNN's
layout. Thirteen processes on 64^3 to 128^3 voxels held from 8 % less to 8 % more than is predicted
so (records/log.md)."""

COSTS: Dict[Tuple[int, ...], str] = {(3, 3, 3): "convolve", (1, 1, 1): "project"}
"""Kernel -> kind of operations whose cost its pass has; others are between two grids."""


LOSS_MAPS = 4
"""Float32 maps of the logits that an operation of the loss holds at once: on 128 x 128 x 64 voxels
TensorFlow 2.15 holds 3.7 in float32 and 4.4 in bfloat16."""
MOVED_MAPS = {Kind.LOSS_SUMS: 16, Kind.LOSS_SLOPE: 21}
"""And that it reads and writes."""


def step_of(job: Job, instructions: str) -> Program:
    """A step of `job` as it is computed: by native operations of an instruction set, or by layers
    if that is ""."""
    return training_step(job) if instructions else layer_step(job)


def layer_step(job: Job) -> Program:
    """The program of `job`. Raises ValueError for a shape that the network cannot take."""
    writer = Writer(job, native=False)
    reset_sums(writer)
    layers = _Layers(writer)
    heads = layers.forward()
    writer.phase = "loss"
    loss = loss_program(heads)
    for op in loss.sums:
        layers.loss(op)
    slopes = [layers.loss(op) for op in loss.slopes]
    writer.phase = "backward pass"
    gradients = layers.backward({head.name: slope for head, slope in zip(heads, slopes)})
    writer.phase = "update"
    update(writer, gradients)
    return writer.program()


class _Layers:
    """The layers of a network, forward and backward. A layer's output has the layer's name."""

    def __init__(self, writer: Writer):
        self.writer = writer
        self.step = StepWriter(writer)

    def forward(self) -> List[Value]:
        """The logits of each head, the finest first."""
        for op in self.writer.plan[1:]:
            reads = list(op.inputs)
            if op.kernel:
                reads.append(f"{op.name}/kernel")
            kind = _kind(op)
            over: List[str] = []
            if op.kind is LayerKind.NORM_ACT:
                over = [self.writer.make(f"{op.name}/norm", "pass", reads, self._bytes(op))]
                reads = over
            self.writer.make(
                op.name,
                kind,
                reads,
                self._bytes(op),
                Group.ACTIVATIONS,
                op.level,
                over=over,
                **self._counted(op, kind),
            )
        heads = [op for op in self.writer.plan if op.kind is LayerKind.HEAD]
        return [Value(op.name, ValueKind.MAP, op.level, op.shape[3]) for op in heads]

    def loss(self, op: Op) -> str:
        """An operation of the loss, with the maps that it makes on the way; returns its name."""
        logits, target = op.maps
        map_bytes = self.step.map_bytes(logits, 4)
        makes_slope = op.kind is Kind.LOSS_SLOPE
        return self.writer.make(
            op.made.name,
            "loss",
            [logits.name, target.name],
            self.step.map_bytes(logits) if makes_slope else 0,
            scratch=(Tensor(f"{op.made.name}/maps", LOSS_MAPS * map_bytes, Group.SCRATCH),),
            traffic_bytes=MOVED_MAPS[op.kind] * map_bytes,
        )

    def backward(self, slopes: Dict[str, str]) -> Dict[str, str]:
        """Gradients of the kernels, by their layers, from those of the logits."""
        of_outputs = dict(slopes)
        kernels = {}
        for op in reversed(self.writer.plan[1:]):
            gradient = of_outputs.pop(op.name)
            if op.kind in (LayerKind.NORM_ACT, LayerKind.ACT):
                gradient = self._make(op, "relu/gradient", [gradient, op.name], op)
            if op.kernel:
                kernels[op.name] = self._kernel_gradient(op, gradient)
            for name in op.inputs:
                below = self.writer.layers[name]
                if not below.has_gradient:
                    continue
                made = self._gradient(op, below, gradient)
                if name in of_outputs:
                    both = [of_outputs[name], made]
                    made = self._make(below, "gradients", both, below, over=[made])
                of_outputs[name] = made
        return kernels

    def _gradient(self, op: LayerOp, below: LayerOp, gradient: str) -> str:
        """The gradient of a layer's input, from that of its output."""
        is_term = op.kind is LayerKind.SHORTCUT and below.name == op.inputs[0]
        if op.kind is LayerKind.ACT or is_term:
            return gradient
        reads = [gradient]
        if op.kind is LayerKind.POOL:
            reads += [op.name, below.name]
        elif op.kind in NORM_KINDS:
            reads += [below.name]
        kind = _kind(op)
        if kind == "convolve":
            kind = "input_gradient"
        more = self._counted(op, kind)
        if op.kind in (LayerKind.POOL, LayerKind.PLAIN, *NORM_KINDS):  # float32 maps, on the way
            size = 2 * self.writer.job.micro * below.elements * 4
            more["scratch"] = (Tensor(f"{op.name}/gradient/maps", size, Group.SCRATCH),)
        return self._make(op, "gradient", reads, below, kind, **more)

    def _kernel_gradient(self, op: LayerOp, gradient: str) -> str:
        kind = _kind(op)
        if kind == "convolve":
            kind = "filter_gradient"
        reads = [op.inputs[-1], gradient]  # of a shortcut its entry
        more = self._counted(op, kind)
        size = 4 * op.kernel_elements
        name = f"{op.name}/filter_gradient"
        return self.writer.make(name, kind, reads, size, Group.GRADIENTS, **more)

    def _make(
        self,
        op: LayerOp,
        what: str,
        reads: List[str],
        like: LayerOp,
        kind: str = "pass",
        **more: Any,
    ) -> str:
        """An operation of a layer that makes a map as large as another's; returns its name."""
        return self.writer.make(f"{op.name}/{what}", kind, reads, self._bytes(like), **more)

    def _bytes(self, op: LayerOp) -> int:
        return self.writer.job.micro * op.elements * self.writer.value_bytes

    def _counted(self, op: LayerOp, kind: str) -> Dict[str, Any]:
        """Counts of a `StepOp` besides tensors. A convolution takes its maps in a layout of its
        own: copies of them."""
        if not op.kernel:
            return {}
        job = self.writer.job
        source = self.writer.layers[op.inputs[-1]]
        size = self._bytes(op) + self._bytes(source)
        size *= COPIES[job.engine, job.unet.dtype]
        copies = (Tensor(f"{op.name}/{kind}/reordered", size, Group.SCRATCH),)
        return {
            "flops": op.flops * job.micro,
            "in_channels": op.in_channels,
            "out_channels": op.shape[3],
            "scratch": copies,
        }


def _kind(op: LayerOp) -> str:
    """The kind of operations whose cost a layer's pass has."""
    if not op.kernel:
        return "pass"
    return COSTS.get(op.kernel, "up")
