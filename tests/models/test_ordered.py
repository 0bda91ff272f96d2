"""The ordered layers are Keras' own layers, and their backward passes run in the order they promise."""

import numpy as np
import pytest
import tensorflow as tf

from models.ordered import Convolution, Join, ShortcutSum, UpConvolution, add_bias

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


def operations(layer, *shapes):
    """The graph of a layer's backward pass, for all its inputs and weights."""

    @tf.function
    def backward(*inputs):
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            output = layer(list(inputs) if len(inputs) > 1 else inputs[0])
        return tape.gradient(output, [*inputs, *layer.trainable_weights])

    return backward.get_concrete_function(*(tf.TensorSpec(shape) for shape in shapes)).graph.get_operations()


ONE, TWO = [(1, 4, 4, 4, 2)], [(1, 4, 4, 4, 3), (1, 4, 4, 4, 2)]


@pytest.mark.parametrize(
    ("layer", "shapes", "late", "early", "readers"),
    [
        # The input's gradient waits for the filter's, and both for that of the bias.
        (Convolution(3, 3), ONE, "Conv3DBackpropInputV2", "Conv3DBackpropFilterV2", set()),
        (UpConvolution(3), ONE, "Conv3D", "Conv3DBackpropFilterV2", set()),
        (ShortcutSum(3), TWO, "Conv3DBackpropInputV2", "Conv3DBackpropFilterV2", set()),
        (
            Convolution(3, 3), ONE, "Identity", "StridedSlice",
            {"Conv3DBackpropFilterV2", "Conv3DBackpropInputV2"},
        ),
        # The gradient handed to the block's maps, the long way, waits for all of the shortcut's.
        (ShortcutSum(3), TWO, "Identity", "Conv3DBackpropInputV2", set()),
        (ShortcutSum(3, entry_learns=False), TWO, "Identity", "Conv3DBackpropFilterV2", set()),
        # The shortcut waits for the block's maps.
        (ShortcutSum(3), TWO, "Identity", "Placeholder", {"Conv3D"}),
    ],
)  # fmt: skip
def test_what_is_late_waits_for_what_is_early_without_reading_it(layer, shapes, late, early, readers):
    found = operations(layer, *shapes)
    (waiting,) = [op for op in found if op.type == late and early in [other.type for other in op.control_inputs]]
    assert readers <= {reader.type for reader in waiting.outputs[0].consumers()}
