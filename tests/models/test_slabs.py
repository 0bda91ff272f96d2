"""Slabs are a way to compute: a map cut along X gives what the whole map gives."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from models.config import UNetConfig
from models.norm import NormActivation
from models.slabs import Cut, Near, Norm, convolve, gradients
from models.unet3d import build_unet3d, with_loss

SAMPLES, PLANES = 2, 10


def drawn(*shape):
    return tf.constant(np.random.default_rng(len(shape)).standard_normal(shape), tf.float32)


@pytest.mark.parametrize("height", [4, 10])
def test_convolutions_of_slabs_are_those_of_the_whole(height):
    x, kernel, upstream = drawn(SAMPLES, PLANES, 6, 5, 3), drawn(3, 3, 3, 3, 4), drawn(SAMPLES, PLANES, 6, 5, 4)
    with tf.GradientTape() as tape:
        tape.watch([x, kernel])
        y = tf.nn.conv3d(x, kernel, (1, 1, 1, 1, 1), "SAME")
    expected = (y, *tape.gradient(y, [x, kernel], upstream))

    cut = Cut(SAMPLES, [*range(0, PLANES, height), PLANES])
    xs, ups = cut.of(x), cut.of(upstream)
    outputs = cut.sweep(convolve, Near(xs), kernel)
    at_x, of_kernel = cut.sweep(lambda x, up, kernel: gradients(x, [up], [kernel]), Near(xs), Near(ups), kernel)
    for found, one in zip((cut.join(outputs), cut.join(at_x), tf.add_n(of_kernel[0])), expected):
        np.testing.assert_allclose(found, one, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["instance", "batch"])
@pytest.mark.parametrize(("mean", "atol"), [(0, 1e-5), (300, 1e-3)])  # sums of squares would lose digits
def test_a_norm_of_slabs_is_that_of_the_whole(kind, mean, atol):
    layer, x = NormActivation(kind), drawn(SAMPLES, PLANES, 6, 5, 3) + mean
    expected = layer(x, training=True)
    cut = Cut(SAMPLES, [0, 4, 8, PLANES])
    norm = Norm(layer, cut, layer.values(True))
    slabs = norm.sweep(tf.identity, cut.of(x))
    found = cut.join([norm.apply(slab, of) for slab, of in zip(slabs, norm.of)])
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=atol)


class Halves:
    """A loss of the simplest kind: the sum of all probabilities, over a fixed number."""

    def sums(self, t, z, regions):
        p = tf.sigmoid(z)
        return tf.reduce_sum(tf.reshape(p, (p.shape[0], -1, regions)), 1)[..., None], p

    def value(self, sums):
        score = sums[..., 0] / 1024
        return tf.reduce_mean(score), score, (tf.ones_like(score) / (1024 * score.shape.num_elements()),)

    def slope(self, t, p, factors):
        (factor,) = factors
        return p * (1 - p) * tf.tile(factor, (1, p.shape[2] // factor.shape[1]))[:, None]


def step_of(config, grid, batch):
    """A compiled step's (loss, score, gradients), and its inputs."""
    model = build_unet3d(config, grid, batch)
    learner = with_loss(model, config, Halves())

    @tf.function(autograph=False)
    def step(image, target):
        with tf.GradientTape() as tape:
            loss, score = learner([image, target], training=True)
        return loss, score, tape.gradient(loss, model.trainable_variables)

    image = tf.cast(drawn(batch, *grid, config.channels), config.dtype)
    return step, image, tf.zeros((batch, *grid, config.outputs), tf.uint8)


@pytest.mark.parametrize(("depth", "more"), [(3, {"deep_supervision": True}), (2, {"residual": True, "norm": "batch"})])
def test_a_step_with_the_loss_inside_is_speeds_and_the_same_each_time(depth, more):
    config, answers = UNetConfig(filters=4, depth=depth, **more), []
    for policy in ("speed", "lean"):
        step, *inputs = step_of(dataclasses.replace(config, policy=policy), (16, 8, 8), 2)
        answers.append(step(*inputs))
    for found, expected in zip(*(tf.nest.flatten(one) for one in answers)):
        assert tf.norm(found - expected) <= 2e-5 * tf.norm(expected)  # speed's own distance from float64 is 1e-5
    for again, first in zip(tf.nest.flatten(step(*inputs)), tf.nest.flatten(answers[1])):
        np.testing.assert_array_equal(again, first)


def test_no_tensor_of_a_step_is_a_whole_map_of_the_finest_grid():
    grid, more = (24, 16, 16), {"residual": True, "up": "upsampling", "dtype": "bfloat16"}
    config = UNetConfig(channels=1, filters=8, depth=2, policy="lean", **more)
    step, image, target = step_of(config, grid, 1)
    graph = step.get_concrete_function(image, target).graph.as_graph_def(add_shapes=True)
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    read = {name.partition(":")[0] for node in nodes for name in node.input}
    found = set()
    for node in (node for node in nodes if node.name in read):
        sizes = [np.prod([size.size for size in shape.dim]) for shape in node.attr["_output_shapes"].list.shape]
        if max(sizes, default=0) >= target.shape.num_elements():
            found.add(node.op)
    # The target, of as many values as the logits; level 1's maps have fewer, those of level 0 more.
    assert found <= {"Placeholder", "Identity", "IdentityN", "StopGradient", "Reshape"}
