"""Level 0 of a U-Net in slabs along X: between the image and the logits no map of the finest grid is one tensor.

Two layers, one for each side of the network. The first convolution of the decoder's block is a sum: its part that reads
the skip maps belongs to the encoder's layer, which hands that part's output to the decoder's instead of the skip maps.
Backward, the gradient of the sum returns the same way, and the skip maps are recomputed from the image. A
gradient is written slab by slab while the maps it is made of go, so that two maps take the memory of one.

    encoder   keeps nothing but the statistics of its norms
    decoder   keeps what its two convolutions put out, two maps; a third, the skip's share in the sum, with `residual`

The same weights and functions as the layers of models/blocks.py, the same gradients to rounding.
"""

import tensorflow as tf

from models.blocks import Block, build_within, head_layer
from models.config import UNetConfig
from models.layer_plan import slab_height
from models.ordered import HALF, UNIT_2D, filter_gradient_of_slab, then
from models.passes import channel_sums, value
from models.slabs import Cut, Halo, Near, Norm, convolve, gradients, input_gradient, mapped, relu_gradient, total
from models.supervision import rows


class SlabBlock(Block):
    """What both sides share."""

    def _norms(self, samples: int, planes: int, weights):
        """Both norms, over slabs as maps of so many planes are cut into."""
        cut = Cut(samples, [*range(0, planes, slab_height(planes)), planes])
        return [Norm(layer, cut, weights[n]) for n, layer in (("norm1", self.norm1), ("norm2", self.norm2))]

    def _weights(self, training, **more):
        """As tensors, in the dtype they are read in."""
        more = {name: tf.convert_to_tensor(weight) for name, weight in more.items()}
        return {"norm1": self.norm1.values(training), "norm2": self.norm2.values(training), **more}

    @staticmethod
    def _second(norms, hidden1, kernel):
        """What the second convolution puts out."""

        def make(hidden1, of, kernel):
            return convolve(norms[0].around(hidden1, of), kernel)

        return norms[1].sweep(make, Near(hidden1), norms[0].of, kernel)

    @staticmethod
    def _through_second(norm, hidden1, at_hidden2, kernel):
        """From the gradient of what the second convolution puts out to that of what the first norm does; the kernel's
        gradient; the results of `Norm.gradient`."""

        def body(hidden1, at_hidden2, of, kernel):
            at_y, (of_kernel,) = gradients(norm.around(hidden1, of), [at_hidden2], [kernel])
            return at_y, norm.gradient_sums(at_y, hidden1.slab, of), of_kernel

        at_y, sums, of_kernel = norm.cut.sweep(body, Near(hidden1), Near(at_hidden2), norm.of, kernel)
        return (at_y, total(of_kernel, kernel), *norm.gradient(sums))


class SlabEncoder(SlabBlock):
    """Image (N, X, Y, Z, C) -> pooled (N, X/2, Y/2, Z/2, width), and slabs of the skip maps' share in what each
    convolution puts out that reads the entry of `decoder`, the other layer: the first one, and the shortcut."""

    def __init__(self, decoder: "SlabDecoder"):
        super().__init__(decoder.unet, "encoder", 0)
        self._decoder = lambda: decoder  # in a closure: its weights are its own

    def build(self, input_shape=None):
        if not self._decoder().built:
            self._decoder().build()
        super().build(input_shape)

    @tf.autograph.experimental.do_not_convert
    def call(self, image, training=None):
        own = {"shortcut": self.shortcut.kernel} if self.shortcut else {}
        weights = self._weights(training, conv1=self.conv1.kernel, conv2=self.conv2.kernel, **own)
        weights["part_kernels"] = self._decoder().part_kernels(slice(0, self.widths[1]))
        return self.learn(image, weights) if training else self.forward(image, weights)[0]

    def forward(self, image, weights):
        norms = self._norms(*image.shape[:2], weights)
        cut = norms[0].cut
        images = cut.of(image)
        _, hidden2 = self._hidden(norms, images, weights)

        def down(source, part_kernels):
            y = self._output(norms[1], source)
            with tf.control_dependencies(y.there):
                pooled = tf.nn.max_pool3d(y.slab[None], HALF, HALF, "VALID")[0]
            with tf.control_dependencies([pooled]):
                return (pooled, *(convolve(mapped(tf.identity, y), each) for each in part_kernels))

        source = self._source(norms, images, hidden2, weights)
        pooled, *shares = cut.sweep(down, source, weights["part_kernels"])
        return (cut.join(pooled), tuple(shares)), [norm.statistics for norm in norms], norms

    def backward(self, upstream, norms, image, weights):
        (at_pooled, at_shares), cut = upstream, norms[0].cut
        images = cut.of(then(image, *tf.nest.flatten(upstream)))
        hidden1, hidden2 = self._hidden(norms, images, weights)

        def body(source, part_kernels, at_shares, at_pooled):
            y = self._output(norms[1], source)
            at_y, of_kernels = gradients(y, at_shares, part_kernels)
            pooled = tf.nn.max_pool3d(then(y.slab, at_y)[None], HALF, HALF, "VALID")
            more = {"ksize": HALF, "strides": HALF, "padding": "VALID"}
            of_pool = tf.raw_ops.MaxPool3DGrad(
                orig_input=y.slab[None], orig_output=pooled, grad=at_pooled[None], **more
            )
            at_y += of_pool[0]
            if self.shortcut:
                at_y = relu_gradient(at_y, y.slab)
                of_kernels.append(filter_gradient_of_slab(source["image"], at_y, source["shortcut"].shape))
            return (at_y, norms[1].gradient_sums(at_y, source["hidden2"].slab, source["norm2"]), *of_kernels)

        source, part_kernels = self._source(norms, images, hidden2, weights), weights["part_kernels"]
        at_y2, sums, *of_kernels = cut.sweep(body, source, part_kernels, tuple(map(Near, at_shares)), cut.of(at_pooled))
        found = {"part_kernels": tuple(map(total, of_kernels, part_kernels))}
        if self.shortcut:
            found["shortcut"] = total(of_kernels[-1], weights["shortcut"])
        factors, found["norm2"] = norms[1].gradient(sums)
        at_hidden2 = cut.sweep(norms[1].gradient_below, at_y2, hidden2, factors)
        at_y1, found["conv2"], factors, found["norm1"] = self._through_second(
            norms[0], hidden1, at_hidden2, weights["conv2"]
        )

        def last(image, at_y, hidden1, of):
            at_hidden1 = norms[0].gradient_below(at_y, hidden1, of)
            return filter_gradient_of_slab(image, at_hidden1, weights["conv1"].shape)

        found["conv1"] = total(cut.sweep(last, Near(images), at_y1, hidden1, factors), weights["conv1"])
        return None, found

    def _hidden(self, norms, images, weights):
        """What both convolutions put out."""
        hidden1 = norms[0].sweep(convolve, Near(images), weights["conv1"])
        return hidden1, self._second(norms, hidden1, weights["conv2"])

    def _source(self, norms, images, hidden2, weights):
        """For a sweep, what `_output` computes a slab of the block's output from."""
        residual = {"image": Near(images), "shortcut": weights["shortcut"]} if self.shortcut else {}
        return {"hidden2": Near(hidden2), "norm2": norms[1].of, **residual}

    def _output(self, norm, source):
        """Of the block: a slab with its halo."""
        if not self.shortcut:
            return norm.around(source["hidden2"], source["norm2"])

        def output(hidden2, image):
            y = norm.apply(hidden2, source["norm2"])
            return tf.nn.relu(y + tf.nn.conv2d(image, source["shortcut"][0], UNIT_2D, "SAME"))

        return mapped(output, source["hidden2"], source["image"])


class SlabDecoder(SlabBlock):
    """{"below": the coarser maps, "shares": the encoder's} -> logits (N, X, Y, Z, outputs).
    With "target" among what it takes, and a `loss` as models/supervision.py has it: (loss, score (N, R)) of it.
    The logits are then made slab by slab: once for the loss, and again for each sweep that reads their gradient."""

    def __init__(self, unet: UNetConfig):
        super().__init__(unet, "decoder", 0)
        self.head = head_layer(unet, "head")

    def build(self, input_shape=None):
        super().build(input_shape)
        build_within(self.head, self.widths[1])

    @property
    def weights(self):
        return [*super().weights, *self.head.weights]

    def part_kernels(self, rows: slice):
        """Parts of the kernels that read the block's entry, skip and up-sampled maps: the rows of either."""
        return tuple(layer.kernel[..., rows, :] for layer in (self.conv1, self.shortcut) if layer)

    @tf.autograph.experimental.do_not_convert
    def call(self, inputs, training=None, loss=None):
        own = {"up": self.up[0].kernel, "head": self.head.kernel, "head_bias": self.head.bias}
        weights = self._weights(training, conv2=self.conv2.kernel, **own)
        weights["part_kernels"] = self.part_kernels(slice(self.skip_width, None))
        inputs = dict(inputs)
        return self.learn(inputs, weights, loss) if training else self.forward(inputs, weights, loss)[0]

    def forward(self, inputs, weights, loss):
        samples, planes = inputs["below"].shape[:2]
        norms = self._norms(samples, 2 * planes, weights)
        cut = norms[0].cut
        coarse = cut.of(inputs["below"])

        def first(coarse, share, up, kernel):
            return share + convolve(mapped(lambda one: self._up_sampled(one, up), coarse), kernel)

        given = Near(coarse), inputs["shares"][0], weights["up"], weights["part_kernels"][0]
        hidden1 = norms[0].sweep(first, *given)
        hidden2 = self._second(norms, hidden1, weights["conv2"])
        source, statistics = self._source(norms, inputs, coarse, hidden2, weights), [norm.statistics for norm in norms]

        def logits(source):
            return self._logits(self._output(norms[1], source), source)

        def sums(target, source):
            z = logits(source)
            return loss.sums(rows(target[None]), rows(z[None]), z.shape[-1])[0]

        if loss is None:
            return cut.join(cut.sweep(logits, source)), statistics, (norms, hidden1, hidden2, None)
        of_samples = cut.sum_by_sample(cut.sweep(sums, cut.of(inputs["target"]), source))
        found, score, factors = loss.value(of_samples)
        return (found, score), statistics, (norms, hidden1, hidden2, factors)

    def backward(self, upstream, kept, inputs, weights, loss):
        norms, hidden1, hidden2, factors = kept
        cut, below = norms[0].cut, inputs["below"]
        if loss is None:
            of_head = cut.of(upstream), ()
        else:
            of_head = cut.of(inputs["target"]), cut.of_sample([factor * upstream[0] for factor in factors])
        source = self._source(norms, inputs, cut.of(below), hidden2, weights)

        @tf.function(autograph=False, jit_compile=True)
        def slope(target, logits, factors):
            # One pass over memory.
            found = loss.slope(rows(target[None]), tf.sigmoid(rows(logits[None])), factors)
            return tf.reshape(tf.cast(found, logits.dtype), logits.shape)

        def to_output(at_logits, factors, source):
            """A slab's output, and the gradients of its logits and of what its norm puts out."""
            y = self._output(norms[1], source)
            if loss is not None:
                at_logits = slope(at_logits, self._logits(y, source), factors)
            at_y = input_gradient(Halo(at_logits), source["head"])
            return y, at_logits, relu_gradient(at_y, y) if self.shortcut else at_y

        def sums_of(at_logits, factors, source):
            y, at_logits, at_y = to_output(at_logits, factors, source)
            of_kernel = filter_gradient_of_slab(Halo(y), at_logits, source["head"].shape)
            of_bias = channel_sums(value, [at_logits])
            return norms[1].gradient_sums(at_y, source["hidden2"], source["norm2"]), of_kernel, of_bias

        sums, of_kernel, of_bias = cut.sweep(sums_of, *of_head, source)
        found = {"head": total(of_kernel, weights["head"]), "head_bias": total(of_bias, weights["head_bias"])[0]}
        factors, found["norm2"] = norms[1].gradient(sums)

        def to_hidden2(norm2, at_logits, factors, source):
            *_, at_y = to_output(at_logits, factors, source)
            slab = norms[1].gradient_below(at_y, source["hidden2"], norm2)
            return (slab, at_y) if self.shortcut else (slab,)

        at_hidden2, *at_shortcut = cut.sweep(to_hidden2, factors, *of_head, source)
        at_y1, found["conv2"], factors, found["norm1"] = self._through_second(
            norms[0], hidden1, at_hidden2, weights["conv2"]
        )
        at_hidden1 = cut.sweep(norms[0].gradient_below, at_y1, hidden1, factors)

        def to_below(coarse, at_shares, up, kernels):
            fine = mapped(lambda one: self._up_sampled(one, up), coarse)
            at_fine, of_kernels = gradients(fine, at_shares, kernels)
            return (*self._up_gradient(at_fine, coarse.slab, up), *of_kernels)

        coarse, at_shares = cut.of(then(below, at_hidden1[-1])), (at_hidden1, *at_shortcut)
        given = Near(coarse), tuple(map(Near, at_shares)), weights["up"], weights["part_kernels"]
        at_below, of_up, *of_kernels = cut.sweep(to_below, *given)
        found["up"] = total(of_up, weights["up"])
        found["part_kernels"] = tuple(map(total, of_kernels, weights["part_kernels"]))
        at_inputs = {"below": cut.join(at_below), "shares": at_shares}
        return {name: at_inputs.get(name) for name in inputs}, found

    def _source(self, norms, inputs, below, hidden2, weights):
        """For a sweep, what `_output` and `_logits` compute a slab from."""
        source = {"hidden2": hidden2, "norm2": norms[1].of, "head": weights["head"], "head_bias": weights["head_bias"]}
        if self.shortcut:
            shortcut = {"shortcut": weights["part_kernels"][1], "up": weights["up"]}
            source |= {"skip_share": inputs["shares"][1], "below": below, **shortcut}
        return source

    def _output(self, norm, source):
        """A slab of the block's output."""
        y = norm.apply(source["hidden2"], source["norm2"])
        if not self.shortcut:
            return y
        fine = self._up_sampled(source["below"], source["up"])
        return tf.nn.relu(y + source["skip_share"] + tf.nn.conv2d(fine, source["shortcut"][0], UNIT_2D, "SAME"))

    @staticmethod
    def _logits(output, source):
        return tf.nn.bias_add(tf.nn.conv2d(output, source["head"][0], UNIT_2D, "SAME"), source["head_bias"])

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
            at_coarse = tf.nn.conv3d(then(at_fine, of_kernel)[None], kernel, HALF, "SAME")[0]
            return at_coarse, tf.cast(of_kernel, tf.float32)
        at_coarse = 8 * tf.nn.avg_pool3d(at_fine[None], HALF, HALF, "VALID")[0]
        of_kernel = filter_gradient_of_slab(Halo(coarse), at_coarse, kernel.shape)
        return input_gradient(Halo(at_coarse), kernel), of_kernel
