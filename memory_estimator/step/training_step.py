"""The training step of `cpu3d.training.learner`, written down from the layer plan with the lifetimes of its tensors.

Targets cast, forward, loss, backward in reverse (in the order that `models/ordered.py` fixes), update. Where memory is
saved, blocks take the place of their layers. Of a batch in micro-batches the program is one of them, and the update. A
validation is the forward part alone, without policy, and its scores.
"""

from dataclasses import replace
from typing import Any, Tuple

from memory_estimator.job import Job
from memory_estimator.step import blocks, layers, slabs
from memory_estimator.step.onednn import USUAL, Kernels
from memory_estimator.step.program import Program, StepOp
from memory_estimator.step.scratch import Buffers
from memory_estimator.step.writer import Writer
from models.layer_plan import PIECES

SCORE_MAPS = 5  # float32 maps of a slab that is scored: logits, target, three of the loss's


RULES = {"block": blocks, "slabs": slabs}  # kind of a step -> the module of its passes; else layers


def training_step(job: Job, kernels: Kernels = USUAL) -> Program:
    """The program of `job` with these kernels of oneDNN. Raises ValueError for a shape that the network cannot take."""
    writer = Writer(job, kernels)
    steps = {"speed": layers, "balanced": blocks, "lean": slabs}[job.policy].steps(writer)

    def place(op: Any) -> int:
        """Every head behind its decoder."""
        decoder = f"decoder{op.level}" if op.kind == "head" else op.name
        return max(index for index, other in enumerate(steps) if other.name.startswith(decoder))

    forward = sorted((op for op in steps if op.kind != "input"), key=place)
    heads = [op for op in forward if op.kind == "head"]
    coarse = [op for op in heads if op.level]
    writer.reset_sums()
    for head in heads:
        layers.cut_target(writer, head)
    if job.policy != "lean":
        layers.cast_target(writer, writer.layers["head"])
    for op in forward:
        RULES.get(op.kind, layers).forward(writer, op)
    # From the finest head down. TensorFlow puts the coarse heads off until the finest decoder is done.
    others = [op for op in reversed(forward) if op not in coarse]
    finest = [op for op in others if op.name.startswith(("head", "decoder0"))]
    for op in (*finest, *coarse, *others[len(finest) :]):
        if op in coarse:
            layers.cast_target(writer, op)
        if op.kind == "head":
            layers.loss(writer, op)
        RULES.get(op.kind, layers).backward(writer, op)
    writer.update()
    return writer.program()


def validation_pass(job: Job, kernels: Kernels = USUAL) -> Tuple[StepOp, ...]:
    """What `cpu3d.training.validation` does with a volume or a window: the layers one after the other, level 0 in slabs
    if the policy is that, and the scores. Nothing is kept for a gradient. Beside what lives between steps, the held-out
    volume that comes next is ready."""
    in_slabs = job.policy == "lean"
    unet = replace(job.unet, policy="lean" if in_slabs else "speed", deep_supervision=False)
    writer = Writer(replace(job, unet=unet, batch=1, micro_batch=1), kernels)
    ready = [writer.tensor(f"validation/{tensor.name}", tensor.bytes, "input") for tensor in writer.resident[-2:]]
    writer.run("validation/next", "pointwise", [], ready)
    for op in slabs.steps(writer, learning=False) if in_slabs else writer.plan:
        if op.kind != "input":
            RULES.get(op.kind, layers).forward(writer, op)
    maps = SCORE_MAPS * 4 * writer.job.voxels * unet.outputs // PIECES
    reads = [writer.plan[-1].name, "target", *(tensor.name for tensor in ready)]
    writer.run("validation/score", "reduce", reads, buffers=Buffers(scratch=(maps,)))
    # The compiled pass is another graph than the step's, and keeps its own copies of the weights.
    return tuple(
        replace(op, keeps=tuple(replace(kept, name=f"validation/{kept.name}") for kept in op.keeps))
        for op in writer.program().ops
    )
