"""Layers without weights: pooling, joins, nearest-neighbour up-sampling, and the ReLU after a residual sum."""

from typing import Sequence

from memory_estimator.closed_form.writer import Writer
from memory_estimator.program import Tensor
from models.layer_plan import LayerOp

MOST_PLANES = 256
"""Planes of a map that up-sampling writes down one by one; of more it makes FEW_PIECES, each of many planes."""

FEW_PIECES = 8


def pool_forward(writer: Writer, op: LayerOp) -> None:
    """Keeps which voxel of each window was the largest, a byte each."""
    winners = writer.tensor(f"{op.name}/winners", writer.job.micro * op.elements, writer.kept_at(op))
    writer.run(op.name, "pool", op.inputs, [writer.activation(op), winners])


def pool_backward(writer: Writer, op: LayerOp) -> None:
    below, upstream = op.inputs[0], writer.arrived(op)
    down = writer.transient(f"{op.name}/gradient_below", writer.map_bytes(writer.layers[below]))
    writer.run(down.name, "pool_gradient", [upstream, below, op.name, f"{op.name}/winners"], [down])
    writer.receive(below, down.name)


def concat_forward(writer: Writer, op: LayerOp) -> None:
    writer.run(op.name, "join", op.inputs, [writer.activation(op)])


def concat_backward(writer: Writer, op: LayerOp) -> None:
    """Both parts are cut out at once, so that the whole goes."""
    upstream = writer.arrived(op)
    for name in op.inputs:
        part = writer.transient(f"{op.name}/gradient_of_{name}", writer.map_bytes(writer.layers[name]))
        writer.run(part.name, "slice", [upstream], [part])
        writer.receive(name, part.name)


def relu_forward(writer: Writer, op: LayerOp) -> None:
    """In the memory of the sum."""
    writer.run(op.name, "pointwise", op.inputs, [writer.activation(op)], takes_over=op.inputs[0])


def relu_backward(writer: Writer, op: LayerOp) -> None:
    writer.receive(op.inputs[0], relu_gradient(writer, op, writer.arrived(op), op.name))


def relu_gradient(writer: Writer, op: LayerOp, upstream: str, output: str) -> str:
    """A ReLU's that no norm is fused with; returns its name. ITEX takes new memory, stock TensorFlow works in place."""
    down = writer.transient(f"{op.name}/gradient_below", writer.map_bytes(op))
    over = None if writer.itex else upstream
    writer.run(down.name, "pointwise", [upstream, output], [down], takes_over=over)
    return down.name


def upsample_forward(writer: Writer, op: LayerOp) -> None:
    upsample(writer, op, op.inputs[0], writer.activation(op))


def upsample_backward(writer: Writer, op: LayerOp) -> None:
    writer.receive(op.inputs[0], upsample_gradient(writer, op, writer.arrived(op)))


def upsample(writer: Writer, op: LayerOp, source: str, output: Tensor) -> None:
    """Axis by axis: Keras cuts the map into planes and joins each plane twice."""
    _resample(writer, op, source, output, [1, 2, 4, 8])


def upsample_gradient(writer: Writer, op: LayerOp, upstream: str) -> str:
    """The same way back: planes cut out, and each added to its twin. Returns its name."""
    down = writer.transient(f"{op.name}/gradient_below", writer.map_bytes(op) // 8)
    _resample(writer, op, upstream, down, [8, 4, 2, 1])
    return down.name


# --- Private helpers ---


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
            writer.transient(f"{result}/axis{axis}/plane{first}", plane_bytes * (last - first))
            for first, last in zip(cuts, cuts[1:])
        ]
        writer.run(f"{result}/cut{axis}", "slice", [source], pieces)
        last = then == eighths[-1]
        joined = output if last else writer.transient(f"{result}/{axis}", fine * then // 8)
        writer.run(f"{result}/join{axis}", "join", [piece.name for piece in pieces], [joined])
        source = joined.name
