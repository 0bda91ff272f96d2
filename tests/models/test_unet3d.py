"""What the network computes."""

import numpy as np
import pytest
import tensorflow as tf

from models.config import UNetConfig
from models.norm import EPSILON, NormActivation
from models.unet3d import build_unet3d


def instance_norm_by_hand(x, gamma, beta):
    mean = x.mean((1, 2, 3), keepdims=True)
    variance = x.var((1, 2, 3), keepdims=True)
    return np.maximum((x - mean) / np.sqrt(variance + EPSILON) * gamma + beta, 0)


@pytest.mark.parametrize("batch", [1, 3, None])
def test_instance_norm_is_its_definition_for_every_batch(batch):
    layer = NormActivation("instance")
    image = tf.keras.Input((4, 6, 8, 5), batch)
    model = tf.keras.Model(image, layer(image))
    gamma, beta = np.linspace(0.5, 2, 5, dtype="f4"), np.linspace(-1, 1, 5, dtype="f4")
    layer.set_weights([gamma, beta])
    x = np.random.default_rng(0).normal(3, 2, (batch or 2, 4, 6, 8, 5)).astype("f4")
    np.testing.assert_allclose(model(x), instance_norm_by_hand(x, gamma, beta), rtol=1e-4, atol=1e-5)


def test_instance_norm_gives_the_same_gradients_by_kernel_and_by_definition():
    x = tf.constant(np.random.default_rng(1).normal(1, 3, (2, 4, 4, 6, 3)).astype("f4"))
    gradients = []
    for batch in (2, None):
        layer = NormActivation("instance")
        image = tf.keras.Input((4, 4, 6, 3), batch)
        model = tf.keras.Model(image, layer(image))
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(model(x) ** 3)
        gradients.append(tape.gradient(loss, [x, layer.gamma, layer.beta]))
    for by_kernel, by_definition in zip(*gradients):
        np.testing.assert_allclose(by_kernel, by_definition, rtol=2e-3, atol=2e-3)


def test_a_sample_is_computed_alike_alone_and_in_a_batch():
    config = UNetConfig(filters=4, depth=3)
    pair = build_unet3d(config, (16, 8, 12), batch_size=2)
    single = build_unet3d(config, (16, 8, 12), batch_size=1)
    single.set_weights(pair.get_weights())
    x = np.random.default_rng(2).normal(size=(2, 16, 8, 12, 4)).astype("f4")
    np.testing.assert_allclose(pair(x)[1:], single(x[1:]), rtol=1e-4, atol=1e-5)


def test_upsampling_then_convolving_is_what_the_cheap_order_computes():
    x = tf.constant(np.random.default_rng(3).normal(size=(1, 2, 3, 4, 6)).astype("f4"))
    kernel = tf.constant(np.random.default_rng(4).normal(size=(1, 1, 1, 6, 2)).astype("f4"))
    double = tf.keras.layers.UpSampling3D(2)
    late = tf.nn.conv3d(double(x), kernel, (1, 1, 1, 1, 1), "SAME")
    early = double(tf.nn.conv3d(x, kernel, (1, 1, 1, 1, 1), "SAME"))
    np.testing.assert_allclose(late, early, rtol=1e-5, atol=1e-5)


def test_deep_supervision_gives_one_map_per_decoder_level():
    model = build_unet3d(UNetConfig(filters=2, depth=4, deep_supervision=True), (16, 16, 8), batch_size=1)
    shapes = [tuple(logits.shape[1:4]) for logits in model.outputs]
    assert shapes == [(16, 16, 8), (4, 4, 2), (8, 8, 4)]


def test_bfloat16_computes_in_bfloat16_and_keeps_weights_in_float32():
    model = build_unet3d(UNetConfig(filters=2, depth=2, dtype="bfloat16"), (4, 4, 4), batch_size=1)
    assert {layer.output.dtype for layer in model.layers} == {tf.bfloat16}
    assert {weight.dtype for weight in model.weights} == {tf.float32}


def test_a_saved_config_rebuilds_the_norm_layer():
    layer = NormActivation("instance", activate=False, dtype="mixed_bfloat16", name="n")
    again = NormActivation.from_config(layer.get_config())
    assert (again.norm, again.activate, again.compute_dtype) == ("instance", False, "bfloat16")


def test_initial_weights_depend_on_the_seed_and_the_layer_alone():
    first, again, other = (
        build_unet3d(UNetConfig(filters=2, depth=2, seed=seed), (4, 4, 4), 1).get_weights() for seed in (1, 1, 2)
    )
    assert all(np.array_equal(a, b) for a, b in zip(first, again))
    assert not np.array_equal(first[0], other[0])
    deeper = build_unet3d(UNetConfig(filters=2, depth=3, seed=1), (4, 4, 4), 1)
    np.testing.assert_array_equal(deeper.get_layer("encoder0_conv2").get_weights()[0], first[3])
