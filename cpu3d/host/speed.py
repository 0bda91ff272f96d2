"""How fast this host computes, kept for the estimator: what `calibrate` has measured, and what a training's steps show.

A training gives one factor alone: measured seconds of a step over predicted ones.
"""

import dataclasses
import datetime
import math
import statistics
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import psutil

from cpu3d.errors import InputError
from cpu3d.util.atomic import remove_partials, write_json
from cpu3d.util.lock import locked
from cpu3d.util.progress import say
from memory_estimator.calibration import (
    FURTHEST,
    SCHEMA,
    HostConstants,
    Trained,
    find_constants,
    host_file,
    to_json,
)
from memory_estimator.common.files import read_json
from memory_estimator.host import Host
from memory_estimator.job import Job
from memory_estimator.step.timing import step_seconds
from memory_estimator.step.training_step import training_step

LEAST_VOXELS, FEWEST_STEPS = 64**3, 3
"""Of a training, to count: steps of smaller grids are TensorFlow's own overhead for the most part."""

QUIET_SHARE = 0.05  # of the CPUs' time that other programs may take before seconds count as disturbed

LOCK_WAIT_S = 2.0  # for others that write at the same time


def keep_constants(constants: HostConstants, host: Host) -> Path:
    """Keep what `calibrate` has measured, in the place of all earlier measurements. Raises as `_keep`."""
    return _keep(host, lambda _: {"constants": to_json(constants)})


def keep_training(job: Job, step_s: float, host: Host, *, quiet: bool) -> Path:
    """Keep by how much a step of a training took longer than predicted, within FURTHEST. A quiet training replaces
    every other one, a disturbed one only another disturbed one that was slower. Raises as `_keep`."""
    constants = find_constants(host)
    trained = constants.training(job.unet.dtype)
    before = trained.scale if trained else 1.0
    scale = before * step_s / step_seconds(training_step(job), constants, job)
    new = Trained(
        scale=min(max(scale, 1 / FURTHEST), FURTHEST),
        quiet=quiet,
        threads=job.threads,
        date=datetime.date.today().isoformat(),
        job=f"{' x '.join(map(str, job.shape))} in {job.unet.dtype}",
        constants=constants.identity,
    )

    def change(kept: Dict[str, Any]) -> Dict[str, Any]:
        trained = kept.get("trained", {})
        old = trained.get(job.unet.dtype)
        if not old or old["constants"] != new.constants or quiet or (not old["quiet"] and new.scale < old["scale"]):
            trained = {**trained, job.unet.dtype: dataclasses.asdict(new)}
        return {**kept, "trained": trained}

    return _keep(host, change)


def _keep(host: Host, change: Callable[[Dict[str, Any]], Dict[str, Any]]) -> Path:
    """Replace what is kept of this host with `change(kept)`, and return its file. Raises InputError where a newer
    version has written it, and where there is no folder for it; OSError where it cannot be written."""
    path = host_file(host)
    if path is None:
        raise InputError("$XDG_DATA_HOME or a home folder must be there for a host's speed, got neither; set one")
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.parent, "folder", LOCK_WAIT_S):
        remove_partials(path.parent)
        kept = {}
        if path.exists():
            try:
                kept = dict(read_json(path))
            except (ValueError, TypeError):
                kept = {}  # damaged, and so of no use to anybody
        if kept.get("schema", SCHEMA) > SCHEMA:
            rule = f"speed of this host must be of schema {SCHEMA}, got {kept['schema']} in {path}"
            raise InputError(f"{rule}; use the version that wrote it, or delete it")
        write_json(path, {**change(kept if kept.get("schema") == SCHEMA else {}), "schema": SCHEMA})
    return path


class Observer:
    """Watches the seconds of a training's steps, and keeps what they show of the host."""

    def __init__(self, job: Job, host: Host, *, warm_up: int = 0):
        """`job` is what this process computes. Its first `warm_up` steps do not count: they compile."""
        self._job, self._host, self._warm_up = job, host, warm_up
        self._steps_s: List[float] = []
        self._began = self._now()
        self._is_kept = False

    def note(self, seconds: float) -> int:
        """Note what a step took by itself, without waiting for data or other workers; returns how many were noted."""
        self._steps_s.append(seconds)
        if len(self._steps_s) == self._warm_up:
            self._began = self._now()
        return len(self._steps_s)

    def record(self) -> None:
        """Keep the steps' median, once they are enough. A failure is a warning on stderr: the training goes on."""
        steps_s = self._steps_s[self._warm_up :]
        if self._is_kept or len(steps_s) < FEWEST_STEPS or math.prod(self._job.shape) < LEAST_VOXELS:
            return
        self._is_kept = True
        try:
            all_s, others_s = (now - began for now, began in zip(self._now(), self._began))
            keep_training(self._job, statistics.median(steps_s), self._host, quiet=others_s <= QUIET_SHARE * all_s)
        except Exception as error:
            say(f"warning: the time of a step is not kept for the estimator: {error}")

    def _now(self) -> Tuple[float, float]:
        """CPU seconds, since some moment, of the CPUs that this process may use: all of them, and those of others."""
        process, each = psutil.Process(), psutil.cpu_times(percpu=True)
        cpus = process.cpu_affinity() if hasattr(process, "cpu_affinity") else range(len(each))
        times = [each[cpu] for cpu in cpus if cpu < len(each)] or each
        busy = ("user", "nice", "system", "irq", "softirq", "steal")  # the others are idle, or counted in these
        busy_s = sum(getattr(one, name, 0.0) for one in times for name in busy)
        return time.monotonic() * len(times), busy_s - time.process_time()
