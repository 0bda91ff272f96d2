"""A whole training on paper: its coarse steps and its full ones, a worker's memory beside them, and
the time of all.

price = price_of_run(constants, accuracy, Beside(volume_shape=(240, 240, 155)), workers=2)
forecast = Forecast(price(job))
forecast.upper_bound_bytes, forecast.seconds(100)
"""

import math
from dataclasses import dataclass
from typing import Any, Dict, List, Optional

from memory_estimator.accuracy import Accuracy
from memory_estimator.calibration import HostConstants
from memory_estimator.common.units import format_bytes, format_seconds
from memory_estimator.estimate import STORE_NOTE, Component, Estimate, estimate
from memory_estimator.host import Host
from memory_estimator.job import Job
from memory_estimator.planner import Price
from memory_estimator.scaling import worker_estimate
from memory_estimator.step.timeline import Group
from memory_estimator.step.training_step import training_step
from models.strides import Resolution3, Shape3

LOGITS_MAPS = 2
"""float32 maps as large as the logits that a validation of whole volumes holds at a time: the
windows' sum, or the axis before, and the whole as a tensor. The scores, which come after, take a
slab of it at a time."""

CASE_BYTES = 1200
"""Of each case of a store in every worker: its place in the file of records and the facts that are
kept in memory, 840 measured, and its number in the orders of four epochs."""

# groups of tensors that a checkpoint holds
SAVED = (Group.WEIGHTS, Group.SLOTS, Group.AVERAGES)


@dataclass(frozen=True)
class Beside:
    """A worker's memory beside the steps of a run, all of it in the upper bound."""

    # of whole volumes; None if the steps see them, or nothing is validated
    volume_shape: Optional[Shape3] = None
    resolution: Resolution3 = (1, 1, 1)  # of the steps' input, as shares of that of the volumes
    copies: int = 0  # of the variables: from before steps were timed, or on another grid
    left_bytes: int = 0  # by coarse steps
    scored_shape: Optional[Shape3] = None
    """Of the largest grid that answers are brought back to when post-processing is decided; None if
    cases are scored on the grid that they are stored on."""
    cases: int = 0  # of the store
    has_ignored: bool = False  # whether the store has voxels that are not to be learnt


def price_of_run(
    constants: HostConstants, accuracy: Accuracy, beside: Beside = Beside(), *, workers: int = 1
) -> Price:
    """The price of jobs on a host as steps of a run: the memory of one worker, the time of all of
    them together."""

    def price(job: Job) -> Estimate:
        saved = sum(tensor.bytes for tensor in training_step(job).resident if tensor.group in SAVED)
        copies = beside.copies * saved
        shape = beside.volume_shape
        volumes = whole_volume_bytes(job, shape, beside.resolution) if shape else 0
        averaged = 0
        if min(beside.resolution) < 1:  # in float32, first the image, then the target
            of_target = job.unet.outputs + beside.has_ignored
            averaged = 4 * math.prod(job.shape) * max(job.unet.channels, of_target)
        answers = 0
        if beside.scored_shape:  # of all regions, and one of them halfway, in float32
            answers = 4 * (job.unet.outputs + 1) * math.prod(beside.scored_shape)
        records = beside.cases * CASE_BYTES // 2**20 * 2**20  # none for a few hundred cases
        twice = "exact: from before the timing, or on another grid"
        scattered = "at most: pages too scattered for maps of full size"
        return worker_estimate(estimate(job, constants, accuracy), workers).with_beside(
            Component("whole volumes", volumes, "derived: of validation"),
            Component("an averaged volume", averaged, "exact: of a sample in preparation"),
            Component("answers on sources' grids", answers, "counted: brought back to be scored"),
            Component("variables, once more", copies, twice),
            Component("left by coarse steps", beside.left_bytes, scattered),
            Component("case records", records, "measured: of each case what is kept in memory"),
        )

    return price


def whole_volume_bytes(job: Job, shape: Shape3, resolution: Resolution3) -> int:
    """Bytes of the whole volumes of `shape` that a validation has beside the steps of a `job`,
    which sees less of them, counted and not measured: with logits and their weights, and at a lower
    resolution averaged down."""
    unet = job.unet
    volume = unet.channels * unet.value_bytes + unet.outputs
    scored = 4 + LOGITS_MAPS * 4 * unet.outputs
    averaged = 0.0
    lower = [share for share in resolution if share < 1]
    if lower:  # a float32 copy, and what it becomes along the first of these axes
        averaged = 4 * unet.channels * (1 + lower[0])
    held = 3 * volume  # in use, ahead, and one in preparation
    return round(math.prod(shape) * (held + scored + averaged))


@dataclass(frozen=True)
class Forecast:
    """Memory and time of a training, by the prices of its steps."""

    full: Estimate
    coarse: Optional[Estimate] = None  # None without a curriculum

    @property
    def upper_bound_bytes(self) -> int:
        """The process's, over the whole run."""
        return max(step.upper_bound_bytes for step in (self.full, self.coarse) if step)

    def seconds(self, steps: int, coarse_steps: int = 0) -> float:
        """Seconds of so many steps, the coarse ones included; validations aside."""
        full_s = (steps - coarse_steps) * self.full.step_s
        if self.coarse is None:
            return full_s
        return coarse_steps * self.coarse.step_s + full_s

    def to_json(self) -> Dict[str, Any]:
        """A step's memory and time, for the log and the report to compare with the measured
        ones."""

        def figures(step: Estimate) -> Dict[str, Any]:
            names = ("allocator_peak_bytes", "process_peak_bytes", "upper_bound_bytes", "step_s")
            return {name: getattr(step, name) for name in names}

        content = figures(self.full)
        content["constants"] = self.full.constants.name
        if self.coarse:
            content["coarse"] = figures(self.coarse)
        return content

    def describe(self, host: Host, all_s: float) -> List[str]:
        """Lines on memory and time; `all_s` are the seconds of all steps."""

        def line(step: Estimate) -> str:
            allocator = f"allocator peak {format_bytes(step.allocator_peak_bytes)}"
            process = f"process peak {format_bytes(step.process_peak_bytes)}"
            return f"{allocator}, {process}, {format_seconds(step.step_s)} a step"

        full = self.full
        steps = [line(full)]
        if self.coarse:
            steps.insert(0, f"coarse steps: {line(self.coarse)}")
        bound = format_bytes(self.upper_bound_bytes)
        basis = full.constants.basis(full.job, host)
        return [
            *steps,
            f"errors: allocator peak {full.error('allocator_peak')}; "
            f"process peak {full.error('process_peak')}; seconds a step {full.error('step_s')}",
            f"up to {bound} of {format_bytes(host.free_bytes)} free ({full.margin})",
            f"{format_seconds(full.volume_s)} a volume, {format_seconds(full.epoch_s)} an epoch, "
            f"{format_seconds(all_s)} in all, validation aside; seconds: {basis}",
            STORE_NOTE,
        ]
