"""The gradient of a convolution's kernel, over the whole volume at once or plane by plane.

oneDNN's bfloat16 kernel first copies one sample of the maps and one of their gradient, transposed, and once more for
every group of threads: at full resolution that is more than all else in the step. A sample may as well be one plane:
each of a kernel's planes is the kernel of a two-dimensional convolution over pairs of planes of the volume, and these
are views, not copies. The copies are then a plane's, in about the same time (docs/log.md).
"""

import tensorflow as tf

UNIT = (1, 1, 1, 1, 1)
UNIT_2D = (1, 1, 1, 1)


def filter_gradient(x, upstream, kernel_shape):
    """Of a convolution of x (N, X, Y, Z, A), stride 1, "same", whose output's gradient is `upstream` (N, X, Y, Z, B).

    `kernel_shape` is (k, k, k, A, B), with odd k.
    """
    if x.shape[1] == 2 and kernel_shape[0] > 1:
        # oneDNN's bfloat16 kernel leaves a part unwritten there (TensorFlow 2.15 to 2.21): the bottom of a patch of 32.
        return filter_gradient_by_planes(x, upstream, kernel_shape)
    return _of_volume(x, upstream, kernel_shape)


def filter_gradient_by_planes(x, upstream, kernel_shape):
    """The same, to rounding, from planes of Y and Z; as `filter_gradient` where the number of samples is not known."""
    samples, planes = x.shape[:2]
    if samples is None:
        return _of_volume(x, upstream, kernel_shape)
    # Cut along the first axis a piece is a view; along any other it is a copy.
    x, upstream = (tf.reshape(one, (samples * planes, *one.shape[2:])) for one in (x, upstream))
    reach = kernel_shape[0] // 2
    total, before = None, upstream
    for first in range(0, samples * planes, planes):
        of_kernel = []
        for shift in range(-reach, reach + 1):
            begin, count = first + max(0, -shift), planes - abs(shift)
            with tf.control_dependencies([before]):
                seen, met = x[begin + shift : begin + shift + count], upstream[begin : begin + count]
                before = _of_plane(seen, met, kernel_shape[1:])
            of_kernel.append(before)
        whole = tf.stack(of_kernel)
        total = before = whole if total is None else total + whole
    return total


# --- Private helpers ---


def _of_volume(x, upstream, kernel_shape):
    return tf.raw_ops.Conv3DBackpropFilterV2(
        input=x, filter_sizes=kernel_shape, out_backprop=upstream, strides=UNIT, padding="SAME"
    )


def _of_plane(x, upstream, kernel_shape):
    return tf.raw_ops.Conv2DBackpropFilter(
        input=x, filter_sizes=kernel_shape, out_backprop=upstream, strides=UNIT_2D, padding="SAME"
    )
