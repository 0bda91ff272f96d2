"""Measure the configurations that the estimator is judged by on this host, one fresh process each.

    ./run.sh bench validate --record my-host.jsonl
    ./run.sh bench validate --record my-host.jsonl --engine itex --first 12

They are those of the published records, in records/memory; each fits a host with 24 GB of memory. Some 600 training
steps, in about an hour on two quiet cores with AVX512_BF16. Cut off, it continues: what the record holds is not
measured again, failures included (remove a line to try again). One record file a host.

Put into records/memory, a file is one of the published records: `bench tables --accuracy` then has the errors and the
upper bounds of jobs like these on hosts like this one.
"""

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Optional, Sequence, Tuple

from cpu3d.bench.accuracy import PUBLISHED, Measured, compare, read_measured, summary_table
from cpu3d.bench.harness import Output, ProcessFailedError, in_fresh_process
from cpu3d.bench.step import measure, request_for
from cpu3d.errors import InputError
from cpu3d.host.apply import installed
from cpu3d.host.thread_plan import thread_plan
from cpu3d.util.atomic import writable_folder
from cpu3d.util.progress import bar
from cpu3d.util.records import append_record
from memory_estimator.calibration import find_constants
from memory_estimator.estimate import estimate
from memory_estimator.host import Host, read_host
from memory_estimator.job import ENGINES, Job
from memory_estimator.schema import option
from memory_estimator.units import format_bytes
from models.config import POLICIES

STEPS = 3  # timed, after two more: enough for a median


@dataclass(frozen=True)
class Options:
    """What `bench validate` measures."""

    record: Path = option(help=".jsonl file, continued if there", metavar="FILE")
    engine: Optional[str] = option(None, help="only this one (default: all installed)", choices=ENGINES)
    first: Optional[int] = option(None, help="only the first N of the list", at_least=1, metavar="N")


OPTIONS = (Options,)


def run(options: Options) -> int:
    writable_folder(options.record.parent, "folder")
    host = read_host()
    threads = thread_plan(host).intra_op
    done = {one.job for one in _of_this_host(options.record, host)}
    if options.engine and not installed(options.engine):
        raise InputError(f"engine must be installed, got {options.engine}; run `./run.sh setup` or leave it out")
    engines = [one for one in ENGINES if options.engine in (None, one) and installed(one)]
    wanted = [job for job in configurations(threads) if job.engine in engines][: options.first]
    todo = [job for job in wanted if job not in done]
    constants = find_constants(threads, host)
    with bar("validate", total=len(todo)) as advance:
        for job in todo:
            needed, free = estimate(job, constants).upper_bound_bytes, read_host().free_bytes
            outcome = f"left out, needs {format_bytes(needed)} where {format_bytes(free)} are free"
            if needed <= free:
                record = measured_record(job, host)
                append_record(options.record, "memory", record)
                outcome = record.get("error", "measured")
            print(f"{job.describe()}: {outcome}", file=sys.stderr)
            advance()
    held_out = [one for one in _of_this_host(options.record, host) if one.held_out]
    # By what was known before: measuring adds to that. The page is made with the shipped constants alone.
    rows = compare(held_out, lambda one: estimate(one.job, constants))
    Output().publish("memory", {}, summary_table(rows))
    return 0


def measured_record(job: Job, host: Host) -> Dict[str, Any]:
    """What the record keeps of one configuration: the measurement, or what the process died of.

    Raises InputError where no process was started, which says nothing of the job.
    """
    request = request_for(job, steps=STEPS)
    try:
        return in_fresh_process(measure, request)
    except ProcessFailedError as error:
        environment = {**thread_plan(host).environment, "TF_NUM_INTRAOP_THREADS": str(job.threads)}
        return {**request, "error": str(error), "threads": environment, "host": host.summary()}


def configurations(threads: int) -> Tuple[Job, ...]:
    """Every job of the published records, as on a host with so many threads; what one policy that saves memory was
    measured with, under the others that do as well."""
    jobs = [dataclasses.replace(one.job, threads=threads) for one in read_measured(PUBLISHED)]
    others = [job.with_unet(policy=policy) for job in jobs if job.policy != "speed" for policy in POLICIES[1:]]
    return tuple(dict.fromkeys([*jobs, *others]))


def _of_this_host(path: Path, host: Host) -> Sequence[Measured]:
    """What the record holds, nothing where there is none yet. Raises InputError where it is another host's."""
    measured = read_measured(path) if path.exists() else ()
    others = {one.host for one in measured if (one.host, one.isa) != (host.cpu_model, tuple(host.isa))}
    if others:
        rule = f"be of this host, {host.cpu_model}, got {', '.join(others)}"
        raise InputError(f"record {path} must {rule}; give each host a file")
    return measured
