"""A network's loss over one head or several, from sums over the voxels of each region.

A loss is an object with one pure function of sums (N, 4, R), of whole samples with R regions:

    value(sums)  the loss, a score (N, R), and d loss / d sums of the first three, (N, 3, R)

The sums are, with p the sigmoid of the logits and t the target, those of the cross-entropy, of p *
t, of p, and of t. `cpu3d.training.losses.DiceCrossEntropy` is one. The sums, and the logits'
gradient from such derivatives, are two operations: of models/native, or of TensorFlow where those
do not run."""

from typing import Any, Callable, List, NamedTuple, Sequence

import tensorflow as tf

from models.native import operations


class Supervised(NamedTuple):
    """A loss of logits, and its gradients."""

    loss: tf.Tensor  # of the batch
    score: tf.Tensor  # (N, R) of the finest head
    slopes: Callable[
        [Any], List[tf.Tensor]
    ]  # gradient of the loss -> gradients of each head's logits, in their dtype


def supervise(loss, target, logits: Sequence) -> Supervised:
    """The loss of one head's logits or several', the finest first. `target` is (N, X, Y, Z, R), 0
    or 1; the first head has its grid, the others every 2nd, 4th ... voxel of it, and their losses
    are weighted as `head_weights`. First come the sums of all heads, one after the other, and then,
    with `slopes`, the gradients.

    A target of a floating dtype may have values in between; TensorFlow's operations then
    compute."""
    sums_of, slope_of = _plain_sums, _plain_slope
    if operations.in_use() and not target.dtype.is_floating:
        target = tf.cast(target, tf.uint8)
        sums_of, slope_of = operations.loss_sums, operations.loss_slope
    values = []
    before = list(logits)  # when all are there
    for head in logits:
        with tf.control_dependencies(before):
            sums = sums_of(head, target)
        before = [sums]
        values.append(loss.value(sums))
    weights = head_weights(logits)

    def slopes(upstream):
        gradients: List[tf.Tensor] = []
        for head, weight, (_, _, factors) in zip(logits, weights, values):
            with tf.control_dependencies(gradients[-1:]):
                gradients.append(slope_of(head, target, weight * upstream * factors))
        return gradients

    total = tf.add_n([each * weight for (each, _, _), weight in zip(values, weights)])
    return Supervised(total, values[0][1], slopes)


def head_weights(heads: Sequence) -> List[float]:
    """Weights of the heads' losses, from their logits, the finest first: 1, 1/2, 1/4 ... by
    resolution, with sum 1."""
    weights = [head.shape[1] / heads[0].shape[1] for head in heads]
    return [weight / sum(weights) for weight in weights]


def thinned(target, logits):
    """Every 2nd, 4th ... voxel of a target (N, X, Y, Z, R), on the grid of the logits."""
    steps = [fine // coarse for fine, coarse in zip(target.shape[1:4], logits.shape[1:4])]
    return (
        target[(slice(None), *(slice(None, None, step) for step in steps))]
        if max(steps) > 1
        else target
    )


# --- By TensorFlow's operations, on float32 maps ---


def _plain_sums(logits: tf.Tensor, target: tf.Tensor) -> tf.Tensor:
    """As `operations.loss_sums`."""
    z, t = _rows(logits), _rows(thinned(target, logits))
    p = tf.sigmoid(z)
    terms = (tf.nn.sigmoid_cross_entropy_with_logits(t, z), p * t, p, t)
    _, _, _, size_z, regions = logits.shape
    lines = [tf.reduce_sum(tf.reduce_sum(term, 2), 1) for term in terms]  # (N, Z * R)
    return tf.stack(
        [tf.reduce_sum(tf.reshape(line, (-1, size_z, regions)), 1) for line in lines], 1
    )


def _plain_slope(logits: tf.Tensor, target: tf.Tensor, factors: tf.Tensor) -> tf.Tensor:
    """As `operations.loss_slope`."""
    z, t = _rows(logits), _rows(thinned(target, logits))
    along_z = tf.tile(factors, (1, 1, logits.shape[3]))[:, :, None, None]
    of_cross_entropy, of_overlap, of_p = tf.unstack(along_z, axis=1)
    p = tf.sigmoid(z)
    slope = of_cross_entropy * (p - t) + p * (1 - p) * (of_overlap * t + of_p)
    return tf.reshape(tf.cast(slope, logits.dtype), tf.shape(logits))


def _rows(map_: tf.Tensor) -> tf.Tensor:
    """(N, X, Y, Z * R) float32: broadcasting and summing a few values over the last axis is
    slow."""
    _, size_x, size_y, size_z, regions = map_.shape
    return tf.reshape(tf.cast(map_, tf.float32), (-1, size_x, size_y, size_z * regions))
