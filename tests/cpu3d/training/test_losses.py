"""The loss against sums done by hand."""

import numpy as np
import pytest
import tensorflow as tf

from cpu3d.training.losses import DiceCrossEntropy, RegionDice
from models.config import UNetConfig
from models.losses import DEFAULT_LOSS, LOSSES
from models.native import operations
from models.native.shared import IGNORED
from models.supervision import head_weights, supervise


@pytest.fixture(params=["native operations", "TensorFlow's"])
def computed_by(request, monkeypatch):
    """Both ways in which a loss is computed."""
    if request.param == "TensorFlow's":
        monkeypatch.setattr(operations, "in_use", lambda: False)
    else:
        request.getfixturevalue("needs_native")


WEIGHTS = (1.0, 0.25, 0.5)  # of heads


@tf.custom_gradient
def dice_cross_entropy(target, *logits):
    """Loss and soft Dice, of one head or several."""
    supervised = supervise(LOSSES[DEFAULT_LOSS], target, logits, WEIGHTS[: len(logits)])
    return (supervised.loss, supervised.score), lambda upstream, _: (
        None,
        *supervised.slopes(upstream),
    )


def volume(values, shape=(1, 2, 2, 1, 1)):
    return tf.reshape(tf.constant(values, tf.float32), shape)


def by_definition(target, logits):
    """The loss spelled out, for automatic differentiation."""
    logits = tf.cast(logits, tf.float32)
    t, p, voxels = tf.cast(target, tf.float32), tf.sigmoid(logits), (1, 2, 3)
    size = tf.reduce_sum(p, voxels) + tf.reduce_sum(t, voxels)
    dice = (2 * tf.reduce_sum(p * t, voxels) + 1) / (size + 1)
    errors = p + t - 2 * p * t  # |p - t| where t is 0 or 1
    hard = tf.reduce_sum(tf.nn.sigmoid_cross_entropy_with_logits(t, logits) - errors, voxels)
    hard /= tf.stop_gradient(tf.reduce_sum(errors, voxels) + 1)
    return 1 - tf.reduce_mean(dice) + 0.1 * tf.reduce_mean(hard), dice


def test_heads_weigh_one_half_quarter_by_resolution():
    unet = UNetConfig(depth=4, strides=((2, 2, 1), (2, 2, 1), (2, 2, 2)), deep_supervision=True)
    assert head_weights(unet) == pytest.approx([4 / 7, 1 / 7, 2 / 7])
    assert head_weights(UNetConfig(depth=4)) == [1]


def test_deep_supervision_weighs_heads_and_reads_every_nth_voxel(computed_by):
    rng = np.random.default_rng(1)
    target = tf.constant(rng.integers(0, 2, (1, 8, 8, 8, 1)), tf.uint8)
    logits = []
    parts = []
    for step in (1, 4, 2):
        grid = (8 // step, 8 // step, 8)  # Z is not halved
        logits.append(tf.constant(rng.normal(size=(1, *grid, 1)), tf.float32))
        parts.append(dice_cross_entropy(target[:, ::step, ::step], logits[-1]))
    loss, dice = dice_cross_entropy(target, *logits)
    (full, expected_dice), (quarter, _), (half, _) = parts
    np.testing.assert_allclose(loss, full + quarter / 4 + half / 2, rtol=1e-6)
    np.testing.assert_array_equal(dice, expected_dice)


def test_as_a_loss_of_keras_it_is_of_each_sample_and_of_a_target_on_a_finer_grid(computed_by):
    rng = np.random.default_rng(2)
    target = tf.constant(rng.random((2, 8, 4, 2, 3)) < [0.5, 0.1, 0.0], tf.uint8)
    logits = tf.constant(rng.normal(0, 2, (2, 4, 2, 2, 3)), tf.float32)
    weights = tf.constant([1.0, 3.0])

    with tf.GradientTape() as tape:
        tape.watch(logits)
        loss = DiceCrossEntropy()(target, logits, sample_weight=weights)
    by_keras = (loss, tape.gradient(loss, logits))
    with tf.GradientTape() as tape:
        tape.watch(logits)
        thin = target[:, ::2, ::2]  # along Z the grids are equal
        each = [dice_cross_entropy(thin[n : n + 1], logits[n : n + 1])[0] for n in range(2)]
        expected = tf.reduce_mean(tf.stack(each) * weights)
    for value, own in zip(by_keras, (expected, tape.gradient(expected, logits))):
        np.testing.assert_allclose(value, own, rtol=1e-5, atol=1e-8)


def test_ignored_voxels_are_as_if_they_were_not_there(computed_by):
    """At the end of an axis, so that what is left is a volume; and in the coarser head's target."""
    rng = np.random.default_rng(3)
    target = rng.integers(0, 2, (2, 8, 4, 4, 3)).astype(np.uint8)
    target[:, 4:] = IGNORED
    heads = [tf.constant(rng.normal(0, 2, (2, n, n // 2, n // 2, 3)), tf.float32) for n in (8, 4)]
    results = []
    for kept in (8, 4):
        logits = [head[:, : kept // (8 // head.shape[1])] for head in heads]
        with tf.GradientTape() as tape:
            tape.watch(logits)
            loss, dice = dice_cross_entropy(tf.constant(target[:, :kept]), *logits)
        results.append((loss, dice, tape.gradient(loss, logits)))
    (loss, dice, slopes), (expected, expected_dice, expected_slopes) = results
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    np.testing.assert_allclose(dice, expected_dice, rtol=1e-6)
    for slope, wanted in zip(slopes, expected_slopes):
        half = wanted.shape[1]
        np.testing.assert_allclose(slope[:, :half], wanted, rtol=1e-5, atol=1e-9)
        assert not np.any(slope[:, half:])


def test_what_a_network_answers_where_voxels_are_ignored_changes_nothing(computed_by):
    target = volume([1, 0, IGNORED, IGNORED])
    values = []
    for answer in (5, np.nan):
        logits = volume([2, 1, answer, -answer])
        metric = RegionDice()
        metric.update_state(target, logits)
        values.append((float(DiceCrossEntropy()(target, logits)), float(metric.result())))
    assert values[0] == values[1]
    assert values[0][1] == pytest.approx(2 / 3)


def test_a_target_of_other_regions_is_refused():
    with pytest.raises(
        ValueError, match=r"y_true must .* got \(1, 4, 4, 4, 2\) for \(1, 4, 4, 4, 3\)"
    ):
        DiceCrossEntropy()(tf.zeros((1, 4, 4, 4, 2)), tf.zeros((1, 4, 4, 4, 3)))


def test_the_metric_is_the_mean_over_cases_of_a_region_or_of_all():
    """Dice of the first region: 2 * 1 / (1 + 2), and 1 in a case without and not predicted; of the
    second 0."""
    target = tf.constant([[[1, 1], [0, 0]], [[0, 1], [0, 1]]], tf.uint8)
    logits = tf.constant([[[2.0, -1], [0, -1]], [[-1, -1], [-1, -1]]])
    metrics = [RegionDice(), RegionDice(0), RegionDice(1)]
    for metric in metrics:
        metric.update_state(*(tf.reshape(array, (2, 2, 1, 1, 2)) for array in (target, logits)))
    np.testing.assert_allclose(
        [metric.result() for metric in metrics], [(2 / 3 + 1) / 4, (2 / 3 + 1) / 2, 0], rtol=1e-6
    )


@pytest.mark.parametrize(
    ("size_x", "dtype", "within"), [(20, "float32", 1e-5), (5, "bfloat16", 3e-3)]
)
def test_loss_and_gradient_are_those_of_the_definition(size_x, dtype, within, computed_by):
    """The last region is empty."""
    rng = np.random.default_rng(0)
    target = tf.constant(rng.random((2, size_x, 4, 6, 3)) < [0.4, 0.2, 0], tf.uint8)
    logits = tf.cast(rng.normal(0, 3, target.shape), dtype)
    results = []
    for function in (dice_cross_entropy, by_definition):
        with tf.GradientTape() as tape:
            tape.watch(logits)
            loss, dice = function(target, logits)
            weighted = 3 * loss
        results.append((loss, dice, tf.cast(tape.gradient(weighted, logits), tf.float32)))
    for value, expected in zip(*results):
        assert tf.norm(value - expected) <= within * tf.norm(expected)
    soft = 0.5 * tf.cast(target, tf.float32)
    soft_loss, expected = (each(soft, logits)[0] for each in (dice_cross_entropy, by_definition))
    assert abs(soft_loss - expected) <= within * expected
