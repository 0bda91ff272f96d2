"""Time the real training step in a fresh process, alone or in turn with a peer.

    ./run.sh bench step --shape 240 240 160 --channels 4 --filters 16 --batch 1 --dtype bfloat16 --json

The step is the trainer's own: network, loss, gradients, optimizer; of a --recipe or a --run it is the step alone. A
peer is any command whose last line of output is JSON with "step_s"; it runs in turn with ours, and the ratio is taken
round by round.
"""

import argparse
import contextlib
import dataclasses
import itertools
import os
import statistics
import time
from dataclasses import dataclass
from typing import Any, Dict, List, Tuple

from cpu3d.bench import harness
from cpu3d.bench.harness import Output, Result, Turns, title_of, valid, with_range
from cpu3d.host.apply import ENGINES, set_up
from cpu3d.host.memory import resident
from cpu3d.settings import AUTO, RunConfig, left_open
from memory_estimator.host import read_host
from memory_estimator.job import ENGINES as KNOWN_ENGINES
from memory_estimator.job import Job, add_job_options, add_source_options, job_from, source_job
from memory_estimator.schema import add_options, from_args, option
from memory_estimator.table import Table
from memory_estimator.units import GIB
from models.config import DTYPES, UNetConfig
from models.layer_plan import training_flops

WARM_UP_STEPS = 2
"""The first step compiles, the second still fills optimizer slots and caches; peaks and times settle with the third."""

LONG_ENOUGH_S = 90
"""Once the steps have taken this long, no more are done than one to warm up and one to time: without oneDNN a step
takes minutes in bfloat16, next to which what settles during the first ones is nothing."""

MATMUL_SIDES = (1024, 2048, 4096)
"""Matrices tried for the peak; larger ones gain nothing on the hosts measured."""

HELP = "time the real training step in a fresh process, alone or in turn with a peer"


@dataclass(frozen=True)
class StepOptions:
    """How often the step is done."""

    steps: int = option(5, "steps timed", at_least=1, metavar="N")
    warm_up: int = option(WARM_UP_STEPS, "steps before those, not timed", at_least=0, metavar="N")


def add_step_options(parser: argparse.ArgumentParser, *more: type) -> None:
    """Add the options of a job, as the estimator has them, and those of `more` classes."""
    add_source_options(parser)
    add_job_options(parser, ENGINES, (AUTO, *DTYPES))
    for cls in more:
        add_options(parser, cls)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_step_options(parser, StepOptions, Turns)
    add_options(parser, Output, only=("json", "record"))


def run(args: argparse.Namespace) -> int:
    output, turns = from_args(Output, args), from_args(Turns, args)
    request = step_request(args, from_args(StepOptions, args), matmul=["before", "after"])
    # Peers first: a command that is wrong is found out before ours took its time.
    ways = {command: lambda _, command=command: harness.run_peer(command) for command in turns.peer}
    ways[""] = lambda _: harness.in_fresh_process(measure, request)
    found, _ = harness.in_turn(ways, turns.rounds, "step", keep_going=False)
    ours = found.pop("")
    result = {**harness.middle(ours), "rounds": [one["step_s"] for one in ours], "peers": []}
    for command, results in found.items():
        own = {"peer": results[0]["peer"], "options": harness.peer_options(command)}
        result["peers"].append({**harness.summary(results, ours), **own})
    output.publish("step", result, [_table(result)])
    return 0


def step_request(args: argparse.Namespace, options: StepOptions, **more: Any) -> Dict[str, Any]:
    """What `measure` is to do, 128^3 voxels where no shape is given. Raises InputError for a job that cannot be."""
    engine = getattr(args, "engine", AUTO)
    if engine not in KNOWN_ENGINES:
        args.engine = AUTO  # a job has none that the estimator does not know
    if getattr(args, "dtype", AUTO) == AUTO:
        vars(args).pop("dtype", None)
    whole = valid(source_job, args)
    job = valid(job_from, args, whole or Job(UNetConfig(dtype=read_host().best_dtype)))
    engine = job.engine if whole and engine == AUTO else left_open(engine)
    own = {"engine": engine, "threads": getattr(args, "threads", None)}
    return request_for(job, **{**own, "steps": options.steps, "warm_up": options.warm_up, **more})


def request_for(job: Job, **more: Any) -> Dict[str, Any]:
    """What `measure` is to do to measure a job; `more` win over it."""
    return {
        "shape": list(job.shape),
        "batch": job.batch,
        "micro_batch": job.micro,
        "unet": dataclasses.asdict(job.unet),
        "optimizer": job.optimizer,
        "engine": job.engine,
        "threads": job.threads,
        "matmul": [],
        **more,
    }


def _table(result: Result) -> Table:
    peak = result["allocator_peak_bytes"]
    rows = {
        "engine": result["engine_name"],
        "step": f"{with_range(result, 'step_s')} s",
        "rate": f"{result['gflops']:.0f} GFLOP/s, {result['matmul_peak_share']:.0%} of this host's matrix product",
        "allocator peak": "not counted by this engine" if peak is None else f"{peak / GIB:.2f} GiB",
        "process peak": f"{result['process_peak_bytes'] / GIB:.2f} GiB",
    }
    peers = [
        (peer["peer"], f"{peer['step_s']:.2f} s, {with_range(peer, 'ratio')} times ours: {peer['options']}")
        for peer in result["peers"]
    ]
    return Table(("", ""), [*rows.items(), *peers], title=f"Training step, {title_of(result)}", names=2)


# --- In the measuring process ---


def measure(request: Dict[str, Any]) -> Result:
    """Do `steps` training steps in the dtype and on the engine of `request`: their time and their memory.

    `request["matmul"]` says when the host's matrix product is timed, "before" and "after" the steps. Both is fairest,
    as the best of all products counts: a share of it is then never flattered by a slow moment of the host. Where memory
    is the question it must not come before, because the matrices' pages would stay with the process.

    With `request["watched"]` the result also says when each part ran, and what lay in memory before the first volume.
    All peaks are read before the products after the steps.
    """
    if request.get("threads"):  # else they are the host's own number or the environment's
        os.environ.update(dict.fromkeys(("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS"), str(request["threads"])))
    host, threads, tf = set_up(request["engine"])
    from cpu3d.training.learner import Learner, allocator_peak_bytes, parameter_count

    config = config_of(request)
    unet, batch, grid, learner = config.unet, config.batch, config.grid, Learner(config)
    peaks = [_matmul_gflops(tf, unet.dtype)] if "before" in request["matmul"] else []
    moments: List[Tuple[str, float, float]] = []
    before, begin = resident(), time.time()
    # One micro-batch stands for all: as with a store, no other lies in memory beside it.
    parts = itertools.repeat(made_up(tf, unet, config.micro, grid))
    moments.append(("data", begin, time.time()))

    def step() -> float:
        begin, begin_s = time.time(), time.perf_counter()
        learner.step(parts, 1e-4)
        seconds = time.perf_counter() - begin_s
        moments.append(("step", begin, time.time()))
        return seconds

    first: List[float] = []
    while len(first) < request.get("warm_up", WARM_UP_STEPS) and sum(first) < LONG_ENOUGH_S:
        first.append(step())
    # An engine without oneDNN keeps no statistics, and reports none.
    with contextlib.suppress(ValueError, tf.errors.OpError):
        tf.config.experimental.reset_memory_stats("CPU:0")
    timed = [step()]
    while len(timed) < request["steps"] and sum(first + timed) < LONG_ENOUGH_S:
        timed.append(step())
    facts = {"allocator_peak_bytes": allocator_peak_bytes(), **harness.facts_of(tf, threads, host)}
    if request.get("watched"):
        sizes = {"baseline_bytes": before, "resident_bytes": resident()}
        facts.update({name: one and one.total_bytes for name, one in sizes.items()}, moments=moments)
    if "after" in request["matmul"]:
        peaks.append(_matmul_gflops(tf, unet.dtype))
    step_s = statistics.median(timed)
    gflops = training_flops(unet, grid, batch) / step_s / 1e9
    return {
        **request,
        "step_s": step_s,
        "step_s_min": min(timed),
        "step_s_max": max(timed),
        "first_step_s": first[0] if first else timed[0],
        "steps_timed": len(timed),
        "volume_s": step_s / batch,
        "gflops": gflops,
        "matmul_gflops": max(peaks, default=None),
        "matmul_peak_share": gflops / max(peaks) if peaks else None,
        "parameters": parameter_count(learner.model),
        **facts,
    }


def config_of(request: Dict[str, Any], workers: int = 1) -> RunConfig:
    """The configuration of a run that trains as `request` asks each of the workers to."""
    unet, batch = UNetConfig(**request["unet"]), workers * request["batch"]
    own = {"micro_batch": request["micro_batch"], "optimizer": request["optimizer"]}
    return RunConfig(grid=tuple(request["shape"]), unet=unet, batch=batch, **own)


def made_up(tf: Any, unet: UNetConfig, batch: int, grid: Tuple[int, ...]) -> Tuple[Any, Any]:
    """Noise (batch, X, Y, Z, C), and targets of a tenth of the voxels (batch, X, Y, Z, R) uint8.

    Made by TensorFlow: whether it copies an array of numpy's depends on the address that this happens to have, and
    the allocator's peak on everything that was taken before it.
    """
    noise = tf.random.stateless_normal((batch, *grid, unet.channels), (0, 1))
    drawn = tf.random.stateless_uniform((batch, *grid, unet.outputs), (0, 2), 0, 10, tf.int32)
    return tf.cast(noise, unet.dtype), tf.cast(tf.equal(drawn, 9), tf.uint8)


def _matmul_gflops(tf: Any, dtype: str) -> float:
    """The best rate of a square matrix product in `dtype`, over a few sizes; stops growing where a product is slow."""
    best = 0.0
    for side in MATMUL_SIDES:
        matrix = tf.cast(tf.random.stateless_normal((side, side), (1, 2)), dtype)
        product = tf.function(lambda m: tf.matmul(m, m))
        product(matrix)
        seconds = []
        while len(seconds) < 6 and sum(seconds) <= 2:
            begin = time.perf_counter()
            product(matrix)[0, 0].numpy()
            seconds.append(time.perf_counter() - begin)
        best = max(best, 2 * side**3 / min(seconds) / 1e9)
        if min(seconds) > 0.5:
            break
    return best
