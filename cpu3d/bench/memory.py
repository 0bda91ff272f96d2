"""Measure what the real training step takes of memory, in a fresh process, beside what the estimator predicts.

    ./run.sh bench memory --shape 128 128 128 --filters 16 --dtype bfloat16 --json
    ./run.sh bench memory --shape 128 128 128 --picture process.png --trace process.mprof --timeline step.png
    ./run.sh bench memory --policies --shape 128 128 128 --rounds 2 --peer "python other.py" --picture policies.png

Takes the estimator's arguments, --recipe and --run among them; of a run it measures the step alone, without averaged
weights and what a store does beside it. The allocator's peak is TensorFlow's own count, exact; stock TensorFlow does
not count oneDNN's scratch in it. The process's peak is the kernel's (VmHWM), exact too, split into anonymous memory and
file pages by looking at the process 50 times a second. `mprof plot FILE` reads the trace.

--policies measures the step under every memory policy, beside the plain Keras graph and beside peers, in turn; a peer
is a command whose last line of output is JSON with "step_s", and "peak_rss_bytes" if it knows its peak.
"""

import argparse
import dataclasses
import json
import shlex
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from rich.console import Console
from rich.table import Table

from cpu3d.bench.policies import add_policies_options, check_policies_options, compare_policies, policies_table
from cpu3d.bench.policies_picture import draw_policies
from cpu3d.bench.process_memory import draw_process, write_trace
from cpu3d.bench.record import append_record
from cpu3d.bench.step import add_count_options, counts_from, measure_in_fresh_process
from cpu3d.errors import InputError
from cpu3d.host.apply import ENGINES
from cpu3d.host.memory import Resident, resident
from cpu3d.util.atomic import atomic_write, writable_folder
from memory_estimator.allocator import counted_by_op
from memory_estimator.calibration import find_constants
from memory_estimator.estimate import Estimate, estimate
from memory_estimator.host import read_host
from memory_estimator.job import ENGINES as KNOWN_ENGINES
from memory_estimator.job import Job
from memory_estimator.options import add_job_options, add_source_options, job_from, source_job
from memory_estimator.pictures import draw_timeline
from memory_estimator.timing import step_seconds
from memory_estimator.training_step import training_step
from memory_estimator.validation import has_known_engine
from memory_estimator.validation import job_from as measured_job
from models.config import DTYPES, UNetConfig

GIB = 2**30

FIGURES = ("allocator_peak_bytes", "process_peak_bytes", "step_s")
"""What is both measured and predicted, under one name."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_source_options(parser)
    add_job_options(parser, [engine for engine in ENGINES if engine != "auto"], ("auto", *DTYPES))
    add_count_options(parser)
    add_policies_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--record", type=Path, metavar="FILE", help="append the result to a .jsonl file")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write the process's memory as an mprof trace")
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="draw the process's memory over time, or the comparison, as PNG"
    )
    parser.add_argument("--timeline", type=Path, metavar="FILE", help="draw live bytes over one step, as PNG")


def run(args: argparse.Namespace) -> int:
    for path in (args.record, args.trace, args.picture, args.timeline):
        if path:
            writable_folder(path.parent, "folder")
    check_policies_options(args)
    request = _request(args)
    if args.policies:
        return _run_policies(args, request)
    request = {**request, "matmul": ["after"], "profile": bool(args.timeline)}
    result, seen = measure_memory(request, getattr(args, "threads", None))
    allocations, moments = result.pop("allocations", None), result.pop("moments")
    said = predict(result)
    result.update(against(result, said))
    if args.json:
        print(json.dumps(result))
    else:
        Console().print(_table(result))
    if args.record:
        append_record(args.record, "memory", result)
    if args.trace:
        write_trace(args.trace, seen, moments, shlex.join(["python", "-m", "cpu3d", *sys.argv[1:]]))
    if args.picture:
        peak = said and said.process_peak_bytes
        _write(args.picture, draw_process(seen, moments, title=_title(result), predicted_bytes=peak))
    if args.timeline:
        if isinstance(allocations, str):
            print(f"no live curve: {allocations}", file=sys.stderr)
            allocations = None
        _write(args.timeline, _timeline(result, said, allocations or []))
    return 0


def measure_memory(request: Dict[str, Any], threads: Optional[int] = None) -> Tuple[Dict[str, Any], List[Resident]]:
    """Run the steps of `request` in a new process, and look at it from outside, which costs it nothing.

    Returns the result with the keys of `bench step` and more, and what was seen of the process up to its last step.
    `process_peak_bytes` is the kernel's own count; `anonymous_peak_bytes` and `file_peak_bytes` are the largest seen
    (None without /proc). `baseline_bytes` lay in memory when the network was built and no volume was there yet. Raises
    InputError where the process dies, as the kernel's out-of-memory killer makes it.
    """
    looks: List[Optional[Resident]] = []
    result = measure_in_fresh_process(
        {**request, "watched": True}, look=lambda pid: looks.append(resident(pid)), threads=threads
    )
    ends = [end for name, _, end in result["moments"] if name == "step"]
    last = ends[-2 if request.get("profile") else -1]  # the profiler takes memory of its own
    result["moments"] = [moment for moment in result["moments"] if moment[2] <= last]
    seen = [one for one in looks if one and one.time_s <= last]
    result["anonymous_peak_bytes"] = max((one.anonymous_bytes for one in seen), default=None)
    result["file_peak_bytes"] = max((one.file_bytes for one in seen), default=None)
    result["rounds"], result["peers"] = [result["step_s"]], []
    return result, seen


def predict(result: Dict[str, Any]) -> Optional[Estimate]:
    """The estimator's word on what was measured; None, with the reason on stderr, where it has none.

    It knows nothing of an engine without oneDNN, nor of what this host's calibration leaves out: no reason to lose a
    measurement.
    """
    try:
        if not has_known_engine(result):
            raise ValueError("engine must use oneDNN, got none; the estimator knows itex and stock")
        job = measured_job(result)
        return estimate(job, find_constants(job.threads))
    except ValueError as error:
        print(f"no prediction: {error}", file=sys.stderr)
        return None


def against(result: Dict[str, Any], said: Optional[Estimate]) -> Dict[str, Any]:
    """`predicted` beside `errors`, which are signed shares of what was measured."""
    if said is None:
        return {"predicted": None, "errors": None}
    predicted = _figures(said)
    errors = {name: predicted[name] / result[name] - 1 if result[name] else None for name in FIGURES}
    errors["upper_bound_bytes"] = predicted["upper_bound_bytes"] / result["process_peak_bytes"] - 1
    return {"predicted": predicted, "errors": errors}


# --- Private helpers ---


def _run_policies(args: argparse.Namespace, request: Dict[str, Any]) -> int:
    def predicted(variant: Dict[str, Any]) -> Optional[Dict[str, Any]]:
        said = predict(variant)
        return said and _figures(said)

    result = compare_policies(request, args.peer, args.rounds, predicted, getattr(args, "threads", None))
    title = f"One training step, {_title(result)}"
    if args.json:
        print(json.dumps(result))
    else:
        Console().print(policies_table(result, title))
    if args.record:
        append_record(args.record, "policies", result)
    if args.picture:
        _write(args.picture, draw_policies(result, title))
    return 0


def _request(args: argparse.Namespace) -> Dict[str, Any]:
    """What `bench.measure` is to do, 128^3 where nothing is said. Raises InputError for a job that cannot be."""
    counts = counts_from(args)
    engine = getattr(args, "engine", "auto")
    if engine not in KNOWN_ENGINES:
        args.engine = "auto"  # a job has none that the estimator does not know
    if getattr(args, "dtype", "auto") == "auto":
        vars(args).pop("dtype", None)
    try:
        whole = source_job(args)
        job = job_from(args, whole or Job(UNetConfig(dtype=read_host().best_dtype)))
    except ValueError as error:
        raise InputError(str(error)) from None
    return {
        "shape": list(job.shape),
        "batch": job.batch,
        "micro_batch": job.micro,
        "unet": dataclasses.asdict(job.unet),
        "optimizer": job.optimizer,
        **counts,
        "engine": job.engine if whole and engine == "auto" else engine,
    }


def _figures(said: Estimate) -> Dict[str, Any]:
    return {name: getattr(said, name) for name in (*FIGURES, "upper_bound_bytes")}


def _write(path: Path, content: bytes) -> None:
    with atomic_write(path) as file:
        file.write(content)


def _title(result: Dict[str, Any]) -> str:
    unet = result["unet"]
    shape = " x ".join(map(str, result["shape"]))
    return f"{shape} x {unet['channels']}, {unet['filters']} filters, batch {result['batch']}, {unet['dtype']}"


def _table(result: Dict[str, Any]) -> Table:
    table = Table(title=f"Memory of a training step, {_title(result)}", title_justify="left", caption_justify="left")
    table.caption = result["engine_name"]
    for column in ("", "measured", "predicted", "error"):
        table.add_column(column, justify="left" if column == "" else "right")
    predicted, errors = result["predicted"] or {}, result["errors"] or {}
    rows: List[Tuple[str, str, Any]] = [
        ("allocator peak", "allocator_peak_bytes", _gib),
        ("process peak", "process_peak_bytes", _gib),
        ("  anonymous", "anonymous_peak_bytes", _gib),
        ("  file pages", "file_peak_bytes", _gib),
        ("upper bound", "upper_bound_bytes", _gib),
        ("before the first volume", "baseline_bytes", _gib),
        ("step", "step_s", lambda seconds: "-" if seconds is None else f"{seconds:.2f} s"),
    ]
    for name, key, show in rows:
        error = errors.get(key)
        table.add_row(name, show(result.get(key)), show(predicted.get(key)), "" if error is None else f"{error:+.1%}")
    return table


def _timeline(result: Dict[str, Any], said: Optional[Estimate], allocations: List[Any]) -> bytes:
    title = f"One training step, {_title(result)}, {result['engine_name']}"
    if said is None:
        return draw_timeline([], [], [], title=title, measured=allocations)
    program = training_step(said.job)
    seconds = step_seconds(program, said.constants, said.job).op_s
    ops = [op.name for op in program.ops]
    return draw_timeline(ops, counted_by_op(program), seconds, title=title, measured=allocations)


def _gib(size_bytes: Optional[int]) -> str:
    return "-" if size_bytes is None else f"{size_bytes / GIB:.2f} GiB"
