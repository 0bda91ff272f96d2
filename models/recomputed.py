"""A U-Net's blocks with less memory: backward passes that keep few maps and make the others again when they are due.

Same weights and functions as the layers of models/blocks.py, same gradients to rounding. Four things differ:

- A convolution's output is enough to keep: norm and ReLU are made again from it.
- A convolution of "skip and up-sampled" is the sum of two, so the two maps are never joined; and the up-sampled one is
  made again from the coarser.
- Filter gradients go plane by plane (models/filter_gradient.py).
- Every operation of a backward pass waits for the one before. Left alone, TensorFlow would make everything again at
  once, as soon as a step begins.
"""

import dataclasses
from typing import Tuple

import tensorflow as tf

from models.config import UNetConfig
from models.filter_gradient import filter_gradient_by_planes
from models.layers import build_by_name, convolution_layer, norm_layer, up_layers
from models.ordered import UNIT, convolution, input_gradient, read_after, up_convolution


class RecomputedBlock(tf.keras.layers.Layer):
    """Two 3x3x3 convolutions, each with norm and ReLU, as one layer; `residual` adds the entry before the last ReLU.

    An encoder's block takes its entry; a decoder's takes [skip, below] and doubles the grid of `below` itself, to
    `up_width` maps. Weights are those of the single layers, in their order. An encoder's block keeps nothing
    else; a decoder's keeps its convolutions' outputs too: the peak is in the finest one, whose backward pass begins
    where its forward pass ended, so there they are at hand anyway, and the coarser ones are small beside it.
    """

    def __init__(self, unet: UNetConfig, widths: Tuple[int, int], up_width: int = 0, **kwargs):
        super().__init__(**kwargs)
        self.unet, self.widths, self.up_width = unet, tuple(widths), up_width
        name, residual = self.name, unet.residual
        self.up = up_layers(unet, name, up_width) if up_width else []
        self.conv1 = convolution_layer(unet, f"{name}_conv1", widths[0], 3)
        self.norm1 = norm_layer(unet, f"{name}_act1")
        self.conv2 = convolution_layer(unet, f"{name}_conv2", widths[1], 3)
        self.norm2 = norm_layer(unet, f"{name}_norm2" if residual else f"{name}_act2", activate=not residual)
        self.shortcut = convolution_layer(unet, f"{name}_shortcut", widths[1], 1) if residual else None

    def build(self, input_shape):
        entry = input_shape
        if self.up:
            skip, below = input_shape
            build_by_name(self.up[0], below)
            entry = [*skip[:-1], skip[-1] + self.up_width]
        first, second = ([*entry[:-1], width] for width in self.widths)
        for layer, shape in ((self.conv1, entry), (self.norm1, first), (self.conv2, first), (self.norm2, second)):
            build_by_name(layer, shape)
        if self.shortcut:
            build_by_name(self.shortcut, entry)
        super().build(input_shape)

    @property
    def weights(self):
        """Layer by layer, as a model of single layers lists them: batch norm's statistics beside its scale."""
        layers = (*self.up, self.conv1, self.norm1, self.conv2, self.norm2, self.shortcut)
        return [weight for layer in layers if layer for weight in layer.weights]

    def call(self, inputs, training=None):
        inputs = list(inputs) if self.up else [inputs]
        if not training:
            return self._infer(inputs)
        like = (inputs, self._read_weights(inputs[-1]))

        @tf.custom_gradient
        def block(*flat):
            inputs, weights = tf.nest.pack_sequence_as(like, flat)
            outputs, kept = self._forward(inputs, weights)

            def gradient(upstream, *_):
                return tf.nest.flatten(self._backward(upstream, kept, inputs, weights))

            return outputs, gradient

        y, *statistics = block(*tf.nest.flatten(like))
        for norm, found in ((self.norm1, statistics[:2]), (self.norm2, statistics[2:])):
            if found:
                norm.move(*found)
        return y

    def get_config(self):
        more = {"unet": dataclasses.asdict(self.unet), "widths": self.widths, "up_width": self.up_width}
        return {**super().get_config(), **more}

    @classmethod
    def from_config(cls, config):
        return cls(**{**config, "unet": UNetConfig(**config["unet"])})

    # --- Private helpers ---

    def _infer(self, inputs):
        """The single layers, one after the other."""
        entry = inputs[-1]
        for layer in self.up:
            entry = layer(entry)
        if self.up:
            entry = tf.concat([inputs[0], entry], -1)
        y = self.norm2(self.conv2(self.norm1(self.conv1(entry))))
        return tf.nn.relu(y + self.shortcut(entry)) if self.shortcut else y

    def _read_weights(self, entry):
        """As tensors; kernels in the compute dtype, cast one after the other once the maps they meet are there."""
        weights = {"norm1": self.norm1.values(), "norm2": self.norm2.values()}
        before = entry
        for name, layer in (("up", self.up and self.up[0]), ("conv1", self.conv1), ("conv2", self.conv2)):
            if layer:
                before = weights[name] = read_after(before, layer.kernel)
        if self.shortcut:
            weights["shortcut"] = read_after(before, self.shortcut.kernel)
        return weights

    def _forward(self, inputs, weights):
        """(output, a batch's statistics ...), and what the backward pass will find."""
        parts, _ = self._entry(inputs, weights)
        hidden1, hidden2, y1_statistics = self._hidden(parts, weights)
        y, statistics, gradient2 = self._normalise(self.norm2, hidden2, weights["norm2"], parts[0])
        if self.shortcut:
            y = tf.nn.relu(y + _convolve([then(part, y) for part in parts], weights["shortcut"]))
        kept = (hidden1, gradient2) if self.up else None
        return (y, *y1_statistics, *statistics), (kept, y if self.shortcut else None)

    def _backward(self, upstream, kept, inputs, weights):
        """Gradients of (inputs, weights), with no more maps alive at a time than must be."""
        hidden, y = kept
        found = {}
        if self.shortcut:
            upstream = tf.raw_ops.ReluGrad(gradients=upstream, features=y)
        if hidden:
            hidden1, gradient2 = hidden
        else:
            hidden1, hidden2, _ = self._hidden([then(one, upstream) for one in inputs], weights)
            _, _, gradient2 = self._normalise(self.norm2, hidden2, weights["norm2"], upstream)
        at_hidden2, *found["norm2"] = gradient2(upstream)
        # What waits are the norm's weights, not the map: ITEX fuses no operation that waits itself.
        y1, _, gradient1 = self._normalise(self.norm1, hidden1, self.norm1.values(at_hidden2), upstream)
        at_y1, (found["conv2"],) = _gradients(y1, [(weights["conv2"], at_hidden2)])
        at_hidden1, *found["norm1"] = gradient1(at_y1)

        # An encoder's entry is read beside the gradient, so it waits as it is; told to, ITEX would not fuse the norm's.
        parts, to_up = self._entry([then(one, at_hidden1) for one in inputs] if self.up else inputs, weights)
        readers = [("conv1", at_hidden1)] + ([("shortcut", upstream)] if self.shortcut else [])
        at_inputs, of_parts = [], []
        # The up-sampled map first: it lives for this alone, and its gradient goes on to the coarser grid at once.
        for part, first in reversed(list(zip(parts, (0, parts[0].shape[-1])))):
            rows = slice(first, first + part.shape[-1])
            meets = [(weights[name][..., rows, :], at_output) for name, at_output in readers]
            at_part, of_kernels = _gradients(then(part, *at_inputs), meets)
            if to_up:
                (at_part, found["up"]), to_up = to_up(at_part), None
            at_inputs.append(at_part)
            of_parts.append(of_kernels)
        for number, (name, _) in enumerate(readers):
            found[name] = tf.concat([of_kernels[number] for of_kernels in reversed(of_parts)], 3)
        return at_inputs[::-1], found

    def _hidden(self, parts, weights):
        """Both convolutions' outputs, folded for their norms, and a batch's statistics of the first."""
        hidden1 = self.norm1.fold(_convolve(parts, weights["conv1"]))
        y1, statistics, _ = self._normalise(self.norm1, hidden1, weights["norm1"], parts[0])
        return hidden1, self.norm2.fold(_convolve([y1], weights["conv2"])), statistics

    @staticmethod
    def _normalise(norm, hidden, values, like):
        """Norm and ReLU on the grid of `like`, a batch's statistics, and the gradient function for (hidden, values)."""
        with tf.GradientTape() as tape:
            tape.watch([hidden, values])
            parts, statistics = norm.apply(hidden, *values)
            y = norm.unfold(parts, like)

        def gradient(upstream):
            at_hidden, at_values = tape.gradient(y, [hidden, values], upstream)
            return norm.unfold(at_hidden, like), *at_values

        return y, statistics, gradient

    def _entry(self, inputs, weights):
        """What the first convolution reads, [entry] or [skip, up-sampled], and the gradient function of the latter."""
        if not self.up:
            return inputs, None
        skip, below = inputs
        kernel = weights["up"]
        with tf.GradientTape() as tape:
            tape.watch([below, kernel])
            fine = up_convolution(below, kernel) if len(self.up) == 1 else self.up[1](convolution(below, kernel))
        return [skip, fine], lambda upstream: tape.gradient(fine, [below, kernel], upstream)


def then(x, *before):
    """x, but not until all of `before` is there. A view, no copy."""
    with tf.control_dependencies(before):
        return tf.identity(x)


# --- Private helpers ---


def _convolve(parts, kernel):
    """The convolution of `parts` side by side, without putting them there: a sum of one for each."""
    total, first = None, 0
    for part in parts:
        rows = kernel[..., first : first + part.shape[-1], :]
        with tf.control_dependencies([] if total is None else [total]):
            output = tf.nn.conv3d(part, rows, UNIT, "SAME")
        total = output if total is None else total + output
        first += part.shape[-1]
    return total


def _gradients(x, meets):
    """Of a map and of each kernel that it meets, given as (kernel, gradient of that convolution's output)."""
    at_x, of_kernels = None, []
    for kernel, at_output in meets:
        of_kernels.append(filter_gradient_by_planes(x, then(at_output, *of_kernels[-1:]), kernel.shape))
    for kernel, at_output in meets:
        at_one = input_gradient(x, kernel, at_output, of_kernels[-1] if at_x is None else at_x)
        at_x = at_one if at_x is None else at_x + at_one
    return at_x, of_kernels
