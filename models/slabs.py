"""A map of the finest grid as a list of slabs along X: cutting it, and what convolutions and norms become.

A map is a list of slabs (planes, Y, Z, C), those of one sample after those of another. A convolution reads one plane of
each neighbour. A norm's statistics are summed over slabs in float32, forward as (mean, sum of squares about it),
backward as (sum of dy, sum of dy * x-hat); a norm's output is recomputed slab by slab wherever it is read.
"""

from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple

import tensorflow as tf

from models.config import EPSILON
from models.ordered import UNIT, UNIT_2D, filter_gradient_of_slab
from models.passes import affine, behind_relu, channel_sums, gradient_below, one_pass, product, square_about, value


class Halo(NamedTuple):
    """A slab with the planes before and after it; None beyond the volume's edge."""

    slab: Any
    before: Optional[Any] = None
    after: Optional[Any] = None

    @property
    def there(self) -> List:
        """Without what is beyond the edge."""
        return [one for one in self if one is not None]


class Near(NamedTuple):
    """Has a sweep give its body the slab with its halo, of a map."""

    slabs: Sequence


class Cut:
    """How a batch of maps (N, X, Y, Z, C) is cut along X, and sweeps over the slabs, each after the one before."""

    def __init__(self, samples: int, edges: Sequence[int]):
        """Edges are the first planes of the slabs, and X."""
        self.samples, self.size_x, self._before = samples, edges[-1], []
        self.pieces = [(n, *ends) for n in range(samples) for ends in zip(edges, edges[1:])]  # (sample, first, past)

    def of(self, maps) -> List:
        """The slabs of (N, X, Y, Z, C), or of a coarser grid: views."""
        flat = self.flat(maps)
        return [flat[one] for one in self.slices(self.size_x // maps.shape[1])]

    def flat(self, maps):
        """(N * X, Y, Z, C), of which slabs are views: along any other axis they would be copies."""
        return tf.reshape(maps, (self.samples * maps.shape[1], *maps.shape[2:]))

    def slices(self, coarser: int = 1) -> List[slice]:
        """Of each slab, in a flat map."""
        firsts = [(n * self.size_x + a, n * self.size_x + b) for n, a, b in self.pieces]
        return [slice(first // coarser, past // coarser) for first, past in firsts]

    def join(self, slabs: Sequence):
        """The way back, a copy."""
        flat = tf.concat(list(slabs), 0)
        return tf.reshape(flat, (self.samples, -1, *flat.shape[1:]))

    def sum_by_sample(self, sums: Sequence):
        """(N, ...) from what each slab has, (1, ...)."""
        of_samples = [[one for one, piece in zip(sums, self.pieces) if piece[0] == n] for n in range(self.samples)]
        return tf.concat([tf.add_n(of_sample) for of_sample in of_samples], 0)

    def of_sample(self, values: Sequence) -> List[List]:
        """For each slab, what its sample has of each of `values` (N, ...)."""
        of_samples = [[one[n : n + 1] for one in values] for n in range(self.samples)]
        return [of_samples[piece[0]] for piece in self.pieces]

    def sweep(self, body: Callable, *given: Any) -> Any:
        """`body` slab by slab, each after the one before and the first after the last sweep; what it returns, as lists.
        Of the arguments, a list has one entry a slab, `Near` stands for a slab with its halo, tuples and dicts hold
        such arguments, and `body` takes all else as it is. It is traced once for slabs of one shape."""
        body = tf.function(body, autograph=False, experimental_attributes={"_noinline": True})
        found = []
        for index in range(len(self.pieces)):
            with tf.control_dependencies(self._before):
                found.append(body(*(self._pick(one, index) for one in given)))
            self._before = tf.nest.flatten(found[-1])[:1]
        return tf.nest.map_structure(lambda *slabs: list(slabs), *found)

    def _pick(self, one, index: int):
        if isinstance(one, Near):
            first = not self.pieces[index][1]
            last = self.pieces[index][2] == self.size_x
            before = None if first else one.slabs[index - 1][-1:]
            return Halo(one.slabs[index], before, None if last else one.slabs[index + 1][:1])
        if isinstance(one, tuple):
            return tuple(self._pick(each, index) for each in one)
        if isinstance(one, dict):
            return {name: self._pick(each, index) for name, each in one.items()}
        return one[index] if isinstance(one, list) else one


def mapped(make: Callable, *halos: Halo) -> Halo:
    """What `make` makes of slabs and of the planes beside them: of these the one next to the slab."""
    slabs, before, after = zip(*halos)
    halo = Halo(make(*slabs))
    # One after the other, as all in a sweep: else what comes first, and so the memory, differs from process to process.
    if before[0] is not None:
        with tf.control_dependencies(halo.there):
            halo = halo._replace(before=make(*before)[-1:])
    if after[0] is not None:
        with tf.control_dependencies(halo.there):
            halo = halo._replace(after=make(*after)[:1])
    return halo


class Norm:
    """A block's norm and ReLU over slabs, as a function of its weights.
    A group is what is normalised together: a sample (instance), all of the batch (batch, and none). No norm is one of
    mean 0 and variance 1. `of` has for each slab what `apply` takes: (mean, scale, shift, rate)."""

    def __init__(self, layer, cut: Cut, values):
        """`values` are those of the layer: with a batch norm's moving statistics the batch's are not taken."""
        self.kind, self.relu, self.cut = layer.norm, layer.activate, cut
        self.values = values[:2] if self.kind != "none" else (1.0, tf.cast(values[0], tf.float32))
        self.dtype, self.moving = values[0].dtype, values[2:]
        self.group_of = [piece[0] if self.kind == "instance" else 0 for piece in cut.pieces]
        self.of, self.statistics = [], []  # the latter are a batch's mean and variance, in training with batch norm
        if self.kind == "none":
            self._settle([tf.zeros_like(self.values[1])], [tf.ones_like(self.values[1])])
        elif self.moving:
            mean, variance = self.moving
            self._settle([mean], [tf.math.rsqrt(variance + EPSILON)])

    def sweep(self, make: Callable, *given: Any) -> List:
        """The slabs that `make` makes of what is given, which this norm reads. The first time statistics are taken,
        (2, C) float32 a slab: means, and sums of squares about them."""

        def body(*given):
            slab = make(*given)
            if self.of:
                return (slab,)
            mean = channel_sums(value, [slab]) / slab.shape[:3].num_elements()
            return slab, tf.concat([mean, channel_sums(square_about, [slab], mean)], 0)

        slabs, *sums = self.cut.sweep(body, *given)
        if not self.of:
            self._take(slabs, *sums)
        return slabs

    def _take(self, slabs: Sequence, sums: Sequence) -> None:
        sizes = [float(slab.shape[:3].num_elements()) for slab in slabs]
        means, variances = [], []
        # Chan et al. 1983: no difference of large sums.
        for of_slabs, counts in zip(self._by_group(sums), self._by_group(sizes)):
            self.elements = sum(counts)
            of_means, squares = tf.unstack(tf.stack(of_slabs, 1))
            shares = tf.constant(counts)[:, None]
            means.append(tf.reduce_sum(of_means * shares, 0) / self.elements)
            about = tf.reduce_sum(shares * tf.math.squared_difference(of_means, means[-1]), 0)
            variances.append((tf.reduce_sum(squares, 0) + about) / self.elements)
        if self.kind == "batch":
            # What moves a batch norm's statistics is the variance of what the batch is a sample of.
            self.statistics = [means[0], variances[0] * (self.elements / (self.elements - 1))]
        self._settle(means, [tf.math.rsqrt(one + EPSILON) for one in variances])

    def _settle(self, means: Sequence, rates: Sequence) -> None:
        scale, shift = self.values
        self.factors = [(mean, scale * rate, shift, rate) for mean, rate in zip(means, rates)]
        self.of = [self.factors[group] for group in self.group_of]

    def apply(self, slab, of: Tuple):
        """Of a slab or of planes of it."""
        return one_pass(affine, [slab], *of[:3], relu=self.relu)

    def around(self, halo: Halo, of: Tuple) -> Halo:
        """Of a slab with its halo."""
        return mapped(lambda one: self.apply(one, of), halo)

    def gradient_sums(self, upstream, slab, of: Tuple):
        """(1 or 2, C) float32: sums of dy and of dy * x-hat, the latter with a norm, dy being what the ReLU lets by."""
        maps, (*factors, rate) = [upstream, slab], of
        total = channel_sums(behind_relu, maps, *factors, relu=self.relu)
        if self.kind == "none":
            return total
        with tf.control_dependencies([total]):
            return tf.concat([total, channel_sums(product, maps, *factors, relu=self.relu) * rate], 0)

    def gradient(self, sums: Sequence) -> Tuple[List, List]:
        """From all slabs' `gradient_sums`: what `gradient_below` takes of each slab; the weights' gradients."""
        total = tf.add_n(list(sums))
        if self.kind == "none" or self.moving:
            nothing = tf.zeros_like(total[0])
            of_weights = [tf.cast(total[0], self.dtype)] if self.kind == "none" else [total[1], total[0], None, None]
            return [(*of[:3], nothing, nothing) for of in self.of], of_weights
        found = []
        for (mean, scale, shift, rate), mine in zip(self.factors, self._by_group(sums)):
            of_dy, of_product = tf.unstack(tf.add_n(mine) / self.elements)
            found.append((mean, scale, shift, -scale * rate * of_product, -scale * of_dy))
        return [found[group] for group in self.group_of], [total[1], total[0]]

    def gradient_below(self, upstream, slab, of: Tuple):
        """Of a slab of the norm's input."""
        return one_pass(gradient_below, [upstream, slab], *of, relu=self.relu)

    def _by_group(self, sums: Sequence) -> List[List]:
        groups = range(max(self.group_of) + 1)
        return [[one for one, of in zip(sums, self.group_of) if of == group] for group in groups]


def convolve(halo: Halo, kernel):
    """A slab of the convolution, "same": of the slab alone, then of the planes."""
    with tf.control_dependencies(halo.there):
        if kernel.shape[0] == 1:
            return tf.nn.conv2d(halo.slab, kernel[0], UNIT_2D, "SAME")
        output = tf.nn.conv3d(halo.slab[None], kernel, UNIT, "SAME")[0]
    return _with_edges(output, halo, (0, 2), lambda plane, k: tf.nn.conv2d(plane, kernel[k], UNIT_2D, "SAME"))


def input_gradient(halo: Halo, kernel):
    """A slab of the gradient of a convolution's input, from that of its output."""

    def of_planes(maps, k):
        size = (*maps.shape[:3], kernel.shape[3])
        return tf.raw_ops.Conv2DBackpropInput(
            input_sizes=size, filter=kernel[k], out_backprop=maps, strides=UNIT_2D, padding="SAME"
        )

    if kernel.shape[0] == 1:
        return of_planes(halo.slab, 0)
    size = (1, *halo.slab.shape[:3], kernel.shape[3])
    output = tf.raw_ops.Conv3DBackpropInputV2(
        input_sizes=size, filter=kernel, out_backprop=halo.slab[None], strides=UNIT, padding="SAME"
    )[0]
    return _with_edges(output, halo, (2, 0), of_planes)


def gradients(maps: Halo, at_outputs: Sequence[Halo], kernels: Sequence) -> Tuple[Any, List]:
    """Of a slab and, its share, of each kernel that it meets, from those of the convolutions' outputs."""
    at_maps, of_kernels = None, []
    for at_output, kernel in zip(at_outputs, kernels):
        with tf.control_dependencies(maps.there if at_maps is None else [at_maps]):
            of_kernels.append(filter_gradient_of_slab(maps, at_output.slab, kernel.shape))
        with tf.control_dependencies(of_kernels):
            one = input_gradient(mapped(tf.identity, at_output), kernel)
        at_maps = one if at_maps is None else at_maps + one
    return at_maps, of_kernels


def relu_gradient(upstream, output):
    return tf.raw_ops.ReluGrad(gradients=upstream, features=output)


def total(shares: Sequence, kernel):
    """The gradient of a kernel from all slabs' shares."""
    return tf.cast(tf.add_n(shares), kernel.dtype)


# --- Private helpers ---


def _with_edges(output, halo: Halo, taps, of_plane):
    """Add, in place, what the planes before and after make at both edges. Nothing else reads `output`."""
    for plane, tap, row in ((halo.before, taps[0], 0), (halo.after, taps[1], output.shape[0] - 1)):
        if plane is not None:
            with tf.control_dependencies([output]):
                output = tf.raw_ops.InplaceAdd(x=output, i=[row], v=of_plane(plane, tap))
    return output
