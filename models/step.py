"""A U-Net's forward and backward pass, written by hand over own operations (models/native/operations.py).

Of a convolution nothing is kept but its raw sum: norm and ReLU are formed wherever it is read. Each operation waits for
the one before, so what is in memory at a time is known, and a map whose last reader has its shape is written over.

Under "speed" every raw sum is kept. Under "lean" these are made again where the backward pass reads them: the finest
level's encoder, the first sum of the others, and all up-sampled maps.
"""

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import tensorflow as tf

from models.config import EPSILON
from models.native import operations
from models.native.operations import Gradient, Norm, Source


class Block(NamedTuple):
    """Of a level's block: what its convolutions read and make."""

    entry: List[Source]  # one map, or the skip's and the up-sampled one, which may be in parts
    first: Source
    second: Source
    output: Source  # `second`, but with a residual's sum a map of its own


class Pass:
    """One pass over the weights of a model of `build_unet3d`, in training or not. `values` stand for its variables,
    by their `ref()`, where they are given."""

    def __init__(self, model: tf.keras.Model, training: bool, values: Optional[Dict] = None):
        self.unet, self.layer, self.training, self.values = model.unet, model.get_layer, training, values or {}
        self._again = self.unet.policy == "lean"
        self._gradients: Dict[Any, tf.Tensor] = {}
        self._filters: Dict[Any, tf.Tensor] = {}
        self._last: List[tf.Tensor] = []

    def forward(self, image: tf.Tensor) -> List[tf.Tensor]:
        """Logits of each head, the finest first, of an image (N, X, Y, Z, C)."""
        depth = self.unet.depth
        self._entries, self._encoders, self._decoders = [Source(image)], [], {}
        for level in range(depth):
            if level:
                pooled = self._run(operations.max_pool, self._encoders[-1].output)
                self._entries.append(Source(pooled))
            self._encoders.append(self._block(f"encoder{level}", [self._entries[level]]))
        below = self._encoders[-1].output
        for level in reversed(range(depth - 1)):
            self._decoders[level] = self._decoder(level, below)
            below = self._decoders[level].output
        return [self._logits(level) for level in self._heads()]

    def backward(self, slopes: Sequence[tf.Tensor]) -> Dict[Any, tf.Tensor]:
        """Gradients of the weights, by the variables' `ref()`, from those of the logits of each head."""
        slopes, depth = dict(zip(self._heads(), slopes)), self.unet.depth
        at_skips, at_output, sums = {}, None, None
        for level in range(depth - 1):
            if level in slopes:
                at_output, sums = self._through_head(level, slopes[level], at_output)
            at_skips[level], at_output, sums = self._through_decoder(level, at_output, sums)
        for level in reversed(range(depth)):
            block = self._encoders[level]
            if level < depth - 1:
                block = self._block_again(level)
                at_output, *sums = self._run(operations.max_pool_gradient, block.output, at_output, at_skips.pop(level))
            at_first, at_sum = self._through_block(f"encoder{level}", block, at_output, sums)
            self._put_kernel(f"encoder{level}_conv1", block.entry, at_first)
            at_output = self._at_entry(f"encoder{level}", block.entry, 0, at_first, at_sum) if level else None
            if at_sum is not None and not level:
                self._shortcut_gradient("encoder0", block.entry, 0, at_sum)
        return self._gradients

    # --- Forward ---

    def _heads(self) -> List[int]:
        """Levels that have one, as the model's outputs are ordered."""
        return [0, *range(self.unet.depth - 2, 0, -1)] if self.unet.deep_supervision else [0]

    def _logits(self, level: int) -> tf.Tensor:
        head = self.layer(f"head{level}" if level else "head")
        return self._run(
            operations.project, self._decoders[level].output, self._value(head.kernel), self._value(head.bias)
        )

    def _decoder(self, level: int, below: Source) -> Block:
        name, parts, raw = f"decoder{level}", self.unet.up_parts(level), None
        entry = [self._encoders[level].output]
        if len(parts) == 1:
            return self._block(name, [*entry, self._up_sampled(level, below, parts[0])])
        for part in range(1 + len(parts)):  # added up in the memory of the skip
            if part:
                entry.append(self._up_sampled(level, below, parts[part - 1]))
            rows = self._rows(f"{name}_conv1", entry, part)
            raw, *moments = self._run(operations.convolve, entry[part:], rows, raw)
        first = Source(raw, self._norm(self.layer(f"{name}_act1"), raw, *moments, True, False))
        return self._block(name, entry, first=first)

    def _block(self, name: str, entry: List[Source], again: bool = False, first: Optional[Source] = None) -> Block:
        """Two convolutions, each with its norm; with `residual`, the sum with the entry. `again` moves nothing; `first`
        is what the first one gives, if it is there."""
        residual = self.unet.residual
        first = first or self._convolved(f"{name}_conv1", f"{name}_act1", entry, True, again)
        last_norm = f"{name}_norm2" if residual else f"{name}_act2"
        second = self._convolved(f"{name}_conv2", last_norm, [first], not residual, again)
        if not residual:
            return Block(entry, first, second, second)
        total, nothing = None, tf.zeros(self.layer(f"{name}_shortcut").filters)
        for part, source in enumerate(entry):
            total = self._run(operations.project, source, self._rows(f"{name}_shortcut", entry, part), nothing, total)
        return Block(entry, first, second, Source(self._run(operations.residual_sum, second, total)))

    def _block_again(self, level: int) -> Block:
        """An encoder's block whose sums a gradient reads."""
        block, name = self._encoders[level], f"encoder{level}"
        if not self._again:
            return block
        if not level:
            return self._block(name, block.entry, again=True)
        return block._replace(first=self._convolved(f"{name}_conv1", f"{name}_act1", block.entry, True, again=True))

    def _skip(self, level: int) -> Source:
        """An encoder's output as the decoder's gradient reads it."""
        return self._encoders[level].output if level else self._block_again(level).output

    def _up_sampled(self, level: int, below: Source, part: Tuple[int, int]) -> Source:
        return Source(self._run(operations.up_convolve, below, self._up_filters(level, part)))

    def _up_filters(self, level: int, part: Tuple[int, int]) -> tf.Tensor:
        """(2, 2, 2, out, in) of a part's channels. Nearest neighbour and a 1x1x1 convolution commute: eight equal
        taps."""
        if self.unet.up == "transposed":
            return self._slice(f"decoder{level}_up", 3, *part)
        kernel = self._slice(f"decoder{level}_up_conv", 4, *part)
        return self._once((level, part), lambda: tf.tile(tf.transpose(kernel, (0, 1, 2, 4, 3)), (2, 2, 2, 1, 1)))

    def _convolved(self, name: str, norm_name: str, entry: List[Source], relu: bool, again: bool) -> Source:
        raw, *moments = self._run(operations.convolve, entry, self._value(self.layer(name).kernel))
        return Source(raw, self._norm(self.layer(norm_name), raw, *moments, relu, again))

    def _norm(self, layer, raw, mean, variance, relu: bool, again: bool) -> Norm:
        """Of a raw map with these statistics of each sample, (N, C)."""
        ones = tf.ones_like(mean)
        floor = 0 * ones if relu else -float("inf") * ones
        if layer.norm == "none":
            return Norm(ones, self._value(layer.bias) * ones, 0 * ones, ones, floor)
        if layer.norm == "batch":
            if self._moves(layer):
                of_samples, mean = mean, tf.reduce_mean(mean, 0, keepdims=True)
                variance = tf.reduce_mean(variance + tf.math.squared_difference(of_samples, mean), 0, keepdims=True)
                if not again:
                    elements = self._elements(raw) * tf.cast(tf.shape(raw)[0], tf.float32)
                    layer.move(mean[0], variance[0] * (elements / (elements - 1)))
            else:
                mean, variance = tf.convert_to_tensor(layer.moving_mean), tf.convert_to_tensor(layer.moving_variance)
            mean, variance = mean * ones, variance * ones
        rstd = tf.math.rsqrt(variance + EPSILON)
        scale = self._value(layer.gamma) * rstd
        return Norm(scale, self._value(layer.beta) - mean * scale, mean, rstd, floor)

    # --- Backward: each takes the gradient of what a block puts out, and the two sums that its norm needs; or that of
    # the last raw sum, and None ---

    def _through_head(self, level: int, slope: tf.Tensor, add: Optional[tf.Tensor]):
        head = self.layer(f"head{level}" if level else "head")
        source, kernel = self._decoders[level].output, self._value(head.kernel)
        if add is None and source.norm:  # the finest level's, where memory is at its peak: over the raw map itself
            *sums, of_kernel, of_bias = self._run(operations.project_sums, source, slope, kernel)
            at = self._through_norm(f"decoder{level}_act2", source, slope, *sums)
            at_output, sums = self._run(operations.project_to_raw, at, kernel), None
        else:
            at_output, *sums, of_kernel, of_bias = self._run(operations.project_gradient, source, slope, kernel, add)
        self._put(head.kernel, of_kernel)
        self._put(head.bias, of_bias)
        return at_output, sums

    def _through_decoder(self, level: int, at_output, sums):
        """Gradients of the skip's values and of what the level below puts out, and the sums of the latter's norm."""
        name, block = f"decoder{level}", self._decoders[level]
        below = self._decoders[level + 1].output if level + 1 in self._decoders else self._encoders[-1].output
        at_first, at_sum = self._through_block(name, block, at_output, sums)
        if self._again:
            return self._through_parts(level, below, at_first, at_sum)
        self._put_kernel(f"{name}_conv1", block.entry, at_first)
        at_up = self._at_entry(name, block.entry, 1, at_first, at_sum)
        at_skip = self._at_entry(name, block.entry, 0, at_first, at_sum)  # now, as the block's last maps go with it
        of_taps, at_below = self._through_up(level, self.unet.up_parts(level)[0], below, at_up)
        self._put_up_kernel(level, of_taps)
        return at_skip, at_below[0], at_below[1:]

    def _through_parts(self, level: int, below: Source, at_first: Gradient, at_sum):
        """The same where all that the block reads is made again, a part of the up-sampled map at a time."""
        name, at_below, of_ups = f"decoder{level}", [], []
        at_first, entry = self._run(operations.to_raw, at_first), [self._skip(level)]
        of_parts = [self._run(operations.filter_gradient, entry[:1], at_first)]
        for part in self.unet.up_parts(level):
            entry.append(self._up_sampled(level, below, part))
            of_parts.append(self._run(operations.filter_gradient, entry[-1:], at_first))
            at_up = self._at_entry(name, entry, len(entry) - 1, at_first, at_sum)
            of_taps, found = self._through_up(level, part, below, at_up)
            of_ups.append(of_taps)
            at_below = [self._run(tf.add, *pair) for pair in zip(at_below, found)] or found
        self._put(self.layer(f"{name}_conv1").kernel, tf.concat(of_parts, 3))
        self._put_up_kernel(level, tf.concat(of_ups, 3))
        return self._at_entry(name, entry, 0, at_first, at_sum), at_below[0], at_below[1:]

    def _through_up(self, level: int, part: Tuple[int, int], below: Source, at_up: tf.Tensor):
        """Gradients of the eight taps, and of what is up-sampled with the sums of its norm."""
        of_taps = self._run(operations.up_filter_gradient, below, at_up)
        return of_taps, self._run(operations.up_input_gradient, at_up, self._up_filters(level, part), below)

    def _through_block(self, name: str, block: Block, at_output, sums):
        """Gradients of the first convolution's sum, to be formed, and of the residual's sum, which is None without."""
        at_sum, last_norm = None, f"{name}_act2"
        if self.unet.residual:
            last_norm = f"{name}_norm2"
            at_output, *sums = self._run(operations.residual_gradient, block.second, block.output.raw, at_output)
            at_sum = at_output
        at_second = at_output if sums is None else self._through_norm(last_norm, block.second, at_output, *sums)
        kernel = self.layer(f"{name}_conv2").kernel
        self._put_kernel(f"{name}_conv2", [block.first], at_second)
        at_values, *sums = self._run(operations.input_gradient, at_second, self._value(kernel), block.first)
        return self._through_norm(f"{name}_act1", block.first, at_values, *sums), at_sum

    def _through_norm(self, name: str, source: Source, at_values, sum1, sum2) -> Gradient:
        """The gradient of the raw map, to be formed from that of its norm's values (Ioffe and Szegedy 2015). `sum1` and
        `sum2`, (N, C), are of the gradient behind the ReLU, and of that times the normalised value."""
        layer, norm = self.layer(name), source.norm
        if layer.norm == "none":
            self._put(layer.bias, tf.reduce_sum(sum1, 0))
        else:
            self._put(layer.gamma, tf.reduce_sum(sum2, 0))
            self._put(layer.beta, tf.reduce_sum(sum1, 0))
        if not (layer.norm == "instance" or (layer.norm == "batch" and self._moves(layer))):
            return Gradient(at_values, source, norm.scale, 0 * norm.scale, 0 * norm.scale)
        mean1, mean2 = sum1 / self._elements(source.raw), sum2 / self._elements(source.raw)
        if layer.norm == "batch":
            mean1, mean2 = (tf.reduce_mean(one, 0, keepdims=True) for one in (mean1, mean2))
        of_raw = -norm.scale * norm.rstd * mean2
        return Gradient(at_values, source, norm.scale, of_raw, -norm.scale * mean1 - of_raw * norm.mean)

    def _at_entry(self, name: str, entry: List[Source], part: int, at_first: Gradient, at_sum) -> tf.Tensor:
        """The gradient of the values of a part of what a block reads."""
        at_values, *_ = self._run(operations.input_gradient, at_first, self._rows(f"{name}_conv1", entry, part))
        return at_values if at_sum is None else self._shortcut_gradient(name, entry, part, at_sum, at_values)

    def _shortcut_gradient(self, name: str, entry: List[Source], part: int, at_sum, add=None):
        """Adds what a residual's sum gives to the gradient of a part of what the block reads."""
        kernel = self.layer(f"{name}_shortcut").kernel
        filters = self._rows(f"{name}_shortcut", entry, part)
        at_values, _, _, of_part, _ = self._run(operations.project_gradient, entry[part], at_sum, filters, add)
        widths = [source.raw.shape[-1] for source in entry]
        before, own = sum(widths[:part]), widths[part]
        after = kernel.shape[3] - before - own
        padded = tf.pad(of_part, ((0, 0), (0, 0), (0, 0), (before, after), (0, 0))) if len(entry) > 1 else of_part
        known = self._gradients.get(kernel.ref())
        self._put(kernel, padded if known is None else known + padded)
        return at_values

    # --- Weights ---

    def _value(self, variable: tf.Variable) -> tf.Tensor:
        return self.values.get(variable.ref(), variable)

    def _rows(self, name: str, entry: List[Source], part: int) -> tf.Tensor:
        """Of a layer's kernel, what meets a part of what its block reads."""
        first = sum(source.raw.shape[-1] for source in entry[:part])
        return self._slice(name, 3, first, first + entry[part].raw.shape[-1])

    def _slice(self, name: str, axis: int, first: int, past: int) -> tf.Tensor:
        """Of a layer's kernel, from `first` to `past` along an axis."""
        kernel = self.layer(name).kernel
        if past - first == kernel.shape[axis]:
            return self._value(kernel)
        begin, size = [0] * 5, list(kernel.shape)
        begin[axis], size[axis] = first, past - first
        return self._once((name, first), lambda: tf.slice(self._value(kernel), begin, size))

    def _once(self, key: Any, make: Callable[[], tf.Tensor]) -> tf.Tensor:
        """Filters that several operations read: one copy of them."""
        if key not in self._filters:
            self._filters[key] = make()
        return self._filters[key]

    def _put(self, variable: tf.Variable, gradient: tf.Tensor) -> None:
        self._gradients[variable.ref()] = gradient

    def _put_up_kernel(self, level: int, of_taps: tf.Tensor) -> None:
        if self.unet.up == "transposed":
            self._put(self.layer(f"decoder{level}_up").kernel, of_taps)
        else:
            of_all = tf.reduce_sum(of_taps, (0, 1, 2), keepdims=True)
            self._put(self.layer(f"decoder{level}_up_conv").kernel, tf.transpose(of_all, (0, 1, 2, 4, 3)))

    def _put_kernel(self, name: str, sources: List[Source], gradient: Gradient) -> None:
        self._put(self.layer(name).kernel, self._run(operations.filter_gradient, sources, gradient))

    def _moves(self, layer) -> bool:
        """Whether a batch norm takes the batch's statistics."""
        return self.training and layer.trainable

    # --- Order ---

    @staticmethod
    def _elements(raw: tf.Tensor) -> float:
        """Voxels of a sample."""
        return float(raw.shape[1:4].num_elements())

    def _run(self, operation: Callable, *arguments) -> Any:
        """What an operation gives, after the one before it."""
        with tf.control_dependencies(self._last):
            outputs = operation(*arguments)
        self._last = tf.nest.flatten(outputs)[:1]
        return outputs
