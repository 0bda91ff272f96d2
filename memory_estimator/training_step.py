"""The closed form: the training step of `cpu3d.training.learner`, written down from the layer plan with lifetimes.

Whatever the network, the step is the same five parts: targets cast, forward, loss, backward in reverse, update.
`models/ordered.py` fixes the order of the backward pass; which gradient reads what follows from the layer's kind, by
the rules in closed_form/. Where memory is saved, blocks take the place of their layers. Of a batch that is computed in
micro-batches the program is one of them, and the update that follows the last.

A validation is the forward part alone, without policy, and its scores.
"""

from dataclasses import replace
from typing import Any, Callable, Dict, List, Sequence, Tuple

from memory_estimator.before_step import inputs_made
from memory_estimator.closed_form import convolutions, lean, maps, norms
from memory_estimator.closed_form.loss import SLABS, cast_target, cut_target, loss
from memory_estimator.closed_form.weights import add_to_sums, make_weights, update
from memory_estimator.closed_form.writer import Writer
from memory_estimator.job import Job
from memory_estimator.program import Program, StepOp

Rule = Callable[[Writer, Any], None]
"""Writes down what a layer, or a block, does in one direction."""

RULES: Dict[str, Tuple[Rule, Rule]] = {
    "conv": (convolutions.forward, convolutions.backward),
    "head": (convolutions.forward, convolutions.head_backward),
    "up_conv": (convolutions.up_forward, convolutions.up_backward),
    "shortcut": (convolutions.shortcut_forward, convolutions.shortcut_backward),
    "norm_act": (norms.forward, norms.backward),
    "norm": (norms.forward, norms.backward),
    "act": (maps.relu_forward, maps.relu_backward),
    "pool": (maps.pool_forward, maps.pool_backward),
    "concat": (maps.concat_forward, maps.concat_backward),
    "upsample": (maps.upsample_forward, maps.upsample_backward),
    "block": (lean.forward, lean.backward),
}
"""Kind of layer -> its rules, forward and backward. The input has none."""


def training_step(job: Job) -> Program:
    """The program of `job`. Raises ValueError for a shape that the network cannot take."""
    writer = Writer(job)
    steps = writer.plan if job.policy == "speed" else lean.in_blocks(writer)
    layers = _way_there([op for op in steps if op.kind != "input"])
    heads = [op for op in layers if op.kind == "head"]

    make_weights(writer)
    _make_inputs(writer)

    for head in heads:
        cut_target(writer, head)
    cast_target(writer, heads[-1])
    for op in layers:
        _rules(op)[0](writer, op)
    for op in _way_back(layers):
        if op.kind == "head":
            if op is not heads[-1]:
                cast_target(writer, op)
            loss(writer, op)
        _rules(op)[1](writer, op)
    if job.parts > 1:
        add_to_sums(writer)
    update(writer)
    return writer.program()


SCORE_MAPS = 5
"""float32 maps of a slab of the regions that `cpu3d.training.validation` scores at a time: logits, target, three of the
loss's; hard Dice's masks and their float32 copies are no more."""


def validation_pass(job: Job) -> Tuple[StepOp, ...]:
    """What `cpu3d.training.validation` does with a volume or a window: the layers one after the other, and the scores.

    Nothing is kept for a gradient. Beside what lives between steps, the held-out volume that comes next is ready.
    """
    unet = replace(job.unet, policy="speed", deep_supervision=False)
    writer = Writer(replace(job, unet=unet, batch=1, micro_batch=1))
    make_weights(writer)
    _make_inputs(writer)
    ready = [writer.tensor(f"validation/{tensor.name}", tensor.bytes, "input") for tensor in writer.resident[-2:]]
    writer.run("validation/next", "pointwise", [], ready)
    for op in writer.plan[1:]:
        _rules(op)[0](writer, op)
    maps = SCORE_MAPS * 4 * writer.job.voxels * unet.outputs // SLABS
    reads = [writer.plan[-1].name, "target", *(tensor.name for tensor in ready)]
    writer.run("validation/score", "reduce", reads, scratch=[maps])
    # The compiled pass is another graph than the step's, and keeps its own copies of the weights.
    return tuple(
        replace(op, keeps=tuple(replace(kept, name=f"validation/{kept.name}") for kept in op.keeps))
        for op in writer.program().ops
    )


# --- Private helpers ---


def _way_there(layers: Sequence[Any]) -> List[Any]:
    """Every head behind its decoder."""

    def place(op: Any) -> int:
        decoder = f"decoder{op.level}" if op.kind == "head" else op.name
        return max(index for index, other in enumerate(layers) if other.name.startswith(decoder))

    return sorted(layers, key=place)


def _way_back(layers: Sequence[Any]) -> List[Any]:
    """From the finest head down. TensorFlow puts the coarse heads off until the finest decoder is done."""
    *coarse, finest = (op for op in layers if op.kind == "head")
    others = [op for op in reversed(layers) if op.kind != "head"]
    decoder = [op for op in others if op.name.startswith("decoder0")]
    return [finest, *decoder, *coarse, *others[len(decoder) :]]


def _rules(op: Any) -> Tuple[Rule, Rule]:
    if op.kind not in RULES:
        raise ValueError(f"{op.name} must be of a kind that has rules, got {op.kind!r}; add them to RULES")
    return RULES[op.kind]


def _make_inputs(writer: Writer) -> None:
    """One batch, which every step is given again."""
    unet, voxels = writer.job.unet, writer.job.voxels
    image = writer.tensor("image", writer.compute_bytes * voxels * unet.channels, "input")
    target = writer.tensor("target", voxels * unet.outputs, "input")
    writer.before += inputs_made([(image, unet.dtype), (target, "uint8")])
    writer.resident += [image, target]
