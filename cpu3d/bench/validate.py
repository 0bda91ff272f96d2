"""Measure the built-in list of configurations that the estimator is judged by, one fresh process each.

    ./run.sh bench validate --record records/memory.jsonl
    ./run.sh bench validate --record records/memory.jsonl --engine stock --first 3

Takes about 40 minutes on two quiet cores. Cut off, it continues: what the record holds is not measured again, failures
included (remove a line to try again). One record file a host. `bench tables` makes the page of it.
"""

import argparse
import dataclasses
from pathlib import Path
from typing import Any, Dict, List

from rich.console import Console
from rich.table import Table

from cpu3d.atomic import writable_folder
from cpu3d.bench.campaign import configurations, describe
from cpu3d.bench.memory import measure_memory
from cpu3d.bench.record import append_record
from cpu3d.errors import InputError
from cpu3d.host.thread_plan import thread_plan
from cpu3d.progress import bar
from memory_estimator.calibration import HostConstants, find_constants
from memory_estimator.estimate import estimate
from memory_estimator.host import Host, read_host
from memory_estimator.job import ENGINES, Job
from memory_estimator.validation import Measured, Row, compare, read_measured, spreads

GIB = 2**30

STEPS = 3
"""Timed, after two more: enough for a median."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--record", type=Path, required=True, metavar="FILE", help=".jsonl file, continued if there")
    parser.add_argument("--engine", choices=ENGINES, default=None, help="only this one (default: both)")
    parser.add_argument("--first", type=int, default=None, metavar="N", help="only the first N of the list")


def run(args: argparse.Namespace) -> int:
    writable_folder(args.record.parent, "folder")
    host = read_host()
    threads = thread_plan(host).intra_op
    wanted = [job for job in configurations(threads) if args.engine in (None, job.engine)][: args.first]
    done = {one.job for one in _read(args.record)}
    constants = _constants(threads)
    todo = [job for job in wanted if job not in done]
    console = Console(stderr=True)
    with bar("validate", total=len(todo)) as advance:
        for job in todo:
            needed, free = estimate(job, constants).upper_bound_bytes, read_host().free_bytes
            if needed > free:
                told = f"left out, needs {needed / GIB:.1f} GiB where {free / GIB:.1f} GiB are free"
            else:
                record = measured_record(job, host)
                append_record(args.record, "memory", record)
                told = _told(record)
            console.print(f"{describe(job)}: {told}", highlight=False, soft_wrap=True)
            advance()
    kept = _read(args.record) if args.record.exists() else []
    rows = compare(
        (one for one in kept if one.held_out), lambda one: estimate(one.job, find_constants(one.job.threads))
    )
    Console().print(_table(rows))
    return 0


def measured_record(job: Job, host: Host) -> Dict[str, Any]:
    """What the record keeps of one configuration: the measurement, or why there is none."""
    request = request_for(job)
    try:
        result, _ = measure_memory(request)
    except InputError as error:
        environment = dict(thread_plan(host).environment)
        return {**request, "error": str(error), "threads": environment, "host": host.summary()}
    return {name: value for name, value in result.items() if name not in ("moments", "rounds", "peers")}


def request_for(job: Job) -> Dict[str, Any]:
    """What `bench.measure` is to do to measure a job."""
    return {
        "shape": list(job.shape),
        "batch": job.batch,
        "unet": dataclasses.asdict(job.unet),
        "optimizer": job.optimizer,
        "policy": job.policy,
        "steps": STEPS,
        "engine": job.engine,
        "matmul": [],
    }


# --- Private helpers ---


def _read(path: Path) -> List[Measured]:
    """What the record holds, nothing where there is none yet."""
    try:
        return list(read_measured(path)) if path.exists() else []
    except ValueError as error:
        raise InputError(str(error)) from None


def _constants(threads: int) -> HostConstants:
    try:
        return find_constants(threads)
    except ValueError as error:
        raise InputError(str(error)) from None


def _told(record: Dict[str, Any]) -> str:
    if "error" in record:
        return record["error"]
    return f"{record['process_peak_bytes'] / GIB:.2f} GiB, {record['step_s']:.2f} s"


def _table(rows: List[Row]) -> Table:
    table = Table(title=f"{len(rows)} held-out configurations, predicted against measured", title_justify="left")
    for column in ("", "median", "worst", "mean"):
        table.add_column(column, justify="left" if column == "" else "right")
    for name, spread in spreads(rows).items():
        table.add_row(name, f"{spread.median:.1%}", f"{spread.worst:+.1%}", f"{spread.mean:+.1%}")
    return table
