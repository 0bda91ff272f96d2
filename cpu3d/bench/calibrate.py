"""Measure this host's constants for the estimator: what the runtime holds in memory, how fast each kind of work goes.

    ./run.sh calibrate
    ./run.sh calibrate --all --out other.json

Runs a few small training steps under TensorFlow's profiler, in a fresh process for each dtype, within a minute for each
engine: a slow host does fewer. What they show is kept with what `train` and `bench` have seen on this host; estimates
use it by themselves. With --out the constants are written to a file instead, from these steps alone. Wants a quiet
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
from typing import Any, Dict, List, Optional

import psutil

from cpu3d.bench.harness import Result, in_fresh_process
from cpu3d.bench.step import WARM_UP_STEPS, made_up
from cpu3d.host.apply import engine_name, installed, set_up
from cpu3d.host.fitting import Run
from cpu3d.host.memory import peak_rss_bytes
from cpu3d.host.observe import Observer, constants_of, record, write_constants
from cpu3d.settings import RunConfig
from cpu3d.util.atomic import writable_folder
from cpu3d.util.progress import bar
from cpu3d.util.records import listed
from memory_estimator.common.files import typed
from memory_estimator.common.schema import option
from memory_estimator.host import read_host
from memory_estimator.job import ENGINES, Job
from memory_estimator.step.allocator import use
from memory_estimator.step.training_step import training_step
from models.config import UNetConfig

SHAPE, HALF, SMALL, MOST_STEPS = (96, 96, 96), (48, 96, 96), (48, 64, 64), 8
"""The largest that constants are fitted to: what is larger is for checking them. Less of it saves time. Steps timed of
each network, where they are disturbed."""

COMMAND = "calibrate"  # what its runs say they are from

BUDGET_S, QUIET = 60, 0.1
"""For one engine in all its dtypes, start-up included; once it is spent no more networks are begun. CPUs that other
processes may keep busy before the times are called disturbed."""


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
    asked = [(engine, dtype) for engine in engines for dtype in ("bfloat16", "float32")[not host.fast_bfloat16 :]]
    with bar("calibrate", total=len(asked)) as advance:
        for number, (engine, dtype) in enumerate(asked):
            busy = max(busy, psutil.cpu_percent(0.5) / 100 * psutil.cpu_count())  # with others: nothing of ours runs
            left_s = (BUDGET_S * len(engines) - (time.perf_counter() - begin)) / (len(asked) - number)
            request = {"engine": engine, "networks": networks(dtype), "budget_s": left_s}
            results.append(in_fresh_process(measure, request))
            advance()
    by_engine: Dict[str, List[Run]] = defaultdict(list)
    for result in results:
        by_engine[result["engine"]] += [typed(one, Run, "run") for one in result["runs"]]
    if options.out:
        found = [one for runs in by_engine.values() for one in constants_of(runs, host)]
        write_constants(options.out, found)
    files = [options.out] if options.out else [record(runs, host) for runs in by_engine.values()]
    left_out, seconds = sum(result["left_out"] for result in results), time.perf_counter() - begin
    if busy > QUIET:
        print(f"other processes kept {busy:.1f} CPUs busy: times are too long, calibrate again when quiet")
    print(f"{listed(files)} written after {seconds:.0f} s, {left_out} networks left out for want of time")
    return 0


def networks(dtype: str) -> List[Dict[str, Any]]:
    """A tiny network for the runtime's memory, then some for the costs, which differ in width and in what they have.

    The two dtypes' tiny networks differ in depth, which tells apart what grows with it. Where time is short the last
    are left out. Norms of 12 channels are slow in float32; in bfloat16 those of 8 are, which the second has.
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


# --- One process: small steps, operation by operation ---


def measure(request: Dict[str, Any]) -> Result:
    """Time the operations of a few steps of each of `request["networks"]`, {"unet", "shape"} each.

    The result's "runs" hold what `Run` does. The first network is not timed: after it the process's memory besides
    tensors is read. Once `request["budget_s"]` is spent, those left are counted in "left_out".
    """
    begin, today = time.perf_counter(), datetime.date.today().isoformat()
    host, _, tf = set_up(request["engine"])
    from cpu3d.training.learner import Learner

    engine = "itex" if "ITEX" in engine_name(tf) else "stock"
    intra_op = tf.config.threading.get_intra_op_parallelism_threads()
    runs: List[Run] = []
    left = list(request["networks"])
    while left and (len(runs) < 2 or time.perf_counter() - begin < request["budget_s"]):
        network = left.pop(0)
        job = Job(UNetConfig(**network["unet"]), tuple(network["shape"]), engine=engine, threads=intra_op)
        learner = Learner(RunConfig(grid=job.shape, unet=job.unet))
        parts = itertools.repeat(made_up(tf, job.unet, 1, job.shape))

        def step(learner=learner, parts=parts) -> float:
            begin = time.perf_counter()
            learner.step(parts, 1e-4)
            return time.perf_counter() - begin

        for _ in range(WARM_UP_STEPS):
            step()
        if not runs:
            program = training_step(job)
            held = use(program).resident_bytes + max(op.hidden_bytes for op in program.ops)
            runs.append(Run(job, COMMAND, today, runtime_bytes=peak_rss_bytes() - held))
        else:
            observer, found = Observer(job, COMMAND, host, traced=range(1, MOST_STEPS)), None
            while observer.note(observer.watch(step)) < MOST_STEPS and not (found and found.op_s):
                found = observer.run()
            runs.append(observer.run(anyway=True))
        del learner, parts, step
        gc.collect()  # Keras models refer to themselves; the next network must not count this one's weights
    return {"runs": [dataclasses.asdict(one) for one in runs], "left_out": len(left), "engine": engine}
