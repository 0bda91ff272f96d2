"""Soft Dice and cross-entropy over regions: the training loss, float32 whatever the network computes in."""

from typing import Sequence, Tuple

import tensorflow as tf

SMOOTH = 1.0
"""Voxels added to both sides of the Dice ratio. A region absent from a case then scores 1 when nothing is predicted
and falls towards 0 with every voxel that is, instead of dividing 0 by 0."""


def dice_cross_entropy(target, logits) -> Tuple[tf.Tensor, tf.Tensor]:
    """1 - mean soft Dice + mean binary cross-entropy of `logits` (N, X, Y, Z, R) against a 0/1 `target` alike.

    Returns the loss (scalar) and the soft Dice (N, R). Dice is taken per sample and region and then averaged, so the
    loss of a batch is the mean of its samples' losses and an accumulated batch equals a full one.
    """
    target = tf.cast(target, tf.float32)
    logits = tf.cast(logits, tf.float32)
    dice = soft_dice(target, tf.sigmoid(logits))
    cross_entropy = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(target, logits))
    return 1 - tf.reduce_mean(dice) + cross_entropy, dice


def soft_dice(target, probability) -> tf.Tensor:
    """(2 sum(p t) + s) / (sum p + sum t + s) over the voxels of (N, X, Y, Z, R) float32 tensors; (N, R)."""
    voxels = (1, 2, 3)
    overlap = tf.reduce_sum(probability * target, voxels)
    size = tf.reduce_sum(probability, voxels) + tf.reduce_sum(target, voxels)
    return (2 * overlap + SMOOTH) / (size + SMOOTH)


def deep_supervision_loss(target, logits: Sequence[tf.Tensor]) -> Tuple[tf.Tensor, tf.Tensor]:
    """`dice_cross_entropy` at every head, weighted 1, 1/2, 1/4 ... from fine to coarse, the weights summing to 1.

    `logits` has the finest first. The target of a coarser head is every 2nd, 4th ... voxel of the full one.
    Returns the loss and the soft Dice of the finest head.
    """
    loss, dice = dice_cross_entropy(target, logits[0])
    total, weights = loss, 1.0
    for coarse in logits[1:]:
        step = target.shape[1] // coarse.shape[1]
        weight = 1 / step
        total += weight * dice_cross_entropy(target[:, ::step, ::step, ::step], coarse)[0]
        weights += weight
    return total / weights, dice


def hard_dice_counts(target, logits) -> tf.Tensor:
    """Voxel counts (N, R, 3) float64: overlap, predicted, true, with a voxel predicted where its logit is positive."""
    truth = tf.cast(target, tf.bool)
    predicted = logits > 0
    counts = [
        # Counted per X slab in float32 (exact below 2**24 voxels), then summed in float64.
        tf.reduce_sum(tf.cast(tf.reduce_sum(tf.cast(mask, tf.float32), (2, 3)), tf.float64), 1)
        for mask in (truth & predicted, predicted, truth)
    ]
    return tf.stack(counts, -1)
