"""The ordered layers are Keras' own layers, and their backward passes run in the order they promise."""

import numpy as np
import pytest
import tensorflow as tf

from models.ordered import Convolution, Join, UpConvolution

layers = tf.keras.layers


def pairs():
    """(name, ours, Keras' own, shapes of the inputs)"""
    one = [(2, 4, 6, 8, 3)]
    same = {"padding": "same"}
    yield "3x3x3", Convolution(5, 3, **same), layers.Conv3D(5, 3, **same), one
    yield "1x1x1", Convolution(5, 1, **same), layers.Conv3D(5, 1, **same), one
    up = {"strides": 2, "use_bias": False}
    yield "up", UpConvolution(5, 2, **up), layers.Conv3DTranspose(5, 2, **up), one
    yield "join", Join(), layers.Concatenate(), [(2, 4, 6, 8, 3), (2, 4, 6, 8, 2)]


@pytest.mark.parametrize(("ours", "keras", "shapes"), [case[1:] for case in pairs()], ids=[case[0] for case in pairs()])
def test_outputs_and_gradients_are_those_of_the_keras_layer(ours, keras, shapes):
    rng = np.random.default_rng(0)
    inputs = [tf.constant(rng.standard_normal(shape, np.float32)) for shape in shapes]
    given = inputs if len(inputs) > 1 else inputs[0]
    keras(given), ours(given)
    ours.set_weights(keras.get_weights())
    found = []
    for layer in (ours, keras):
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            output = layer(given)
            weighted = tf.reduce_sum(
                output
                * tf.constant(np.linspace(-1, 1, tf.size(output).numpy(), dtype=np.float32).reshape(output.shape))
            )
        found.append([output, *tape.gradient(weighted, [*inputs, *layer.trainable_weights])])
    for mine, theirs in zip(*found):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("layer", "first", "second"),
    [
        (Convolution(3, 3, padding="same"), "Conv3DBackpropFilterV2", "Conv3DBackpropInputV2"),
        (UpConvolution(3, 2, strides=2, use_bias=False), "Conv3DBackpropFilterV2", "Conv3D"),
    ],
)
def test_the_input_gradient_waits_for_the_filter_gradient(layer, first, second):
    layer.build((1, 4, 4, 4, 2))

    @tf.function
    def backward(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x)
        return tape.gradient(y, [x, layer.kernel])

    operations = backward.get_concrete_function(tf.TensorSpec((1, 4, 4, 4, 2))).graph.get_operations()
    waits = [
        any(before.type == first for before in op.control_inputs)
        for op in operations
        if op.type == second and any(before.type == first for before in op.control_inputs)
    ]
    assert waits == [True]
