"""A norm's arithmetic in compiled passes over a map, as fast for one number of channels as for another.

oneDNN's fused batch norm computes value by value where channels leave part of a vector empty. Here a vector is a piece
of a map's row, Z * C values: XLA compiles each pass into one loop over rows, and what has one value a channel is
repeated along Z beforehand (inside the loop its index would be a division). A sum is taken over a block of rows at a
time by a pass, in registers, and then over blocks: no sum has many terms, and no pass leaves more than part of a map.

A map is (N, X, Y, Z, C), or a slab (X, Y, Z, C); N may be unknown. Values of the channels are (C,), or (N, C) where
samples are normalised apart. All arithmetic is float32; a pass puts out the dtype of the first map it takes.
"""

import functools
import weakref
from typing import Callable, Sequence

import tensorflow as tf
from tensorflow.python.framework.ops import gradient_registry

from models.config import EPSILON, norm_block


def custom_gradient(function: Callable) -> Callable:
    """`tf.custom_gradient`, but what it keeps goes with the graph.

    TensorFlow has a table of all gradient functions that is never emptied, and with each function all tensors of its
    graph: a dropped "lean" network kept 34 MiB. Here the graph owns the function, and the table refers to it weakly.
    """
    decorated = tf.custom_gradient(function)

    @tf.autograph.experimental.do_not_convert
    @functools.wraps(function)
    def call(*inputs):
        outputs = decorated(*inputs)
        if not tf.executing_eagerly():
            _give_to_graph(tf.nest.flatten(outputs)[0].op)
        return outputs

    return call


def normalised(x, gamma, beta, together: bool, relu: bool):
    """Norm of (N, X, Y, Z, C), samples apart or `together`, then a ReLU or none; and its means and variances, (N or 1,
    C), unbiased as the fused kernel has them. The gradient keeps x, and finds where the ReLU is zero from it."""

    @custom_gradient
    def computed(*inputs):
        # Between two tapes TensorFlow would have every compiled pass put out all that its gradient might read.
        x, gamma, beta = map(tf.stop_gradient, inputs)
        elements = x.shape[1:4].num_elements() * (tf.cast(tf.shape(x)[0], tf.float32) if together else 1.0)
        mean = channel_sums(value, [x], together=together) / elements
        squares = channel_sums(square_about, [x], mean, together=together)
        rate = tf.math.rsqrt(squares / elements + EPSILON)
        factors = (mean, gamma * rate, beta)

        def gradient(upstream, *_):
            maps, options = [tf.stop_gradient(upstream), x], {"relu": relu}
            # One after the other: each leaves sums of blocks for a moment.
            of_dy = channel_sums(behind_relu, maps, *factors, together=together, **options)
            with tf.control_dependencies([of_dy]):
                about = channel_sums(product, maps, *factors, together=together, **options)
            along = -factors[1] * rate * rate * about / elements
            at_x = one_pass(gradient_below, maps, *factors, along, -factors[1] * of_dy / elements, **options)
            return at_x, tf.reduce_sum(rate * about, 0), tf.reduce_sum(of_dy, 0)

        return (one_pass(affine, [x], *factors, relu=relu), mean, squares / (elements - 1)), gradient

    return computed(x, gamma, beta)


def one_pass(function: Callable, maps: Sequence, *of_channels, **options):
    """`function` of the values of `maps` and of the channels, a map. Of a single plane, operation by operation."""
    first = maps[0]
    compute = _compiled_map.python_function if first.shape[0] == 1 and len(first.shape) == 4 else _compiled_map
    y = compute(function, [_rows(each) for each in maps], _like_rows(of_channels, first), **options)
    return tf.reshape(y, (-1, *first.shape[1:]))


def channel_sums(function: Callable, maps: Sequence, *of_channels, together: bool = True, **options):
    """`function` of the values of `maps` and of the channels, summed over each sample or over all: (N or 1, C)."""
    size_z, channels = maps[0].shape[-2:]
    rows = [_rows(each, together) for each in maps]
    blocks = _compiled_sums(function, rows, _like_rows(of_channels, maps[0]), **options)
    return tf.reduce_sum(tf.reshape(tf.reduce_sum(blocks, 1), (-1, size_z, channels)), 1)


# --- Of single values ---


def value(x):
    return x


def square_about(x, mean):
    return tf.math.squared_difference(x, mean)


def affine(x, mean, scale, shift, relu):
    y = (x - mean) * scale + shift
    return tf.nn.relu(y) if relu else y


def behind_relu(upstream, x, mean, scale, shift, relu):
    """The gradient of what `affine` put into its ReLU."""
    return tf.where(affine(x, mean, scale, shift, False) > 0, upstream, 0.0) if relu else upstream


def product(upstream, x, mean, scale, shift, relu):
    return behind_relu(upstream, x, mean, scale, shift, relu) * (x - mean)


def gradient_below(upstream, x, mean, scale, shift, along, constant, relu):
    return behind_relu(upstream, x, mean, scale, shift, relu) * scale + ((x - mean) * along + constant)


# --- Private helpers ---


def _give_to_graph(op: tf.Operation) -> None:
    """Make the graph of `op` the owner of its gradient function."""
    name, graph = op.get_attr("_gradient_op_type").decode(), op.graph
    table = gradient_registry._registry
    function = table[name]["type"]
    graph.gradient_functions = [*getattr(graph, "gradient_functions", ()), function]
    reference = weakref.ref(function)
    table[name]["type"] = lambda op, *upstream: reference()(op, *upstream)
    weakref.finalize(graph, table.pop, name)


@tf.function(autograph=False, jit_compile=True)
def _compiled_map(function, maps, of_channels, **options):
    y = function(*(tf.cast(each, tf.float32) for each in maps), *of_channels, **options)
    return tf.cast(y, maps[0].dtype)


@tf.function(autograph=False, jit_compile=True)
def _compiled_sums(function, maps, of_channels, **options):
    """(groups, blocks, rows, Z * C) -> (groups, blocks, Z * C)"""
    of_channels = [each[:, :, 0] for each in of_channels]
    terms = []
    for row in range(maps[0].shape[2]):
        terms.append(function(*(tf.cast(each[:, :, row], tf.float32) for each in maps), *of_channels, **options))
    while len(terms) > 1:
        terms = [sum(terms[first : first + 2]) for first in range(0, len(terms), 2)]
    return terms[0]


def _rows(maps, together: bool = False):
    """(groups, blocks, rows of a block, Z * C), a group being what is summed together: a view."""
    size_x, size_y, size_z, channels = maps.shape[-4:]
    rows = norm_block(size_x * size_y)
    block = (rows, size_z * channels)
    return tf.reshape(maps, (1, -1, *block) if together else (-1, size_x * size_y // rows, *block))


def _like_rows(of_channels: Sequence, maps):
    """Each (C,) or (groups, C) as (1 or groups, 1, 1, Z * C)."""
    size_z, channels = maps.shape[-2:]
    return [tf.tile(tf.reshape(each, (-1, 1, 1, channels)), (1, 1, 1, size_z)) for each in of_channels]
