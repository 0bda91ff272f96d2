"""The end of a step: the gradients' sums over its micro-batches, and the optimizer's update, kernel
by kernel."""

from typing import Dict

from memory_estimator.job import OPTIMIZERS, is_orthogonal
from memory_estimator.step.program import OwnOperation, Tensor
from memory_estimator.step.scratch import KINDS
from memory_estimator.step.writer import Writer, kernel_elements, kernel_shape, kernel_sides
from models.layer_plan import LayerOp

SQUARES, SQUARE_PRODUCTS = (
    7,
    19,
)  # of Muon's iteration: square matrices at once, and products of two of them
OWN_SQUARE_PRODUCTS = 17  # of the own operation


FEW_THREADS = 4
"""Up to so many threads oneDNN does not divide a sum over rows among them (2 and 4 do not; 16, 56
and 112 do)."""
COPIED_BYTES = 512
"""For each thread and column: the parts of a matrix that oneDNN copies. With the threads' own sums
this is 102 to 131 % of what was requested on 56 and 112 threads for matrices of 128 to 1024 columns
whose rows were divided (oneDNN 3.3 in ITEX 2.15.0.0)."""


def reset_sums(writer: Writer) -> None:
    """The start of a step in micro-batches: zeros, into whose memory the sums of gradients move."""
    for op in writer.kernels if writer.job.parts > 1 else ():
        zeros = writer.make(f"{op.name}/zeros", "update", [], 4 * kernel_elements(op))
        writer.move(f"{op.name}/gradient_sum", "gradient sums", [zeros])


def update(writer: Writer, gradients: Dict[str, str]) -> None:
    """From the gradients of the kernels, by their layers' names: whether all are finite, then
    weight by weight. A micro-batch adds its gradients to their sums in place; once all are done,
    the update reads those."""
    optimizer = OPTIMIZERS[writer.job.optimizer]
    writer.run("gradients/finite", "pass", list(gradients.values()))
    if writer.job.parts > 1:
        for op in writer.kernels:
            total = f"{op.name}/gradient_sum"
            writer.run(f"sums/{op.name}", "pass", [gradients[op.name], total])
            gradients = {**gradients, op.name: total}
    for op in writer.kernels:
        orthogonal = optimizer.orthogonal and is_orthogonal(kernel_shape(op))
        change = _orthogonalise if orthogonal else UPDATES[optimizer.update]
        change(writer, op, gradients[op.name])


def _descend(writer: Writer, op: LayerOp, gradient: str) -> None:
    """SGD with Nesterov's momentum, which changes in place: m -= (1 - d) m + r g, w += d m - r
    g."""
    size, slot = 4 * kernel_elements(op), f"{op.name}/slot0"
    scaled = writer.make(f"{op.name}/scaled", "update", [gradient], size, over=[gradient])
    change = writer.make(f"{op.name}/change", "update", [slot], size)
    writer.run(f"{op.name}/momentum", "update", [change, scaled, slot])
    decayed = writer.make(f"{op.name}/decayed", "update", [slot], size)
    writer.run(f"{op.name}/update", "update", [decayed, scaled, f"{op.name}/kernel"])


def _orthogonalise(writer: Writer, op: LayerOp, gradient: str) -> None:
    """Muon of a kernel of more than one voxel: its momentum changes in place; the look-ahead is
    written over the gradient if that is no sum, and the orthogonal matrix over the look-ahead.
    TensorFlow makes that with matrices of the kernel's smaller side, and a last product."""
    size, slot = 4 * kernel_elements(op), f"{op.name}/slot0"
    rows, columns = kernel_sides(op)
    few = min(rows, columns)
    change = writer.make(f"{op.name}/change", "update", [slot], size)
    writer.run(f"{op.name}/momentum", "update", [change, gradient, slot])
    decayed = writer.make(f"{op.name}/decayed", "update", [slot], size)
    ahead = writer.make(
        f"{op.name}/ahead", "update", [gradient, decayed], size, over=[gradient, decayed]
    )
    if writer.own:
        own = OwnOperation("orthogonal", 1, (rows, 1, 1), 0, columns, 4)
        flops = (
            3 * kernel_elements(op) * few + OWN_SQUARE_PRODUCTS * few**3
        )  # symmetric: half of each
        more = {"over": [ahead], "own": own, "flops": flops}
        step = writer.make(f"{op.name}/orthogonal", KINDS[own.kind], [ahead], size, **more)
        writer.run(f"{op.name}/update", "update", [step, f"{op.name}/kernel"])
        return
    squares = tuple(
        Tensor(f"{op.name}/square{n}", 4 * few**2, "scratch") for n in range(1, SQUARES)
    )
    flops = 2 * kernel_elements(op) * few
    threads = Tensor(f"{op.name}/threads", _of_threads(writer, few), "scratch")
    more = {"scratch": (*squares, threads), "flops": flops + 2 * SQUARE_PRODUCTS * few**3}
    product = writer.make(f"{op.name}/product", "update", [ahead], 4 * few**2, **more)
    step = writer.make(f"{op.name}/orthogonal", "update", [ahead, product], size, flops=flops)
    writer.run(f"{op.name}/update", "update", [step, f"{op.name}/kernel"])


def _of_threads(writer: Writer, side: int) -> int:
    """What Intel's extension requests for the threads of a matrix's product with itself: sums."""
    if writer.job.engine != "itex":
        return 0
    sums = 4 * side**2 if writer.job.threads > FEW_THREADS else 0
    return writer.job.threads * (COPIED_BYTES * side + sums)


def _adapt(writer: Writer, op: LayerOp, gradient: str) -> None:
    """Adam: mean and square change in place, one after the other."""
    size, slots = 4 * kernel_elements(op), [f"{op.name}/slot{slot}" for slot in range(2)]
    for slot in reversed(slots):
        change = writer.make(f"{slot}/change", "update", [gradient, slot], size)
        writer.run(f"{slot}/changed", "update", [change, slot])
    parts = [writer.make(f"{slot}/scaled", "update", [slot], size) for slot in slots]
    writer.run(f"{op.name}/update", "update", [*parts, f"{op.name}/kernel"])


UPDATES = {"momentum": _descend, "adam": _adapt}
"""`Optimizer.update` -> the operations of a weight's update."""
