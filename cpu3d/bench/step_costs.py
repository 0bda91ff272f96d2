"""Measure time and memory of the real training step in a fresh process, and compare with the
estimator's prediction.

    ./run.sh bench step --shape 240 240 160 --channels 4 --filters 16 --dtype bfloat16 --json
    ./run.sh bench step --policies --shape 128 128 128 --rounds 2 \\
        --peer "python other.py" --record records/policies.jsonl

The step is the trainer's own: network, loss, gradients, optimizer, without the store. The
allocator's peak is counted by TensorFlow, and stock TensorFlow leaves out oneDNN's scratch; the
peak of the process is the kernel's (VmHWM).

--policies measures the step under every memory policy, in turn. A peer is any command whose last
line of output is JSON with "step_s", and "peak_rss_bytes" if it knows its peak. If one of our
processes dies, its row shows that. The bytes in use over a step are those of one more step, in
which TensorFlow's profiler records every request to the allocator; `python -m records.tables
--picture` draws them."""

import contextlib
import dataclasses
import functools
import itertools
import shlex
import statistics
import tempfile
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from cpu3d.bench import harness
from cpu3d.bench.harness import (
    FACTS,
    Output,
    ProcessFailedError,
    Result,
    host_of,
    run_peer,
    seconds_of,
    valid,
)
from cpu3d.decisions import job_of
from cpu3d.errors import InputError
from cpu3d.host.memory import allocator_peak_bytes, peak_rss_bytes, reserve
from cpu3d.run.summary import median, numbers
from cpu3d.settings import AUTO, RunConfig, left_open
from memory_estimator.calibration import HostConstants, find_constants, shipped_constants
from memory_estimator.common.schema import option
from memory_estimator.common.table import Table
from memory_estimator.common.units import GIB, by
from memory_estimator.estimate import estimate
from memory_estimator.host import instruction_set, read_host
from memory_estimator.job import Job, JobOptions, job_from, padding_note
from memory_estimator.sources import source_job
from models.config import DTYPES, POLICIES, UNetConfig
from models.losses import DEFAULT_LOSS, LOSSES

WARM_UP_STEPS = 2  # the first step compiles, the second fills optimizer slots and caches
# Equal lengths of time that a step is cut into, each with the most bytes that are live in it: a
# picture shows no more.
SPANS = 300
STEP_SETTINGS = ("optimizer", "freeze", "loss")  # of a request, as of `train`
PREDICTED = ("allocator_peak_bytes", "process_peak_bytes", "upper_bound_bytes", "step_s")


@dataclass(frozen=True)
class MeasuredJob(JobOptions):
    """The estimator's options of a job, with a policy that is never picked automatically."""

    dtype: str = option(
        AUTO, "compute dtype; auto: the recipe's, the run's or this host's", choices=(AUTO, *DTYPES)
    )
    policy: str = option(
        "speed", "memory policy (default: speed; with --run the run's)", choices=POLICIES
    )
    loss: str = option(DEFAULT_LOSS, "what is minimised", choices=tuple(LOSSES))


@dataclass(frozen=True)
class StepOptions:
    """How many steps are timed, and which measurements are taken in turn."""

    steps: int = option(5, "steps timed", at_least=1, metavar="N")
    warm_up: int = option(WARM_UP_STEPS, "steps before the timed ones", at_least=0, metavar="N")
    policies: bool = option(False, "measure all policies")
    peer: Tuple[str, ...] = option(
        (), 'command whose last line is JSON with "step_s"; repeatable', "CMD", repeat=True
    )
    rounds: int = option(1, "repeat all measurements N times, in turn", at_least=1, metavar="N")


OPTIONS = ((MeasuredJob,), StepOptions, Output)


def run(chosen: Dict[str, Any], options: StepOptions, output: Output) -> int:
    if options.policies and "policy" in chosen:
        rule = f"--policies must be without --policy, got {chosen['policy']}"
        raise InputError(f"{rule}; leave one out")
    arguments = Namespace(**chosen)
    source = valid(source_job, arguments).job
    if source:
        job = valid(job_from, arguments, source)
        engine = job.engine
    else:
        job = valid(job_from, arguments, Job(UNetConfig(dtype=read_host().best_dtype)))
        engine = left_open(chosen.get("engine", AUTO))
    note = padding_note(arguments, job, source)
    if note:
        from cpu3d.util.progress import say  # not into the memory of a measuring process

        say(f"note: {note}")
    request = request_for(
        job,
        engine=engine,
        threads=chosen.get("threads"),
        loss=chosen.get("loss", DEFAULT_LOSS),
        steps=options.steps,
        warm_up=options.warm_up,
    )
    policies = POLICIES if options.policies else (job.policy,)
    result = compare_policies(request, policies, options.peer, options.rounds)
    result = with_predictions(result, find_constants())
    output.publish("policies", result, step_table(result))
    return 0


def request_for(job: Job, **more: Any) -> Dict[str, Any]:
    """The request that `bench` makes of a job, which its record begins with, with `more` in it."""
    return {
        "shape": list(job.shape),
        "batch": job.batch,
        "micro_batch": job.micro,
        "optimizer": job.optimizer,
        "freeze": job.freeze,
        "unet": job.unet.to_json(),
        "engine": job.engine,
        "threads": job.threads,
        **more,
    }


def job_of_record(record: Mapping[str, Any]) -> Optional[Job]:
    """A record's job, on the engine that really ran; None for TensorFlow without oneDNN, which has
    no constants."""
    name = record.get("engine_name", "")
    if "no oneDNN" in name:
        return None
    engine = record["engine"]
    if engine in (None, AUTO):
        engine = "itex" if "ITEX" in name else "stock"
    job = Job(
        UNetConfig(**record["unet"]),
        tuple(record["shape"]),
        batch=record["batch"],
        micro_batch=record["micro_batch"],
        optimizer=record["optimizer"],
        freeze=record.get("freeze", "none"),
        engine=engine,
        threads=int(record["threads"]["TF_NUM_INTRAOP_THREADS"]),
    )
    by_rule = dataclasses.replace(job, micro_batch=0)  # so that equal jobs compare equal
    return by_rule if by_rule.micro == job.micro else job


def instructions_of(record: Mapping[str, Any]) -> str:
    """The instruction set of native operations in a record; "" if TensorFlow's layers computed.
    Records before 2026-11-27, all of native operations, do not have it, nor all flags: a CPU with
    AVX512_VNNI has these three."""
    host = record["host"]
    if "instructions" in host:
        return host["instructions"]
    flags = list(host["isa"])
    if "avx512_vnni" in flags:
        flags += ["avx512bw", "avx512dq", "avx512vl"]
    return instruction_set(flags, host["cpu"]) or "avx2"


def compare_policies(
    request: Dict[str, Any], policies: Sequence[str], peers: Sequence[str], rounds: int
) -> Result:
    """Measure the step of `request` under each policy, and the peers, in turn; the content of a
    record, with "rows".

    Seconds are medians, peaks the highest; the bytes live over a step are of the first round, and
    only if several are compared. A policy whose process died is not tried again, and its row has
    the "error". Raises ProcessFailedError for a peer that fails, and if no policy could be
    measured."""
    from cpu3d.util.progress import bar  # not into the memory of a measuring process

    done: Dict[str, List[Result]] = {name: [] for name in (*policies, *peers)}
    errors: Dict[str, ProcessFailedError] = {}
    with bar("bench step", total=rounds * len(done)) as advance:
        # Peers first: a wrong command fails before our own measurements take their time.
        for number, name in itertools.product(range(rounds), (*peers, *policies)):
            if name in peers:
                done[name].append(run_peer(name))
            elif name not in errors:
                own = dict(request)
                own["unet"] = {**request["unet"], "policy": name}
                own["live"] = number == 0 and len(done) > 1
                try:
                    done[name].append(harness.in_fresh_process(measure, own))
                except ProcessFailedError as error:
                    errors[name] = error
            advance()
    measured = [done[name][0] for name in policies if done[name]]
    if not measured:
        raise errors[policies[0]]
    rows = []
    for name, results in done.items():
        if name in peers:
            row = _row(_peer_name(name, results[0]), "peer", results)
        else:
            row = _row(name, "policy", results)
        if name in errors:
            row["error"] = str(errors[name])
        rows.append(row)
    facts = {fact: measured[0][fact] for fact in FACTS}
    return {**request, "rounds": rounds, "rows": rows, **facts}


def _row(name: str, kind: str, results: Sequence[Result]) -> Result:
    """The row of a policy or a peer in a record."""
    rounds = numbers(results, "step_s")
    row = {"name": name, "kind": kind, "error": None, "rounds": rounds, "step_s": median(rounds)}
    for peak in ("allocator_peak_bytes", "process_peak_bytes"):
        row[peak] = max(numbers(results, peak), default=None)
    row["live_bytes"] = results[0].get("live_bytes") if results else None
    return row


def _peer_name(command: str, result: Result) -> str:
    """What a peer calls itself, and its arguments, without paths, which are of one machine."""
    words = [word for word in shlex.split(command)[1:] if "/" not in word]
    return " ".join([result.get("peer", ""), *words]).strip()


def with_predictions(record: Result, constants: Optional[HostConstants] = None) -> Result:
    """The record with the estimator's figures as "predicted" in each row, by default with the
    constants that are shipped for its host; None for a peer, and for an engine that the estimator
    does not know, with a warning."""
    from cpu3d.util.progress import say  # not into the memory of a measuring process

    if constants is None:
        constants = shipped_constants(instructions_of(record))
    job = job_of_record(record)
    rows = []
    if not job:
        rule = "engine must be itex or stock to be predicted"
        say(f"warning: {rule}, got {record['engine_name']}; no prediction")
    for row in record["rows"]:
        predicted = None
        if job and row["kind"] == "policy":
            own = estimate(job.with_unet(policy=row["name"]), constants)
            predicted = {name: getattr(own, name) for name in PREDICTED}
        rows.append({**row, "predicted": predicted})
    return {**record, "rows": rows}


def step_table(record: Result) -> Table:
    """Peaks and seconds of each policy and peer, with the prediction of a policy below it."""
    cells = []
    died = []
    for row in record["rows"]:
        cells.append([row["name"], *_figures(row)])
        if row["predicted"]:
            cells.append(["predicted", *_figures(row["predicted"])])
        if row["error"]:
            died.append(f"{row['name']} died: {row['error']}.")
    columns = ("", "allocator peak, GiB", "process peak, GiB", "upper bound, GiB", "s a step")
    title = f"{title_of(record)}, {record['engine_name']}, {host_of(record)}"
    return Table(columns, cells, title=title, caption=" ".join(died))


def _figures(row: Result) -> List[str]:
    """Peaks in GiB, and seconds."""
    cells = []
    for peak in ("allocator_peak_bytes", "process_peak_bytes", "upper_bound_bytes"):
        cells.append(f"{row[peak] / GIB:.2f}" if row.get(peak) else "-")
    cells.append(f"{row['step_s']:.2f}" if row["step_s"] else "-")
    return cells


def title_of(record: Result) -> str:
    """The step that was measured, in one line."""
    unet = record["unet"]
    batch = f"batch {record['batch']}"
    if record["micro_batch"] < record["batch"]:
        batch += f" ({record['micro_batch']} at a time)"
    shape = by([*record["shape"], unet["channels"]], " x ")
    return f"{shape}, {unet['filters']} filters, {batch}, {unet['dtype']}, {unet['norm']} norm"


# --- In the measuring process ---


def measure(request: Dict[str, Any]) -> Result:
    """Time and memory of `steps` training steps in the dtype and on the engine of `request`.

    With `request["live"]` one more step, after the peaks, is profiled for the bytes that are live
    over it."""
    tf, facts = harness.set_up_for(request)
    from cpu3d.training.learner import Learner

    config = RunConfig(
        grid=tuple(request["shape"]),
        unet=UNetConfig(**request["unet"]),
        batch=request["batch"],
        micro_batch=request["micro_batch"],
        **{name: request[name] for name in STEP_SETTINGS if name in request},
        init="weights",  # that frozen layers would have; none are read
    )
    reserve(job_of(config, config.grid, threads=1, cases=0))  # as `train` does
    learner = Learner(config)
    # As with a store, one micro-batch is in memory.
    micro_batches = itertools.repeat(made_up(tf, config.unet, config.micro, config.grid))
    step = functools.partial(learner.step, micro_batches, 1e-4)
    for _ in range(request.get("warm_up", WARM_UP_STEPS)):
        step()
    # An engine without oneDNN keeps no statistics.
    with contextlib.suppress(ValueError, tf.errors.OpError):
        tf.config.experimental.reset_memory_stats("CPU:0")
    timed = [seconds_of(step) for _ in range(request["steps"])]
    result = {
        **request,
        **facts,
        "step_s": statistics.median(timed),
        "allocator_peak_bytes": allocator_peak_bytes(),
        "process_peak_bytes": peak_rss_bytes(),
    }
    if request.get("live"):
        result["live_bytes"] = _live_bytes(tf, step, SPANS)
    return result


def _live_bytes(tf: Any, work: Callable[[], Any], spans: int) -> List[int]:
    """The most bytes in use in TensorFlow's allocator in each of so many equal spans of the time
    between its first and its last request in `work`; empty without requests."""
    # The profile's format is here in TensorFlow 2.13 to 2.21 at least.
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    profiler = tf.profiler.experimental
    options = profiler.ProfilerOptions(host_tracer_level=2, python_tracer_level=0)
    requests: List[Tuple[float, int]] = []
    with tempfile.TemporaryDirectory() as folder:
        with profiler.Profile(folder, options):
            work()
        for path in Path(folder).rglob("*.xplane.pb"):
            for plane in xplane_pb2.XSpace.FromString(path.read_bytes()).planes:
                requests += _requests_in(plane)
    return most_in_each_span(sorted(requests), spans) if requests else []


def _requests_in(plane: Any) -> Iterator[Tuple[float, int]]:
    """The requests to the allocator in a plane of a profile: seconds, and the bytes in use then."""
    for line in plane.lines:
        for event in line.events:
            name = plane.event_metadata[event.metadata_id].name
            if name not in ("MemoryAllocation", "MemoryDeallocation"):
                continue
            seconds = line.timestamp_ns / 1e9 + event.offset_ps / 1e12
            for stat in event.stats:
                if plane.stat_metadata[stat.metadata_id].name == "bytes_allocated":
                    yield seconds, stat.int64_value


def most_in_each_span(requests: Sequence[Tuple[float, int]], spans: int) -> List[int]:
    """The most bytes in each of equal spans of the time, from requests as (seconds, bytes held from
    then on)."""
    seconds, sizes = np.array(requests).T
    begins = np.linspace(seconds[0], seconds[-1], spans, endpoint=False)
    # A span begins with the bytes held after the last request before it.
    return (
        np.maximum.reduceat(sizes, np.searchsorted(seconds, begins, side="right") - 1)
        .astype(int)
        .tolist()
    )


def made_up(tf: Any, unet: UNetConfig, batch: int, grid: Tuple[int, ...]) -> Tuple[Any, Any]:
    """Noise (batch, X, Y, Z, C), and targets of a tenth of the voxels (batch, X, Y, Z, R) uint8.

    Made by TensorFlow: whether it would copy an array of numpy's depends on the array's address.
    """
    noise = tf.random.stateless_normal((batch, *grid, unet.channels), (0, 1))
    drawn = tf.random.stateless_uniform((batch, *grid, unet.outputs), (0, 2), 0, 10, tf.int32)
    return tf.cast(noise, unet.dtype), tf.cast(tf.equal(drawn, 9), tf.uint8)
