"""A network's loss as a layer: of one head or several, at once or in pieces along X, in one fixed order.

A loss is an object with three pure functions. Maps are float32 rows (n, X * Y, Z * R) of a piece of n samples with R
regions, `t` the target and `p` the sigmoid of the logits `z`.

    sums(t, z, regions)    (n, R, any), what adds up over the pieces of a sample, and p
    value(sums)            from those of whole samples: the loss, a score (N, R) and `factors`, a tuple of (N, R)
    slope(t, p, factors)   d loss / d z, from the factors of the piece's samples and proportional to them

`cpu3d.training.losses.DiceCrossEntropy` is one.
"""

from typing import Any, Callable, List, Sequence, Tuple

import tensorflow as tf

from models.layer_plan import PIECES
from models.passes import custom_gradient
from models.slabs import Cut

Gradient = Callable[[Any], Any]  # gradient of the loss -> gradient of the logits


class Supervision(tf.keras.layers.Layer):
    """(target, logits of each head) -> (loss, score (N, R) of the finest head).

    `target` is (N, X, Y, Z, R), 0 or 1; the first head has its grid, the others every 2nd, 4th ... voxel of it, and the
    losses are weighted as `head_weights`. (loss, score) may stand for the finest logits. The gradient is written out:
    automatic differentiation passes over the maps twice as often. With `by_pieces` no float32 map of the whole grid is
    made: the loss is computed a piece of X at a time, and again for the gradient.
    """

    def __init__(self, loss, by_pieces: bool = False, **kwargs):
        super().__init__(dtype="float32", autocast=False, **kwargs)
        self.loss, self.by_pieces = loss, by_pieces

    @tf.autograph.experimental.do_not_convert
    def call(self, target, finest, *coarse, training=None):
        weights = head_weights([target, *coarse])
        targets = [thinned(target, one) for one in coarse]
        if not isinstance(finest, (list, tuple)):
            total, score = weighted_sum(self.loss, [target, *targets], [finest, *coarse], weights, self.by_pieces)
        else:
            total, score = finest
            if coarse:
                total *= weights[0]
                total += weighted_sum(self.loss, targets, coarse, weights[1:], self.by_pieces, (total, score))[0]
        return total, tf.stop_gradient(score)


def head_weights(heads: Sequence) -> List[float]:
    """Of each head's loss, from their logits, the finest first: 1, 1/2, 1/4 ... by resolution, the sum being 1."""
    weights = [head.shape[1] / heads[0].shape[1] for head in heads]
    return [weight / sum(weights) for weight in weights]


def thinned(target, logits):
    """Every 2nd, 4th ... voxel of a target (N, X, Y, Z, R), on the grid of the logits."""
    step = target.shape[1] // logits.shape[1]
    return target[:, ::step, ::step, ::step] if step > 1 else target


def rows(maps):
    """(N, X, Y, Z, R) -> (N, X * Y, Z * R) float32: broadcasting three values over the last axis is slow."""
    samples, size_x, size_y, size_z, regions = maps.shape
    shape = (-1 if samples is None else samples, size_x * size_y, size_z * regions)
    return tf.reshape(tf.cast(maps, tf.float32), shape)


def weighted_sum(loss, targets, logits, weights=(1,), by_pieces=False, before=()):
    """The losses' weighted sum and the first one's score, after `before` and head after head both ways."""
    targets = [tf.stop_gradient(target) for target in targets]

    @custom_gradient
    def total_and_score(*logits):
        total, score, gradients = None, None, []
        for target, one, weight in zip(targets, logits, weights):
            with tf.control_dependencies(list(before) if total is None else [total]):
                own, own_score, gradient = (_by_pieces if by_pieces else _at_once)(loss, target, one)
            weighted = own if weight == 1 else weight * own
            total, score = (weighted, own_score) if total is None else (total + weighted, score)
            gradients.append(gradient)

        def gradient(upstream, _):
            found = []
            for weight, of_head in zip(weights, gradients):
                with tf.control_dependencies(found[-1:]):
                    found.append(of_head(upstream if weight == 1 else weight * upstream))
            return found

        return (total, score), gradient

    return total_and_score(*logits)


# --- Private helpers ---


def _at_once(loss, target, logits) -> Tuple[tf.Tensor, tf.Tensor, Gradient]:
    """Loss, score and gradient of one head; what the gradient reads is kept."""
    z, t = rows(logits), rows(target)
    sums, p = loss.sums(t, z, logits.shape[-1])
    own, score, factors = loss.value(sums)

    def gradient(upstream):
        slope = loss.slope(t, p, [factor * upstream for factor in factors])
        return tf.reshape(tf.cast(slope, logits.dtype), tf.shape(logits))

    return own, score, gradient


def _by_pieces(loss, target, logits) -> Tuple[tf.Tensor, tf.Tensor, Gradient]:
    """As `_at_once`, piece by piece, each waiting for the one before; nothing is kept."""
    samples, *grid, regions = logits.shape
    cut = Cut(samples, sorted({grid[0] * piece // PIECES for piece in range(PIECES + 1)}))
    flat = [cut.flat(target), cut.flat(logits)]

    def piece(where, before):
        with tf.control_dependencies(before):
            return [rows(maps[where][None]) for maps in flat]

    sums = []
    for where in cut.slices():
        t, z = piece(where, sums[-1:])
        sums.append(loss.sums(t, z, regions)[0])
    own, score, factors = loss.value(cut.sum_by_sample(sums))

    def gradient(upstream):
        found = []
        for where, mine in zip(cut.slices(), cut.of_sample([factor * upstream for factor in factors])):
            t, z = piece(where, found[-1:] or mine[:1])
            p = tf.sigmoid(z)
            with tf.control_dependencies([p]):
                found.append(tf.cast(loss.slope(t, p, mine), logits.dtype)[0])
        return tf.reshape(tf.concat(found, 0), logits.shape)

    return own, score, gradient
