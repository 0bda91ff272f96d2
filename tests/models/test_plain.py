"""An operation that TensorFlow computes: trained as by the layers, and counted."""

import pytest
import tensorflow as tf

from memory_estimator.job import Job
from memory_estimator.step.layer_step import step_of
from models import network
from models.config import UNetConfig
from models.plain import PLAIN, PlainOperation
from models.unet3d import build_unet3d
from models.weights import network_weights
from tests.models.test_step import GRID, distances, layers_of, step


def mixed(values, weights):
    """The skip, times a number of each voxel that the map from below decides."""
    skip, below = values
    factors = tf.nn.conv3d(below, weights["kernel"], [1] * 5, "SAME") + weights["bias"]
    return skip * tf.sigmoid(factors)


class Mixed(network._Network):
    """A U-Net whose skips are mixed with what comes from below."""

    def _mix(self, level, up):
        return (f"decoder{level}_mix", "mix", (self._encoders[level].output, up))

    def _decoder(self, level):
        up = self._up(level, 0, again=False)
        widths = self.config.decoder_widths(level)
        skip = self._emit.plain(*self._mix(level, up), self._encoders[level].output.channels)
        return self._block(f"decoder{level}", (skip, up), widths)

    def _through_decoder(self, level, grad):
        name = f"decoder{level}"
        block = self._decoders[level]
        grad_first, grad_sum = self._through_block(block, grad)
        for index in range(2):
            self._emit.kernel_rows(f"{name}_conv1", block.entry, index)
        self._emit.filter_gradient(f"{name}_conv1", block.entry, grad_first)
        grad_up = self._entry_gradient(name, block.entry, 1, grad_first, grad_sum)
        grad_mixed = self._entry_gradient(name, block.entry, 0, grad_first, grad_sum)
        grad_skip, more = self._emit.plain_gradients(*self._mix(level, block.entry[1]), grad_mixed)
        grad_up = self._emit.add(grad_up, more)
        grad_kernel, grad_below = self._emit.up_gradients(level, 0, self._below(level), grad_up)
        self._emit.join_gradients(self._emit.up_layer(level), [grad_kernel])
        return grad_skip, grad_below


@pytest.fixture
def mixing(monkeypatch):
    def weights(channels):
        return {"kernel": (1, 1, 1, channels[1], 1), "bias": (1,)}

    monkeypatch.setitem(PLAIN, "mix", PlainOperation(weights, mixed))
    monkeypatch.setattr(network, "_Network", Mixed)
    network.network_program.cache_clear()
    yield
    network.network_program.cache_clear()


def test_its_gradients_are_those_of_the_layers(needs_native, mixing):
    config = UNetConfig(filters=4, depth=3, residual=True, norm="batch")
    expected = step(config, network=layers_of)
    assert max(distances(step(config).gradients, expected.gradients)) < 1e-3


def test_its_weights_and_maps_are_counted(mixing):
    unet = UNetConfig(filters=4, depth=2, outputs=1)
    model = build_unet3d(unet, GRID)
    named = network_weights(unet)
    assert [weight.shape for weight in named] == [weight.shape for weight in model.weights]
    assert {"decoder0_mix"} <= {weight.layer for weight in named}
    for instructions in ("avx2", ""):  # by native operations, and by layers
        step = step_of(Job(unet, GRID, threads=2), instructions)
        names = {op.name for op in step.ops}
        assert {"decoder0_mix", "decoder0_mix/gradient"} <= names


def test_an_average_and_its_interpolation_lie_at_the_centres_of_voxels():
    """A ramp stays one, but half a voxel from each end it has the last mean."""
    ramp = tf.reshape(tf.range(8.0), (1, 8, 1, 1, 1)) * tf.ones((1, 8, 1, 2, 3))
    means = PLAIN["average 2,1,1"].compute([ramp], {})
    assert means[0, :, 0, 1, 2].numpy().tolist() == [0.5, 2.5, 4.5, 6.5]
    for axes, strides in (((1, 2, 3), "2,1,1"), ((2, 1, 3), "1,2,1"), ((3, 2, 1), "1,1,2")):
        turned = tf.transpose(means, (0, *axes, 4))
        grown = tf.transpose(PLAIN[f"interpolate {strides}"].compute([turned], {}), (0, *axes, 4))
        assert grown[0, :, 0, 1, 2].numpy().tolist() == [0.5, 1, 2, 3, 4, 5, 6, 6.5]
