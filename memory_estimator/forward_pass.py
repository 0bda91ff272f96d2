"""Predicts what the network takes to answer on a volume: forward alone, with nothing kept for a
backward pass."""

from dataclasses import dataclass

from memory_estimator.calibration import HostConstants
from memory_estimator.job import Job
from memory_estimator.step.allocator import use
from memory_estimator.step.scratch import scratch_bytes
from memory_estimator.step.timeline import Group, Program
from memory_estimator.step.timing import step_seconds
from memory_estimator.step.training_step import training_step, validation_pass

NEEDED = (Group.WEIGHTS, Group.INPUT)


@dataclass(frozen=True)
class ForwardPass:
    """Memory and time of the network's pass over a volume or a window."""

    bytes: int  # beside a process that has imported TensorFlow; taken until it ends
    seconds: float


def forward_pass(job: Job, constants: HostConstants) -> ForwardPass:
    """The pass over a volume of the shape of `job`, as native operations compute it."""
    resident = tuple(each for each in training_step(job).resident if each.group in NEEDED)
    program = Program(resident, validation_pass(job))
    scratch = scratch_bytes(program.ops, job.threads, constants.instructions, constants.l2_bytes)
    graph = constants.runtime_bytes(job.engine, program) - constants.baseline_bytes[job.engine]
    taken = use(program).resident_bytes + scratch + graph
    return ForwardPass(taken, step_seconds(program, constants, job))
