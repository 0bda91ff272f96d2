"""Soft Dice and cross-entropy over regions: the training loss, float32 whatever the network computes in."""

from typing import Sequence, Tuple

import tensorflow as tf

SMOOTH = 1.0
"""Voxels added to both sides of the Dice ratio. A region absent from a case then scores 1 when nothing is predicted
and falls towards 0 with every voxel that is, instead of dividing 0 by 0."""


def dice_cross_entropy(target, logits) -> Tuple[tf.Tensor, tf.Tensor]:
    """1 - mean soft Dice + mean binary cross-entropy of `logits` (N, X, Y, Z, R) against a 0/1 `target` alike.

    Returns the loss (scalar) and the soft Dice (N, R), which carries no gradient. Dice is taken per sample and region
    and then averaged, so the loss of a batch is the mean of its samples' losses and an accumulated batch equals a full
    one. The gradient is written out: automatic differentiation passes over the maps twice as often.
    """
    target, shape, dtype = tf.stop_gradient(target), logits.shape, logits.dtype

    @tf.custom_gradient
    def loss_and_dice(logits):
        z, t = _rows(logits), _rows(target)
        voxels = tf.cast(tf.size(z), tf.float32)
        cross_entropy = (tf.reduce_sum(tf.nn.softplus(z)) - tf.reduce_sum(z * t)) / voxels
        # In this order the sigmoid can lie where z lay, and no more than four maps live at a time.
        with tf.control_dependencies([cross_entropy]):
            p = tf.sigmoid(z)
        overlap, predicted, true = (_per_region(m, shape[-1]) for m in (p * t, p, t))
        size = predicted + true + SMOOTH
        dice = (2 * overlap + SMOOTH) / size

        def gradient(upstream, _):
            # d loss / dz = p (1 - p) (a t + b) + c (p - t), with a and b per sample and region.
            scale = upstream / tf.cast(tf.size(dice), tf.float32)
            a, b, c = -2 * scale / size, scale * dice / size, upstream / voxels
            a, b = (_like_rows(weight, z) for weight in (a, b))
            dz = a * t + b
            with tf.control_dependencies([dz]):
                dz = p * ((1 - p) * dz + c)
            with tf.control_dependencies([dz]):
                dz = dz - c * t
            return tf.reshape(tf.cast(dz, dtype), tf.shape(logits))

        return (1 - tf.reduce_mean(dice) + cross_entropy, dice), gradient

    loss, dice = loss_and_dice(logits)
    return loss, tf.stop_gradient(dice)


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
    """Voxel counts (N, R, 3) float64: overlap, predicted, true, with a voxel predicted from a probability of 0.5 on."""
    truth = tf.cast(target, tf.bool)
    predicted = logits >= 0
    counts = [
        # Counted per X slab in float32 (exact below 2**24 voxels), then summed in float64.
        tf.reduce_sum(tf.cast(tf.reduce_sum(tf.cast(mask, tf.float32), (2, 3)), tf.float64), 1)
        for mask in (truth & predicted, predicted, truth)
    ]
    return tf.stack(counts, -1)


# --- Private helpers ---


def _rows(maps):
    """(N, X, Y, Z, R) -> (N, X * Y, Z * R) float32: broadcasting three values over the last axis is slow."""
    samples, size_x, size_y, size_z, regions = maps.shape
    return tf.reshape(
        tf.cast(maps, tf.float32), (-1 if samples is None else samples, size_x * size_y, size_z * regions)
    )


def _per_region(rows, regions: int):
    """Sum (N, X * Y, Z * R) over all voxels of each region: (N, R)."""
    column_sums = tf.reduce_sum(rows, 1)
    return tf.reduce_sum(tf.reshape(column_sums, (tf.shape(rows)[0], -1, regions)), 1)


def _like_rows(values, rows):
    """(N, R) -> (N, 1, Z * R), to broadcast along the rows."""
    return tf.tile(values, (1, rows.shape[2] // values.shape[1]))[:, None]
