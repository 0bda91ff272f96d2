"""The operations within TensorFlow: in a graph, written over what they read, and what they
refuse."""

import numpy as np
import pytest
import tensorflow as tf

from models.native import operations
from models.native.library import native_operations
from models.native.operations import Gradient, Source, convolve, input_gradient
from models.native.shared import KIND_CODES

pytestmark = pytest.mark.usefixtures("needs_native")


def normal(seed, *shape):
    return tf.random.stateless_normal(shape, (seed, 0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_map_that_nobody_else_reads_is_written_over_with_the_same_result(dtype):
    gradient = tf.cast(normal(11, 2, 6, 7, 300, 5), dtype)
    filters = normal(12, 3, 3, 3, 5, 5)

    def steps(gradient):
        back = input_gradient(Gradient(gradient + 1), filters).map
        return convolve([Source(back)], filters)[:2]

    compiled = tf.function(steps, autograph=False)(gradient)
    for result, known in zip(compiled, steps(gradient)):
        np.testing.assert_array_equal(result, known)


@pytest.mark.parametrize("operation", ["convolve", "loss_slope"])
def test_a_map_that_is_read_again_is_not_written_over(operation):
    values = normal(13, 1, 3, 4, 5, 3)

    def computed(map_):
        if operation == "convolve":
            return convolve([Source(map_)], normal(14, 3, 3, 3, 3, 3)).map
        target = tf.cast(normal(16, 1, 6, 8, 10, 3) > 0, tf.uint8)
        return operations.loss_slope(map_, target, normal(17, 1, 3, 3))

    @tf.function(autograph=False)
    def both(values):
        map_ = values + 1
        made = computed(map_)
        with tf.control_dependencies([made]):
            return made, tf.identity(map_) * 1

    made, map_ = both(values)
    np.testing.assert_array_equal(map_, values + 1)
    np.testing.assert_array_equal(made, computed(values + 1))


@pytest.mark.parametrize(
    ("shape", "outputs", "message"),
    [
        ((1, 2, 2, 2, 4), 0, "outputs must be 1 to 16384, got 0"),
        ((1, 1, 1, 1, 16385), 4, "channels must be 1 to 16384, got 16385"),
        ((0, 2, 2, 2, 4), 4, r"map must .* voxels.* got \(0, 2, 2, 2, 4\)"),
        ((1, 2, 2, 4), 4, r"map must .* 5 dimensions, got \(1, 2, 2, 4\) in 4"),
    ],
)
def test_maps_out_of_range_are_refused(shape, outputs, message):
    filters = tf.zeros((3, 3, 3, shape[-1], outputs))
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        convolve([Source(tf.zeros(shape))], filters)


@pytest.mark.parametrize(
    ("target", "factors", "message"),
    [
        ((1, 4, 4, 4, 3), (1, 3, 2), r"target must .* got \(1, 4, 4, 4, 3\)"),
        ((1, 4, 6, 4, 2), (1, 3, 2), r"target must .* got \(1, 4, 6, 4, 2\)"),
        ((4, 4, 4, 2), (1, 3, 2), r"target must .* got \(4, 4, 4, 2\)"),
        ((1, 4, 4, 4, 2), (1, 4, 2), r"factors must .* \(1, 3, 2\), got"),
    ],
)
def test_a_target_and_factors_that_do_not_fit_the_logits_are_refused(target, factors, message):
    logits = tf.zeros((1, 4, 4, 4, 2))
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        operations.loss_slope(logits, tf.zeros(target, tf.uint8), tf.zeros(factors))


def test_strides_and_a_matrix_out_of_range_are_refused():
    map_ = Source(tf.zeros((1, 6, 6, 6, 4)))
    with pytest.raises(tf.errors.InvalidArgumentError, match="strides must be 1 or 2, got 2, 2, 3"):
        operations.operate("max_pool", map_, strides=(2, 2, 3))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"2 to 5 dimensions, .*got \(4\)"):
        operations.orthogonal(tf.zeros(4))


# Of a map of 2 x 4 x 6 voxels and 3 channels, and 5 others: shapes of filters and bias, channels of
# both coefficients, maps and others.
KINDS = {
    "convolve": ((3, 3, 3, 6, 5), None, 6, None, "mm", "o"),
    "input_gradient": ((3, 3, 3, 5, 3), None, 3, 5, "m", "om"),
    "filter_gradient": (None, None, 6, 5, "mm", "oo"),
    "max_pool": (None, None, 3, None, "m", ""),
    "max_pool_gradient": (None, None, 3, None, "m", "cm"),
    "residual_sum": (None, None, 3, None, "m", "m"),
    "residual_gradient": (None, None, 3, None, "m", "mm"),
    "to_raw": (None, None, 3, None, "m", "m"),
    "project": ((1, 1, 1, 3, 5), (5,), 3, None, "m", "o"),
    "project_gradient": ((1, 1, 1, 3, 5), None, 3, None, "m", "om"),
    "project_sums": ((1, 1, 1, 3, 5), None, 3, None, "m", "o"),
    "project_to_raw": ((1, 1, 1, 3, 5), None, 3, None, "m", "o"),
    "up_convolve": ((2, 2, 2, 5, 3), None, 3, None, "m", ""),
    "up_input_gradient": ((2, 2, 2, 5, 3), None, 3, None, "m", "f"),
    "up_filter_gradient": (None, None, 3, None, "m", "f"),
}
MAPS = {"m": (2, 2, 4, 6, 3), "o": (2, 2, 4, 6, 5), "c": (2, 1, 2, 3, 3), "f": (2, 4, 8, 12, 5)}
"""The map's own shape, with the other channels, on a coarser grid and on a finer one."""

FREE = {"up_convolve": [(0, 3), (4, 1), (4, 2), (4, 3)], "up_filter_gradient": [(5, 4)]}
"""Tensors and axes on which no other tensor's shape depends."""


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_refuses_a_tensor_that_is_larger_along_any_axis_and_another_number_of_maps(kind):
    filters, bias, norms, other_norms, maps, others = KINDS[kind]
    floats = [filters, bias, norms and (2, 6, norms), other_norms and (2, 6, other_norms)]
    tf_ops = tf.load_op_library(str(native_operations().tf_ops))
    fitting = [name or (0,) for name in floats] + [MAPS[name] for name in maps + others]

    def call(shapes):
        tensors = [tf.zeros(shape) for shape in shapes]
        parts = tensors[4 : 4 + len(maps)], tensors[4 + len(maps) :]
        tf_ops.cpu_operation(*tensors[:4], *parts, kind=KIND_CODES[kind])

    call(fitting)
    wrong = [[*fitting, MAPS["m"]]]
    if others and kind not in ("convolve", "project", "project_gradient"):  # may lack the last
        wrong.append(fitting[:-1])
    for i, shape in enumerate(fitting):
        for axis in range(len(shape)):
            if shape != (0,) and (i, axis) not in FREE.get(kind, ()):
                larger = (*shape[:axis], shape[axis] + 1, *shape[axis + 1 :])
                wrong.append([*fitting[:i], larger, *fitting[i + 1 :]])
    for shapes in wrong:
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"must .*, got"):
            call(shapes)
