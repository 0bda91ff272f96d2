"""The pass by native operations is the same mathematics as the plain Keras layers: answers,
gradients, statistics."""

import dataclasses
import functools
import gc
import weakref
from typing import NamedTuple

import numpy as np
import pytest
import tensorflow as tf

from models.config import POLICIES, UNetConfig
from models.engine import layers_have_bfloat16
from models.layers import NormActivation
from models.unet3d import build_unet3d

pytestmark = pytest.mark.usefixtures("needs_native")

GRID = (16, 8, 8)
BATCH = 2

NETWORKS = {
    "batch, one level below": UNetConfig(filters=5, channels=1, depth=2, norm="batch"),
    "cicek, instance": UNetConfig(filters=4, depth=3, network="cicek2016"),
    "cicek, residual, no norm": UNetConfig(
        filters=4, depth=3, network="cicek2016", residual=True, norm="none"
    ),
    "strides, deep supervision": UNetConfig(
        filters=4, depth=4, strides=((2, 2, 1), (1, 2, 2), (2, 2, 2)), deep_supervision=True
    ),
    "strides, residual, batch": UNetConfig(
        filters=4,
        depth=3,
        strides=((2, 1, 1), (2, 2, 2)),
        residual=True,
        norm="batch",
        up="upsampling",
    ),
    "averages, deep supervision, residual": UNetConfig(
        filters=4, depth=3, average=(2, 1, 2), residual=True, deep_supervision=True
    ),
}
"""Every norm, both ways up, residual or not, one head or several, both networks, all axes halved
or some; three levels have a first block, one between, the deepest and two decoders."""

DRAWS = range(2, 7)
"""Seeds of weights and volumes. One of a million values may be so near 0 that the order of a sum
opens or closes its ReLU, which changes up to 2e-3 of the gradients before it."""


class Step(NamedTuple):
    """Results of a step; the weights are after it: batch norm's statistics have moved."""

    loss: float
    answers: list  # in inference
    logits: list
    gradients: list  # of the weights, and of the image
    weights: list


def layers_of(model):
    """The same network without native operations."""
    return tf.keras.Model(model.input, model.output)


def step(config, draw=2, network=lambda model: model, eager=False, batch_size=BATCH):
    """A training step without the update, on weights unlike the first ones, so that none is 0 or
    1."""
    model = build_unet3d(config, GRID, batch_size)
    computes = network(model)
    rng = np.random.default_rng(draw)
    model.set_weights([each + rng.normal(0, 0.05, each.shape) for each in model.get_weights()])
    image = tf.cast(rng.standard_normal((BATCH, *GRID, config.channels)), config.dtype)
    targets = [rng.random((BATCH, *head.shape[1:])) < 0.1 for head in model.outputs]

    def computed(image):
        answers = tf.nest.flatten(computes(image, training=False))
        with tf.GradientTape() as tape:
            tape.watch(image)
            logits = tf.nest.flatten(computes(image, training=True))
            loss = 0.0
            for map_, target in zip(logits, targets):
                errors = tf.sigmoid(tf.cast(map_, tf.float32)) - tf.cast(target, tf.float32)
                loss += tf.reduce_mean(errors**2)
        gradients = tape.gradient(loss, [*model.trainable_variables, image])
        return loss, answers, logits, gradients

    if not eager:  # nothing in it branches on a tensor
        computed = tf.function(computed, autograph=False)
    loss, *several = computed(image)
    arrays = [[tf.cast(each, tf.float32).numpy() for each in tensors] for tensors in several]
    return Step(float(loss), *arrays, model.get_weights())


@functools.cache
def step_of_layers(config, draw=2):
    """`step` without native operations, which is the same under every policy."""
    config = dataclasses.replace(config, policy="speed")
    return step(config, draw, layers_of, eager=True)


def distances(arrays, expected):
    """The distance of each array, as a share of it."""
    assert [array.shape for array in arrays] == [array.shape for array in expected]
    return [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(arrays, expected)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("network", NETWORKS)
def test_answers_gradients_and_moved_statistics_are_those_of_the_layers(network, policy):
    config = dataclasses.replace(NETWORKS[network], policy=policy)
    apart = []
    for draw in DRAWS:
        native = step(config, draw)
        expected = step_of_layers(config, draw)
        assert native.loss == pytest.approx(expected.loss, rel=1e-6)
        assert max(distances(native.logits, expected.logits)) < 1e-5
        assert max(distances(native.answers, expected.answers)) < 1e-5
        for weight, other in zip(native.weights, expected.weights):
            np.testing.assert_allclose(weight, other, rtol=0, atol=1e-6)
        apart.append(max(distances(native.gradients, expected.gradients)))
        assert apart[-1] < 1e-2
        if apart[-1] < 2e-5:
            break
    assert min(apart) < 2e-5


@pytest.mark.parametrize("policy", POLICIES)
def test_in_bfloat16_gradients_are_about_as_far_from_float32s_as_those_of_the_layers(policy):
    if not layers_have_bfloat16():
        pytest.skip("needs layers that compute in bfloat16")
    config = dataclasses.replace(NETWORKS["cicek, instance"], policy=policy)
    half = dataclasses.replace(config, dtype="bfloat16")
    steps = step_of_layers(config), step_of_layers(half), step(half)
    exact, *others = (np.concatenate([*map(np.ravel, each.gradients)]) for each in steps)
    layers, native = distances(others, [exact, exact])
    assert native < 1.5 * layers


@pytest.fixture(scope="module")
def case():
    """A model, an image, and the gradient of the image by its layers alone."""
    model = build_unet3d(UNetConfig(filters=4, depth=2), GRID, 1)
    image = tf.constant(np.random.default_rng(0).standard_normal((1, *GRID, 4)), tf.float32)
    return model, image, image_gradient(layers_of(model), image)


def image_gradient(network, image, training=True):
    with tf.GradientTape() as tape:
        tape.watch(image)
        loss = tf.reduce_mean(tf.sigmoid(network(image, training=training)) ** 2)
    return tape.gradient(loss, image).numpy()


@pytest.mark.parametrize("training", [None, False, True])
def test_a_tape_has_gradients_as_of_the_layers_in_training_or_not(case, training):
    model, image, expected = case
    assert distances([image_gradient(model, image, training)], [expected])[0] < 1e-5


def test_gradients_of_a_traced_inference_are_refused(case):
    with pytest.raises(NotImplementedError):
        tf.function(image_gradient)(*case[:2], False)


def test_an_image_may_come_as_keras_takes_it_and_from_another_layer(case):
    model, image, gradient = case
    for given in ([image], {"image": image}, image.numpy().astype(float)):
        np.testing.assert_array_equal(model(given), model(image))
    inputs = tf.keras.Input((*GRID, 4), 1)
    outer = tf.keras.Model(inputs, model(tf.keras.layers.Rescaling(2.0)(inputs)))
    assert distances([image_gradient(outer, image / 2)], [2 * gradient])[0] < 1e-4


@pytest.mark.parametrize("policy", POLICIES)
def test_a_frozen_batch_norm_takes_and_keeps_its_moving_statistics(policy):
    def freeze(model):
        for layer in model.layers:
            layer.trainable = not isinstance(layer, NormActivation)
        return model

    config = UNetConfig(filters=4, depth=2, norm="batch", policy=policy)
    native = step(config, network=freeze)
    layers = step(config, network=lambda model: layers_of(freeze(model)))
    assert max(distances(native.logits, native.answers)) < 1e-5
    assert max(distances(native.gradients, layers.gradients)) < 1e-4
    assert len(native.gradients) == 10  # of kernels, of the head's bias, and of the image
    for weight, other in zip(native.weights, layers.weights):
        np.testing.assert_array_equal(weight, other)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("more", [{"eager": True}, {"batch_size": None}])
def test_without_a_compiled_step_and_with_an_open_batch_size_it_is_the_same(policy, more):
    config = NETWORKS["batch, one level below"]
    result = step(dataclasses.replace(config, policy=policy), **more)
    assert max(distances(result.gradients, step_of_layers(config).gradients)) < 1e-4


def test_a_dropped_network_goes_with_its_weights():
    def build():
        model = build_unet3d(UNetConfig(filters=2, depth=2), (8, 8, 8), 1)
        predict = tf.function(lambda image: model(image, training=False))
        predict(tf.zeros((1, 8, 8, 8, 4)))
        return [weakref.ref(held) for held in (model, model.weights[0].handle)]

    held = build()
    gc.collect()
    assert [reference() for reference in held] == [None, None]
