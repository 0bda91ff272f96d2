"""Measure this host's constants for the estimator: what the runtime holds in memory, how fast each kind of work goes.

    ./run.sh calibrate
    ./run.sh calibrate --all --out other.json

Runs a few small training steps under TensorFlow's profiler, in a fresh process for each dtype, within a minute for each
engine: a slow host does fewer. Estimates and training on this host then use the file by themselves. Wants a quiet
machine. Scratch of operations is not fitted: `bench validate --first 3` shows whether its rules hold here.
"""

import argparse
import dataclasses
import datetime
import gc
import itertools
import math
import statistics
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import psutil

from cpu3d.bench.harness import Output, Result, facts_of, in_fresh_process
from cpu3d.bench.step import WARM_UP_STEPS, made_up
from cpu3d.host.apply import ENGINES, engine_name, in_force, installed, set_up
from cpu3d.host.memory import peak_rss_bytes
from cpu3d.settings import RunConfig
from cpu3d.util.atomic import writable_folder, write_json
from cpu3d.util.progress import bar
from memory_estimator.calibration import (
    GROUPS,
    OWN,
    HostConstants,
    runtime_ops,
    shipped_constants,
    to_json,
)
from memory_estimator.host import Host, cache_bytes, read_host
from memory_estimator.job import Job
from memory_estimator.schema import add_options, from_args, option
from memory_estimator.step.allocator import use
from memory_estimator.step.program import Program, StepOp
from memory_estimator.step.timing import CONVOLUTIONS, features, group_of, tensor_bytes
from memory_estimator.step.training_step import training_step
from memory_estimator.table import Table
from memory_estimator.units import format_bytes
from models.config import UNetConfig

SHAPE = (96, 96, 96)
"""The largest that constants are fitted to: what is larger is for checking them."""

BUDGET_S = 60
"""For one engine in all its dtypes, start-up included. A network's first step is always done."""

QUIET = 0.1
"""CPUs that other processes may keep busy before the times are called disturbed."""

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

Costs = Dict[str, Dict[str, float]]
"""Group -> feature -> seconds a unit."""

Measured = List[Tuple[str, Result]]
"""(dtype, result of `measure`) of each process."""


@dataclass(frozen=True)
class Options:
    """What `calibrate` measures, and where it writes."""

    engine: Optional[str] = option(None, "default: what `train` would use", choices=ENGINES[:2])
    all: bool = option(False, help="every engine that is installed, a minute each")
    out: Path = option(OWN, help=f"default: {OWN.name} in the project's root", metavar="FILE")
    name: str = option("", help="default: the CPU's name")


class Event(NamedTuple):
    """One operation as the profiler saw it run."""

    name: str
    type: str
    seconds: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, Options)


def run(args: argparse.Namespace) -> int:
    options = from_args(Options, args)
    writable_folder(options.out.parent, "folder")
    host, begin, results = read_host(), time.perf_counter(), []
    engines = [engine for engine in ("itex", "stock") if installed(engine)] if options.all else [options.engine]
    runs = [(engine, dtype) for engine in engines for dtype in ("bfloat16", "float32")[not host.fast_bfloat16 :]]
    size = cache_bytes() or shipped_constants(host.isa).cache_bytes
    with bar("calibrate", total=len(runs)) as advance:
        for number, (engine, dtype) in enumerate(runs):
            left_s = (BUDGET_S * len(engines) - (time.perf_counter() - begin)) / (len(runs) - number)
            request = {"engine": engine, "cache_bytes": size, "networks": _networks(dtype), "budget_s": left_s}
            results.append((dtype, in_fresh_process(measure, request)))
            advance()
    constants, last = put_together(results, host, options.name), results[-1][1]
    seconds, busy = time.perf_counter() - begin, _busy_with_others(results)
    Output().publish("calibrate", {}, [costs_table(constants)])
    if busy > QUIET:
        print(f"other processes kept {busy:.1f} CPUs busy: times are too long, calibrate again when quiet")
    facts = {"versions": last["versions"], "environment": last["environment"]}
    left_out = sum(len(result["left_out"]) for _, result in results)
    facts.update(seconds=round(seconds, 1), networks_left_out=left_out, cpus_busy_with_others=round(busy, 2))
    write_json(options.out, {**to_json(constants), **facts})
    print(f"{options.out} written after {seconds:.0f} s, {left_out} networks left out for want of time")
    return 0


def put_together(results: Measured, host: Host, name: str = "") -> HostConstants:
    """Constants from what was measured, all of it on one host."""
    costs: Dict[str, Dict[str, Any]] = {}
    runtime: Dict[str, List[Dict[str, int]]] = {}
    for dtype, result in results:
        costs.setdefault(result["engine"], {})[dtype] = fit_costs(result["networks"])
        runtime.setdefault(result["engine"], []).append(result["runtime"])
    lines = {engine: straight_line(points) for engine, points in runtime.items()}
    threads, busy = results[0][1]["threads"], _busy_with_others(results)
    shipped = shipped_constants(host.isa).for_threads(threads)
    missing = [group for engine in costs for group in _fill_up(costs[engine], engine, shipped)]
    today = datetime.date.today().isoformat()
    how = f"measured: calibrate, {today}"
    timed = f"{how}, operations of small training steps under TensorFlow's profiler"
    timed += f", disturbed by other processes on {busy:.1f} CPUs" if busy > QUIET else ""
    timed += f"; not timed here and taken from {shipped.name}: {', '.join(missing)}" if missing else ""
    return HostConstants(
        name=name or host.cpu_model,
        cpu=host.cpu_model,
        origin="measured",
        origins={
            "costs": timed,
            "baseline_bytes": f"{how}, resident memory less the step's tensors",
            "op_bytes": f"{how}, the same of a shallow and a deep network",
            "cache_bytes": "measured: /sys/devices/system/cpu",
            "saturating_threads": shipped.origins["saturating_threads"],
        },
        record=f"calibrate {today}, {'; '.join(dict.fromkeys(result['engine_name'] for _, result in results))}",
        date=today,
        threads=threads,
        cache_bytes=cache_bytes() or shipped.cache_bytes,
        saturating_threads=shipped.saturating_threads,
        baseline_bytes={engine: line["bytes"] for engine, line in lines.items()},
        op_bytes={engine: line["op_bytes"] for engine, line in lines.items()},
        costs=costs,
    )


def costs_table(constants: HostConstants) -> Table:
    """The main figures: the runtime's memory, the rate of what is bound by memory, the time between operations."""
    rows = []
    for engine, dtype in ((engine, dtype) for engine, found in constants.costs.items() for dtype in found):
        groups, baseline = constants.costs[engine][dtype], format_bytes(constants.baseline_bytes[engine])
        traffic = groups.get("norm", {}).get("traffic")
        rate = f"{1e-9 / traffic:.0f} GB/s" if traffic else "-"
        rows.append((engine, dtype, baseline, rate, f"{groups['every_op']['seconds'] * 1e6:.0f} us"))
    columns = ("engine", "dtype", "baseline", "norm", "between ops")
    return Table(columns, rows, title=f"{constants.name}, {constants.threads} threads", names=2)


# --- From timed operations to what a unit of each kind of work costs ---


def fit_costs(networks: Sequence[Mapping[str, Any]]) -> Costs:
    """Costs of each group from `measure`'s "networks".

    Errors count as a share of the square root of the time: long operations matter more, short ones are not ignored.
    Raises ValueError where nothing was timed.
    """
    by_group: Dict[str, List[Mapping[str, Any]]] = defaultdict(list)
    timed = [network for network in networks if network["step_s"]]
    if not timed:
        raise ValueError("networks must hold timed steps, got none; ask for at least one step")
    for network in timed:
        for row in network["rows"]:
            by_group[row["group"]].append(row)
    costs = {group: _least_squares(rows) for group, rows in by_group.items()}
    left = [(network["step_s"] - _seconds(costs, network["rows"])) / network["ops"] for network in timed]
    costs["every_op"] = {"seconds": max(0.0, statistics.median(left))}
    return costs


def straight_line(points: Sequence[Mapping[str, int]]) -> Dict[str, int]:
    """{"bytes", "op_bytes"}: bytes of no operations, and of each, through the measured {"bytes", "ops"}."""
    ops = np.array([point["ops"] for point in points], float)
    size = np.array([point["bytes"] for point in points], float)
    slope = float(np.polyfit(ops, size, 1)[0]) if len(set(ops)) > 1 else 0.0
    slope = max(0.0, slope)
    return {"bytes": round(float(np.mean(size - slope * ops))), "op_bytes": round(slope)}


# --- One process: small steps, operation by operation ---


def measure(request: Dict[str, Any]) -> Result:
    """Time the operations of a few steps of each of `request["networks"]`.

    A network is {"unet", "shape", "steps"}. The result's "networks" have a row for every convolution and one for every
    other group of operations: its features, summed, and its seconds, the median of the steps. "runtime" has what the
    process held besides tensors after the first network, whose "steps" may be 0 for that purpose alone.

    Once `request["budget_s"]` is spent, no more steps are done; networks left are named in "left_out". The first that
    is timed always is, for one step at least.
    """
    begin = time.perf_counter()
    host, threads, tf = set_up(request["engine"])
    engine = "itex" if "ITEX" in engine_name(tf) else "stock"
    intra_op = tf.config.threading.get_intra_op_parallelism_threads()
    found: List[Dict[str, Any]] = []
    left_out: List[Dict[str, Any]] = []
    runtime = None
    for network in request["networks"]:
        left_s = request["budget_s"] - (time.perf_counter() - begin)
        if left_s < 0 and any(one["step_s"] for one in found):
            left_out.append(network)
            continue
        job = Job(UNetConfig(**network["unet"]), tuple(network["shape"]), engine=engine, threads=intra_op)
        program = training_step(job)
        found.append(_measure_network(tf, job, program, network["steps"], left_s, request["cache_bytes"]))
        runtime = runtime or _runtime(program)
        gc.collect()  # Keras models refer to themselves; the next network must not count this one's weights
    return {
        "networks": found,
        "left_out": left_out,
        "runtime": runtime,
        **facts_of(tf, threads, host),
        "engine": engine,
        "threads": intra_op,
        "environment": in_force(threads),
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
    seconds_of: Dict[str, List[float]] = defaultdict(list)
    for event in events:
        if "Conv3D" not in event.type:
            seconds_of[_group(event)].append(event.seconds)
    ops_by_group: Dict[str, List[StepOp]] = defaultdict(list)
    for op in program.ops:
        if op.kind not in CONVOLUTIONS:
            ops_by_group[group_of(op).replace("narrow_", "")].append(op)
    for group, ops in ops_by_group.items():
        each, seconds = [features(op, sizes, cache_bytes) for op in ops], seconds_of[group]
        if len(seconds) == len(ops):
            found += [
                {"group": group_of(op), "features": one, "seconds": own} for op, one, own in zip(ops, each, seconds)
            ]
        else:
            names = dict.fromkeys(name for one in each for name in one)
            sums = {name: sum(one.get(name, 0.0) for one in each) for name in names}
            found.append({"group": group, "features": sums, "seconds": sum(seconds)})
    return found


# --- Private helpers ---


def _networks(dtype: str) -> List[Dict[str, Any]]:
    """A tiny network for the runtime's memory, then five for the costs, which differ in width and in what they have.

    The two dtypes' tiny networks differ in depth, which tells apart what grows with it. Most have half the voxels: that
    saves time, and their maps still are beyond any cache. The narrow one comes first, as it has every group of
    operations; where time is short the last are left out.
    """
    half = (SHAPE[0] // 2, *SHAPE[1:])
    found = (
        ({"filters": 8, "depth": 3 if dtype == "float32" else 5}, (32, 32, 32), 0),
        ({"filters": 8}, SHAPE, 2),
        ({"filters": 16, "channels": 1}, SHAPE, 2),
        ({"filters": 32}, half, 2),
        ({"filters": 16, "channels": 1, "outputs": 1, "norm": "none"}, half, 2),
        ({"filters": 24, "depth": 3}, half, 2),
    )
    return [
        {"unet": dataclasses.asdict(UNetConfig(**unet, dtype=dtype)), "shape": shape, "steps": steps}
        for unet, shape, steps in found
    ]


def _busy_with_others(results: Measured) -> float:
    """CPUs that other processes kept busy during the worst of the measurements."""
    return max((network["others"] for _, result in results for network in result["networks"]), default=0.0)


def _fill_up(by_dtype: Dict[str, Any], engine: str, shipped: HostConstants) -> Iterator[str]:
    """Put the shipped costs in for groups without a time, as where a TensorFlow calls them otherwise; names them."""
    for dtype, costs in by_dtype.items():
        for group in GROUPS:
            if not costs.get(group):
                costs[group] = dict(shipped.speeds(engine, dtype)[group])
                yield f"{group} ({engine}, {dtype})"


def _least_squares(rows: Sequence[Mapping[str, Any]]) -> Dict[str, float]:
    from scipy.optimize import nnls  # not into the memory of a measuring process

    there = [row for row in rows if row["seconds"] > 0]
    names = sorted({name for row in there for name, amount in row["features"].items() if amount})
    if not there or not names:
        return {}
    counted = np.array([[row["features"].get(name, 0.0) for name in names] for row in there])
    if names == ["cached", "traffic"]:
        # What lies in the cache is not slower: the second unknown is how much dearer it is beyond.
        counted[:, 0] += counted[:, 1]
    weight = np.array([1 / math.sqrt(row["seconds"]) for row in there])
    scale = np.abs(counted).max(axis=0)
    found, _ = nnls(counted / scale * weight[:, None], np.array([row["seconds"] for row in there]) * weight)
    costs = dict(zip(names, (found / scale).tolist()))
    if names == ["cached", "traffic"]:
        costs["traffic"] += costs["cached"]
    elif {"cached", "traffic"} & set(names):  # the same beyond the cache as in it where only one was seen
        costs = {"cached": costs.get("traffic"), "traffic": costs.get("cached"), **costs}
    return costs


def _seconds(costs: Costs, rows: Sequence[Mapping[str, Any]]) -> float:
    return sum(costs[row["group"]].get(name, 0.0) * amount for row in rows for name, amount in row["features"].items())


def _measure_network(
    tf: Any, job: Job, program: Program, steps: int, left_s: float, cache_bytes: int
) -> Dict[str, Any]:
    """One network's entry of the result, of at most so many steps and not many more seconds."""
    from cpu3d.training.learner import Learner

    begin = time.perf_counter()
    learner = Learner(RunConfig(grid=job.shape, unet=job.unet))
    parts = itertools.repeat(made_up(tf, job.unet, 1, job.shape))

    def step() -> float:
        begin = time.perf_counter()
        learner.step(parts, 1e-4)
        return time.perf_counter() - begin

    for _ in range(WARM_UP_STEPS):
        step()
    before, traced = _busy_s(), []
    while len(traced) < steps and (not traced or time.perf_counter() - begin + traced[-1][0] < left_s):
        traced.append(trace(tf, step))
    clock_s, own_s, machine_s = _busy_s() - before
    of_steps = [rows(program, events, cache_bytes) for _, events in traced]
    return {
        "step_s": statistics.median(seconds for seconds, _ in traced) if traced else None,
        "steps": len(traced),
        "others": max(0.0, machine_s - own_s) / clock_s if traced else 0.0,
        "ops": len(program.ops),
        "rows": [{**same[0], "seconds": statistics.median(row["seconds"] for row in same)} for same in zip(*of_steps)],
    }


def _events(folder: Path) -> Iterator[Tuple[int, Event]]:
    """(when it began, operation) for every operation of the profiles under `folder`, in no order."""
    # Where TensorFlow keeps the profile's format, from 2.13 to 2.21 at least.
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    for path in folder.rglob("*.xplane.pb"):
        space = xplane_pb2.XSpace()
        space.ParseFromString(path.read_bytes())
        for plane, line in ((one, line) for one in space.planes for line in one.lines):
            for event in line.events if line.name.startswith("tf_") else ():
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


def _busy_s() -> np.ndarray:
    """Seconds of the clock, CPU seconds of this process and of all, less what the hypervisor took."""
    own, every = psutil.Process().cpu_times(), psutil.cpu_times()
    machine = sum(getattr(every, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq"))
    return np.array([time.perf_counter(), own.user + own.system, machine])


def _runtime(program: Program) -> Dict[str, int]:
    """What the process holds besides its tensors and oneDNN's scratch, and for how many operations."""
    held = use(program).resident_bytes + max(op.hidden_bytes for op in program.ops)
    return {"bytes": peak_rss_bytes() - held, "ops": runtime_ops(program)}
