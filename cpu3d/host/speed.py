"""The speed of this host, kept for the estimator: a scale for each dtype, of measured seconds of a
step over those predicted with the shipped constants. `calibrate` measures it, and every training of
large enough volumes adds to it."""

import collections
import contextlib
import dataclasses
import datetime
import math
import os
import statistics
from pathlib import Path
from typing import Deque, Dict, Iterator, List, Sequence, Tuple

from cpu3d.util.atomic import remove_partials, write_json
from cpu3d.util.lock import locked
from cpu3d.util.progress import say
from memory_estimator.calibration import (
    FURTHEST,
    Scale,
    constants_of,
    find_constants,
    host_file,
    like_shipped,
)
from memory_estimator.common.files import read_json
from memory_estimator.common.units import by
from memory_estimator.estimate import estimate
from memory_estimator.host import Host
from memory_estimator.job import Job
from memory_estimator.step.timing import step_seconds
from memory_estimator.step.training_step import training_step
from models.native.library import VARIABLE, native_operations

# The fewest of a training that counts: steps of smaller grids are TensorFlow's own overhead for
# the most part.
LEAST_VOXELS = 64**3
FEWEST_STEPS = 3

MOST_STEPS = 1000  # of which the median is taken, the latest ones: a run may have millions

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


def keep_training(job: Job, step_s: float, host: Host) -> None:
    """Keep the scale of a training, beside which other programs may have computed: it replaces that
    of a slower training, and none of `calibrate`. Raises ValueError as `host_file`, and OSError if
    it cannot be written."""
    path = host_file(host)
    scale = scale_of([(job, step_s)], host, quiet=False)
    with _writing(path):
        # Else missing, damaged, or of other constants than are shipped now.
        is_valid = bool(find_constants(host).scales)
        kept = read_json(path) if is_valid else like_shipped(host)
        old = kept["scales"].get(job.unet.dtype)
        if not old or (not old["quiet"] and scale.scale < old["scale"]):
            kept["scales"][job.unet.dtype] = dataclasses.asdict(scale)
            write_json(path, kept)


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


class Observer:
    """Watches the seconds of a training's steps, and keeps the speed of the host that they show."""

    def __init__(self, job: Job, host: Host, *, warm_up: int = 0):
        """`job` is computed by this process. Its first `warm_up` steps do not count: they
        compile."""
        self._job = job
        self._host = host
        self._warm_up = warm_up
        self._steps_s: Deque[float] = collections.deque(maxlen=MOST_STEPS)
        self._is_kept = False

    def note(self, seconds: float) -> None:
        """Note the seconds of a step by itself, without waiting for data or other workers."""
        if self._warm_up > 0:
            self._warm_up -= 1
        else:
            self._steps_s.append(seconds)

    def record(self) -> None:
        """Keep the steps' median, once they are enough. A failure is a warning on stderr: the
        training continues."""
        is_small = math.prod(self._job.shape) < LEAST_VOXELS
        if self._is_kept or is_small or len(self._steps_s) < FEWEST_STEPS:
            return
        self._is_kept = True
        try:
            keep_training(self._job, statistics.median(self._steps_s), self._host)
        except Exception as error:
            say(f"warning: the time of a step is not kept for the estimator: {error}")
