"""Layers and weights on paper are those of Keras, and what the network computes."""

import math
import re

import numpy as np
import pytest
import tensorflow as tf

from models.config import UNetConfig
from models.layer_plan import layer_plan, training_flops
from models.losses import DEFAULT_LOSS
from models.native import operations
from models.unet3d import build_unet3d, weight_names
from models.weights import network_weights


@pytest.mark.parametrize(
    "variant",
    [
        {"depth": 5},
        {"depth": 4, "deep_supervision": True, "residual": True, "dtype": "bfloat16"},
        {"depth": 3, "network": "cicek2016", "norm": "batch", "channels": 1, "policy": "lean"},
        {
            "depth": 3,
            "strides": ((2, 2, 1), (1, 2, 2)),
            "norm": "none",
            "up": "upsampling",
            "residual": True,
            "average": (2, 2, 1),
        },
    ],
    ids=str,
)
def test_layers_and_weights_are_listed_as_keras_has_them(variant):
    config = UNetConfig(filters=4, **variant)
    shape = (32, 16, 48)
    model = build_unet3d(config, shape, batch_size=1)
    plan = {op.name: op for op in layer_plan(config, shape)}
    assert sorted(layer.name for layer in model.layers) == sorted(plan)
    for layer in model.layers:
        op = plan[layer.name]
        assert (tuple(layer.output.shape[1:]), layer.output.dtype) == (op.shape, config.dtype)
        frozen = sum(math.prod(weight.shape) for weight in layer.non_trainable_weights)
        assert (layer.count_params() - frozen, frozen) == (op.trainable, op.frozen)

    listed = network_weights(config)
    assert [weight.array for weight in listed] == weight_names(model.weights)
    assert listed[2].array == "model/002"
    for layer in model.layers:
        layer.trainable = not layer.name.startswith("encoder")  # the order stays
    for weight, variable in zip(listed, model.weights):
        assert f"{weight.layer}/{weight.name}" in variable.name
        assert (weight.shape, variable.dtype) == (variable.shape, tf.float32)


def test_the_axes_of_channels_and_regions_have_as_many_as_the_network():
    config = UNetConfig(channels=2, outputs=3, depth=4, residual=True, deep_supervision=True)
    weights = network_weights(config)
    by_channel = [(w.layer, w.shape[w.channel_axis]) for w in weights if w.channel_axis is not None]
    assert by_channel == [("encoder0_conv1", 2), ("encoder0_shortcut", 2)]
    by_region = [w.shape[w.region_axis] for w in weights if w.region_axis is not None]
    assert by_region == [3] * 2 * 3  # kernel and bias, 3 heads


def test_cicek_widths_are_those_of_the_original_figure():
    config = UNetConfig(network="cicek2016", filters=32, depth=4, channels=3)
    plan = layer_plan(config, (8, 8, 8))
    widths = [op.shape[3] for op in plan if op.name.endswith(("conv1", "conv2", "concat"))]
    assert widths[:8] == [32, 64, 64, 128, 128, 256, 256, 512]
    assert widths[8:] == [768, 256, 256, 384, 128, 128, 192, 64, 64]


def test_flops_of_a_single_level_are_those_worked_out_by_hand():
    config = UNetConfig(channels=1, outputs=1, filters=1, depth=2)
    # 4^3 voxels above, 2^3 below; a multiply-add is 2. First convolution: no gradient for the
    # image.
    top = 2 * 27 * 64
    below = 2 * 27 * 8 * (1 * 2 + 2 * 2)
    up = 2 * 64 * 2
    head = 2 * 64
    every = 5 * top + below + up + head  # the decoder's first reads two maps
    assert training_flops(config, (4, 4, 4), 2) == 2 * (3 * every - top)


@pytest.mark.parametrize(
    ("field", "value", "got"),
    [
        ("channels", 0, "0"),
        ("depth", 1, "1"),
        ("depth", 9, "9"),
        ("norm", "layer", "'layer'"),
        ("strides", ((2, 2, 2),), "2,2,2"),  # for 5 levels, 4
        ("strides", ((1, 1, 1),) * 4, "1,1,1 1,1,1 1,1,1 1,1,1"),
        ("strides", (2, 2, 2, 2), "(2, 2, 2, 2)"),
        ("average", (3, 1, 1), "(3, 1, 1)"),
    ],
)
def test_a_bad_setting_is_refused_by_its_option_and_as_it_is_typed(field, value, got):
    name = field if field in ("channels", "average") else f"--{field}"
    with pytest.raises(ValueError, match=f"^{name} must be .*, got {re.escape(got)};"):
        UNetConfig(**{field: value})


def test_filters_end_where_the_widest_map_of_the_deepest_level_would_be_too_wide():
    UNetConfig(filters=512, network="cicek2016")
    with pytest.raises(ValueError, match="--filters must be at most 512 on 5 levels of cicek2016"):
        UNetConfig(filters=513, network="cicek2016")


def test_strides_say_which_axes_a_level_halves():
    config = UNetConfig(depth=4, strides=[[2, 2, 1], [2, 1, 1], [2, 2, 2]])
    assert config.divisors == (8, 4, 2)
    shape = (64, 20, 6)
    grids = [config.grid(shape, level) for level in range(4)]
    assert grids == [shape, (32, 10, 6), (16, 10, 6), (8, 5, 3)]
    rule = r"divisible by 8, 4 and 2 along X, Y and Z; pad to \(8, 20, 6\) or crop to \(8, 20, 4\)"
    with pytest.raises(ValueError, match=rule):
        config.check_shape((4, 20, 5))
    assert UNetConfig(depth=3, strides=((2, 2, 2), (2, 2, 2))) == UNetConfig(depth=3)


def test_deep_supervision_gives_a_map_for_each_decoder_the_finest_first_then_the_deepest():
    model = build_unet3d(UNetConfig(filters=2, depth=4, deep_supervision=True), (16, 16, 8))
    grids = [logits.shape[1:4] for logits in model.outputs]
    assert grids == [(16, 16, 8), (4, 4, 2), (8, 8, 4)]


def test_initial_weights_depend_on_the_seed_and_the_layer_alone():
    def kernel(seed, depth):
        """The first block's second."""
        model = build_unet3d(UNetConfig(filters=2, depth=depth, seed=seed), (4, 4, 4), 1)
        return model.get_layer("encoder0_conv2").kernel.numpy()

    np.testing.assert_array_equal(kernel(1, 3), kernel(1, 2))
    assert not np.array_equal(kernel(2, 2), kernel(1, 2))
    assert 0.2 < kernel(1, 2).max() < (6 / 108) ** 0.5  # Glorot's, of 2 x 27 and 2 x 27


@pytest.mark.parametrize("computed_by", ["native operations", "layers"])
@pytest.mark.parametrize(
    "variant", [{"deep_supervision": True, "policy": "lean"}, {"norm": "batch", "residual": True}]
)
def test_one_compiled_function_takes_volumes_of_every_size(
    variant, computed_by, request, monkeypatch
):
    if computed_by == "layers":
        monkeypatch.setattr(operations, "in_use", lambda: False)
    else:
        request.getfixturevalue("needs_native")
    config = UNetConfig(filters=4, depth=3, strides=((2, 2, 1), (2, 2, 2)), **variant)
    network = build_unet3d(config)
    first = network.get_weights()
    step = tf.function(
        lambda *volume: network.loss_and_gradients(DEFAULT_LOSS, *volume),
        input_signature=[
            tf.TensorSpec((None, None, None, None, config.channels)),
            tf.TensorSpec((None, None, None, None, config.outputs), tf.uint8),
        ],
    )
    rng = np.random.default_rng(0)
    for batch, *shape in [(1, 8, 16, 6), (2, 16, 8, 4), (1, 8, 16, 6)]:
        image = tf.constant(rng.standard_normal((batch, *shape, config.channels)), tf.float32)
        target = tf.constant(rng.random((batch, *shape, config.outputs)) < 0.2, tf.uint8)
        sized = build_unet3d(config, shape, batch)
        network.set_weights(first)
        sized.set_weights(first)
        loss, score, gradients = step(image, target)
        expected = sized.loss_and_gradients(DEFAULT_LOSS, image, target)
        np.testing.assert_allclose(loss, expected[0], rtol=1e-6)
        np.testing.assert_allclose(score, expected[1], rtol=1e-6)
        for gradient, wanted in zip(gradients, expected[2]):
            np.testing.assert_allclose(gradient, wanted, atol=1e-5 * np.abs(wanted).max())
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):
        network.loss_and_gradients(DEFAULT_LOSS, image[:, :, :, :5], target[:, :, :, :5])
