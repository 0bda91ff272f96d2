"""Single operations of a U-Net, as models/program.py lists them: what each reads, makes and writes
over, by the blocks of a network's levels. No TensorFlow.

models/network.py has their order.
"""

from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Sequence, Set, Tuple

from models.config import UNetConfig
from models.program import Kind, Op, UniqueNames, Value, ValueKind, given, kernel_of
from models.strides import strides_text

Maps = Tuple[Value, ...]


@dataclass(frozen=True)
class Block:
    """Maps that the convolutions of a level's block read and make."""

    name: str  # such as "encoder0"
    entry: Maps  # one map, or the skip's and the parts of the up-sampled one
    sums: Maps  # of each convolution
    output: Value  # the last of them, but with a residual's sum a map of its own


class Emitter:
    """Writes operations down, in the order in which it is asked for them."""

    def __init__(self, config: UNetConfig):
        self.config = config
        self.kernel_gradients: Dict[str, Value] = {}  # by the layers that have the kernels
        self._ops: List[Op] = []
        self._names = UniqueNames()
        self._kernels: Dict[Tuple[str, int], Value] = {}
        self._joined: Set[str] = set()
        """Layers that read several maps side by side: each map meets its rows of the kernel."""
        for level in range(config.depth - 1):
            self._joined |= {f"decoder{level}_conv1", f"decoder{level}_shortcut"}

    # --- Forward ---

    def convolve(
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
        return self._emit_map(
            Kind.CONVOLVE,
            layer,
            maps[0].level,
            width,
            maps=maps,
            kernel=kernel,
            add=add,
            block=block,
            norm=norm,
            has_relu=has_relu,
            over=(*given(add), *maps)[:1],
            again=again,
        )

    def max_pool(self, level: int, source: Value) -> Value:
        strides = self.config.stride(level - 1)
        layer = f"encoder{level}_pool"
        return self._emit_map(
            Kind.MAX_POOL, layer, level, source.channels, maps=(source,), strides=strides
        )

    def up(self, level: int, index: int, below: Value, again: bool) -> Value:
        first, past = self.config.up_parts(level)[index]
        return self._emit_map(
            Kind.UP_CONVOLVE,
            self.up_layer(level),
            level,
            past - first,
            maps=(below,),
            kernel=self._up_kernel(level, index),
            strides=self.config.stride(level),
            again=again,
        )

    def project(
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
            self._value(name, ValueKind.MAP, entry[index].level, width),
            maps=(entry[index],),
            kernel=self.kernel_rows(name, entry, index),
            add=add,
            block=block,
            over=given(add),
        )

    def residual_sum(self, name: str, last: Value, total: Value, again: bool) -> Value:
        return self._emit_map(
            Kind.RESIDUAL_SUM,
            f"{name}_act{self.config.convolutions}",
            last.level,
            last.channels,
            maps=(last,),
            add=total,
            block=name,
            over=(total,),
            again=again,
        )

    def plain(self, name: str, operation: str, maps: Maps, width: int) -> Value:
        """An operation of models/plain.py."""
        return self._emit_map(Kind.PLAIN, name, maps[0].level, width, maps=maps, plain=operation)

    def resize(self, name: str, level: int, source: Value) -> Value:
        """Emit "average" or "interpolate", from level 0 or the image's to the other `level`."""
        strides = self.config.average
        more: Dict[str, Any] = {"plain": self._resizing(name), "strides": strides}
        return self._emit_map(Kind.PLAIN, name, level, source.channels, maps=(source,), **more)

    # --- Backward ---

    def plain_gradients(self, name: str, operation: str, maps: Maps, grad: Value) -> Maps:
        """Of the values of each map."""
        makes = tuple(self._gradient(name, each) for each in maps)
        self._emit(Kind.PLAIN_GRADIENT, name, *makes, maps=maps, gradient=grad, plain=operation)
        return makes

    def resize_gradient(self, name: str, source: Value, grad: Value) -> Value:
        return self.plain_gradients(name, self._resizing(name), (source,), grad)[0]

    def _resizing(self, name: str) -> str:
        """The name in models/plain.py."""
        return f"{name} {strides_text((self.config.average,))}"

    def max_pool_gradient(self, level: int, source: Value, grad: Value, add: Value) -> Value:
        layer = f"encoder{level}_pool"
        made = self._gradient(layer, source)
        return self._emit(
            Kind.MAX_POOL_GRADIENT,
            layer,
            made,
            maps=(source,),
            gradient=grad,
            add=add,
            strides=self.config.stride(level),
            over=(add,),
        )

    def up_gradients(
        self, level: int, index: int, below: Value, grad: Value
    ) -> Tuple[Value, Value]:
        """Of the filters, and of the values of the level below."""
        layer = self.up_layer(level)
        both = {"maps": (below,), "gradient": grad, "strides": self.config.stride(level)}
        grad_kernel = self._value(f"{layer}/filter_gradient", ValueKind.KERNEL_GRADIENT)
        self._emit(Kind.UP_FILTER_GRADIENT, layer, grad_kernel, **both)
        kernel = self._up_kernel(level, index)
        grad_below = self._gradient(layer, below)
        return grad_kernel, self._emit(
            Kind.UP_INPUT_GRADIENT, layer, grad_below, **both, kernel=kernel
        )

    def add(self, grad: Value, add: Value) -> Value:
        made = self._value(f"{grad.name}/sum", ValueKind.GRADIENT, grad.level, grad.channels)
        return self._emit(Kind.ADD, "", made, gradient=grad, add=add, over=(grad, add))

    def project_gradient(
        self, name: str, entry: Maps, index: int, grad: Value, add: Optional[Value]
    ) -> Value:
        source = entry[index]
        return self._emit(
            Kind.PROJECT_GRADIENT,
            name,
            self._gradient(name, source),
            self._kernel_gradient(name),
            maps=(source,),
            gradient=grad,
            add=add,
            kernel=self.kernel_rows(name, entry, index),
            over=given(add),
            span=_span_of(entry, index),
        )

    def project_to_raw(self, block: Block, grad: Value) -> Value:
        """Of the finest head: first come the sums that the norm needs."""
        maps = (block.output,)
        kernel = kernel_of("head")
        sums = self._value("head/sums", ValueKind.GRADIENT, maps[0].level, maps[0].channels)
        makes = (sums, self._kernel_gradient("head"))
        self._emit(Kind.PROJECT_SUMS, "head", *makes, maps=maps, gradient=grad, kernel=kernel)
        grad = self.norm_gradient(block, len(block.sums), sums)
        made = self._gradient("head", maps[0], ValueKind.RAW_GRADIENT)
        return self._emit(
            Kind.PROJECT_TO_RAW, "head", made, maps=maps, gradient=grad, kernel=kernel, over=maps
        )

    def residual_gradient(self, block: Block, grad: Value) -> Value:
        layer = f"{block.name}_act{len(block.sums)}"
        made = self._gradient(layer, grad)
        maps = (block.sums[-1], block.output)
        return self._emit(
            Kind.RESIDUAL_GRADIENT, layer, made, maps=maps, gradient=grad, over=(grad,)
        )

    def norm_gradient(self, block: Block, number: int, grad: Value) -> Value:
        """The gradient of a raw sum, to be formed on reading, from that of its values."""
        if grad.kind is ValueKind.RAW_GRADIENT:
            return grad
        source = block.sums[number - 1]
        layer = self._norm_of(block.name, number)
        made = self._gradient(layer, source, ValueKind.FORMED_GRADIENT)
        return self._emit(Kind.NORM_GRADIENT, layer, made, maps=(source,), gradient=grad)

    def to_raw(self, block: Block, grad: Value) -> Value:
        """A first convolution's formed gradient as a map of its own, over the raw sum."""
        source = block.sums[0]
        layer = f"{block.name}_conv1"
        made = self._value(f"{layer}/to_raw", ValueKind.RAW_GRADIENT, source.level, source.channels)
        return self._emit(Kind.TO_RAW, layer, made, gradient=grad, over=(source,))

    def input_gradient(
        self, name: str, grad: Value, entry: Maps, index: int, sums: bool = False
    ) -> Value:
        made = self._gradient(name, entry[index])
        maps: Maps = ()
        if sums:  # of the norm of the map
            maps = (entry[index],)
        kernel = self.kernel_rows(name, entry, index)
        return self._emit(
            Kind.INPUT_GRADIENT, name, made, maps=maps, gradient=grad, kernel=kernel, over=(grad,)
        )

    def filter_gradient(self, name: str, entry: Maps, grad: Value, part: str = "") -> Value:
        made = self._kernel_gradient(name, part)
        return self._emit(Kind.FILTER_GRADIENT, name, made, maps=entry, gradient=grad)

    def join_gradients(self, name: str, parts: Sequence[Value]) -> None:
        self._emit(Kind.JOIN_GRADIENTS, name, self._kernel_gradient(name), parts=tuple(parts))

    # --- Kernels ---

    def _kernel_gradient(self, name: str, part: str = "") -> Value:
        """The gradient of a layer's kernel: the last that is made is the whole one."""
        made = self._value(f"{name}/filter_gradient{part}", ValueKind.KERNEL_GRADIENT)
        self.kernel_gradients[name] = made
        return made

    def kernel_rows(self, name: str, entry: Maps, index: int) -> Value:
        """A layer's kernel, or the rows that one map of its block's entry meets: a copy, made when
        it is first read."""
        if name not in self._joined:
            return kernel_of(name)
        return self._kernel_part(Kind.KERNEL_ROWS, name, index, _span_of(entry, index))

    def _up_kernel(self, level: int, index: int) -> Value:
        parts = self.config.up_parts(level)
        name = self.up_layer(level)
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
            made = self._value(
                f"{name}/kernel{index}", ValueKind.KERNEL, channels=span[1] - span[0]
            )
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

    def up_layer(self, level: int) -> str:
        name = f"decoder{level}_up"
        return name if self.config.up == "transposed" else f"{name}_conv"

    def _value(self, name: str, kind: ValueKind, level: int = 0, channels: int = 0) -> Value:
        """A value under a name of its own."""
        return Value(self._names.unique(name), kind, level, channels)

    def _gradient(self, layer: str, like: Value, kind: ValueKind = ValueKind.GRADIENT) -> Value:
        """That which a layer makes, of a map."""
        return self._value(f"{layer}/gradient", kind, like.level, like.channels)

    def _emit_map(
        self, kind: Kind, layer: str, level: int, channels: int, again: bool = False, **more: Any
    ) -> Value:
        """A map that a layer makes, and that is kept unless it is made again."""
        made = self._value(layer, ValueKind.MAP, level, channels)
        return self._emit(kind, layer, made, kept=not again, again=again, **more)

    def _emit(self, kind: Kind, layer: str, *makes: Value, **more: Any) -> Value:
        self._ops.append(Op(kind, layer, makes, **more))
        return makes[0]

    def taken(self) -> Tuple[Op, ...]:
        """The operations since the last call."""
        ops = tuple(self._ops)
        self._ops = []
        return ops


def _span_of(entry: Maps, index: int) -> Tuple[int, int]:
    """The rows of a kernel that one of several maps meets: the first, and the one past them."""
    first = sum(value.channels for value in entry[:index])
    return first, first + entry[index].channels
