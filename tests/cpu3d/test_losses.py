"""The loss against sums done by hand."""

import numpy as np
import pytest
import tensorflow as tf

from cpu3d.losses import SMOOTH, deep_supervision_loss, dice_cross_entropy, hard_dice_counts


def volume(values, shape=(1, 2, 2, 1, 1)):
    return tf.reshape(tf.constant(values, tf.float32), shape)


def logit(probabilities):
    p = np.clip(np.array(probabilities, "f4"), 1e-9, 1 - 1e-7)
    return volume(np.log(p / (1 - p)))


def by_definition(target, logits):
    """The loss spelled out, for automatic differentiation."""
    t, p, voxels = tf.cast(target, tf.float32), tf.sigmoid(logits), (1, 2, 3)
    size = tf.reduce_sum(p, voxels) + tf.reduce_sum(t, voxels)
    dice = (2 * tf.reduce_sum(p * t, voxels) + SMOOTH) / (size + SMOOTH)
    return 1 - tf.reduce_mean(dice) + tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(t, logits)), dice


def test_soft_dice_of_four_voxels():
    # overlap 0.5 + 1 = 1.5, sizes 0.5 + 1 + 0.5 = 2 and 2: (2 * 1.5 + 1) / (2 + 2 + 1)
    _, dice = dice_cross_entropy(volume([1, 1, 0, 0]), logit([0.5, 1, 0.5, 0]))
    np.testing.assert_allclose(dice, [[0.8]], rtol=1e-6)


def test_an_absent_region_scores_one_when_nothing_is_predicted_and_less_for_every_voxel_that_is():
    nothing = volume([0, 0, 0, 0])
    np.testing.assert_allclose(dice_cross_entropy(nothing, logit([0, 0, 0, 0]))[1], [[1]], rtol=1e-6)
    np.testing.assert_allclose(dice_cross_entropy(nothing, logit([1, 1, 1, 0]))[1], [[1 / 4]], rtol=1e-6)


def test_loss_and_gradient_are_those_of_the_definition():
    rng = np.random.default_rng(0)
    target = tf.constant(rng.random((2, 3, 4, 5, 3)) < [0.5, 0.1, 0.0], tf.uint8)
    logits = tf.constant(rng.normal(0, 4, (2, 3, 4, 5, 3)), tf.float32)
    results = []
    for function in (dice_cross_entropy, by_definition):
        with tf.GradientTape() as tape:
            tape.watch(logits)
            loss, dice = function(target, logits)
            weighted = 3 * loss
        results.append((loss, dice, tape.gradient(weighted, logits)))
    for written, differentiated in zip(*results):
        np.testing.assert_allclose(written, differentiated, rtol=2e-5, atol=1e-8)


def test_logits_of_zero_cost_log_two_and_half_of_dice():
    loss, dice = dice_cross_entropy(volume([1, 0, 0, 0]), volume([0, 0, 0, 0]))
    by_hand = (2 * 0.5 + 1) / (4 * 0.5 + 1 + 1)
    np.testing.assert_allclose(dice, [[by_hand]], rtol=1e-6)
    np.testing.assert_allclose(loss, 1 - by_hand + np.log(2), rtol=1e-6)


def test_the_loss_of_a_batch_is_the_mean_of_its_samples():
    rng = np.random.default_rng(0)
    target = tf.constant(rng.integers(0, 2, (3, 4, 4, 4, 2)), tf.uint8)
    logits = tf.constant(rng.normal(size=(3, 4, 4, 4, 2)), tf.float32)
    together, _ = dice_cross_entropy(target, logits)
    alone = [dice_cross_entropy(target[i : i + 1], logits[i : i + 1])[0] for i in range(3)]
    np.testing.assert_allclose(together, np.mean(alone), rtol=1e-6)


def test_deep_supervision_weighs_one_half_quarter_and_reads_every_nth_voxel():
    rng = np.random.default_rng(1)
    target = tf.constant(rng.integers(0, 2, (1, 8, 8, 8, 1)), tf.uint8)
    logits = [tf.constant(rng.normal(size=(1, n, n, n, 1)), tf.float32) for n in (8, 2, 4)]
    loss, dice = deep_supervision_loss(target, logits)
    parts = [dice_cross_entropy(target[:, ::s, ::s, ::s], x)[0] for s, x in zip((1, 4, 2), logits)]
    np.testing.assert_allclose(loss, (parts[0] + parts[1] / 4 + parts[2] / 2) / 1.75, rtol=1e-6)
    np.testing.assert_array_equal(dice, dice_cross_entropy(target, logits[0])[1])


def test_hard_counts_are_voxels_of_at_least_one_half():
    counts = hard_dice_counts(volume([1, 1, 0, 0]), volume([3, -1, 0.5, 0]))
    np.testing.assert_array_equal(counts, [[[1, 3, 2]]])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_loss_is_float32_whatever_the_logits_are(dtype):
    loss, _ = dice_cross_entropy(tf.zeros((1, 2, 2, 2, 1), tf.uint8), tf.zeros((1, 2, 2, 2, 1), dtype))
    assert loss.dtype == tf.float32
