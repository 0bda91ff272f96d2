"""A U-Net's forward and backward pass as operations of models/program.py: their order, and what
each reads and makes. No TensorFlow.

    program = network_program(UNetConfig())
    for op in program.forward: print(op.kind.value, op.layer, [value.name for value in op.reads])

A convolution keeps nothing but its raw sum: norm and ReLU are formed wherever it is read. Under the
policy "speed" every raw sum is kept. Under "lean" these are made again when the backward pass reads
them: the finest level's encoder, all sums of the others but the last, and all up-sampled maps,
which come in parts no wider than the skip.
"""

import functools
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Sequence, Set, Tuple

from models.config import UNetConfig
from models.program import (
    Form,
    Kind,
    NetworkProgram,
    Op,
    UniqueNames,
    Value,
    given,
    head_of,
    kernel_of,
    slope_of,
)

Maps = Tuple[Value, ...]


@functools.lru_cache(maxsize=64)
def network_program(config: UNetConfig) -> NetworkProgram:
    """The forward and backward pass of a network."""
    return _Network(config).program()


# --- Private helpers ---


@dataclass(frozen=True)
class _Block:
    """Maps that the convolutions of a level's block read and make."""

    name: str  # such as "encoder0"
    entry: Maps  # one map, or the skip's and the parts of the up-sampled one
    sums: Maps  # of each convolution
    output: Value  # the last of them, but with a residual's sum a map of its own


class _Network:
    """The operations of a network in the making."""

    def __init__(self, config: UNetConfig):
        self.config = config
        self.is_lean = config.policy == "lean"
        self.image = Value("image", Form.MAP, 0, config.channels)
        self._ops: List[Op] = []
        self._names = UniqueNames()
        self._kernels: Dict[Tuple[str, int], Value] = {}
        self._kernel_gradients: Dict[str, Value] = {}
        self._encoders: List[_Block] = []
        self._decoders: Dict[int, _Block] = {}
        self._joined: Set[str] = set()
        """Layers that read several maps side by side: each map meets its rows of the kernel."""
        for level in range(config.depth - 1):
            self._joined |= {f"decoder{level}_conv1", f"decoder{level}_shortcut"}

    def program(self) -> NetworkProgram:
        logits = self._forward()
        forward = self._taken()
        slopes = [slope_of(head) for head in logits]
        before_image = self._backward(slopes)
        backward = self._taken()
        self._image_gradient(*before_image)
        return NetworkProgram(
            image=self.image,
            logits=tuple(logits),
            slopes=tuple(slopes),
            forward=forward,
            backward=backward,
            to_image=self._taken(),
            kernel_gradients=tuple(self._kernel_gradients.items()),
        )

    # --- The order of a pass ---

    def _forward(self) -> List[Value]:
        config = self.config
        below = self.image
        for level in range(config.depth):
            if level:
                below = self._max_pool(level, below)
            block = self._block(f"encoder{level}", (below,), config.encoder_widths(level))
            self._encoders.append(block)
            below = block.output
        for level in reversed(range(config.depth - 1)):
            self._decoders[level] = self._decoder(level)
        logits = []
        for level in self._levels_of_heads():
            entry = (self._decoders[level].output,)
            logits.append(self._project(head_of(level), entry, 0, config.outputs))
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
        at_image = self._project_gradient("encoder0_shortcut", block.entry, 0, at_sum, None)
        return at_first, at_image

    def _image_gradient(self, at_first: Value, at_shortcut: Optional[Value]) -> None:
        entry = self._encoders[0].entry
        at_image = self._input_gradient("encoder0_conv1", at_first, entry, 0)
        if at_shortcut is not None:
            self._add(at_image, at_shortcut)

    def _levels_of_heads(self) -> List[int]:
        """As the network's outputs are ordered."""
        coarser = range(self.config.depth - 2, 0, -1)
        return [0, *coarser] if self.config.deep_supervision else [0]

    def _below(self, level: int) -> Value:
        """The map that decoder `level` samples up."""
        if level + 1 in self._decoders:
            return self._decoders[level + 1].output
        return self._encoders[-1].output

    def _decoder(self, level: int) -> _Block:
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
            kernel = self._kernel_rows(f"{name}_conv1", entry, index)
            maps = (entry[index],)
            is_whole = index == ups
            total = self._convolve(
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
    ) -> _Block:
        """The convolutions of a block, but the `first` if that is there, and its residual's sum."""
        sums = self._sums(name, entry, widths, again, first)
        if not self.config.residual:
            return _Block(name, entry, sums, sums[-1])
        shortcut = f"{name}_shortcut"
        total = self._project(shortcut, entry, 0, widths[-1], block=name)
        for index in range(1, len(entry)):
            total = self._project(shortcut, entry, index, widths[-1], block=name, add=total)
        return _Block(name, entry, sums, self._residual_sum(name, sums[-1], total, again))

    def _sums(
        self, name: str, entry: Maps, widths: Sequence[int], again: bool, first: Optional[Value]
    ) -> Maps:
        sums = given(first)
        for index in range(len(sums), len(widths)):
            maps = entry
            if sums:
                maps = sums[-1:]
            made = self._convolve(name, index + 1, maps, widths[index], again=again)
            sums = (*sums, made)
        return sums

    def _block_again(self, level: int) -> _Block:
        """An encoder's block whose sums a gradient reads."""
        block = self._encoders[level]
        name = f"encoder{level}"
        widths = self.config.encoder_widths(level)
        if not self.is_lean:
            return block
        if level == 0:
            return self._block(name, block.entry, widths, again=True)
        sums = self._sums(name, block.entry, widths[:-1], True, first=None)
        return _Block(name, block.entry, (*sums, block.sums[-1]), block.output)

    def _through_head(self, level: int, slope: Value, at: Optional[Value]) -> Value:
        block = self._decoders[level]
        if at is None and not self.config.residual:  # memory is at its peak: over the raw sum
            return self._project_to_raw(block, slope)
        return self._project_gradient(head_of(level), (block.output,), 0, slope, at)

    def _through_decoder(self, level: int, at: Value) -> Tuple[Value, Value]:
        """Gradients of the values of the skip and of the level below."""
        name = f"decoder{level}"
        block = self._decoders[level]
        at_first, at_sum = self._through_block(block, at)
        if self.is_lean:
            return self._through_parts(level, self._to_raw(block, at_first), at_sum)
        for index in range(len(block.entry)):  # now: not into the memory that the next map leaves
            self._kernel_rows(f"{name}_conv1", block.entry, index)
        self._filter_gradient(f"{name}_conv1", block.entry, at_first)
        at_up = self._at_entry(name, block.entry, 1, at_first, at_sum)
        # Now, as the block's last maps go with it.
        at_skip = self._at_entry(name, block.entry, 0, at_first, at_sum)
        of_up, at_below = self._up_gradients(level, 0, at_up)
        self._join_gradients(self._up_layer(level), [of_up])
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
        of_parts = [self._filter_gradient(convolution, entry, at_first, "/skip")]
        of_ups = []
        at_below: List[Value] = []  # the sum over the parts so far, last
        for index in range(len(self.config.up_parts(level))):
            up = self._up(level, index, again=True)
            entry += (up,)
            of_parts.append(self._filter_gradient(convolution, (up,), at_first, f"/up{index}"))
            at_up = self._at_entry(name, entry, index + 1, at_first, at_sum)
            of_up, at_part = self._up_gradients(level, index, at_up)
            of_ups.append(of_up)
            if at_below:
                at_part = self._add(at_part, at_below[-1])
            at_below.append(at_part)
        self._join_gradients(convolution, of_parts)
        self._join_gradients(self._up_layer(level), of_ups)
        return self._at_entry(name, entry, 0, at_first, at_sum), at_below[-1]

    def _through_encoder(
        self, level: int, at: Value, at_skips: Dict[int, Value]
    ) -> Tuple[_Block, Value, Optional[Value]]:
        """The block, and what `_through_block` returns: from the gradient of what the level below
        reads of it, or of the deepest block's values."""
        name = f"encoder{level}"
        block = self._encoders[level]
        if level in at_skips:
            block = self._block_again(level)
            at = self._max_pool_gradient(level, block.output, at, at_skips.pop(level))
        at_first, at_sum = self._through_block(block, at)
        self._filter_gradient(f"{name}_conv1", block.entry, at_first)
        return block, at_first, at_sum

    def _through_block(self, block: _Block, at: Value) -> Tuple[Value, Optional[Value]]:
        """Gradients of the first convolution's raw sum, and of the residual's sum, which is None
        without."""
        at_sum = None
        if self.config.residual:
            at = self._residual_gradient(block, at)
            at_sum = at
        for number in range(len(block.sums), 1, -1):
            layer = f"{block.name}_conv{number}"
            source = (block.sums[number - 2],)
            at_raw = self._norm_gradient(block, number, at)
            self._filter_gradient(layer, source, at_raw)
            at = self._input_gradient(layer, at_raw, source, 0, sums=True)
        return self._norm_gradient(block, 1, at), at_sum

    def _at_entry(
        self, name: str, entry: Maps, index: int, at_first: Value, at_sum: Optional[Value]
    ) -> Value:
        """The gradient of the values of one map of a block's entry."""
        at_values = self._input_gradient(f"{name}_conv1", at_first, entry, index)
        if at_sum is None:
            return at_values
        return self._project_gradient(f"{name}_shortcut", entry, index, at_sum, at_values)

    # --- Single operations: forward ---

    def _convolve(
        self,
        block: str,
        number: int,
        maps: Maps,
        width: int,
        *,
        kernel: Optional[Value] = None,
        add: Optional[Value] = None,
        is_whole: bool = True,
        again: bool = False,
    ) -> Value:
        """A convolution of a block, by its number from 1 on; by a part of its `kernel`, whose sum
        is `is_whole` with the last part, and has a norm then."""
        layer = f"{block}_conv{number}"
        if kernel is None:
            kernel = kernel_of(layer)
        norm = ""
        has_relu = False
        if is_whole:
            norm = self._norm_of(block, number)
            has_relu = not self._is_before_sum(number)
        return self._emit(
            Kind.CONVOLVE,
            layer,
            self._value(layer, Form.MAP, maps[0].level, width),
            maps=maps,
            kernel=kernel,
            add=add,
            block=block,
            norm=norm,
            has_relu=has_relu,
            over=(*given(add), *maps)[:1],
            kept=not again,
            again=again,
        )

    def _max_pool(self, level: int, source: Value) -> Value:
        layer = f"encoder{level}_pool"
        made = self._value(layer, Form.MAP, level, source.channels)
        strides = self.config.stride(level - 1)
        return self._emit(Kind.MAX_POOL, layer, made, maps=(source,), strides=strides, kept=True)

    def _up(self, level: int, index: int, again: bool) -> Value:
        layer = self._up_layer(level)
        first, past = self.config.up_parts(level)[index]
        made = self._value(layer, Form.MAP, level, past - first)
        maps = (self._below(level),)
        kernel = self._up_kernel(level, index)
        return self._emit(
            Kind.UP_CONVOLVE,
            layer,
            made,
            maps=maps,
            kernel=kernel,
            strides=self.config.stride(level),
            kept=not again,
            again=again,
        )

    def _project(
        self,
        name: str,
        entry: Maps,
        index: int,
        width: int,
        block: str = "",
        add: Optional[Value] = None,
    ) -> Value:
        return self._emit(
            Kind.PROJECT,
            name,
            self._value(name, Form.MAP, entry[index].level, width),
            maps=(entry[index],),
            kernel=self._kernel_rows(name, entry, index),
            add=add,
            block=block,
            over=given(add),
        )

    def _residual_sum(self, name: str, last: Value, total: Value, again: bool) -> Value:
        layer = f"{name}_act{self.config.convolutions}"
        return self._emit(
            Kind.RESIDUAL_SUM,
            layer,
            self._value(layer, Form.MAP, last.level, last.channels),
            maps=(last,),
            add=total,
            block=name,
            over=(total,),
            kept=not again,
            again=again,
        )

    # --- Single operations: backward ---

    def _max_pool_gradient(self, level: int, source: Value, at: Value, add: Value) -> Value:
        layer = f"encoder{level}_pool"
        made = self._gradient(layer, source)
        return self._emit(
            Kind.MAX_POOL_GRADIENT,
            layer,
            made,
            maps=(source,),
            gradient=at,
            add=add,
            strides=self.config.stride(level),
            over=(add,),
        )

    def _up_gradients(self, level: int, index: int, at: Value) -> Tuple[Value, Value]:
        """Of the filters, and of the values of the level below."""
        layer = self._up_layer(level)
        both = {
            "maps": (self._below(level),),
            "gradient": at,
            "strides": self.config.stride(level),
        }
        of_up = self._value(f"{layer}/filter_gradient", Form.KERNEL_GRADIENT)
        self._emit(Kind.UP_FILTER_GRADIENT, layer, of_up, **both)
        at_below = self._gradient(layer, self._below(level))
        kernel = self._up_kernel(level, index)
        self._emit(Kind.UP_INPUT_GRADIENT, layer, at_below, **both, kernel=kernel)
        return of_up, at_below

    def _add(self, at: Value, add: Value) -> Value:
        made = self._value(f"{at.name}/sum", Form.GRADIENT, at.level, at.channels)
        return self._emit(Kind.ADD, "", made, gradient=at, add=add, over=(at, add))

    def _project_gradient(
        self, name: str, entry: Maps, index: int, at: Value, add: Optional[Value]
    ) -> Value:
        source = entry[index]
        return self._emit(
            Kind.PROJECT_GRADIENT,
            name,
            self._gradient(name, source),
            self._of_kernel(name),
            maps=(source,),
            gradient=at,
            add=add,
            kernel=self._kernel_rows(name, entry, index),
            over=given(add),
            span=_span_of(entry, index),
        )

    def _project_to_raw(self, block: _Block, at: Value) -> Value:
        """Of the finest head: first come the sums that the norm needs."""
        maps = (block.output,)
        kernel = kernel_of("head")
        sums = self._value("head/sums", Form.GRADIENT, maps[0].level, maps[0].channels)
        makes = (sums, self._of_kernel("head"))
        self._emit(Kind.PROJECT_SUMS, "head", *makes, maps=maps, gradient=at, kernel=kernel)
        at = self._norm_gradient(block, len(block.sums), sums)
        made = self._gradient("head", maps[0], Form.RAW_GRADIENT)
        return self._emit(
            Kind.PROJECT_TO_RAW, "head", made, maps=maps, gradient=at, kernel=kernel, over=maps
        )

    def _residual_gradient(self, block: _Block, at: Value) -> Value:
        layer = f"{block.name}_act{len(block.sums)}"
        made = self._gradient(layer, at)
        maps = (block.sums[-1], block.output)
        return self._emit(Kind.RESIDUAL_GRADIENT, layer, made, maps=maps, gradient=at, over=(at,))

    def _norm_gradient(self, block: _Block, number: int, at: Value) -> Value:
        """The gradient of a raw sum, to be formed on reading, from that of its values."""
        if at.form is Form.RAW_GRADIENT:
            return at
        source = block.sums[number - 1]
        layer = self._norm_of(block.name, number)
        made = self._gradient(layer, source, Form.FORMED_GRADIENT)
        return self._emit(Kind.NORM_GRADIENT, layer, made, maps=(source,), gradient=at)

    def _to_raw(self, block: _Block, at: Value) -> Value:
        """A first convolution's formed gradient as a map of its own, over the raw sum."""
        source = block.sums[0]
        layer = f"{block.name}_conv1"
        made = self._value(f"{layer}/to_raw", Form.RAW_GRADIENT, source.level, source.channels)
        return self._emit(Kind.TO_RAW, layer, made, gradient=at, over=(source,))

    def _input_gradient(
        self, name: str, at: Value, entry: Maps, index: int, sums: bool = False
    ) -> Value:
        made = self._gradient(name, entry[index])
        maps: Maps = ()
        if sums:  # of the norm of the map
            maps = (entry[index],)
        kernel = self._kernel_rows(name, entry, index)
        return self._emit(
            Kind.INPUT_GRADIENT, name, made, maps=maps, gradient=at, kernel=kernel, over=(at,)
        )

    def _filter_gradient(self, name: str, entry: Maps, at: Value, of_part: str = "") -> Value:
        made = self._of_kernel(name, of_part)
        return self._emit(Kind.FILTER_GRADIENT, name, made, maps=entry, gradient=at)

    def _join_gradients(self, name: str, parts: Sequence[Value]) -> None:
        self._emit(Kind.JOIN_GRADIENTS, name, self._of_kernel(name), parts=tuple(parts))

    # --- Kernels ---

    def _of_kernel(self, name: str, of_part: str = "") -> Value:
        """The gradient of a layer's kernel: the last that is made is the whole one."""
        made = self._value(f"{name}/filter_gradient{of_part}", Form.KERNEL_GRADIENT)
        self._kernel_gradients[name] = made
        return made

    def _kernel_rows(self, name: str, entry: Maps, index: int) -> Value:
        """A layer's kernel, or the rows that one map of its block's entry meets: a copy, made when
        it is first read."""
        if name not in self._joined:
            return kernel_of(name)
        return self._kernel_part(Kind.KERNEL_ROWS, name, index, _span_of(entry, index))

    def _up_kernel(self, level: int, index: int) -> Value:
        parts = self.config.up_parts(level)
        name = self._up_layer(level)
        if self.config.up == "upsampling":
            strides = self.config.stride(level)
            return self._kernel_part(Kind.KERNEL_TAPS, name, index, parts[index], strides=strides)
        if len(parts) == 1:
            return kernel_of(name)
        return self._kernel_part(Kind.KERNEL_ROWS, name, index, parts[index])

    def _kernel_part(
        self, kind: Kind, name: str, index: int, span: Tuple[int, int], **more: Any
    ) -> Value:
        if (name, index) not in self._kernels:
            made = self._value(f"{name}/kernel{index}", Form.KERNEL, channels=span[1] - span[0])
            self._kernels[name, index] = made
            self._emit(kind, name, made, kernel=kernel_of(name), span=span, **more)
        return self._kernels[name, index]

    # --- Names ---

    def _norm_of(self, block: str, number: int) -> str:
        """The layer after a convolution: norm and ReLU, or before a residual's sum the norm
        alone."""
        if self._is_before_sum(number):
            return f"{block}_norm{number}"
        return f"{block}_act{number}"

    def _is_before_sum(self, number: int) -> bool:
        """Whether a residual's sum follows the convolution of this number."""
        return self.config.residual and number == self.config.convolutions

    def _up_layer(self, level: int) -> str:
        name = f"decoder{level}_up"
        return name if self.config.up == "transposed" else f"{name}_conv"

    def _value(self, name: str, form: Form, level: int = 0, channels: int = 0) -> Value:
        """A value under a name of its own."""
        return Value(self._names.unique(name), form, level, channels)

    def _gradient(self, layer: str, like: Value, form: Form = Form.GRADIENT) -> Value:
        """That which a layer makes, of a map."""
        return self._value(f"{layer}/gradient", form, like.level, like.channels)

    def _emit(self, kind: Kind, layer: str, *makes: Value, **more: Any) -> Value:
        self._ops.append(Op(kind, layer, makes, **more))
        return makes[0]

    def _taken(self) -> Tuple[Op, ...]:
        """The operations since the last call."""
        ops = tuple(self._ops)
        self._ops = []
        return ops


def _span_of(entry: Maps, index: int) -> Tuple[int, int]:
    """The rows of a kernel that one of several maps meets: the first, and the one past them."""
    first = sum(value.channels for value in entry[:index])
    return first, first + entry[index].channels
