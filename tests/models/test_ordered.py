"""The ordered layers are Keras' own layers, and their backward passes run in the order they promise."""

import numpy as np
import pytest
import tensorflow as tf

from models.ordered import Convolution, Join, ShortcutSum, UpConvolution, add_bias

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
    shortcut = [(2, 4, 6, 8, 5), (2, 4, 6, 8, 3)]
    yield "shortcut", ShortcutSum(5), plain_shortcut_sum(*shortcut), shortcut
    yield "shortcut of the image", ShortcutSum(5, entry_learns=False), plain_shortcut_sum(*shortcut), shortcut


def plain_shortcut_sum(maps, entry):
    """Of Keras' own layers."""
    given = [layers.Input(shape[1:]) for shape in (maps, entry)]
    convolved = layers.Conv3D(maps[-1], 1, use_bias=False)(given[1])
    return tf.keras.Model(given, layers.Add()([given[0], convolved]))


@pytest.mark.parametrize(("ours", "keras", "shapes"), [case[1:] for case in pairs()], ids=[case[0] for case in pairs()])
def test_outputs_and_gradients_are_those_of_the_keras_layer(ours, keras, shapes):
    rng = np.random.default_rng(0)
    inputs = [tf.constant(rng.standard_normal(shape, np.float32)) for shape in shapes]
    given = inputs if len(inputs) > 1 else inputs[0]
    keras(given), ours(given)
    keras.set_weights([rng.standard_normal(weight.shape) for weight in keras.get_weights()])
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


def test_a_bias_is_added_to_every_voxel_and_its_gradient_is_the_sum_over_them():
    maps, bias = tf.reshape(tf.range(12.0), (1, 1, 2, 3, 2)), tf.constant([10.0, 20.0])
    weight = tf.reshape(tf.range(12.0) ** 2, maps.shape)
    with tf.GradientTape() as tape:
        tape.watch([maps, bias])
        output = add_bias(maps, bias)
        total = tf.reduce_sum(output * weight)
    to_maps, to_bias = tape.gradient(total, [maps, bias])
    np.testing.assert_array_equal(output, maps + bias)
    np.testing.assert_array_equal(to_maps, weight)
    # 0 + 4 + 16 + 36 + 64 + 100 and 1 + 9 + 25 + 49 + 81 + 121.
    np.testing.assert_array_equal(to_bias, [220, 286])


def operations(layer, *shapes):
    """The graph of a layer's backward pass, for all its inputs and weights."""

    @tf.function
    def backward(*inputs):
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            output = layer(list(inputs) if len(inputs) > 1 else inputs[0])
        return tape.gradient(output, [*inputs, *layer.trainable_weights])

    return backward.get_concrete_function(*(tf.TensorSpec(shape) for shape in shapes)).graph.get_operations()


def waiting(found, kind, before):
    """Operations of type `kind` that wait for one of type `before` without reading it."""
    return [op for op in found if op.type == kind and any(other.type == before for other in op.control_inputs)]


@pytest.mark.parametrize(
    ("layer", "shapes", "second"),
    [
        (Convolution(3, 3, padding="same"), [(1, 4, 4, 4, 2)], "Conv3DBackpropInputV2"),
        (UpConvolution(3, 2, strides=2, use_bias=False), [(1, 4, 4, 4, 2)], "Conv3D"),
        (ShortcutSum(3), [(1, 4, 4, 4, 3), (1, 4, 4, 4, 2)], "Conv3DBackpropInputV2"),
    ],
)
def test_the_input_gradient_waits_for_the_filter_gradient(layer, shapes, second):
    assert len(waiting(operations(layer, *shapes), second, "Conv3DBackpropFilterV2")) == 1


def test_a_convolutions_gradients_wait_for_its_biass():
    found = operations(Convolution(3, 3, padding="same"), (1, 4, 4, 4, 2))
    (passed_on,) = waiting(found, "Identity", "BiasAddGrad")
    readers = {op.type for op in passed_on.outputs[0].consumers()}
    assert {"Conv3DBackpropFilterV2", "Conv3DBackpropInputV2"} <= readers


@pytest.mark.parametrize(("learns", "last"), [(True, "Conv3DBackpropInputV2"), (False, "Conv3DBackpropFilterV2")])
def test_the_long_way_waits_for_all_of_the_shortcuts_gradients(learns, last):
    layer = ShortcutSum(3, entry_learns=learns)
    found = operations(layer, (1, 4, 4, 4, 3), (1, 4, 4, 4, 2))
    # Nothing else in the layer waits so: it is the gradient handed to the block's maps.
    assert len(waiting(found, "Identity", last)) == 1


def test_the_shortcut_waits_for_the_blocks_maps():
    found = operations(ShortcutSum(3), (1, 4, 4, 4, 3), (1, 4, 4, 4, 2))
    (late,) = waiting(found, "Identity", "Placeholder")
    assert "Conv3D" in [reader.type for reader in late.outputs[0].consumers()]


def test_a_shortcut_sum_comes_back_from_its_configuration():
    layer = ShortcutSum(3, tf.keras.initializers.GlorotUniform(seed=7), entry_learns=False, name="s")
    again = ShortcutSum.from_config(layer.get_config())
    assert again.get_config() == layer.get_config()
