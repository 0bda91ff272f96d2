"""The plain Keras graph is the trainer's network, written in another way."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from cpu3d.bench.plain import PlainLearner, build_plain
from cpu3d.config import RunConfig
from cpu3d.training.learner import Learner
from models.config import UNetConfig
from models.unet3d import build_unet3d

GRID = (16, 8, 12)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"norm": "batch"},
        {"norm": "none"},
        {"residual": True},
        {"up": "upsampling"},
        {"deep_supervision": True, "policy": "lean"},
        {"network": "cicek2016"},
    ],
    ids=str,
)
def test_it_computes_what_the_network_computes_with_the_same_weights(more):
    config = UNetConfig(filters=4, depth=3, **more)
    network, plain = build_unet3d(config, GRID, 2), build_plain(config, GRID, 2)
    rng = np.random.default_rng(0)
    weights = [
        rng.uniform(0.1, 0.5, w.shape).astype("f4") * rng.choice([-1, 1], w.shape) for w in network.get_weights()
    ]
    network.set_weights(weights)
    plain.set_weights(weights)
    x = rng.normal(size=(2, *GRID, 4)).astype("f4")
    for ours, theirs in zip(tf.nest.flatten(network(x, training=True)), tf.nest.flatten(plain(x, training=True))):
        assert float(tf.math.reduce_std(ours)) > 0.1
        np.testing.assert_allclose(theirs, ours, rtol=1e-3, atol=1e-3 * float(tf.math.reduce_std(ours)))


def test_it_consists_of_single_keras_layers_under_every_policy():
    names = {
        type(layer).__name__ for layer in build_plain(UNetConfig(filters=4, depth=3, policy="lean"), GRID, 1).layers
    }
    assert names == {
        *("InputLayer", "Conv3D", "InstanceNorm", "ReLU", "MaxPooling3D", "Conv3DTranspose", "Concatenate"),
    }


def test_a_run_in_micro_batches_is_refused():
    config = RunConfig(grid=GRID, unet=UNetConfig(filters=4, depth=3), batch=4, micro_batch=2)
    with pytest.raises(ValueError, match=r"micro_batch must be the whole batch of 4 .*, got 2; give 4$"):
        PlainLearner(config)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_a_step_does_what_the_trainer_s_step_does(optimizer):
    config = RunConfig(grid=GRID, unet=UNetConfig(filters=4, depth=3), batch=2, micro_batch=2, optimizer=optimizer)
    ours, plain = Learner(config), PlainLearner(config)
    plain.model.set_weights(ours.model.get_weights())
    rng = np.random.default_rng(1)
    image = tf.constant(rng.normal(size=(2, *GRID, 4)).astype("f4"))
    parts = itertools.repeat((image, tf.constant(rng.integers(0, 2, (2, *GRID, 3)).astype("u1"))))
    before = ours.model.get_weights()
    for _ in range(2):
        outcome, (plain_loss, plain_dice) = ours.step(parts, 1e-3), plain.step(parts, 1e-3)
        assert plain_loss == pytest.approx(outcome.loss, rel=1e-4)
        np.testing.assert_allclose(plain_dice, outcome.dice, rtol=1e-4)
    for old, new, other in zip(before, ours.model.get_weights(), plain.model.get_weights()):
        np.testing.assert_allclose(other - old, new - old, rtol=0.05, atol=0.05 * np.abs(new - old).max())
