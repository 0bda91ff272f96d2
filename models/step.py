"""A U-Net's forward and backward pass in the order of models/order.py, by own operations
(models/native/operations.py).

Each operation waits for the one before, so the maps in memory at a time are known, and a map whose
last reader has its shape is written over."""

from typing import Any, Callable, Dict, List, Optional, Sequence

import tensorflow as tf

from models.config import EPSILON
from models.native import operations
from models.native.operations import AtValues, Gradient, Norm, Source
from models.order import Block, Order


class Pass(Order):
    """One pass over the weights of a model of `build_unet3d`, in training or not. `values` replace
    its variables, by their names. A map is a `Source`, the gradient of its values an `AtValues`,
    and that of a raw sum a `Gradient`."""

    def __init__(
        self, model: tf.keras.Model, training: bool, values: Optional[Dict[str, tf.Tensor]] = None
    ):
        super().__init__(model.unet)
        self.layer, self.training, self.values = model.get_layer, training, values or {}
        self._filters: Dict[Any, tf.Tensor] = {}
        self._last: List[tf.Tensor] = []

    def forward(self, image: tf.Tensor) -> List[tf.Tensor]:
        """Logits of each head, the finest first, of an image (N, X, Y, Z, C)."""
        return super().forward(Source(image))

    def backward(self, slopes: Sequence[tf.Tensor]) -> Dict[str, tf.Tensor]:
        """Gradients of the weights, by the variables' names, from those of the logits of each
        head."""
        self._gradients: Dict[str, tf.Tensor] = {}  # a tape may ask twice
        super().backward([Gradient(slope) for slope in slopes])
        return self._gradients

    def image_gradient(self) -> tf.Tensor:
        """The gradient of the image, (N, X, Y, Z, C), after `backward`. Nothing waits for it: a
        graph leaves it out unless it is asked for."""
        return super().image_gradient().map

    # --- Forward ---

    def max_pool(self, level, source):
        return Source(self._run(operations.max_pool, source))

    def convolve(self, name, entry, again):
        raw, *moments = self._run(operations.convolve, entry, self._value(self.layer(name).kernel))
        return Source(raw, self._norm(name, raw, *moments, again))

    def convolve_part(self, name, entry, part, add, last):
        filters = self._rows(name, entry, part)
        raw, *moments = self._run(
            operations.convolve, entry[part:], filters, add.raw if add else None
        )
        return Source(raw, self._norm(name, raw, *moments, False) if last else None)

    def up(self, level, below, part, again):
        return Source(self._run(operations.up_convolve, below, self._up_filters(level, part)))

    def project(self, name, entry, part, add):
        layer = self.layer(name)
        bias = tf.zeros(layer.filters) if layer.bias is None else self._value(layer.bias)
        return self._run(operations.project, entry[part], self._rows(name, entry, part), bias, add)

    def residual_sum(self, name, second, total, again):
        return Source(self._run(operations.residual_sum, second, total))

    # --- Backward ---

    def max_pool_gradient(self, level, source, at, add):
        return self._run(operations.max_pool_gradient, source, at.map, add.map)

    def up_gradients(self, level, below, part, at):
        of_up = self._run(operations.up_filter_gradient, below, at.map)
        return of_up, self._run(
            operations.up_input_gradient, at.map, self._up_filters(level, part), below
        )

    def join_up_gradients(self, level, parts):
        of_up = self._run(tf.concat, parts, 3) if len(parts) > 1 else parts[0]
        if self.unet.up == "transposed":
            self._gradients[self.layer(f"decoder{level}_up").kernel.name] = of_up
        else:
            of_taps = tf.reduce_sum(of_up, (0, 1, 2), keepdims=True)
            self._gradients[self.layer(f"decoder{level}_up_conv").kernel.name] = tf.transpose(
                of_taps, (0, 1, 2, 4, 3)
            )

    def add_gradients(self, at, add):
        return AtValues(*(self._run(tf.add, *pair) for pair in zip(at, add)))

    def project_gradient(self, name, entry, part, at, add):
        layer, filters, more = (
            self.layer(name),
            self._rows(name, entry, part),
            add.map if add else None,
        )
        at_values, of_part, of_bias = self._run(
            operations.project_gradient, entry[part], at.map, filters, more
        )
        if len(entry) > 1:
            before = sum(source.raw.shape[-1] for source in entry[:part])
            after = layer.kernel.shape[3] - before - filters.shape[3]
            of_part = self._run(tf.pad, of_part, ((0, 0), (0, 0), (0, 0), (before, after), (0, 0)))
        known = self._gradients.get(layer.kernel.name)
        self._gradients[layer.kernel.name] = (
            of_part if known is None else self._run(tf.add, known, of_part)
        )
        if layer.bias is not None:
            self._gradients[layer.bias.name] = of_bias
        return at_values

    def project_to_raw(self, source, at):
        head = self.layer("head")
        *sums, of_kernel, of_bias = self._run(
            operations.project_sums, source, at.map, self._value(head.kernel)
        )
        self._gradients.update({head.kernel.name: of_kernel, head.bias.name: of_bias})
        of_raw = self.of_raw("decoder0_conv2", source, AtValues(at.map, *sums))
        return self._run(operations.to_raw, of_raw, self._value(head.kernel))

    def residual_gradient(self, name, block: Block, at):
        return self._run(operations.residual_gradient, block.second, block.output.raw, at.map)

    def of_raw(self, name, source, at):
        """The gradient to be formed on reading, from that of the norm's values (Ioffe and Szegedy
        2015)."""
        if isinstance(at, Gradient):
            return at
        layer, norm = self._norm_layer(name), source.norm
        if layer.norm == "none":
            self._gradients[layer.bias.name] = tf.reduce_sum(at.sum1, 0)
        else:
            self._gradients[layer.gamma.name] = tf.reduce_sum(at.sum2, 0)
            self._gradients[layer.beta.name] = tf.reduce_sum(at.sum1, 0)
        if layer.norm != "instance" and not self._moves(layer):
            return Gradient(at.map, source, norm.scale, 0 * norm.scale, 0 * norm.scale)
        mean1, mean2 = at.sum1 / self._elements(source.raw), at.sum2 / self._elements(source.raw)
        if layer.norm == "batch":
            mean1, mean2 = (tf.reduce_mean(mean, 0, keepdims=True) for mean in (mean1, mean2))
        of_raw = -norm.scale * norm.rstd * mean2
        return Gradient(
            at.map, source, norm.scale, of_raw, -norm.scale * mean1 - of_raw * norm.mean
        )

    def to_raw(self, name, source, at):
        return self._run(operations.to_raw, at)

    def input_gradient(self, name, at, entry, part, sums=False):
        return self._run(
            operations.input_gradient,
            at,
            self._rows(name, entry, part),
            entry[part] if sums else None,
        )

    def filter_gradient(self, name, entry, at, part=""):
        gradient = self._run(operations.filter_gradient, entry, at)
        self._gradients[self.layer(name).kernel.name] = gradient
        return gradient

    def split_kernel(self, name, entry):
        for part in range(len(entry)):
            self._rows(name, entry, part)

    def join_gradients(self, name, parts):
        self._gradients[self.layer(name).kernel.name] = self._run(tf.concat, parts, 3)

    # --- Norms ---

    def _norm_layer(self, name: str) -> tf.keras.layers.Layer:
        """The norm after a convolution."""
        adds = self.unet.residual and name.endswith("_conv2")
        return self.layer(name.replace("_conv", "_norm" if adds else "_act"))

    def _norm(self, name, raw, mean, variance, again: bool) -> Norm:
        """The norm of a raw sum with these statistics of each sample, (N, C); `again` moves no
        moving statistics."""
        layer, ones = self._norm_layer(name), tf.ones_like(mean)
        floor = 0 * ones if layer.activate else -float("inf") * ones
        if layer.norm == "none":
            return Norm(ones, self._value(layer.bias) * ones, 0 * ones, ones, floor)
        if layer.norm == "batch":
            if self._moves(layer):
                of_samples, mean = mean, tf.reduce_mean(mean, 0, keepdims=True)
                variance = tf.reduce_mean(
                    variance + tf.math.squared_difference(of_samples, mean), 0, keepdims=True
                )
                if not again:
                    elements = self._elements(raw) * tf.cast(tf.shape(raw)[0], tf.float32)
                    layer.move(mean[0], variance[0] * (elements / (elements - 1)))
            else:
                mean, variance = (
                    tf.convert_to_tensor(layer.moving_mean),
                    tf.convert_to_tensor(layer.moving_variance),
                )
            mean, variance = mean * ones, variance * ones
        rstd = tf.math.rsqrt(variance + EPSILON)
        scale = self._value(layer.gamma) * rstd
        return Norm(scale, self._value(layer.beta) - mean * scale, mean, rstd, floor)

    def _moves(self, layer) -> bool:
        """Whether a norm is a batch norm that takes the batch's statistics."""
        return layer.norm == "batch" and self.training and layer.trainable

    @staticmethod
    def _elements(raw: tf.Tensor) -> float:
        """Voxels of a sample."""
        return float(raw.shape[1:4].num_elements())

    # --- Weights ---

    def _value(self, variable: tf.Variable) -> tf.Tensor:
        return self.values.get(variable.name, variable)

    def _rows(self, name: str, entry: List[Source], part: int) -> tf.Tensor:
        """The rows of a layer's kernel for a part of its block's entry."""
        first = sum(source.raw.shape[-1] for source in entry[:part])
        return self._slice(name, 3, first, first + entry[part].raw.shape[-1])

    def _up_filters(self, level: int, part: int) -> tf.Tensor:
        """The filters (2, 2, 2, out, in) of a part. Nearest neighbour and a 1x1x1 kernel commute:
        eight equal taps."""
        channels = self.unet.up_parts(level)[part]
        if self.unet.up == "transposed":
            return self._slice(f"decoder{level}_up", 3, *channels)
        kernel = self._slice(f"decoder{level}_up_conv", 4, *channels)
        return self._once(
            (level, part), lambda: tf.tile(tf.transpose(kernel, (0, 1, 2, 4, 3)), (2, 2, 2, 1, 1))
        )

    def _slice(self, name: str, axis: int, first: int, past: int) -> tf.Tensor:
        """A layer's kernel from `first` to `past` along an axis."""
        kernel = self.layer(name).kernel
        if past - first == kernel.shape[axis]:
            return self._value(kernel)
        begin, size = [0] * 5, list(kernel.shape)
        begin[axis], size[axis] = first, past - first
        return self._once((name, first), lambda: tf.slice(self._value(kernel), begin, size))

    def _once(self, key: Any, make: Callable[[], tf.Tensor]) -> tf.Tensor:
        """Filters that several operations read: one copy of them."""
        if key not in self._filters:
            self._filters[key] = self._run(make)
        return self._filters[key]

    def _run(self, operation: Callable, *arguments) -> Any:
        """The outputs of an operation, computed after the one before it."""
        with tf.control_dependencies(self._last):
            outputs = operation(*arguments)
        self._last = tf.nest.flatten(outputs)[:1]
        return outputs
