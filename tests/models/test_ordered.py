"""The ordered layers are Keras' own layers, and a kernel's gradient is its definition."""

import numpy as np
import pytest
import tensorflow as tf

from models.ordered import (
    Convolution,
    Join,
    ShortcutSum,
    UpConvolution,
    add_bias,
    filter_gradient,
    filter_gradient_by_planes,
)  # fmt: skip

layers = tf.keras.layers


def plain_shortcut_sum():
    """Of Keras' own layers."""
    given = [layers.Input((4, 6, 8, channels)) for channels in (5, 3)]
    return tf.keras.Model(given, layers.Add()([given[0], layers.Conv3D(5, 1, use_bias=False)(given[1])]))


@pytest.mark.parametrize(
    ("ours", "keras", "channels"),
    [
        (Convolution(5, 3), layers.Conv3D(5, 3, padding="same"), [3]),
        (Convolution(5, 1), layers.Conv3D(5, 1), [3]),
        (UpConvolution(5), layers.Conv3DTranspose(5, 2, strides=2, use_bias=False), [3]),
        (Join(), layers.Concatenate(), [3, 2]),
        (ShortcutSum(5), plain_shortcut_sum(), [5, 3]),
        (ShortcutSum(5, entry_learns=False), plain_shortcut_sum(), [5, 3]),  # of the image
    ],
)
def test_outputs_and_gradients_are_those_of_the_keras_layer(ours, keras, channels):
    rng = np.random.default_rng(0)
    inputs = [tf.constant(rng.standard_normal((2, 4, 6, 8, n), np.float32)) for n in channels]
    given = inputs if len(inputs) > 1 else inputs[0]
    keras(given), ours(given)
    keras.set_weights([rng.standard_normal(weight.shape) for weight in keras.get_weights()])
    ours.set_weights(keras.get_weights())
    found = []
    for layer in (ours, keras):
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            output = layer(given)
            weighted = tf.reduce_sum(output * tf.reshape(tf.linspace(-1.0, 1, tf.size(output)), output.shape))
        found.append([output, *tape.gradient(weighted, [*inputs, *layer.trainable_weights])])
    for mine, theirs in zip(*found):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=2e-5)


def test_a_bias_gradient_in_bfloat16_is_the_sum_of_all_voxels():
    """Of so many values TensorFlow's own loses nine tenths."""
    upstream = tf.cast(np.random.default_rng(0).uniform(0, 2e-6, (1, 64, 64, 64, 3)), tf.bfloat16)
    bias = tf.zeros(3, tf.bfloat16)
    with tf.GradientTape() as tape:
        tape.watch(bias)
        maps = add_bias(tf.zeros_like(upstream), bias)
    found = tf.cast(tape.gradient(maps, bias, upstream), tf.float32)
    np.testing.assert_allclose(found, tf.reduce_sum(tf.cast(upstream, tf.float32), (0, 1, 2, 3)), rtol=4e-3)


# --- The gradient of a kernel ---

GRIDS = [(5, 4, 6), (2, 3, 1), (1, 4, 3)]
"""One has fewer planes than the kernel, one a single plane."""


def maps(samples, grid, seed=0):
    """What a convolution from 3 to 2 channels read, and the gradient of what it wrote."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((samples, *grid, channels)).astype("f4") for channels in (3, 2)]


def by_definition(x, upstream, side):
    """Each tap meets the map shifted by its place in the kernel; beyond the edge there is nothing."""
    reach, grid = side // 2, x.shape[1:4]
    padded = np.pad(x.astype("f8"), [(0, 0), *[(reach, reach)] * 3, (0, 0)])
    gradient = np.zeros((side, side, side, x.shape[-1], upstream.shape[-1]))
    for i, j, k in np.ndindex(side, side, side):
        seen = padded[:, i : i + grid[0], j : j + grid[1], k : k + grid[2]]
        gradient[i, j, k] = np.tensordot(seen, upstream, ([0, 1, 2, 3], [0, 1, 2, 3]))
    return gradient


def distance(found, expected):
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("function", [filter_gradient, filter_gradient_by_planes])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize(("side", "samples"), [(3, 2), (1, 3)])
def test_it_is_the_sum_over_all_voxels_of_what_a_tap_saw_times_the_gradient_there(function, grid, side, samples):
    x, upstream = maps(samples, grid)
    found = function(tf.constant(x), tf.constant(upstream), (side, side, side, 3, 2))
    assert found.shape == (side, side, side, 3, 2)
    assert distance(found.numpy(), by_definition(x, upstream, side)) < 1e-6


@pytest.mark.parametrize(
    ("function", "grid", "channels"),
    [
        (filter_gradient_by_planes, (6, 5, 4), (3, 2)),
        # The smallest grids, whatever lay in memory before.
        *((filter_gradient, grid, (64, 64)) for grid in [(1, 2, 2), (2, 1, 2), (2, 2, 2), (3, 2, 2)]),
    ],
)
def test_in_bfloat16_it_is_the_definitions_to_that_precision(function, grid, channels):
    rng = np.random.default_rng(0)
    gradient = tf.function(lambda x, upstream: function(x, upstream, (3, 3, 3, *channels)))
    for _ in range(3):
        tf.random.normal((200, 1000)) * 1e30
        x, upstream = (tf.cast(rng.standard_normal((1, *grid, n)), tf.bfloat16) for n in channels)
        expected = by_definition(*(tf.cast(one, tf.float32).numpy() for one in (x, upstream)), 3)
        found = gradient(x, upstream)
        assert found.dtype == tf.bfloat16
        assert distance(tf.cast(found, tf.float32).numpy(), expected) < 2**-6
