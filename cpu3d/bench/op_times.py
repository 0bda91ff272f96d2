"""Small training steps under TensorFlow's profiler, operation by operation. Started fresh by `calibrate`.

python -m cpu3d.bench.op_times '{"engine": "itex", "networks": [...]}'     prints one JSON line
"""

import contextlib
import gc
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Optional, Tuple

from cpu3d.bench.step import WARM_UP_STEPS, made_up, profile_planes
from cpu3d.config import RunConfig
from cpu3d.host.apply import engine_name, in_force, set_up
from cpu3d.host.memory import peak_rss_bytes
from cpu3d.util.versions import versions
from memory_estimator.allocator import use
from memory_estimator.calibration import runtime_ops
from memory_estimator.job import Job
from memory_estimator.program import Program, StepOp
from memory_estimator.timing import CONVOLUTIONS, Features, features, group_of, tensor_bytes
from memory_estimator.training_step import training_step
from models.config import UNetConfig

OPTIMIZER_SCOPES = ("Adam", "SGD")

KIND_BY_TYPE = (
    ("BiasAddGrad", "bias_gradient"),
    ("BatchNormGrad", "norm_gradient"),
    ("BatchNorm", "norm"),
    ("MaxPool3DGrad", "pool_gradient"),
    ("MaxPool3D", "pool"),
    ("Concat", "join"),
    ("Slice", "slice"),
    ("ReluGrad", "pointwise"),
    ("AddN", "pointwise"),
)
"""Part of TensorFlow's name for a type of operation, and the group it is timed in; the first that fits counts."""


class Event(NamedTuple):
    """One operation as the profiler saw it run."""

    name: str
    type: str
    seconds: float


def measure(request: Dict[str, Any]) -> Dict[str, Any]:
    """Time the operations of a few steps of each of `request["networks"]`.

    A network is {"unet", "shape", "steps"}. The result's "networks" have a row for every convolution and one for every
    other group of operations: its features, summed, and its seconds, the median of the steps. "runtime" has what the
    process held besides tensors after the first network, whose "steps" may be 0 for that purpose alone. "check" has the
    peaks of the first network that is timed, which nothing is fitted to.

    Once `request["budget_s"]` is spent, no more steps are done; networks that would take more than is left are named in
    "left_out". The first that is timed always is, for one step at least.
    """
    begin = time.perf_counter()
    host, threads, tf = set_up(request["engine"])

    engine = "itex" if "ITEX" in engine_name(tf) else "stock"
    intra_op = tf.config.threading.get_intra_op_parallelism_threads()
    found: List[Dict[str, Any]] = []
    left_out: List[Dict[str, Any]] = []
    runtime, check = None, None
    second_a_flop = 0.0  # of the network timed last; unknown yet
    for network in request["networks"]:
        job = Job(UNetConfig(**network["unet"]), tuple(network["shape"]), engine=engine, threads=intra_op)
        program = training_step(job)
        left_s = request["budget_s"] - (time.perf_counter() - begin)
        if second_a_flop and (WARM_UP_STEPS + 1) * second_a_flop * _flops(program) > left_s:
            left_out.append(network)
            continue
        is_first_timed = check is None and network["steps"] > 0
        one = _measure_network(tf, job, program, network["steps"], left_s, request["cache_bytes"], is_first_timed)
        peaks = one.pop("peaks")
        if is_first_timed:
            check = {"unet": network["unet"], "shape": network["shape"], **peaks}
        found.append(one)
        runtime = runtime or _runtime(program)
        if one["step_s"]:
            second_a_flop = one["step_s"] / _flops(program)
        gc.collect()  # Keras models refer to themselves; the next network must not count this one's weights
    return {
        "networks": found,
        "left_out": left_out,
        "check": check,
        "runtime": runtime,
        "engine": engine,
        "engine_name": engine_name(tf),
        "threads": intra_op,
        "environment": in_force(threads),
        "host": host.summary(),
        "versions": versions(),
    }


def trace(tf: Any, step: Any) -> Tuple[float, List[Event]]:
    """Run `step` under the profiler: its seconds, and its operations in the order they began."""
    options = tf.profiler.experimental.ProfilerOptions(host_tracer_level=2, python_tracer_level=0)
    with tempfile.TemporaryDirectory() as folder:
        tf.profiler.experimental.start(folder, options)
        try:
            seconds = step()
        finally:
            tf.profiler.experimental.stop()
        events = sorted(_events(Path(folder)))
    return seconds, [event for _, event in events]


def rows(program: Program, events: List[Event], cache_bytes: int) -> List[Dict[str, Any]]:
    """What the events tell of the program's speed: {"group", "features", "seconds"}, in the same order for every step.

    Operations are told apart by their order, which is the program's: names of gradients do not say whose they are. A
    row is one operation where as many of its group ran as the program has, else the whole group.
    Raises RuntimeError where the step ran others than the program says.
    """
    sizes = tensor_bytes(program)
    convolutions = [op for op in program.ops if op.kind in CONVOLUTIONS]
    ran = [event for event in events if "Conv3D" in event.type]
    same = [
        ("BackpropFilter" in event.type) == op.kind.endswith("filter_gradient") for op, event in zip(convolutions, ran)
    ]
    if len(ran) != len(convolutions) or not all(same):
        raise RuntimeError(
            f"a step must run the {len(convolutions)} convolutions of the closed form, got {len(ran)}, "
            f"{sum(same)} of them in place; this TensorFlow does it otherwise"
        )
    found = [
        {"group": group_of(op), "features": features(op, sizes, cache_bytes), "seconds": event.seconds}
        for op, event in zip(convolutions, ran)
    ]
    ran_by_group: Dict[str, List[Event]] = defaultdict(list)
    for event in events:
        if "Conv3D" not in event.type:
            ran_by_group[_group(event)].append(event)
    ops_by_group: Dict[str, List[StepOp]] = defaultdict(list)
    for op in program.ops:
        if op.kind not in CONVOLUTIONS:
            ops_by_group[group_of(op).replace("narrow_", "")].append(op)
    for group, ops in ops_by_group.items():
        each = [{"group": group_of(op), "features": features(op, sizes, cache_bytes)} for op in ops]
        seconds = [event.seconds for event in ran_by_group[group]]
        if len(seconds) == len(ops):
            found += [{**row, "seconds": one} for row, one in zip(each, seconds)]
        else:
            found.append(
                {"group": group, "features": _summed(row["features"] for row in each), "seconds": sum(seconds)}
            )
    return found


# --- Private helpers ---


def _measure_network(
    tf: Any, job: Job, program: Program, steps: int, left_s: float, cache_bytes: int, with_peaks: bool
) -> Dict[str, Any]:
    """One network's entry of the result, of at most so many steps and not many more seconds; and its "peaks"."""
    from cpu3d.training.learner import Learner

    begin = time.perf_counter()
    live_before = _live_bytes(tf)
    learner = Learner(RunConfig(grid=job.shape, unet=job.unet))
    image, target = made_up(tf, job.unet, 1, job.shape)

    def step() -> float:
        begin = time.perf_counter()
        learner.step(itertools.repeat((image, target)), 1e-4)
        return time.perf_counter() - begin

    for _ in range(WARM_UP_STEPS):
        step()
    peaks = _peaks(tf, step, live_before) if with_peaks else {}  # before the profiler takes memory of its own
    before, traced = _busy_s(), []
    while len(traced) < steps and (not traced or time.perf_counter() - begin + traced[-1][0] < left_s):
        traced.append(trace(tf, step))
    after = _busy_s()
    return {
        "step_s": statistics.median(seconds for seconds, _ in traced) if traced else None,
        "steps": len(traced),
        "others": _share_of_others(before, after) if traced else None,
        "ops": len(program.ops),
        "rows": _middle([rows(program, events, cache_bytes) for _, events in traced]),
        "peaks": peaks,
    }


def _flops(program: Program) -> int:
    return sum(op.flops for op in program.ops)


def _live_bytes(tf: Any) -> int:
    """What the allocator has given out; 0 where it keeps no count."""
    try:
        return int(tf.config.experimental.get_memory_info("CPU:0")["current"])
    except (ValueError, KeyError, tf.errors.OpError):
        return 0


def _peaks(tf: Any, step: Any, live_before: int) -> Dict[str, Optional[int]]:
    """Both peaks after one more step, the allocator's without what was live before the network was built."""
    from cpu3d.training.learner import allocator_peak_bytes

    with contextlib.suppress(ValueError, tf.errors.OpError):
        tf.config.experimental.reset_memory_stats("CPU:0")
    step()
    peak = allocator_peak_bytes()
    return {
        "allocator_peak_bytes": None if peak is None else peak - live_before,
        "process_peak_bytes": peak_rss_bytes(),
    }


def _events(folder: Path) -> Iterator[Tuple[int, Event]]:
    """(when it began, operation) for every operation of a profile, in no order."""
    for plane in profile_planes(folder):
        for line in plane.lines:
            if not line.name.startswith("tf_"):
                continue
            for event in line.events:
                name, _, kind = plane.event_metadata[event.metadata_id].name.rpartition(":")
                if name and not name.endswith(":"):
                    begin = line.timestamp_ns * 1000 + event.offset_ps
                    yield begin, Event(name, kind, event.duration_ps / 1e12)


def _group(event: Event) -> str:
    """What an operation other than a convolution is timed as; what belongs to no layer is the loss."""
    scope = event.name.split("/")[0]
    if scope in OPTIMIZER_SCOPES or event.name.endswith("/Cast"):
        return "update"
    return next((group for part, group in KIND_BY_TYPE if part in event.type), "loss")


def _summed(many: Iterable[Features]) -> Features:
    sums: Features = defaultdict(float)
    for one in many:
        for name, amount in one.items():
            sums[name] += amount
    return dict(sums)


def _middle(steps: List[List[Dict[str, Any]]]) -> List[Dict[str, Any]]:
    """One list of rows for several steps' lists: the median seconds of each row."""
    return [{**same[0], "seconds": statistics.median(row["seconds"] for row in same)} for same in zip(*steps)]


class _Busy(NamedTuple):
    """Seconds since some start."""

    clock: float
    own: float
    """CPU time of this process, of all its threads."""
    machine: float
    """CPU time of all processes, less what the hypervisor took."""


def _busy_s() -> Optional[_Busy]:
    """None without a /proc."""
    times = os.times()
    try:
        fields = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:]
    except OSError:
        return None
    user, nice, system, _, _, irq, softirq, *_ = (int(field) / os.sysconf("SC_CLK_TCK") for field in fields)
    return _Busy(time.perf_counter(), times.user + times.system, user + nice + system + irq + softirq)


def _share_of_others(before: Optional[_Busy], after: Optional[_Busy]) -> Optional[float]:
    """CPUs that other processes kept busy meanwhile; None where that cannot be told."""
    if before is None or after is None:
        return None
    others = (after.machine - before.machine) - (after.own - before.own)
    return max(0.0, others) / (after.clock - before.clock)


def _runtime(program: Program) -> Dict[str, int]:
    """What the process holds besides its tensors and oneDNN's scratch, and for how many operations."""
    held = use(program).resident_bytes + max(op.hidden_bytes for op in program.ops)
    return {"bytes": peak_rss_bytes() - held, "ops": runtime_ops(program)}


def main(text: Optional[str] = None) -> None:
    print(json.dumps(measure(json.loads(text or sys.argv[1]))))


if __name__ == "__main__":
    main()
