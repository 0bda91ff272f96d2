"""The end of a step: the gradients' sums over its micro-batches, and the optimizer's update, kernel
by kernel."""

from typing import Any, Dict, Optional, Sequence

from memory_estimator.step.timeline import NativeOperation
from memory_estimator.step.writer import Writer, matrix_shape
from models.layer_plan import LayerOp
from models.optimizers import OPTIMIZERS, Weight

SQUARE_PRODUCTS = 19  # of Muon's iteration by TensorFlow: of two square matrices each
OWN_SQUARE_PRODUCTS = 17  # of the native operation

GRAPH_OPS = 12
"""Operations that a kernel which TensorFlow makes orthogonal counts as in its graph, with its
twenty products of matrices: 20 of 21 steps of 64^3 and 96^3 voxels are within 35 MiB of a line
through their operations."""


def reset_sums(writer: Writer) -> None:
    """The start of a step in micro-batches: zeros, which are copied into the sums of gradients."""
    if writer.job.micro_batches == 1:
        return
    for op in writer.trained_kernels:
        zeros = writer.make(f"{op.name}/zeros", "update", [], 4 * op.kernel_elements)
        writer.run(f"{op.name}/reset", "update", [zeros, f"{op.name}/gradient_sum"])


def update(writer: Writer, gradients: Dict[str, str]) -> None:
    """From the gradients of the kernels, by their layers' names: whether all are finite, then
    weight by weight. A micro-batch adds its gradients to their sums in place; once all are done,
    the update reads those."""
    optimizer = OPTIMIZERS[writer.job.optimizer]
    trained = [gradients[op.name] for op in writer.trained_kernels]
    writer.run("gradients/finite", "pass", trained)
    read = dict(gradients)
    if writer.job.micro_batches > 1:
        for op in writer.trained_kernels:
            read[op.name] = f"{op.name}/gradient_sum"
            writer.run(f"sums/{op.name}", "pass", [gradients[op.name], read[op.name]])
    for op in writer.trained_kernels:
        rule = optimizer.rule_of(op.kernel_shape)
        weight = _WrittenWeight(writer, op, read[op.name], len(rule.slots))
        rule.update(weight)


class _Expression:
    """What a rule has computed of a weight's tensors. A sum or product that reads a tensor made for
    it alone is written over that; it is no operation of its own, but goes with the one that takes
    it."""

    def __init__(self, weight: "_WrittenWeight", reads: Sequence[str], made: Optional[str] = None):
        self.weight = weight
        self.reads = list(reads)
        self.made = made  # the tensor among `reads` that it is written over

    def __add__(self, other: Any) -> "_Expression":
        if not isinstance(other, _Expression):
            return self
        reads = list(dict.fromkeys([*self.reads, *other.reads]))
        made = self.made or other.made
        if made:
            return _Expression(self.weight, reads, made)
        return self.weight.tensor("change", reads)

    __radd__ = __add__
    __sub__ = __add__
    __rsub__ = __add__

    def __mul__(self, other: Any) -> "_Expression":
        if isinstance(other, _Expression):
            return self + other
        if self.made:
            return self
        return self.weight.tensor("scaled", self.reads, over=self.reads)

    __rmul__ = __mul__
    __truediv__ = __mul__

    def assign_add(self, change: "_Expression") -> "_Expression":
        (name,) = self.reads
        self.weight.assign(name, change)
        return self

    assign_sub = assign_add


class _WrittenWeight(Weight):
    """A kernel as a rule takes it, which writes down what the rule computes."""

    def __init__(self, writer: Writer, op: LayerOp, gradient: str, slots: int):
        self._writer = writer
        self._op = op
        self.value = _Expression(self, [f"{op.name}/kernel"])
        self.gradient = _Expression(self, [gradient])
        self.slots = [_Expression(self, [f"{op.name}/slot{number}"]) for number in range(slots)]
        self.rate = 1
        self.momentum = 1
        self.one_less_momentum = 1
        self.one_less_beta_1 = 1
        self.one_less_beta_2 = 1
        self.epsilon = 1

    def each(self, function: str, tensor: _Expression) -> _Expression:
        return self.tensor(function, tensor.reads)

    def orthogonal(self, tensor: _Expression) -> _Expression:
        """TensorFlow makes it with matrices of the kernel's smaller side, and a last product."""
        ahead = self.make("ahead", tensor.reads, over=tensor.reads)
        if self._writer.native:
            made = self._native_orthogonal(ahead)
        else:
            made = self._plain_orthogonal(ahead)
        return _Expression(self, [made], made)

    def tensor(self, name: str, reads: Sequence[str], over: Sequence[str] = ()) -> _Expression:
        """What `make` makes."""
        made = self.make(name, reads, over)
        return _Expression(self, [made], made)

    def make(self, name: str, reads: Sequence[str], over: Sequence[str] = ()) -> str:
        """An operation that makes a tensor of the kernel's size; returns its name."""
        size = 4 * self._op.kernel_elements
        return self._writer.make(f"{self._op.name}/{name}", "update", reads, size, over=over)

    def assign(self, tensor: str, change: _Expression) -> None:
        self._writer.run(f"{tensor}/assigned", "update", [*change.reads, tensor])

    def _native_orthogonal(self, ahead: str) -> str:
        op = self._op
        size = 4 * op.kernel_elements
        rows, columns = matrix_shape(op)
        few = min(rows, columns)
        native = NativeOperation("orthogonal", 1, (rows, 1, 1), 0, columns, 4)
        # Symmetric: half of each product.
        flops = 3 * op.kernel_elements * few + OWN_SQUARE_PRODUCTS * few**3
        name = f"{op.name}/orthogonal"
        return self._writer.make(
            name, "update", [ahead], size, over=[ahead], native=native, flops=flops
        )

    def _plain_orthogonal(self, ahead: str) -> str:
        op = self._op
        few = min(matrix_shape(op))
        flops = 2 * op.kernel_elements * few
        squares_flops = flops + 2 * SQUARE_PRODUCTS * few**3
        name = f"{op.name}/product"
        product = self._writer.make(name, "update", [ahead], 4 * few**2, flops=squares_flops)
        return self._writer.make(
            f"{op.name}/orthogonal",
            "update",
            [ahead, product],
            4 * op.kernel_elements,
            flops=flops,
            graph_ops=GRAPH_OPS,
        )
