"""One block that makes its maps again: its gradients, what it keeps, and that it makes nothing before it is due."""

import collections

import numpy as np
import pytest
import tensorflow as tf

from models.config import UNetConfig
from models.unet3d import block as block_of

GRID = (8, 6, 4)


def block(config, kind, samples):
    """A model of one block of `kind`, "encoder" or "decoder", with weights unlike the first ones; and its inputs."""
    rng = np.random.default_rng(0)
    skip, below = (config.encoder_widths(level)[1] for level in (0, 1))
    given = [tf.keras.Input((*GRID, config.channels if kind == "encoder" else skip), samples)]
    if kind == "decoder":
        given.append(tf.keras.Input((*(n // 2 for n in GRID), below), samples))
    model = tf.keras.Model(given, block_of(config, kind, 0, *given))
    model.set_weights([weight + rng.normal(0, 0.1, weight.shape) for weight in model.get_weights()])
    return model, [tf.constant(rng.normal(1, 1, (samples or 2, *one.shape[1:])), tf.float32) for one in given]


def step(model):
    """Inputs -> output and gradients of inputs and weights."""

    @tf.function(input_signature=[[tf.TensorSpec(one.shape) for one in model.inputs]])
    def function(inputs):
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            output = model(inputs, training=True)
        # Not linear in the output: a norm would take that out, and it would not wait for the output.
        upstream = output**2 - output
        return [output, *tape.gradient(output, [*inputs, *model.trainable_variables], upstream)]

    return function


def assert_alike(found, expected):
    assert found.shape == expected.shape
    assert tf.norm(found - expected) <= 1e-5 * tf.norm(expected)


VARIANTS = [
    ("encoder", 1, {}),
    ("encoder", 2, {"norm": "batch", "residual": True}),
    ("decoder", 2, {"residual": True, "up": "upsampling"}),
    ("decoder", 1, {"norm": "none", "network": "cicek2016"}),
]


@pytest.mark.parametrize(("kind", "samples", "more"), VARIANTS, ids=str)
def test_output_and_gradients_are_those_of_the_single_layers(kind, samples, more):
    steps = []
    for each in ("balanced", "speed"):
        model, inputs = block(UNetConfig(filters=4, depth=2, policy=each, **more), kind, samples)
        steps.append(step(model)(inputs))
    for found, expected in zip(*steps):
        assert_alike(found, expected)


def test_without_a_compiled_step_and_with_an_open_batch_size_it_is_the_same():
    config = UNetConfig(filters=4, depth=2, residual=True, policy="balanced")
    model, inputs = block(config, "decoder", 2)
    compiled = step(model)(inputs)
    for other in (step(model).python_function, step(block(config, "decoder", None)[0])):
        for found, expected in zip(other(inputs), compiled):
            assert_alike(found, expected)


# --- What it keeps, and when it makes the rest ---


def passes(config, kind, waits_for):
    """Operations of a step's forward pass, and those that wait for its output."""
    model, inputs = block(config, kind, 1)
    graph = step(model).get_concrete_function(inputs).graph
    output = source(graph.outputs[0]).op
    return [[op for op in graph.get_operations() if waits_for(op, output) == late] for late in (False, True)]


def source(tensor):
    """The tensor behind those that are only views of it."""
    while tensor.op.type in ("Identity", "IdentityN", "Reshape", "StopGradient"):
        tensor = tensor.op.inputs[tensor.value_index if tensor.op.type == "IdentityN" else 0]
    return tensor


def kept(forward, backward):
    """Maps of the forward pass, on the block's grid or the coarser one, that the backward pass reads: type -> how many.

    What multiplies the output into the upstream gradient reads it too.
    """
    read = {source(tensor).ref() for op in backward for tensor in op.inputs if source(tensor).op in forward}
    return collections.Counter(one.deref().op.type for one in read if is_map(one.deref().shape))


def is_map(shape):
    """On either grid, folded or not."""
    return shape.rank in (4, 5) and np.prod(shape[1:-1]) in (np.prod(GRID), np.prod(GRID) // 8)


def made(operations):
    """How many operations make a map of the grid by hard work, or by passing over it."""
    kinds = [op.type for op in operations]
    return [kinds.count(kind) for kind in ("Conv3D", "FusedBatchNormV3", "Relu")]


@pytest.mark.parametrize(
    ("kind", "maps", "convolutions", "norms"),
    [
        # The first norm twice: for the second convolution's output, and for its filter gradient.
        ("encoder", {}, 2, 3),
        # The first convolution is two, added up. The gradient of an up-convolution's input is a convolution.
        ("decoder", {"Conv3D": 1, "AddV2": 1}, 1, 1),
    ],
)
def test_a_block_keeps_little_and_makes_the_rest_when_it_is_due(kind, maps, convolutions, norms, waits_for):
    config = UNetConfig(filters=4, depth=2, policy="balanced")
    entries = {"encoder": 1, "decoder": 2}[kind]
    forward, backward = passes(config, kind, waits_for)
    assert kept(forward, backward) == {"Placeholder": entries, "Relu": 1, **maps}
    assert made(forward) == [entries + 1, 2, 2]
    assert made(backward) == [convolutions, norms, norms]
    # Skip and up-sampled are never joined.
    shapes = [tuple(tensor.shape) for op in [*forward, *backward] for tensor in op.outputs if tensor.shape.rank == 5]
    assert (*GRID, config.filters + config.up_width(0)) not in {shape[1:] for shape in shapes}


def test_gradients_are_computed_one_after_the_other(waits_for):
    _, backward = passes(UNetConfig(filters=4, depth=2, residual=True, policy="balanced"), "decoder", waits_for)
    kinds = ["Conv3D", "Conv2DBackpropFilter", "Conv3DBackpropInputV2"]
    heavy = [op for op in backward if op.type in kinds]
    assert len(heavy) > 9
    assert all(waits_for(b, a) or waits_for(a, b) for i, a in enumerate(heavy) for b in heavy[:i])
