"""Convolutions: of a block, of a head, of a residual shortcut, and the up-convolution.

In every backward pass the filter gradient comes first and the input gradient waits for it (models/ordered.py). ITEX
takes oneDNN's scratch from the allocator, and so the kernel in the layout that oneDNN prefers: its forward kernels (for
the up-convolution the input gradient, which is one) keep that copy, the others take it anew each time. Stock TensorFlow
leaves both to oneDNN, outside the allocator.
"""

from typing import List

from memory_estimator.closed_form.norms import MOST_SAMPLES
from memory_estimator.closed_form.weights import cast_kernel, filter_gradient_name, kernel_elements, kernel_read
from memory_estimator.closed_form.writer import Writer
from memory_estimator.program import Tensor
from memory_estimator.scratch import (
    FilterGradient,
    filter_gradient_bytes,
    filter_gradient_touched,
    hidden_filter_gradient_bytes,
    hidden_up_convolution_bytes,
    up_convolution_bytes,
)
from models.layer_plan import LayerOp


def forward(writer: Writer, op: LayerOp) -> None:
    """A bias, which only the head has, is added in the same operation."""
    cast_kernel(writer, op)
    convolve(writer, op, op.inputs[0], writer.activation(op))


def backward(writer: Writer, op: LayerOp) -> None:
    _gradients(writer, op, op.inputs[0], writer.arrived(op))


def head_backward(writer: Writer, op: LayerOp) -> None:
    """The bias gradient first, which reads the whole map."""
    source, upstream = op.inputs[0], writer.arrived(op)
    writer.run(f"{op.name}/bias_gradient", "bias_gradient", [upstream], layer=op)
    if writer.job.policy == "speed":
        _gradients(writer, op, source, upstream)
    else:
        filter_gradient_by_planes(writer, op, source, upstream)
        writer.receive(source, input_gradient(writer, op, writer.layers[source], upstream))


def shortcut_forward(writer: Writer, op: LayerOp) -> None:
    """A residual block's sum: the convolved entry is added to the block's maps, in their memory."""
    maps, entry = op.inputs
    cast_kernel(writer, op)
    convolved = writer.transient(f"{op.name}/convolved", writer.map_bytes(op))
    convolve(writer, op, entry, convolved)
    total = writer.transient(op.name, writer.map_bytes(op))
    writer.run(op.name, "pointwise", [maps, convolved.name], [total], takes_over=maps)


def shortcut_backward(writer: Writer, op: LayerOp) -> None:
    """The short way first; the long way then reads the same gradient."""
    maps, entry = op.inputs
    upstream = writer.arrived(op)
    _gradients(writer, op, entry, upstream)
    writer.receive(maps, upstream)


def up_forward(writer: Writer, op: LayerOp) -> None:
    cast_kernel(writer, op)
    up_convolve(writer, op, writer.activation(op))


def up_backward(writer: Writer, op: LayerOp) -> None:
    writer.receive(op.inputs[0], up_gradients(writer, op, writer.arrived(op)))


# --- One convolution or gradient ---


def convolve(writer: Writer, op: LayerOp, source: str, output: Tensor) -> None:
    """`output` from the map `source`, with the kernel of `op`."""
    reads, flops = [source, kernel_read(writer, op)], writer.job.micro * op.flops
    kept = _kept(writer, op, output.name)
    writer.run(output.name, "conv", reads, [output], keeps=kept, flops=flops, layer=op)


def filter_gradient(writer: Writer, op: LayerOp, source: str, upstream: str) -> None:
    """The whole volume at once."""
    grid = op.shape[:3]
    seen = FilterGradient(writer.job.micro, grid, grid, op.in_channels, op.shape[3], op.kernel, 1, False)
    _filter_gradient(writer, op, "conv_filter_gradient", source, upstream, seen)


def filter_gradient_by_planes(writer: Writer, op: LayerOp, source: str, upstream: str) -> None:
    """As models/filter_gradient.py: for every sample one two-dimensional gradient a plane of the kernel, joined."""
    planes, *grid = op.shape[:3]
    samples, flat = min(writer.job.micro, MOST_SAMPLES), (1, *grid)
    seen = FilterGradient(planes, flat, flat, op.in_channels, op.shape[3], op.kernel, 1, False, flat=True)
    name, size = filter_gradient_name(op), _kernel_bytes(writer, op)
    total = ""
    for sample in range(samples):
        pieces = [
            writer.tensor(f"{name}/sample{sample}/plane{plane}", size // op.kernel, "gradients")
            for plane in range(op.kernel)
        ]
        for piece in pieces:
            flops = writer.job.micro * op.flops // (samples * op.kernel)
            _filter_gradient_op(writer, op, "conv_filter_gradient", [source, upstream], piece, seen, flops)
        last = sample == samples - 1
        whole = writer.tensor(name if last and not total else f"{name}/sample{sample}", size, "gradients")
        writer.run(whole.name, "join", [piece.name for piece in pieces], [whole])
        if total:
            summed = writer.tensor(name if last else f"{name}/sum{sample}", size, "gradients")
            writer.run(summed.name, "pointwise", [total, whole.name], [summed], takes_over=total)
            whole = summed
        total = whole.name


def input_gradient(writer: Writer, op: LayerOp, below: LayerOp, upstream: str) -> str:
    """Of the convolution's input, a map like the output of `below`; returns its name."""
    down = writer.transient(f"{op.name}/input_gradient", writer.map_bytes(below))
    reads, flops = [upstream, kernel_read(writer, op)], writer.job.micro * op.flops
    scratch = [_kernel_bytes(writer, op)] if writer.itex else []
    writer.run(down.name, "conv_input_gradient", reads, [down], scratch=scratch, flops=flops, layer=op)
    return down.name


def up_convolve(writer: Writer, op: LayerOp, output: Tensor) -> None:
    """Its kernel is a convolution's input gradient to oneDNN, and copies its input."""
    input_bytes = writer.layers[op.inputs[0]].elements * writer.compute_bytes
    scratch = [up_convolution_bytes(input_bytes, writer.job.threads), _kernel_bytes(writer, op)]
    writer.run(
        output.name,
        "up_conv",
        [*op.inputs, kernel_read(writer, op)],
        [output],
        scratch=scratch if writer.itex else [],
        hidden_bytes=0 if writer.itex else hidden_up_convolution_bytes(input_bytes),
        flops=writer.job.micro * op.flops,
        layer=op,
    )


def up_gradients(writer: Writer, op: LayerOp, upstream: str) -> str:
    """The mirror of a convolution: to its filter gradient the output's gradient is the map that the filter slides over,
    and its input gradient, whose name is returned, is a forward convolution."""
    below = writer.layers[op.inputs[0]]
    micro, fine, coarse = writer.job.micro, op.shape, below.shape
    seen = FilterGradient(micro, fine[:3], coarse[:3], fine[3], coarse[3], 2, 2, False)
    _filter_gradient(writer, op, "up_conv_filter_gradient", below.name, upstream, seen)
    down = writer.transient(f"{op.name}/input_gradient", writer.map_bytes(below))
    reads, flops = [upstream, kernel_read(writer, op)], micro * op.flops
    kept = _kept(writer, op, op.name)
    writer.run(down.name, "up_conv_input_gradient", reads, [down], keeps=kept, flops=flops, layer=op)
    return down.name


# --- Private helpers ---


def _gradients(writer: Writer, op: LayerOp, source: str, upstream: str) -> None:
    """Of the kernel, then of the input; the image needs none."""
    below = writer.layers[source]
    filter_gradient(writer, op, source, upstream)
    if below.kind != "input":
        writer.receive(source, input_gradient(writer, op, below, upstream))


def _filter_gradient(writer: Writer, op: LayerOp, kind: str, below: str, upstream: str, seen: FilterGradient) -> None:
    written = writer.tensor(filter_gradient_name(op), _kernel_bytes(writer, op), "gradients")
    _filter_gradient_op(writer, op, kind, [below, upstream], written, seen, writer.job.micro * op.flops)


def _filter_gradient_op(
    writer: Writer, op: LayerOp, kind: str, reads: List[str], written: Tensor, seen: FilterGradient, flops: int
) -> None:
    """oneDNN's scratch and, as large as what is written, that in the layout that oneDNN prefers."""
    dtype, threads = writer.job.unet.dtype, writer.job.threads
    buffers = [filter_gradient_bytes(seen, dtype, threads), written.bytes]
    writer.run(
        written.name,
        kind,
        reads,
        [written],
        scratch=buffers if writer.itex else [],
        touched=filter_gradient_touched(seen, dtype, threads),
        hidden_bytes=0 if writer.itex else hidden_filter_gradient_bytes(seen, dtype, threads),
        flops=flops,
        layer=op,
    )


def _kept(writer: Writer, op: LayerOp, name: str) -> List[Tensor]:
    """The kernel in oneDNN's layout, kept from an operation's first run on: each of the graph's keeps its own."""
    if not writer.itex:
        return []
    return [writer.tensor(f"{name}/reordered", _kernel_bytes(writer, op), "weights, reordered")]


def _kernel_bytes(writer: Writer, op: LayerOp) -> int:
    """Of a kernel in the compute dtype, and in the layout that oneDNN prefers."""
    return kernel_elements(op) * writer.compute_bytes
