"""Weights: made before the first step, cast for the convolutions, updated at the end. Norms' and biases count in one
lump: all of them together are smaller than what the allocator looks at."""

from typing import List

from memory_estimator.before_step import kernel_made
from memory_estimator.closed_form.writer import Writer
from memory_estimator.program import StepOp
from models.layer_plan import LayerOp

SLOTS = {"adam": 2, "sgd": 1}
"""Float32 copies of every trainable weight that the optimizer keeps: mean and variance, or momentum."""

CONVOLUTIONS = ("conv", "head", "up_conv", "shortcut")
"""Kinds of layers that have a kernel."""


def make_weights(writer: Writer) -> None:
    """Kernels, slots as zeros, averages as copies: in the order that `cpu3d.training.learner.Learner` makes them."""
    kernels = _with_kernel(writer)
    for op in kernels:
        kernel = writer.tensor(f"{op.name}/kernel", 4 * kernel_elements(op), "weights")
        writer.before += kernel_made(kernel, f"{op.name}/uniform", f"{op.name}/scaled")
        writer.resident.append(kernel)
    in_kernels = sum(kernel_elements(op) for op in kernels)
    small = sum(op.trainable + op.frozen for op in writer.plan) - in_kernels
    writer.resident.append(writer.tensor("norms and biases", 4 * small, "weights"))

    slots = SLOTS[writer.job.optimizer]
    copies = [(op, f"slot{slot}", "optimizer slots") for op in kernels for slot in range(slots)]
    if writer.job.averaged:
        copies += [(op, "average", "averaged weights") for op in kernels]
    if writer.job.parts > 1:
        copies += [(op, "gradient_sum", "gradient sums") for op in kernels]
    for op, suffix, group in copies:
        copy = writer.tensor(f"{op.name}/{suffix}", 4 * kernel_elements(op), group)
        writer.before.append(StepOp(copy.name, "update", writes=(copy,)))
        writer.resident.append(copy)
    trained = sum(op.trainable for op in writer.plan) - in_kernels
    writer.resident.append(writer.tensor("slots of norms and biases", 4 * slots * trained, "optimizer slots"))
    if writer.job.parts > 1:
        writer.resident.append(writer.tensor("sums of norms and biases", 4 * trained, "gradient sums"))


def cast_kernel(writer: Writer, op: LayerOp) -> None:
    """The bfloat16 copy that the convolution reads, made when its maps are there and kept for the gradients."""
    if writer.mixed:
        cast = writer.tensor(kernel_read(writer, op), 2 * kernel_elements(op), "weights, bfloat16 copies")
        writer.run(cast.name, "update", [f"{op.name}/kernel"], [cast])


def add_to_sums(writer: Writer) -> None:
    """What a micro-batch does in place of the update: all gradients cast, then each added to its sum, in place."""
    kernels = _with_kernel(writer)
    for op in kernels:
        _cast_gradient(writer, op)
    for op in kernels:
        reads = [_float32_gradient(writer, op), f"{op.name}/gradient_sum"]
        writer.run(f"sums/{op.name}", "pointwise", reads)


def update(writer: Writer) -> None:
    """All gradients cast and (Adam) squared, then weight by weight: a temporary of the weight's size at a time.

    From the sums where a step has several micro-batches, once all of them are done.
    """
    kernels, adam, summed = _with_kernel(writer), writer.job.optimizer == "adam", writer.job.parts > 1
    for op in kernels:
        if not summed:
            _cast_gradient(writer, op)
        if adam:
            square = writer.transient(f"{op.name}/square", 4 * kernel_elements(op))
            writer.run(square.name, "update", [_updated_from(writer, op)], [square])
    for op in kernels:
        slots = [f"{op.name}/slot{slot}" for slot in range(SLOTS[writer.job.optimizer])]
        squares = [f"{op.name}/square"] if adam else []
        change = writer.transient(f"{op.name}/update", 4 * kernel_elements(op))
        reads = [_updated_from(writer, op), *slots, *squares, f"{op.name}/kernel"]
        writer.run(change.name, "update", reads, [change])


def kernel_read(writer: Writer, op: LayerOp) -> str:
    """The name of the kernel that the convolution reads: the variable, or its bfloat16 copy."""
    return f"{op.name}/kernel_cast" if writer.mixed else f"{op.name}/kernel"


def kernel_elements(op: LayerOp) -> int:
    """Weights of a layer without its bias, which only the head has."""
    return op.trainable - (op.shape[3] if op.kind == "head" else 0)


def filter_gradient_name(op: LayerOp) -> str:
    """In the compute dtype, as the convolution's gradient writes it."""
    return f"{op.name}/filter_gradient"


# --- Private helpers ---


def _with_kernel(writer: Writer) -> List[LayerOp]:
    return [op for op in writer.plan if op.kind in CONVOLUTIONS]


def _updated_from(writer: Writer, op: LayerOp) -> str:
    """What the optimizer reads."""
    return f"{op.name}/gradient_sum" if writer.job.parts > 1 else _float32_gradient(writer, op)


def _float32_gradient(writer: Writer, op: LayerOp) -> str:
    return filter_gradient_name(op) + ("/float32" if writer.mixed else "")


def _cast_gradient(writer: Writer, op: LayerOp) -> None:
    if writer.mixed:
        cast = writer.tensor(_float32_gradient(writer, op), 4 * kernel_elements(op), "gradients")
        writer.run(cast.name, "update", [filter_gradient_name(op)], [cast])
