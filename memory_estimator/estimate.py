"""One job's memory and time, with a bill of its bytes and how far predictions have been off."""

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from memory_estimator.accuracy import Accuracy, Bound, Kind, bound_of_layers, load_accuracy
from memory_estimator.calibration import HostConstants
from memory_estimator.common.units import format_bytes
from memory_estimator.job import Job, stored_bytes
from memory_estimator.step.allocator import SMALL_BYTES, Allocator, Use, use, use_of_run
from memory_estimator.step.layer_step import step_of
from memory_estimator.step.scratch import scratch_bytes
from memory_estimator.step.timeline import (
    Group,
    Program,
    StepOp,
    Tensor,
    Timeline,
    rounded,
    timeline,
)
from memory_estimator.step.timing import step_busy_share, step_seconds
from memory_estimator.step.training_step import validation_pass

STORE_NOTE = (
    "the errors were measured on steps with one repeated batch; "
    "the upper bound also covers data loading, validation and saving"
)
"""Printed with the errors of a job that a store feeds: its pipeline's requests of the allocator are
not replayed."""

RULES: Dict[Group, str] = {
    Group.WEIGHTS: "exact: float32",
    Group.WEIGHTS_PARTS: "exact: copies of the weights that meet one of two joined maps",
    Group.SLOTS: "exact: float32 copies of the trainable weights",
    Group.GRADIENTS: "exact: float32, of each trainable weight that has its gradient by then",
    Group.GRADIENT_SUMS: (
        "exact: a float32 copy of the trainable weights, for the micro-batches of a step"
    ),
    Group.ACTIVATIONS: "derived: the maps that a gradient still reads",
    Group.TRANSIENTS: "derived: maps that only a few operations need",
    Group.SCRATCH: "derived: matrices of Muon",
    Group.INPUT: "exact: images in the compute dtype, targets in one byte",
    Group.NEXT_BATCH: "exact: images in the compute dtype, targets in one byte",
}
"""Groups of tensors, in the order of the bill, and how their sizes are known."""

CONSTANTS = ("name", "instructions", "origin", "record")  # fields that `to_json` names

SCRATCH_RULE = "derived: native operations' buffers, each at its largest"

# groups that live during few operations: the bill names their tensors
NAMED_SINGLY = (Group.TRANSIENTS, Group.SCRATCH)


@dataclass(frozen=True)
class Component:
    """One line of the memory bill: memory of one cause that a process holds when the step is at its
    peak."""

    name: str  # such as "optimizer slots"
    bytes: int
    source: str  # how it is known: "exact", "derived: " and the rule, or "measured: " and where


@dataclass(frozen=True)
class Estimate:
    """Memory and time of one training step of a job."""

    job: Job
    # of TensorFlow's allocator: `get_memory_info("CPU:0")["peak"]`, from the third step on
    allocator_peak_bytes: int
    # Resident: VmHWM. Pages of mapped files, which the kernel can drop, are not counted.
    process_peak_bytes: int
    upper_bound_bytes: int  # memory that must be free: the process's peak and a margin
    step_s: float  # of all the micro-batches of a step, and its update
    busy_share: float  # of the threads' time in operations: else they wait for the largest piece
    components: Tuple[Component, ...]  # the bill, which adds up to `process_peak_bytes`
    timeline: Timeline
    accuracy: Accuracy
    constants: HostConstants
    # held by a run beside its steps, at its most: in the upper bound alone
    extra: Tuple[Component, ...] = ()
    # of the steps at lower resolution before it, in a run; their bound is in this upper bound
    coarse: "Optional[Estimate]" = None
    # of records that covers the job; None if none does, and the upper bound is wide
    kind: Optional[Kind] = None
    uncovered: str = ""  # the setting of the job or its host that was not measured then

    @property
    def volume_s(self) -> float:
        return self.step_s / self.job.batch

    @property
    def epoch_s(self) -> Optional[float]:
        """None if the number of cases is unknown. Whole batches only, as `train` counts them; no
        validation."""
        if not self.job.cases:
            return None
        return self.step_s * (self.job.cases // self.job.batch)

    def with_extra(self, *more: Component) -> "Estimate":
        """The same with more beside the steps; components without bytes are left out."""
        more = tuple(line for line in more if line.bytes)
        bound = self.upper_bound_bytes + sum(line.bytes for line in more)
        return dataclasses.replace(self, extra=(*self.extra, *more), upper_bound_bytes=bound)

    def bound(self, figure: str) -> Optional[Bound]:
        """How far a figure, a field of Kind, was off on steps like this one; None if that was not
        measured."""
        hosts = self.kind.hosts if self.kind else ()
        if figure == "step_s" and (self.constants.scales or self.constants.cpu not in hosts):
            # those of seconds are of the shipped constants, on the hosts that these are of
            return None
        return getattr(self.kind, figure, None)

    def error(self, figure: str) -> str:
        """The `bound` of a figure in words, such as "± 0.4%, worst 2.1%"."""
        bound = self.bound(figure)
        if bound is None:
            return "not measured like this"
        return f"± {bound.median:.1%}, worst {bound.worst:.1%}"

    @property
    def margin(self) -> str:
        """The share and bytes by which the upper bound is above the process's peak, or why it is
        wide."""
        if self.kind:
            least = format_bytes(self.kind.margin_bytes)
            return f"{self.kind.margin_share:.1%} above the process peak, {least} at least"
        return f"a larger margin: nothing similar was measured ({self.uncovered})"

    def to_json(self) -> Dict[str, Any]:
        """The figures, and the records and constants behind them, as JSON content."""
        return {
            "allocator_peak_bytes": self.allocator_peak_bytes,
            "process_peak_bytes": self.process_peak_bytes,
            "upper_bound_bytes": self.upper_bound_bytes,
            "step_s": self.step_s,
            "volume_s": self.volume_s,
            "epoch_s": self.epoch_s,
            "components": [vars(line) for line in self.components],
            "extra": [vars(line) for line in self.extra],
            "peak_op": self.timeline.peak_op,
            "errors": {
                "allocator_peak": self.error("allocator_peak"),
                "process_peak": self.error("process_peak"),
                "step_s": self.error("step_s"),
                "upper_bound": self.margin,
                "records": dataclasses.asdict(self.kind) if self.kind else None,
            },
            "constants": {name: getattr(self.constants, name) for name in CONSTANTS},
            "job": self.job.to_json(),
        }


def estimate(job: Job, constants: HostConstants, accuracy: Optional[Accuracy] = None) -> Estimate:
    """Memory and time of a step of `job` on a host of these constants. For a job that a store feeds
    the bound holds for its validations too. Steps are predicted as native operations of the
    constants' instruction set compute them, or as TensorFlow's layers do where there is none."""
    if accuracy is None:
        accuracy = load_accuracy()
    model = _cost_model(job, constants.instructions)
    program = model.program
    peak = model.timeline
    allocator = model.use
    extra = model.extra
    inside = [tensor for tensor in peak.peak_tensors if tensor not in program.outside]
    small = sum(rounded(tensor.bytes) for tensor in inside if tensor.bytes < SMALL_BYTES)

    def scratch_of(ops: Sequence[StepOp]) -> int:
        return scratch_bytes(ops, job.threads, constants.instructions, constants.l2_bytes)

    scratch = scratch_of(program.ops)
    baseline = constants.runtime_bytes(job.engine, program)
    outside = sum(tensor.bytes for tensor in program.outside)
    process_peak = baseline + allocator.resident_bytes + small + scratch + outside
    validation = allocator.validated_bytes - allocator.resident_bytes
    validation += scratch_of((*program.ops, *program.after)) - scratch
    kind, uncovered = accuracy.covering(job, constants.instructions)
    upper_bound = upper_bound_of(job, constants, accuracy)(process_peak + validation)
    upper_bound += sum(line.bytes for line in extra)
    replayed = "derived: the allocator replayed through one"
    extra = (Component("validation", validation, replayed), *extra)
    overhead = allocator.resident_bytes + small - sum(rounded(tensor.bytes) for tensor in inside)
    bill = (
        *live_at_peak(peak),
        Component("scratch outside the allocator", scratch, SCRATCH_RULE),
        Component("allocator overhead", overhead, "derived: TensorFlow's allocator replayed"),
        Component("runtime baseline", baseline, constants.origins["baseline_bytes"]),
    )
    return Estimate(
        job=job,
        allocator_peak_bytes=allocator.peak_bytes,
        process_peak_bytes=process_peak,
        upper_bound_bytes=upper_bound,
        step_s=step_seconds(program, constants, job),
        busy_share=step_busy_share(program, constants, job),
        components=_with_bytes(bill),
        timeline=peak,
        accuracy=accuracy,
        constants=constants,
        extra=_with_bytes(extra),
        kind=kind,
        uncovered=uncovered,
    )


def upper_bound_of(job: Job, constants: HostConstants, accuracy: Accuracy) -> Callable[[int], int]:
    """What adds the margin of steps like those of `job` to the peak of a process."""
    if not constants.instructions:
        return bound_of_layers
    kind, _ = accuracy.covering(job, constants.instructions)
    return kind.upper_bound if kind else accuracy.widest


def seconds_of_step(job: Job, constants: HostConstants) -> float:
    """Seconds of a step of `job` alone, as of its `estimate`."""
    return step_seconds(step_of(job, constants.instructions), constants, job)


def run_use(steps: Sequence[Estimate]) -> Allocator:
    """TensorFlow's allocator after a run of these steps: those of one
    estimate after those of the other, with validations in between."""
    models = [_cost_model(step.job, step.constants.instructions) for step in steps]
    return use_of_run([model.program for model in models])


@dataclass(frozen=True)
class _CostModel:
    """What follows from a job and a set of instructions alone."""

    program: Program
    extra: Tuple[Component, ...]  # held beside it
    timeline: Timeline
    use: Use


# A plan asks for the steps of a run several times: its policies in turn, its bound, its table.
@functools.lru_cache(maxsize=8)
def _cost_model(job: Job, instructions: str) -> _CostModel:
    """The program of a step, and what is held beside it."""
    program = step_of(job, instructions)
    extra: Tuple[Component, ...] = ()
    if job.from_store:
        program, extra = _with_store(program, job)
        # By layers a validation takes less than a step, as it keeps no maps.
        if instructions:
            program = dataclasses.replace(program, after=validation_pass(job))
    return _CostModel(program, extra, timeline(program), use(program))


def _with_bytes(lines: Sequence[Component]) -> Tuple[Component, ...]:
    return tuple(line for line in lines if line.bytes)


def live_at_peak(line: Timeline) -> List[Component]:
    """The tensors live at the peak, by group and level."""
    bill = []
    for group, source in RULES.items():
        of_group = [tensor for tensor in line.peak_tensors if tensor.group is group]
        for name in sorted({tensor.line for tensor in of_group}):
            tensors = [tensor for tensor in of_group if tensor.line == name]
            size = sum(rounded(tensor.bytes) for tensor in tensors)
            more = ""
            if group in NAMED_SINGLY:
                more = f": {_listed([tensor.name for tensor in tensors])}"
            bill.append(Component(name, size, f"{source}{more}"))
    return bill


def _listed(names: Sequence[str]) -> str:
    """Names of tensors, the largest first."""
    listed = ", ".join(names[:3])
    if len(names) > 3:
        listed += f" and {len(names) - 3} more"
    return listed


def _with_store(program: Program, job: Job) -> Tuple[Program, Tuple[Component, ...]]:
    """The program of a run that a store feeds, which is validated too, with the next micro-batch;
    and memory that is held beside it outside of TensorFlow's allocator, or at moments that are not
    replayed."""
    channels = job.unet.channels
    value_bytes = job.unet.value_bytes
    volume = math.prod(job.shape)
    image = Tensor("next_image", job.voxels * channels * value_bytes, Group.NEXT_BATCH)
    target = Tensor("next_target", job.voxels * job.unet.outputs, Group.NEXT_BATCH)
    prepared = 0  # a sample alone is the next micro-batch
    if job.micro > 1:  # samples are copied into one
        prepared = image.bytes + target.bytes
    if job.reworked:  # in float32, and one channel once more
        prepared += 4 * volume
        if value_bytes < 4:
            prepared += 4 * volume * channels
    files = job.case_bytes or stored_bytes(job.shape, channels)
    if job.mixed:  # another sample, of another case
        prepared += (image.bytes + target.bytes) // job.micro
        files *= 2
    largest = max(tensor.bytes for tensor in program.resident if tensor.group is Group.WEIGHTS)
    mapped = "exact: mapped or read; counted, though the kernel may drop mapped pages"
    twice = "exact: the largest variable, as read and as copied"
    extra = (
        Component("samples in preparation", prepared, "exact: before they are a batch"),
        Component("a case's files", files, mapped),
        Component("saving and restoring", 2 * largest, twice),
    )
    resident = (*program.resident, image, target)
    if job.micro > 1:
        return dataclasses.replace(program, resident=resident), extra
    samples = (Group.INPUT, Group.NEXT_BATCH)
    outside = tuple(tensor for tensor in resident if tensor.group in samples)
    before = tuple(op for op in program.before if op.writes and op.writes[0].group not in samples)
    return dataclasses.replace(program, resident=resident, before=before, outside=outside), extra
