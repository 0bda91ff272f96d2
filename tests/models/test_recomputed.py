"""One block that computes its maps again: its gradients, and the order they are computed in."""

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


def test_gradients_are_computed_one_after_the_other(waits_for):
    model, inputs = block(UNetConfig(filters=4, depth=2, residual=True, policy="balanced"), "decoder", 1)
    graph = step(model).get_concrete_function(inputs).graph
    output = graph.outputs[0]
    while output.op.type in ("Identity", "IdentityN"):
        output = output.op.inputs[output.value_index]
    kinds = ["Conv3D", "Conv2DBackpropFilter", "Conv3DBackpropInputV2"]
    heavy = [op for op in graph.get_operations() if op.type in kinds and waits_for(op, output.op)]
    assert len(heavy) > 9
    assert all(waits_for(b, a) or waits_for(a, b) for i, a in enumerate(heavy) for b in heavy[:i])
