"""Measure the built-in list of configurations that the estimator is judged by, one fresh process each.

    ./run.sh bench validate --record records/memory.jsonl
    ./run.sh bench validate --record records/memory.jsonl --engine stock --first 3
    ./run.sh bench validate --record records/memory.jsonl --again-disturbed

Some 600 training steps, in under an hour on two quiet cores with AVX512_BF16. Cut off, it continues: what the record
holds is not measured again, failures included (remove a line to try again). The newest line of a configuration counts.
One record file a host. `bench tables` makes the page of it.
"""

import argparse
import dataclasses
import functools
from pathlib import Path
from typing import Any, Dict, List, Sequence

from rich.console import Console
from rich.table import Table

from cpu3d.bench.campaign import configurations, describe
from cpu3d.bench.harness import ProcessFailedError
from cpu3d.bench.memory import measure_memory
from cpu3d.errors import InputError
from cpu3d.host.apply import installed
from cpu3d.host.thread_plan import thread_plan
from cpu3d.util.atomic import writable_folder
from cpu3d.util.progress import bar
from cpu3d.util.records import append_record
from memory_estimator.calibration import HostConstants, find_constants
from memory_estimator.estimate import estimate
from memory_estimator.host import Host, read_host
from memory_estimator.job import ENGINES, Job
from memory_estimator.validation import DISTURBED_SPREAD, Measured, Row, compare, read_measured, spreads

GIB = 2**30

STEPS = 3
"""Timed, after two more: enough for a median."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--record", type=Path, required=True, metavar="FILE", help=".jsonl file, continued if there")
    parser.add_argument("--engine", choices=ENGINES, default=None, help="only this one (default: all installed)")
    parser.add_argument("--first", type=int, default=None, metavar="N", help="only the first N of the list")
    parser.add_argument(
        "--again-disturbed",
        action="store_true",
        help=f"measure again whose steps lie further apart than {100 * DISTURBED_SPREAD:.0f} %% of their median",
    )


def run(args: argparse.Namespace) -> int:
    if args.first is not None and args.first < 1:
        raise InputError(f"first must be at least 1, got {args.first}; leave it out for the whole list")
    writable_folder(args.record.parent, "folder")
    host, console = read_host(), Console(stderr=True)
    threads = thread_plan(host).intra_op
    before = _read(args.record, host)
    engines = _engines(args.engine, console)
    wanted = [job for job in configurations(threads) if job.engine in engines][: args.first]
    done = {one.job for one in before if not (args.again_disturbed and one.disturbed)}
    todo = [job for job in wanted if job not in done]
    constants = _constants(threads)
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
    predict = functools.lru_cache(maxsize=None)(_constants)
    held_out = [one for one in _read(args.record, host) if one.held_out]
    rows = compare(held_out, lambda one: estimate(one.job, predict(one.job.threads)))
    Console().print(_table(rows, constants))
    return 0


def measured_record(job: Job, host: Host) -> Dict[str, Any]:
    """What the record keeps of one configuration: the measurement, or what the process died of.

    Raises InputError where no process was started, which says nothing of the job.
    """
    request = request_for(job)
    try:
        result, _ = measure_memory(request, job.threads)
    except ProcessFailedError as error:
        environment = {**thread_plan(host).environment, "TF_NUM_INTRAOP_THREADS": str(job.threads)}
        return {**request, "error": str(error), "threads": environment, "host": host.summary()}
    return {name: value for name, value in result.items() if name not in ("moments", "rounds", "peers")}


def request_for(job: Job) -> Dict[str, Any]:
    """What `bench.measure` is to do to measure a job."""
    return {
        "shape": list(job.shape),
        "batch": job.batch,
        "micro_batch": job.micro,
        "unet": dataclasses.asdict(job.unet),
        "optimizer": job.optimizer,
        "steps": STEPS,
        "engine": job.engine,
        "matmul": [],
    }


# --- Private helpers ---


def _engines(asked: Any, console: Console) -> List[str]:
    """Those to measure on; what is not installed is left out with a word, unless it was asked for."""
    if asked and not installed(asked):
        raise InputError(f"engine must be installed, got {asked}; run `./run.sh setup` or leave the option out")
    missing = [engine for engine in ENGINES if not installed(engine)]
    if missing and not asked:
        console.print(f"left out, as it is not installed: {', '.join(missing)}", highlight=False)
    return [asked] if asked else [engine for engine in ENGINES if engine not in missing]


def _read(path: Path, host: Host) -> Sequence[Measured]:
    """What the record holds, nothing where there is none yet. Raises InputError where it is another host's."""
    try:
        measured = read_measured(path) if path.exists() else ()
    except ValueError as error:
        raise InputError(str(error)) from None
    others = sorted({one.host for one in measured if (one.host, one.isa) != (host.cpu_model, tuple(host.isa))})
    if others:
        raise InputError(
            f"record {path} must be of this host, {host.cpu_model}, got {', '.join(others)}; give each host a file"
        )
    return measured


def _constants(threads: int) -> HostConstants:
    try:
        return find_constants(threads)
    except ValueError as error:
        raise InputError(str(error)) from None


def _told(record: Dict[str, Any]) -> str:
    if "error" in record:
        return record["error"]
    return f"{record['process_peak_bytes'] / GIB:.2f} GiB, {record['step_s']:.2f} s"


def _table(rows: List[Row], constants: HostConstants) -> Table:
    title = f"{len(rows)} held-out configurations, predicted against measured"
    table = Table(title=title, title_justify="left", caption_justify="left")
    # The page is made with the shipped constants alone, and may say otherwise where this host has its own.
    table.caption = f"constants: {constants.name}, {constants.origin}"
    for column in ("", "median", "worst", "mean"):
        table.add_column(column, justify="left" if column == "" else "right")
    for name, spread in spreads(rows).items():
        table.add_row(name, f"{spread.median:.1%}", f"{spread.worst:+.1%}", f"{spread.mean:+.1%}")
    return table
