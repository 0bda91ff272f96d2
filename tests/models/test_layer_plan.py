"""The plan on paper is the network that Keras builds."""

import pytest
import tensorflow as tf

from models.config import UNetConfig
from models.layer_plan import layer_plan, training_flops
from models.unet3d import build_unet3d

KINDS = {
    "InputLayer": {"input"},
    "Convolution": {"conv", "head"},
    "ShortcutSum": {"shortcut"},
    "UpConvolution": {"up_conv"},
    "NormActivation": {"norm_act", "norm"},
    "ReLU": {"act"},
    "MaxPooling3D": {"pool"},
    "UpSampling3D": {"upsample"},
    "Join": {"concat"},
}

VARIANTS = [
    UNetConfig(filters=4, depth=3, norm="none", up="upsampling", policy="speed"),
    UNetConfig(filters=4, depth=5, policy="speed"),
    UNetConfig(filters=4, depth=3, residual=True, norm="none", policy="speed"),
    UNetConfig(filters=4, depth=4, deep_supervision=True, dtype="bfloat16", policy="speed"),
    UNetConfig(filters=4, depth=4, network="cicek2016", norm="batch", channels=1, outputs=1, policy="speed"),
    UNetConfig(
        filters=4, depth=3, network="cicek2016", up="upsampling", residual=True, dtype="bfloat16", policy="speed"
    ),
]
"""Under "speed" alone a layer of the plan is one of Keras'; the leaner policies have a layer for each block."""


@pytest.mark.parametrize("config", VARIANTS, ids=str)
def test_plan_equals_the_built_model_layer_by_layer(config):
    shape = (32, 16, 48)
    model = build_unet3d(config, shape, batch_size=1)
    plan = {op.name: op for op in layer_plan(config, shape)}
    assert [layer.name for layer in sorted(model.layers, key=lambda layer: layer.name)] == sorted(plan)
    for layer in model.layers:
        op = plan[layer.name]
        output = layer.output
        assert op.kind in KINDS[type(layer).__name__]
        assert tuple(output.shape[1:]) == op.shape
        assert output.dtype == op.dtype
        assert sum(tf.size(w).numpy() for w in layer.trainable_weights) == op.trainable
        assert sum(tf.size(w).numpy() for w in layer.non_trainable_weights) == op.frozen
        feeds = [layer.input] if not isinstance(layer.input, list) else layer.input
        if op.kind != "input":
            assert tuple(tensor.node.layer.name for tensor in feeds) == op.inputs


def test_the_reference_network_has_the_known_number_of_parameters():
    # Worked out by hand for two levels, filters 2, one channel, one output, instance norm:
    # 27*1*2 + 4 + 27*2*2 + 4 | 27*2*4 + 8 + 27*4*4 + 8 | up 8*4*2 | 27*4*2 + 4 + 27*2*2 + 4 | head 2*1 + 1
    config = UNetConfig(channels=1, outputs=1, filters=2, depth=2)
    by_hand = (54 + 4 + 108 + 4) + (216 + 8 + 432 + 8) + 64 + (216 + 4 + 108 + 4) + 3
    assert sum(op.trainable for op in layer_plan(config, (2, 2, 2))) == by_hand


def test_cicek_widths_are_those_of_the_original_figure():
    config = UNetConfig(network="cicek2016", filters=32, depth=4, channels=3)
    widths = {op.name: op.shape[3] for op in layer_plan(config, (8, 8, 8))}
    encoder = [(widths[f"encoder{level}_conv1"], widths[f"encoder{level}_conv2"]) for level in range(4)]
    assert encoder == [(32, 64), (64, 128), (128, 256), (256, 512)]
    assert [widths[f"decoder{level}_concat"] for level in range(3)] == [64 + 128, 128 + 256, 256 + 512]
    assert [widths[f"decoder{level}_conv2"] for level in range(3)] == [64, 128, 256]


def test_flops_of_a_single_level_are_those_worked_out_by_hand():
    config = UNetConfig(channels=1, outputs=1, filters=1, depth=2)
    # 4^3 voxels above, 2^3 below; a multiply-add is 2. First convolution: no gradient for the image.
    image_conv = 2 * 27 * 64
    top = 2 * 27 * 64
    below = 2 * 27 * 1 * 2 * 8 + 2 * 27 * 2 * 2 * 8
    up = 2 * 2 * 1 * 64
    decoder = 2 * 27 * 2 * 64 + 2 * 27 * 64
    head = 2 * 64
    assert training_flops(config, (4, 4, 4)) == 2 * image_conv + 3 * (top + below + up + decoder + head)


def test_a_shape_that_does_not_divide_is_refused_with_the_ones_that_do():
    with pytest.raises(ValueError, match=r"\(240, 240, 155\) must be divisible by 16; pad to \(240, 240, 160\)"):
        layer_plan(UNetConfig(), (240, 240, 155))


@pytest.mark.parametrize(
    ("field", "value"), [("filters", 0), ("depth", 1), ("norm", "layer"), ("dtype", "float16"), ("network", "vnet")]
)
def test_a_bad_setting_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=f"{field} must be .*{value}"):
        UNetConfig(**{field: value})
