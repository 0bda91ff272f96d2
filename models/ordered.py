"""Convolution, up-convolution and join whose backward passes run in one fixed order: the one that frees maps earliest.

Left alone, TensorFlow runs whichever gradient became ready last and puts the others off; with ITEX that is every filter
gradient of the network, and each keeps two maps alive until the end of the step. Here the filter gradient comes first:
it is the last that reads the convolution's input. The order is also what makes a step's memory predictable.
"""

import tensorflow as tf

from models.filter_gradient import UNIT, filter_gradient, filter_gradient_by_planes
from models.passes import channel_sums, custom_gradient, value

HALF = (1, 2, 2, 2, 1)


class Convolution(tf.keras.layers.Conv3D):
    """A convolution that keeps the grid: (N, X, Y, Z, C) -> (N, X, Y, Z, filters). Stride 1, padding "same".

    `by_planes` is how its filter gradient is computed: with less memory, as models/filter_gradient.py says.
    """

    def __init__(self, filters: int, kernel_size: int, by_planes: bool = False, **kwargs):
        super().__init__(filters, kernel_size, padding="same", **kwargs)
        self.by_planes = by_planes

    def call(self, inputs):
        of_kernel = filter_gradient_by_planes if self.by_planes else filter_gradient
        maps = convolution(inputs, read_after(inputs, self.kernel), of_kernel)
        return add_bias(maps, tf.convert_to_tensor(self.bias)) if self.use_bias else maps


class ShortcutSum(tf.keras.layers.Layer):
    """A residual block's sum: its last maps (N, X, Y, Z, filters) plus a 1x1x1 convolution of its input, without bias.

    Takes both as [maps, entry]. One layer, because only then can the shortcut's gradients be told to come first.
    `entry_learns` is false where the entry is the image: its gradient would be waited for and thrown away.
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
    """(N, X, Y, Z, C) plus one value a channel; the bias gradient, which reads a whole map for it, is not put off.

    It is summed in float32. TensorFlow's own, BiasAddGrad, sums in the map's dtype: of 410,000 values in bfloat16 it
    loses 97 % (docs/log.md).
    """

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

    They are given as (kernel, gradient of that convolution's output).
    """
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


@custom_gradient
def _join(first, second):
    def gradient(upstream):
        # Both halves at once: cut apart where each is needed, the whole would live until the encoder's backward pass.
        to_first = upstream[..., : first.shape[-1]]
        with tf.control_dependencies([to_first]):
            to_second = upstream[..., first.shape[-1] :]
        return to_first, to_second

    return tf.concat([first, second], -1), gradient
