"""A step of several workers: the whole batch's gradients, the same weights everywhere, their notes
for each other."""

import dataclasses
import re

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


def test_workers_learn_as_one_know_of_each_other_and_refuse_other_weights():
    config = dataclasses.replace(CONFIG, optimizer="adam")

    def train(exchange):
        learner = Learner(config, exchange)
        note = lambda: 15.0 * exchange.rank
        outcomes = [learner.step(share_of(exchange, batch(step)), 0.01, note) for step in range(3)]
        held = {name: np.array(array) for name, array in learner.arrays().items()}
        image, target = batch()
        image[3, 5, 5, 5, 0] = np.nan
        bad = learner.step(share_of(exchange, (image, target)), 0.01)
        after = {name: np.array(array) for name, array in learner.arrays().items()}
        if exchange.rank == 1:
            weight = learner.model.trainable_variables[0]
            weight.assign_add(tf.fill(weight.shape, 1e-3))
        try:
            differ = learner.step(share_of(exchange, batch()), 0.01)
        except WorkersDifferError as error:
            differ = error
        return outcomes, held, bad, after, differ

    ((expected, arrays, *_),) = together(1, train)
    results = together(2, train)
    for outcomes, held, bad, after, differ in results:
        for a, b in zip(expected, outcomes):
            np.testing.assert_allclose(b.losses, a.losses, rtol=1e-5)
            np.testing.assert_allclose(b.dice, a.dice, rtol=1e-4)
            assert b.notes.tolist() == [0.0, 15.0], "all get the note of each"
        for name, array in held.items():
            np.testing.assert_array_equal(
                array, results[0][1][name], err_msg=name
            )  # the same on all, to the bit
        # A small gradient is mostly rounding, and Adam divides by its size: only all weights
        # together are alike.
        for kind in {name.split("/")[0] for name in arrays}:
            of_two, of_one = (flat(mapping, kind) for mapping in (held, arrays))
            assert np.linalg.norm(of_two - of_one) <= 3e-3 * np.linalg.norm(of_one), kind
        # A loss that is not finite is known to all by its place, and none updates.
        assert np.flatnonzero(~np.isfinite(bad.losses)).tolist() == [3]
        assert not np.isfinite(bad.loss)
        for name, array in after.items():
            if name != "optimizer/001":  # the learning rate
                np.testing.assert_array_equal(array, held[name], err_msg=name)
        assert isinstance(differ, WorkersDifferError)
        assert re.search(
            "weights must be the same on all workers, got fingerprints .*worker 1", str(differ)
        )


def test_with_batch_norm_each_has_statistics_of_its_own_share_and_keeps_the_mean_of_all(
    monkeypatch,
):
    """And a step in which a worker is lost leaves every variable as it was."""

    def lost(vector):
        raise WorkerLostError("worker 1 must answer")

    config = dataclasses.replace(
        CONFIG, unet=dataclasses.replace(UNET, norm="batch"), micro_batch=2
    )

    def moved(exchange):
        learner = Learner(config, exchange)
        learner.step(share_of(exchange, batch(), 2), 0.01)
        moving = [variable.numpy() for variable in learner.model.non_trainable_variables]
        before = {name: np.array(array) for name, array in learner.arrays().items()}
        monkeypatch.setattr(exchange, "sum", lost)
        with pytest.raises(WorkerLostError):
            learner.step(share_of(exchange, batch(1), 2), 0.01)
        for name, array in learner.arrays().items():
            if name != "optimizer/001":  # the learning rate
                np.testing.assert_array_equal(array, before[name], err_msg=name)
        return moving

    model = build_unet3d(config.unet, config.grid, 2)
    alone = []
    initial = model.get_weights()
    for own in (0, 2):
        model.set_weights(initial)
        model(batch()[0][own : own + 2], training=True)
        alone.append([variable.numpy() for variable in model.non_trainable_variables])
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
        names = [weight.name for weight in learner.model.weights]
        before = learner.model.get_weights()
        image, target = (array[exchange.rank : exchange.rank + 1] for array in batch())
        learner.step(iter([(tf.constant(image), tf.constant(target))]), 0.01)
        return names, before, learner.model.get_weights()

    results = together(3, train)
    for names, before, after in results:
        moved = [name for name, a, b in zip(names, before, after) if not np.array_equal(a, b)]
        assert moved == [name for name in names if not name.startswith("encoder")]
        for array, expected in zip(after, results[0][2]):
            np.testing.assert_array_equal(array, expected)


def test_the_fingerprint_hangs_on_every_bit_and_on_no_order_of_addition():
    weights = np.random.default_rng(0).normal(size=2**20).astype("f4")
    other = weights.copy()
    other.view("i4")[12345] += 1
    prints = [float(fingerprint([tf.constant(array)])) for array in (weights, weights[::-1], other)]
    assert prints[0] == prints[1], "threads add up in an order of their own"
    assert prints[0] != prints[2]
