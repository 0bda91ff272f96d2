"""Convolutions: of a block, of a head, of a residual shortcut, and the up-convolution.

In every backward pass the filter gradient comes first and the input gradient waits for it (models/ordered.py). ITEX
takes oneDNN's scratch from the allocator, and so the kernel in the layout that oneDNN prefers: its forward kernels (for
the up-convolution the input gradient, which is one) keep that copy, the others take it anew each time. Stock TensorFlow
leaves both to oneDNN, outside the allocator.
"""

from typing import List

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
    _convolve(writer, op, op.inputs[0], writer.activation(op))


def backward(writer: Writer, op: LayerOp) -> None:
    """The head's bias gradient first, which reads the whole map."""
    upstream = writer.arrived(op)
    if op.kind == "head":
        writer.run(f"{op.name}/bias_gradient", "bias_gradient", [upstream], layer=op)
    _gradients(writer, op, op.inputs[0], upstream)


def shortcut_forward(writer: Writer, op: LayerOp) -> None:
    """A residual block's sum: the convolved entry is added to the block's maps, in their memory."""
    maps, entry = op.inputs
    cast_kernel(writer, op)
    convolved = writer.transient(f"{op.name}/convolved", writer.map_bytes(op))
    _convolve(writer, op, entry, convolved)
    total = writer.transient(op.name, writer.map_bytes(op))
    writer.run(op.name, "pointwise", [maps, convolved.name], [total], takes_over=maps)


def shortcut_backward(writer: Writer, op: LayerOp) -> None:
    """The short way first; the long way then reads the same gradient."""
    maps, entry = op.inputs
    upstream = writer.arrived(op)
    _gradients(writer, op, entry, upstream)
    writer.receive(maps, upstream)


def up_forward(writer: Writer, op: LayerOp) -> None:
    """Its kernel is a convolution's input gradient to oneDNN, and copies its input."""
    cast_kernel(writer, op)
    input_bytes = writer.layers[op.inputs[0]].elements * writer.compute_bytes
    writer.run(
        op.name,
        "up_conv",
        [*op.inputs, kernel_read(writer, op)],
        [writer.activation(op)],
        scratch=[up_convolution_bytes(input_bytes, writer.job.threads), _reordered(writer, op)] if writer.itex else [],
        hidden_bytes=0 if writer.itex else hidden_up_convolution_bytes(input_bytes),
        flops=writer.job.batch * op.flops,
        layer=op,
    )


def up_backward(writer: Writer, op: LayerOp) -> None:
    """The mirror of a convolution: to its filter gradient the output's gradient is the map that the filter slides over,
    and its input gradient is a forward convolution."""
    below, upstream = writer.layers[op.inputs[0]], writer.arrived(op)
    batch, fine, coarse = writer.job.batch, op.shape, below.shape
    seen = FilterGradient(batch, fine[:3], coarse[:3], fine[3], coarse[3], 2, 2, False)
    _filter_gradient(writer, op, "up_conv_filter_gradient", below.name, upstream, seen)
    down = writer.transient(f"{op.name}/input_gradient", writer.map_bytes(below))
    reads, flops = [upstream, kernel_read(writer, op)], batch * op.flops
    kept = _kept(writer, op)
    writer.run(down.name, "up_conv_input_gradient", reads, [down], keeps=kept, flops=flops, layer=op)
    writer.receive(below.name, down.name)


# --- Private helpers ---


def _convolve(writer: Writer, op: LayerOp, source: str, output: Tensor) -> None:
    reads, flops = [source, kernel_read(writer, op)], writer.job.batch * op.flops
    writer.run(output.name, "conv", reads, [output], keeps=_kept(writer, op), flops=flops, layer=op)


def _gradients(writer: Writer, op: LayerOp, source: str, upstream: str) -> None:
    """Of the kernel, then of the input; the image needs none."""
    below, grid = writer.layers[source], op.shape[:3]
    seen = FilterGradient(writer.job.batch, grid, grid, below.shape[3], op.shape[3], op.kernel, 1, False)
    _filter_gradient(writer, op, "conv_filter_gradient", source, upstream, seen)
    if below.kind == "input":
        return
    down = writer.transient(f"{op.name}/input_gradient", writer.map_bytes(below))
    reads, flops = [upstream, kernel_read(writer, op)], writer.job.batch * op.flops
    scratch = [_reordered(writer, op)] if writer.itex else []
    writer.run(down.name, "conv_input_gradient", reads, [down], scratch=scratch, flops=flops, layer=op)
    writer.receive(below.name, down.name)


def _filter_gradient(writer: Writer, op: LayerOp, kind: str, below: str, upstream: str, seen: FilterGradient) -> None:
    dtype, threads = writer.job.unet.dtype, writer.job.threads
    gradient = writer.tensor(filter_gradient_name(op), kernel_elements(op) * writer.compute_bytes, "gradients")
    buffers = [filter_gradient_bytes(seen, dtype, threads), _reordered(writer, op)]
    writer.run(
        gradient.name,
        kind,
        [below, upstream],
        [gradient],
        scratch=buffers if writer.itex else [],
        touched=filter_gradient_touched(seen, dtype, threads),
        hidden_bytes=0 if writer.itex else hidden_filter_gradient_bytes(seen, dtype, threads),
        flops=writer.job.batch * op.flops,
        layer=op,
    )


def _kept(writer: Writer, op: LayerOp) -> List[Tensor]:
    """The kernel in oneDNN's layout, kept from its first run on."""
    if not writer.itex:
        return []
    return [writer.tensor(f"{op.name}/reordered", _reordered(writer, op), "weights, reordered")]


def _reordered(writer: Writer, op: LayerOp) -> int:
    """Bytes of a kernel in the layout that oneDNN prefers."""
    return kernel_elements(op) * writer.compute_bytes
