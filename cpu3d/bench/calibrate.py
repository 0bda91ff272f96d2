"""Measure this host's constants for the estimator: what the runtime holds in memory, how fast each kind of work goes.

    ./run.sh calibrate
    ./run.sh calibrate --all --out other.json

Runs a few small training steps under TensorFlow's profiler, in a fresh process for each dtype, within a minute for each
engine: a slow host does fewer. Estimates and training on this host then use the file by themselves. Wants a quiet
machine. Scratch of operations is not fitted: `bench validate --first 3` shows whether its rules hold here.
"""

import dataclasses
import datetime
import gc
import itertools
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

import psutil

from cpu3d.bench.harness import Result, facts_of, in_fresh_process
from cpu3d.bench.step import WARM_UP_STEPS, made_up
from cpu3d.host.apply import ENGINES, engine_name, in_force, installed, set_up
from cpu3d.host.memory import peak_rss_bytes
from cpu3d.host.observe import rows, trace
from cpu3d.settings import RunConfig
from cpu3d.util.atomic import writable_folder, write_json
from cpu3d.util.progress import bar
from memory_estimator.calibration import GROUPS, OWN, HostConstants, runtime_ops, shipped_constants, to_json
from memory_estimator.fitting import fit_costs, straight_line
from memory_estimator.host import Host, cache_bytes, read_host
from memory_estimator.job import Job
from memory_estimator.schema import option
from memory_estimator.step.allocator import use
from memory_estimator.step.training_step import training_step
from models.config import UNetConfig

SHAPE, HALF, SMALL, STEPS = (96, 96, 96), (48, 96, 96), (48, 64, 64), 2
"""The largest that constants are fitted to: what is larger is for checking them. Less of it saves time. Steps timed of
each network, of which the faster counts: nothing makes one faster than it is."""

BUDGET_S, QUIET = 60, 0.1
"""For one engine in all its dtypes, start-up included; once it is spent no more networks are begun. CPUs that other
processes may keep busy before the times are called disturbed."""


@dataclass(frozen=True)
class Options:
    """What `calibrate` measures, and where it writes."""

    engine: Optional[str] = option(None, "default: what `train` would use", choices=ENGINES[:2])
    all: bool = option(False, help="every engine that is installed, a minute each")
    out: Path = option(OWN, help=f"default: {OWN.name} in the project's root", metavar="FILE")
    name: str = option("", help="default: the CPU's name")


OPTIONS = (Options,)


def run(options: Options) -> int:
    writable_folder(options.out.parent, "folder")
    host, begin, results, busy = read_host(), time.perf_counter(), [], 0.0
    engines = [engine for engine in ("itex", "stock") if installed(engine)] if options.all else [options.engine]
    runs = [(engine, dtype) for engine in engines for dtype in ("bfloat16", "float32")[not host.fast_bfloat16 :]]
    with bar("calibrate", total=len(runs)) as advance:
        for number, (engine, dtype) in enumerate(runs):
            busy = max(busy, psutil.cpu_percent(0.5) / 100 * psutil.cpu_count())  # with others: nothing of ours runs
            left_s = (BUDGET_S * len(engines) - (time.perf_counter() - begin)) / (len(runs) - number)
            request = {"engine": engine, "networks": networks(dtype), "budget_s": left_s}
            results.append({**in_fresh_process(measure, request), "dtype": dtype})
            advance()
    constants, seconds = put_together(results, host, busy, options.name), time.perf_counter() - begin
    if busy > QUIET:
        print(f"other processes kept {busy:.1f} CPUs busy: times are too long, calibrate again when quiet")
    left_out = sum(result["left_out"] for result in results)
    facts = {name: results[-1][name] for name in ("versions", "environment")}
    facts.update(seconds=round(seconds, 1), networks_left_out=left_out, cpus_busy_with_others=round(busy, 2))
    write_json(options.out, {**to_json(constants), **facts})
    print(f"{options.out} written after {seconds:.0f} s, {left_out} networks left out for want of time")
    return 0


def networks(dtype: str) -> List[Dict[str, Any]]:
    """A tiny network for the runtime's memory, then some for the costs, which differ in width and in what they have.

    The two dtypes' tiny networks differ in depth, which tells apart what grows with it. Where time is short the last
    are left out. Channels of one that are narrow in float32 are so in bfloat16 too, where the second has such already.
    """
    narrow = [({"filters": 12, "depth": 3}, SMALL)] if dtype == "float32" else []
    found = (
        ({"filters": 8, "depth": 3 if dtype == "float32" else 5}, (32, 32, 32)),
        ({"filters": 8}, SHAPE),
        ({"filters": 16, "channels": 1}, SHAPE),
        ({"filters": 32}, HALF),
        ({"filters": 16, "channels": 1, "outputs": 1, "norm": "none"}, HALF),
        *narrow,
        ({"filters": 24, "depth": 3}, HALF),
    )
    return [{"unet": dataclasses.asdict(UNetConfig(**unet, dtype=dtype)), "shape": shape} for unet, shape in found]


def put_together(results: Sequence[Result], host: Host, busy: float, name: str = "") -> HostConstants:
    """Constants from what `measure` gave, with "dtype", all of it on one host, of which others kept `busy` CPUs busy.

    Groups without a time, as where a TensorFlow calls them otherwise, have the costs of the shipped constants.
    """
    today, first, missing = datetime.date.today().isoformat(), results[0], []
    shipped = shipped_constants(host.kernels).for_threads(first["threads"])
    costs, runtime = defaultdict(dict), defaultdict(list)
    for result in results:
        engine, dtype = result["engine"], result["dtype"]
        found = fit_costs(result["networks"])
        missing += [f"{group} ({engine}, {dtype})" for group in GROUPS if not found.get(group)]
        usual = {group: dict(shipped.speeds(engine, dtype)[group]) for group in GROUPS if not found.get(group)}
        costs[engine][dtype] = {**found, **usual}
        runtime[engine].append(result["runtime"])
    lines = {engine: straight_line(points) for engine, points in runtime.items()}
    how = f"measured: calibrate, {today}"
    timed = f"{how}, operations of small training steps under TensorFlow's profiler"
    timed += f", disturbed by other processes on {busy:.1f} CPUs" if busy > QUIET else ""
    timed += f"; not timed here and taken from {shipped.name}: {', '.join(missing)}" if missing else ""
    origins = {"costs": timed, "cache_bytes": "measured: /sys/devices/system/cpu"}
    origins["baseline_bytes"] = f"{how}, resident memory less the step's tensors"
    origins["op_bytes"] = f"{how}, the same of a shallow and a deep network"
    return HostConstants(
        name=name or host.cpu_model,
        cpu=host.cpu_model,
        origin="measured",
        origins={**origins, "saturating_threads": shipped.origins["saturating_threads"]},
        record=f"calibrate {today}, {'; '.join(dict.fromkeys(result['engine_name'] for result in results))}",
        date=today,
        threads=first["threads"],
        cache_bytes=first["cache_bytes"],
        saturating_threads=shipped.saturating_threads,
        baseline_bytes={engine: line["bytes"] for engine, line in lines.items()},
        op_bytes={engine: line["op_bytes"] for engine, line in lines.items()},
        costs=dict(costs),
        kernels=host.kernels,
    )


# --- One process: small steps, operation by operation ---


def measure(request: Dict[str, Any]) -> Result:
    """Time the operations of a few steps of each of `request["networks"]`, {"unet", "shape"} each.

    The result's "networks" have a row for every convolution and one for every other group of operations: its features,
    summed, and its seconds in the fastest step. The first network is not timed: "runtime" is what the process held
    besides tensors after it. Once `request["budget_s"]` is spent, those left are counted in "left_out".
    """
    begin = time.perf_counter()
    host, threads, tf = set_up(request["engine"])
    from cpu3d.training.learner import Learner

    engine = "itex" if "ITEX" in engine_name(tf) else "stock"
    intra_op = tf.config.threading.get_intra_op_parallelism_threads()
    cache = cache_bytes() or shipped_constants(host.kernels).cache_bytes
    found, runtime, left = [], None, list(request["networks"])
    while left and (len(found) == 0 or time.perf_counter() - begin < request["budget_s"]):
        network = left.pop(0)
        job = Job(UNetConfig(**network["unet"]), tuple(network["shape"]), engine=engine, threads=intra_op)
        program, learner = training_step(job), Learner(RunConfig(grid=job.shape, unet=job.unet))
        parts = itertools.repeat(made_up(tf, job.unet, 1, job.shape))

        def step(learner=learner, parts=parts) -> float:
            begin = time.perf_counter()
            learner.step(parts, 1e-4)
            return time.perf_counter() - begin

        for _ in range(WARM_UP_STEPS):
            step()
        if runtime is None:
            held = use(program).resident_bytes + max(op.hidden_bytes for op in program.ops)
            runtime = {"bytes": peak_rss_bytes() - held, "ops": runtime_ops(program)}
        else:
            step_s, events = min((trace(tf, step) for _ in range(STEPS)), key=lambda one: one[0])
            found.append({"step_s": step_s, "ops": len(program.ops), "rows": rows(program, events, cache)})
        del learner, parts, step
        gc.collect()  # Keras models refer to themselves; the next network must not count this one's weights
    about = {"engine": engine, "threads": intra_op, "cache_bytes": cache, "environment": in_force(threads)}
    return {"networks": found, "left_out": len(left), "runtime": runtime, **facts_of(tf, threads, host), **about}
