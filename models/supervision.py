"""A network's loss over one head or several, in pieces along X and one fixed order.

A loss is an object with three pure functions. Maps are float32 rows (n, X * Y, Z * R) of a piece of n samples with R
regions, `t` the target and `p` the sigmoid of the logits `z`.

    sums(t, z, regions)    (n, R, any), which add up over the pieces of a sample, and p
    value(sums)            from the sums of whole samples: the loss, a score (N, R) and `factors`, a tuple of (N, R)
    slope(t, p, factors)   d loss / d z, from the factors of the samples and proportional to them

`cpu3d.training.losses.DiceCrossEntropy` is one.
"""

from typing import Any, Callable, List, NamedTuple, Sequence

import tensorflow as tf

from models.layer_plan import PIECES


class Supervised(NamedTuple):
    """A loss of logits, and its gradients."""

    loss: tf.Tensor  # of the batch
    score: tf.Tensor  # (N, R) of the finest head
    slopes: Callable[[Any], List[tf.Tensor]]  # gradient of the loss -> gradients of each head's logits, in their dtype


def supervise(loss, target, logits: Sequence) -> Supervised:
    """The loss of one head's logits or several', the finest first. `target` is (N, X, Y, Z, R), 0 or 1; the first head
    has its grid, the others every 2nd, 4th ... voxel of it, and their losses are weighted as `head_weights`. The
    gradient is written out: automatic differentiation passes over the maps twice as often. No float32 map of the whole
    grid is made: the loss is computed a piece of X at a time, and again for the gradient."""
    weights, heads = head_weights(logits), []
    for each in logits:
        with tf.control_dependencies([head.loss for head in heads[-1:]]):
            heads.append(_Head(loss, thinned(target, each), each))

    def slopes(upstream):
        gradients: List[tf.Tensor] = []
        for head, weight in zip(heads, weights):
            with tf.control_dependencies(gradients[-1:]):
                gradients.append(head.slope(weight * upstream))
        return gradients

    return Supervised(tf.add_n([head.loss * weight for head, weight in zip(heads, weights)]), heads[0].score, slopes)


def head_weights(heads: Sequence) -> List[float]:
    """Weights of the heads' losses, from their logits, the finest first: 1, 1/2, 1/4 ... by resolution, with sum 1."""
    weights = [head.shape[1] / heads[0].shape[1] for head in heads]
    return [weight / sum(weights) for weight in weights]


def thinned(target, logits):
    """Every 2nd, 4th ... voxel of a target (N, X, Y, Z, R), on the grid of the logits."""
    step = target.shape[1] // logits.shape[1]
    return target[:, ::step, ::step, ::step] if step > 1 else target


# --- Private helpers ---


class _Head:
    def __init__(self, loss, target, logits):
        self._loss, self._target, self._logits = loss, target, logits
        self._edges = sorted({logits.shape[1] * piece // PIECES for piece in range(PIECES + 1)})
        total = []
        for first, past in zip(self._edges, self._edges[1:]):
            t, z = self._piece(first, past, total)
            sums = loss.sums(t, z, logits.shape[-1])[0]
            total = [total[0] + sums if total else sums]
        self.loss, self.score, self._factors = loss.value(*total)

    def slope(self, upstream):
        """The gradient of the logits."""
        logits, factors, pieces = self._logits, [factor * upstream for factor in self._factors], []
        for first, past in zip(self._edges, self._edges[1:]):
            t, z = self._piece(first, past, pieces[-1:] or factors[:1])
            p = tf.sigmoid(z)
            with tf.control_dependencies([p]):
                slope = tf.cast(self._loss.slope(t, p, factors), logits.dtype)
            pieces.append(tf.reshape(slope, (-1, past - first, *logits.shape[2:])))
        return tf.concat(pieces, 1)

    def _piece(self, first: int, past: int, before: Sequence):
        """Target and logits as float32 rows: broadcasting three values over the last axis is slow."""
        _, _, size_y, size_z, regions = self._logits.shape
        with tf.control_dependencies(before):
            return [
                tf.reshape(tf.cast(maps[:, first:past], tf.float32), (-1, (past - first) * size_y, size_z * regions))
                for maps in (self._target, self._logits)
            ]
