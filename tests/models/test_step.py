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
from models.native import operations
from models.unet3d import UNet3D, build_unet3d

GRID = (16, 8, 8)

NETWORKS = {
    "batch, one level below": (UNetConfig(filters=5, channels=1, depth=2, norm="batch"), 2),
    "cicek, instance": (UNetConfig(filters=4, depth=3, network="cicek2016"), 1),
    "cicek, residual, no norm": (
        UNetConfig(filters=4, depth=3, network="cicek2016", residual=True, norm="none"),
        1,
    ),
    "strides, deep supervision": (
        UNetConfig(
            filters=4, depth=4, strides=((2, 2, 1), (1, 2, 2), (2, 2, 2)), deep_supervision=True
        ),
        2,
    ),
    "strides, residual, batch": (
        UNetConfig(
            filters=4,
            depth=3,
            strides=((2, 1, 1), (2, 2, 2)),
            residual=True,
            norm="batch",
            up="upsampling",
        ),
        2,
    ),
}
"""Every norm, both ways up, residual or not, one head or several, both networks, all axes halved
or some, a batch of 1 and of 2; three levels have a first block, one between, the deepest and two
decoders."""

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


@pytest.fixture(autouse=True)
def _needs(needs_native):
    pass


def layer_by_layer(model, image, training):
    """The outputs without native operations, as on a card."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operations, "available", lambda: False)
        return model(image, training=training)


@functools.cache
def compiled(config, batch, call):
    """A model and its compiled step: image and a target for each head -> loss, answers in
    inference, logits and gradients."""
    model = build_unet3d(config, GRID, batch)

    @functools.partial(tf.function, autograph=False)  # nothing in it branches on a tensor
    def function(image, targets):
        answers = tf.nest.flatten(call(model, image, False))
        with tf.GradientTape() as tape:
            tape.watch(image)
            logits = tf.nest.flatten(call(model, image, True))
            errors = [
                (tf.sigmoid(tf.cast(map_, tf.float32)) - target) ** 2
                for map_, target in zip(logits, targets)
            ]
            loss = tf.add_n([tf.reduce_mean(error) for error in errors])
        gradients = tape.gradient(loss, [*model.trainable_variables, image])
        return loss, answers, logits, gradients

    return model, model.get_weights(), function


@pytest.fixture(scope="module", autouse=True)
def _forget_compiled():
    """Else they would be taken down with the interpreter, in an order that TensorFlow does not
    bear."""
    yield
    for cached in (compiled, step_of_layers):
        cached.cache_clear()


@functools.cache
def step_of_layers(config, batch, draw=0):
    """`step` without native operations, which is the same under every policy. It is not compiled,
    as it is called once or twice."""
    config = dataclasses.replace(config, policy="speed")
    return step(config, batch, draw, layer_by_layer, eager=True)


def step(config, batch, draw=0, call=UNet3D.__call__, eager=False, open_size=False):
    """A training step without the update, on weights unlike the first ones, so that none is 0 or
    1."""
    model, first, function = compiled(config, None if open_size else batch, call)
    rng = np.random.default_rng(draw)
    model.set_weights([weight + rng.normal(0, 0.05, weight.shape) for weight in first])
    image = tf.cast(rng.standard_normal((batch, *GRID, config.channels)), config.dtype)
    targets = [
        tf.constant(rng.random((batch, *head.shape[1:])) < 0.1, tf.float32)
        for head in model.outputs
    ]
    if eager:
        function = function.python_function
    loss, *several = function(image, targets)
    arrays = [[tf.cast(each, tf.float32).numpy() for each in tensors] for tensors in several]
    return Step(float(loss), *arrays, model.get_weights())


def distances(arrays, expected):
    """The distance of each array, as a share of it."""
    assert [array.shape for array in arrays] == [array.shape for array in expected]
    return [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(arrays, expected)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("network", NETWORKS)
def test_answers_gradients_and_moved_statistics_are_those_of_the_layers(network, policy):
    config, batch = NETWORKS[network]
    config = dataclasses.replace(config, policy=policy)
    apart = []
    for draw in DRAWS:
        native = step(config, batch, draw)
        expected = step_of_layers(config, batch, draw)
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
    config, batch = NETWORKS["cicek, instance"]
    config = dataclasses.replace(config, policy=policy)
    half = dataclasses.replace(config, dtype="bfloat16")
    steps = step(config, batch), step_of_layers(half, batch), step(half, batch)
    exact, layers, native = (np.concatenate([*map(np.ravel, each.gradients)]) for each in steps)
    assert distances([native], [exact])[0] < 1.5 * distances([layers], [exact])[0]


@pytest.fixture(scope="module")
def case():
    """A model, an image, and the gradient of the image by its layers alone."""
    model = build_unet3d(UNetConfig(filters=4, depth=2), GRID, 1)
    image = tf.constant(np.random.default_rng(0).standard_normal((1, *GRID, 4)), tf.float32)
    layers = tf.keras.Model(model.input, model.output)
    return model, image, image_gradient(layers, image)


def image_gradient(network, image, training=True):
    with tf.GradientTape() as tape:
        tape.watch(image)
        loss = tf.reduce_mean(tf.sigmoid(network(image, training=training)) ** 2)
    return tape.gradient(loss, image).numpy()


def test_a_persistent_tape_answers_twice_and_what_is_not_watched_has_no_gradient(case):
    model, image, _ = case
    with tf.GradientTape(persistent=True) as tape:
        loss = tf.reduce_mean(model(image, training=True) ** 2)
    first, again = (tape.gradient(loss, model.trainable_variables) for _ in range(2))
    assert max(distances([each.numpy() for each in again], [each.numpy() for each in first])) < 1e-6
    assert tape.gradient(loss, image) is None


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
    model = build_unet3d(UNetConfig(filters=4, depth=2, norm="batch", policy=policy), (8, 8, 8), 1)
    rng = np.random.default_rng(0)
    model.set_weights(
        [weight + rng.uniform(0, 0.1, weight.shape) for weight in model.get_weights()]
    )
    first = model.get_weights()
    image = tf.constant(rng.standard_normal((1, 8, 8, 8, 4)), tf.float32)
    for layer in model.layers:
        if isinstance(layer, NormActivation):
            layer.trainable = False
    gradients = []
    for call in (UNet3D.__call__, layer_by_layer):
        with tf.GradientTape() as tape:
            logits = call(model, image, True)
            loss = tf.reduce_mean(tf.sigmoid(logits) ** 2)
        assert distances([logits], [model(image)])[0] < 1e-5
        for weight, before in zip(model.get_weights(), first):
            np.testing.assert_array_equal(weight, before)
        gradients.append(tape.gradient(loss, model.trainable_variables))
        assert len(gradients[-1]) == 9  # kernels, and the head's bias
    assert max(distances(*gradients)) < 1e-4


@pytest.mark.parametrize("policy", POLICIES)
def test_without_a_compiled_step_and_with_an_open_batch_size_it_is_the_same(policy):
    config, batch = NETWORKS["batch, one level below"]
    config = dataclasses.replace(config, policy=policy)
    expected = step(config, batch)
    for more in ({"eager": True}, {"open_size": True}):
        result = step(config, batch, **more)
        assert max(distances(result.gradients, expected.gradients)) < 1e-5


def test_a_weight_that_keras_updates_at_once_does_not_change_the_gradients_of_others():
    changes = []
    rng = np.random.default_rng(0)
    image = rng.standard_normal((2, *GRID, 4)).astype(np.float32)
    target = (rng.random((2, *GRID, 3)) < 0.1).astype(np.float32)
    for eager in (True, False):
        model = build_unet3d(UNetConfig(filters=4, depth=2), GRID)
        first = model.get_weights()
        loss = tf.keras.losses.BinaryCrossentropy(from_logits=True)
        model.compile(tf.keras.optimizers.SGD(1.0), loss, run_eagerly=eager)
        model.fit(image, target, batch_size=2, verbose=0)
        changes.append([after - before for after, before in zip(model.get_weights(), first)])
    assert max(distances(*changes)) < 1e-3


def test_a_dropped_network_goes_with_its_weights():
    def build():
        model = build_unet3d(UNetConfig(filters=2, depth=2), (8, 8, 8), 1)
        predict = tf.function(lambda image: model(image, training=False))
        predict(tf.zeros((1, 8, 8, 8, 4)))
        return [weakref.ref(held) for held in (model, model.weights[0].handle)]

    held = build()
    gc.collect()
    assert [reference() for reference in held] == [None, None]
