"""Measure time and memory of the real training step in a fresh process, and compare with the
estimator's prediction.

    ./run.sh bench step --shape 240 240 160 --channels 4 --filters 16 --dtype bfloat16 --json

The step is the trainer's own: network, loss, gradients, optimizer, without the store. The
allocator's peak is counted by TensorFlow, and stock TensorFlow leaves out oneDNN's scratch; the
peak of the process is the kernel's (VmHWM)."""

import contextlib
import dataclasses
import functools
import itertools
import statistics
from argparse import Namespace
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from cpu3d.bench.harness import (
    FACTS,
    Output,
    Result,
    host_of,
    in_fresh_process,
    seconds_of,
    set_up_for,
    valid,
)
from cpu3d.decisions import job_of
from cpu3d.host.memory import allocator_peak_bytes, peak_rss_bytes, reserve
from cpu3d.plan import source_of_store
from cpu3d.run.summary import median, numbers
from cpu3d.settings import AUTO, RunConfig
from cpu3d.util.progress import say
from memory_estimator.calibration import HostConstants, find_constants
from memory_estimator.common.schema import option
from memory_estimator.common.table import Table
from memory_estimator.common.units import GIB, by
from memory_estimator.estimate import estimate
from memory_estimator.host import read_host
from memory_estimator.job import Job, JobOptions, job_from, padding_note
from memory_estimator.sources import source_job
from models.config import DTYPES, POLICIES, UNetConfig

WARM_UP_STEPS = 2  # the first step compiles, the second fills optimizer slots and caches
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


@dataclass(frozen=True)
class StepOptions:
    """How many steps are timed."""

    steps: int = option(5, "steps timed", at_least=1, metavar="N")
    warm_up: int = option(WARM_UP_STEPS, "steps before the timed ones", at_least=0, metavar="N")


OPTIONS = ((MeasuredJob,), StepOptions, Output)


def run(chosen: Dict[str, Any], options: StepOptions, output: Output) -> int:
    request = requested(chosen, options)
    measured = in_fresh_process(measure, request)
    record = record_of(request, [row_of(request["unet"]["policy"], "policy", [measured])], measured)
    record = with_predictions(record, find_constants())
    output.publish("policies", record, step_table(record))
    return 0


def requested(chosen: Dict[str, Any], options: StepOptions) -> Dict[str, Any]:
    """The request of the options that are typed; a shape that is padded is printed."""
    arguments = Namespace(**chosen)
    if "store" in chosen:
        source = valid(source_of_store, read_host(), chosen).job
    else:
        source = valid(source_job, arguments).job
    if source:
        job = valid(job_from, arguments, source)
        engine = job.engine
    else:
        job = valid(job_from, arguments, Job(UNetConfig(dtype=read_host().best_dtype)))
        engine = chosen.get("engine")
        if engine == AUTO:
            engine = None
    note = padding_note(arguments, job, source)
    if note:
        say(f"note: {note}")
    return request_for(job, engine=engine, threads=chosen.get("threads"), **vars(options))


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


def row_of(name: str, kind: str, results: Sequence[Result]) -> Result:
    """The row of a policy or a peer in a record: seconds are medians, peaks the highest."""
    rounds = numbers(results, "step_s")
    row = {"name": name, "kind": kind, "error": None, "rounds": rounds, "step_s": median(rounds)}
    for peak in ("allocator_peak_bytes", "process_peak_bytes"):
        row[peak] = max(numbers(results, peak), default=None)
    row["live_bytes"] = results[0].get("live_bytes") if results else None
    return row


def record_of(request: Dict[str, Any], rows: Sequence[Result], measured: Result) -> Result:
    """The content of a record, with the facts of one of its measurements."""
    return {**request, "rows": rows, **{fact: measured[fact] for fact in FACTS}}


def with_predictions(record: Result, constants: HostConstants) -> Result:
    """The record with the estimator's figures as "predicted" in each row; None for a peer, and for
    an engine that the estimator does not know, with a warning."""
    job = job_of_record(record)
    rows = []
    if not job:
        say(
            f"warning: engine must be itex or stock to be predicted, got {record['engine_name']}; "
            "no prediction"
        )
    for row in record["rows"]:
        predicted = None
        if job and row["kind"] == "policy":
            figures = estimate(job.with_unet(policy=row["name"]), constants)
            predicted = {name: getattr(figures, name) for name in PREDICTED}
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
    """Time and memory of `steps` training steps in the dtype and on the engine of `request`."""
    return measured_step(request)[0]


def measured_step(request: Dict[str, Any]) -> Tuple[Result, Callable[[], Any]]:
    """The result of `measure`, and the step itself."""
    tf, facts = set_up_for(request)
    from cpu3d.training.learner import Learner

    config = RunConfig(
        grid=tuple(request["shape"]),
        unet=UNetConfig(**request["unet"]),
        batch=request["batch"],
        micro_batch=request["micro_batch"],
        optimizer=request["optimizer"],
        freeze=request["freeze"],
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
    return result, step


def made_up(tf: Any, unet: UNetConfig, batch: int, grid: Tuple[int, ...]) -> Tuple[Any, Any]:
    """Noise (batch, X, Y, Z, C), and targets of a tenth of the voxels (batch, X, Y, Z, R) uint8.

    Made by TensorFlow: whether it would copy an array of numpy's depends on the array's address.
    """
    noise = tf.random.stateless_normal((batch, *grid, unet.channels), (0, 1))
    drawn = tf.random.stateless_uniform((batch, *grid, unet.outputs), (0, 2), 0, 10, tf.int32)
    return tf.cast(noise, unet.dtype), tf.cast(tf.equal(drawn, 9), tf.uint8)
