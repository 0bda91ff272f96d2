"""Norm and ReLU in one layer, and the same as a function of its weights."""

import numpy as np
import pytest
import tensorflow as tf

from models.config import EPSILON, NORMS
from models.norm import NormActivation

GRID = (4, 6, 8)


def built(norm, samples, activate=True):
    """A layer and a model of it alone, with weights unlike the first ones, and maps for it."""
    layer = NormActivation(norm, activate)
    image = tf.keras.Input((*GRID, 5), samples)
    model = tf.keras.Model(image, layer(image))
    rng = np.random.default_rng(2)
    layer.set_weights([weight + rng.uniform(-0.5, 0.5, weight.shape) for weight in layer.get_weights()])
    return layer, model, tf.constant(rng.normal(1, 2, (samples or 2, *GRID, 5)).astype("f4"))


@pytest.mark.parametrize("batch", [1, 2, 3, None])
def test_instance_norm_is_its_definition_for_every_batch_and_so_are_its_gradients(batch):
    layer, model, x = built("instance", batch)

    def by_definition(x):
        mean, variance = tf.nn.moments(x, (1, 2, 3), keepdims=True)
        return tf.nn.relu((x - mean) / tf.sqrt(variance + EPSILON) * layer.gamma + layer.beta)

    gradients = []
    for function in (model, by_definition):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(function(x) ** 3)
        gradients.append(tape.gradient(loss, [x, layer.gamma, layer.beta]))
    np.testing.assert_allclose(model(x), by_definition(x), rtol=1e-4, atol=1e-5)
    for found, expected in zip(*gradients):
        np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("samples", [1, 3, None])
def test_unfolding_is_the_way_back_from_folding(norm, samples):
    layer, _, x = built(norm, samples)
    shapes = []

    @tf.function(input_signature=[tf.TensorSpec((samples, *GRID, 5))])
    def there_and_back(x):
        parts = layer.fold(x)
        shapes.append([tuple(part.shape) for part in parts])
        return layer.unfold(parts, x)

    np.testing.assert_array_equal(there_and_back(x), x)
    alone = {1: [(1, 24, 8, 5)], 3: [(1, 24, 8, 5)] * 3, None: [(None, 24, 8, 5)]}[samples]
    assert shapes == [{"instance": alone, "batch": [(samples, 24, 8, 5)], "none": [(samples, *GRID, 5)]}[norm]]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("samples", "activate"), [(1, True), (2, False)])
def test_as_a_function_of_its_weights_it_is_the_layer_in_training(norm, samples, activate):
    layer, model, x = built(norm, samples, activate)
    first = layer.get_weights()
    parts, statistics = layer.apply(layer.fold(x), *layer.values())
    for weight, before in zip(layer.get_weights(), first):  # which moves nothing
        np.testing.assert_array_equal(weight, before)
    found = layer.unfold(parts, x)
    np.testing.assert_allclose(found, model(x, training=True), rtol=1e-5, atol=1e-6)
    assert (tf.reduce_min(found) < 0) == (not activate)
    assert len(statistics) == (2 if norm == "batch" else 0)
    if statistics:  # `move` moves them as training does
        by_training = layer.get_weights()
        layer.set_weights(first)
        layer.move(*statistics)
        assert not np.allclose(by_training[2:], first[2:])
        np.testing.assert_allclose(layer.get_weights(), by_training, rtol=1e-6)
