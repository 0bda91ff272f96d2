"""A U-Net's blocks with less memory: backward passes that keep few maps and recompute the others when they are due.

Same weights and functions as the layers of models/blocks.py, same gradients to rounding. Four things differ:

- Of a convolution, norm and ReLU the convolution's output is kept, and the rest recomputed from it.
- A convolution of "skip and up-sampled" is the sum of two, so the two maps are never joined; the up-sampled one is
  recomputed from the coarser.
- Filter gradients go plane by plane (models/ordered.py).
- Every operation of a backward pass waits for the one before; otherwise TensorFlow recomputes everything at the start.
"""

import tensorflow as tf

from models.blocks import Block
from models.ordered import UNIT, convolution, filter_gradient_by_planes, gradients, read_after, then, up_convolution


class RecomputedBlock(Block):
    """An encoder's block keeps its inputs and output alone, a decoder's its convolutions' outputs too: the
    peak is in the finest decoder, whose backward pass follows its forward pass at once, so they are there anyway."""

    def call(self, inputs, training=None):
        inputs = list(inputs) if self.up else [inputs]
        if not training:
            return self.layer_by_layer(*inputs)
        return self.learn(inputs, self._read_weights(inputs[-1]))

    def forward(self, inputs, weights):
        parts, _ = self._entry(inputs, weights)
        hidden1, hidden2, statistics1 = self._hidden(parts, weights)
        y, statistics2, gradient2 = self._normalise(self.norm2, hidden2, weights["norm2"], parts[0])
        if self.shortcut:
            y = tf.nn.relu(y + _convolve([then(part, y) for part in parts], weights["shortcut"]))
        kept = (hidden1, gradient2) if self.up else None
        return y, [statistics1, statistics2], (kept, y if self.shortcut else None)

    def backward(self, upstream, kept, inputs, weights):
        """Gradients of (inputs, weights)."""
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
        y1, _, gradient1 = self._normalise(self.norm1, hidden1, self.norm1.values(True, at_hidden2), upstream)
        at_y1, (found["conv2"],) = gradients(y1, [(weights["conv2"], at_hidden2)], filter_gradient_by_planes)
        at_hidden1, *found["norm1"] = gradient1(at_y1)

        # An encoder's entry is read beside the gradient, so it waits already; with a dependency ITEX fuses no norm.
        parts, to_up = self._entry([then(one, at_hidden1) for one in inputs] if self.up else inputs, weights)
        at_outputs = {"conv1": at_hidden1, **({"shortcut": upstream} if self.shortcut else {})}
        at_inputs, of_parts = [], []
        # The up-sampled map first: it lives for this alone, and its gradient goes on to the coarser grid at once.
        for part, first in reversed(list(zip(parts, (0, parts[0].shape[-1])))):
            rows = slice(first, first + part.shape[-1])
            meets = [(weights[name][..., rows, :], at_output) for name, at_output in at_outputs.items()]
            at_part, of_kernels = gradients(then(part, *at_inputs), meets, filter_gradient_by_planes)
            if to_up:
                (at_part, found["up"]), to_up = to_up(at_part), None
            at_inputs.append(at_part)
            of_parts.append(of_kernels)
        for number, name in enumerate(at_outputs):
            found[name] = tf.concat([of_kernels[number] for of_kernels in reversed(of_parts)], 3)
        return at_inputs[::-1], found

    # --- Private helpers ---

    def _read_weights(self, entry):
        """As tensors; kernels in the compute dtype, cast one after the other."""
        weights = {"norm1": self.norm1.values(True), "norm2": self.norm2.values(True)}
        layers = {"up": self.up and self.up[0], "conv1": self.conv1, "conv2": self.conv2, "shortcut": self.shortcut}
        before = entry
        for name, layer in layers.items():
            if layer:
                before = weights[name] = read_after(before, layer.kernel)
        return weights

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


# --- Private helpers ---


def _convolve(parts, kernel):
    """The convolution of `parts` joined along the channels: the sum of one convolution each."""
    total, first = None, 0
    for part in parts:
        rows = kernel[..., first : first + part.shape[-1], :]
        with tf.control_dependencies([] if total is None else [total]):
            output = tf.nn.conv3d(part, rows, UNIT, "SAME")
        total = output if total is None else total + output
        first += part.shape[-1]
    return total
