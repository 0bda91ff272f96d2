"""Predicts a whole training: its coarse steps and its full ones, a worker's extra memory, and
the time of all.

schedule = Schedule(steps=500, extra=ExtraMemory(volume_shape=(240, 240, 155)))
forecast = schedule.forecast(job, constants, accuracy)
forecast.upper_bound_bytes, forecast.all_s
"""

import dataclasses
import functools
import math
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Sequence, Tuple

from memory_estimator.accuracy import Accuracy
from memory_estimator.calibration import HostConstants
from memory_estimator.estimate import Component, Estimate, estimate, run_use, seconds_of_step
from memory_estimator.job import Job
from memory_estimator.planner import Choice, Estimator, fastest_that_fits
from memory_estimator.step.timeline import Group
from memory_estimator.step.training_step import training_step
from memory_estimator.workers import worker_estimate
from models.strides import NO_AXIS, Shape3, shape3

FORWARD_SHARE = 1 / 3  # of a step: the backward pass computes each product twice
SCORE_S = 0.5  # to score a million voxels of a case, all regions, on one core

LOGITS_MAPS = 2
"""float32 maps as large as the logits that a validation of whole volumes holds at a time: the
windows' sum, or the axis before, and the whole as a tensor. The scores, which come after, take a
slab of it at a time."""

JUDGED_BYTES = 39
"""Of each voxel of a case that post-processing is decided on: connected components of answers and
truth, and what overlaps, measured on regions that fill half of 240 x 240 x 155 voxels."""

PRICED = 40  # most grids of cases whose steps are predicted, evenly spread: each takes 10 ms

CASE_BYTES = 1200
"""Of each case of a store in every worker: its place in the file of records and the facts that are
kept in memory, 840 measured, and its number in the orders of four epochs."""

# components that are not held during the steps as they are counted
POST_PROCESSING = "post-processing"
LEFT_BY_COARSE = "left by coarse steps"

RUN_FIGURES = (
    *("steps_s", "validation_s", "postprocessing_s", "all_s"),
    *("allocator_peak_bytes", "process_peak_bytes", "upper_bound_bytes"),
)
"""Properties of a `Forecast` that `run_json` has."""

# groups of tensors that a checkpoint holds
SAVED = (Group.WEIGHTS, Group.SLOTS)


@dataclass(frozen=True)
class ExtraMemory:
    """A worker's memory beside the steps of a run, all of it in the upper bound."""

    # of whole volumes; None if the steps see them, or nothing is validated
    volume_shape: Optional[Shape3] = None
    copies: int = 0  # of the variables: from before steps were timed, or on another grid
    left_bytes: int = 0  # by coarse steps
    judged_shape: Optional[Shape3] = None
    """Of the largest grid on which answers are judged when post-processing is decided, after the
    steps; None if it is not."""
    cases: int = 0  # of the store


def run_estimate(
    job: Job,
    constants: HostConstants,
    accuracy: Accuracy,
    extra: ExtraMemory = ExtraMemory(),
    *,
    workers: int = 1,
) -> Estimate:
    """The estimate of a job as a step of a run: the memory of one worker, the time of all of them
    together."""
    copies = 0
    if extra.copies:
        resident = training_step(job).resident
        saved = sum(tensor.bytes for tensor in resident if tensor.group in SAVED)
        copies = extra.copies * saved
    volumes = 0
    if extra.volume_shape:
        volumes = whole_volume_bytes(job, extra.volume_shape)
    judged = 0
    if extra.judged_shape:  # float32 answers of all regions, and what is found in them
        judged = (4 * job.unet.outputs + JUDGED_BYTES) * math.prod(extra.judged_shape)
        judged = max(judged - volumes, 0)  # of the steps, which are over
    records = extra.cases * CASE_BYTES // 2**20 * 2**20  # none for a few hundred cases
    twice = "exact: from before the timing, or on another grid"
    scattered = "at most: pages too scattered for maps of full size"
    return worker_estimate(estimate(job, constants, accuracy), workers).with_extra(
        Component("whole volumes", volumes, "derived: of validation"),
        Component(POST_PROCESSING, judged, "measured: a case's answers and components"),
        Component("variables, once more", copies, twice),
        Component(LEFT_BY_COARSE, extra.left_bytes, scattered),
        Component("case records", records, "measured: of each case what is kept in memory"),
    )


def whole_volume_bytes(job: Job, shape: Shape3) -> int:
    """Bytes of the whole volumes of `shape` that a validation has beside the steps of a `job`,
    which sees patches of them, counted and not measured: with logits and their weights."""
    unet = job.unet
    volume = unet.channels * unet.value_bytes + unet.outputs
    scored = 4 + LOGITS_MAPS * 4 * unet.outputs
    held = 3 * volume  # in use, ahead, and one in preparation
    return round(math.prod(shape) * (held + scored))


@dataclass(frozen=True)
class Schedule:
    """A training as data: what it does besides its full steps, whose job is given apart. A single
    step, of which no more is known, has the defaults."""

    steps: int = 0  # of the whole run; 0 is not known
    coarse_steps: int = 0
    coarse_shape: Optional[Shape3] = None  # their largest grid; None without any
    coarse_average: Shape3 = NO_AXIS  # voxels of it that their network averages
    grids: Tuple[Shape3, ...] = ()
    """Grids of full steps, each as often as cases have it, the smallest first; () if all have that
    of the job, which is the largest."""
    coarse_grids: Tuple[Shape3, ...] = ()  # likewise of coarse steps
    whole_every: int = 1  # full steps of which one is on those, the others on crops
    crop_grids: Tuple[Shape3, ...] = ()  # likewise of crops; () without any
    extra: ExtraMemory = ExtraMemory()  # of full steps
    coarse_extra: ExtraMemory = ExtraMemory()
    budget_s: Optional[float] = None  # that cuts the steps; None for no limit
    validations: int = 0
    held_out: int = 0  # cases of a validation
    windows: int = 1  # of the network, that cover such a case
    coarse_windows: int = 1
    decided: int = 0  # cases that post-processing is decided on
    flips: int = 1  # mirror images of each of them that answers are averaged over
    scored_voxels: int = 0  # of the largest of them, on its own grid

    def coarse_job(self, job: Job) -> Optional[Job]:
        """The job of coarse steps beside full ones of `job`; None without any. Their policy is
        "speed". Patches are never larger than those of full steps."""
        if self.coarse_shape is None:
            return None
        unet = dataclasses.replace(job.unet, policy="speed", average=self.coarse_average)
        shape = self.coarse_shape
        if not unet.averages:
            shape = shape3(map(min, shape, job.shape))
        return dataclasses.replace(job, unet=unet, shape=shape)

    def estimator(
        self, constants: HostConstants, accuracy: Accuracy, *, workers: int = 1
    ) -> Estimator:
        """What estimates jobs as full steps of this training, with its coarse steps. The upper
        bound is that of the whole run."""

        @functools.cache  # policies of full steps have the same coarse ones
        def step_estimate(job: Job, extra: ExtraMemory) -> Estimate:
            return run_estimate(job, constants, accuracy, extra, workers=workers)

        @functools.cache  # the policy that is picked was estimated before
        def full_estimate(job: Job) -> Estimate:
            coarse_job = self.coarse_job(job)
            if coarse_job is None:
                return step_estimate(job, self.extra)
            coarse = step_estimate(coarse_job, self.coarse_extra)
            left_bytes = coarse.allocator_peak_bytes
            full = step_estimate(job, dataclasses.replace(self.extra, left_bytes=left_bytes))
            bound = max(full.upper_bound_bytes, coarse.upper_bound_bytes)
            return dataclasses.replace(full, coarse=coarse, upper_bound_bytes=bound)

        return full_estimate

    def forecast(
        self,
        job: Job,
        constants: HostConstants,
        accuracy: Accuracy,
        *,
        workers: int = 1,
        budget_bytes: Optional[int] = None,
    ) -> "Forecast":
        """What this training costs on a host, with `job` as a full step: the memory of one worker,
        the time of all of them together. With a budget its memory policy is picked, whatever `job`
        has now."""
        estimator = self.estimator(constants, accuracy, workers=workers)
        if budget_bytes is None:
            return Forecast(self, estimator(job), workers=workers)
        choice = fastest_that_fits(job, estimator, budget_bytes)
        return Forecast(self, choice.estimate, choice, workers)


@dataclass(frozen=True)
class Forecast:
    """Memory and time of a training, by the estimate of its full steps."""

    schedule: Schedule
    full: Estimate
    # of the memory policy, if it was picked
    choice: Optional[Choice] = field(default=None, compare=False)
    workers: int = 1  # which share the steps, and the cases of a validation

    @functools.cached_property
    def by_case(self) -> List[Tuple[str, Estimate]]:
        """Estimates of a full step on the median crop, and the smallest and the median grid of the
        cases, each with its name; none if all have the largest."""
        grids = self.schedule.grids
        crops = self.schedule.crop_grids
        named = []
        if crops:
            named.append(("median crop", crops[len(crops) // 2]))
        if grids and grids[0] != grids[-1]:
            named += [("smallest case", grids[0]), ("median case", grids[len(grids) // 2])]
        job = self.full.job
        accuracy = self.full.accuracy
        steps = []
        for name, grid in named:
            step = estimate(dataclasses.replace(job, shape=grid), self.full.constants, accuracy)
            steps.append((name, worker_estimate(step, self.workers)))
        return steps

    @property
    def coarse(self) -> Optional[Estimate]:
        """The estimate of coarse steps; None without a curriculum."""
        return self.full.coarse

    @property
    def steps(self) -> List[Estimate]:
        """Those of coarse steps, if there are any, then of full ones."""
        return [self.coarse, self.full] if self.coarse else [self.full]

    @functools.cached_property
    def allocator_peak_bytes(self) -> int:
        """What TensorFlow's allocator hands out at most, over the whole run."""
        return run_use(self.steps).peak_bytes

    @functools.cached_property
    def process_peak_bytes(self) -> int:
        """The process's, over all steps, validations and saves, without a margin."""
        left_bytes = 0  # by coarse steps, in pieces that full ones cannot use
        if self.coarse:
            both = run_use(self.steps).resident_bytes
            left_bytes = max(both - run_use([self.full]).resident_bytes, 0)
        peaks = []
        for step in self.steps:
            other = (POST_PROCESSING, LEFT_BY_COARSE)
            extra = sum(line.bytes for line in step.extra if line.name not in other)
            peaks.append(step.process_peak_bytes + extra)
        peaks[-1] += left_bytes
        return max(peaks)

    @property
    def upper_bound_bytes(self) -> int:
        """The process's, over the whole run."""
        return self.full.upper_bound_bytes

    @functools.cached_property
    def whole_step_s(self) -> float:
        """Seconds of a full step that is not on crops, the mean over the grids of the cases."""
        return self._mean_step_s(self.full, self.schedule.grids)

    @functools.cached_property
    def crop_step_s(self) -> float:
        """Seconds of a full step on crops, likewise; 0 without any."""
        if not self.schedule.crop_grids:
            return 0.0
        return self._mean_step_s(self.full, self.schedule.crop_grids)

    @functools.cached_property
    def full_step_s(self) -> float:
        """Seconds of a full step, the mean over whole cases and crops."""
        crop_s = self.crop_step_s
        return crop_s + (self.whole_step_s - crop_s) / self.schedule.whole_every

    @functools.cached_property
    def coarse_step_s(self) -> float:
        """Seconds of a coarse step, likewise; 0 without any."""
        if self.coarse is None:
            return 0.0
        return self._mean_step_s(self.coarse, self.schedule.coarse_grids)

    @property
    def epoch_s(self) -> Optional[float]:
        """Seconds of an epoch of full steps; None if the number of cases is unknown."""
        if self.full.epoch_s is None:
            return None
        return self.full.epoch_s * self.full_step_s / self.full.step_s

    @property
    def training_s(self) -> float:
        """Seconds of all steps, without a budget of time; validations aside."""
        full_steps = self.schedule.steps - self.schedule.coarse_steps
        return self.schedule.coarse_steps * self.coarse_step_s + full_steps * self.full_step_s

    @property
    def steps_s(self) -> float:
        """Seconds of the steps, of which a budget of time takes as many as it holds."""
        return self.within_budget_s(self.training_s)

    def within_budget_s(self, training_s: float) -> float:
        """Of the seconds of all steps those that a budget of time holds."""
        budget_s = self.schedule.budget_s
        if budget_s is None:
            return training_s
        return min(training_s, budget_s)

    @property
    def validation_s(self) -> float:
        """Seconds of all validations, in each of which a worker has its share of the cases."""
        schedule = self.schedule
        if not schedule.steps:
            return 0.0
        case_s = (schedule.steps - schedule.coarse_steps) * self._pass_s(
            self.whole_step_s, schedule.windows
        )
        if self.coarse:
            windows = schedule.coarse_windows
            case_s += schedule.coarse_steps * self._pass_s(self.coarse_step_s, windows)
        cases = math.ceil(schedule.held_out / self.workers)  # of a worker
        return schedule.validations * cases * case_s / schedule.steps

    @property
    def answered_s(self) -> float:
        """Seconds to answer on a held-out case, and on the crop around what was found, and to score
        that."""
        pass_s = self._pass_s(self.whole_step_s + self.crop_step_s, self.schedule.windows)
        return self.schedule.flips * pass_s + SCORE_S * self.schedule.scored_voxels / 1e6

    @property
    def postprocessing_s(self) -> float:
        """Seconds to decide the post-processing, after the last step: one worker does it."""
        return self.schedule.decided * self.answered_s

    @property
    def all_s(self) -> float:
        """Seconds of the whole training."""
        return self.steps_s + self.validation_s + self.postprocessing_s

    def _pass_s(self, step_s: float, windows: int) -> float:
        """Seconds of the network's pass over a whole case, which one worker computes."""
        return FORWARD_SHARE * step_s / self.full.job.batch * self.workers * windows

    def _mean_step_s(self, step: Estimate, grids: Sequence[Shape3]) -> float:
        """Mean seconds of a step on these grids, the smallest first, over draws of as many cases as
        all workers compute at a time, of which the largest decides."""
        if not grids:
            return step.step_s

        @functools.cache
        def seconds_on(grid: Shape3) -> float:
            return seconds_of_step(dataclasses.replace(step.job, shape=grid), step.constants)

        together = self.full.job.micro * self.workers
        every = -(-len(grids) // PRICED)
        priced = grids[every // 2 :: every]
        count = len(priced)
        seconds = 0.0
        for index, grid in enumerate(priced):
            share = ((index + 1) / count) ** together - (index / count) ** together
            seconds += share * seconds_on(grid)
        return step.step_s * seconds / seconds_on(step.job.shape)

    def to_json(self) -> Dict[str, Any]:
        """A step's memory and time, for the log and the report to compare with the measured
        ones."""

        def figures(step: Estimate, step_s: float) -> Dict[str, Any]:
            names = ("allocator_peak_bytes", "process_peak_bytes", "upper_bound_bytes")
            return {**{name: getattr(step, name) for name in names}, "step_s": step_s}

        content = figures(self.full, self.full_step_s)
        content["run_allocator_peak_bytes"] = self.allocator_peak_bytes
        content["run_process_peak_bytes"] = self.process_peak_bytes
        content["constants"] = self.full.constants.name
        if self.coarse:
            content["coarse"] = figures(self.coarse, self.coarse_step_s)
        return content

    def run_json(self) -> Dict[str, Any]:
        """The steps and the seconds of the whole training, and its upper bound."""
        content: Dict[str, Any] = {
            "steps": self.schedule.steps,
            "coarse_steps": self.schedule.coarse_steps,
        }
        content.update((name, getattr(self, name)) for name in RUN_FIGURES)
        if self.coarse:
            content["coarse"] = self.to_json()["coarse"]
        return content
