"""A U-Net's forward and backward pass as operations of models/program.py, in their order. No
TensorFlow.

    program = network_program(UNetConfig())
    for op in program.forward: print(op.kind.value, op.layer, [value.name for value in op.reads])

A convolution keeps nothing but its raw sum: norm and ReLU are formed wherever it is read. Under the
policy "speed" every raw sum is kept. Under "lean" these are made again when the backward pass reads
them: the finest level's encoder, all sums of the others but the last, and all up-sampled maps,
which come in parts no wider than the skip.
"""

import functools
from typing import Dict, List, Optional, Sequence, Tuple

from models.config import IMAGE_LEVEL, UNetConfig
from models.emitter import Block, Emitter, Maps
from models.program import NetworkProgram, Value, ValueKind, given, head_of, slope_of


@functools.lru_cache(maxsize=64)
def network_program(config: UNetConfig) -> NetworkProgram:
    """The forward and backward pass of a network."""
    return _Network(config).program()


# --- Private helpers ---


class _Network:
    """The operations of a network in the making."""

    def __init__(self, config: UNetConfig):
        self.config = config
        self.is_lean = config.policy == "lean"
        self.image = Value("image", ValueKind.MAP, config.image_level, config.channels)
        self._emit = Emitter(config)
        self._encoders: List[Block] = []
        self._coarse_logits: Optional[Value] = None  # before they are interpolated
        self._decoders: Dict[int, Block] = {}

    def program(self) -> NetworkProgram:
        logits = self._forward()
        forward = self._emit.taken()
        slopes = [slope_of(head) for head in logits]
        before_image = self._backward(slopes)
        backward = self._emit.taken()
        self._image_gradient(*before_image)
        return NetworkProgram(
            image=self.image,
            logits=tuple(logits),
            slopes=tuple(slopes),
            forward=forward,
            backward=backward,
            to_image=self._emit.taken(),
            kernel_gradients=tuple(self._emit.kernel_gradients.items()),
        )

    # --- The order of a pass ---

    def _forward(self) -> List[Value]:
        config = self.config
        below = self.image
        if config.averages:
            below = self._emit.resize("average", 0, self.image)
        for level in range(config.depth):
            if level:
                below = self._emit.max_pool(level, below)
            block = self._block(f"encoder{level}", (below,), config.encoder_widths(level))
            self._encoders.append(block)
            below = block.output
        for level in reversed(range(config.depth - 1)):
            self._decoders[level] = self._decoder(level)
        logits = []
        for level in self._levels_of_heads():
            entry = (self._decoders[level].output,)
            logits.append(self._emit.project(head_of(level), entry, 0, config.outputs))
        if config.averages:
            self._coarse_logits = logits[0]
            logits[0] = self._emit.resize("interpolate", IMAGE_LEVEL, logits[0])
        return logits

    def _backward(self, slopes: Sequence[Value]) -> Tuple[Value, Optional[Value]]:
        """All gradients of kernels, from those of the logits of each head. Returns those of the
        first convolution's raw sum, and of the image by way of the first shortcut."""
        by_level = dict(zip(self._levels_of_heads(), slopes))
        skip_grads: Dict[int, Value] = {}
        bottom = self.config.depth - 1
        slope = by_level.pop(0)
        if self._coarse_logits:
            slope = self._emit.resize_gradient("interpolate", self._coarse_logits, slope)
        grad = self._through_head(0, slope, None)
        for level in range(bottom):
            if level in by_level:
                grad = self._through_head(level, by_level[level], grad)
            skip_grads[level], grad = self._through_decoder(level, grad)
        for level in range(bottom, 0, -1):
            block, grad_first, grad_sum = self._through_encoder(level, grad, skip_grads)
            grad = self._entry_gradient(f"encoder{level}", block.entry, 0, grad_first, grad_sum)
        block, grad_first, grad_sum = self._through_encoder(0, grad, skip_grads)
        if grad_sum is None:
            return grad_first, None
        grad_image = self._emit.project_gradient(
            "encoder0_shortcut", block.entry, 0, grad_sum, None
        )
        return grad_first, grad_image

    def _image_gradient(self, grad_first: Value, grad_shortcut: Optional[Value]) -> None:
        entry = self._encoders[0].entry
        grad_image = self._emit.input_gradient("encoder0_conv1", grad_first, entry, 0)
        if grad_shortcut is not None:
            grad_image = self._emit.add(grad_image, grad_shortcut)
        if self.config.averages:
            self._emit.resize_gradient("average", self.image, grad_image)

    def _levels_of_heads(self) -> List[int]:
        """As the network's outputs are ordered."""
        coarser = range(self.config.depth - 2, 0, -1)
        return [0, *coarser] if self.config.deep_supervision else [0]

    def _below(self, level: int) -> Value:
        """The map that decoder `level` samples up."""
        if level + 1 in self._decoders:
            return self._decoders[level + 1].output
        return self._encoders[-1].output

    def _up(self, level: int, index: int, again: bool) -> Value:
        return self._emit.up(level, index, self._below(level), again)

    def _decoder(self, level: int) -> Block:
        name = f"decoder{level}"
        widths = self.config.decoder_widths(level)
        ups = len(self.config.up_parts(level))
        entry: Maps = (self._encoders[level].output,)
        if ups == 1:
            return self._block(name, (*entry, self._up(level, 0, again=False)), widths)
        total = None  # it is added up in the memory of the skip
        for index in range(1 + ups):
            if index:
                entry += (self._up(level, index - 1, again=False),)
            kernel = self._emit.kernel_rows(f"{name}_conv1", entry, index)
            maps = (entry[index],)
            is_whole = index == ups
            total = self._emit.convolve(
                name, 1, maps, widths[0], kernel=kernel, add=total, is_whole=is_whole
            )
        return self._block(name, entry, widths, first=total)

    def _block(
        self,
        name: str,
        entry: Maps,
        widths: Sequence[int],
        again: bool = False,
        first: Optional[Value] = None,
    ) -> Block:
        """The convolutions of a block, but the `first` if that is there, and its residual's sum."""
        sums = self._sums(name, entry, widths, again, first)
        if not self.config.residual:
            return Block(name, entry, sums, sums[-1])
        shortcut = f"{name}_shortcut"
        total = self._emit.project(shortcut, entry, 0, widths[-1], block=name)
        for index in range(1, len(entry)):
            total = self._emit.project(shortcut, entry, index, widths[-1], block=name, add=total)
        return Block(name, entry, sums, self._emit.residual_sum(name, sums[-1], total, again))

    def _sums(
        self, name: str, entry: Maps, widths: Sequence[int], again: bool, first: Optional[Value]
    ) -> Maps:
        sums = given(first)
        for index in range(len(sums), len(widths)):
            maps = entry
            if sums:
                maps = sums[-1:]
            made = self._emit.convolve(name, index + 1, maps, widths[index], again=again)
            sums = (*sums, made)
        return sums

    def _block_again(self, level: int) -> Block:
        """An encoder's block whose sums a gradient reads."""
        block = self._encoders[level]
        name = f"encoder{level}"
        widths = self.config.encoder_widths(level)
        if not self.is_lean:
            return block
        if level == 0:
            return self._block(name, block.entry, widths, again=True)
        sums = self._sums(name, block.entry, widths[:-1], True, first=None)
        return Block(name, block.entry, (*sums, block.sums[-1]), block.output)

    def _through_head(self, level: int, slope: Value, grad: Optional[Value]) -> Value:
        block = self._decoders[level]
        if grad is None and not self.config.residual:  # memory is at its peak: over the raw sum
            return self._emit.project_to_raw(block, slope)
        return self._emit.project_gradient(head_of(level), (block.output,), 0, slope, grad)

    def _through_decoder(self, level: int, grad: Value) -> Tuple[Value, Value]:
        """Gradients of the values of the skip and of the level below."""
        name = f"decoder{level}"
        block = self._decoders[level]
        grad_first, grad_sum = self._through_block(block, grad)
        if self.is_lean:
            return self._through_parts(level, self._emit.to_raw(block, grad_first), grad_sum)
        for index in range(len(block.entry)):  # now: not into the memory that the next map leaves
            self._emit.kernel_rows(f"{name}_conv1", block.entry, index)
        self._emit.filter_gradient(f"{name}_conv1", block.entry, grad_first)
        grad_up = self._entry_gradient(name, block.entry, 1, grad_first, grad_sum)
        # Now, as the block's last maps go with it.
        grad_skip = self._entry_gradient(name, block.entry, 0, grad_first, grad_sum)
        grad_kernel, grad_below = self._emit.up_gradients(level, 0, self._below(level), grad_up)
        self._emit.join_gradients(self._emit.up_layer(level), [grad_kernel])
        return grad_skip, grad_below

    def _through_parts(
        self, level: int, grad_first: Value, grad_sum: Optional[Value]
    ) -> Tuple[Value, Value]:
        """`_through_decoder` if the block's maps are made again, a part of the up-sampled map at a
        time."""
        name = f"decoder{level}"
        convolution = f"{name}_conv1"
        skip = self._encoders[level] if level else self._block_again(0)
        entry: Maps = (skip.output,)
        part_grads = [self._emit.filter_gradient(convolution, entry, grad_first, "/skip")]
        kernel_grads = []
        grad_below: List[Value] = []  # the sum over the parts so far, last
        for index in range(len(self.config.up_parts(level))):
            up = self._up(level, index, again=True)
            entry += (up,)
            part_grads.append(
                self._emit.filter_gradient(convolution, (up,), grad_first, f"/up{index}")
            )
            grad_up = self._entry_gradient(name, entry, index + 1, grad_first, grad_sum)
            grad_kernel, grad_part = self._emit.up_gradients(
                level, index, self._below(level), grad_up
            )
            kernel_grads.append(grad_kernel)
            if grad_below:
                grad_part = self._emit.add(grad_part, grad_below[-1])
            grad_below.append(grad_part)
        self._emit.join_gradients(convolution, part_grads)
        self._emit.join_gradients(self._emit.up_layer(level), kernel_grads)
        return self._entry_gradient(name, entry, 0, grad_first, grad_sum), grad_below[-1]

    def _through_encoder(
        self, level: int, grad: Value, skip_grads: Dict[int, Value]
    ) -> Tuple[Block, Value, Optional[Value]]:
        """The block, and what `_through_block` returns: from the gradient of what the level below
        reads of it, or of the deepest block's values."""
        name = f"encoder{level}"
        block = self._encoders[level]
        if level in skip_grads:
            block = self._block_again(level)
            grad = self._emit.max_pool_gradient(level, block.output, grad, skip_grads.pop(level))
        grad_first, grad_sum = self._through_block(block, grad)
        self._emit.filter_gradient(f"{name}_conv1", block.entry, grad_first)
        return block, grad_first, grad_sum

    def _through_block(self, block: Block, grad: Value) -> Tuple[Value, Optional[Value]]:
        """Gradients of the first convolution's raw sum, and of the residual's sum, which is None
        without."""
        grad_sum = None
        if self.config.residual:
            grad = self._emit.residual_gradient(block, grad)
            grad_sum = grad
        for number in range(len(block.sums), 1, -1):
            layer = f"{block.name}_conv{number}"
            source = (block.sums[number - 2],)
            grad_raw = self._emit.norm_gradient(block, number, grad)
            self._emit.filter_gradient(layer, source, grad_raw)
            grad = self._emit.input_gradient(layer, grad_raw, source, 0, sums=True)
        return self._emit.norm_gradient(block, 1, grad), grad_sum

    def _entry_gradient(
        self, name: str, entry: Maps, index: int, grad_first: Value, grad_sum: Optional[Value]
    ) -> Value:
        """The gradient of the values of one map of a block's entry."""
        grad_values = self._emit.input_gradient(f"{name}_conv1", grad_first, entry, index)
        if grad_sum is None:
            return grad_values
        return self._emit.project_gradient(f"{name}_shortcut", entry, index, grad_sum, grad_values)
