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

    `kernel_shape` is (k, k, k, A, B), with a k of 1 or 3.
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
    total = None
    for first in range(0, samples * planes, planes):
        with tf.control_dependencies([upstream if total is None else total]):
            of_sample, at_sample = x[first : first + planes], upstream[first : first + planes]
        whole = filter_gradient_of_slab((of_sample, None, None), at_sample, kernel_shape, x.dtype)
        total = whole if total is None else total + whole
    return total


def filter_gradient_of_slab(x, upstream, kernel_shape, dtype=tf.float32):
    """A slab's share in the kernel's gradient, in `dtype`: from x as (slab, plane before, plane after), each (X, Y,
    Z, A), the planes None at the volume's edges, and from the slab of the output's gradient (X, Y, Z, B). Each plane of
    the kernel waits for the one before."""
    slab, before, after = x
    reach, size = kernel_shape[0] // 2, slab.shape[0]
    planes, last = [], upstream
    for shift in range(-reach, reach + 1):
        meets = slice(max(0, -shift), size - max(0, shift))
        pairs = [(slab, slice(meets.start + shift, meets.stop + shift), meets)]
        if shift < 0 and before is not None:
            pairs.append((before, slice(0, 1), slice(0, 1)))
        if shift > 0 and after is not None:
            pairs.append((after, slice(0, 1), slice(size - 1, size)))
        found = []
        for maps, seen, met in pairs:
            with tf.control_dependencies([last]):
                last = _of_planes(maps[seen], upstream[met], kernel_shape[1:], dtype)
            found.append(last)
        planes.append(tf.add_n(found))
    return tf.stack(planes)


# --- Private helpers ---


def _of_volume(x, upstream, kernel_shape):
    return tf.raw_ops.Conv3DBackpropFilterV2(
        input=x, filter_sizes=kernel_shape, out_backprop=upstream, strides=UNIT, padding="SAME"
    )


def _of_planes(x, upstream, kernel_shape, dtype):
    found = tf.raw_ops.Conv2DBackpropFilter(
        input=x, filter_sizes=kernel_shape, out_backprop=upstream, strides=UNIT_2D, padding="SAME"
    )
    return tf.cast(found, dtype)
