"""Measure this host for the estimator: how fast it computes in each dtype, and what the runtime holds in memory.

    ./run.sh calibrate
    ./run.sh calibrate --all --out other.json

Measures training steps of two networks of 96^3 voxels in each dtype, each in a fresh process, in about a minute for
each engine. The ratio of measured to predicted seconds is kept for this host in place of an earlier ratio, and
estimates use it. With --out it is written to a file instead. Run it while nothing else runs.
"""

import dataclasses
import datetime
import itertools
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Optional, Sequence

import psutil

from cpu3d.bench.harness import Result, in_fresh_process, valid
from cpu3d.bench.step import job_of_record, measure, request_for
from cpu3d.errors import InputError
from cpu3d.host.apply import installed
from cpu3d.host.speed import QUIET_SHARE, is_own, scale_of, writing
from cpu3d.util.atomic import writable_folder, write_json
from cpu3d.util.progress import bar
from memory_estimator.calibration import host_file, like_shipped, load_constants, shipped_constants
from memory_estimator.common.schema import option
from memory_estimator.estimate import estimate
from memory_estimator.host import Host, read_host
from memory_estimator.installed import ENGINES
from memory_estimator.job import Job
from models.config import DTYPES, UNetConfig

SHAPE, STEPS = (96, 96, 96), 4
NETWORKS = ({"filters": 16}, {"filters": 8})


@dataclass(frozen=True)
class Options:
    """What `calibrate` measures, and where it writes."""

    engine: Optional[str] = option(None, "default: what `train` would use", choices=ENGINES)
    all: bool = option(False, help="every engine that is installed, a minute each")
    out: Optional[Path] = option(None, "write it to a file, for --calibration (default: keep it)", metavar="FILE")


OPTIONS = (Options,)


def run(options: Options) -> int:
    host, begin, busy, records = read_host(), time.perf_counter(), 0.0, []
    path = options.out or valid(host_file, host)
    if not is_own():
        rule = "own operations must be built, and CPU3D_INSTRUCTION_SET not set: only such steps are predicted"
        raise InputError(f"{rule}; run python -m models.native.build")
    writable_folder(path.parent, "folder")
    engines = [engine for engine in ENGINES if installed(engine)] if options.all else [options.engine]
    jobs = [Job(UNetConfig(**unet, dtype=dtype), SHAPE) for dtype in DTYPES for unet in NETWORKS]
    with bar("calibrate", total=len(engines) * len(jobs)) as advance:
        for engine, job in itertools.product(engines, jobs):
            busy = max(busy, psutil.cpu_percent(0.5) / 100)  # with others: nothing of ours runs
            records.append(in_fresh_process(measure, request_for(job, engine=engine, threads=None, steps=STEPS)))
            advance()
    with writing(path):
        write_json(path, measured(records, host, quiet=busy <= QUIET_SHARE))
    for dtype, scale in load_constants(path).scales.items():
        print(f"{dtype}: {scale.scale:.2f} of the predicted seconds")
    if busy > QUIET_SHARE:
        print(f"other programs took {busy:.0%} of the CPUs: times are too long, calibrate again on a quiet host")
    print(f"{path} written after {time.perf_counter() - begin:.0f} s")
    return 0


def measured(records: Sequence[Result], host: Host, *, quiet: bool) -> Dict[str, Any]:
    """The JSON of a host's own file, from measured steps: a scale for each dtype, and for each engine the shipped
    baseline and what the processes held more than predicted."""
    base, jobs = shipped_constants(host.instructions), [job_of_record(record) for record in records]
    scales, baseline_bytes = {}, dict(base.baseline_bytes)
    for dtype in dict.fromkeys(job.unet.dtype for job in jobs):
        timed = [(job, record["step_s"]) for job, record in zip(jobs, records) if job.unet.dtype == dtype]
        scales[dtype] = dataclasses.asdict(scale_of(timed, host, quiet=quiet))
    for engine in dict.fromkeys(job.engine for job in jobs):
        peaks = [(one, estimate(job, base)) for job, one in zip(jobs, records) if job.engine == engine]
        more = statistics.fmean(one["process_peak_bytes"] - found.process_peak_bytes for one, found in peaks)
        baseline_bytes[engine] += round(more)
    origins = {**base.origins, "baseline_bytes": f"measured: calibrate, {datetime.date.today()}"}
    return {**like_shipped(host), "scales": scales, "baseline_bytes": baseline_bytes, "origins": origins}
