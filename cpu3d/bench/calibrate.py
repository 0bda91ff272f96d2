"""Measure this host for the estimator: its speed in each dtype, and the memory of the runtime.

    ./run.sh calibrate
    ./run.sh calibrate --all --out other.json

Measures training steps of two networks of 96^3 voxels in each dtype, each in a fresh process, in
about a minute for each engine. The ratio of measured to predicted seconds replaces an earlier one
of this host, and estimates use it. With --out it is written to a file instead. Run it while no
other program computes."""

import dataclasses
import datetime
import itertools
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Optional, Sequence, Tuple

import psutil

from cpu3d.bench.harness import in_fresh_process, valid
from cpu3d.bench.step_costs import job_of_record, measure, request_for
from cpu3d.errors import InputError
from cpu3d.host.apply import installed
from cpu3d.util.atomic import writable_folder, write_json
from cpu3d.util.progress import bar, say
from memory_estimator.calibration import (
    FURTHEST,
    Scale,
    constants_of,
    host_file,
    like_shipped,
    load_constants,
)
from memory_estimator.common.schema import option
from memory_estimator.common.units import by
from memory_estimator.estimate import estimate
from memory_estimator.host import Host, read_host
from memory_estimator.installed import ENGINES, installed_engine
from memory_estimator.job import Job
from memory_estimator.step.timing import step_seconds
from memory_estimator.step.training_step import training_step
from models.config import DTYPES, UNetConfig
from models.native.library import VARIABLE, native_operations

SHAPE = (96, 96, 96)
STEPS = 4
NETWORKS = ({"filters": 16}, {"filters": 8})

# Of the CPUs' time, that other programs may take before seconds count as disturbed.
QUIET_SHARE = 0.05


@dataclass(frozen=True)
class Options:
    """The options of `calibrate`."""

    engine: Optional[str] = option(
        None, "engine to measure (default: the one that `train` would use)", choices=ENGINES
    )
    all: bool = option(False, help="measure every engine that is installed, a minute each")
    out: Optional[Path] = option(
        None, "write to FILE for `estimate --calibration FILE`, instead of keeping it", "FILE"
    )


OPTIONS = (Options,)


def run(options: Options) -> int:
    host = read_host()
    begin = time.perf_counter()
    busy = 0.0
    measured = []
    path = options.out if options.out else valid(host_file, host)
    if not computes_as_predicted():
        got = host.native.why or os.environ.get(VARIABLE)
        raise InputError(
            f"native operations must be built and {VARIABLE} unset, as only these are predicted, "
            f"got {got}; run python -m models.native.build, or unset the variable"
        )
    writable_folder(path.parent, "folder")
    if options.all:
        engines = [engine for engine in ENGINES if installed(engine)]
    else:
        engines = [options.engine or installed_engine()]
    jobs = [Job(UNetConfig(**unet, dtype=dtype), SHAPE) for dtype in DTYPES for unet in NETWORKS]
    with bar("calibrate", total=len(engines) * len(jobs)) as advance:
        for engine, job in itertools.product(engines, jobs):
            busy = max(busy, psutil.cpu_percent(0.5) / 100)  # by others: nothing of ours runs
            request = request_for(job, engine=engine, threads=None, steps=STEPS)
            record = in_fresh_process(measure, request)
            measured.append((job_of_record(record), record["step_s"], record["process_peak_bytes"]))
            advance()
    keep_calibration(path, measured, host)
    for dtype, scale in load_constants(path).scales.items():
        say(f"{dtype}: {scale.scale:.2f} of the predicted seconds", stderr=False)
    if busy > QUIET_SHARE:
        say(
            f"warning: other programs took {busy:.0%} of the CPUs, so times are too long; "
            "calibrate again later"
        )
    say(f"written after {time.perf_counter() - begin:.0f} s: {path}", stderr=False)
    return 0


def keep_calibration(path: Path, measured: Sequence[Tuple[Job, float, int]], host: Host) -> None:
    """Write a host's file of jobs, the seconds of their steps and the peaks of their processes: a
    scale for each dtype, the median of its jobs, and for each engine the shipped baseline and the
    bytes that processes held above the predicted ones."""
    shipped = constants_of(host)
    base = dataclasses.replace(shipped, l2_bytes=host.l2_bytes or shipped.l2_bytes)
    today = datetime.date.today().isoformat()
    threads = measured[0][0].threads  # as all have
    kept = like_shipped(host)
    times: Dict[str, List[float]] = {}
    more: Dict[str, List[int]] = {}
    for job, step_s, peak_bytes in measured:
        predicted_s = step_seconds(training_step(job), shipped, job)
        times.setdefault(job.unet.dtype, []).append(step_s / predicted_s)
        more.setdefault(job.engine, []).append(peak_bytes - estimate(job, base).process_peak_bytes)
    for dtype, ratios in times.items():
        scale = min(max(statistics.median(ratios), 1 / FURTHEST), FURTHEST)
        name = f"{by(SHAPE, ' x ')} in {dtype}"
        kept["scales"][dtype] = dataclasses.asdict(Scale(scale, threads, today, name))
    moved = {
        engine: base.baseline_bytes[engine] + round(statistics.fmean(sizes))
        for engine, sizes in more.items()
    }
    origins = {**base.origins, "baseline_bytes": f"measured: calibrate, {today}"}
    kept.update(baseline_bytes={**base.baseline_bytes, **moved}, origins=origins)
    write_json(path, kept)


def computes_as_predicted() -> bool:
    """Whether steps are computed as the estimator's constants have them: by native operations, of
    the best instruction set. Raises InstructionSetError as `native_operations`."""
    return native_operations().tf_ops is not None and not os.environ.get(VARIABLE)
