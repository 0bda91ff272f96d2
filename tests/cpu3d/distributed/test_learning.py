"""A step of several workers: the whole batch's gradients, the same weights everywhere, their notes
for each other."""

import dataclasses
from unittest.mock import Mock

import numpy as np
import pytest
import tensorflow as tf

from cpu3d.errors import WorkerLostError, WorkersDifferError
from cpu3d.settings import RunConfig
from cpu3d.training.learner import Learner, fingerprint
from models.config import UNetConfig
from models.unet3d import build_unet3d
from tests.cpu3d.distributed.threads import together

pytestmark = pytest.mark.usefixtures("graphs_as_written")

BATCH = 4
SIDE = 16
UNET = UNetConfig(filters=4, depth=2, channels=2, outputs=2)
CONFIG = RunConfig(grid=(SIDE,) * 3, unet=UNET, batch=BATCH, micro_batch=1, optimizer="sgd")


def batch(seed=0):
    rng = np.random.default_rng(seed)
    shape = (BATCH, SIDE, SIDE, SIDE, 2)
    return rng.normal(size=shape).astype("f4"), rng.integers(0, 2, shape).astype("u1")


def share_of(exchange, pair, micro=1):
    """A worker's own micro-batches."""
    own = BATCH // exchange.count
    for begin in range(exchange.rank * own, (exchange.rank + 1) * own, micro):
        yield tuple(tf.constant(part[begin : begin + micro]) for part in pair)


def flat(arrays, kind):
    """The arrays of one kind (weights, optimizer, ...), as one vector."""
    return np.concatenate(
        [array.ravel() for name, array in arrays.items() if name.split("/")[0] == kind]
    )


def state_of(learner):
    """A copy of all that a step changes, but for the learning rate."""
    arrays = {name: np.array(array) for name, array in learner.arrays().items()}
    del arrays["optimizer/001"]
    return arrays


def test_workers_learn_as_one_know_of_each_other_and_refuse_other_weights():
    config = dataclasses.replace(CONFIG, optimizer="adam")

    def train(exchange):
        learner = Learner(config, exchange)
        note = lambda: 15.0 * exchange.rank
        outcomes = [learner.step(share_of(exchange, batch(step)), 0.01, note) for step in range(3)]
        held = state_of(learner)
        image, target = batch()
        image[3, 5, 5, 5, 0] = np.nan
        bad = learner.step(share_of(exchange, (image, target)), 0.01)
        np.testing.assert_equal(state_of(learner), held)
        if exchange.count > 1:
            weight = learner.model.trainable_variables[0]
            weight.assign(weight + 1e-3 * exchange.rank)
            with pytest.raises(WorkersDifferError, match=r"got fingerprints .*worker 1"):
                learner.step(share_of(exchange, batch()), 0.01)
        return outcomes, held, bad

    ((expected, arrays, _),) = together(1, train)
    results = together(2, train)
    np.testing.assert_equal(results[1][1], results[0][1], "the same on all, to the bit")
    for outcomes, held, bad in results:
        for a, b in zip(expected, outcomes):
            np.testing.assert_allclose(b.losses, a.losses, rtol=1e-5)
            np.testing.assert_allclose(b.dice, a.dice, rtol=1e-4)
            assert b.notes.tolist() == [0.0, 15.0], "all get the note of each"
        # A small gradient is mostly rounding, and Adam divides by its size: only all weights
        # together are alike.
        change = flat(held, "model") - flat(arrays, "model")
        assert np.linalg.norm(change) <= 3e-3 * np.linalg.norm(flat(arrays, "model"))
        # A loss that is not finite is known to all by its place, and none updates.
        assert np.isfinite(bad.losses).tolist() == [True, True, True, False]


def test_with_batch_norm_each_has_statistics_of_its_own_share_and_keeps_the_mean_of_all(
    monkeypatch,
):
    """And a step in which a worker is lost leaves every variable as it was."""
    unet = dataclasses.replace(UNET, norm="batch")
    config = dataclasses.replace(CONFIG, unet=unet, micro_batch=2)

    def statistics(network):
        return [variable.numpy() for variable in network.non_trainable_variables]

    def moved(exchange):
        learner = Learner(config, exchange)
        learner.step(share_of(exchange, batch(), 2), 0.01)
        moving = statistics(learner.model)
        before = state_of(learner)
        lost = Mock(side_effect=WorkerLostError("worker 1 must answer"))
        monkeypatch.setattr(exchange, "sum", lost)
        with pytest.raises(WorkerLostError):
            learner.step(share_of(exchange, batch(1), 2), 0.01)
        np.testing.assert_equal(state_of(learner), before)
        return moving

    alone = []
    for own in (0, 2):
        model = build_unet3d(unet, config.grid, 2)
        model(batch()[0][own : own + 2], training=True)
        alone.append(statistics(model))
    for arrays in together(2, moved):
        for a, b, c in zip(*alone, arrays):
            np.testing.assert_allclose(c, (a + b) / 2, rtol=1e-5, atol=1e-7)


def test_a_frozen_encoder_stays_to_the_bit_on_all_workers():
    """Of three, by which a third of a number is rounded. Batch norm has statistics, which workers
    take the mean of."""
    unet = dataclasses.replace(UNET, norm="batch")
    config = dataclasses.replace(
        CONFIG, unet=unet, batch=3, init="/a/run", freeze="encoder", optimizer="muon"
    )

    def train(exchange):
        learner = Learner(config, exchange)
        weights = learner.model.weights
        before = learner.model.get_weights()
        own = slice(exchange.rank, exchange.rank + 1)
        learner.step(iter([tuple(tf.constant(array[own]) for array in batch())]), 0.01)
        after = learner.model.get_weights()
        for weight, a, b in zip(weights, before, after):
            assert np.array_equal(a, b) == weight.name.startswith("encoder")
        return after

    results = together(3, train)
    np.testing.assert_equal(results, results[:1] * 3)


def test_the_fingerprint_hangs_on_every_bit_and_on_no_order_of_addition():
    weights = np.random.default_rng(0).normal(size=2**20).astype("f4")
    other = weights.copy()
    other.view("i4")[12345] += 1
    expected = fingerprint([tf.constant(weights)])
    assert fingerprint([tf.constant(weights[::-1])]) == expected, "threads add up in any order"
    assert fingerprint([tf.constant(other)]) != expected
