"""From a graph in its order of execution to a `Program`: what lies in which memory, who takes it over, when it goes.

TensorFlow counts references. A tensor goes when its last reader has finished; an operation writes its result over an
input that nobody else will read, where its kernel can; a reshape is the same memory under another name.
"""

import dataclasses
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from memory_estimator.step.allocator import use
from memory_estimator.step.onednn import USUAL, Kernels
from memory_estimator.step.program import (
    Program,
    StepOp,
    Tensor,
    Timeline,
    buffers_of,
    inputs_made,
    kernel_made,
    timeline,
)
from tests.reference import op_rules
from tests.reference.graph import Node, Output, executed_graph, execution_order

Source = Tuple[str, int]  # (node, index of its output)


@dataclass(frozen=True)
class Replay:
    """One training step, replayed, in one order of those that a model may leave open."""

    program: Program
    timeline: Timeline
    allocator_peak_bytes: int  # from the third step on: `get_memory_info("CPU:0")["peak"]`
    resident_bytes: int  # what the allocator's part of the process's memory grows to
    hidden_bytes: int
    """Scratch that oneDNN takes outside the allocator, at its most: with stock TensorFlow alone."""


def estimate_step(
    step: Callable,
    *specs: Any,
    variables: Sequence[Any] = (),
    threads: int = 2,
    region_bytes: int = 0,
    kernels: Kernels = USUAL,
) -> Replay:
    """One training step, a function or tf.function of tensors like `specs` (TensorSpec). `variables` are in the order
    they were made, on which the allocator's regions depend; others that the step uses are found. Nothing volume-sized
    is taken. Raises ValueError where a size is not fixed."""
    nodes, trace = executed_graph(step, specs)
    # By their memory: under mixed precision the same variable comes in two wrappers.
    unique = {id(variable.handle): variable for variable in (*variables, *trace.graph.variables)}
    held: List[Tensor] = []
    made: List[StepOp] = []
    for index, variable in enumerate(unique.values()):
        size = variable.dtype.size * variable.shape.num_elements()
        tensor = Tensor(f"{variable.name}#{index}", size, "variables")
        held.append(tensor)
        is_kernel = variable.trainable and len(variable.shape) > 1  # made by Keras' usual three operations
        made += kernel_made(tensor) if is_kernel else [StepOp(tensor.name, "update", writes=(tensor,))]
    program = program_of(execution_order(nodes), held, made, threads, kernels)
    program = dataclasses.replace(program, region_bytes=region_bytes)
    used, hidden = use(program), max(op.hidden_bytes for op in program.ops)
    return Replay(program, timeline(program), used.peak_bytes, used.resident_bytes + used.small_bytes, hidden)


def program_of(
    order: Sequence[Node],
    variables: Sequence[Tensor],
    made: Sequence[StepOp],
    threads: int = 2,
    kernels: Kernels = USUAL,
) -> Program:
    """The program of `order`. Resident are the `variables`, which `made` made, and the graph's inputs and constants."""

    def age(node: Node) -> int:
        """The caller's inputs come in their order, the constants when the graph is made ready to run."""
        return node.attributes["index"].i if node.op == "_Arg" else sys.maxsize

    memory, ops, resident, given = _Memory(order), [], list(variables), []
    for node in sorted((node for node in order if node.op in op_rules.STAYS), key=age):
        tensors = memory.place(node, node.outputs, op_rules.STAYS[node.op])
        resident += tensors
        if node.op == "_Arg" and tensors:
            given.append((tensors[0], node.outputs[0].dtype))
    for node in order:
        if node.op not in op_rules.STAYS:
            ops.append(_operation(node, memory, threads, kernels))
            memory.finish(node)
    returned = [node.inputs[0] for node in order if node.op == "_Retval"]
    ops.append(StepOp("return", "slice", reads=memory.tensors(returned)))
    return Program(tuple(resident), tuple(ops), (*made, *inputs_made(given)))


class _Memory:
    """Which tensor each output lies in, and how many reads of each are still to come."""

    def __init__(self, order: Sequence[Node]):
        self.outputs: Dict[Source, Output] = {}
        self._tensor: Dict[Source, Optional[Tensor]] = {}
        """None where it lies in nothing of the step's own: a variable's memory, or it has no bytes."""
        self._reads_of_output = Counter(source for node in order for source in node.inputs)
        self._reads_of_tensor: Counter = Counter()
        self._outputs_read: Counter = Counter()
        for name, index in self._reads_of_output:
            self._outputs_read[name] = max(self._outputs_read[name], index + 1)

    def tensors(self, sources: Sequence[Source]) -> Tuple[str, ...]:
        """The tensors that `sources` lie in, each once."""
        return tuple(dict.fromkeys(t.name for t in (self._tensor[source] for source in sources) if t))

    def place(self, node: Node, outputs: Sequence[Output], group: str) -> Tuple[Tensor, ...]:
        """New memory for the outputs of `node`, but for those that no rule knows, such as a fused bias gradient."""
        for index in range(len(outputs), self._outputs_read[node.name]):
            self.own((node.name, index), Output((), "", 0), None)
        placed = [Tensor(f"{node.name}:{i}", one.bytes, group, one.touched) for i, one in enumerate(outputs)]
        for index, (output, tensor) in enumerate(zip(outputs, placed)):
            self.own((node.name, index), output, tensor if output.bytes else None)
        return tuple(tensor for tensor in placed if tensor.bytes)

    def own(self, source: Source, output: Output, tensor: Optional[Tensor]) -> None:
        """`output` lies in `tensor`."""
        self.outputs[source], self._tensor[source] = output, tensor
        if tensor:
            self._reads_of_tensor[tensor.name] += self._reads_of_output[source]

    def view(self, node: Node, viewed: Sequence[int]) -> None:
        """Each output of `node` lies where the input lies that `viewed` names."""
        for index, which in enumerate(viewed):
            self.own((node.name, index), node.outputs[index], self._tensor[node.inputs[which]])

    def overwritable(self, node: Node) -> Optional[str]:
        """The first input that an operation in place would write over, None where there is none."""
        # Some kernels always do; of a norm ITEX's passes say where they saw that nobody else reads it.
        if node.op not in op_rules.IN_PLACE and not (
            "is_inplace" in node.attributes and node.attributes["is_inplace"].b
        ):
            return None
        result = node.outputs[-1 if node.op in op_rules.LAST_FIRST else 0]
        for source in node.inputs:
            tensor, given = self._tensor[source], self.outputs[source]
            if tensor is None or tensor.group in op_rules.STAYS.values():
                continue
            alike = (given.dtype, given.bytes, tensor.bytes) == (result.dtype, result.bytes, given.bytes)
            if alike and self._reads_of_tensor[tensor.name] == 1:
                return tensor.name
        return None

    def finish(self, node: Node) -> None:
        """`node` has read its inputs."""
        read = (self._tensor[source] for source in node.inputs)
        self._reads_of_tensor.subtract(tensor.name for tensor in read if tensor)


def _operation(node: Node, memory: _Memory, threads: int, kernels: Kernels) -> StepOp:
    inputs = [memory.outputs[source] for source in node.inputs]
    viewed = op_rules.views(node, inputs)
    if viewed is not None:
        memory.view(node, viewed)
        return StepOp(node.name, "slice", reads=memory.tensors(node.inputs))
    over, reads = memory.overwritable(node), memory.tensors(node.inputs)
    writes = memory.place(node, op_rules.outputs(node, inputs), node.op)
    writes = writes[::-1] if node.op in op_rules.LAST_FIRST else writes
    buffers = buffers_of(node.name, op_rules.buffers(node, inputs, threads, kernels), node.again)
    return StepOp(node.name, node.op, reads, writes, takes_over=over, **buffers)
