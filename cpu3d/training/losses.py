"""Soft Dice and cross-entropy over regions: the training loss, float32 whatever the network computes in."""

from typing import Any, Callable, Sequence, Tuple

import numpy as np
import tensorflow as tf

SMOOTH = 1.0
"""Voxels added to both sides of the Dice ratio. A region absent from a case then scores 1 when nothing is predicted
and falls towards 0 with every voxel that is, instead of dividing 0 by 0."""


def dice_cross_entropy(target, logits, by_slabs: int = 0) -> Tuple[tf.Tensor, tf.Tensor]:
    """1 - mean soft Dice + mean binary cross-entropy of `logits` (N, X, Y, Z, R) against a 0/1 `target` alike.

    Returns the loss (scalar) and the soft Dice (N, R), which carries no gradient. Dice is taken per sample and region
    and then averaged, so an accumulated batch equals a full one. The gradient is written out: automatic differentiation
    passes over the maps twice as often. `by_slabs` (True, or how many) computes it a slab of X at a time, and again
    for the gradient: no float32 map of the whole grid is made.
    """
    return _weighted_sum([target], [logits], [1.0], by_slabs)


def deep_supervision_loss(target, logits: Sequence[tf.Tensor], by_slabs: int = 0) -> Tuple[tf.Tensor, tf.Tensor]:
    """`dice_cross_entropy` at every head, weighted 1, 1/2, 1/4 ... from fine to coarse, the weights summing to 1.

    `logits` has the finest first. The target of a coarser head is every 2nd, 4th ... voxel of the full one.
    Returns the loss and the soft Dice of the finest head.
    """
    steps = [target.shape[1] // one.shape[1] for one in logits]
    targets = [target if step == 1 else target[:, ::step, ::step, ::step] for step in steps]
    weights = [1 / step for step in steps]
    return _weighted_sum(targets, logits, [weight / sum(weights) for weight in weights], by_slabs)


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

SLABS = 8
"""Pieces a volume's loss is computed in: their float32 maps are then no larger than the logits of all of it."""

Gradient = Callable[[Any], Any]
"""Gradient of the loss -> gradient of the logits."""


def _weighted_sum(targets, logits, weights, by_slabs):
    """The losses' sum and the first one's Dice, head after head both ways: left alone, chance says which is first."""
    targets = [tf.stop_gradient(target) for target in targets]

    @tf.custom_gradient
    def total_and_dice(*logits):
        total, dice, gradients = None, None, []
        for target, one, weight in zip(targets, logits, weights):
            with tf.control_dependencies([] if total is None else [total]):
                loss, own_dice, gradient = (
                    _by_slabs(target, one, SLABS if by_slabs is True else by_slabs)
                    if by_slabs
                    else _at_once(target, one)
                )
            weighted = loss if weight == 1 else weight * loss
            total, dice = (weighted, own_dice) if total is None else (total + weighted, dice)
            gradients.append(gradient)

        def gradient(upstream, _):
            found = []
            for weight, of_head in zip(weights, gradients):
                with tf.control_dependencies(found[-1:]):
                    found.append(of_head(upstream if weight == 1 else weight * upstream))
            return found

        return (total, dice), gradient

    total, dice = total_and_dice(*logits)
    return total, tf.stop_gradient(dice)


def _at_once(target, logits) -> Tuple[tf.Tensor, tf.Tensor, Gradient]:
    """Loss, Dice and gradient of one head; what the gradient reads is kept."""
    z, t = _rows(logits), _rows(target)
    voxels = tf.cast(tf.size(z), tf.float32)
    cross_entropy = (tf.reduce_sum(tf.nn.softplus(z)) - tf.reduce_sum(z * t)) / voxels
    # In this order the sigmoid can lie where z lay, and no more than four maps live at a time.
    with tf.control_dependencies([cross_entropy]):
        p = tf.sigmoid(z)
    overlap, predicted, true = (_per_region(m, logits.shape[-1]) for m in (p * t, p, t))
    size = predicted + true + SMOOTH
    dice = (2 * overlap + SMOOTH) / size

    def gradient(upstream):
        scale = upstream / tf.cast(tf.size(dice), tf.float32)
        a, b, c = -2 * scale / size, scale * dice / size, upstream / voxels
        a, b = (_like_rows(weight, z) for weight in (a, b))
        return tf.reshape(tf.cast(_slope(p, t, a, b, c), logits.dtype), tf.shape(logits))

    return 1 - tf.reduce_mean(dice) + cross_entropy, dice, gradient


def _by_slabs(target, logits, count) -> Tuple[tf.Tensor, tf.Tensor, Gradient]:
    """As `_at_once`, slab by slab, each waiting for the one before; nothing is kept."""
    samples, size_x, size_y, size_z, regions = logits.shape
    # Cut along the first axis a piece is a view, no copy.
    z_rows, t_rows = (tf.reshape(m, (samples * size_x * size_y, size_z * regions)) for m in (logits, target))
    edges = sorted({size_y * (size_x * slab // count) for slab in range(count + 1)})
    slabs = [
        [(size_x * size_y * sample + first, size_x * size_y * sample + last) for first, last in zip(edges, edges[1:])]
        for sample in range(samples)
    ]

    def maps(slab, before):
        with tf.control_dependencies(before):
            return [tf.cast(rows[slice(*slab)], tf.float32)[None] for rows in (z_rows, t_rows)]

    cross_entropies, sums = [], []
    for of_sample in slabs:
        parts = []
        for slab in of_sample:
            z, t = maps(slab, parts[-1:] or sums[-1:])
            cross_entropies.append(tf.reduce_sum(tf.nn.softplus(z)) - tf.reduce_sum(z * t))
            with tf.control_dependencies(cross_entropies[-1:]):
                p = tf.sigmoid(z)
            parts.append(tf.concat([_per_region(m, regions) for m in (p * t, p, t)], 0))
        sums.append(tf.add_n(parts))
    voxels = float(np.prod(logits.shape))
    cross_entropy = tf.add_n(cross_entropies) / voxels
    overlap, predicted, true = tf.unstack(tf.stack(sums), axis=1)
    size = predicted + true + SMOOTH
    dice = (2 * overlap + SMOOTH) / size

    def gradient(upstream):
        scale = upstream / float(dice.shape.num_elements())
        a, b, c = -2 * scale / size, scale * dice / size, upstream / voxels
        if count > SLABS:
            # In one pass over memory, compiled: nothing but the result is made.
            a, b = (tf.tile(weight, [1, size_z])[:, None] for weight in (a, b))
            return tf.reshape(_slope_at_once(z_rows, t_rows, a, b, c), logits.shape)
        found = []
        for sample, of_sample in enumerate(slabs):
            own_a, own_b = (tf.tile(weight[sample], [size_z])[None, None] for weight in (a, b))
            for slab in of_sample:
                z, t = maps(slab, found[-1:] or [a])
                p = tf.sigmoid(z)
                with tf.control_dependencies([p]):
                    found.append(tf.cast(_slope(p, t, own_a, own_b, c), logits.dtype)[0])
        return tf.reshape(tf.concat(found, 0), logits.shape)

    return 1 - tf.reduce_mean(dice) + cross_entropy, dice, gradient


def _slope(p, t, a, b, c):
    """d loss / dz = p (1 - p) (a t + b) + c (p - t), with a and b per sample and region, in this order."""
    dz = a * t + b
    with tf.control_dependencies([dz]):
        dz = p * ((1 - p) * dz + c)
    with tf.control_dependencies([dz]):
        return dz - c * t


@tf.function(autograph=False, jit_compile=True)
def _slope_at_once(z, t, a, b, c):
    """`_slope` of rows (N * X * Y, Z * R), with a and b of each sample (N, 1, Z * R), in the dtype of z."""
    shape = (a.shape[0], -1, z.shape[1])
    wide, t = (tf.reshape(tf.cast(m, tf.float32), shape) for m in (z, t))
    p = tf.sigmoid(wide)
    return tf.reshape(tf.cast(p * ((1 - p) * (a * t + b) + c) - c * t, z.dtype), z.shape)


def _rows(maps):
    """(N, X, Y, Z, R) -> (N, X * Y, Z * R) float32: broadcasting three values over the last axis is slow."""
    samples, size_x, size_y, size_z, regions = maps.shape
    shape = (-1 if samples is None else samples, size_x * size_y, size_z * regions)
    return tf.reshape(tf.cast(maps, tf.float32), shape)


def _per_region(rows, regions: int):
    """Sum (N, X * Y, Z * R) over all voxels of each region: (N, R)."""
    column_sums = tf.reduce_sum(rows, 1)
    return tf.reduce_sum(tf.reshape(column_sums, (tf.shape(rows)[0], -1, regions)), 1)


def _like_rows(values, rows):
    """(N, R) -> (N, 1, Z * R), to broadcast along the rows."""
    return tf.tile(values, (1, rows.shape[2] // values.shape[1]))[:, None]
