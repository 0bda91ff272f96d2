"""Level 0 of a U-Net in slabs along X: between the image and the logits no map of the finest grid is one tensor.

Two layers, one for each side of the network. The first convolution of the decoder's block is a sum: its part that reads
the skip maps belongs to the encoder's layer, which hands that part's output to the decoder's instead of the skip maps.
Backward, the gradient of the sum comes back along the same way, and the skip maps are made again from the image. A
gradient is written slab by slab while the maps it is made of go, so that two maps take the memory of one.

    encoder   keeps nothing but the statistics of its norms
    decoder   keeps what its two convolutions put out, two maps; a third, the skip's share in the sum, with `residual`

The same weights and functions as the layers of models/blocks.py, the same gradients to rounding.
"""

import dataclasses

import tensorflow as tf

from models.blocks import head_layer
from models.config import UNetConfig
from models.layer_plan import slab_height
from models.layers import build_by_name, convolution_layer, norm_layer, precision, up_layers
from models.ordered import HALF
from models.passes import channel_sums, value
from models.slabs import (
    UNIT_2D,
    Cut,
    Norm,
    convolve,
    filter_gradient,
    in_turn,
    input_gradient,
    made,
    near,
    of_planes,
    relu_gradient,
    total,
)
from models.supervision import rows


def finest_level(config: UNetConfig, shape, height: int = 0):
    """The two layers: image -> (pooled, what the decoder's takes up); that and "below" -> logits."""
    height = height or slab_height(shape[0])
    decoder = SlabDecoder(config, height, dtype=precision(config), name="decoder0")
    encoder = SlabEncoder(decoder, config, height, dtype=precision(config), name="encoder0")

    def down(image):
        outputs = dict(encoder(image))
        return outputs.pop("pooled"), outputs

    return down, decoder


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

    def get_config(self):
        return {**super().get_config(), "unet": dataclasses.asdict(self.unet), "height": self.height}

    @classmethod
    def from_config(cls, config):
        return cls(**{**config, "unet": UNetConfig(**config["unet"])})

    def build_block(self, shape) -> None:
        """The block's weights, for maps (N, X, Y, Z, any)."""
        entry, first, second = ([*shape[:-1], width] for width in (self.entry_width, *self.widths))
        for layer, of in ((self.conv1, entry), (self.norm1, first), (self.conv2, first), (self.norm2, second)):
            build_by_name(layer, of)
        if self.shortcut:
            build_by_name(self.shortcut, entry)

    def learn(self, inputs, weights, training: bool, *loss):
        """The outputs of `forward`, with the gradient of `backward`; moves batch norm's statistics."""
        if not training:
            return self.forward(inputs, weights, False, *loss)[0]
        like, structure = (inputs, weights), []

        @tf.custom_gradient
        def computed(*flat):
            # A tape that is persistent, or eager, would look for the gradients of single operations.
            inputs, weights = tf.nest.pack_sequence_as(like, [tf.stop_gradient(one) for one in flat])
            outputs, kept = self.forward(inputs, weights, True, *loss)
            moments = [norm.moments for norm in kept["norms"] if norm.kind == "batch"]
            structure[:] = [(outputs, moments)]

            def gradient(*upstream):
                at_outputs, _ = tf.nest.pack_sequence_as(structure[0], upstream)
                return tf.nest.flatten(self.backward(at_outputs, kept, inputs, weights, *loss))

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
    def convolved(cut, kept, before_it, kernel, of_next, training, before=()):
        """A convolution of `kept`, or of their norm and ReLU; settles `of_next`, the norm behind it, unless None."""

        def body(parts, norm, kernel):
            maps = made(parts, (lambda one: before_it.apply(one, norm)) if before_it else tf.identity)
            slab = convolve(maps, kernel)
            return (slab, *(of_next.statistics(slab) if of_next else ()))

        arguments = lambda index: (near(cut, index, kept), before_it and before_it.of(index), kernel)  # noqa: E731
        slabs, *sums = in_turn(cut, body, arguments, before)
        if of_next:
            of_next.settle(sums[0] if sums else [], slabs, training)
        return slabs

    @staticmethod
    def through_norm(cut, norm, factors, at_y, hidden):
        """Gradient slabs of a norm's input, each in place of two that go."""
        body = lambda at_y, hidden, of: (norm.gradient_below(at_y, hidden, of),)  # noqa: E731
        return in_turn(cut, body, lambda index: (at_y[index], hidden[index], factors(index)), at_y[-1:])[0]

    def through_second(self, cut, norm, hidden1, at_hidden2, weights):
        """From the gradient of the second convolution's output to that of the first norm's; what that one's takes."""

        def body(parts, at_output, hidden1, of, kernel):
            maps = made(parts, lambda one: norm.apply(one, of))
            of_kernel = filter_gradient(maps, at_output[0][0], kernel)
            with tf.control_dependencies([of_kernel]):
                at_y = input_gradient(made(at_output, tf.identity), kernel)
            return at_y, norm.gradient_sums(at_y, hidden1, of), of_kernel

        def arguments(index):
            around = near(cut, index, hidden1), near(cut, index, at_hidden2)
            return (*around, hidden1[index], norm.of(index), weights["conv2"])

        at_y, sums, of_kernel = in_turn(cut, body, arguments, [at_hidden2[-1]])
        factors, at_values = norm.gradient(sums)
        return at_y, factors, {"conv2": total(of_kernel, weights["conv2"]), "norm1": at_values}


class SlabEncoder(SlabLayer):
    """Image (N, X, Y, Z, C) -> {"pooled": (N, X/2, Y/2, Z/2, width), "sum": slabs, "shortcut": slabs}.

    `decoder` is the layer that takes them up; "sum" is the share of the skip maps in its first convolution, "shortcut"
    that in its shortcut.
    """

    def __init__(self, decoder: "SlabDecoder", unet: UNetConfig, height: int, **kwargs):
        super().__init__(unet, height, unet.encoder_widths(0), unet.channels, **kwargs)
        self.use(decoder)  # in a closure: its weights are its own

    def use(self, decoder: "SlabDecoder") -> None:
        """Take this layer's weights from now on."""
        self._decoder = lambda: decoder

    @classmethod
    def from_config(cls, config):
        """Beside a decoder's layer of its own, until the one that is called on its outputs is there."""
        unet = UNetConfig(**config["unet"])
        decoder = SlabDecoder(unet, config["height"], dtype=precision(unet), name="decoder0")
        return cls(decoder, **{**config, "unet": unet})

    def build(self, input_shape):
        if not self._decoder().conv1.built:
            self._decoder().build_for(input_shape)
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

        def body(parts, of, kernels):
            maps = made(parts, self._output(norms[1], of, kernels))
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
        with tf.control_dependencies(tf.nest.flatten(upstream)):
            images = cut.of(tf.identity(image))
        hidden1 = self.convolved(cut, images, None, weights["conv1"], None, True, [images[0]])
        hidden2 = self.convolved(cut, hidden1, norms[0], weights["conv2"], None, True, hidden1[-1:])
        at_pooled = cut.of(upstream["pooled"], coarser=2)
        names = ("sum", "shortcut") if self.shortcut else ("sum",)

        def body(parts, of, kernels, at_sums, at_pooled):
            maps, at_y, of_kernels = made(parts, self._output(norms[1], of, kernels)), None, []
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
            if self.shortcut:
                at_y = relu_gradient(at_y, y)
                of_kernels.append(filter_gradient((parts[0][1], None, None), at_y, kernels["shortcut"]))
            return (at_y, norms[1].gradient_sums(at_y, parts[0][0], of), *of_kernels)

        arguments = self._arguments(cut, hidden2, images, norms[1], weights)

        def more(index):
            return (*arguments(index), [near(cut, index, upstream[name]) for name in names], at_pooled[index])

        at_y2, sums, *of_kernels = in_turn(cut, body, more, hidden2[-1:])
        kernels = ("sum", "skip_shortcut", "shortcut")
        found = {name: total(shares, weights[name]) for name, shares in zip(kernels, of_kernels)}
        factors2, found["norm2"] = norms[1].gradient(sums)
        at_hidden2 = self.through_norm(cut, norms[1], factors2, at_y2, hidden2)
        at_y1, factors1, more_found = self.through_second(cut, norms[0], hidden1, at_hidden2, weights)

        def last(parts, at_y, hidden, of, kernel):
            return (filter_gradient(made(parts, tf.identity), norms[0].gradient_below(at_y, hidden, of), kernel),)

        def of_last(index):
            return near(cut, index, images), at_y1[index], hidden1[index], factors1(index), weights["conv1"]

        (shares,) = in_turn(cut, last, of_last, at_y1[-1:])
        return None, {**found, **more_found, "conv1": total(shares, weights["conv1"])}

    @staticmethod
    def _output(norm, of, kernels):
        """Of the block, as a function of the second convolution's output and of the image (residual)."""

        def output(hidden2, *image):
            y = norm.apply(hidden2, of)
            return tf.nn.relu(y + tf.nn.conv2d(*image, kernels["shortcut"][0], UNIT_2D, "SAME")) if image else y

        return output

    def _arguments(self, cut, hidden2, images, norm, weights):
        kept = (hidden2, images) if self.shortcut else (hidden2,)
        kernels = {name: weights[name] for name in ("sum", "skip_shortcut", "shortcut") if name in weights}
        return lambda index: (near(cut, index, *kept), norm.of(index), kernels)


class SlabDecoder(SlabLayer):
    """What the encoder gives but the pooled maps, and `below` -> logits (N, X, Y, Z, outputs).

    With "target" among what it takes, and a `loss` as models/supervision.py has it: (loss, score (N, R)) of it.
    The logits are then made slab by slab: once for the loss, and again for each sweep that reads their gradient.
    """

    def __init__(self, unet: UNetConfig, height: int, **kwargs):
        self.skip, up_width = unet.encoder_widths(0)[1], unet.up_width(0)
        super().__init__(unet, height, unet.decoder_widths(0), self.skip + up_width, up_width, **kwargs)
        self.head = head_layer(unet, "head")

    def build(self, input_shape):
        if not self.conv1.built:
            batch, *coarse, _ = input_shape["below"]
            self.build_for((batch, *(2 * n for n in coarse), 0))
        super().build(input_shape)

    def __call__(self, inputs, *args, **kwargs):
        outputs = super().__call__(inputs, *args, **kwargs)
        if hasattr(inputs["sum"][0], "_keras_history"):
            inputs["sum"][0]._keras_history.layer.use(self)
        return outputs

    def build_for(self, image) -> None:
        """Weights, for images of this shape: the encoder's layer reads some of them before this one is called."""
        batch, *shape, _ = image
        below = (batch, *(n // 2 for n in shape), self.unet.encoder_widths(1)[1])
        if self.unet.depth > 2:
            below = (*below[:-1], self.unet.decoder_widths(1)[1])
        build_by_name(self.up[0], below)
        self.build_block((batch, *shape, 0))
        build_by_name(self.head, (batch, *shape, self.widths[1]))

    @property
    def weights(self):
        layers = (*self.up, self.conv1, self.norm1, self.conv2, self.norm2, self.shortcut, self.head)
        return [weight for layer in layers if layer for weight in layer.weights]

    @tf.autograph.experimental.do_not_convert
    def call(self, inputs, training=None, loss=None):
        weights = {**self.block_weights(), "conv1": self.conv1.kernel[..., self.skip :, :]}
        weights["up"] = tf.convert_to_tensor(self.up[0].kernel)
        weights.update(head=tf.convert_to_tensor(self.head.kernel), head_bias=tf.convert_to_tensor(self.head.bias))
        if self.shortcut:
            weights["shortcut"] = self.shortcut.kernel[..., self.skip :, :]
        return self.learn(dict(inputs), weights, bool(training), loss)

    def forward(self, inputs, weights, training: bool, loss):
        below = inputs["below"]
        cut = Cut(below.shape[0], 2 * below.shape[1], self.height)
        norms, coarse = self.norms(cut, weights), cut.of(below, coarser=2)

        def first(parts, sums, up, kernel):
            slab = sums + convolve(made(parts, lambda one: self._up_sampled(one, up)), kernel)
            return (slab, *norms[0].statistics(slab))

        def of_first(index):
            return near(cut, index, coarse), inputs["sum"][index], weights["up"], weights["conv1"]

        hidden1, *sums = in_turn(cut, first, of_first)
        norms[0].settle(sums[0] if sums else [], hidden1, training)
        hidden2 = self.convolved(cut, hidden1, norms[0], weights["conv2"], norms[1], training, hidden1[-1:])

        kept = {"norms": norms, "hidden": (hidden1, hidden2)}
        arguments = self._arguments(inputs, coarse, hidden2, norms[1], weights)
        if loss is None:
            body = lambda *arguments: (self._logits(self._output(norms[1], *arguments), arguments[-1]),)  # noqa: E731
            (logits,) = in_turn(cut, body, arguments, hidden2[-1:])
            return cut.join(logits), kept

        def sums_of(target, *arguments):
            logits = self._logits(self._output(norms[1], *arguments), arguments[-1])
            return (loss.sums(rows(target[None]), rows(logits[None]), logits.shape[-1])[0],)

        targets = cut.of(inputs["target"])
        (sums,) = in_turn(cut, sums_of, lambda index: (targets[index], *arguments(index)), hidden2[-1:])
        of_samples = [[one for one, piece in zip(sums, cut.pieces) if piece[0] == n] for n in range(cut.samples)]
        sums = tf.concat([tf.add_n(mine) for mine in of_samples], 0)
        found, score, factors = loss.value(sums, float(inputs["target"].shape[1:4].num_elements()))
        return (found, score), {**kept, "factors": factors}

    def backward(self, upstream, kept, inputs, weights, loss):
        below, norms = inputs["below"], kept["norms"]
        hidden1, hidden2 = kept["hidden"]
        cut = Cut(below.shape[0], 2 * below.shape[1], self.height)
        arguments = self._arguments(inputs, cut.of(below, coarser=2), hidden2, norms[1], weights)
        if loss is None:
            at_logits, before = cut.of(upstream), upstream
            of_head = lambda index: (at_logits[index], ())  # noqa: E731
        else:
            targets, factors = cut.of(inputs["target"]), [factor * upstream[0] for factor in kept["factors"]]
            before = factors[0]
            mine = [[factor[n : n + 1] for factor in factors] for n in range(cut.samples)]
            of_head = lambda index: (targets[index], mine[cut.pieces[index][0]])  # noqa: E731

        @tf.function(autograph=False, jit_compile=True)
        def slope(target, logits, factors):
            # One pass over memory.
            found = loss.slope(rows(target[None]), tf.sigmoid(rows(logits[None])), factors)
            return tf.reshape(tf.cast(found, logits.dtype), logits.shape)

        def to_output(at_logits, factors, *arguments):
            """A slab's output, and the gradients of its logits and of what its norm puts out."""
            y, weights = self._output(norms[1], *arguments), arguments[-1]
            if loss is not None:
                at_logits = slope(at_logits, self._logits(y, weights), factors)
            at_y = input_gradient((at_logits,), weights["head"])
            return y, at_logits, relu_gradient(at_y, y) if self.shortcut else at_y

        def sums_of(*given):
            y, at_logits, at_y = to_output(*given)
            hidden2, of, *_, weights = given[2:]
            of_weights = filter_gradient((y, None, None), at_logits, weights["head"]), channel_sums(value, [at_logits])
            return (norms[1].gradient_sums(at_y, hidden2, of), *of_weights)

        def with_head(index):
            return (*of_head(index), *arguments(index))

        sums, of_kernel, of_bias = in_turn(cut, sums_of, with_head, [before])
        found = {"head": total(of_kernel, weights["head"]), "head_bias": total(of_bias, weights["head_bias"])[0]}
        factors2, found["norm2"] = norms[1].gradient(sums)

        def to_hidden2(below, *given):
            at_y = to_output(*given)[-1]
            slab = norms[1].gradient_below(at_y, given[2], below)
            return (slab, at_y) if self.shortcut else (slab,)

        with_factors = lambda index: (factors2(index), *with_head(index))  # noqa: E731
        at_hidden2, *at_shortcut = in_turn(cut, to_hidden2, with_factors, sums[-1:])
        at_y1, factors1, more = self.through_second(cut, norms[0], hidden1, at_hidden2, weights)
        found.update(more)
        at_hidden1 = self.through_norm(cut, norms[0], factors1, at_y1, hidden1)

        with tf.control_dependencies(at_hidden1[-1:]):
            coarse = cut.of(tf.identity(below), coarser=2)
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
        found["up"] = total(of_up, weights["up"])
        found.update({name: total(shares, weights[name]) for name, shares in zip(readers, of_kernels)})
        at_inputs = {"below": cut.join(at_below), "sum": at_hidden1}
        at_inputs.update({"shortcut": at_shortcut[0]} if self.shortcut else {})
        return {name: at_inputs.get(name) for name in inputs}, found

    def _arguments(self, inputs, coarse, hidden2, norm, weights):
        """What `_output` of a slab takes."""
        read = {name: weights[name] for name in ("head", "head_bias", "up", "shortcut") if name in weights}
        if not self.shortcut:
            return lambda index: (hidden2[index], norm.of(index), (), read)
        return lambda index: (hidden2[index], norm.of(index), (inputs["shortcut"][index], coarse[index]), read)

    def _output(self, norm, hidden2, of, beside, weights):
        """A slab of the block's output."""
        y = norm.apply(hidden2, of)
        if not beside:
            return y
        of_skip, coarse = beside
        fine = self._up_sampled(coarse, weights["up"])
        return tf.nn.relu(y + of_skip + tf.nn.conv2d(fine, weights["shortcut"][0], UNIT_2D, "SAME"))

    @staticmethod
    def _logits(output, weights):
        return tf.nn.bias_add(tf.nn.conv2d(output, weights["head"][0], UNIT_2D, "SAME"), weights["head_bias"])

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
        of_kernel = of_planes(coarse, at_coarse, kernel.shape[1:])[None]
        return input_gradient((at_coarse,), kernel), of_kernel
