"""Soft Dice and cross-entropy over regions: the training loss, float32 whatever the network computes in."""

from typing import Tuple

import tensorflow as tf

SMOOTH = 1.0
"""Voxels added to both sides of the Dice ratio. A region absent from a case then scores 1 when nothing is predicted
and falls towards 0 with every voxel that is, instead of dividing 0 by 0."""


class DiceCrossEntropy:
    """1 - mean soft Dice + mean binary cross-entropy, as the three functions that models/supervision.py asks for.

    Its score is the soft Dice (N, R). Dice is taken per sample and region and then averaged, so an accumulated batch
    equals a full one.
    """

    def sums(self, t, z, regions: int):
        """Of each region of a piece, (n, R, 4): cross-entropy, overlap, predicted, true; and the probabilities."""
        cross_entropy = _per_region(tf.nn.softplus(z), regions) - _per_region(z * t, regions)
        # In this order the sigmoid can lie where z lay, and no more than four maps live at a time.
        with tf.control_dependencies([cross_entropy]):
            p = tf.sigmoid(z)
        return tf.stack([cross_entropy, *(_per_region(m, regions) for m in (p * t, p, t))], -1), p

    def value(self, sums, voxels: float) -> Tuple[tf.Tensor, tf.Tensor, Tuple]:
        cross_entropy, overlap, predicted, true = tf.unstack(sums, axis=-1)
        size = predicted + true + SMOOTH
        dice = (2 * overlap + SMOOTH) / size
        count = tf.cast(tf.size(dice), tf.float32)
        loss = 1 - tf.reduce_mean(dice) + tf.reduce_mean(cross_entropy) / voxels
        return loss, dice, (-2 / (size * count), dice / (size * count), tf.ones_like(size[:, :1]) / (voxels * count))

    def slope(self, t, p, factors):
        """p (1 - p) (a t + b) + c (p - t), with a, b and c of the factors, in this order."""
        a, b = (tf.tile(each, (1, p.shape[2] // each.shape[1]))[:, None] for each in factors[:2])
        c = factors[2][:, None]
        dz = a * t + b
        with tf.control_dependencies([dz]):
            dz = p * ((1 - p) * dz + c)
        with tf.control_dependencies([dz]):
            return dz - c * t


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


def _per_region(rows, regions: int):
    """Sum (N, X * Y, Z * R) over all voxels of each region: (N, R)."""
    column_sums = tf.reduce_sum(rows, 1)
    return tf.reduce_sum(tf.reshape(column_sums, (tf.shape(rows)[0], -1, regions)), 1)
