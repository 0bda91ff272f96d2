"""Measure time and memory of the real training step in a fresh process, and compare with the estimator's prediction.

    ./run.sh bench step --shape 240 240 160 --channels 4 --filters 16 --batch 1 --dtype bfloat16 --json
    ./run.sh bench step --policies --shape 128 128 128 --rounds 2 --peer "python other.py" --record r/policies.jsonl

The step is the trainer's own: network, loss, gradients, optimizer, without averaged weights and without the store. The
allocator's peak is TensorFlow's own count, in which stock TensorFlow leaves out oneDNN's scratch; the process's is the
kernel's (VmHWM).

--policies measures the step under every memory policy, in turn. A peer is any command whose last line of output is JSON
with "step_s", and "peak_rss_bytes" if it knows its peak. If one of our processes dies, its row shows that. The bytes
in use over a step are those of one more step, in which TensorFlow's profiler records every request to the allocator;
`bench tables --picture` draws them.
"""

import contextlib
import dataclasses
import itertools
import os
import shlex
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from cpu3d.bench import harness
from cpu3d.bench.harness import Output, ProcessFailedError, Result, gib, host_of, run_peer, valid
from cpu3d.errors import InputError
from cpu3d.host.apply import engine_name, in_force, set_up
from cpu3d.host.memory import allocator_peak_bytes, peak_rss_bytes, reserve
from cpu3d.plan import job_of
from cpu3d.run.summary import median, numbers
from cpu3d.settings import AUTO, RunConfig, left_open
from cpu3d.util.records import by, versions
from memory_estimator.calibration import HostConstants, find_constants
from memory_estimator.common.schema import option
from memory_estimator.common.table import PALETTE, Table, new_figure, plain, png
from memory_estimator.common.units import GIB
from memory_estimator.estimate import estimate
from memory_estimator.host import read_host
from memory_estimator.job import Job, JobOptions, job_from, source_job
from models.config import DTYPES, POLICIES, UNetConfig

WARM_UP_STEPS = 2  # the first step compiles, the second still fills optimizer slots and caches
LIVE_PARTS = 300  # of a step, each with the most that is live in it: as fine as a picture shows
HOST_FACTS = ("engine_name", "threads", "host", "versions")  # the same in all measurements of a record
PREDICTED = ("allocator_peak_bytes", "process_peak_bytes", "upper_bound_bytes", "step_s")


@dataclass(frozen=True)
class MeasuredJob(JobOptions):
    """The estimator's options of a job, with a policy that is not picked."""

    dtype: str = option(AUTO, "compute dtype; auto is the recipe's, the run's or this host's", choices=(AUTO, *DTYPES))
    policy: str = option("speed", "memory policy (default: speed; of a --run its own)", choices=POLICIES)


@dataclass(frozen=True)
class StepOptions:
    """How often the step is done, and what is measured in turn with it."""

    steps: int = option(5, "steps timed", at_least=1, metavar="N")
    warm_up: int = option(WARM_UP_STEPS, "steps before those, not timed", at_least=0, metavar="N")
    policies: bool = option(False, "compare all policies")
    peer: Tuple[str, ...] = option((), 'command whose last line is JSON with "step_s"; repeatable', "CMD", repeat=True)
    rounds: int = option(1, "times that all are measured, in turn", at_least=1, metavar="N")


OPTIONS = ((MeasuredJob,), StepOptions, Output)


def run(given: Dict[str, Any], options: StepOptions, output: Output) -> int:
    if options.policies and "policy" in given:
        raise InputError(f"policy must be left out with --policies, got {given['policy']}; leave it out")
    engine = given.get("engine", AUTO)
    known = Namespace(**{**given, "engine": engine})
    whole = valid(source_job, known).job
    job = valid(job_from, known, whole or Job(UNetConfig(dtype=read_host().best_dtype)))
    own = {"engine": job.engine if whole and engine == AUTO else left_open(engine), "threads": given.get("threads")}
    request = request_for(job, **own, steps=options.steps, warm_up=options.warm_up)
    policies = POLICIES if options.policies else (job.policy,)
    result = compare_policies(request, policies, options.peer, options.rounds)
    result = with_predictions(result, find_constants())
    output.publish("policies", result, step_table(result))
    return 0


def compare_policies(request: Dict[str, Any], policies: Sequence[str], peers: Sequence[str], rounds: int) -> Result:
    """Measure the step of `request` under each policy, and the peers, in turn; the content of a record, with "rows".

    Seconds are medians, peaks the highest; the bytes live over a step are of the first round. A policy whose process
    died is not tried again, and its row has the "error". Raises ProcessFailedError for a peer that fails, and where no
    policy could be measured.
    """
    from cpu3d.util.progress import bar  # not into the memory of a measuring process

    results: Dict[str, List[Result]] = {name: [] for name in (*policies, *peers)}
    errors: Dict[str, ProcessFailedError] = {}
    with bar("bench step", total=rounds * len(results)) as advance:
        for number in range(rounds):
            for name in peers:  # first: one that is wrong is seen before ours take their time
                results[name].append(run_peer(name))
                advance()
            for name in policies:
                own = {"unet": {**request["unet"], "policy": name}, "live": number == 0}
                try:
                    if name not in errors:
                        results[name].append(harness.in_fresh_process(measure, {**request, **own}))
                except ProcessFailedError as error:
                    errors[name] = error
                advance()
    measured = next((results[name][0] for name in policies if results[name]), None)
    if not measured:
        raise next(iter(errors.values()))
    rows: List[Result] = []
    for name, done in results.items():
        row = {"name": name, "kind": "policy", "error": str(errors[name]) if name in errors else None}
        if name in peers:
            words = [word for word in shlex.split(name)[1:] if "/" not in word]  # paths are of one machine
            row.update(name=" ".join([done[0].get("peer", ""), *words]).strip(), kind="peer")
        row["rounds"] = numbers(done, "step_s")
        row["step_s"] = median(row["rounds"])
        for peak in ("allocator_peak_bytes", "process_peak_bytes"):
            row[peak] = max(numbers(done, peak), default=None)
        rows.append({**row, "live_bytes": done[0].get("live_bytes") if done else None})
    return {**request, "rounds": rounds, "rows": rows, **{name: measured[name] for name in HOST_FACTS}}


# --- Records, as measured and as the estimator predicts them ---


def request_for(job: Job, **more: Any) -> Dict[str, Any]:
    """The request to `measure` of a job, with `more` in it."""
    request = {"shape": list(job.shape), "batch": job.batch, "micro_batch": job.micro, "optimizer": job.optimizer}
    request.update(unet=dataclasses.asdict(job.unet), engine=job.engine, threads=job.threads)
    return {**request, **more}


def has_known_engine(record: Mapping[str, Any]) -> bool:
    """Whether the estimator predicts for the engine of a record: any but TensorFlow without oneDNN."""
    return "no oneDNN" not in record.get("engine_name", "")


def job_of_record(record: Mapping[str, Any]) -> Job:
    """The job that a record measured, on the engine that really ran."""
    engine = record["engine"]
    if engine in (None, AUTO):
        engine = "itex" if "ITEX" in record["engine_name"] else "stock"
    sizes = {name: record[name] for name in ("batch", "micro_batch", "optimizer")}
    threads = int(record["threads"]["TF_NUM_INTRAOP_THREADS"])
    job = Job(UNetConfig(**record["unet"]), tuple(record["shape"]), **sizes, engine=engine, threads=threads)
    by_rule = dataclasses.replace(job, micro_batch=0)  # so that equal jobs compare equal
    return by_rule if by_rule.micro == job.micro else job


def with_predictions(record: Result, constants: HostConstants) -> Result:
    """The record with the estimator's figures as "predicted" in each row; None for a peer, and of an engine that the
    estimator does not know, which is said on stderr."""
    if not has_known_engine(record):
        print("no prediction: engine must use oneDNN, got none; the estimator knows itex and stock", file=sys.stderr)

    def predicted(row: Result) -> Optional[Result]:
        if row["kind"] != "policy" or not has_known_engine(record):
            return None
        found = estimate(job_of_record({**record, "unet": {**record["unet"], "policy": row["name"]}}), constants)
        return {name: getattr(found, name) for name in PREDICTED}

    return {**record, "rows": [{**row, "predicted": predicted(row)} for row in record["rows"]]}


def step_table(record: Result) -> Table:
    """Peaks and seconds of each policy and peer, the prediction below it."""
    cells, died = [], []
    for row in record["rows"]:
        for name, figures in ((row["name"], row), ("predicted", row["predicted"])):
            if figures:
                peaks = [gib(figures.get(peak)) for peak in PREDICTED[:3]]
                cells.append([name, *peaks, f"{figures['step_s']:.2f}" if figures["step_s"] else "-"])
        died += [f"{row['name']} died: {row['error']}."] if row["error"] else []
    columns = ("", "allocator peak, GiB", "process peak, GiB", "upper bound, GiB", "s a step")
    title = f"{title_of(record)}, {record['engine_name']}, {host_of(record)}"
    return Table(columns, cells, title=title, caption=" ".join(died))


def title_of(record: Result) -> str:
    """The step that was measured, in one line."""
    unet, batch = record["unet"], f"batch {record['batch']}"
    if record["micro_batch"] < record["batch"]:
        batch += f" ({record['micro_batch']} at a time)"
    shape = by([*record["shape"], unet["channels"]], " x ")
    return f"{shape}, {unet['filters']} filters, {batch}, {unet['dtype']}, {unet['norm']} norm"


def draw_policies(records: Sequence[Result]) -> bytes:
    """PNG: the memory of the process over one step under each policy, panels as wide as their steps take long.

    That is of the newest record with the bytes live over a step, which are drawn on top of all else that the process
    holds at its peak; lines are the peaks of peers in any record of that job. Raises InputError without such a record.
    """
    alive = [record for record in records if any(row.get("live_bytes") for row in record["rows"])]
    if not alive:
        raise InputError("records of policies must have live_bytes, got none; measure with `bench step --policies`")
    shown, title = [row for row in alive[-1]["rows"] if row.get("live_bytes")], title_of(alive[-1])
    of_job = [(record, row) for record in records if title_of(record) == title for row in record["rows"]]
    peers = [(record, row) for record, row in of_job if row["kind"] == "peer" and row["process_peak_bytes"]]
    figure, widths = new_figure(10, 4.2), [row["step_s"] / shown[0]["step_s"] for row in shown]
    panels = figure.subplots(1, len(shown), sharey=True, squeeze=False, gridspec_kw={"width_ratios": widths})[0]
    for axes, row, width in zip(panels, shown, widths):
        beside = (row["process_peak_bytes"] - row["allocator_peak_bytes"]) / GIB
        # Parts of a step, each as high as the most in it; the step begins with what is live at its end.
        held = [beside + size / GIB for size in (row["live_bytes"][-1], *row["live_bytes"])]
        parts, colour = np.linspace(0, width, len(held)), PALETTE[POLICIES.index(row["name"])]
        axes.fill_between(parts, 0, beside, color="#888888", alpha=0.3, linewidth=0)
        axes.fill_between(parts, beside, held, color=colour, alpha=0.3, linewidth=0, step="pre")
        axes.step(parts, held, color=colour, linewidth=1.3, where="pre")
        for (record, peer), dashes in zip(peers, itertools.cycle(("--", ":", "-."))):
            peak_bytes = peer["process_peak_bytes"]
            label = f"{peer['name'].partition(' --')[0]}: {gib(peak_bytes)} GiB\n{host_of(record)}"
            axes.axhline(peak_bytes / GIB, color="#444444", linestyle=dashes, label=label)
        plain(axes, f"{row['name']}\n{max(held):.2f} GiB, {width:.2f} x")
        axes.set(xlim=(0, width), ylim=(0, None))
    panels[0].set_ylabel("held by the process, GiB; grey: beside the allocator")
    if peers:
        panels[-1].legend(fontsize=7, loc="center right")
    figure.supxlabel(f"{title}, {host_of(alive[-1])}; time in steps of {shown[0]['name']}", fontsize=8)
    figure.tight_layout(pad=0.6, w_pad=0.8)
    return png(figure)


# --- In the measuring process ---


def measure(request: Dict[str, Any]) -> Result:
    """Do `steps` training steps in the dtype and on the engine of `request`: their time and their memory.

    With `request["live"]` one more step, after the peaks, is profiled for the bytes that are live over it.
    """
    if request.get("threads"):  # else they are the host's own number or the environment's
        os.environ.update(dict.fromkeys(("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS"), str(request["threads"])))
    host, threads, tf = set_up(request["engine"])
    from cpu3d.training.learner import Learner

    own = {name: request[name] for name in ("batch", "micro_batch", "optimizer")}
    config = RunConfig(grid=tuple(request["shape"]), unet=UNetConfig(**request["unet"]), **own)
    reserve(job_of(config, threads=1, cases=0))  # as `train` does
    learner = Learner(config)
    # As with a store, one micro-batch is in memory.
    parts = itertools.repeat(made_up(tf, config.unet, config.micro, config.grid))

    def step() -> float:
        begin = time.perf_counter()
        learner.step(parts, 1e-4)
        return time.perf_counter() - begin

    for _ in range(request.get("warm_up", WARM_UP_STEPS)):
        step()
    # An engine without oneDNN keeps no statistics, and reports none.
    with contextlib.suppress(ValueError, tf.errors.OpError):
        tf.config.experimental.reset_memory_stats("CPU:0")
    timed = [step() for _ in range(request["steps"])]
    result = {**request, "step_s": statistics.median(timed), "step_s_min": min(timed), "step_s_max": max(timed)}
    result.update(allocator_peak_bytes=allocator_peak_bytes(), process_peak_bytes=peak_rss_bytes())
    about = {"engine_name": engine_name(tf), "threads": in_force(threads), "host": host.summary()}
    result.update(about, versions=versions())
    if request.get("live"):
        requests = _live_bytes(tf, step)
        result["live_bytes"] = requests and most_in_each_part(requests)
    return result


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


def most_in_each_part(requests: List[Tuple[float, int]]) -> List[int]:
    """The most of the (seconds, bytes) of one step in each of LIVE_PARTS equal parts of it."""
    seconds, sizes = np.array(requests).T
    begins = np.linspace(seconds[0], seconds[-1], LIVE_PARTS, endpoint=False)
    # Each part begins with what the last request before it has left.
    return np.maximum.reduceat(sizes, np.searchsorted(seconds, begins, side="right") - 1).astype(int).tolist()


def made_up(tf: Any, unet: UNetConfig, batch: int, grid: Tuple[int, ...]) -> Tuple[Any, Any]:
    """Noise (batch, X, Y, Z, C), and targets of a tenth of the voxels (batch, X, Y, Z, R) uint8.

    Made by TensorFlow, for whether it copies an array of numpy's depends on the address that this happens to have.
    """
    noise = tf.random.stateless_normal((batch, *grid, unet.channels), (0, 1))
    drawn = tf.random.stateless_uniform((batch, *grid, unet.outputs), (0, 2), 0, 10, tf.int32)
    return tf.cast(noise, unet.dtype), tf.cast(tf.equal(drawn, 9), tf.uint8)
