"""A batch in parts is the batch: the same gradients, weights and averages to rounding, in the memory of one part."""

import dataclasses
import weakref

import numpy as np
import pytest
import tensorflow as tf

from cpu3d.config import RunConfig
from cpu3d.learner import Learner, allocator_peak_bytes
from models.config import UNetConfig

SIDE, BATCH = 16, 4
UNET = UNetConfig(channels=2, outputs=2, filters=4, depth=2)


def learner(micro_batch, batch=BATCH, side=SIDE, unet=UNET, **settings):
    return Learner(RunConfig(grid=(side,) * 3, unet=unet, batch=batch, micro_batch=micro_batch, **settings))


def volumes(count=BATCH, side=SIDE, seed=0):
    rng = np.random.default_rng(seed)
    image = rng.standard_normal((count, side, side, side, UNET.channels)).astype("f4")
    # Volumes unlike each other, so that no part can stand for another.
    share = np.linspace(0.05, 0.6, count).reshape((count, 1, 1, 1, 1))
    return image, (rng.random((count, side, side, side, UNET.outputs)) < share).astype("u1")


def parts(pair, micro):
    image, target = pair
    for begin in range(0, len(image), micro):
        yield tf.constant(image[begin : begin + micro]), tf.constant(target[begin : begin + micro])


def gradients(one, pair):
    """Those that the first step updates with."""
    if one.config.parts == 1:
        # Compiled like the parts: computed eagerly, a value beside zero may lie on the other side of its ReLU.
        return [gradient.numpy() for gradient in tf.function(one._gradients)(*next(parts(pair, BATCH)))[2]]
    one.step(parts(pair, one.config.micro), 1e-2)
    return [total.numpy() for total in one._sums]


def assert_alike(found, expected, within):
    """Each array's distance is at most so large a share of the array."""
    for name, (a, b) in enumerate(zip(found, expected)):
        assert np.linalg.norm(a - b) <= within * np.linalg.norm(b), name


def trained(one, steps=2):
    """What the steps returned, and all variables after them."""
    said = [one.step(parts(volumes(seed=step), one.config.micro), 1e-2) for step in range(steps)]
    return said, one.arrays()


NETWORKS = [
    ({}, 1),
    ({}, 2),
    ({"norm": "none", "residual": True}, 2),
    ({"policy": "balanced", "up": "upsampling"}, 2),
    ({"policy": "lean", "depth": 3, "deep_supervision": True}, 1),
]


@pytest.mark.parametrize(("network", "micro"), NETWORKS, ids=str)
def test_gradients_summed_over_parts_are_those_of_the_whole_batch(network, micro):
    unet = dataclasses.replace(UNET, **network)
    whole = gradients(learner(BATCH, unet=unet), volumes())
    assert_alike(gradients(learner(micro, unet=unet), volumes()), whole, 1e-5)


@pytest.mark.parametrize(("optimizer", "micro"), [("adam", 2), ("sgd", 1)])
def test_two_steps_in_parts_end_with_the_whole_batch_s_weights_averages_and_counters(optimizer, micro):
    said, arrays = trained(learner(BATCH, optimizer=optimizer, ema=0.9))
    said_of_parts, arrays_of_parts = trained(learner(micro, optimizer=optimizer, ema=0.9))
    assert list(arrays_of_parts) == list(arrays)
    assert_alike(arrays_of_parts.values(), arrays.values(), 2e-5)
    assert arrays_of_parts["updates"] == 2
    for (loss, dice), (loss_of_parts, dice_of_parts) in zip(said, said_of_parts):
        assert dice_of_parts.shape == (BATCH, UNET.outputs)
        np.testing.assert_allclose(loss_of_parts, loss, rtol=1e-5)
        np.testing.assert_allclose(dice_of_parts, dice, rtol=1e-4)


def test_with_batch_norm_parts_are_another_training():
    unet = dataclasses.replace(UNET, norm="batch")
    whole = gradients(learner(BATCH, unet=unet), volumes())
    with pytest.raises(AssertionError):
        assert_alike(gradients(learner(2, unet=unet), volumes()), whole, 0.1)


def test_a_step_takes_its_parts_one_after_another_and_keeps_none():
    one, alive = learner(1), []

    def given():
        for image, target in parts(volumes(8), 1):
            assert all(before() is None for before in alive)
            alive.append(weakref.ref(image))
            yield image, target
            del image, target

    stream = given()
    one.step(stream, 1e-2)
    assert len(alive) == BATCH
    one.step(stream, 1e-2)
    assert len(alive) == 2 * BATCH


def test_a_part_whose_loss_is_not_finite_ends_the_step_before_anything_is_updated():
    one, other = learner(1), learner(1)
    before = one.arrays()
    image, target = volumes()
    image[1] = np.inf
    loss, dice = one.step(parts((image, target), 1), 1e-2)
    assert not np.isfinite(loss)
    assert len(dice) == 2
    for name, array in one.arrays().items():
        if name != "optimizer/001":  # the learning rate
            np.testing.assert_array_equal(array, before[name], err_msg=name)
    # Nor does anything of it stay in the sums.
    one.step(parts(volumes(), 1), 1e-2)
    other.step(parts(volumes(), 1), 1e-2)
    for name, array in other.arrays().items():
        np.testing.assert_array_equal(one.arrays()[name], array, err_msg=name)


def test_the_peak_of_a_batch_in_parts_is_that_of_one_part():
    if allocator_peak_bytes() is None:
        pytest.skip("needs an engine that counts its memory")
    unet = dataclasses.replace(UNET, filters=8)
    peaks = {}
    for batch, micro in ((1, 1), (4, 1), (4, 4)):
        one = learner(micro, batch, 32, unet)
        given = next(parts(volumes(micro, 32), micro))
        for _ in range(2):
            one.step(iter([given] * one.config.parts), 1e-2)
        tf.config.experimental.reset_memory_stats("CPU:0")
        before = tf.config.experimental.get_memory_info("CPU:0")["current"]
        one.step(iter([given] * one.config.parts), 1e-2)
        peaks[batch, micro] = allocator_peak_bytes() - before
    assert peaks[4, 1] == pytest.approx(peaks[1, 1], rel=0.02)
    assert peaks[4, 4] > 3 * peaks[1, 1]
