"""Seconds of a training step: every operation by its work and its traffic, at the speed of the host's own calibration.

On top comes a constant for every operation, for what TensorFlow does between them.
"""

import math
from typing import Dict, List, Mapping, Tuple

from memory_estimator.calibration import HostConstants
from memory_estimator.job import Job
from memory_estimator.step.program import Program, StepOp
from memory_estimator.step.scratch import VECTOR

CONVOLUTIONS = {
    "conv": ("out", "in"),
    "conv_filter_gradient": ("out", "in"),
    "conv_input_gradient": ("in", "out"),
    "up_conv": ("out", "in"),
    "up_conv_filter_gradient": ("out", "in"),
    "up_conv_input_gradient": ("in", "out"),
}
"""Kind -> which channels of the layer its kernel writes, and which it reads."""

FUSED = "fused"  # kind of what the operation before it does on the way, which takes no time of its own


def op_seconds(program: Program, constants: HostConstants, job: Job) -> Tuple[float, ...]:
    """What each operation of a step takes from the third on. Raises ValueError for an engine or dtype without costs."""
    constants = constants.for_threads(job.threads)
    speeds, cache_bytes = constants.speeds(job.engine, job.unet.dtype), constants.cache_bytes
    sizes = tensor_bytes(program)
    op_s: List[float] = []
    for op in program.ops:
        if op.kind == FUSED:
            op_s.append(0.0)
            continue
        group = group_of(op)
        counted = features(op, sizes, cache_bytes)
        seconds = sum(speeds[group].get(name, 0.0) * amount for name, amount in counted.items())
        if group in CONVOLUTIONS:
            # A 1x1x1 convolution does too little for the above: it is as slow as its traffic.
            passing = speeds["join"]["traffic" if op.traffic_bytes > cache_bytes else "cached"]
            seconds = max(seconds, op.traffic_bytes * passing)
        op_s.append(seconds + speeds["every_op"]["seconds"])
    return tuple(op_s)


def step_seconds(program: Program, constants: HostConstants, job: Job) -> float:
    """Of a whole step of `job`, whose program is that of one micro-batch and, at its end, of the update."""
    op_s = op_seconds(program, constants, job)
    part = max(index for index, op in enumerate(program.ops) if op.kind != "update") + 1
    return job.parts * sum(op_s[:part]) + sum(op_s[part:])


def group_of(op: StepOp) -> str:
    """What an operation's speed is looked up by: its kind, but for the network's two ends, whose channels are few."""
    layer = op.name.partition("/")[0]
    if op.kind in CONVOLUTIONS:
        if "image" in op.reads:
            return f"first_{op.kind}"
        return f"head_{op.kind}" if layer.startswith("head") else op.kind
    if op.kind in ("pointwise", "reduce"):
        return "loss" if layer.startswith(("head", "target")) else "pointwise"
    return op.kind


def features(op: StepOp, sizes: Mapping[str, int], cache_bytes: int) -> Dict[str, float]:
    """What is counted of an operation. Names that begin with "work" are multiply-adds, the others are bytes.

    work          at full vectors: what is written is rounded up to whole vectors of channels
    work/out      over the vectors written, and over their square: a kernel that writes few loads its inputs again
    work/in       over the vectors read
    work, narrowing, narrow   where more channels are read than written; where either is less than a vector
    work, odd     of filter gradients, which write two vectors at a time, where an odd number of several is written
    kernel        read or written once and bound to no grid
    moved         read and written, of a convolution; of others "traffic" if too large for the cache, else "cached"
    """
    if op.kind not in CONVOLUTIONS:
        moved = op.traffic_bytes
        if group_of(op) == "loss" and op.writes:  # slab by slab, of whole maps
            most = op.writes[0].bytes
            moved = sum(tensor.bytes for tensor in op.writes) + sum(min(sizes[name], most) for name in op.reads)
        work = {"work": float(op.flops)} if op.flops else {}  # of Muon's matrices
        return {("traffic" if moved > cache_bytes else "cached"): float(moved), **work}
    channels = {"in": op.in_channels, "out": op.out_channels}
    written, read = (channels[side] for side in CONVOLUTIONS[op.kind])
    out_vectors, in_vectors = (max(1, math.ceil(number / VECTOR)) for number in (written, read))
    work = op.flops * out_vectors * VECTOR / written
    # Of the kernel that a convolution reads, or of the gradient that it writes.
    gradient = op.kind.endswith("filter_gradient")
    kernel = op.writes[0].bytes if gradient else sum(sizes[name] for name in op.reads if "/kernel" in name)
    if group_of(op) != op.kind:
        return {"work": work, "moved": float(op.traffic_bytes)}
    return {
        "work": work,
        "work/out": work / out_vectors,
        "work/out^2": work / out_vectors**2,
        "work/in": work / in_vectors,
        "work/out^2/in": work / out_vectors**2 / in_vectors,
        "work, narrowing": work if written < read else 0.0,
        "work, narrow": work if min(written, read) < VECTOR else 0.0,
        "work, odd": work if gradient and out_vectors > 1 and out_vectors % 2 else 0.0,
        "kernel": float(kernel),
        "moved": float(op.traffic_bytes),
    }


def tensor_bytes(program: Program) -> Dict[str, int]:
    """Every tensor's size by its name."""
    made = (tensor for op in program.ops for tensor in (*op.writes, *op.keeps))
    return {tensor.name: tensor.bytes for tensor in (*program.resident, *made)}
