"""Gradients of native operations by TensorFlow, for a tape that has recorded them.

A training step does not come here: models/step.py has gradients by native operations.
"""

from typing import Any, List, NamedTuple, Optional, Sequence

import tensorflow as tf

from models.layers import first_max_pool
from models.native.shared import KIND_OF_CODE, WITH_SUMS


@tf.RegisterGradient("CpuOperation")
def _gradient_of(
    op: Any, grad_map: tf.Tensor, grad_sums: tf.Tensor, *_: Any
) -> List[Optional[tf.Tensor]]:
    """Gradients of the inputs of a forward operation, by TensorFlow's operations on the same
    values in float32: in bfloat16 its gradients of filters may be infinite. These can be
    differentiated again."""
    kind = KIND_OF_CODE[op.get_attr("kind")]
    if kind not in _PLAIN:
        raise NotImplementedError(
            "a second derivative must be of model(image, training=False), got training=True; "
            "call the model with training=False"
        )
    inputs = list(op.inputs)
    filters, bias, norms, _, *maps = inputs
    count = op.get_attr("n_maps")
    sources = maps[:count]
    others = maps[count:]
    grad_map = tf.cast(grad_map, tf.float32)
    if kind in WITH_SUMS:
        grad_map += _through_sums(op.outputs[0], op.outputs[1], grad_sums)
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        terms = [tf.cast(other, tf.float32) for other in others]
        values = _plain_values(sources, norms)
        made = _PLAIN[kind](_Read(values, filters, bias, terms, op.get_attr("strides")))
    return tape.gradient(made, inputs, grad_map)


def _through_sums(raw: tf.Tensor, sums: tf.Tensor, grad_sums: tf.Tensor) -> tf.Tensor:
    """The gradient of a raw map from those of its mean and variance, (N, 2, C)."""
    mean, _ = _over_grid(sums)
    grad_mean, grad_variance = _over_grid(grad_sums)
    voxels = float(raw.shape[1:4].num_elements())
    return (grad_mean + 2 * grad_variance * (tf.cast(raw, tf.float32) - mean)) / voxels


def _plain_values(maps: Sequence[tf.Tensor], norms: tf.Tensor) -> tf.Tensor:
    """The values of maps side by side, formed with `norms` as of `_norms`."""
    raw = tf.cast(tf.concat(maps, -1), tf.float32)
    if norms.shape.num_elements() == 0:
        return raw
    scale, shift, floor, *_ = _over_grid(norms)
    values = scale * raw + shift
    return tf.where(values > floor, values, floor)  # at the floor itself the gradient is 0


def _over_grid(rows: tf.Tensor) -> List[tf.Tensor]:
    """(N, rows, C) as a list of (N, 1, 1, 1, C)."""
    return [row[:, None, None, None] for row in tf.unstack(rows, axis=1)]


class _Read(NamedTuple):
    """What a forward operation reads, in float32."""

    values: tf.Tensor  # of its maps, side by side
    filters: tf.Tensor
    bias: tf.Tensor
    terms: List[tf.Tensor]  # other maps
    strides: List[int]  # between two grids


def _plain_convolve(read: _Read) -> tf.Tensor:
    made = tf.nn.conv3d(read.values, read.filters, (1, 1, 1, 1, 1), "SAME")
    if read.bias.shape.num_elements():
        made += read.bias
    return tf.add_n([made, *read.terms])


def _plain_max_pool(read: _Read) -> tf.Tensor:
    strides = [1, *read.strides, 1]
    return first_max_pool(read.values, strides, strides, "VALID")


def _plain_up(read: _Read) -> tf.Tensor:
    size = read.values.shape[1:4]
    grid = [stride * side for stride, side in zip(read.strides, size)]
    shape = (tf.shape(read.values)[0], *grid, read.filters.shape[3])
    return tf.nn.conv3d_transpose(read.values, read.filters, shape, read.strides, "SAME")


def _plain_residual_sum(read: _Read) -> tf.Tensor:
    return tf.nn.relu(read.values + read.terms[0])


_PLAIN = {
    "convolve": _plain_convolve,
    "project": _plain_convolve,
    "max_pool": _plain_max_pool,
    "up_convolve": _plain_up,
    "residual_sum": _plain_residual_sum,
}
"""Kind of a forward operation -> its map by TensorFlow."""
