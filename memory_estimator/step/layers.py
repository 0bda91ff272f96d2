"""What each kind of layer, and the loss, does in a training step, forward and back, as the allocator's log has it.

Engines differ in what they fuse, keep and write in place: "itex" is TensorFlow with Intel's extension, "stock" without.
"""

import math
from typing import List, Optional, Sequence, Tuple

from memory_estimator.step.onednn import Convolution
from memory_estimator.step.scratch import (
    filter_gradient_buffers,
    forward_buffers,
    input_gradient_buffers,
    mask_bytes,
    mask_touched,
)
from memory_estimator.step.writer import CONVOLUTIONS, MOST_SAMPLES, Writer, filter_gradient_name
from models.config import has_fused_norm, norm_block
from models.layer_plan import LayerOp

MOST_PLANES, FEW_PIECES = 256, 8  # planes that up-sampling writes down one by one; of more FEW_PIECES


VIEW_BYTES = 64  # EIGEN_MAX_ALIGN_BYTES of TensorFlow's builds


def steps(writer: Writer) -> Sequence[LayerOp]:
    """The plan, layer by layer."""
    return writer.plan


def forward(writer: Writer, op: LayerOp) -> None:
    """A layer's forward pass: its output, under its name, and what it keeps for the gradient."""
    kind, source, kept = op.kind, op.inputs[0], writer.kept_at(op)
    if kind in CONVOLUTIONS:
        writer.cast_kernel(op)
    if kind in ("conv", "head"):  # a head's bias is added in the same operation
        convolve(writer, op, source, kept)
    elif kind == "shortcut":  # the convolved entry is added to the block's maps, in their memory
        reads = [source, convolve(writer, op, op.inputs[1])]
        writer.make(op.name, "pointwise", reads, writer.map_bytes(op), takes_over=source)
    elif kind == "up_conv":
        up_convolve(writer, op, source, kept)
    elif kind in ("norm_act", "norm"):  # before a residual sum a norm is alone, and nothing reads its output later
        group = kept if kind == "norm_act" else "transients"
        normalise(writer, op, source, group, alone=not writer.norm_reads_source)
    elif kind == "pool":  # which voxel of each window was the largest, a byte each
        winners = writer.tensor(f"{op.name}/winners", writer.elements(op), kept)
        writer.run(op.name, "pool", op.inputs, [writer.tensor(op.name, writer.map_bytes(op), kept), winners])
    elif kind == "concat":
        writer.make(op.name, "join", op.inputs, writer.map_bytes(op), kept)
    elif kind == "act":  # after a residual sum, in the memory of the sum
        writer.make(op.name, "pointwise", op.inputs, writer.map_bytes(op), kept, takes_over=source)
    elif kind == "upsample":
        resample(writer, op, source, kept)


def backward(writer: Writer, op: LayerOp) -> None:
    """A layer's backward pass: takes the gradient that has arrived at its output, hands gradients to its inputs."""
    kind, source, upstream = op.kind, op.inputs[0], writer.arrived(op)
    if kind in ("conv", "head", "shortcut"):
        entry = op.inputs[-1]
        by_planes = kind == "head" and writer.job.policy != "speed"
        if kind == "head":  # its bias, whose gradient reads the whole map
            channel_sums(writer, op, f"{op.name}/bias_gradient", upstream)
        (filter_gradient_by_planes if by_planes else filter_gradient)(writer, op, entry, upstream)
        if writer.layers[entry].kind != "input":  # the image needs none
            writer.receive(entry, input_gradient(writer, op, upstream))
        if kind == "shortcut":  # the long way reads the same gradient
            writer.receive(source, upstream)
    elif kind == "up_conv":
        writer.receive(source, up_gradients(writer, op, source, upstream))
    elif kind in ("norm_act", "norm"):
        writer.receive(source, norm_gradient(writer, op, upstream, source))
    elif kind == "pool":  # reads both maps too
        reads, size = [upstream, source, op.name, f"{op.name}/winners"], writer.map_bytes(writer.layers[source])
        writer.receive(source, writer.make(f"{op.name}/gradient_below", "pool_gradient", reads, size))
    elif kind == "concat":  # both parts are cut out at once, so that the whole goes
        for name in op.inputs:
            size = writer.map_bytes(writer.layers[name])
            writer.receive(name, writer.make(f"{op.name}/gradient_of_{name}", "slice", [upstream], size))
    elif kind == "act":
        writer.receive(source, relu_gradient(writer, op, upstream))
    elif kind == "upsample":
        writer.receive(source, resample(writer, op, upstream, back=True))


def convolve(writer: Writer, op: LayerOp, source: str, group: str = "transients") -> str:
    """The map `source` with the kernel of `op`; returns the name of the result."""
    name = f"{op.name}/convolved" if op.kind == "shortcut" else op.name  # the layer's own is that of the sum
    more = {"buffers": forward_buffers(_seen(writer, op), writer.setting), "flops": writer.flops(op), "layer": op}
    return writer.make(name, "conv", [source, writer.kernel_read(op)], writer.map_bytes(op), group, **more)


def filter_gradient(
    writer: Writer,
    op: LayerOp,
    source: str,
    upstream: str,
    seen: Optional[Convolution] = None,
    part: str = "",
    planes: int = 1,
    samples: int = 1,
) -> str:
    """Of the whole volume, or with `part` in its name of planes, which `seen` is to oneDNN. Returns its name."""
    kind, name = "up_conv" if op.kind == "up_conv" else "conv", filter_gradient_name(op) + part
    size, flops = writer.kernel_bytes(op) // planes, writer.flops(op) // (samples * planes)
    more = {"buffers": filter_gradient_buffers(seen or _seen(writer, op), writer.setting), "flops": flops}
    return writer.make(name, f"{kind}_filter_gradient", [source, upstream], size, "gradients", layer=op, **more)


def filter_gradient_by_planes(writer: Writer, op: LayerOp, source: str, upstream: str) -> None:
    """As models/ordered.py: for every sample one two-dimensional gradient a plane of the kernel, joined."""
    samples, seen = min(writer.samples, MOST_SAMPLES), in_planes(writer, op)
    name, size, total = filter_gradient_name(op), writer.kernel_bytes(op), ""
    for sample in range(samples):
        parts = [f"/sample{sample}/plane{plane}" for plane in range(op.kernel)]
        pieces = [filter_gradient(writer, op, source, upstream, seen, part, op.kernel, samples) for part in parts]
        last = sample == samples - 1
        whole = name if last and not total else f"{name}/sample{sample}"
        writer.make(whole, "join", pieces, size, "gradients")
        if total:
            summed = name if last else f"{name}/sum{sample}"
            whole = writer.make(summed, "pointwise", [total, whole], size, "gradients", takes_over=total)
        total = whole


def in_planes(writer: Writer, op: LayerOp) -> Convolution:
    """A convolution in two dimensions, of which planes of X are the samples."""
    planes, *grid = writer.grid(op)
    return Convolution(planes, (1, *grid), (1, *grid), op.in_channels, op.shape[3], (1, op.kernel, op.kernel))


def input_gradient(writer: Writer, op: LayerOp, upstream: str) -> str:
    """Of the convolution's input; returns its name. Of an up-convolution a forward one."""
    kind, of = ("up_conv", forward_buffers) if op.kind == "up_conv" else ("conv", input_gradient_buffers)
    seen, name = _seen(writer, op), f"{op.name}/input_gradient"
    size = seen.batch * math.prod(seen.target) * op.in_channels * writer.compute_bytes
    more = {"buffers": of(seen, writer.setting), "flops": writer.flops(op), "layer": op}
    return writer.make(name, f"{kind}_input_gradient", [upstream, writer.kernel_read(op)], size, **more)


def up_convolve(writer: Writer, op: LayerOp, source: str, group: str = "transients") -> str:
    """A transposed convolution; returns the result's name. Its kernel is a convolution's input gradient to oneDNN."""
    more = {"buffers": input_gradient_buffers(_seen(writer, op), writer.setting), "flops": writer.flops(op)}
    reads, size = [source, writer.kernel_read(op)], writer.map_bytes(op)
    return writer.make(op.name, "up_conv", reads, size, group, layer=op, **more)


def up_gradients(writer: Writer, op: LayerOp, source: str, upstream: str) -> str:
    """Of an up-convolution of `source`; returns the name of its input's gradient. The mirror of a convolution: to its
    filter gradient the output's gradient is the map that the filter slides over."""
    filter_gradient(writer, op, source, upstream)
    return input_gradient(writer, op, upstream)


def _seen(writer: Writer, op: LayerOp) -> Convolution:
    """A layer as oneDNN sees it: an up-convolution as the convolution whose input gradient it is; one of single voxels
    of a slab in two dimensions."""
    if writer.in_slab and op.kernel == 1:
        return in_planes(writer, op)
    grid, kernel = writer.grid(op), (op.kernel,) * 3
    if op.kind != "up_conv":
        return Convolution(writer.samples, grid, grid, op.in_channels, op.shape[3], kernel)
    half = tuple(n // 2 for n in grid)
    return Convolution(writer.samples, grid, half, op.shape[3], op.in_channels, kernel, stride=2)


def normalise(writer: Writer, op: LayerOp, source: str, group: str, alone: bool) -> None:
    """The norm of the map `source`: one fused operation a sample (instance) or a batch; the last sample comes first.
    The ReLU's mask goes with it. Where it reads `source` `alone`, and last, ITEX writes over it. Network without norms:
    a bias and a ReLU, which any engine then writes over it, ITEX within the convolution. Where there is no fused kernel
    three passes, as models/passes.py, which read the source alone in the backward pass too."""
    size, samples, engine = writer.map_bytes(op), writer.normed_apart, writer.job.engine
    if not writer.norm_reads_source:
        kind = "fused" if writer.itex or op.kind == "norm" else "pointwise"
        writer.make(op.name, kind, [source], size, group, takes_over=source if alone else None)
        return
    if not has_fused_norm(op.shape[3], op.dtype):
        for of in ("sums", "squares"):
            channel_sums(writer, op, f"{op.name}/{of}", source)
        writer.make(op.name, "pointwise", [source], size, group)
        return
    over = source if alone and writer.itex and samples == 1 else None
    for sample, part in _by_sample(samples):
        written = [writer.tensor(op.name + part, size // samples, group)]
        if op.kind == "norm_act":
            taken = mask_bytes(writer.elements(op), op.shape[3], op.dtype, engine) // samples
            mask = writer.tensor(f"{op.name}/mask{sample}", taken, group, mask_touched(taken, engine))
            # Stock TensorFlow takes memory for the mask first, and uses a quarter of it.
            written = [*written, mask] if writer.itex else [mask, *written]
        writer.run(op.name + part, "norm", [source], written, layer=op, takes_over=over)
    if samples > 1:
        writer.make(op.name, "join", [f"{op.name}/sample{sample}" for sample in range(samples)], size, group)


def norm_gradient(writer: Writer, op: LayerOp, upstream: str, source: str) -> str:
    """Of `source`, which was normalised last; returns its name. Sample by sample as the forward pass, each cut out of
    the gradient; the parts are joined at the end. ITEX takes ReLU and norm at once; stock TensorFlow takes the ReLU
    first, in place."""
    down, samples = f"{op.name}/gradient_below", writer.normed_apart
    if not writer.norm_reads_source:
        down = relu_gradient(writer, op, upstream) if op.kind == "norm_act" else upstream
        channel_sums(writer, op, f"{op.name}/bias_gradient", down)
        return down
    if not has_fused_norm(op.shape[3], op.dtype):
        for of in ("sums", "products"):
            channel_sums(writer, op, f"{down}/{of}", upstream, source)
        return writer.make(down, "pointwise", [upstream, source], writer.map_bytes(op))
    size = writer.map_bytes(op) // samples
    for sample, part in _by_sample(samples):
        cut = writer.make(f"{op.name}/slice{sample}", "slice", [upstream], size) if part else upstream
        reads, mask = [cut, source], f"{op.name}/mask{sample}"
        if op.kind == "norm_act" and writer.itex:
            reads += [op.name + part, mask]
        elif op.kind == "norm_act":
            relu = writer.make(f"{down}{part}/relu", "pointwise", [cut, op.name + part], size, takes_over=cut)
            reads = [relu, source, mask]
        writer.make(down + part, "norm_gradient", reads, size, layer=op)
    if samples > 1:
        parts = [f"{down}/sample{sample}" for sample in range(samples)]
        writer.make(down, "join", parts, writer.map_bytes(op))
    return down


def _by_sample(samples: int) -> List[Tuple[int, str]]:
    """Of each sample that is normalised for itself its number, and what its names end in."""
    return [(sample, f"/sample{sample}" if samples > 1 else "") for sample in reversed(range(samples))]


def channel_sums(writer: Writer, op: LayerOp, name: str, *reads: str) -> None:
    """Sums of maps like the output of `op`, by blocks of rows."""
    planes, rows, *_ = writer.grid(op)
    writer.make(name, "pointwise", reads, 4 * writer.elements(op) // norm_block(planes * rows))


def relu_gradient(writer: Writer, op: LayerOp, upstream: str) -> str:
    """A ReLU's that no norm is fused with; returns its name. ITEX takes new memory, stock TensorFlow works in place."""
    name, over = f"{op.name}/gradient_below", None if writer.itex else upstream
    return writer.make(name, "pointwise", [upstream, op.name], writer.map_bytes(op), takes_over=over)


def resample(writer: Writer, op: LayerOp, source: str, group: str = "transients", back: bool = False) -> str:
    """Up-sampling of the coarser map `source`, or `back`, where planes are cut out and each is added to its twin: an
    axis at a time, each cut into planes. Exact up to MOST_PLANES a side; beyond, live bytes stay exact, and what the
    allocator counts moves a little. Returns the result's name."""
    fine, result = writer.map_bytes(op), f"{op.name}/gradient_below" if back else op.name
    eighths = (8, 4, 2, 1) if back else (1, 2, 4, 8)
    for axis, (now, then) in enumerate(zip(eighths, eighths[1:])):
        planes, last = op.shape[axis] // (1 if back else 2), axis == 2
        count = planes if planes <= MOST_PLANES else FEW_PIECES
        cuts, size = [planes * piece // count for piece in range(count + 1)], fine * now // 8 // planes
        names = [f"{result}/axis{axis}/plane{first}" for first in cuts[:-1]]
        pieces = [writer.tensor(name, size * (b - a)) for name, a, b in zip(names, cuts, cuts[1:])]
        writer.run(f"{result}/cut{axis}", "slice", [source], pieces)
        name, kept = (result, group) if last else (f"{result}/{axis}", "transients")
        source = writer.make(name, "join", names, fine * then // 8, kept)
    return source


def cut_target(writer: Writer, head: LayerOp) -> None:
    """A coarse head's: every 2nd, 4th ... voxel of the full one."""
    if head.level:
        writer.make(_target(head), "slice", ["target"], writer.elements(head))


def cast_target(writer: Writer, head: LayerOp) -> str:
    """A head's target in float32, which the loss keeps: all of it, or a piece; the first piece waits for nothing."""
    cut = _piece(writer, head, _target(head), 1)
    return writer.make(f"{head.name}/target", "pointwise", [cut], _piece_bytes(writer, head))


def loss(writer: Writer, head: LayerOp) -> None:
    """From a head's output to its gradient: at once, or piece by piece, sums first, as memory is saved."""
    target, at_once, gradients = f"{head.name}/target", writer.pieces == 1, []
    for piece in range(writer.pieces):
        probability = loss_sums(writer, head, logits(writer, head), "" if piece else target, kept=at_once)
    for piece in range(writer.pieces):
        if not at_once:
            z = logits(writer, head)
            over = z if piece == writer.pieces - 1 or z != head.name else None
            probability = _of_loss(writer, head, "probability", z, over=over)
            cast_target(writer, head)
        gradients.append(_slope(writer, head, probability, target, over_slope=at_once))
    size = writer.map_bytes(head)
    joined = gradients[0] if at_once else writer.make(f"{head.name}/loss/joined", "pointwise", gradients, size)
    writer.receive(head.name, joined)


def loss_sums(writer: Writer, head: LayerOp, z: str, target: str, kept: bool = False) -> str:
    """What `sums` of `cpu3d.training.losses.DiceCrossEntropy` makes of the float32 logits `z`; returns the name of the
    probabilities, which lie where those lay unless they are read again. Without `target` it is cast here, when it is
    its turn. Sums that no map is made for take next to no time and are left out."""

    def total(name: str, *reads: str, over: Optional[str] = None) -> None:
        writer.run(f"{head.name}/loss/{name}/sum", "reduce", [_of_loss(writer, head, name, *reads, over=over)])

    first = not target
    if first:
        total("softplus", z)
    target = target or cast_target(writer, head)
    total("products", z, target)
    if not first:
        total("softplus", z)
    over = z if writer.pieces == 1 or z != head.name else None
    probability = _of_loss(writer, head, "probability", z, over=over)
    total("overlap", probability, target, over=None if kept else probability)
    return probability


def _slope(writer: Writer, head: LayerOp, probability: str, target: str, over_slope: bool) -> str:
    """What `slope` makes: the gradient of the logits, in the compute dtype; returns its name. Of a product's two maps
    TensorFlow writes over the one whose name comes first."""
    weighted = _of_loss(writer, head, "weighted", target)
    rest = _of_loss(writer, head, "rest", probability)
    slope = _of_loss(writer, head, "slope", rest, weighted, over=weighted)
    scaled = _of_loss(writer, head, "scaled", slope, probability, over=slope if over_slope else probability)
    truth = _of_loss(writer, head, "truth", target, over=target)
    found = _of_loss(writer, head, "gradient", scaled, truth, over=scaled)
    if not writer.mixed:
        return found
    return writer.make(f"{found}/cast", "pointwise", [found], _piece_bytes(writer, head) // 2)


def _of_loss(writer: Writer, head: LayerOp, name: str, *reads: str, over: Optional[str] = None) -> str:
    """A float32 map of the loss; returns its name."""
    return writer.make(f"{head.name}/loss/{name}", "pointwise", reads, _piece_bytes(writer, head), takes_over=over)


def logits(writer: Writer, head: LayerOp) -> str:
    """A head's output in float32, all of it or a piece; returns its name."""
    cut = _piece(writer, head, head.name, writer.compute_bytes)
    return _of_loss(writer, head, "float32", cut) if writer.mixed else cut


def _piece(writer: Writer, head: LayerOp, whole: str, value_bytes: int) -> str:
    """The name of a piece of a head's map or target: all of it and a view where rows of Z begin at multiples of
    VIEW_BYTES, as TensorFlow demands of a view (`IsDim0SliceAligned` in tensorflow/core/kernels/ops_util.h), else of a
    copy."""
    if writer.pieces == 1 or math.prod(head.shape[2:]) * value_bytes % VIEW_BYTES == 0:
        return whole
    return writer.make(f"{whole}/piece", "slice", [whole], writer.elements(head) // writer.pieces * value_bytes)


def _piece_bytes(writer: Writer, head: LayerOp) -> int:
    """Of a float32 map of the loss."""
    return 4 * writer.elements(head) // writer.pieces


def _target(head: LayerOp) -> str:
    """What the head is compared with, in one byte."""
    return f"{head.name}/target/uint8" if head.level else "target"
