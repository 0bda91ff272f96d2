"""Measure this host for the estimator: its speed in each dtype, and the memory of the runtime.

    ./run.sh calibrate
    ./run.sh calibrate --all --out other.json

Measures training steps of two networks of 96^3 voxels in each dtype, each in a fresh process, in
about a minute for each engine. The ratio of measured to predicted seconds replaces an earlier one
of this host, and estimates use it. With --out it is written to a file instead. Run it while no
other program computes."""

import itertools
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import psutil

from cpu3d.bench.harness import in_fresh_process, valid
from cpu3d.bench.step_costs import job_of_record, measure, request_for
from cpu3d.errors import InputError
from cpu3d.host.apply import installed
from cpu3d.host.speed import QUIET_SHARE, computes_as_predicted, keep_calibration
from cpu3d.util.atomic import writable_folder
from cpu3d.util.progress import bar, say
from memory_estimator.calibration import host_file, load_constants
from memory_estimator.common.schema import option
from memory_estimator.host import read_host
from memory_estimator.installed import ENGINES, installed_engine
from memory_estimator.job import Job
from models.config import DTYPES, UNetConfig
from models.native.library import VARIABLE

SHAPE = (96, 96, 96)
STEPS = 4
NETWORKS = ({"filters": 16}, {"filters": 8})


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
    keep_calibration(path, measured, host, quiet=busy <= QUIET_SHARE)
    for dtype, scale in load_constants(path).scales.items():
        say(f"{dtype}: {scale.scale:.2f} of the predicted seconds", stderr=False)
    if busy > QUIET_SHARE:
        say(
            f"warning: other programs took {busy:.0%} of the CPUs, so times are too long; "
            "calibrate again later"
        )
    say(f"written after {time.perf_counter() - begin:.0f} s: {path}", stderr=False)
    return 0
