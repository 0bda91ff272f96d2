"""One job's memory and time: the closed form, the allocator and the host's constants put together."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Dict, Optional, Tuple

from memory_estimator.accuracy import Accuracy, load_accuracy
from memory_estimator.allocator import SMALL_BYTES, fits_regions, use
from memory_estimator.calibration import HostConstants
from memory_estimator.closed_form.writer import DTYPE_BYTES
from memory_estimator.components import NEXT_BATCH, Component, bill, resident_bytes
from memory_estimator.job import Job
from memory_estimator.liveness import Timeline, rounded, timeline
from memory_estimator.program import Program, Tensor
from memory_estimator.region import region_bytes
from memory_estimator.timing import step_seconds
from memory_estimator.training_step import training_step, validation_pass

STORE_NOTE = "errors are those of steps given one batch again and again; a store adds some per cent to the peaks"
"""To be said with the errors of a job that a store feeds: what its pipeline does to the allocator is not replayed. In
one run, which was not recorded, the allocator's peak was 4 % and the process's 7 % above the prediction, and below the
upper bound."""

AROUND_SHARE = 0.1
"""Kept free for what surrounds the steps of a run. The demo's process held 11 % more than predicted of its steps."""

RESAMPLED_BYTES = 13
"""Bytes a value that a volume to be rotated takes at its most: three float32 copies and a mask (cpu3d.data.finish)."""


@dataclass(frozen=True)
class Estimate:
    """What one training step of a job takes."""

    job: Job
    allocator_peak_bytes: int
    """Of TensorFlow's allocator: `get_memory_info("CPU:0")["peak"]`, from the third step on."""
    process_peak_bytes: int
    """Resident: VmHWM. Pages of mapped files, which the kernel can drop, are not counted."""
    upper_bound_bytes: int
    """What has to be free: the process's peak and a margin. Where the allocator's regions would not fit the host,
    though the tensors do, it is the memory of a host that they fit."""
    step_s: float
    """Of all the micro-batches of a step, and its update."""
    components: Tuple[Component, ...]
    """The bill, which adds up to `process_peak_bytes`."""
    timeline: Timeline
    accuracy: Accuracy
    constants: HostConstants
    regions_short: bool = False
    """Whether the job would fail for the allocator's regions: they double, and together may take the host's memory."""

    @property
    def volume_s(self) -> float:
        return self.step_s / self.job.batch

    @property
    def epoch_s(self) -> Optional[float]:
        """None where the number of cases is unknown. Whole batches only, as `train` counts them; no validation."""
        return self.step_s * (self.job.cases // self.job.batch) if self.job.cases else None

    @property
    def peak_op(self) -> str:
        """The operation that runs when most is live."""
        return self.timeline.moments[self.timeline.peak].op

    @property
    def largest(self) -> Tuple[Tensor, ...]:
        """The five largest tensors at the peak."""
        return self.timeline.peak_tensors[:5]

    def to_json(self) -> Dict[str, Any]:
        """The figures and what they rest on, as JSON content."""
        bound = self.accuracy
        time = dataclasses.asdict(bound.step_s)
        return {
            "allocator_peak_bytes": self.allocator_peak_bytes,
            "process_peak_bytes": self.process_peak_bytes,
            "upper_bound_bytes": self.upper_bound_bytes,
            "step_s": self.step_s,
            "volume_s": self.volume_s,
            "epoch_s": self.epoch_s,
            "components": [dataclasses.asdict(line) for line in self.components],
            "peak_op": self.peak_op,
            "largest": [{"name": tensor.name, "bytes": tensor.bytes} for tensor in self.largest],
            "errors": {
                "measured": bound.is_measured,
                "allocator_peak_bytes": dataclasses.asdict(bound.allocator_peak),
                "process_peak_bytes": dataclasses.asdict(bound.process_peak),
                "upper_bound_bytes": {
                    "margin_share": bound.margin_share,
                    "margin_bytes": bound.margin_bytes,
                    "exceeded": bound.exceeded,
                    "mean_slack": bound.mean_slack,
                },
                **dict.fromkeys(("step_s", "volume_s", "epoch_s"), time),
                "record": bound.record,
                "configurations": bound.configurations,
            },
            "constants": {
                "name": self.constants.name,
                "origin": self.constants.origin,
                "caveats": self.constants.for_threads(self.job.threads).caveats(),
                "record": self.constants.record,
            },
            "job": {**dataclasses.asdict(self.job), "policy": self.job.policy, "micro_batch": self.job.micro},
        }


def estimate(
    job: Job, constants: HostConstants, accuracy: Optional[Accuracy] = None, host_bytes: Optional[int] = None
) -> Estimate:
    """Memory and time of a step of `job` on a host of these constants. Takes milliseconds, whatever the job's size.

    `host_bytes` is the memory that the host has, free or not: TensorFlow's allocator takes it for its limit. None is
    without end. Raises ValueError where the constants know nothing of the job's engine or dtype.
    Of a job that a store feeds the upper bound is that of its validations too, of volumes as its steps see them.
    Checkpoints are written and read variable by variable, which takes no more than the next step's gradients.
    """
    accuracy, constants = accuracy or load_accuracy(), constants.of(job.engine, job.unet.dtype)
    program = _with_store(_on_host(training_step(job), job, host_bytes), job)
    line = timeline(program)
    allocator = use(program)
    small = sum(rounded(tensor.bytes) for tensor in line.peak_tensors if tensor.bytes < SMALL_BYTES)
    hidden = max(moment.hidden_bytes for moment in line.moments)
    baseline = constants.runtime_bytes(job.engine, program)
    process_peak = baseline + allocator.resident_bytes + small + hidden
    validated = process_peak + allocator.validated_bytes - allocator.resident_bytes
    upper_bound = accuracy.upper_bound(validated) + _preparation_bytes(job) + _around_bytes(job, process_peak)
    # Regions that fit the host's memory are never cut down; a job too large for it anyway needs no second play.
    tight = host_bytes is not None and upper_bound <= host_bytes < allocator.reserved_bytes
    regions_short = tight and not fits_regions(program, host_bytes)
    return Estimate(
        job=job,
        allocator_peak_bytes=allocator.peak_bytes,
        process_peak_bytes=process_peak,
        upper_bound_bytes=allocator.reserved_bytes if regions_short else upper_bound,
        step_s=_step_s(program, constants, job),
        components=tuple(
            bill(
                line,
                overhead_bytes=allocator.resident_bytes + small - sum(map(resident_bytes, line.peak_tensors)),
                hidden_bytes=hidden,
                baseline_bytes=baseline,
                baseline=f"{constants.origin}: {constants.name}",
            )
        ),
        timeline=line,
        accuracy=accuracy,
        constants=constants,
        regions_short=regions_short,
    )


# --- Private helpers ---


def _step_s(program: Program, constants: HostConstants, job: Job) -> float:
    """The program is that of one micro-batch and, at its end, of the update, which comes once a step."""
    times = step_seconds(program, constants, job)
    part = max(index for index, op in enumerate(program.ops) if op.kind != "update") + 1
    return job.parts * sum(times.op_s[:part]) + sum(times.op_s[part:])


def _on_host(program: Program, job: Job, host_bytes: Optional[int]) -> Program:
    """With the region that the trainer takes on a host of so much memory."""
    return dataclasses.replace(program, region_bytes=region_bytes(job.unet, job.shape, job.micro, host_bytes))


def _with_store(program: Program, job: Job) -> Program:
    """A store's pipeline holds the micro-batch that comes next ready while one is computed. Its run is validated."""
    if not job.from_store:
        return program
    image = Tensor("next_image", job.voxels * job.unet.channels * DTYPE_BYTES[job.unet.dtype], NEXT_BATCH)
    target = Tensor("next_target", job.voxels * job.unet.outputs, NEXT_BATCH)
    return dataclasses.replace(program, resident=(*program.resident, image, target), after=validation_pass(job))


def _around_bytes(job: Job, process_peak: int) -> int:
    """What a run has beside its steps and validations and nobody has modelled: mapped pages of the store, its log."""
    return int(AROUND_SHARE * process_peak) if job.from_store else 0


def _preparation_bytes(job: Job) -> int:
    """The volume in preparation while a step runs; counted in the upper bound, as it is gone before most peaks.

    A micro-batch of several is copied together once its volumes are ready, so that it is there twice for a moment.
    """
    if not job.from_store:
        return 0
    volume = job.voxels // job.micro
    values = volume * job.unet.channels
    # Slabs, finished one by one, and the volume that they are put together into.
    value_bytes = RESAMPLED_BYTES if job.resampled else 2 * DTYPE_BYTES[job.unet.dtype]
    ready = job.voxels * (job.unet.channels * DTYPE_BYTES[job.unet.dtype] + job.unet.outputs) if job.micro > 1 else 0
    return values * value_bytes + volume * (4 + job.unet.outputs) + ready
