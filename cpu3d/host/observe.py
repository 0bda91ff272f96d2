"""What a training step is seen to do: its operations and their seconds, under TensorFlow's profiler."""

import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Tuple

from memory_estimator.step.program import Program, StepOp
from memory_estimator.step.timing import CONVOLUTIONS, FUSED, features, group_of, tensor_bytes

KIND_BY_TYPE = (
    ("BiasAddGrad", "bias_gradient"), ("BatchNormGrad", "norm_gradient"), ("BatchNorm", "norm"), ("Concat", "join"),
    ("MaxPool3DGrad", "pool_gradient"), ("MaxPool3D", "pool"), ("Slice", "slice"), ("Split", "slice"),
)  # fmt: skip
"""Part of TensorFlow's name for a type of operation, and its group; the first that fits counts."""


class Event(NamedTuple):
    """One operation as the profiler saw it run."""

    name: str
    type: str
    seconds: float


def trace(tf: Any, step: Any) -> Tuple[float, List[Event]]:
    """Run `step` under the profiler: its seconds, and its operations in the order they began."""
    # Where TensorFlow keeps the profile's format, from 2.13 to 2.21 at least.
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    options, found = tf.profiler.experimental.ProfilerOptions(host_tracer_level=2, python_tracer_level=0), []
    with tempfile.TemporaryDirectory() as folder:
        with tf.profiler.experimental.Profile(folder, options):
            seconds = step()
        spaces = [xplane_pb2.XSpace.FromString(path.read_bytes()) for path in Path(folder).rglob("*.xplane.pb")]
    for plane, line in ((one, line) for space in spaces for one in space.planes for line in one.lines):
        for event in line.events if line.name.startswith("tf_") else ():
            name, _, kind = plane.event_metadata[event.metadata_id].name.rpartition(":")
            if name and not name.endswith(":"):
                begin = line.timestamp_ns * 1000 + event.offset_ps
                found.append((begin, Event(name, kind, event.duration_ps / 1e12)))
    return seconds, [event for _, event in sorted(found)]


def rows(program: Program, events: List[Event], cache: int) -> List[Dict[str, Any]]:
    """What the events tell of the program's speed: {"group", "features", "seconds"}, in the same order for every step.

    Operations are told apart by their order, which is the program's: names of gradients do not say whose they are. A
    row is one operation where as many of its group ran as the program has, else the whole group.
    Raises RuntimeError where the step ran others than the program says.
    """
    sizes = tensor_bytes(program)
    convolutions = [op for op in program.ops if op.kind in CONVOLUTIONS]
    ran = [event for event in events if _is_convolution(event)]
    pairs = list(zip(convolutions, ran))
    same = [op.kind.endswith("filter_gradient") == ("BackpropFilter" in event.type) for op, event in pairs]
    if len(ran) != len(convolutions) or not all(same):
        raise RuntimeError(
            f"a step must run the {len(convolutions)} convolutions of the closed form, got {len(ran)}, "
            f"{sum(same)} of them in place; this TensorFlow does it otherwise"
        )
    seconds_of: Dict[str, List[float]] = defaultdict(list)
    for event in events:
        if not _is_convolution(event):
            seconds_of[_group_of(event)].append(event.seconds)
    ops_of: Dict[str, List[StepOp]] = defaultdict(list)
    for op in program.ops:
        if op.kind not in (*CONVOLUTIONS, FUSED):
            ops_of[group_of(op).replace("narrow_", "")].append(op)
    timed, sums = [(op, event.seconds) for op, event in pairs], []
    for group, ops in ops_of.items():
        if len(seconds_of[group]) == len(ops):
            timed += zip(ops, seconds_of[group])
            continue
        each = [features(op, sizes, cache) for op in ops]
        total = {name: sum(one.get(name, 0.0) for one in each) for one in each for name in one}
        sums.append({"group": group, "features": total, "seconds": sum(seconds_of[group])})
    found = [{"group": group_of(op), "features": features(op, sizes, cache), "seconds": s} for op, s in timed]
    return [*found, *sums]


def _is_convolution(event: Event) -> bool:
    """Lean steps have those of two dimensions too, a plane of a filter's gradient each."""
    return "Conv3D" in event.type or "Conv2D" in event.type


def _group_of(event: Event) -> str:
    """Of an operation that is no convolution. The loss' have names without a path, and no others but sums of gradients,
    in a step that TensorFlow has compiled."""
    if event.name.split("/")[0] in ("Adam", "SGD") or event.name.endswith("/Cast"):
        return "update"
    of_layer = "pointwise" if "/" in event.name or event.name.startswith("AddN") or "Relu" in event.type else "loss"
    return next((group for part, group in KIND_BY_TYPE if part in event.type), of_layer)
