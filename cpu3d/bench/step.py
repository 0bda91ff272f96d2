"""Time the real training step in a fresh process, alone or in turn with a peer.

    ./run.sh bench step --shape 240 240 160 --channels 4 --filters 16 --batch 1 --dtype bfloat16 --json

The step is the trainer's own: network, loss, gradients, optimizer; of a --recipe or a --run it is the step alone. A
peer is any command whose last line of output is JSON with "step_s"; the ratio is taken round by round.
"""

import contextlib
import dataclasses
import itertools
import os
import statistics
import tempfile
import time
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Tuple

from cpu3d.bench import harness
from cpu3d.bench.harness import Output, Result, Turns, gib, host_of, title_of, valid, with_range
from cpu3d.host.apply import set_up
from cpu3d.settings import AUTO, RunConfig, left_open
from memory_estimator.common.schema import option
from memory_estimator.common.table import Table
from memory_estimator.host import read_host
from memory_estimator.job import Job, JobOptions, job_from, source_job
from models.config import DTYPES, POLICIES, UNetConfig
from models.layer_plan import training_flops

WARM_UP_STEPS, LONG_ENOUGH_S = 2, 90
"""The first step compiles, the second still fills optimizer slots and caches. Once the steps have taken so long, as
without oneDNN in bfloat16, no more are done than one to warm up and one to time."""

LIVE_PARTS = 300  # of a step, each with the most that is live in it: as fine as a picture shows


@dataclass(frozen=True)
class MeasuredJob(JobOptions):
    """The estimator's options of a job, with a policy that is not picked."""

    dtype: str = option(AUTO, "compute dtype; auto is the recipe's, the run's or this host's", choices=(AUTO, *DTYPES))
    policy: str = option("speed", "memory policy (default: speed; of a --run its own)", choices=POLICIES)


@dataclass(frozen=True)
class StepOptions:
    """How often the step is done."""

    steps: int = option(5, "steps timed", at_least=1, metavar="N")
    warm_up: int = option(WARM_UP_STEPS, "steps before those, not timed", at_least=0, metavar="N")


OPTIONS = ((MeasuredJob,), StepOptions, Turns, Output)


def run(given: Dict[str, Any], options: StepOptions, turns: Turns, output: Output) -> int:
    request = step_request(given, options, matmul=True)
    ways = {**harness.peers(turns.peer), "": harness.fresh(measure, request)}
    found, _ = harness.in_turn(ways, turns.rounds, "step", keep_going=False)
    ours = found.pop("")
    others = [{**harness.summary(each, ours), **harness.peer_of(peer, each)} for peer, each in found.items()]
    result = {**harness.middle(ours), "rounds": [one["step_s"] for one in ours], "peers": others}
    output.publish("step", result, step_table(result))
    return 0


def step_request(given: Dict[str, Any], options: StepOptions, **more: Any) -> Dict[str, Any]:
    """What `measure` is to do for `given` options of `MeasuredJob`, 128^3 voxels where no shape is given.

    Raises InputError for a job that cannot be.
    """
    engine = given.get("engine", AUTO)
    known = Namespace(**{**given, "engine": engine})
    whole = valid(source_job, known).job
    job = valid(job_from, known, whole or Job(UNetConfig(dtype=read_host().best_dtype)))
    engine = job.engine if whole and engine == AUTO else left_open(engine)
    own = {"engine": engine, "threads": given.get("threads")}
    return request_for(job, **own, steps=options.steps, warm_up=options.warm_up, **more)


def request_for(job: Job, **more: Any) -> Dict[str, Any]:
    """What `measure` is to do to measure a job; `more` win over it."""
    found = {"shape": list(job.shape), "batch": job.batch, "micro_batch": job.micro, "optimizer": job.optimizer}
    found.update(unet=dataclasses.asdict(job.unet), engine=job.engine, threads=job.threads, matmul=False)
    return {**found, **more}


def has_known_engine(record: Mapping[str, Any]) -> bool:
    """Whether the estimator predicts for the engine of a record: any but TensorFlow without oneDNN."""
    return "no oneDNN" not in record.get("engine_name", "")


def job_of_record(record: Mapping[str, Any]) -> Job:
    """The job that a record measured, on the engine that really ran."""
    engine = record["engine"]
    if engine in (None, AUTO):
        engine = "itex" if "ITEX" in record["engine_name"] else "stock"
    job = Job(
        UNetConfig(**record["unet"]),
        shape=tuple(record["shape"]),
        batch=record["batch"],
        micro_batch=record["micro_batch"],
        optimizer=record["optimizer"],
        engine=engine,
        threads=int(record["threads"]["TF_NUM_INTRAOP_THREADS"]),
    )
    by_rule = dataclasses.replace(job, micro_batch=0)  # so that equal jobs compare equal
    return by_rule if by_rule.micro == job.micro else job


def step_table(record: Result) -> Table:
    """Our step and the peers'."""
    ours, rows = {**record, "peer": "this project,", "options": record["engine_name"], "ratio": None}, []
    for one in (ours, *record["peers"]):
        figures = (f"{one['step_s']:.2f}", gib(one["process_peak_bytes"]), with_range(one, "ratio"))
        rows.append((f"{one['peer']} {one['options']}", *figures))
    rate = (
        f"Our step runs at {record['gflops']:.0f} GFLOP/s, {record['matmul_peak_share']:.0%} of the matrix product of "
        f"this host ({record['matmul_gflops']:.0f})."
    )
    title, columns = f"{title_of(record)}, {host_of(record)}:", ("", "s a step", "process peak, GiB", "against ours")
    return Table(columns, rows, title=title, caption=rate)


# --- In the measuring process ---


def measure(request: Dict[str, Any]) -> Result:
    """Do `steps` training steps in the dtype and on the engine of `request`: their time and their memory.

    With `request["live"]` one more step is profiled for the bytes that are live over it, with `request["matmul"]` the
    host's matrix product is timed. Both come after the peaks.
    """
    if request.get("threads"):  # else they are the host's own number or the environment's
        os.environ.update(dict.fromkeys(("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS"), str(request["threads"])))
    host, threads, tf = set_up(request["engine"])
    from cpu3d.training.learner import Learner, allocator_peak_bytes

    config = config_of(request)
    unet, batch, grid, learner = config.unet, config.batch, config.grid, Learner(config)
    parts = itertools.repeat(made_up(tf, unet, config.micro, grid))  # as with a store, one micro-batch is in memory

    def step() -> float:
        begin = time.perf_counter()
        learner.step(parts, 1e-4)
        return time.perf_counter() - begin

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
    step_s = statistics.median(timed)
    gflops = training_flops(unet, grid, batch) / step_s / 1e9
    result = {**request, "step_s": step_s, "step_s_min": min(timed), "step_s_max": max(timed)}
    result.update(volume_s=step_s / batch, **facts)
    if request.get("live"):
        requests = _live_bytes(tf, step)
        result["live_bytes"] = requests and _most_in_each_part(requests)
    best = _matmul_gflops(tf, unet.dtype) if request["matmul"] else None
    return {**result, "gflops": gflops, "matmul_gflops": best, "matmul_peak_share": best and gflops / best}


def _live_bytes(tf: Any, step: Callable[[], Any]) -> List[Tuple[float, int]]:
    """Seconds, and the bytes that TensorFlow's allocator has handed out then, at each of its requests in a step."""
    # Where TensorFlow keeps the profile's format, from 2.13 to 2.21 at least.
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    profiler = tf.profiler.experimental
    with tempfile.TemporaryDirectory() as folder:
        with profiler.Profile(folder, profiler.ProfilerOptions(host_tracer_level=2, python_tracer_level=0)):
            step()
        spaces = [xplane_pb2.XSpace.FromString(path.read_bytes()) for path in Path(folder).rglob("*.xplane.pb")]
    held = []
    for plane in (plane for space in spaces for plane in space.planes):
        names, stats = plane.event_metadata, plane.stat_metadata
        for line in plane.lines:
            for event in line.events:
                if names[event.metadata_id].name in ("MemoryAllocation", "MemoryDeallocation"):
                    size = next(one for one in event.stats if stats[one.metadata_id].name == "bytes_allocated")
                    held.append((line.timestamp_ns / 1e9 + event.offset_ps / 1e12, size.int64_value))
    return sorted(held)


def _most_in_each_part(requests: List[Tuple[float, int]]) -> List[int]:
    """The most of the (seconds, bytes) of one step, one at least, in each of LIVE_PARTS equal parts of it."""
    found: List[List[int]] = [[] for _ in range(LIVE_PARTS)]
    begin, end = requests[0][0], requests[-1][0]
    for second, size in requests:
        found[min(int(LIVE_PARTS * (second - begin) / ((end - begin) or 1)), LIVE_PARTS - 1)].append(size)
    held = itertools.accumulate(found, lambda before, inside: [*before[-1:], *inside])
    return [max(inside) for inside in held]


def config_of(request: Dict[str, Any]) -> RunConfig:
    """The configuration of a run that trains as `request` asks."""
    own = {name: request[name] for name in ("batch", "micro_batch", "optimizer")}
    return RunConfig(grid=tuple(request["shape"]), unet=UNetConfig(**request["unet"]), **own)


def made_up(tf: Any, unet: UNetConfig, batch: int, grid: Tuple[int, ...]) -> Tuple[Any, Any]:
    """Noise (batch, X, Y, Z, C), and targets of a tenth of the voxels (batch, X, Y, Z, R) uint8.

    Made by TensorFlow, for whether it copies an array of numpy's depends on the address that this happens to have.
    """
    noise = tf.random.stateless_normal((batch, *grid, unet.channels), (0, 1))
    drawn = tf.random.stateless_uniform((batch, *grid, unet.outputs), (0, 2), 0, 10, tf.int32)
    return tf.cast(noise, unet.dtype), tf.cast(tf.equal(drawn, 9), tf.uint8)


def _matmul_gflops(tf: Any, dtype: str) -> float:
    """The best rate of a square matrix product in `dtype`, over a few sizes; stops growing where a product is slow."""
    best = 0.0
    for side in (1024, 2048, 4096):
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
