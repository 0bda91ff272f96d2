"""The list of a network's weights is that of its Keras model."""

import pytest

from models.config import UNetConfig
from models.unet3d import build_unet3d, weight_names
from models.weights import network_weights

NETWORKS = {
    "default": {},
    "batch norm": {"norm": "batch"},
    "no norm": {"norm": "none"},
    "residual": {"residual": True},
    "residual batch norm": {"residual": True, "norm": "batch", "network": "cicek2016"},
    "deep supervision": {"deep_supervision": True, "depth": 4},
    "all": {"deep_supervision": True, "depth": 4, "residual": True, "up": "upsampling"},
    "upsampling": {"up": "upsampling"},
    "lean": {"policy": "lean"},
    "strides": {"strides": ((2, 2, 1), (1, 2, 2))},
}


def listed(config):
    return [(weight.array, weight.layer, weight.shape) for weight in network_weights(config)]


def of_keras(model):
    """The same of a model: Keras names a variable after its layer."""
    names = weight_names(model.weights)
    layers = [weight.name.split("/")[0] for weight in model.weights]
    return list(zip(names, layers, [tuple(weight.shape) for weight in model.weights]))


@pytest.fixture(scope="module", params=NETWORKS.values(), ids=NETWORKS)
def built(request):
    """A configuration and its Keras model."""
    config = UNetConfig(**{"channels": 2, "outputs": 3, "filters": 4, "depth": 3, **request.param})
    return config, build_unet3d(config, config.divisors, 1)


def test_the_weights_are_those_of_keras_in_its_order(built):
    config, model = built
    assert listed(config) == of_keras(model)
    trainable = [weight.shape for weight in network_weights(config) if weight.is_trainable]
    assert trainable == [tuple(weight.shape) for weight in model.trainable_weights]
    kinds = [weight.name.split("/")[-1].split(":")[0] for weight in model.weights]
    assert [weight.name for weight in network_weights(config)] == kinds


def test_the_order_stays_if_layers_are_frozen(built):
    config, model = built
    for layer in model.layers:
        layer.trainable = not layer.name.startswith("encoder")
    assert listed(config) == of_keras(model)
    for layer in model.layers:
        layer.trainable = True


def test_the_axes_of_channels_and_regions_have_as_many_as_the_network():
    config = UNetConfig(channels=2, outputs=3, filters=4, depth=3, residual=True)
    config_of_heads = UNetConfig(channels=2, outputs=3, depth=4, deep_supervision=True)
    by_channel = [w for w in network_weights(config) if w.channel_axis is not None]
    assert [w.layer for w in by_channel] == ["encoder0_conv1", "encoder0_shortcut"]
    assert [w.shape[w.channel_axis] for w in by_channel] == [2, 2]
    by_region = [w for w in network_weights(config_of_heads) if w.region_axis is not None]
    assert len(by_region) == 2 * 3
    assert {w.shape[w.region_axis] for w in by_region} == {3}
