"""Memory policies are the same mathematics: the same weights, answers, gradients and training, to rounding."""

import dataclasses
import functools

import numpy as np
import pytest
import tensorflow as tf

from cpu3d.config import RunConfig
from cpu3d.training.learner import Learner
from cpu3d.training.losses import deep_supervision_loss, dice_cross_entropy
from models.config import NORMS, POLICIES, UNetConfig
from models.unet3d import build_unet3d

LEANER = POLICIES[1:]

NETWORKS = {
    "instance": (UNetConfig(filters=4, depth=4), 2),
    "residual, batch norm, upsampling": (
        UNetConfig(filters=4, depth=4, residual=True, norm="batch", up="upsampling"),
        2,
    ),
    "deep supervision, no norm": (UNetConfig(filters=4, depth=4, deep_supervision=True, norm="none"), 1),
    "cicek, residual": (UNetConfig(filters=4, depth=4, network="cicek2016", residual=True), 1),
}
"""For 32^3: every norm, both ways up, residual or not, one head or several, both networks, a batch of 1 and of 2."""

DRAWS = range(2, 6)
"""Of weights and volumes. Of a million values one may lie so close to 0 that the order of a sum opens or closes its
ReLU, and with it goes up to 2e-3 of the gradients of all layers before it, in "speed" alone no less than between two
policies. That is one draw in five, and none of these with the kernels that they were chosen on."""


@dataclasses.dataclass(frozen=True)
class Step:
    loss: float
    logits: list
    gradients: list
    weights: list
    """After the step: batch norm's statistics have moved."""


@functools.cache
def step(config, batch, side=32, eager=False, draw=0):
    """A training step without the update, on weights unlike the first ones, so that none is 0 or 1."""
    rng = np.random.default_rng(draw)
    model = build_unet3d(config, (side,) * 3, batch)
    model.set_weights([weight + rng.normal(0, 0.05, weight.shape) for weight in model.get_weights()])
    image = tf.cast(rng.standard_normal((batch, side, side, side, config.channels)), config.dtype)
    target = tf.constant(rng.random((batch, side, side, side, config.outputs)) < 0.1, tf.uint8)

    def function(image, target):
        with tf.GradientTape() as tape:
            logits = model(image, training=True)
            loss_of = deep_supervision_loss if config.deep_supervision else dice_cross_entropy
            loss, _ = loss_of(target, logits, by_slabs=config.policy != "speed")
        return loss, tf.nest.flatten(logits), tape.gradient(loss, model.trainable_variables)

    if not eager:
        function = tf.function(function).get_concrete_function(image, target)
    loss, logits, gradients = function(image, target)
    logits = [tf.cast(one, tf.float32).numpy() for one in logits]
    return Step(float(loss), logits, [one.numpy() for one in gradients], model.get_weights())


def under(config, policy):
    return dataclasses.replace(config, policy=policy)


def distances(found, expected):
    """Of each array, as a share of it."""
    assert [one.shape for one in found] == [one.shape for one in expected]
    return [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(found, expected)]


@pytest.mark.parametrize("policy", LEANER)
@pytest.mark.parametrize("network", NETWORKS)
def test_gradients_outputs_and_statistics_are_those_of_speed(network, policy):
    config, batch = NETWORKS[network]
    apart = []
    for draw in DRAWS:
        speed, leaner = (step(under(config, each), batch, draw=draw) for each in ("speed", policy))
        assert leaner.loss == pytest.approx(speed.loss, rel=1e-6)
        assert max(distances(leaner.logits, speed.logits)) < 2e-6
        for found, expected in zip(leaner.weights, speed.weights):
            np.testing.assert_allclose(found, expected, rtol=0, atol=5e-7)
        apart.append(max(distances(leaner.gradients, speed.gradients)))
        assert apart[-1] < 1e-2
        if apart[-1] < 1e-5:
            return
    pytest.fail(f"gradients must be within 1e-5 of speed's in one draw of {len(DRAWS)}, got {apart}")


@pytest.mark.parametrize("policy", LEANER)
def test_in_bfloat16_gradients_are_no_farther_from_float32s_than_speeds_and_closer_to_speeds(policy):
    """Maps made again are the same maps, and sums are rounded in another order: of this net's gradients, all in one,
    bfloat16 takes 0.42 of float32's length away under every policy, and policies are 0.08 apart."""
    config = UNetConfig(filters=4, depth=4, dtype="bfloat16")
    exact = step(under(dataclasses.replace(config, dtype="float32"), "speed"), 1)
    speed, leaner = (step(under(config, each), 1) for each in ("speed", policy))
    exact, speed, leaner = (np.concatenate([g.ravel() for g in one.gradients]) for one in (exact, speed, leaner))
    (rounding,) = distances([speed], [exact])
    assert distances([leaner], [exact])[0] < 1.1 * rounding
    assert distances([leaner], [speed])[0] < 0.5 * rounding


@pytest.mark.parametrize("policy", LEANER)
def test_without_a_compiled_step_it_is_the_same(policy):
    config = UNetConfig(channels=1, outputs=1, filters=2, depth=2, residual=True, policy=policy)
    eager, compiled = step(config, 1, side=8, eager=True), step(config, 1, side=8)
    # One value beside zero may lie on the other side of its ReLU: the engine fuses what it compiles.
    assert eager.loss == pytest.approx(compiled.loss, rel=1e-4)
    assert max(distances(eager.gradients, compiled.gradients)) < 1e-2


@functools.cache
def losses(policy, steps=30):
    """Of a short training to find a noisy ball and its heart."""
    unet = UNetConfig(channels=1, outputs=2, filters=4, depth=3, policy=policy)
    learner = Learner(RunConfig(grid=(16, 16, 16), unet=unet, learning_rate=1e-2))
    rng = np.random.default_rng(0)
    found = []
    for _ in range(steps):
        centre = rng.integers(4, 12, 3).reshape(3, 1, 1, 1)
        far = np.sqrt(((np.indices((16, 16, 16)) - centre) ** 2).sum(0))
        target = np.stack([far < 5, far < 3], -1)[None].astype("u1")
        image = (target.sum(-1, keepdims=True) + rng.normal(0, 0.3, (1, 16, 16, 16, 1))).astype("f4")
        found.append(learner.step(iter([(tf.constant(image), tf.constant(target))]), 1e-2).loss)
    return np.array(found)


@pytest.mark.parametrize("policy", LEANER)
def test_thirty_steps_of_training_follow_the_same_curve(policy):
    speed, leaner = losses("speed"), losses(policy)
    assert speed[-5:].mean() < 0.6 * speed[0]  # it learns: not the same curve for want of any
    apart = np.abs(leaner - speed) / speed
    assert apart[:5].max() < 1e-5
    assert apart.max() < 1e-3  # 4e-7 where no ReLU opens or closes on the way (see DRAWS), and what grows from it else


SMALL = [
    UNetConfig(filters=2, depth=3, norm=norm, residual=residual, up=up, deep_supervision=residual, network=network)
    for norm, residual, up, network in [
        *((norm, False, "transposed", "unet3d") for norm in NORMS),
        ("batch", True, "upsampling", "cicek2016"),
        ("instance", True, "transposed", "unet3d"),
        ("none", False, "upsampling", "unet3d"),
    ]
]


@pytest.mark.parametrize("policy", LEANER)
@pytest.mark.parametrize("config", SMALL, ids=str)
def test_a_checkpoint_of_one_policy_is_one_of_every_other(config, policy):
    """Variables are told apart by their order alone, in the network, the optimizer and the averages."""
    speed, leaner = (build_unet3d(under(config, each), (8, 8, 8), 1) for each in ("speed", policy))
    assert [w.shape for w in leaner.trainable_variables] == [w.shape for w in speed.trainable_variables]
    for found, expected in zip(leaner.get_weights(), speed.get_weights()):
        np.testing.assert_array_equal(found, expected)  # seeds go by the layer's name: it is the same one's
    of_name = [[w.name.split("/")[-1] for w in model.weights] for model in (leaner, speed)]
    assert of_name[0] == of_name[1]

    rng = np.random.default_rng(0)
    leaner.set_weights([rng.uniform(0.5, 1.5, weight.shape) for weight in speed.get_weights()])
    speed.set_weights(leaner.get_weights())
    image = tf.constant(rng.standard_normal((1, 8, 8, 8, 4)), tf.float32)
    for answers in zip(*(tf.nest.flatten(model(image)) for model in (leaner, speed))):
        np.testing.assert_allclose(*answers, rtol=1e-6, atol=1e-6)
