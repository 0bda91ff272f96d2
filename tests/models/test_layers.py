"""Layers of Keras that are not as Keras has them, against their definitions."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from models.config import DTYPES, UNetConfig
from models.engine import layers_have_bfloat16
from models.layer_plan import layer_plan
from models.layers import FirstMaxPool, NormActivation, plain_layer
from tests.models.native.reference import filter_gradient_of, first_of_largest

GRID = (4, 6, 4)
EPSILON = 1e-5
MOMENTUM = 0.9
CLOSE = {"float32": {"rtol": 1e-4, "atol": 1e-5}, "bfloat16": {"rtol": 1e-2, "atol": 1e-2}}


@pytest.fixture(params=DTYPES)
def dtype(request):
    if request.param == "bfloat16" and not layers_have_bfloat16():
        pytest.skip("needs layers that compute in bfloat16")
    return request.param


def built(norm, activate, dtype):
    """A layer with weights unlike the first ones, and maps for it."""
    rng = np.random.default_rng(2)
    x = tf.cast(rng.normal(1, 2, (3, *GRID, 5)), dtype)
    layer = NormActivation(norm, activate, dtype=DTYPES[dtype].keras_policy)
    layer.build(x.shape)
    first = layer.get_weights()
    layer.set_weights([weight + rng.uniform(-0.5, 0.5, weight.shape) for weight in first])
    return layer, x


def with_gradients(function, inputs, upstream):
    """What a function of the first input makes, and the gradients of all inputs."""
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        made = function(inputs[0])
    return [made, *tape.gradient(made, inputs, tf.cast(upstream, made.dtype))]


@pytest.mark.parametrize("activate", [True, False])
@pytest.mark.parametrize(("norm", "axes"), [("instance", (1, 2, 3)), ("batch", (0, 1, 2, 3))])
def test_a_norm_is_its_definition_and_so_are_its_gradients(norm, axes, activate, dtype):
    layer, x = built(norm, activate, dtype)
    first = layer.get_weights()
    inputs = [x, *layer.trainable_weights]
    upstream = tf.cast(np.random.default_rng(3).normal(0, 1, x.shape), dtype)
    exact = [tf.cast(each, tf.float64) for each in inputs]

    def by_definition(values):
        mean, variance = tf.nn.moments(values, axes, keepdims=True)
        normed = (values - mean) / tf.sqrt(variance + EPSILON) * exact[1] + exact[2]
        return tf.nn.relu(normed) if activate else normed

    by_layer = functools.partial(layer, training=True)
    made = tf.function(lambda: with_gradients(by_layer, inputs, upstream))()
    expected = with_gradients(by_definition, exact, upstream)
    for each, other in zip(made, expected):
        np.testing.assert_allclose(tf.cast(each, tf.float64), other, **CLOSE[dtype])
    # What moves is an estimate of the variance of what the batch was drawn from.
    flat = np.reshape(exact[0], (-1, 5))
    moments = (flat.mean(0), flat.var(0, ddof=1))
    for moved, before, moment in zip(layer.get_weights()[2:], first[2:], moments):
        expected = MOMENTUM * before + (1 - MOMENTUM) * moment
        np.testing.assert_allclose(moved, expected, rtol=1e-4)


def test_in_inference_a_batch_norm_takes_its_moving_statistics(dtype):
    layer, x = built("batch", True, dtype)
    gamma, beta, mean, variance = layer.get_weights()
    values = (tf.cast(x, tf.float64) - mean) / np.sqrt(variance + EPSILON) * gamma + beta
    made = tf.cast(layer(x), tf.float64)
    np.testing.assert_allclose(made, np.maximum(values, 0), **CLOSE[dtype])


def test_a_convolution_of_two_voxels_has_the_gradient_of_its_filters(dtype):
    """That of oneDNN is wrong in bfloat16. The network's deepest map has two along each axis."""
    rng = np.random.default_rng(6)
    layer = plain_layer(UNetConfig(dtype=dtype), layer_plan(UNetConfig(depth=2), (4, 4, 4))[8])
    x, upstream = (tf.cast(rng.standard_normal((1, 2, 2, 2, 32)), dtype) for _ in range(2))
    layer.build(x.shape)
    _, made = with_gradients(lambda kernel: layer(x), [layer.kernel], upstream)
    values, gradient = (tf.cast(each, "float64").numpy() for each in (x, upstream))
    np.testing.assert_allclose(made, filter_gradient_of(values, gradient), **CLOSE[dtype])


@pytest.mark.parametrize("strides", [(2, 2, 2), (2, 1, 2), (1, 1, 2)])
def test_a_pools_gradient_goes_to_the_first_of_the_largest(strides, dtype):
    rng = np.random.default_rng(5)
    values = rng.integers(0, 2, (2, 4, 6, 8, 3))  # many are alike
    grad = rng.integers(1, 9, [2, *(n // by for n, by in zip(values.shape[1:4], strides)), 3])
    expected = first_of_largest(values, grad, strides)
    pool = FirstMaxPool(strides, dtype=DTYPES[dtype].keras_policy)
    _, made = with_gradients(pool, [tf.cast(values, dtype)], tf.cast(grad, dtype))
    np.testing.assert_array_equal(tf.cast(made, "float64"), expected)
