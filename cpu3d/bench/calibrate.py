"""Measure this host's constants for the estimator: what the runtime holds in memory, how fast each kind of work goes.

    ./run.sh calibrate
    ./run.sh calibrate --all --out other.json

Times training steps of a few small networks, which differ in arithmetic and traffic, in a fresh process for each dtype,
in about a minute for each engine: a slow host does fewer. What they show is kept for this host, and estimates use it.
With --out it is written to a file instead. Run it while nothing else runs. Memory that operations take is not fitted:
`bench validate --first 3` shows whether its rules hold here.
"""

import dataclasses
import datetime
import gc
import itertools
import math
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np
import psutil
from scipy.optimize import lsq_linear

from cpu3d.bench.harness import Result, in_fresh_process
from cpu3d.bench.step import WARM_UP_STEPS, made_up
from cpu3d.host.apply import engine_name, installed, set_up
from cpu3d.host.memory import peak_rss_bytes
from cpu3d.host.speed import QUIET_SHARE, keep_constants
from cpu3d.settings import RunConfig
from cpu3d.util.atomic import writable_folder, write_json
from cpu3d.util.progress import bar
from memory_estimator.calibration import (
    FURTHEST,
    PARTS,
    HostConstants,
    runtime_ops,
    scaled,
    shipped_constants,
    to_json,
)
from memory_estimator.common.files import typed
from memory_estimator.common.schema import option
from memory_estimator.host import Host, read_host
from memory_estimator.job import ENGINES, Job
from memory_estimator.step.allocator import use
from memory_estimator.step.timing import step_seconds
from memory_estimator.step.training_step import training_step
from models.config import DTYPES, UNetConfig

SHAPE, HALF, SMALL = (96, 96, 96), (48, 96, 96), (48, 64, 64)  # the largest that constants are fitted to, and less
TIMED_STEPS = 4  # of each network, of which the two fastest count
BUDGET_S = 60  # for one engine in all its dtypes, start-up included; once it is spent no more networks are begun

# How firmly work, traffic and overhead are held to one common factor: one that differs from it by all of itself weighs
# as much as an error of a tenth in one network's seconds. Networks that do not tell them apart leave them alike.
HELD = 0.01


@dataclass(frozen=True)
class Timing:
    """What was measured of one network."""

    job: Job
    step_s: Optional[float] = None  # None where it was not timed
    runtime_bytes: Optional[int] = None  # resident memory of the process besides tensors and scratch


@dataclass(frozen=True)
class Options:
    """What `calibrate` measures, and where it writes."""

    engine: Optional[str] = option(None, "default: what `train` would use", choices=ENGINES)
    all: bool = option(False, help="every engine that is installed, a minute each")
    out: Optional[Path] = option(None, "write them to a file, for --calibration (default: keep them)", metavar="FILE")


OPTIONS = (Options,)


def run(options: Options) -> int:
    if options.out:
        writable_folder(options.out.parent, "folder")
    host, begin, results, busy = read_host(), time.perf_counter(), [], 0.0
    engines = [engine for engine in ENGINES if installed(engine)] if options.all else [options.engine]
    asked = [(engine, dtype) for engine in engines for dtype in DTYPES]
    with bar("calibrate", total=len(asked)) as advance:
        for number, (engine, dtype) in enumerate(asked):
            busy = max(busy, psutil.cpu_percent(0.5) / 100)  # with others: nothing of ours runs
            left_s = (BUDGET_S * len(engines) - (time.perf_counter() - begin)) / (len(asked) - number)
            request = {"engine": engine, "networks": networks(dtype), "budget_s": left_s}
            results.append(in_fresh_process(measure, request))
            advance()
    constants = fitted([one for result in results for one in typed(result["timings"], List[Timing])], host)
    if options.out:
        write_json(options.out, to_json(constants))
    path = options.out or keep_constants(constants, host)
    left_out, seconds = sum(result["left_out"] for result in results), time.perf_counter() - begin
    if busy > QUIET_SHARE:
        print(f"other programs took {busy:.0%} of the CPUs: times are too long, calibrate again on a quiet host")
    print(f"{path} written after {seconds:.0f} s, {left_out} networks left out as time ran out")
    return 0


def networks(dtype: str) -> List[Dict[str, Any]]:
    """A tiny network for the runtime's memory, of another depth in each dtype to tell apart what grows with it.

    Then some for the costs, which differ in width and in what they have. Where time is short the last are left out.
    """
    found = (
        ({"filters": 8, "depth": 3 if dtype == "float32" else 5}, (32, 32, 32)),
        ({"filters": 16}, SHAPE),
        ({"filters": 8, "channels": 1, "depth": 3}, SHAPE),
        ({"filters": 32}, HALF),
        ({"filters": 24, "depth": 3}, SMALL),
    )
    return [{"unet": dataclasses.asdict(UNetConfig(**unet, dtype=dtype)), "shape": shape} for unet, shape in found]


# --- One process: a few steps of each network ---


def measure(request: Dict[str, Any]) -> Result:
    """Time a few steps of each of `request["networks"]`, {"unet", "shape"} each.

    The result's "timings" hold what `Timing` does. The first network is not timed: after it the process's memory
    besides tensors is read. Once `request["budget_s"]` is spent, those left are counted in "left_out".
    """
    begin = time.perf_counter()
    _, _, tf = set_up(request["engine"])
    from cpu3d.training.learner import Learner, reserve

    engine = "itex" if "ITEX" in engine_name(tf) else "stock"
    intra_op = tf.config.threading.get_intra_op_parallelism_threads()
    timings, left = [], list(request["networks"])
    while left and (len(timings) < 2 or time.perf_counter() - begin < request["budget_s"]):
        network = left.pop(0)
        job = Job(UNetConfig(**network["unet"]), tuple(network["shape"]), engine=engine, threads=intra_op)
        if not timings:
            reserve(job)
        learner = Learner(RunConfig(grid=job.shape, unet=job.unet))
        parts = itertools.repeat(made_up(tf, job.unet, 1, job.shape))
        steps_s = []
        for _ in range(WARM_UP_STEPS + (TIMED_STEPS if timings else 0)):
            step_begin = time.perf_counter()
            learner.step(parts, 1e-4)
            steps_s.append(time.perf_counter() - step_begin)
        if timings:
            timings.append(Timing(job, step_s=statistics.fmean(sorted(steps_s[WARM_UP_STEPS:])[:2])))
        else:
            program = training_step(job)
            held = use(program).resident_bytes + max(op.hidden_bytes for op in program.ops)
            timings.append(Timing(job, runtime_bytes=peak_rss_bytes() - held))
        del learner, parts
        gc.collect()  # Keras models refer to themselves; the next network must not count this one's weights
    return {"timings": [dataclasses.asdict(one) for one in timings], "left_out": len(left), "engine": engine}


# --- From seconds to constants ---


def fitted(timings: Sequence[Timing], host: Host) -> HostConstants:
    """Constants of a host, from `timings` on one number of threads: those that are shipped for its instruction set,
    their work, traffic and overhead each times a factor. A dtype that was not timed has the factors of the other."""
    threads, today = timings[0].job.threads, datetime.date.today().isoformat()
    shipped = shipped_constants(host.instructions)
    base = dataclasses.replace(shipped.for_threads(threads), measured_threads=0)
    memory = {name: dict(getattr(shipped, name)) for name in ("baseline_bytes", "op_bytes")}
    origins = {**shipped.origins, "costs": f"measured: calibrate, {today}"}
    for engine in {one.job.engine for one in timings}:
        held = [one for one in timings if one.runtime_bytes and one.job.engine == engine]
        points = [(runtime_ops(training_step(one.job)), one.runtime_bytes) for one in held]
        if points:
            line = straight_line(points, memory["op_bytes"][engine])
            memory["baseline_bytes"][engine], memory["op_bytes"][engine] = line
            origins.update(dict.fromkeys(memory, "measured: calibrate, resident memory less the step's tensors"))
    timed = [one for one in timings if one.step_s]
    factors = {
        dtype: _factors(some, base)
        for dtype in DTYPES
        if (some := [one for one in timed if one.job.unet.dtype == dtype])
    }
    costs = {
        dtype: scaled(kinds, factors.get(dtype) or next(iter(factors.values()))) for dtype, kinds in base.costs.items()
    }
    about = {"origin": "measured", "origins": origins, "record": "calibrate", "date": today, "costs": costs, **memory}
    return dataclasses.replace(base, name=host.cpu_model, cpu=host.cpu_model, **about)


def straight_line(points: Sequence[Tuple[int, int]], slope: float) -> Tuple[int, int]:
    """Bytes of no operations, and of each, through measured (operations, bytes); `slope` where it takes two points."""
    ops, sizes = zip(*points)
    if len(set(ops)) > 1:
        slope = max(0.0, np.polyfit(ops, sizes, 1)[0])
    return max(0, round(statistics.fmean(sizes) - slope * statistics.fmean(ops))), round(slope)


def _factors(timings: Sequence[Timing], shipped: HostConstants) -> Dict[str, float]:
    """By how much each of PARTS takes longer than with shipped constants, from steps in one dtype: least squares of the
    relative errors, held to one factor for all (ridge regression)."""
    seconds = np.array([one.step_s for one in timings])
    parts = [[_step_s(one.job, shipped, {part: 1.0}) for part in PARTS] for one in timings] / seconds[:, None]
    whole = 1 / np.median(parts.sum(1))
    held = math.sqrt(HELD) * np.eye(len(PARTS))
    goal = [*np.ones(len(timings)), *np.diag(held)]
    apart = lsq_linear(np.vstack([parts * whole, held]), goal, (1 / FURTHEST, FURTHEST)).x
    return dict(zip(PARTS, (apart * whole).tolist()))


def _step_s(job: Job, constants: HostConstants, factors: Dict[str, float]) -> float:
    """Predicted seconds of a step, its parts times `factors`; those without one do not count."""
    costs = {job.unet.dtype: scaled(constants.costs[job.unet.dtype], {**dict.fromkeys(PARTS, 0.0), **factors})}
    return step_seconds(training_step(job), dataclasses.replace(constants, costs=costs), job)
