"""A network's loss over one head or several: a formula of models/losses.py, of sums over the voxels
of each region.

The sums, and the logits' gradient from the derivatives by them, are the two operations of
`models.program.loss_program`: of models/native, or of TensorFlow where those do not run."""

from typing import Any, Callable, Dict, List, NamedTuple, Sequence

import tensorflow as tf

from models.config import UNetConfig
from models.losses import Formula, Sums, soft_dice
from models.native import operations
from models.native.shared import IGNORED
from models.network import network_program
from models.program import Kind, Value, ValueKind, loss_program


class Supervised(NamedTuple):
    """A loss of logits, and its gradients."""

    loss: tf.Tensor  # of the batch
    score: tf.Tensor  # (N, R) of the finest head
    # gradient of the loss -> gradients of each head's logits, in their dtype
    slopes: Callable[[Any], List[tf.Tensor]]


def supervise(
    formula: Formula,
    target: tf.Tensor,
    logits: Sequence[tf.Tensor],
    weights: Sequence[float] = (1.0,),
    by_sample: bool = False,
) -> Supervised:
    """The loss of one head's logits or several', the finest first; of the batch, or (N, 1) of each
    sample. `target` is (N, X, Y, Z, R), 0, 1 or IGNORED; the first head has its grid, the others
    every 2nd, 4th ... voxel of it along an axis, and their losses are weighted by `weights`,
    those of `head_weights`. An ignored voxel is in no sum, and has a gradient of 0. All is taken
    per sample and region and then averaged, so an accumulated batch equals a full one.

    A target of a floating dtype may have values in between; TensorFlow's operations then
    compute."""
    compute = BY_TENSORFLOW
    if operations.in_use() and not target.dtype.is_floating:
        target = tf.cast(target, tf.uint8)
        compute = BY_NATIVE_OPERATIONS
    heads = [Value(f"logits {index}", ValueKind.MAP, index) for index in range(len(logits))]
    program = loss_program(heads)
    tensors = dict(zip(heads, logits))
    total = 0.0
    scores = []  # of each head
    derivatives = []  # of the loss, by the first three sums, (N, 3, R)
    before = list(logits)  # when all are there
    for op, weight in zip(program.sums, weights):
        with tf.control_dependencies(before):
            sums = compute[op.kind](tensors[op.maps[0]], target)
        before = [sums]
        with tf.GradientTape() as tape:
            tape.watch(sums)
            by_name = Sums(*tf.unstack(sums, axis=1))
            axis = 1 if by_sample else None
            loss = tf.reduce_mean(formula(by_name), axis, keepdims=by_sample)
        total += weight * loss
        scores.append(soft_dice(by_name))
        derivatives.append(weight * tape.gradient(loss, sums)[:, :3])

    def slopes(upstream: Any) -> List[tf.Tensor]:
        made: List[tf.Tensor] = []
        for op, factors in zip(program.slopes, derivatives):
            with tf.control_dependencies(made[-1:]):
                made.append(compute[op.kind](tensors[op.maps[0]], target, upstream * factors))
        return made

    return Supervised(total, scores[0], slopes)


def head_weights(config: UNetConfig) -> List[float]:
    """Weights of the losses of a network's heads, in the order of its outputs: 1, 1/2, 1/4 ... by
    resolution, that along the axis that is halved most often, with sum 1."""
    heads = network_program(config).logits
    weights = [1 / max(config.reduction(head.level)) for head in heads]
    return [weight / sum(weights) for weight in weights]


def thinned(target: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """Every 2nd, 4th ... voxel of a target (N, X, Y, Z, R), on the grid of the logits."""
    steps = tf.unstack(tf.shape(target)[1:4] // tf.shape(logits)[1:4])
    thin = target[(slice(None), *(slice(None, None, step) for step in steps))]
    return tf.ensure_shape(thin, logits.shape)


# --- By TensorFlow's operations, on float32 maps ---


def _plain_sums(logits: tf.Tensor, target: tf.Tensor) -> tf.Tensor:
    """As `operations.loss_sums`."""
    z = _rows(logits)
    t = _rows(thinned(target, logits))
    p = tf.sigmoid(z)
    terms = (tf.nn.sigmoid_cross_entropy_with_logits(t, z), p * t, p, t)
    size_z = tf.shape(logits)[3]
    regions = logits.shape[-1]
    has_ignored = _has_ignored(t)
    sums = []
    for term in terms:
        learnt = _learnt(term, t, has_ignored)
        along_z = tf.reduce_sum(tf.reduce_sum(learnt, 2), 1)  # (N, Z * R)
        sums.append(tf.reduce_sum(tf.reshape(along_z, (-1, size_z, regions)), 1))
    return tf.stack(sums, 1)


def _plain_slope(logits: tf.Tensor, target: tf.Tensor, factors: tf.Tensor) -> tf.Tensor:
    """As `operations.loss_slope`."""
    z = _rows(logits)
    t = _rows(thinned(target, logits))
    has_ignored = _has_ignored(t)
    along_z = tf.tile(factors, (1, 1, tf.shape(logits)[3]))[:, :, None, None]
    cross_entropy, overlap, predicted = tf.unstack(along_z, axis=1)
    p = tf.sigmoid(z)
    slope = cross_entropy * (p - t) + p * (1 - p) * (overlap * t + predicted)
    slope = _learnt(slope, t, has_ignored)
    return tf.reshape(tf.cast(slope, logits.dtype), tf.shape(logits))


def _has_ignored(target: tf.Tensor) -> tf.Tensor:
    return tf.reduce_max(target) == IGNORED  # without a map


def _learnt(rows: tf.Tensor, target: tf.Tensor, has_ignored: tf.Tensor) -> tf.Tensor:
    """Rows with 0 where the target's are IGNORED, whatever is there; as they are where none is."""
    return tf.cond(has_ignored, lambda: tf.where(target == IGNORED, 0.0, rows), lambda: rows)


def _rows(map_: tf.Tensor) -> tf.Tensor:
    """(N, X, Y, Z * R) float32: broadcasting and summing a few values over the last axis is
    slow."""
    _, size_x, size_y, size_z, regions = tf.unstack(tf.shape(map_))
    return tf.reshape(tf.cast(map_, tf.float32), (-1, size_x, size_y, size_z * regions))


BY_TENSORFLOW: Dict[Kind, Callable[..., tf.Tensor]] = {
    Kind.LOSS_SUMS: _plain_sums,
    Kind.LOSS_SLOPE: _plain_slope,
}
BY_NATIVE_OPERATIONS: Dict[Kind, Callable[..., tf.Tensor]] = {
    Kind.LOSS_SUMS: operations.loss_sums,
    Kind.LOSS_SLOPE: operations.loss_slope,
}
"""Kind -> how an operation of a loss is computed, from logits, target and, of a slope, factors."""
