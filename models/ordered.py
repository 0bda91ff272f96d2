"""Convolution, up-convolution and join whose backward passes run in one fixed order: the one that frees maps earliest.

TensorFlow runs the gradient that became ready last and defers the others; with ITEX that is every filter gradient of
the network, and each keeps two maps alive until the end of the step. Here the filter gradient comes first:
it is the last that reads the convolution's input. The order is also what makes a step's memory predictable.

oneDNN's bfloat16 kernel of the filter gradient first copies one sample of the maps and one of their gradient,
transposed, and once more for every group of threads: at full resolution that is more than all else in the step. A
sample may as well be one plane: each of a kernel's planes is the kernel of a two-dimensional convolution over pairs of
planes of the volume, and these are views. The copies are then a plane's, in about the same time (docs/log.md).
"""

import tensorflow as tf

from models.passes import channel_sums, custom_gradient, value

UNIT = (1, 1, 1, 1, 1)
UNIT_2D = (1, 1, 1, 1)
HALF = (1, 2, 2, 2, 1)


class Convolution(tf.keras.layers.Conv3D):
    """A convolution that keeps the grid: (N, X, Y, Z, C) -> (N, X, Y, Z, filters). Stride 1, padding "same".
    With `by_planes` its filter gradient is `filter_gradient_by_planes`, which takes less memory."""

    def __init__(self, filters: int, kernel_size: int, by_planes: bool = False, **kwargs):
        super().__init__(filters, kernel_size, padding="same", **kwargs)
        self.by_planes = by_planes

    def call(self, inputs):
        of_kernel = filter_gradient_by_planes if self.by_planes else filter_gradient
        maps = convolution(inputs, read_after(inputs, self.kernel), of_kernel)
        return add_bias(maps, tf.convert_to_tensor(self.bias)) if self.use_bias else maps


class ShortcutSum(tf.keras.layers.Layer):
    """A residual block's sum: its last maps (N, X, Y, Z, filters) plus a 1x1x1 convolution of its input, without bias.
    Takes [maps, entry]; one layer, so that the shortcut's gradients come first. `entry_learns` is false for the image.
    """

    def __init__(self, filters: int, kernel_initializer="glorot_uniform", entry_learns: bool = True, **kwargs):
        super().__init__(**kwargs)
        self.filters = filters
        self.kernel_initializer = tf.keras.initializers.get(kernel_initializer)
        self.entry_learns = entry_learns

    def build(self, input_shape):
        shape = (1, 1, 1, input_shape[1][-1], self.filters)
        self.kernel = self.add_weight(name="kernel", shape=shape, initializer=self.kernel_initializer)
        super().build(input_shape)

    def call(self, inputs):
        maps, entry = inputs

        @custom_gradient
        def total(maps, entry, kernel):
            def gradient(upstream):
                to_entry, (to_kernel,) = gradients(entry, [(kernel, upstream)])
                return then(upstream, to_entry if self.entry_learns else to_kernel), to_entry, to_kernel

            return maps + tf.nn.conv3d(then(entry, maps), kernel, UNIT, "SAME"), gradient

        return total(maps, entry, read_after(maps, self.kernel))


class UpConvolution(tf.keras.layers.Conv3DTranspose):
    """A transposed convolution of kernel and stride 2, without bias: (N, X, Y, Z, C) -> (N, 2X, 2Y, 2Z, filters)."""

    def __init__(self, filters: int, **kwargs):
        super().__init__(filters, 2, strides=2, use_bias=False, **kwargs)

    def call(self, inputs):
        return up_convolution(inputs, read_after(inputs, self.kernel))


class Join(tf.keras.layers.Concatenate):
    """Maps side by side: (N, X, Y, Z, A) and (N, X, Y, Z, B) -> (N, X, Y, Z, A + B)."""

    def call(self, inputs):
        return _join(*inputs)


@custom_gradient
def add_bias(maps, bias):
    """(N, X, Y, Z, C) plus one value a channel; the bias gradient, which reads a whole map, comes first. It is
    summed in float32: TensorFlow's BiasAddGrad loses 97 % of 410,000 values in bfloat16 (docs/log.md)."""

    def gradient(upstream):
        # Between two tapes TensorFlow would have the compiled pass put out all that its gradient might read.
        to_bias = tf.cast(channel_sums(value, [tf.stop_gradient(upstream)])[0], bias.dtype)
        return then(upstream, to_bias), to_bias

    return tf.nn.bias_add(maps, bias), gradient


def then(x, *before):
    """x, but not until all of `before` is there. A view, no copy."""
    if not before:
        return x
    with tf.control_dependencies(before):
        return tf.identity(x)


def read_after(maps, kernel):
    """The kernel in the compute dtype, cast when the maps it meets are there and not at the start of the step."""
    with tf.control_dependencies([maps]):
        return tf.convert_to_tensor(kernel)


def filter_gradient(x, upstream, kernel_shape):
    """Of a convolution of x (N, X, Y, Z, A), stride 1, "same", whose output's gradient is `upstream` (N, X, Y, Z, B).
    `kernel_shape` is (k, k, k, A, B), with a k of 1 or 3."""
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


def convolution(x, kernel, of_kernel=filter_gradient):
    """(N, X, Y, Z, A), (k, k, k, A, B) -> (N, X, Y, Z, B), stride 1, "same". `of_kernel` computes filter gradients."""

    @custom_gradient
    def convolved(x, kernel):
        def gradient(upstream):
            to_x, (to_kernel,) = gradients(x, [(kernel, upstream)], of_kernel)
            return to_x, to_kernel

        return tf.nn.conv3d(x, kernel, UNIT, "SAME"), gradient

    return convolved(x, kernel)


def gradients(x, meets, of_kernel=filter_gradient):
    """Of a map (N, X, Y, Z, A), and before that of each kernel that it meets in a convolution, stride 1, "same".
    They are given as (kernel, gradient of that convolution's output)."""
    at_x, to_kernels = None, []
    for kernel, upstream in meets:
        to_kernels.append(of_kernel(x, then(upstream, *to_kernels[-1:]), kernel.shape))
    for kernel, upstream in meets:
        size = tf.shape(x)
        with tf.control_dependencies([to_kernels[-1] if at_x is None else at_x]):
            one = tf.raw_ops.Conv3DBackpropInputV2(
                input_sizes=size, filter=kernel, out_backprop=upstream, strides=UNIT, padding="SAME"
            )
        at_x = one if at_x is None else at_x + one
    return at_x, to_kernels


@custom_gradient
def up_convolution(x, kernel):
    """A transposed convolution of kernel and stride 2: (N, X, Y, Z, A), (2, 2, 2, B, A) -> (N, 2X, 2Y, 2Z, B)."""
    samples, size_x, size_y, size_z, _ = tf.unstack(tf.shape(x))
    shape = tf.stack([samples, 2 * size_x, 2 * size_y, 2 * size_z, kernel.shape[3]])

    def gradient(upstream):
        to_kernel = tf.raw_ops.Conv3DBackpropFilterV2(
            input=upstream, filter_sizes=kernel.shape, out_backprop=x, strides=HALF, padding="SAME"
        )
        with tf.control_dependencies([to_kernel]):
            return tf.nn.conv3d(upstream, kernel, HALF, "SAME"), to_kernel

    return tf.nn.conv3d_transpose(x, kernel, shape, HALF, "SAME"), gradient


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


@custom_gradient
def _join(first, second):
    def gradient(upstream):
        # Both halves at once: cut apart where each is needed, the whole would live until the encoder's backward pass.
        to_first = upstream[..., : first.shape[-1]]
        with tf.control_dependencies([to_first]):
            to_second = upstream[..., first.shape[-1] :]
        return to_first, to_second

    return tf.concat([first, second], -1), gradient
