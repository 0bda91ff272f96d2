"""One job's memory and time: the step on paper, the allocator and the host's constants put together.

With it go the bill, which says what every byte of the process's peak is, and how far predictions have been off.
"""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple, Union

from memory_estimator.calibration import HostConstants
from memory_estimator.files import read_json, typed
from memory_estimator.job import DTYPE_BYTES, Job
from memory_estimator.step.allocator import SMALL_BYTES, fits_regions, region_bytes, use
from memory_estimator.step.onednn import Kernels
from memory_estimator.step.program import Program, Tensor, Timeline, rounded, timeline
from memory_estimator.step.timing import step_seconds
from memory_estimator.step.training_step import training_step, validation_pass
from models.layer_plan import Shape3

SHIPPED = Path(__file__).with_name("accuracy.json")

STORE_NOTE = "errors are those of steps given one batch again and again; a store adds some per cent to the peaks"
"""Stands with the errors of a job that a store feeds: what its pipeline does to the allocator is not replayed. In one
run the allocator's peak was 4 % and the process's 7 % above the prediction, and below the upper bound."""

AROUND_SHARE = 0.1
"""Kept free for what surrounds the steps of a run. The demo's process held 11 % more than predicted of its steps."""

RESAMPLED_BYTES = 13
"""Bytes a value that a volume to be rotated takes at its most: three float32 copies and a mask (cpu3d.data.finish)."""

LOGITS_MAPS = 2
"""float32 maps as large as the logits that a validation of whole volumes holds at a time: what the windows have given,
or the axis before, and the whole as a tensor. The scores, which come after, take a slab of it at a time."""

NEXT_BATCH = "input pipeline, next batch"  # the group of what a store holds ready

RULES: Dict[str, str] = {
    "weights": "exact: float32",
    "weights, bfloat16 copies": "exact: copies that the convolutions read",
    "weights, parts": "exact: copies that convolutions of one of two joined maps read",
    "weights, reordered": "exact: copies that the convolutions read",
    "optimizer slots": "exact: float32 copies of the trainable weights",
    "averaged weights": "exact: a float32 copy of the trainable weights",
    "gradients": "exact: float32, one a trainable weight that has it by then",
    "gradient sums": "exact: a float32 copy of the trainable weights, for the micro-batches of a step",
    "activations": "derived: the maps that a gradient still reads",
    "transients": "derived: the maps on their way down the backward pass",
    "scratch": "derived: oneDNN's buffers for this operation",
    "input": "exact: images in the compute dtype, targets in one byte",
    NEXT_BATCH: "exact: images in the compute dtype, targets in one byte",
}
"""What `Tensor.group` may name, in the order of the bill, and how it is known; some are split by level."""

NAMED_SINGLY = ("transients", "scratch")
"""Groups that live during few operations alone: the bill says which tensors they are."""


@dataclass(frozen=True)
class Bound:
    """Errors as shares of what was measured, without their signs."""

    median: float
    worst: float


@dataclass(frozen=True)
class Accuracy:
    """What held over the measured configurations: the content of accuracy.json."""

    record: str  # the file that the errors were computed from
    configurations: int  # measured steps that no constant was fitted to; with 0 the figures below are no errors
    allocator_peak: Bound
    process_peak: Bound
    step_s: Bound
    margin_share: float  # of the process's peak: with `margin_bytes` what the upper bound lies above it
    margin_bytes: int

    def upper_bound(self, process_peak_bytes: int) -> int:
        """What has to be free for a predicted peak: the peak and the margin."""
        return math.ceil(process_peak_bytes * (1 + self.margin_share)) + self.margin_bytes

    def error(self, name: str) -> str:
        """A figure's error for printing, such as "± 0.4%, worst 2.1%"; `name` is that of a field."""
        bound = getattr(self, name)
        return f"± {bound.median:.1%}, worst {bound.worst:.1%}" if self.configurations else "error not measured"


def load_accuracy(path: Union[str, Path] = SHIPPED) -> Accuracy:
    """Read the shipped digest of the validation record. Raises ValueError for a damaged file."""
    try:
        return typed(read_json(path), Accuracy)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"accuracy {path} must be complete JSON, got {error}; restore it, or write it anew from the record"
        ) from None


@dataclass(frozen=True)
class Component:
    """One line of the memory bill: what a process holds when the step is at its peak, grouped by cause."""

    name: str  # such as "optimizer slots"
    bytes: int
    source: str  # how it is known: "exact", "derived: " and the rule, or "measured: " and where


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
    step_s: float  # of all the micro-batches of a step, and its update
    components: Tuple[Component, ...]  # the bill, which adds up to `process_peak_bytes`
    timeline: Timeline
    accuracy: Accuracy
    constants: HostConstants
    regions_short: bool = False
    """Whether the job would fail for the allocator's regions: they double, and together may take the host's memory."""

    @property
    def volume_s(self) -> float:
        """Seconds a volume."""
        return self.step_s / self.job.batch

    @property
    def epoch_s(self) -> Optional[float]:
        """None where the number of cases is unknown. Whole batches only, as `train` counts them; no validation."""
        return self.step_s * (self.job.cases // self.job.batch) if self.job.cases else None

    def to_json(self) -> Dict[str, Any]:
        """The figures and what they rest on, as JSON content."""
        bound = self.accuracy
        names = ("allocator_peak_bytes", "process_peak_bytes", "upper_bound_bytes", "step_s", "volume_s", "epoch_s")
        return {
            **{name: getattr(self, name) for name in names},
            "components": [vars(line) for line in self.components],
            "peak_op": self.timeline.peak_op,
            "errors": {
                "measured": bound.configurations > 0,
                "allocator_peak_bytes": vars(bound.allocator_peak),
                "process_peak_bytes": vars(bound.process_peak),
                "upper_bound_bytes": {name: getattr(bound, name) for name in ("margin_share", "margin_bytes")},
                **dict.fromkeys(("step_s", "volume_s", "epoch_s"), vars(bound.step_s)),
                **{name: getattr(bound, name) for name in ("record", "configurations")},
            },
            "constants": {name: getattr(self.constants, name) for name in ("name", "origin", "record")},
            "job": self.job.to_json(),
        }


def estimate(
    job: Job, constants: HostConstants, accuracy: Optional[Accuracy] = None, host_bytes: Optional[int] = None
) -> Estimate:
    """Memory and time of a step of `job` on a host of these constants. Takes milliseconds, whatever the job's size.

    `host_bytes` is the memory that the host has, free or not, which is the limit of TensorFlow's allocator; None is
    without end. Of a job that a store feeds the upper bound is that of its validations too. Raises ValueError where the
    constants know nothing of the job's engine or dtype.
    """
    accuracy, constants = accuracy or load_accuracy(), constants.of(job.engine, job.unet.dtype)
    region = region_bytes(job.unet, job.shape, job.micro, host_bytes)
    program, prepared = dataclasses.replace(training_step(job, constants.kernels), region_bytes=region), 0
    if job.from_store:
        program, prepared = _with_store(program, job, constants.kernels)
    line = timeline(program)
    allocator = use(program)
    small = sum(rounded(tensor.bytes) for tensor in line.peak_tensors if tensor.bytes < SMALL_BYTES)
    hidden = max(op.hidden_bytes for op in program.ops)
    baseline = constants.runtime_bytes(job.engine, program)
    process_peak = baseline + allocator.resident_bytes + small + hidden
    validated = process_peak + allocator.validated_bytes - allocator.resident_bytes
    upper_bound = accuracy.upper_bound(validated) + prepared
    # What a run has beside its steps and validations and is not modelled: mapped pages of the store, its log.
    upper_bound += int(AROUND_SHARE * process_peak) if job.from_store else 0
    # Regions that fit the host's memory are never cut down; a job too large for it anyway needs no second play.
    tight = host_bytes is not None and upper_bound <= host_bytes < allocator.reserved_bytes
    regions_short = tight and not fits_regions(program, host_bytes)
    overhead = allocator.resident_bytes + small - sum(map(_resident_bytes, line.peak_tensors))
    baseline_origin = constants.origins["baseline_bytes"].partition(":")[0]
    around = (
        Component("scratch outside the allocator", hidden, "derived: oneDNN's buffers, at their largest"),
        Component("allocator overhead", overhead, "derived: TensorFlow's allocator replayed"),
        Component("runtime baseline", baseline, f"{baseline_origin}: {constants.name}"),
    )
    return Estimate(
        job=job,
        allocator_peak_bytes=allocator.peak_bytes,
        process_peak_bytes=process_peak,
        upper_bound_bytes=allocator.reserved_bytes if regions_short else upper_bound,
        step_s=step_seconds(program, constants, job),
        components=tuple(part for part in (*live_at_peak(line), *around) if part.bytes),
        timeline=line,
        accuracy=accuracy,
        constants=constants,
        regions_short=regions_short,
    )


def whole_volume_bytes(job: Job, shape: Shape3, resolution: float) -> int:
    """What whole volumes of `shape` take beside the steps of a `job` that sees less of them, counted and not measured.

    Patches (resolution 1): a validation alone reads whole volumes; its logits and their weights come with them. At a
    lower resolution the steps are fed by whole volumes too, a micro-batch of them at a time; they are rotated before
    they are averaged down, and that is done in float32, along one axis after another.
    """
    unet, volumes, shrinking = job.unet, 3, 0.0
    if resolution < 1:
        volumes = 2 * job.micro + 1
        shrinking = job.micro * 4 * unet.channels * (1 + resolution)
        shrinking += RESAMPLED_BYTES * unet.channels if job.resampled else 0
    volume = unet.channels * DTYPE_BYTES[unet.dtype] + unet.outputs  # in use, ahead, and one in preparation
    validation = 4 + LOGITS_MAPS * 4 * unet.outputs
    return round(math.prod(shape) * (volumes * volume + validation + shrinking))


def live_at_peak(line: Timeline) -> List[Component]:
    """The tensors live at the peak, by group. Raises ValueError for a tensor of no group in RULES."""
    groups: Dict[str, List[Tensor]] = {}
    for tensor in line.peak_tensors:
        groups.setdefault(tensor.group, []).append(tensor)
    order, found = list(RULES), []
    for group, tensors in groups.items():
        rule = group.partition(", level ")[0]
        if rule not in RULES:
            raise ValueError(f"group must be one of {', '.join(RULES)}, got {group!r}; declare it in RULES")
        source = RULES[rule]
        if group in NAMED_SINGLY:
            names = [tensor.name for tensor in sorted(tensors, key=lambda tensor: -tensor.bytes)]
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            source = f"{source}: {', '.join(names[:3])}{more}"
        found.append((order.index(rule), group, Component(group, sum(map(_resident_bytes, tensors)), source)))
    return [component for _, _, component in sorted(found, key=lambda one: one[:2])]


def _with_store(program: Program, job: Job, kernels: Kernels) -> Tuple[Program, int]:
    """The program of a run that a store feeds, which is validated too, with the next micro-batch; and the bytes of the
    volume in preparation, slabs and what they are put together into, of several volumes a copy, for the upper bound."""
    channels, outputs, value_bytes = job.unet.channels, job.unet.outputs, DTYPE_BYTES[job.unet.dtype]
    image = Tensor("next_image", job.voxels * channels * value_bytes, NEXT_BATCH)
    target = Tensor("next_target", job.voxels * outputs, NEXT_BATCH)
    volume, slabs = math.prod(job.shape), RESAMPLED_BYTES if job.resampled else 2 * value_bytes
    prepared = volume * (channels * slabs + 4 + outputs) + (image.bytes + target.bytes if job.micro > 1 else 0)
    resident = (*program.resident, image, target)
    return dataclasses.replace(program, resident=resident, after=validation_pass(job, kernels)), prepared


def _resident_bytes(tensor: Tensor) -> int:
    """What of a tensor lies in memory: all of it, but for scratch that is written in part."""
    return sum(last - first for first, last in tensor.touched) if tensor.touched else rounded(tensor.bytes)
