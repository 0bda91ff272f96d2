"""The speed of this host, kept for the estimator: a scale for each dtype, of measured seconds of a
step over those predicted with the shipped constants. `calibrate` measures it."""

import contextlib
import dataclasses
import datetime
import os
import statistics
from pathlib import Path
from typing import Dict, Iterator, List, Sequence, Tuple

from cpu3d.util.atomic import remove_partials, write_json
from cpu3d.util.lock import locked
from memory_estimator.calibration import (
    FURTHEST,
    Scale,
    constants_of,
    host_file,
    like_shipped,
)
from memory_estimator.common.units import by
from memory_estimator.estimate import estimate
from memory_estimator.host import Host
from memory_estimator.job import Job
from memory_estimator.step.timing import step_seconds
from memory_estimator.step.training_step import training_step
from models.native.library import VARIABLE, native_operations

LOCK_WAIT_S = 2.0  # for others that write at the same time

# Of the CPUs' time, that other programs may take before seconds count as disturbed.
QUIET_SHARE = 0.05


def scale_of(timed: Sequence[Tuple[Job, float]], host: Host, *, quiet: bool) -> Scale:
    """The scale of jobs in one dtype and the seconds of their steps: the median of them, within
    FURTHEST."""
    base = constants_of(host)
    scale = statistics.median(
        step_s / step_seconds(training_step(job), base, job) for job, step_s in timed
    )
    job, _ = timed[0]  # all have its dtype
    return Scale(
        scale=min(max(scale, 1 / FURTHEST), FURTHEST),
        quiet=quiet,
        threads=job.threads,
        date=datetime.date.today().isoformat(),
        job=f"{by(job.shape, ' x ')} in {job.unet.dtype}",
    )


def keep_calibration(
    path: Path, measured: Sequence[Tuple[Job, float, int]], host: Host, *, quiet: bool
) -> None:
    """Write a host's file of jobs, the seconds of their steps and the peaks of their processes: a
    scale for each dtype, and for each engine the shipped baseline and the bytes that processes held
    above the predicted ones."""
    base = constants_of(host)
    base = dataclasses.replace(base, l2_bytes=host.l2_bytes or base.l2_bytes)
    kept = like_shipped(host)
    for dtype in dict.fromkeys(job.unet.dtype for job, _, _ in measured):
        timed = [(job, step_s) for job, step_s, _ in measured if job.unet.dtype == dtype]
        kept["scales"][dtype] = dataclasses.asdict(scale_of(timed, host, quiet=quiet))
    more: Dict[str, List[int]] = {}
    for job, _, peak_bytes in measured:
        more.setdefault(job.engine, []).append(peak_bytes - estimate(job, base).process_peak_bytes)
    moved = {
        engine: base.baseline_bytes[engine] + round(statistics.fmean(sizes))
        for engine, sizes in more.items()
    }
    origins = {**base.origins, "baseline_bytes": f"measured: calibrate, {datetime.date.today()}"}
    kept.update(baseline_bytes={**base.baseline_bytes, **moved}, origins=origins)
    with _writing(path):
        write_json(path, kept)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Hold the folder of a host's file, so that of two writers at once none is lost. Raises
    InputError if another process holds it for seconds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.parent, "folder", LOCK_WAIT_S):
        remove_partials(path.parent)
        yield


def computes_as_predicted() -> bool:
    """Whether steps are computed as the estimator's constants have them: by native operations, of
    the best instruction set. Raises InstructionSetError as `native_operations`."""
    return native_operations().tf_ops is not None and not os.environ.get(VARIABLE)
