"""The order in which TensorFlow runs the operations of a graph on one inter-op thread.

It decides how long tensors live: of two gradients that become ready together, the one that waits holds its inputs.
After executor.cc (ScheduleReady) and Eigen's NonBlockingThreadPool, which is a stack for a thread's own tasks.
"""

import heapq
import random
from collections import deque
from typing import Dict, Iterator, List, Sequence

from memory_estimator.replay.graph import Node

INLINE = frozenset(
    (
        *("Const", "_Arg", "_Retval", "NoOp", "Placeholder", "ControlTrigger", "VarHandleOp", "VariableShape"),
        *("Identity", "IdentityN", "StopGradient", "PreventGradient", "Snapshot", "EnsureShape"),
        *("Reshape", "ExpandDims", "Squeeze", "Shape", "ShapeN", "Rank", "Size", "BroadcastGradientArgs"),
    )
)
"""Operations whose kernels say `IsExpensive() == false`. All others count as expensive for the first ~90 steps: the
executor's estimate of their cost starts at 1e8 cycles and is averaged down by a tenth a step to its threshold, 8000."""


def execution_order(nodes: Sequence[Node], chance: int = 0) -> List[Node]:
    """`nodes` of a graph in the order they run.

    The order in which the graph's inputs are told that they may run comes from a set of addresses: it differs from
    process to process. Each `chance` is one such order; 0 is the order of the graph.

    What a finished operation makes ready runs as follows: the inexpensive ones first in, first out; an expensive one
    at once when nothing else is waiting in line, and else from the top of a stack when the line is empty.
    """
    nodes = _as_constructed(nodes)
    successors = _successors(nodes)
    pending = _pending(nodes)

    def made_ready(done: Node) -> Iterator[Node]:
        for node in successors[done.name]:
            pending[node.name] -= 1
            if not pending[node.name]:
                yield node

    order: List[Node] = []
    stack: List[Node] = []
    first = [node for node in nodes if not pending[node.name]]
    if chance:
        random.Random(chance).shuffle(first)
    line = deque(first)
    while line or stack:
        done = line.popleft() if line else stack.pop()
        order.append(done)
        expensive = []
        for node in made_ready(done):
            (line if node.op in INLINE else expensive).append(node)
        if expensive and not line:
            line.append(expensive.pop())
        stack.extend(expensive)
    return order


# --- Private helpers ---


def _as_constructed(nodes: Sequence[Node]) -> List[Node]:
    """Producers first, and of the nodes that could come next the one listed first: how TensorFlow builds a graph.

    A node's readers are told in the order in which they were built.
    """
    place = {node.name: index for index, node in enumerate(nodes)}
    successors, pending = _successors(nodes), _pending(nodes)
    ready = [index for index, node in enumerate(nodes) if not pending[node.name]]
    built = []
    while ready:
        node = nodes[heapq.heappop(ready)]
        built.append(node)
        for reader in successors[node.name]:
            pending[reader.name] -= 1
            if not pending[reader.name]:
                heapq.heappush(ready, place[reader.name])
    return built


def _successors(nodes: Sequence[Node]) -> Dict[str, List[Node]]:
    """Who is told when a node is done: first the readers of its outputs, then those that only wait for it."""
    successors: Dict[str, List[Node]] = {node.name: [] for node in nodes}
    for node in nodes:
        for source, _ in node.inputs:
            successors[source].append(node)
    for node in nodes:
        for source in node.after:
            successors[source].append(node)
    return successors


def _pending(nodes: Sequence[Node]) -> Dict[str, int]:
    return {node.name: len(node.inputs) + len(node.after) for node in nodes}
