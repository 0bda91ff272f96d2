"""Seconds of a training step: every operation by its work and its traffic, at the speed of the
host's own calibration.

On top comes a constant for every operation, for TensorFlow's work between them. With many threads
the pieces that a native operation is cut into are not equally large: some threads wait for others.
"""

from typing import Dict, Tuple

from memory_estimator.calibration import FEATURES, WORK, HostConstants
from memory_estimator.job import Job
from memory_estimator.step.scratch import busy_share
from memory_estimator.step.timeline import Program, StepOp

LANES = 16  # channels are written in blocks of so many
FEWEST = 4  # and read in blocks of so many


def op_seconds(program: Program, constants: HostConstants, job: Job) -> Tuple[float, ...]:
    """Seconds of each operation of a step."""
    speeds = constants.speeds(job)
    overhead_s = speeds["every_op"]["seconds"]
    seconds = []
    for op in program.ops:
        op_s = overhead_s
        for feature, amount in features(op).items():
            cost = speeds[op.kind][feature]
            if feature in WORK:
                cost *= busy_share(op, constants.threads, constants.instructions)
                cost /= busy_share(op, job.threads, constants.instructions)
            op_s += cost * amount
        seconds.append(op_s)
    return tuple(seconds)


def step_busy_share(program: Program, constants: HostConstants, job: Job) -> float:
    """`busy_share` over the work of a step."""
    speeds = constants.speeds(job)
    even_s = 0.0
    cut_s = 0.0
    for op in program.ops:
        costs = features(op).items()
        op_s = sum(speeds[op.kind][name] * amount for name, amount in costs if name in WORK)
        even_s += op_s
        cut_s += op_s / busy_share(op, job.threads, constants.instructions)
    return even_s / cut_s if cut_s else 1.0


def step_seconds(program: Program, constants: HostConstants, job: Job) -> float:
    """Seconds of a step of `job`, whose program is that of one micro-batch and, at its end, of the
    update."""
    op_s = op_seconds(program, constants, job)
    end = max(index for index, op in enumerate(program.ops) if op.kind != "update") + 1
    return job.micro_batches * sum(op_s[:end]) + sum(op_s[end:])


def features(op: StepOp) -> Dict[str, float]:
    """FEATURES of an operation and their amounts.

    work          multiply-adds, counted as 2, with the channels of a 3x3x3 convolution rounded up
                  to whole blocks
    work, values  of maps that such a convolution reads and writes, to be formed and transformed
    traffic       bytes read and written
    """
    counted = {"traffic": float(op.traffic_bytes), "work": float(op.flops)}
    if "work, values" in FEATURES[op.kind]:
        read = -(-op.in_channels // FEWEST) * FEWEST
        written = -(-op.out_channels // LANES) * LANES
        voxels = op.flops / (54 * op.in_channels * op.out_channels)
        counted = {"work": 54 * voxels * read * written, "work, values": voxels * (read + written)}
    return {feature: counted[feature] for feature in FEATURES[op.kind]}
