"""Layers of Keras that are not as Keras has them, against their definitions."""

import numpy as np
import pytest
import tensorflow as tf

from models.config import DTYPES, EPSILON, MOMENTUM
from models.engine import layers_have_bfloat16
from models.layers import FirstMaxPool, NormActivation

GRID = (4, 6, 4)
CLOSE = {
    "float32": {"rtol": 1e-4, "atol": 1e-5},
    "bfloat16": {"rtol": 1e-2, "atol": 1e-2},
}
CHANNELS = (5, 16)


def built(norm, samples, activate=True, channels=5, dtype="float32"):
    """A layer and a model of it alone, with weights unlike the first ones, and maps for it."""
    if dtype == "bfloat16" and not layers_have_bfloat16():
        pytest.skip("needs layers that compute in bfloat16")
    policy = "mixed_bfloat16" if dtype == "bfloat16" else dtype
    layer = NormActivation(norm, activate, dtype=policy)
    image = tf.keras.Input((*GRID, channels), samples, dtype=dtype)
    model = tf.keras.Model(image, layer(image))
    rng = np.random.default_rng(2)
    layer.set_weights(
        [weight + rng.uniform(-0.5, 0.5, weight.shape) for weight in layer.get_weights()]
    )
    return layer, model, tf.cast(rng.normal(1, 2, (samples or 2, *GRID, channels)), dtype)


@pytest.mark.parametrize(
    ("norm", "samples", "activate", "channels", "dtype"),
    [
        ("instance", 1, True, 16, "float32"),
        ("instance", 2, False, 16, "bfloat16"),
        ("instance", None, True, 16, "float32"),
        ("instance", 2, True, 5, "float32"),
        ("batch", 3, True, 8, "float32"),  # fused in float32 alone
        ("batch", 3, False, 8, "bfloat16"),
    ],
)
def test_a_norm_is_its_definition_and_so_are_its_gradients(
    norm, samples, activate, channels, dtype
):
    layer, model, x = built(norm, samples, activate, channels, dtype)
    first = layer.get_weights()
    axes = (1, 2, 3) if norm == "instance" else (0, 1, 2, 3)
    upstream = tf.cast(np.random.default_rng(3).normal(0, 1, x.shape), dtype)
    weights = layer.trainable_weights

    @tf.function
    def by_layer():
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = model(x, training=True)
        return y, tape.gradient(y, [x, *weights], upstream)

    def by_definition(x, gamma, beta):
        mean, variance = tf.nn.moments(x, axes, keepdims=True)
        y = (x - mean) / tf.sqrt(variance + EPSILON) * gamma + beta
        return tf.nn.relu(y) if activate else y

    y, gradients = by_layer()
    inputs = [tf.cast(each, tf.float64) for each in (x, *weights)]
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        expected = by_definition(*inputs)
    close = CLOSE[dtype]
    np.testing.assert_allclose(tf.cast(y, tf.float64), expected, **close)
    assert (tf.reduce_min(y) < 0) == (not activate)
    for gradient, automatic in zip(
        gradients, tape.gradient(expected, inputs, tf.cast(upstream, tf.float64))
    ):
        np.testing.assert_allclose(tf.cast(gradient, tf.float64), automatic, **close)

    if (
        norm == "batch"
    ):  # what moves is an estimate of the variance of what the batch was drawn from
        flat = np.reshape(inputs[0], (-1, channels))
        for moved, before, statistic in zip(
            layer.get_weights()[2:], first[2:], (flat.mean(0), flat.var(0, ddof=1))
        ):
            np.testing.assert_allclose(
                moved, MOMENTUM * before + (1 - MOMENTUM) * statistic, rtol=1e-4
            )
    for native, again in zip((y, *gradients), tf.nest.flatten(by_layer())):
        np.testing.assert_array_equal(
            tf.cast(native, tf.float32), tf.cast(again, tf.float32)
        )  # to the last bit


@pytest.mark.parametrize(("channels", "dtype"), zip(CHANNELS, DTYPES))
def test_in_inference_a_batch_norm_takes_its_moving_statistics(channels, dtype):
    layer, model, x = built("batch", 2, True, channels, dtype)
    gamma, beta, mean, variance = layer.get_weights()
    expected = np.maximum(
        (tf.cast(x, tf.float64) - mean) / np.sqrt(variance + EPSILON) * gamma + beta, 0
    )
    close = CLOSE[dtype]
    np.testing.assert_allclose(tf.cast(model(x), tf.float64), expected, **close)


@pytest.mark.parametrize("channels", CHANNELS)
def test_a_norm_of_a_large_mean_keeps_its_digits(channels):
    """A sum of squares loses the digits by which the mean is larger than the deviation."""
    x = np.random.default_rng(4).normal(1000, 1, (1, 8, 8, 8, channels)).astype("f4")
    y = NormActivation("instance", activate=False)(x)
    exact = x.astype("f8")
    expected = (exact - exact.mean((1, 2, 3))) / np.sqrt(exact.var((1, 2, 3)) + EPSILON)
    np.testing.assert_allclose(y, expected, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strides", [(2, 2, 2), (2, 1, 2), (1, 1, 2)])
def test_a_pools_gradient_goes_to_the_first_of_the_largest(strides, dtype):
    if dtype == "bfloat16" and not layers_have_bfloat16():
        pytest.skip("needs layers that compute in bfloat16")
    rng = np.random.default_rng(5)
    values = rng.integers(0, 2, (2, 4, 6, 8, 3))  # many are alike
    at = rng.integers(1, 9, [2, *(n // by for n, by in zip(values.shape[1:4], strides)), 3])
    expected = np.zeros(values.shape)
    for place in np.ndindex(at.shape):
        sample, *corner, channel = place
        box = tuple(slice(n * by, (n + 1) * by) for n, by in zip(corner, strides))
        window = values[(sample, *box, channel)]
        first = np.unravel_index(window.argmax(), window.shape)
        expected[(sample, *box, channel)][first] = at[place]
    pool = FirstMaxPool(strides, dtype=DTYPES[dtype].keras_policy)
    x = tf.cast(values, dtype)

    @tf.function
    def gradient(x, at):
        with tf.GradientTape() as tape:
            tape.watch(x)
            largest = pool(x)
        return tape.gradient(largest, x, at)

    np.testing.assert_array_equal(tf.cast(gradient(x, tf.cast(at, dtype)), "float64"), expected)
