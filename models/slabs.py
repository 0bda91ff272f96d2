"""A map of the finest grid as a list of slabs along X: cutting it, and what convolutions and norms become.

A map is a list of slabs (planes, Y, Z, C), those of one sample after those of another. A convolution reads one plane of
each neighbour. A norm's statistics are summed over slabs in float32, forward as (mean, sum of squares about it),
backward as (sum of dy, sum of dy * x-hat); what lies behind a norm is made again, slab by slab, wherever it is read.
"""

import dataclasses
from typing import Callable, List, Sequence, Tuple

import tensorflow as tf

from models.config import EPSILON
from models.ordered import UNIT
from models.passes import affine, behind_relu, channel_sums, gradient_below, one_pass, product, square_about, value

UNIT_2D = (1, 1, 1, 1)
SLABS = 16
"""About as many a volume: what is alive beside whole maps is a handful of slabs."""


def slab_height(planes: int) -> int:
    """Planes of a slab, from the grid alone: the same on every run of a plan, for bits depend on it.

    Even, for slabs are pooled one by one, and at least 4: the planes at its edges are 2 / (3 * height) more work in
    a convolution and its input gradient.
    """
    return max(4, 2 * round(planes / (2 * SLABS)))


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
    """A block's norm and ReLU over slabs, as a function of its weights.

    A group is what is normalised together: a sample (instance), all of the batch (batch, and none). No norm is one of
    mean 0 and variance 1. What a slab's passes take, `of` and `gradient` give; that is all that crosses from one sweep
    to another.
    """

    def __init__(self, layer, cut: Cut, values):
        self.kind, self.layer, self.relu = layer.norm, layer, layer.activate
        self.values = values if self.kind != "none" else (1.0, tf.cast(values[0], tf.float32))
        self.dtype = values[0].dtype
        self.group_of = [piece[0] if self.kind == "instance" else 0 for piece in cut.pieces]

    def statistics(self, slab) -> Tuple:
        """() where none are needed, else (2, C) float32: a slab's means, and its sums of squares about them."""
        if self.kind == "none":
            return ()
        mean = channel_sums(value, [slab]) / slab.shape[:3].num_elements()
        return (tf.concat([mean, channel_sums(square_about, [slab], mean)], 0),)

    def settle(self, sums: Sequence, slabs: Sequence, training: bool) -> None:
        """Take all slabs' `statistics`, or a batch norm's moving ones."""
        if self.kind == "none":
            self.mean, variance = [tf.zeros_like(self.values[1])], None
            self.rate = [tf.ones_like(self.values[1])]
        elif self.kind == "batch" and not training:
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
        if variance:
            self.rate = [tf.math.rsqrt(one + EPSILON) for one in variance]
        self.factors = [(mean, self.values[0] * rate, self.values[1], rate) for mean, rate in zip(self.mean, self.rate)]

    def of(self, index: int) -> Tuple:
        """A slab's (mean, scale, shift, rate)."""
        return self.factors[self.group_of[index]]

    def apply(self, slab, of: Tuple):
        """Of a slab or of planes of it."""
        return one_pass(affine, [slab], *of[:3], relu=self.relu)

    def gradient_sums(self, upstream, slab, of: Tuple):
        """(1 or 2, C) float32: sums of dy and of dy * x-hat, the latter with a norm, dy being what the ReLU lets by."""
        maps, (*factors, rate) = [upstream, slab], of
        total = channel_sums(behind_relu, maps, *factors, relu=self.relu)
        if self.kind == "none":
            return total
        return tf.concat([total, channel_sums(product, maps, *factors, relu=self.relu) * rate], 0)

    def gradient(self, sums: Sequence) -> Tuple[Callable, List]:
        """From all slabs' `gradient_sums`: what `gradient_below` takes, by the slab's index; the weights' too."""
        total = tf.add_n(list(sums))
        if self.kind == "none":
            nothing = tf.zeros_like(total[0])
            return lambda index: (*self.factors[0][:3], nothing, nothing), [tf.cast(total[0], self.dtype)]
        found = []
        for (mean, scale, shift, rate), mine in zip(self.factors, self._by_group(sums)):
            of_dy, of_product = tf.unstack(tf.add_n(mine) / self.elements)
            found.append((mean, scale, shift, -scale * rate * of_product, -scale * of_dy))
        return lambda index: found[self.group_of[index]], [total[1], total[0]]

    def gradient_below(self, upstream, slab, of: Tuple):
        """Of a slab of the norm's input."""
        return one_pass(gradient_below, [upstream, slab], *of, relu=self.relu)

    def _by_group(self, sums: Sequence) -> List[List]:
        groups = range(max(self.group_of) + 1)
        return [[one for one, of in zip(sums, self.group_of) if of == group] for group in groups]


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
        return of_planes(x, upstream, shape)[None]
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
                last = of_planes(tf.identity(seen), met, shape)
            found.append(last)
        planes.append(tf.add_n(found) if found else tf.zeros(shape))
    return tf.stack(planes)


def relu_gradient(upstream, output):
    return tf.raw_ops.ReluGrad(gradients=upstream, features=output)


def total(shares: Sequence, kernel):
    """The gradient of a kernel from all slabs' shares."""
    return tf.cast(tf.add_n(shares), kernel.dtype)


def of_planes(x, upstream, kernel_shape):
    """The gradient, float32, of the kernel of a convolution of each plane for itself."""
    found = tf.raw_ops.Conv2DBackpropFilter(
        input=x, filter_sizes=kernel_shape, out_backprop=upstream, strides=UNIT_2D, padding="SAME"
    )
    return tf.cast(found, tf.float32)


# --- Private helpers ---


def _with_edges(output, parts, taps, of_plane):
    """Add, in place, what the planes before and after make at both edges. Nothing else reads `output`."""
    for plane, tap, row in ((parts[1], taps[0], 0), (parts[2], taps[1], output.shape[0] - 1)):
        if plane is not None:
            output = tf.raw_ops.InplaceAdd(x=output, i=[row], v=of_plane(plane, tap))
    return output
