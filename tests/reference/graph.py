"""The graph that TensorFlow really runs for a traced step, with the shape of every tensor, and the order it runs in.

What runs is not what was traced: Grappler, ITEX's and oneDNN's passes reorder, fuse and replace kernels when a function
is instantiated, before its first operation. So the step is called with a cancellation that has already happened and its
runtime is asked for the graphs it makes; nothing is computed. The order, on one inter-op thread, decides how long
tensors live. After executor.cc (ScheduleReady) and Eigen's NonBlockingThreadPool, a stack for a thread's own tasks.
"""

import heapq
import itertools
import math
import re
from collections import deque
from dataclasses import dataclass, replace
from typing import Any, Callable, Dict, Iterator, List, Sequence, Set, Tuple

CALLS = ("PartitionedCall", "StatefulPartitionedCall")

INLINE = frozenset(
    (
        *("Const", "_Arg", "_Retval", "NoOp", "Placeholder", "ControlTrigger", "VarHandleOp", "VariableShape"),
        *("Identity", "IdentityN", "StopGradient", "PreventGradient", "Snapshot", "EnsureShape"),
        *("Reshape", "ExpandDims", "Squeeze", "Shape", "ShapeN", "Rank", "Size", "BroadcastGradientArgs"),
    )
)
"""Operations whose kernels say `IsExpensive() == false`. All others count as expensive for the first ~90 steps: the
executor's estimate of their cost starts at 1e8 cycles and is averaged down by a tenth a step to its threshold, 8000."""


@dataclass(frozen=True)
class Output:
    """One output of a node."""

    shape: Tuple[int, ...]
    dtype: str
    bytes: int
    touched: Tuple[Tuple[int, int], ...] = ()  # as of `memory_estimator.step.program.Tensor`


@dataclass(frozen=True)
class Node:
    """One operation of the graph."""

    name: str
    op: str  # TensorFlow's type of the operation, such as "_ITEXConv3D"
    inputs: Tuple[Tuple[str, int], ...]  # (node, index of its output) of each
    after: Tuple[str, ...]  # nodes it must wait for without reading them: control dependencies
    outputs: Tuple[Output, ...]
    attributes: Any  # TensorFlow's own mapping of them
    place: int = 0  # of a function's argument
    again: bool = False  # whether the same function has been called before
    body: "Tuple[Node, ...]" = ()
    """Of a call, the nodes of the function called. One that XLA compiles is an operation like any other."""


def executed_graph(step: Any, specs: Sequence[Any]) -> Tuple[List[Node], Any]:
    """The nodes of `step` (a tf.function) on inputs like `specs` (tf.TensorSpec), producers first, and its trace.
    The step has no loop or branch. Raises ValueError where the size of a tensor is not fixed by `specs`."""
    import tensorflow as tf

    # Traced again: the graphs of a function that has run before have been made, and are not handed out again.
    trace = tf.function(getattr(step, "python_function", step)).get_concrete_function(*specs)
    captured = list(trace.captured_inputs)
    given = [tf.zeros((), tensor.dtype) for tensor in trace.inputs[: len(trace.inputs) - len(captured)]]
    return _nodes(_optimized(trace.name, [*given, *captured], len(trace.outputs)), trace.graph, {}), trace


def _nodes(executed: Any, traced: Any, bodies: Dict[str, Tuple[Node, ...]]) -> List[Node]:
    """Of the GraphDef of a function as it runs, and the graph it was traced as; `bodies` are those of the functions
    called so far."""
    definitions = list(executed.node)
    # The passes keep the name of an operation they replace by another kernel or fuse with what was before it. Its last
    # outputs may be unknown: the space that a fused norm reserves for its gradient.
    known: Dict[str, List[Any]] = {}
    for operation in traced.get_operations():
        fixed = itertools.takewhile(lambda t: t.shape.is_fully_defined() or not t.dtype.size, operation.outputs)
        known[operation.name] = list(fixed)
    known = {name: tensors for name, tensors in known.items() if tensors}
    tensors = {**_inferred(definitions, known), **known}
    nodes = []
    for definition in definitions:
        inputs = [source.partition(":") for source in definition.input if not source.startswith("^")]
        inputs = tuple((name, int(index or 0)) for name, _, index in inputs)
        after = tuple(source[1:] for source in definition.input if source.startswith("^"))
        outputs = tuple(_output(definition, tensor) for tensor in tensors[definition.name])
        body: Tuple[Node, ...] = ()
        if definition.op in CALLS and not definition.attr["_XlaMustCompile"].b:
            body = _body(definition, [tensors[name][index] for name, index in inputs], traced, bodies)
        nodes.append(Node(definition.name, definition.op, inputs, after, outputs, definition.attr, body=body))
    return nodes


def _body(call: Any, inputs: Sequence[Any], traced: Any, bodies: Dict[str, Tuple[Node, ...]]) -> Tuple[Node, ...]:
    """What a call runs, whose function is optimized by itself, once for all calls."""
    import tensorflow as tf

    name = call.attr["f"].func.name
    if name not in bodies:
        # Grappler makes a function of its own for a call with constants, and passes it the other arguments alone. It
        # is not handed out, so the function stands for it, with these constants inside.
        own = name.partition("_specialized_for_")[0]
        graph, left = traced._get_function(own).graph, list(inputs)
        given = [tf.zeros((), tensor.dtype) for tensor in graph.inputs]
        places = {}
        for index, tensor in enumerate(graph.inputs):
            if left and (left[0].dtype, left[0].shape) == (tensor.dtype, tensor.shape):
                places[index] = len(inputs) - len(left)
                del left[0]
        if own not in bodies:
            bodies[own] = tuple(_nodes(_optimized(own.encode(), given, len(graph.outputs)), graph, bodies))
        bodies[name] = tuple(_placed(node, places) if node.op == "_Arg" else node for node in bodies[own])
    return bodies[name]


def _placed(argument: Node, places: Dict[int, int]) -> Node:
    """An argument with its place among those that a call passes, or a constant."""
    place = places.get(argument.attributes["index"].i)
    return replace(argument, op="Const") if place is None else replace(argument, place=place)


def plain(op: str) -> str:
    """TensorFlow's type of the operation that a replaced kernel stands for: "_ITEXConv3D" -> "Conv3D"."""
    return re.sub("^_(ITEX|MklNative|Mkl)", "", op) if not op.startswith(("_Arg", "_Retval")) else op


def execution_order(nodes: Sequence[Node]) -> List[Node]:
    """`nodes` of a graph in the order they run. That in which its inputs become ready comes from a set of addresses:
    here it is that of the graph. Of what a finished operation makes ready the inexpensive runs first in, first out; an
    expensive one at once when nothing waits in line, else from the top of a stack."""
    # A node's readers become ready in the order in which TensorFlow built them: producers first, and of the nodes that
    # could come next the one listed first.
    place = {node.name: index for index, node in enumerate(nodes)}
    ready, made_ready = _readiness(nodes)
    heap = [place[node.name] for node in ready]
    built: List[Node] = []
    while heap:
        built.append(nodes[heapq.heappop(heap)])
        for reader in made_ready(built[-1]):
            heapq.heappush(heap, place[reader.name])
    first, made_ready = _readiness(built)
    order: List[Node] = []
    stack: List[Node] = []
    line = deque(first)
    while line or stack:
        order.append(line.popleft() if line else stack.pop())
        expensive = []
        for node in made_ready(order[-1]):
            (line if node.op in INLINE else expensive).append(node)
        if expensive and not line:
            line.append(expensive.pop())
        stack.extend(expensive)
    called: Set[str] = set()
    return [each for node in order for each in (_entered(node, called) if node.body else [node])]


def _entered(call: Node, called: Set[str]) -> Iterator[Node]:
    """A call as the nodes it runs, in order, and a last one whose outputs are those of the call. Arguments live until
    then. Constants are made once for all calls."""
    function, arguments, names, returned = call.attributes["f"].func.name, {}, {}, {}
    for node in execution_order(call.body):
        if node.op == "_Arg":
            arguments[node.name] = call.inputs[node.place]
            continue
        inputs = tuple(arguments.get(name) or (names[name], index) for name, index in node.inputs)
        if node.op == "_Retval":
            returned[node.attributes["index"].i] = inputs[0]
            continue
        constant = node.op == "Const"
        names[node.name] = f"{function if constant else call.name}/{node.name}"
        if not (constant and function in called):
            yield replace(node, name=names[node.name], inputs=inputs, after=(), again=function in called)
    called.add(function)
    results = tuple(returned[index] for index in sorted(returned))
    yield replace(call, op="IdentityN", inputs=(*results, *call.inputs), after=(), body=())


def _optimized(name: bytes, inputs: Sequence[Any], outputs: int) -> Any:
    """The GraphDef that the executor is given of a function, after all of TensorFlow's and the plug-in's passes."""
    import tensorflow as tf
    from tensorflow.python.eager import cancellation, context

    runtime = context.context()
    cancelled = cancellation.CancellationManager()
    cancelled.start_cancel()
    # The runtime looks at neither shapes nor values before it finds the call cancelled.
    runtime.enable_graph_collection()
    try:
        with cancellation.CancellationManagerContext(cancelled):
            runtime.call_function(name, inputs, outputs)
    except tf.errors.CancelledError:
        pass
    finally:
        # Graphs are handed over when an operation ends well: any will do.
        tf.zeros(()) + 1
        graphs = runtime.export_run_metadata().function_graphs
        runtime.disable_graph_collection()
    return max((g for f in graphs for g in f.partition_graphs), key=lambda graph: len(graph.node))


def _inferred(definitions: Sequence[Any], known: Dict[str, List[Any]]) -> Dict[str, List[Any]]:
    """The tensors of the operations that the passes have added, by TensorFlow's own shape functions. In a graph in
    which all that is known is a placeholder, for the plug-in's operations have no shape functions. Constants stay:
    shapes are computed from them."""
    import tensorflow as tf

    graph = tf.compat.v1.GraphDef()
    # Without a version, a placeholder of shape () counts as one of unknown shape.
    graph.versions.producer = tf.version.GRAPH_DEF_VERSION
    renamed = {}
    for definition in definitions:
        if definition.name not in known or definition.op == "Const":
            graph.node.append(_stand_in(definition))
            continue
        for index, tensor in enumerate(known[definition.name]):
            name = f"{definition.name}.{index}"
            renamed[f"{definition.name}:{index}" if index else definition.name] = name
            node = graph.node.add(name=name, op="Placeholder")
            node.attr["dtype"].type = tensor.dtype.as_datatype_enum
            node.attr["shape"].shape.CopyFrom(tensor.shape.as_proto())
    for node in graph.node:
        node.input[:] = [renamed.get(source, source) for source in node.input if not source.startswith("^")]
    inferred = tf.Graph()
    with inferred.as_default():
        tf.graph_util.import_graph_def(graph, name="")
    added = (definition.name for definition in definitions if definition.name not in known)
    return {name: list(inferred.get_operation_by_name(name).outputs) for name in added}


def _stand_in(definition: Any) -> Any:
    """An operation of the same outputs that has a shape function."""
    from tensorflow.python.framework import op_def_registry

    node = type(definition)()
    node.CopyFrom(definition)
    node.device = ""
    node.op = plain(node.op)
    known = op_def_registry.get(node.op)
    if known is None:
        raise ValueError(
            f"operation {definition.name} must be one whose shape TensorFlow can tell, got {definition.op}; "
            "estimate the step on the other engine"
        )
    for name in set(node.attr) - {attribute.name for attribute in known.attr}:
        del node.attr[name]
    return node


def _output(definition: Any, tensor: Any) -> Output:
    if not tensor.dtype.size:  # handles of variables and strings, which do not live in the allocator's memory
        return Output((), tensor.dtype.name, 0)
    if not tensor.shape.is_fully_defined():
        raise ValueError(
            f"the output of {definition.name} ({definition.op}) must have a fixed shape, got {tensor.shape}; "
            "give the model a batch size and fixed shapes"
        )
    shape = tuple(tensor.shape.as_list())
    return Output(shape, tensor.dtype.name, math.prod(shape) * tensor.dtype.size)


def _readiness(nodes: Sequence[Node]) -> Tuple[List[Node], Callable[[Node], Iterator[Node]]]:
    """The nodes that wait for none, and what gives those that a finished node makes ready, its readers first."""
    pending = {node.name: len(node.inputs) + len(node.after) for node in nodes}
    successors: Dict[str, List[Node]] = {node.name: [] for node in nodes}
    reads = [(source, node) for node in nodes for source, _ in node.inputs]
    waits = [(source, node) for node in nodes for source in node.after]
    for source, successor in (*reads, *waits):
        successors[source].append(successor)

    def made_ready(done: Node) -> Iterator[Node]:
        for node in successors[done.name]:
            pending[node.name] -= 1
            if not pending[node.name]:
                yield node

    return [node for node in nodes if not pending[node.name]], made_ready
