"""From a graph in its order of execution to a `Program`: what lies in which memory, who takes it over, when it goes.

TensorFlow counts references. A tensor goes when its last reader has finished; an operation writes its result over an
input that nobody else will read, where its kernel can; a reshape is the same memory under another name.
"""

import sys
from collections import Counter
from typing import Dict, Optional, Sequence, Tuple

from memory_estimator.replay import op_rules
from memory_estimator.replay.graph import Node, Output
from memory_estimator.step.program import Program, StepOp, Tensor, inputs_made

Source = Tuple[str, int]
"""(node, index of its output)."""


def program_of(order: Sequence[Node], variables: Sequence[Tensor], made: Sequence[StepOp], threads: int) -> Program:
    """The program of `order`. Resident are the `variables`, which `made` made, and the graph's inputs and constants."""
    memory = _Memory(order)
    stays = sorted((node for node in order if node.op in op_rules.STAYS), key=_age)
    placed = [(node, memory.place(node, node.outputs, op_rules.STAYS[node.op])) for node in stays]
    resident = (*variables, *(tensor for _, tensors in placed for tensor in tensors))
    given = [(tensors[0], node.outputs[0].dtype) for node, tensors in placed if node.op == "_Arg" and tensors]
    ops = []
    for node in order:
        if node.op in op_rules.STAYS:
            continue
        inputs = [memory.outputs[source] for source in node.inputs]
        viewed = op_rules.views(node, inputs)
        if viewed is None:
            ops.append(_operation(node, inputs, memory, threads))
        else:
            memory.view(node, viewed)
            ops.append(StepOp(node.name, "slice", reads=memory.tensors(node.inputs)))
        memory.finish(node)
    returned = [node.inputs[0] for node in order if node.op == "_Retval"]
    ops.append(StepOp("return", "slice", reads=memory.tensors(returned)))
    return Program(resident, tuple(ops), (*made, *inputs_made(given)))


# --- Private helpers ---


class _Memory:
    """Which tensor each output lies in, and how many reads of each are still to come."""

    def __init__(self, order: Sequence[Node]):
        self.outputs: Dict[Source, Output] = {}
        self._tensor: Dict[Source, Optional[str]] = {}
        """None where it lies in nothing of the step's own: a variable's memory, or it has no bytes."""
        self._reads_of_output = Counter(source for node in order for source in node.inputs)
        self._outputs_read: Counter = Counter()
        for name, index in self._reads_of_output:
            self._outputs_read[name] = max(self._outputs_read[name], index + 1)
        self._reads_of_tensor: Counter = Counter()
        self._bytes: Dict[str, int] = {}
        self._fixed: set = set()

    def tensors(self, sources: Sequence[Source]) -> Tuple[str, ...]:
        """The tensors that `sources` lie in, each once."""
        return tuple(dict.fromkeys(t for t in (self._tensor[source] for source in sources) if t))

    def place(self, node: Node, outputs: Sequence[Output], group: str) -> Tuple[Tensor, ...]:
        """New memory for the outputs of `node`."""
        placed = []
        for index in range(len(outputs), self._outputs_read[node.name]):
            # Known by no rule: small, such as the bias gradient that a fused kernel computes alongside.
            self._own((node.name, index), Output((), "", 0), None)
        for index, output in enumerate(outputs):
            tensor = Tensor(f"{node.name}:{index}", output.bytes, group, output.touched) if output.bytes else None
            self._own((node.name, index), output, tensor and tensor.name)
            placed += [tensor] if tensor else []
        self._bytes.update((tensor.name, tensor.bytes) for tensor in placed)
        if node.op in op_rules.STAYS:
            self._fixed.update(tensor.name for tensor in placed)
        return tuple(placed)

    def view(self, node: Node, viewed: Sequence[int]) -> None:
        """Each output of `node` lies where the input lies that `viewed` names."""
        for index, which in enumerate(viewed):
            self._own((node.name, index), node.outputs[index], self._tensor[node.inputs[which]])

    def overwritable(self, node: Node) -> Optional[str]:
        """The first input that an operation in place would write over, None where there is none."""
        if not op_rules.is_in_place(node):
            return None
        result = node.outputs[-1 if node.op in op_rules.LAST_FIRST else 0]
        for source in node.inputs:
            tensor, given = self._tensor[source], self.outputs[source]
            alike = (given.dtype, given.bytes) == (result.dtype, result.bytes)
            whole = tensor and tensor not in self._fixed and self._bytes[tensor] == given.bytes
            if alike and whole and self._reads_of_tensor[tensor] == 1:
                return tensor
        return None

    def finish(self, node: Node) -> None:
        """`node` has read its inputs."""
        self._reads_of_tensor.subtract(tensor for tensor in (self._tensor[s] for s in node.inputs) if tensor)

    def _own(self, source: Source, output: Output, tensor: Optional[str]) -> None:
        self.outputs[source] = output
        self._tensor[source] = tensor
        if tensor:
            self._reads_of_tensor[tensor] += self._reads_of_output[source]


def _age(node: Node) -> int:
    """The caller's inputs come in their order, the constants when the graph is made ready to run."""
    return node.attributes["index"].i if node.op == "_Arg" else sys.maxsize


def _operation(node: Node, inputs: Sequence[Output], memory: _Memory, threads: int) -> StepOp:
    kind = op_rules.kind(node)
    over = memory.overwritable(node)
    beside = op_rules.buffers(node, inputs, threads)
    filters = op_rules.filters(node, inputs)
    writes = memory.place(node, op_rules.outputs(node, inputs), kind)
    scratch = (
        Tensor(f"{node.name}/scratch{i}", size, "scratch", () if i else beside.touched)
        for i, size in enumerate(beside.scratch)
        if size
    )
    return StepOp(
        name=node.name,
        kind=kind,
        reads=memory.tensors(node.inputs),
        writes=writes[::-1] if node.op in op_rules.LAST_FIRST else writes,
        scratch=tuple(scratch),
        takes_over=over,
        keeps=(Tensor(f"{node.name}/reordered", beside.keeps, "weights, reordered"),) if beside.keeps else (),
        hidden_bytes=beside.hidden,
        flops=op_rules.flops(node, inputs),
        traffic_bytes=sum(given.bytes for given in (*inputs, *node.outputs)),
        in_channels=filters[-2] if filters else 0,
        out_channels=filters[-1] if filters else 0,
    )
