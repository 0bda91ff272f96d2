"""The closed form: the training step of `cpu3d.learner`, written down from the layer plan with its tensors' lifetimes.

Whatever the network, the step is the same five parts: targets cast, forward, loss, backward in reverse, update.
`models/ordered.py` fixes the order of the backward pass; which gradient reads what follows from the layer's kind, by
the rules in closed_form/.
"""

from typing import Callable, Dict, Tuple

from memory_estimator.before_step import inputs_made
from memory_estimator.closed_form import convolutions, maps, norms
from memory_estimator.closed_form.loss import cast_target, loss
from memory_estimator.closed_form.weights import make_weights, update
from memory_estimator.closed_form.writer import Writer
from memory_estimator.job import Job
from memory_estimator.program import Program
from models.layer_plan import LayerOp

Rule = Callable[[Writer, LayerOp], None]
"""Writes down what a layer does in one direction."""

RULES: Dict[str, Tuple[Rule, Rule]] = {
    "conv": (convolutions.forward, convolutions.backward),
    "head": (convolutions.forward, convolutions.backward),
    "up_conv": (convolutions.up_forward, convolutions.up_backward),
    "shortcut": (convolutions.shortcut_forward, convolutions.shortcut_backward),
    "norm_act": (norms.forward, norms.backward),
    "norm": (norms.forward, norms.backward),
    "act": (maps.relu_forward, maps.relu_backward),
    "pool": (maps.pool_forward, maps.pool_backward),
    "concat": (maps.concat_forward, maps.concat_backward),
    "upsample": (maps.upsample_forward, maps.upsample_backward),
}
"""Kind of layer -> its rules, forward and backward. The input has none."""


def training_step(job: Job) -> Program:
    """The program of `job`. Raises ValueError for a shape that the network cannot take."""
    writer = Writer(job)
    layers = [op for op in writer.plan if op.kind != "input"]
    rules = [_rules(op) for op in layers]
    heads = [op for op in layers if op.kind == "head"]

    make_weights(writer)
    _make_inputs(writer)

    for head in heads:
        cast_target(writer, head)
    for op, (forward, _) in zip(layers, rules):
        forward(writer, op)
    for head in heads:
        loss(writer, head)
    for op, (_, backward) in zip(reversed(layers), reversed(rules)):
        backward(writer, op)
    update(writer)
    return writer.program()


# --- Private helpers ---


def _rules(op: LayerOp) -> Tuple[Rule, Rule]:
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
