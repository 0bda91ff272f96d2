"""Measure the configurations that the estimator is judged by on this host, one fresh process each.

    ./run.sh bench validate --record other-host.jsonl
    ./run.sh bench validate --record other-host.jsonl --engine stock --first 3
    ./run.sh bench validate --record records/memory.jsonl --again-disturbed

They are those of the published record, records/memory.jsonl: far apart in everything that memory and time depend on,
and each fits a host with 24 GB of memory. Some 600 training steps, in under an hour on two quiet cores with
AVX512_BF16. Cut off, it continues: what the record holds is not measured again, failures included (remove a line to try
again). The newest line of a configuration counts. One record file a host.
"""

import argparse
import dataclasses
import functools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from cpu3d.bench.harness import Output, ProcessFailedError, valid
from cpu3d.bench.memory import measure_memory
from cpu3d.bench.step import request_for
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
from memory_estimator.schema import add_options, from_args, option
from memory_estimator.table import Table
from memory_estimator.units import GIB
from memory_estimator.validation import DISTURBED_SPREAD, PUBLISHED, Measured, compare, read_measured, spreads

HELP = "measure the configurations that the estimator is judged by on this host"

STEPS = 3
"""Timed, after two more: enough for a median."""


@dataclass(frozen=True)
class Options:
    """What `bench validate` measures."""

    record: Path = option(help=".jsonl file, continued if there", metavar="FILE")
    engine: Optional[str] = option(None, help="only this one (default: all installed)", choices=ENGINES)
    first: Optional[int] = option(None, help="only the first N of the list", at_least=1, metavar="N")
    again_disturbed: bool = option(
        False, help=f"measure again whose steps lie further apart than {100 * DISTURBED_SPREAD:.0f} %% of their median"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, Options)


def run(args: argparse.Namespace) -> int:
    options = from_args(Options, args)
    writable_folder(options.record.parent, "folder")
    host = read_host()
    threads = thread_plan(host).intra_op
    before = _of_this_host(options.record, host)
    if options.engine and not installed(options.engine):
        raise InputError(f"engine must be installed, got {options.engine}; run `./run.sh setup` or leave it out")
    engines = [one for one in ENGINES if options.engine in (None, one) and installed(one)]
    wanted = [job for job in configurations(threads) if job.engine in engines][: options.first]
    done = {one.job for one in before if not (options.again_disturbed and one.disturbed)}
    todo = [job for job in wanted if job not in done]
    constants = valid(find_constants, threads)
    with bar("validate", total=len(todo)) as advance:
        for job in todo:
            needed, free = estimate(job, constants).upper_bound_bytes, read_host().free_bytes
            outcome = f"left out, needs {needed / GIB:.1f} GiB where {free / GIB:.1f} GiB are free"
            if needed <= free:
                record = measured_record(job, host)
                append_record(options.record, "memory", record)
                outcome = record.get("error", "measured")
            print(f"{describe(job)}: {outcome}", file=sys.stderr)
            advance()
    constants_of = functools.lru_cache(maxsize=None)(find_constants)
    held_out = [one for one in _of_this_host(options.record, host) if one.held_out]
    rows = compare(held_out, lambda one: estimate(one.job, constants_of(one.job.threads)))
    cells = [
        (name, f"{one.median:.1%}", f"{one.worst:+.1%}", f"{one.mean:+.1%}") for name, one in spreads(rows).items()
    ]
    title = f"{len(rows)} held-out configurations, predicted against measured"
    # The page is made with the shipped constants alone, and may say otherwise where this host has its own.
    caption = f"constants: {constants.name}, {constants.origin}"
    Output().publish("memory", {}, [Table(("", "median", "worst", "mean"), cells, title, caption)])
    return 0


def measured_record(job: Job, host: Host) -> Dict[str, Any]:
    """What the record keeps of one configuration: the measurement, or what the process died of.

    Raises InputError where no process was started, which says nothing of the job.
    """
    request = request_for(job, steps=STEPS)
    try:
        result, _ = measure_memory(request)
    except ProcessFailedError as error:
        environment = {**thread_plan(host).environment, "TF_NUM_INTRAOP_THREADS": str(job.threads)}
        return {**request, "error": str(error), "threads": environment, "host": host.summary()}
    return {name: value for name, value in result.items() if name not in ("moments", "rounds", "peers")}


def configurations(threads: int) -> Tuple[Job, ...]:
    """Every job of the published record, as on a host with so many threads."""
    return tuple(dataclasses.replace(one.job, threads=threads) for one in valid(read_measured, PUBLISHED))


def describe(job: Job) -> str:
    """A job in one line: "128x128x128 f16 d5 b1 c4 k3 bfloat16 itex instance adam", and what differs from the default.

    f(ilters), d(epth), b(atch; 4/1 is computed one at a time), c(hannels), k outputs.
    """
    unet = job.unet
    words: List[str] = ["x".join(map(str, job.shape)), f"f{unet.filters}", f"d{unet.depth}"]
    words.append(f"b{job.batch}" if job.parts == 1 else f"b{job.batch}/{job.micro}")
    words += [f"c{unet.channels}", f"k{unet.outputs}", unet.dtype, job.engine, unet.norm, job.optimizer]
    words += ["cicek2016"] * (unet.network == "cicek2016") + ["residual"] * unet.residual
    words += ["upsampling"] * (unet.up == "upsampling") + ["deep"] * unet.deep_supervision
    return " ".join([*words, *([unet.policy] if unet.policy != "speed" else [])])


def _of_this_host(path: Path, host: Host) -> Sequence[Measured]:
    """What the record holds, nothing where there is none yet. Raises InputError where it is another host's."""
    measured = valid(read_measured, path) if path.exists() else ()
    others = sorted({one.host for one in measured if (one.host, one.isa) != (host.cpu_model, tuple(host.isa))})
    if others:
        raise InputError(
            f"record {path} must be of this host, {host.cpu_model}, got {', '.join(others)}; give each host a file"
        )
    return measured
