"""Measure the configurations by which the estimator is judged, on this host, one fresh process
each.

    python -m records.validate --record my-host.jsonl
    python -m records.validate --record my-host.jsonl --engine itex --first 12

Each fits a host with 24 GB of memory; all together take about half an hour on two quiet cores with
AVX512_BF16. After an interruption it continues: a configuration in the record is not measured
again, also if it failed (remove its line to repeat it). Use one record file per host.

The published records are the files in records/memory. `records.tables` makes accuracy.json from
them, which the estimator ships, and the validation page: every measured configuration with its
prediction."""

from dataclasses import dataclass
from pathlib import Path
from typing import List, Optional, Sequence, Tuple

from cpu3d.bench.harness import ProcessFailedError, Result, in_fresh_process
from cpu3d.bench.step_costs import measure, request_for
from cpu3d.errors import InputError
from cpu3d.host.apply import installed
from cpu3d.host.thread_plan import thread_plan
from cpu3d.util.atomic import writable_folder
from cpu3d.util.progress import bar, say
from cpu3d.util.records import append_record
from memory_estimator.accuracy import Accuracy
from memory_estimator.calibration import find_constants, shipped_constants
from memory_estimator.common.schema import option
from memory_estimator.common.table import new_console
from memory_estimator.common.units import format_bytes
from memory_estimator.estimate import Estimate, estimate
from memory_estimator.host import Host, read_host
from memory_estimator.installed import ENGINES, how_to_install
from memory_estimator.job import Job
from records.command import main
from records.files import newest, read_records
from records.measured import (
    Measured,
    Row,
    compare_steps,
    configurations,
    error_table,
    measured_from,
)

VALIDATION = "memory"  # the folder of `records.validate` in the folder of records, a file a host
STEPS = 3  # timed, after two more: enough for a median


@dataclass(frozen=True)
class Options:
    """The options of `records.validate`."""

    record: Path = option(help=".jsonl file; an existing one is continued", metavar="FILE")
    engine: Optional[str] = option(
        None, "measure only this engine (default: all installed)", choices=ENGINES
    )
    first: Optional[int] = option(
        None, "measure only the first N of the list", at_least=1, metavar="N"
    )


OPTIONS = (Options,)


def run(options: Options) -> int:
    host = read_host()
    constants = find_constants()
    done = {measured.job for measured in _of_this_host(options.record, host)}
    wanted = [options.engine] if options.engine else ENGINES
    engines = [engine for engine in wanted if installed(engine)]
    if not engines:
        missing = f"{options.engine}, which is not" if options.engine else "none"
        raise InputError(f"--engine must be installed, got {missing}; {how_to_install()}")
    writable_folder(options.record.parent, "folder")
    jobs = configurations(thread_plan(host).intra_op, engines)[: options.first]
    todo = [job for job in jobs if job not in done]
    with bar("validate", total=len(todo)) as advance:
        for job in todo:
            needed = estimate(job, constants).upper_bound_bytes
            free = read_host().free_bytes
            if needed <= free:
                record = record_of(job, host)
                append_record(options.record, "memory", record)
                outcome = record.get("error", "measured")
            else:
                outcome = f"left out, needs {format_bytes(needed)}, {format_bytes(free)} are free"
            say(f"{job.describe()}: {outcome}")
            advance()
    held_out = [measured for measured in _of_this_host(options.record, host) if measured.held_out]
    # As `estimate` predicts here; the page is made with the shipped constants alone.
    rows = compare_steps(held_out, lambda measured: estimate(measured.job, constants))
    new_console().print(error_table(rows))
    return 0


def record_of(job: Job, host: Host) -> Result:
    """The record of a job, measured in a fresh process, or of its failure."""
    request = request_for(job, steps=STEPS)
    try:
        return in_fresh_process(measure, request)
    except ProcessFailedError as error:
        threads = {**thread_plan(host).environment, "TF_NUM_INTRAOP_THREADS": str(job.threads)}
        return {**request, "error": str(error), "threads": threads, "host": host.summary()}


def read_measured(path: Path) -> Tuple[Measured, ...]:
    """The measured steps of a record file, or of all in a folder: the newest of each job and host,
    in the place of the oldest. Raises InputError for a missing file, and for a line that is damaged
    or of another schema."""
    files = sorted(Path(path).glob("*.jsonl")) if Path(path).is_dir() else [path]
    read: List[Measured] = []
    for file in files:
        read += read_records(file, "memory", measured_from)
    return tuple(newest(read, lambda step: (step.host, step.instructions, step.job)))


def _of_this_host(path: Path, host: Host) -> Sequence[Measured]:
    """The measured steps of a record, none if it does not exist yet. Raises InputError if it is of
    another host."""
    measured = read_measured(path) if path.exists() else ()
    here = (host.cpu_model, host.instructions)
    other = {step.host for step in measured if (step.host, step.instructions) != here}
    if other:
        rule = f"record {path} must be of this host, {host.cpu_model}, got {', '.join(other)}"
        raise InputError(f"{rule}; give each host a file")
    return measured


def validation(
    folder: Path, accuracy: Optional[Accuracy] = None
) -> Tuple[Sequence[Measured], List[Row]]:
    """The measured steps in a folder of records, and a row for each with the present estimator's
    prediction: by the shipped constants, whatever this host's own are, and the margins of
    `accuracy` (default: shipped too)."""
    measured = read_measured(folder / VALIDATION)
    shipped = {name: shipped_constants(name) for name in {step.instructions for step in measured}}

    def predicted(step: Measured) -> Estimate:
        return estimate(step.job, shipped[step.instructions], accuracy)

    return measured, compare_steps(measured, predicted)


if __name__ == "__main__":
    main("records.validate")
