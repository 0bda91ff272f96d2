"""A batch in micro-batches is the batch: the same gradients and weights to rounding."""

import numpy as np
import pytest
import tensorflow as tf

from cpu3d.errors import InputError
from cpu3d.settings import RunConfig
from cpu3d.training.learner import Learner
from models.config import UNetConfig
from tests.cpu3d.distributed.test_learning import flat
from tests.cpu3d.runs import shared_learner

SIDE = 16
BATCH = 4
UNET = UNetConfig(channels=2, outputs=2, filters=4, depth=2)


def config(micro_batch, batch=BATCH, side=SIDE, unet=UNET, **settings):
    return RunConfig(grid=(side,) * 3, unet=unet, batch=batch, micro_batch=micro_batch, **settings)


def learner(micro_batch):
    """A learner with its initial weights; it is compiled once for all tests."""
    return shared_learner(config(micro_batch))


def volumes(count=BATCH, side=SIDE, seed=0):
    rng = np.random.default_rng(seed)
    image = rng.standard_normal((count, side, side, side, UNET.channels)).astype("f4")
    # Volumes unlike each other, so that no micro-batch can stand for another.
    share = np.linspace(0.05, 0.6, count).reshape((count, 1, 1, 1, 1))
    return image, (rng.random((count, side, side, side, UNET.outputs)) < share).astype("u1")


def micro_batches(pair, micro):
    image, target = pair
    for begin in range(0, len(image), micro):
        yield tf.constant(image[begin : begin + micro]), tf.constant(target[begin : begin + micro])


def trained(learned, steps=2):
    """The outcomes of the steps, and all variables after them."""
    outcomes = [
        learned.step(micro_batches(volumes(seed=step), learned.config.micro), 1e-2)
        for step in range(steps)
    ]
    return outcomes, copied(learned)


def copied(learned):
    return {name: np.array(array) for name, array in learned.arrays().items()}


def test_two_steps_in_micro_batches_end_with_the_whole_batch_s_weights_and_counters():
    outcomes, arrays = trained(learner(BATCH))
    outcomes_of_ones, arrays_of_ones = trained(learner(1))
    assert list(arrays_of_ones) == list(arrays)
    # A small gradient is mostly rounding, and Adam divides by its size: only all weights together
    # are alike.
    for kind in ("model", "optimizer"):
        expected = flat(arrays, kind)
        distance = np.linalg.norm(flat(arrays_of_ones, kind) - expected)
        assert distance <= 3e-3 * np.linalg.norm(expected)
    assert arrays_of_ones["updates"] == 2
    for outcome, of_ones in zip(outcomes, outcomes_of_ones):
        assert of_ones.dice.shape == (BATCH, UNET.outputs)
        np.testing.assert_allclose(of_ones.loss, outcome.loss, rtol=1e-5)
        np.testing.assert_allclose(of_ones.dice, outcome.dice, rtol=1e-4)


def test_a_voxel_that_is_not_finite_ends_the_step_before_anything_is_updated():
    learned = learner(1)
    learned.optimizer.learning_rate.assign(1e-2)
    before = copied(learned)
    _, expected = trained(learned, 1)
    learned.restore(before)
    image, target = volumes()
    image[1, 0, 0, 0, 0] = np.nan
    outcome = learned.step(micro_batches((image, target), 1), 1e-2)
    # The third and fourth were not computed.
    assert np.isfinite(outcome.losses).tolist() == [True, False, True, True]
    assert not np.isfinite(outcome.loss)
    assert not outcome.dice[2:].any()
    np.testing.assert_equal(copied(learned), before)
    # Nor does anything of it stay in the sums.
    np.testing.assert_equal(trained(learned, 1)[1], expected)


def test_a_gradient_that_is_not_finite_is_seen_in_the_loss(monkeypatch):
    learned = Learner(config(1))
    computed = learned.model.loss_and_gradients

    def overflowing(*arguments):
        loss, dice, gradients = computed(*arguments)
        return loss, dice, [gradient * np.inf for gradient in gradients]

    monkeypatch.setattr(learned.model, "loss_and_gradients", overflowing)
    assert not np.isfinite(learned.step(micro_batches(volumes(), 1), 1e-2).loss)


def test_what_was_made_of_variables_is_the_same_to_the_bit_when_they_are_released():
    first = Learner(config(1, 1))
    first.step(micro_batches(volumes(1), 1), 1e-2)
    values = copied(first)
    second = Learner(config(1, 1))
    second.restore(first.arrays())
    first.release()
    assert all(np.size(array) == 0 for array in first.arrays().values())
    np.testing.assert_equal(copied(second), values)


def test_arrays_stay_as_they_were_while_training_goes_on():
    learned = learner(1)
    before = copied(learned)
    held = learned.arrays()
    _, after = trained(learned, 1)
    assert np.any(after["model/000"] != before["model/000"])
    assert learned.largest_bytes == max(array.nbytes for array in after.values())
    learned.restore(held)
    np.testing.assert_equal(copied(learned), before)
    with pytest.raises(InputError, match=r"must hold this run's .* got others for \['updates'\]"):
        learned.restore({**held, "updates": held["model/000"]})
