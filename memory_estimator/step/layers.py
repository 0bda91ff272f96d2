"""What each kind of layer, and the loss, does in a training step: a rule each, forward and back.

Engines differ in what they fuse, in what they keep for a gradient beside the maps, and in what they write in place;
each such rule names the engine, "itex" being TensorFlow with Intel's extension and "stock" TensorFlow without. All of
it was read off the allocator's log, operation by operation.
"""

from typing import Callable, List, Optional, Sequence

from memory_estimator.step.program import Tensor
from memory_estimator.step.scratch import (
    FilterGradient,
    filter_gradient_bytes,
    filter_gradient_touched,
    hidden_filter_gradient_bytes,
    is_narrow,
    mask_bytes,
    mask_touched,
    up_convolution_bytes,
)
from memory_estimator.step.writer import MOST_SAMPLES, Writer, filter_gradient_name
from models.layer_plan import LayerOp

MOST_PLANES, FEW_PIECES = 256, 8
"""Planes of a map that up-sampling writes down one by one; of more it makes FEW_PIECES, each of many planes."""

# --- Rules: each writes a layer's forward pass down, and returns what writes its backward pass ---
#
# In every backward pass the filter gradient comes first and the input gradient waits for it (models/ordered.py). ITEX
# takes oneDNN's scratch from the allocator, and so the kernel in the layout that oneDNN prefers: its forward kernels
# (for the up-convolution the input gradient, which is one) keep that copy, the others take it anew each time. Stock
# TensorFlow leaves both to oneDNN, outside the allocator.

Backward = Callable[[], None]
"""Takes the gradient that has arrived at a layer's output, and hands gradients on to its inputs."""


def conv(writer: Writer, op: LayerOp) -> Backward:
    """A convolution of a block, and a head's: its bias is added in the same operation.

    Backward, the gradient of a head's bias comes first, which reads the whole map.
    """
    source, head = op.inputs[0], op.kind == "head"
    writer.cast_kernel(op)
    convolve(writer, op, source, writer.activation(op))

    def backward() -> None:
        upstream = writer.arrived(op)
        if head:
            writer.run(f"{op.name}/bias_gradient", "bias_gradient", [upstream], layer=op)
        _gradients(writer, op, source, upstream, by_planes=head and writer.job.policy != "speed")

    return backward


def shortcut(writer: Writer, op: LayerOp) -> Backward:
    """A residual block's sum: the convolved entry is added to the block's maps, in their memory.

    Backward the short way comes first; the long way then reads the same gradient.
    """
    maps, entry = op.inputs
    writer.cast_kernel(op)
    convolved = writer.tensor(f"{op.name}/convolved", writer.map_bytes(op))
    convolve(writer, op, entry, convolved)
    writer.make(op.name, "pointwise", [maps, convolved.name], writer.map_bytes(op), takes_over=maps)

    def backward() -> None:
        upstream = writer.arrived(op)
        _gradients(writer, op, entry, upstream)
        writer.receive(maps, upstream)

    return backward


def up_conv(writer: Writer, op: LayerOp) -> Backward:
    """A transposed convolution; its output is kept for the join."""
    writer.cast_kernel(op)
    up_convolve(writer, op, writer.activation(op))
    return lambda: writer.receive(op.inputs[0], up_gradients(writer, op, writer.arrived(op)))


def norm(writer: Writer, op: LayerOp) -> Backward:
    """A norm and ReLU, kept for the ReLU's gradient, or a norm alone before a residual sum, which is not."""
    source, group = op.inputs[0], writer.kept_at(op) if op.kind == "norm_act" else "transients"
    normalise(writer, op, source, op.name, group, alone=not writer.norm_reads_source)
    return lambda: writer.receive(source, norm_gradient(writer, op, writer.arrived(op), source, op.name))


def pool(writer: Writer, op: LayerOp) -> Backward:
    """Keeps which voxel of each window was the largest, a byte each. Its gradient reads both maps too."""
    below, winners = op.inputs[0], f"{op.name}/winners"
    kept = writer.tensor(winners, writer.job.micro * op.elements, writer.kept_at(op))
    writer.run(op.name, "pool", op.inputs, [writer.activation(op), kept])

    def backward() -> None:
        reads, size = [writer.arrived(op), below, op.name, winners], writer.map_bytes(writer.layers[below])
        writer.receive(below, writer.make(f"{op.name}/gradient_below", "pool_gradient", reads, size))

    return backward


def concat(writer: Writer, op: LayerOp) -> Backward:
    """A copy of both maps. Backward both parts are cut out at once, so that the whole goes."""
    writer.run(op.name, "join", op.inputs, [writer.activation(op)])

    def backward() -> None:
        upstream = writer.arrived(op)
        for name in op.inputs:
            size = writer.map_bytes(writer.layers[name])
            writer.receive(name, writer.make(f"{op.name}/gradient_of_{name}", "slice", [upstream], size))

    return backward


def relu(writer: Writer, op: LayerOp) -> Backward:
    """After a residual sum, in the memory of the sum."""
    writer.run(op.name, "pointwise", op.inputs, [writer.activation(op)], takes_over=op.inputs[0])
    return lambda: writer.receive(op.inputs[0], relu_gradient(writer, op, writer.arrived(op), op.name))


def upsampling(writer: Writer, op: LayerOp) -> Backward:
    """Nearest neighbours; its output is kept for the join."""
    upsample(writer, op, op.inputs[0], writer.activation(op))
    return lambda: writer.receive(op.inputs[0], upsample_gradient(writer, op, writer.arrived(op)))


# --- What rules, and the blocks that save memory, are made of ---


def convolve(writer: Writer, op: LayerOp, source: str, output: Tensor) -> None:
    """`output` from the map `source`, with the kernel of `op`."""
    reads, flops = [source, writer.kernel_read(op)], writer.job.micro * op.flops
    kept = _reordered(writer, op, output.name)
    writer.run(output.name, "conv", reads, [output], keeps=kept, flops=flops, layer=op)


def filter_gradient(
    writer: Writer, op: LayerOp, source: str, upstream: str, kind: str = "conv", seen: Optional[FilterGradient] = None
) -> None:
    """Of the whole volume at once; `seen` is how oneDNN sees it, where that is not as a convolution on one grid."""
    grid = op.shape[:3]
    seen = seen or FilterGradient(writer.job.micro, grid, grid, op.in_channels, op.shape[3], op.kernel, 1, False)
    written = writer.tensor(filter_gradient_name(op), writer.kernel_bytes(op), "gradients")
    _filter_gradient(writer, op, kind, [source, upstream], written, seen, writer.job.micro * op.flops)


def filter_gradient_by_planes(writer: Writer, op: LayerOp, source: str, upstream: str) -> None:
    """As models/filter_gradient.py: for every sample one two-dimensional gradient a plane of the kernel, joined."""
    planes, *grid = op.shape[:3]
    samples, flat = min(writer.job.micro, MOST_SAMPLES), (1, *grid)
    seen = FilterGradient(planes, flat, flat, op.in_channels, op.shape[3], op.kernel, 1, False, flat=True)
    name, size = filter_gradient_name(op), writer.kernel_bytes(op)
    flops, total = writer.job.micro * op.flops // (samples * op.kernel), ""
    for sample in range(samples):
        pieces = [
            writer.tensor(f"{name}/sample{sample}/plane{plane}", size // op.kernel, "gradients")
            for plane in range(op.kernel)
        ]
        for piece in pieces:
            _filter_gradient(writer, op, "conv", [source, upstream], piece, seen, flops)
        last = sample == samples - 1
        whole = name if last and not total else f"{name}/sample{sample}"
        writer.make(whole, "join", [piece.name for piece in pieces], size, "gradients")
        if total:
            summed = name if last else f"{name}/sum{sample}"
            whole = writer.make(summed, "pointwise", [total, whole], size, "gradients", takes_over=total)
        total = whole


def input_gradient(writer: Writer, op: LayerOp, below: LayerOp, upstream: str) -> str:
    """Of the convolution's input, a map like the output of `below`; returns its name."""
    return writer.make(
        f"{op.name}/input_gradient",
        "conv_input_gradient",
        [upstream, writer.kernel_read(op)],
        writer.map_bytes(below),
        scratch=[writer.kernel_bytes(op)] if writer.itex else [],
        flops=writer.job.micro * op.flops,
        layer=op,
    )


def up_convolve(writer: Writer, op: LayerOp, output: Tensor) -> None:
    """Its kernel is a convolution's input gradient to oneDNN, and copies its input."""
    input_bytes = writer.layers[op.inputs[0]].elements * writer.compute_bytes
    scratch = [up_convolution_bytes(input_bytes, writer.job.threads), writer.kernel_bytes(op)]
    writer.run(
        output.name,
        "up_conv",
        [*op.inputs, writer.kernel_read(op)],
        [output],
        scratch=scratch if writer.itex else [],
        hidden_bytes=0 if writer.itex else input_bytes,  # of a copy a thread, each thread's own share
        flops=writer.job.micro * op.flops,
        layer=op,
    )


def up_gradients(writer: Writer, op: LayerOp, upstream: str) -> str:
    """The mirror of a convolution: to its filter gradient the output's gradient is the map that the filter slides over,
    and its input gradient, whose name is returned, is a forward convolution."""
    below, micro, fine = writer.layers[op.inputs[0]], writer.job.micro, op.shape
    seen = FilterGradient(micro, fine[:3], below.shape[:3], fine[3], below.shape[3], 2, 2, False)
    filter_gradient(writer, op, below.name, upstream, "up_conv", seen)
    return writer.make(
        f"{op.name}/input_gradient",
        "up_conv_input_gradient",
        [upstream, writer.kernel_read(op)],
        writer.map_bytes(below),
        keeps=_reordered(writer, op, op.name),
        flops=micro * op.flops,
        layer=op,
    )


def normalise(writer: Writer, op: LayerOp, source: str, result: str, group: str, alone: bool) -> None:
    """`result` from the map `source`: one fused operation a sample (instance) or a batch; the last sample comes first.

    The ReLU's mask goes with it. Where it reads `source` `alone`, and last, ITEX writes over it. Network without norms:
    a bias and a ReLU, which any engine then writes over it.
    """
    size, samples = writer.map_bytes(op), writer.normed_apart
    if not writer.norm_reads_source:
        writer.make(result, "pointwise", [source], size, group, takes_over=source if alone else None)
        return
    over = source if alone and writer.itex and samples == 1 else None
    kind = "narrow_norm" if is_narrow(op.shape[3], op.dtype) else "norm"
    for sample in reversed(range(samples)):
        part = f"/sample{sample}" if samples > 1 else ""
        written = [writer.tensor(result + part, size // samples, group)]
        if op.kind == "norm_act":
            engine = writer.job.engine
            taken = mask_bytes(writer.job.micro * op.elements, op.shape[3], op.dtype, engine) // samples
            mask = writer.tensor(f"{result}/mask{sample}", taken, group, mask_touched(taken, engine))
            # Stock TensorFlow takes memory for the mask first, and uses a quarter of it.
            written = [*written, mask] if writer.itex else [mask, *written]
        writer.run(result + part, kind, [source], written, layer=op, takes_over=over)
    if samples > 1:
        writer.make(result, "join", [f"{result}/sample{sample}" for sample in range(samples)], size, group)


def norm_gradient(writer: Writer, op: LayerOp, upstream: str, source: str, result: str) -> str:
    """Of `source`, whose norm is `result`; returns its name.

    Sample by sample as the forward pass, each cut out of the gradient; the parts are joined at the end.
    """
    down, size, samples = f"{op.name}/gradient_below", writer.map_bytes(op), writer.normed_apart
    if not writer.norm_reads_source:
        down = relu_gradient(writer, op, upstream, result) if op.kind == "norm_act" else upstream
        writer.run(f"{op.name}/bias_gradient", "bias_gradient", [down], layer=op)
        return down
    if samples == 1:
        return _norm_gradient(writer, op, upstream, [source, result, f"{result}/mask0"], down, size)
    for sample in reversed(range(samples)):
        cut = writer.make(f"{op.name}/slice{sample}", "slice", [upstream], size // samples)
        kept = [source, f"{result}/sample{sample}", f"{result}/mask{sample}"]
        _norm_gradient(writer, op, cut, kept, f"{down}/sample{sample}", size // samples)
    return writer.make(down, "join", [f"{down}/sample{sample}" for sample in range(samples)], size)


def relu_gradient(writer: Writer, op: LayerOp, upstream: str, output: str) -> str:
    """A ReLU's that no norm is fused with; returns its name. ITEX takes new memory, stock TensorFlow works in place."""
    name, over = f"{op.name}/gradient_below", None if writer.itex else upstream
    return writer.make(name, "pointwise", [upstream, output], writer.map_bytes(op), takes_over=over)


def upsample(writer: Writer, op: LayerOp, source: str, output: Tensor) -> None:
    """Axis by axis: Keras cuts the map into planes and joins each plane twice."""
    _resample(writer, op, source, output, [1, 2, 4, 8])


def upsample_gradient(writer: Writer, op: LayerOp, upstream: str) -> str:
    """The same way back: planes cut out, and each added to its twin. Returns its name."""
    down = writer.tensor(f"{op.name}/gradient_below", writer.map_bytes(op) // 8)
    _resample(writer, op, upstream, down, [8, 4, 2, 1])
    return down.name


# --- The loss: soft Dice and cross-entropy as `cpu3d.training.losses`, in float32 maps of regions ---


def cut_target(writer: Writer, head: LayerOp) -> None:
    """A coarse head's: every 2nd, 4th ... voxel of the full one."""
    if head.level:
        writer.make(_target(head), "slice", ["target"], writer.job.micro * head.elements)


def cast_target(writer: Writer, head: LayerOp) -> None:
    """A head's target in float32, which the loss keeps: all of it, or the first slab, which waits for nothing."""
    size = 4 * writer.job.micro * head.elements // writer.slabs
    writer.make(f"{head.name}/target", "pointwise", [_target(head)], size)


def loss(writer: Writer, head: LayerOp) -> None:
    """From a head's output to its gradient: at once, or, where memory is saved, slab by slab.

    By slabs: sums first, then the gradient, for which all maps are made again; its pieces are joined.
    """
    slabs, elements, name = writer.slabs, writer.job.micro * head.elements, f"{head.name}/loss"
    size = 4 * elements // slabs
    if writer.job.policy == "speed":
        maps, truth = _LossMaps(writer, head, name, size), f"{head.name}/target"
        logits = maps.widened(f"{head.name}/float32")
        maps.cross_entropy(logits, truth)
        probability = maps.map("probability", logits, over=logits)
        weighted = maps.map("weighted", truth)
        maps.total(maps.map("overlap", probability, truth))
        writer.receive(head.name, maps.gradient(probability, truth, weighted))
        return
    pieces: List[str] = []
    for sums in (True, False):
        for slab in range(slabs):
            maps = _LossMaps(writer, head, f"{name}/{'sums' if sums else 'gradient'}{slab}", size)
            logits = maps.widened(f"{maps.name}/float32")
            truth = f"{head.name}/target" if sums and slab == 0 else maps.map("target", _target(head))
            if sums:
                maps.cross_entropy(logits, truth)
            probability = maps.map("probability", logits, over=logits if writer.mixed else None)
            if sums:
                maps.total(maps.map("overlap", probability, truth, over=probability))
            else:
                pieces.append(maps.gradient(probability, truth, maps.map("weighted", truth)))
    writer.receive(head.name, writer.make(f"{name}/gradient", "pointwise", pieces, writer.compute_bytes * elements))


class _LossMaps:
    """The float32 maps of a head's loss, or of a slab of it. Results lie over maps that nobody else will read."""

    def __init__(self, writer: Writer, head: LayerOp, name: str, size_bytes: int):
        self.writer, self.head, self.name, self.size = writer, head, name, size_bytes

    def map(self, result: str, *reads: str, over: Optional[str] = None) -> str:
        return self.writer.make(f"{self.name}/{result}", "pointwise", reads, self.size, takes_over=over)

    def total(self, of: str) -> None:
        self.writer.run(f"{of}/sum", "reduce", [of])

    def widened(self, name: str) -> str:
        """The head's output in float32."""
        mixed = self.writer.mixed
        return self.writer.make(name, "pointwise", [self.head.name], self.size) if mixed else self.head.name

    def cross_entropy(self, logits: str, target: str) -> None:
        self.total(self.map("products", logits, target))
        self.total(self.map("softplus", logits))

    def gradient(self, probability: str, target: str, weighted: str) -> str:
        """In the compute dtype."""
        rest = self.map("rest", probability)
        slope = self.map("slope", rest, weighted, over=weighted)
        scaled = self.map("scaled", slope, probability, over=probability)
        truth = self.map("truth", target, over=target)
        gradient = self.map("gradient", scaled, truth, over=scaled)
        if not self.writer.mixed:
            return gradient
        return self.writer.make(f"{gradient}/cast", "pointwise", [gradient], self.size // 2)


# --- Private helpers ---


def _gradients(writer: Writer, op: LayerOp, source: str, upstream: str, by_planes: bool = False) -> None:
    """Of the kernel, then of the input; the image needs none."""
    below = writer.layers[source]
    (filter_gradient_by_planes if by_planes else filter_gradient)(writer, op, source, upstream)
    if below.kind != "input":
        writer.receive(source, input_gradient(writer, op, below, upstream))


def _filter_gradient(
    writer: Writer, op: LayerOp, kind: str, reads: List[str], written: Tensor, seen: FilterGradient, flops: int
) -> None:
    """oneDNN's scratch and, as large as what is written, that in the layout that oneDNN prefers."""
    dtype, threads = writer.job.unet.dtype, writer.job.threads
    buffers = [filter_gradient_bytes(seen, dtype, threads), written.bytes]
    writer.run(
        written.name,
        f"{kind}_filter_gradient",
        reads,
        [written],
        scratch=buffers if writer.itex else [],
        touched=filter_gradient_touched(seen, dtype, threads),
        hidden_bytes=0 if writer.itex else hidden_filter_gradient_bytes(seen, dtype, threads),
        flops=flops,
        layer=op,
    )


def _reordered(writer: Writer, op: LayerOp, name: str) -> List[Tensor]:
    """The kernel in oneDNN's layout, kept from an operation's first run on: each of the graph's keeps its own."""
    if not writer.itex:
        return []
    return [writer.tensor(f"{name}/reordered", writer.kernel_bytes(op), "weights, reordered")]


def _norm_gradient(writer: Writer, op: LayerOp, upstream: str, kept: List[str], down: str, size: int) -> str:
    """ITEX takes ReLU and norm at once; stock TensorFlow takes the ReLU first, in place.

    `kept` are the forward pass's source, output and mask.
    """
    source, output, mask = kept
    kind, reads = "narrow_norm" if is_narrow(op.shape[3], op.dtype) else "norm", [upstream, source]
    if op.kind == "norm_act" and writer.itex:
        reads = [upstream, source, output, mask]
    elif op.kind == "norm_act":
        passed = writer.make(f"{down}/relu", "pointwise", [upstream, output], size, takes_over=upstream)
        reads = [passed, source, mask]
    return writer.make(down, f"{kind}_gradient", reads, size, layer=op)


def _resample(writer: Writer, op: LayerOp, source: str, output: Tensor, eighths: Sequence[int]) -> None:
    """From map to map, whose sizes are given as `eighths` of the fine one: an axis at a time, each cut into planes.

    Exact up to MOST_PLANES voxels a side of the fine grid. Beyond that the pieces add up to the same bytes but are
    fewer and larger: live bytes stay exact, what the allocator counts moves by some per cent.
    """
    fine, grows, result = writer.map_bytes(op), eighths[0] == 1, output.name
    for axis, (now, then) in enumerate(zip(eighths, eighths[1:])):
        planes = op.shape[axis] // (2 if grows else 1)
        count = planes if planes <= MOST_PLANES else FEW_PIECES
        cuts = [planes * piece // count for piece in range(count + 1)]
        plane_bytes = fine * now // 8 // planes
        pieces = [
            writer.tensor(f"{result}/axis{axis}/plane{first}", plane_bytes * (last - first))
            for first, last in zip(cuts, cuts[1:])
        ]
        writer.run(f"{result}/cut{axis}", "slice", [source], pieces)
        joined = output if then == eighths[-1] else writer.tensor(f"{result}/{axis}", fine * then // 8)
        writer.run(f"{result}/join{axis}", "join", [piece.name for piece in pieces], [joined])
        source = joined.name


def _target(head: LayerOp) -> str:
    """What the head is compared with, in one byte."""
    return f"{head.name}/target/uint8" if head.level else "target"
