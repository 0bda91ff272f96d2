"""Level 0 of a U-Net in slabs along X: no map of the finest grid is ever one tensor.

A map is a list of slabs (planes, Y, Z, C), those of one sample after those of another. A convolution reads one plane of
each neighbour. A norm's statistics are summed over slabs in float32, forward as (sum, sum of squares), backward as
(sum of dy, sum of dy * x-hat); what lies behind a norm is made again, slab by slab, wherever it is read. A gradient is
written slab by slab while the maps it is made of go slab by slab, so that two maps take the memory of one.

Two layers, one for each side of the network. The first convolution of the decoder's block is a sum: its part that reads
the skip maps belongs to the encoder's layer, which hands that part's output to the decoder's instead of the skip maps.
Backward, the gradient of the sum comes back along the same way, and the skip maps are made again from the image.

    encoder   keeps nothing but the statistics of its norms
    decoder   keeps what its two convolutions put out, two maps

The same weights and functions as the layers of models/blocks.py, the same gradients to rounding.
"""

import dataclasses
from typing import Callable, List, Sequence, Tuple

import tensorflow as tf

from models.config import EPSILON, UNetConfig
from models.layer_plan import slab_height
from models.layers import convolution_layer, norm_layer, precision, up_layers
from models.ordered import HALF, UNIT
from models.passes import affine, channel_sums, gradient_below, one_pass, product, square_about, value

UNIT_2D = (1, 1, 1, 1)
PRIOR_LOGIT = -2.944  # of models/blocks.py


@dataclasses.dataclass(frozen=True)
class Cut:
    """How a batch of maps (N, X, Y, Z, C) is cut along X."""

    samples: int
    planes: int
    height: int

    @property
    def pieces(self) -> List[Tuple[int, int, int]]:
        """(sample, first plane, past the last) of each slab."""
        firsts = range(0, self.planes, self.height)
        return [(n, first, min(first + self.height, self.planes)) for n in range(self.samples) for first in firsts]

    def of(self, maps, coarser: int = 1) -> List:
        """The slabs of (N, X, Y, Z, C), or of a `coarser` grid: views."""
        planes = self.planes // coarser
        flat = tf.reshape(maps, (self.samples * planes, *maps.shape[2:]))
        return [flat[n * planes + a // coarser : n * planes + b // coarser] for n, a, b in self.pieces]

    def join(self, slabs: Sequence):
        """The way back, a copy."""
        flat = tf.concat(list(slabs), 0)
        return tf.reshape(flat, (self.samples, -1, *flat.shape[1:]))


def near(cut: Cut, index: int, *kept: Sequence) -> Tuple:
    """(slab, plane before, plane after) of each of `kept`, as three tuples; None beyond the volume's edge. Views."""
    pieces = cut.pieces
    first = not pieces[index][1]
    last = index + 1 == len(pieces) or not pieces[index + 1][1]
    before = None if first else tuple(slabs[index - 1][-1:] for slabs in kept)
    after = None if last else tuple(slabs[index + 1][:1] for slabs in kept)
    return tuple(slabs[index] for slabs in kept), before, after


def made(parts: Tuple, make: Callable) -> Tuple:
    """`near` as the maps that `make` makes of the kept ones: (slab, plane before or None, plane after or None)."""
    slab, before, after = parts
    return make(*slab), before and make(*before)[-1:], after and make(*after)[:1]


def whole_slabs(body: Callable):
    """A slab's part of a sweep as a function in the graph: traced once for all slabs of a shape, and not inlined."""
    return tf.function(body, autograph=False, experimental_attributes={"_noinline": True})


def in_turn(cut: Cut, body: Callable, arguments: Callable, before: Sequence = ()) -> List[List]:
    """`body` of `arguments(index)` slab by slab, each after the one before; what it returns, by kind."""
    found, before, body = [], list(before), whole_slabs(body)
    for index in range(len(cut.pieces)):
        with tf.control_dependencies(before):
            found.append(body(*arguments(index)))
        before = tf.nest.flatten(found[-1])[:1]
    return [list(each) for each in zip(*found)]


class Norm:
    """A block's norm over slabs, as a function of its weights.

    A group is what is normalised together: a sample (instance), all of the batch (batch), nothing (none).
    """

    def __init__(self, layer, cut: Cut, values):
        self.kind, self.layer, self.values = layer.norm, layer, values
        self.group_of = [piece[0] if self.kind == "instance" else 0 for piece in cut.pieces]
        self.mean = self.rate = None

    def settle(self, sums: Sequence, slabs: Sequence, training: bool) -> None:
        """Take all slabs' `statistics`, or a batch norm's moving ones."""
        if self.kind == "none":
            return
        if self.kind == "batch" and not training:
            batch_norm = self.layer.batch_norm
            self.mean, variance = [batch_norm.moving_mean], [batch_norm.moving_variance]
        else:
            sizes = [float(slab.shape[:3].num_elements()) for slab in slabs]
            self.mean, variance = [], []
            # Chan et al. 1983: no difference of large sums.
            for of_slabs, counts in zip(self._by_group(sums), self._by_group(sizes)):
                self.elements = sum(counts)
                means, squares = tf.unstack(tf.stack(of_slabs, 1))
                shares = tf.constant(counts)[:, None]
                self.mean.append(tf.reduce_sum(means * shares, 0) / self.elements)
                about = tf.reduce_sum(shares * tf.math.squared_difference(means, self.mean[-1]), 0)
                variance.append((tf.reduce_sum(squares, 0) + about) / self.elements)
            # What moves a batch norm's statistics is the variance of what the batch is a sample of.
            self.moments = [self.mean[0], variance[0] * (self.elements / (self.elements - 1))]
        self.rate = [tf.math.rsqrt(one + EPSILON) for one in variance]
        scales = [self.values[0] * rate for rate in self.rate]
        self.factors = [(mean, scale, self.values[1], rate) for mean, scale, rate in zip(self.mean, scales, self.rate)]

    def of(self, index: int) -> Tuple:
        """What `apply_norm` and `gradient_sums` of a slab take: (mean, scale, shift, rate), or (bias,)."""
        return (self.values[0],) if self.kind == "none" else self.factors[self.group_of[index]]

    def gradient(self, sums: Sequence) -> Tuple[Callable, List]:
        """From all slabs' `gradient_sums`: what `norm_gradient` takes, by the slab's index; gradients of `values`."""
        total = tf.add_n(list(sums))
        if self.kind == "none":
            return lambda index: (), [tf.cast(total[0], self.values[0].dtype)]
        found = []
        for mean, rate, mine in zip(self.mean, self.rate, self._by_group(sums)):
            of_dy, of_product = tf.unstack(tf.add_n(mine) / self.elements)
            scale = self.values[0] * rate
            found.append((mean, scale, self.values[1], -scale * rate * of_product, -scale * of_dy))
        return lambda index: found[self.group_of[index]], [total[1], total[0]]

    def _by_group(self, sums: Sequence) -> List[List]:
        groups = range(max(self.group_of) + 1)
        return [[one for one, of in zip(sums, self.group_of) if of == group] for group in groups]


def statistics(slab):
    """(2, C) float32: a slab's means, and its sums of squares about them."""
    mean = channel_sums(value, [slab]) / slab.shape[:3].num_elements()
    return tf.concat([mean, channel_sums(square_about, [slab], mean)], 0)


def apply_norm(slab, norm: Tuple, relu: bool = False):
    """Of a slab or of planes of it."""
    if len(norm) > 1:
        return one_pass(affine, [slab], *norm[:3], relu=relu)
    y = tf.nn.bias_add(slab, norm[0])
    return tf.nn.relu(y) if relu else y


def norm_relu(slab, norm: Tuple):
    return apply_norm(slab, norm, relu=True)


def gradient_sums(upstream, slab, norm: Tuple):
    """(2, C) float32: sums of dy and of dy * x-hat; without a norm of dy alone."""
    total = channel_sums(value, [upstream])
    if len(norm) == 1:
        return total
    *factors, rate = norm
    return tf.concat([total, channel_sums(product, [upstream, slab], *factors, relu=False) * rate], 0)


def norm_gradient(upstream, slab, factors: Tuple):
    """Of a norm's input."""
    return one_pass(gradient_below, [upstream, slab], *factors, relu=False) if factors else upstream


def finest_level(config: UNetConfig, shape, batch_size: int, height: int = 0):
    """The two layers: image -> (pooled, what the decoder's takes up); that and "below" -> logits."""
    if batch_size is None:
        raise ValueError("batch_size must be known under policy lean, got None; give it")
    height = height or slab_height(shape[0])
    of_head = {"use_bias": True, "bias_initializer": tf.keras.initializers.Constant(PRIOR_LOGIT)}
    head = convolution_layer(config, "head", config.outputs, 1, **of_head)
    decoder = SlabDecoder(head, config, height, dtype=precision(config), name="decoder0")
    decoder.build_for(batch_size, shape)
    encoder = SlabEncoder(decoder, config, height, dtype=precision(config), name="encoder0")

    def down(image):
        outputs = dict(encoder(image))
        return outputs.pop("pooled"), outputs

    return down, decoder


# --- A slab's arithmetic ---


def convolve(parts: Tuple, kernel):
    """A slab of the convolution, "same", of (slab, plane before, plane after): the slab alone, then the planes."""
    if kernel.shape[0] == 1:
        return tf.nn.conv2d(parts[0], kernel[0], UNIT_2D, "SAME")
    output = tf.nn.conv3d(parts[0][None], kernel, UNIT, "SAME")[0]
    return _with_edges(output, parts, (0, 2), lambda plane, k: tf.nn.conv2d(plane, kernel[k], UNIT_2D, "SAME"))


def input_gradient(parts: Tuple, kernel):
    """A slab of the gradient of a convolution's input, from (slab, plane before, plane after) of its output's."""

    def of_planes(maps, k):
        size = (*maps.shape[:3], kernel.shape[3])
        return tf.raw_ops.Conv2DBackpropInput(
            input_sizes=size, filter=kernel[k], out_backprop=maps, strides=UNIT_2D, padding="SAME"
        )

    if kernel.shape[0] == 1:
        return of_planes(parts[0], 0)
    size = (1, *parts[0].shape[:3], kernel.shape[3])
    output = tf.raw_ops.Conv3DBackpropInputV2(
        input_sizes=size, filter=kernel, out_backprop=parts[0][None], strides=UNIT, padding="SAME"
    )[0]
    return _with_edges(output, parts, (2, 0), of_planes)


def filter_gradient(parts: Tuple, upstream, kernel):
    """A slab's share in the gradient of a kernel, float32: of (slab, plane before, plane after) and the output's."""
    (x, before, after), shape = parts, kernel.shape[1:]
    if kernel.shape[0] == 1:
        return _of_planes(x, upstream, shape)[None]
    pairs = [[], [(x, upstream)], []]
    if x.shape[0] > 1:
        pairs[0].append((x[:-1], upstream[1:]))
        pairs[2].append((x[1:], upstream[:-1]))
    if before is not None:
        pairs[0].append((before, upstream[:1]))
    if after is not None:
        pairs[2].append((after, upstream[-1:]))
    planes, last = [], upstream
    for each in pairs:
        found = []
        for seen, met in each:
            with tf.control_dependencies([last]):
                last = _of_planes(tf.identity(seen), met, shape)
            found.append(last)
        planes.append(tf.add_n(found) if found else tf.zeros(shape))
    return tf.stack(planes)


def relu_gradient(upstream, output):
    return tf.raw_ops.ReluGrad(gradients=upstream, features=output)


# --- The two layers ---


class SlabLayer(tf.keras.layers.Layer):
    """What both sides share: a block's layers, and a call whose gradient is written out."""

    def __init__(self, unet: UNetConfig, height: int, widths, entry_width: int, up_width: int = 0, **kwargs):
        super().__init__(**kwargs)
        self.unet, self.height, self.widths, self.entry_width = unet, height, tuple(widths), entry_width
        name, residual = self.name, unet.residual
        self.up = up_layers(unet, name, up_width) if up_width else []
        self.conv1 = convolution_layer(unet, f"{name}_conv1", widths[0], 3)
        self.norm1 = norm_layer(unet, f"{name}_act1")
        self.conv2 = convolution_layer(unet, f"{name}_conv2", widths[1], 3)
        self.norm2 = norm_layer(unet, f"{name}_norm2" if residual else f"{name}_act2", activate=not residual)
        self.shortcut = convolution_layer(unet, f"{name}_shortcut", widths[1], 1) if residual else None

    def build_block(self, shape) -> None:
        """The block's weights, for maps (N, X, Y, Z, any)."""
        entry, first, second = ([*shape[:-1], width] for width in (self.entry_width, *self.widths))
        for layer, of in ((self.conv1, entry), (self.norm1, first), (self.conv2, first), (self.norm2, second)):
            layer.build(tf.TensorShape(of))
        if self.shortcut:
            self.shortcut.build(tf.TensorShape(entry))

    def learn(self, inputs, weights, training: bool):
        """The outputs of `forward`, with the gradient of `backward`; moves batch norm's statistics."""
        if not training:
            return self.forward(inputs, weights, False)[0]
        like, structure = (inputs, weights), []

        @tf.custom_gradient
        def computed(*flat):
            inputs, weights = tf.nest.pack_sequence_as(like, flat)
            outputs, kept = self.forward(inputs, weights, True)
            moments = [norm.moments for norm in kept["norms"] if norm.kind == "batch"]
            structure[:] = [(outputs, moments)]

            def gradient(*upstream):
                at_outputs, _ = tf.nest.pack_sequence_as(structure[0], upstream)
                return tf.nest.flatten(self.backward(at_outputs, kept, inputs, weights))

            return tf.nest.flatten(structure[0]), gradient

        flat = computed(*tf.nest.flatten(like))
        outputs, moments = tf.nest.pack_sequence_as(structure[0], flat)
        for layer, found in zip((self.norm1, self.norm2), moments):
            layer.move(*found)
        return outputs

    def block_weights(self):
        """As tensors, in the dtype they are read in."""
        weights = {"norm1": self.norm1.values(), "norm2": self.norm2.values()}
        weights["conv2"] = tf.convert_to_tensor(self.conv2.kernel)
        return weights

    def norms(self, cut: Cut, weights):
        return [Norm(self.norm1, cut, weights["norm1"]), Norm(self.norm2, cut, weights["norm2"])]

    @staticmethod
    def convolved(cut, kept, norm, kernel, of_next, training, before=()):
        """A convolution of `kept`, or of their norm and ReLU; settles `of_next`, the norm behind it, unless None."""

        def body(parts, norm, kernel):
            maps = made(parts, (lambda one: norm_relu(one, norm)) if norm else lambda one: one)
            slab = convolve(maps, kernel)
            return (slab, statistics(slab)) if of_next and of_next.kind != "none" else (slab,)

        arguments = lambda index: (near(cut, index, kept), norm and norm.of(index), kernel)  # noqa: E731
        slabs, *sums = in_turn(cut, body, arguments, before)
        if of_next:
            of_next.settle(sums[0] if sums else [], slabs, training)
        return slabs

    @staticmethod
    def through_norm(cut, norm, sums, at_y, hidden):
        """Gradient slabs of a norm's input, each in place of two that go; and of its weights."""
        factors, at_values = norm.gradient(sums)
        if norm.kind == "none":
            return at_y, at_values
        body = lambda at_y, hidden, factors: (norm_gradient(at_y, hidden, factors),)  # noqa: E731
        (found,) = in_turn(cut, body, lambda index: (at_y[index], hidden[index], factors(index)), sums[-1:])
        return found, at_values

    def through_second(self, cut, norm, hidden1, at_hidden2, weights):
        """From the gradient of the second convolution's output to that of the first one's."""

        def body(parts, at_output, hidden1, norm, kernel):
            maps = made(parts, lambda one: norm_relu(one, norm))
            of_kernel = filter_gradient(maps, at_output[0][0], kernel)
            with tf.control_dependencies([of_kernel]):
                at_y = input_gradient(made(at_output, tf.identity), kernel)
            at_y = relu_gradient(at_y, maps[0])
            return at_y, gradient_sums(at_y, hidden1, norm), of_kernel

        def arguments(index):
            around = near(cut, index, hidden1), near(cut, index, at_hidden2)
            return (*around, hidden1[index], norm.of(index), weights["conv2"])

        at_y, sums, of_kernel = in_turn(cut, body, arguments, [at_hidden2[-1]])
        at_hidden1, at_values = self.through_norm(cut, norm, sums, at_y, hidden1)
        return at_hidden1, {"conv2": _total(of_kernel, weights["conv2"]), "norm1": at_values}


class SlabEncoder(SlabLayer):
    """Image (N, X, Y, Z, C) -> {"pooled": (N, X/2, Y/2, Z/2, width), "sum": slabs, "shortcut": slabs}.

    `decoder` is the layer that takes them up; "sum" is the share of the skip maps in its first convolution, "shortcut"
    that in its shortcut.
    """

    def __init__(self, decoder: "SlabDecoder", unet: UNetConfig, height: int, **kwargs):
        super().__init__(unet, height, unet.encoder_widths(0), unet.channels, **kwargs)
        self._decoder = lambda: decoder  # its weights are its own

    def build(self, input_shape):
        self.build_block(input_shape)
        super().build(input_shape)

    @property
    def weights(self):
        layers = (self.conv1, self.norm1, self.conv2, self.norm2, self.shortcut)
        return [weight for layer in layers if layer for weight in layer.weights]

    @tf.autograph.experimental.do_not_convert
    def call(self, image, training=None):
        decoder, rows = self._decoder(), slice(0, self.widths[1])
        weights = {**self.block_weights(), "conv1": tf.convert_to_tensor(self.conv1.kernel)}
        weights["sum"] = decoder.conv1.kernel[..., rows, :]
        if self.shortcut:
            weights["shortcut"] = tf.convert_to_tensor(self.shortcut.kernel)
            weights["skip_shortcut"] = decoder.shortcut.kernel[..., rows, :]
        return self.learn(image, weights, bool(training))

    def forward(self, image, weights, training: bool):
        cut = Cut(image.shape[0], image.shape[1], self.height)
        norms, images = self.norms(cut, weights), cut.of(image)
        hidden1 = self.convolved(cut, images, None, weights["conv1"], norms[0], training)
        hidden2 = self.convolved(cut, hidden1, norms[0], weights["conv2"], norms[1], training, hidden1[-1:])

        def body(parts, norm, kernels):
            maps = made(parts, self._output(norm, kernels))
            pooled = tf.nn.max_pool3d(maps[0][None], HALF, HALF, "VALID")[0]
            with tf.control_dependencies([pooled]):
                sums = convolve((tf.identity(maps[0]), *maps[1:]), kernels["sum"])
            return (pooled, sums, convolve(maps, kernels["skip_shortcut"])) if self.shortcut else (pooled, sums)

        arguments = self._arguments(cut, hidden2, images, norms[1], weights)
        pooled, *sums = in_turn(cut, body, arguments, hidden2[-1:])
        outputs = dict(zip(("sum", "shortcut"), sums))
        return {"pooled": cut.join(pooled), **outputs}, {"norms": norms}

    def backward(self, upstream, kept, image, weights):
        cut, norms = Cut(image.shape[0], image.shape[1], self.height), kept["norms"]
        images = cut.of(_then(image, *tf.nest.flatten(upstream)))
        hidden1 = self.convolved(cut, images, None, weights["conv1"], None, True, [images[0]])
        hidden2 = self.convolved(cut, hidden1, norms[0], weights["conv2"], None, True, hidden1[-1:])
        at_pooled = cut.of(upstream["pooled"], coarser=2)
        names = ("sum", "shortcut") if self.shortcut else ("sum",)

        def body(parts, norm, kernels, at_sums, at_pooled):
            maps, at_y, of_kernels = made(parts, self._output(norm, kernels)), None, []
            y = maps[0]
            for at, kernel in zip(at_sums, (kernels["sum"], kernels.get("skip_shortcut"))):
                of_kernels.append(filter_gradient(maps, at[0][0], kernel))
                with tf.control_dependencies(of_kernels):
                    one = input_gradient(made(at, tf.identity), kernel)
                at_y = one if at_y is None else at_y + one
            with tf.control_dependencies([at_y]):
                pooled = tf.nn.max_pool3d(tf.identity(y)[None], HALF, HALF, "VALID")
            shape = {"ksize": HALF, "strides": HALF, "padding": "VALID"}
            at_y += tf.raw_ops.MaxPool3DGrad(orig_input=y[None], orig_output=pooled, grad=at_pooled[None], **shape)[0]
            at_y = relu_gradient(at_y, y)
            if self.shortcut:
                of_kernels.append(filter_gradient((parts[0][1], None, None), at_y, kernels["shortcut"]))
            return (at_y, gradient_sums(at_y, parts[0][0], norm), *of_kernels)

        arguments = self._arguments(cut, hidden2, images, norms[1], weights)

        def more(index):
            return (*arguments(index), [near(cut, index, upstream[name]) for name in names], at_pooled[index])

        at_y2, sums, *of_kernels = in_turn(cut, body, more, hidden2[-1:])
        kernels = ("sum", "skip_shortcut", "shortcut")
        found = {name: _total(shares, weights[name]) for name, shares in zip(kernels, of_kernels)}
        at_hidden2, found["norm2"] = self.through_norm(cut, norms[1], sums, at_y2, hidden2)
        at_hidden1, more_found = self.through_second(cut, norms[0], hidden1, at_hidden2, weights)

        def last(parts, at_hidden1, kernel):
            return (filter_gradient(made(parts, tf.identity), at_hidden1, kernel),)

        def of_last(index):
            return near(cut, index, images), at_hidden1[index], weights["conv1"]

        (shares,) = in_turn(cut, last, of_last, at_hidden1[-1:])
        return None, {**found, **more_found, "conv1": _total(shares, weights["conv1"])}

    def _output(self, norm, kernels):
        """Of the block, as a function of the second convolution's output and of the image (residual)."""

        def output(hidden2, *image):
            if not image:
                return norm_relu(hidden2, norm)
            of_image = tf.nn.conv2d(*image, kernels["shortcut"][0], UNIT_2D, "SAME")
            return tf.nn.relu(apply_norm(hidden2, norm) + of_image)

        return output

    def _arguments(self, cut, hidden2, images, norm, weights):
        kept = (hidden2, images) if self.shortcut else (hidden2,)
        kernels = {name: weights[name] for name in ("sum", "skip_shortcut", "shortcut") if name in weights}
        return lambda index: (near(cut, index, *kept), norm.of(index), kernels)


class SlabDecoder(SlabLayer):
    """{"pooled" ...} of the encoder without the pooled maps, and `below` -> logits (N, X, Y, Z, outputs)."""

    def __init__(self, head, unet: UNetConfig, height: int, **kwargs):
        skip, up_width = unet.encoder_widths(0)[1], unet.up_width(0)
        super().__init__(unet, height, unet.decoder_widths(0), skip + up_width, up_width, **kwargs)
        self.head = head
        self.skip = skip

    def build_for(self, batch, shape) -> None:
        """Weights, before the encoder's layer reads them."""
        below = (batch, *(n // 2 for n in shape), self.unet.encoder_widths(1)[1])
        if self.unet.depth > 2:
            below = (*below[:-1], self.unet.decoder_widths(1)[1])
        self.up[0].build(tf.TensorShape(below))
        self.build_block((batch, *shape, 0))
        self.head.build(tf.TensorShape((batch, *shape, self.widths[1])))

    @property
    def weights(self):
        layers = (*self.up, self.conv1, self.norm1, self.conv2, self.norm2, self.shortcut, self.head)
        return [weight for layer in layers if layer for weight in layer.weights]

    @tf.autograph.experimental.do_not_convert
    def call(self, inputs, training=None):
        weights = {**self.block_weights(), "conv1": self.conv1.kernel[..., self.skip :, :]}
        weights["up"] = tf.convert_to_tensor(self.up[0].kernel)
        weights.update(head=tf.convert_to_tensor(self.head.kernel), head_bias=tf.convert_to_tensor(self.head.bias))
        if self.shortcut:
            weights["shortcut"] = self.shortcut.kernel[..., self.skip :, :]
        return self.learn(dict(inputs), weights, bool(training))

    def forward(self, inputs, weights, training: bool):
        below = inputs["below"]
        cut = Cut(below.shape[0], 2 * below.shape[1], self.height)
        norms, coarse = self.norms(cut, weights), cut.of(below, coarser=2)

        def first(parts, sums, up, kernel):
            slab = sums + convolve(made(parts, lambda one: self._up_sampled(one, up)), kernel)
            return (slab, statistics(slab)) if self.unet.norm != "none" else (slab,)

        def of_first(index):
            return near(cut, index, coarse), inputs["sum"][index], weights["up"], weights["conv1"]

        hidden1, *sums = in_turn(cut, first, of_first)
        norms[0].settle(sums[0] if sums else [], hidden1, training)
        hidden2 = self.convolved(cut, hidden1, norms[0], weights["conv2"], norms[1], training, hidden1[-1:])

        def last(*arguments):
            weights = arguments[-1]
            slab = tf.nn.conv2d(self._output(*arguments), weights["head"][0], UNIT_2D, "SAME")
            return (tf.nn.bias_add(slab, weights["head_bias"]),)

        arguments = self._arguments(inputs, coarse, hidden2, norms[1], weights)
        (logits,) = in_turn(cut, last, arguments, hidden2[-1:])
        return cut.join(logits), {"norms": norms, "hidden": (hidden1, hidden2)}

    def backward(self, at_logits, kept, inputs, weights):
        below, norms = inputs["below"], kept["norms"]
        hidden1, hidden2 = kept["hidden"]
        cut = Cut(below.shape[0], 2 * below.shape[1], self.height)
        at_head = cut.of(at_logits)
        arguments = self._arguments(inputs, cut.of(below, coarser=2), hidden2, norms[1], weights)

        def to_output(at_head, *arguments):
            y = self._output(*arguments)
            return y, relu_gradient(input_gradient((at_head,), arguments[-1]["head"]), y)

        def sums_of(at_head, *arguments):
            y, at_y = to_output(at_head, *arguments)
            hidden2, norm, *_, weights = arguments
            of_head = filter_gradient((y, None, None), at_head, weights["head"]), channel_sums(value, [at_head])[0]
            return (gradient_sums(at_y, hidden2, norm), *of_head)

        def with_head(index):
            return (at_head[index], *arguments(index))

        sums, of_head, of_bias = in_turn(cut, sums_of, with_head, [at_logits])
        found = {"head": _total(of_head, weights["head"]), "head_bias": _total(of_bias, weights["head_bias"])}
        factors, found["norm2"] = norms[1].gradient(sums)

        def to_hidden2(factors, at_head, *arguments):
            at_y = to_output(at_head, *arguments)[1]
            slab = norm_gradient(at_y, arguments[0], factors)
            return (slab, at_y) if self.shortcut else (slab,)

        at_hidden2, *at_shortcut = in_turn(
            cut, to_hidden2, lambda index: (factors(index), *with_head(index)), sums[-1:]
        )
        at_hidden1, more = self.through_second(cut, norms[0], hidden1, at_hidden2, weights)
        found.update(more)

        coarse = cut.of(_then(below, at_hidden1[-1]), coarser=2)
        readers = {"conv1": at_hidden1, **({"shortcut": at_shortcut[0]} if self.shortcut else {})}

        def to_below(parts, at_outputs, up, kernels):
            maps, of_kernels, at_fine = made(parts, lambda one: self._up_sampled(one, up)), [], None
            for at, kernel in zip(at_outputs, kernels):
                of_kernels.append(filter_gradient(maps, at[0][0], kernel))
                with tf.control_dependencies(of_kernels):
                    one = input_gradient(made(at, tf.identity), kernel)
                at_fine = one if at_fine is None else at_fine + one
            return (*self._up_gradient(at_fine, parts[0][0], up), *of_kernels)

        def of_below(index):
            around = [near(cut, index, at) for at in readers.values()]
            return near(cut, index, coarse), around, weights["up"], [weights[name] for name in readers]

        at_below, of_up, *of_kernels = in_turn(cut, to_below, of_below, at_hidden1[-1:])
        found["up"] = _total(of_up, weights["up"])
        found.update({name: _total(shares, weights[name]) for name, shares in zip(readers, of_kernels)})
        at_inputs = {"below": cut.join(at_below), "sum": at_hidden1}
        return {**at_inputs, **({"shortcut": at_shortcut[0]} if self.shortcut else {})}, found

    def _arguments(self, inputs, coarse, hidden2, norm, weights):
        """What `_output` of a slab takes."""
        read = {name: weights[name] for name in ("head", "head_bias", "up", "shortcut") if name in weights}
        if not self.shortcut:
            return lambda index: (hidden2[index], norm.of(index), (), read)
        return lambda index: (hidden2[index], norm.of(index), (inputs["shortcut"][index], coarse[index]), read)

    def _output(self, hidden2, norm, beside, weights):
        """A slab of the block's output."""
        if not beside:
            return norm_relu(hidden2, norm)
        of_skip, coarse = beside
        fine = self._up_sampled(coarse, weights["up"])
        of_fine = tf.nn.conv2d(fine, weights["shortcut"][0], UNIT_2D, "SAME")
        return tf.nn.relu(apply_norm(hidden2, norm) + of_skip + of_fine)

    def _up_sampled(self, coarse, kernel):
        """A slab of the fine grid."""
        if self.unet.up != "transposed":
            fine = tf.nn.conv2d(coarse, kernel[0], UNIT_2D, "SAME")
            for axis in range(3):
                fine = tf.repeat(fine, 2, axis)
            return fine
        planes, size_y, size_z, _ = coarse.shape
        shape = (1, 2 * planes, 2 * size_y, 2 * size_z, kernel.shape[3])
        return tf.nn.conv3d_transpose(coarse[None], kernel, shape, HALF, "SAME")[0]

    def _up_gradient(self, at_fine, coarse, kernel):
        """Gradients of a coarse slab and, in float32, of the kernel."""
        if self.unet.up == "transposed":
            of_kernel = tf.raw_ops.Conv3DBackpropFilterV2(
                input=at_fine[None], filter_sizes=kernel.shape, out_backprop=coarse[None], strides=HALF, padding="SAME"
            )
            with tf.control_dependencies([of_kernel]):
                at_coarse = tf.nn.conv3d(tf.identity(at_fine)[None], kernel, HALF, "SAME")[0]
            return at_coarse, tf.cast(of_kernel, tf.float32)
        at_coarse = 8 * tf.nn.avg_pool3d(at_fine[None], HALF, HALF, "VALID")[0]
        of_kernel = _of_planes(coarse, at_coarse, kernel.shape[1:])[None]
        return input_gradient((at_coarse,), kernel), of_kernel


# --- Private helpers ---


def _then(x, *before):
    with tf.control_dependencies(before):
        return tf.identity(x)


def _with_edges(output, parts, taps, of_plane):
    """Add, in place, what the planes before and after make at both edges. Nothing else reads `output`."""
    for plane, tap, row in ((parts[1], taps[0], 0), (parts[2], taps[1], output.shape[0] - 1)):
        if plane is not None:
            output = tf.raw_ops.InplaceAdd(x=output, i=[row], v=of_plane(plane, tap))
    return output


def _of_planes(x, upstream, kernel_shape):
    found = tf.raw_ops.Conv2DBackpropFilter(
        input=x, filter_sizes=kernel_shape, out_backprop=upstream, strides=UNIT_2D, padding="SAME"
    )
    return tf.cast(found, tf.float32)


def _total(shares, kernel):
    return tf.cast(tf.add_n(shares), kernel.dtype)
