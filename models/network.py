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

from models.config import UNetConfig
from models.emitter import Block, Emitter, Maps
from models.program import Form, NetworkProgram, Value, given, head_of, slope_of


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
        self.image = Value("image", Form.MAP, 0, config.channels)
        self._emit = Emitter(config)
        self._encoders: List[Block] = []
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
        return logits

    def _backward(self, slopes: Sequence[Value]) -> Tuple[Value, Optional[Value]]:
        """All gradients of kernels, from those of the logits of each head. Returns those of the
        first convolution's raw sum, and of the image by way of the first shortcut."""
        by_level = dict(zip(self._levels_of_heads(), slopes))
        at_skips: Dict[int, Value] = {}
        bottom = self.config.depth - 1
        at = self._through_head(0, by_level.pop(0), None)
        for level in range(bottom):
            if level in by_level:
                at = self._through_head(level, by_level[level], at)
            at_skips[level], at = self._through_decoder(level, at)
        for level in range(bottom, 0, -1):
            block, at_first, at_sum = self._through_encoder(level, at, at_skips)
            at = self._at_entry(f"encoder{level}", block.entry, 0, at_first, at_sum)
        block, at_first, at_sum = self._through_encoder(0, at, at_skips)
        if at_sum is None:
            return at_first, None
        at_image = self._emit.project_gradient("encoder0_shortcut", block.entry, 0, at_sum, None)
        return at_first, at_image

    def _image_gradient(self, at_first: Value, at_shortcut: Optional[Value]) -> None:
        entry = self._encoders[0].entry
        at_image = self._emit.input_gradient("encoder0_conv1", at_first, entry, 0)
        if at_shortcut is not None:
            self._emit.add(at_image, at_shortcut)

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

    def _through_head(self, level: int, slope: Value, at: Optional[Value]) -> Value:
        block = self._decoders[level]
        if at is None and not self.config.residual:  # memory is at its peak: over the raw sum
            return self._emit.project_to_raw(block, slope)
        return self._emit.project_gradient(head_of(level), (block.output,), 0, slope, at)

    def _through_decoder(self, level: int, at: Value) -> Tuple[Value, Value]:
        """Gradients of the values of the skip and of the level below."""
        name = f"decoder{level}"
        block = self._decoders[level]
        at_first, at_sum = self._through_block(block, at)
        if self.is_lean:
            return self._through_parts(level, self._emit.to_raw(block, at_first), at_sum)
        for index in range(len(block.entry)):  # now: not into the memory that the next map leaves
            self._emit.kernel_rows(f"{name}_conv1", block.entry, index)
        self._emit.filter_gradient(f"{name}_conv1", block.entry, at_first)
        at_up = self._at_entry(name, block.entry, 1, at_first, at_sum)
        # Now, as the block's last maps go with it.
        at_skip = self._at_entry(name, block.entry, 0, at_first, at_sum)
        of_up, at_below = self._emit.up_gradients(level, 0, self._below(level), at_up)
        self._emit.join_gradients(self._emit.up_layer(level), [of_up])
        return at_skip, at_below

    def _through_parts(
        self, level: int, at_first: Value, at_sum: Optional[Value]
    ) -> Tuple[Value, Value]:
        """`_through_decoder` if the block's maps are made again, a part of the up-sampled map at a
        time."""
        name = f"decoder{level}"
        convolution = f"{name}_conv1"
        skip = self._encoders[level] if level else self._block_again(0)
        entry: Maps = (skip.output,)
        of_parts = [self._emit.filter_gradient(convolution, entry, at_first, "/skip")]
        of_ups = []
        at_below: List[Value] = []  # the sum over the parts so far, last
        for index in range(len(self.config.up_parts(level))):
            up = self._up(level, index, again=True)
            entry += (up,)
            of_parts.append(self._emit.filter_gradient(convolution, (up,), at_first, f"/up{index}"))
            at_up = self._at_entry(name, entry, index + 1, at_first, at_sum)
            of_up, at_part = self._emit.up_gradients(level, index, self._below(level), at_up)
            of_ups.append(of_up)
            if at_below:
                at_part = self._emit.add(at_part, at_below[-1])
            at_below.append(at_part)
        self._emit.join_gradients(convolution, of_parts)
        self._emit.join_gradients(self._emit.up_layer(level), of_ups)
        return self._at_entry(name, entry, 0, at_first, at_sum), at_below[-1]

    def _through_encoder(
        self, level: int, at: Value, at_skips: Dict[int, Value]
    ) -> Tuple[Block, Value, Optional[Value]]:
        """The block, and what `_through_block` returns: from the gradient of what the level below
        reads of it, or of the deepest block's values."""
        name = f"encoder{level}"
        block = self._encoders[level]
        if level in at_skips:
            block = self._block_again(level)
            at = self._emit.max_pool_gradient(level, block.output, at, at_skips.pop(level))
        at_first, at_sum = self._through_block(block, at)
        self._emit.filter_gradient(f"{name}_conv1", block.entry, at_first)
        return block, at_first, at_sum

    def _through_block(self, block: Block, at: Value) -> Tuple[Value, Optional[Value]]:
        """Gradients of the first convolution's raw sum, and of the residual's sum, which is None
        without."""
        at_sum = None
        if self.config.residual:
            at = self._emit.residual_gradient(block, at)
            at_sum = at
        for number in range(len(block.sums), 1, -1):
            layer = f"{block.name}_conv{number}"
            source = (block.sums[number - 2],)
            at_raw = self._emit.norm_gradient(block, number, at)
            self._emit.filter_gradient(layer, source, at_raw)
            at = self._emit.input_gradient(layer, at_raw, source, 0, sums=True)
        return self._emit.norm_gradient(block, 1, at), at_sum

    def _at_entry(
        self, name: str, entry: Maps, index: int, at_first: Value, at_sum: Optional[Value]
    ) -> Value:
        """The gradient of the values of one map of a block's entry."""
        at_values = self._emit.input_gradient(f"{name}_conv1", at_first, entry, index)
        if at_sum is None:
            return at_values
        return self._emit.project_gradient(f"{name}_shortcut", entry, index, at_sum, at_values)
