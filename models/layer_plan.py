"""The layers of a network: name, shape, parameters and work of each, in the order they run, as the
forward operations of models/program.py have them. No TensorFlow.

The Keras model, the memory estimator and the exporter are made from it.
"""

import dataclasses
import math
from dataclasses import dataclass
from enum import Enum
from typing import Any, Callable, Dict, List, Optional, Tuple

from models.config import NORMS, UNetConfig
from models.network import network_program
from models.plain import PLAIN
from models.program import Kind, Op, Value
from models.strides import Shape3


class LayerKind(Enum):
    """What a layer does."""

    INPUT = "input"
    CONV = "conv"
    NORM = "norm"
    NORM_ACT = "norm_act"  # norm and ReLU
    ACT = "act"
    POOL = "pool"
    UP_CONV = "up_conv"
    UPSAMPLE = "upsample"
    CONCAT = "concat"
    SHORTCUT = "shortcut"  # a residual block's sum
    HEAD = "head"
    PLAIN = "plain"  # of models/plain.py


NORM_KINDS = (LayerKind.NORM, LayerKind.NORM_ACT)


@dataclass(frozen=True)
class LayerOp:
    """One layer of the network."""

    name: str  # the Keras layer's name, such as "encoder0_conv1"
    kind: LayerKind
    inputs: Tuple[str, ...]  # names of the layers whose outputs it reads
    level: int  # resolution level of its output, 0 is the finest, or IMAGE_LEVEL
    shape: Tuple[int, int, int, int]  # of its output for one sample: (X, Y, Z, C)
    kernel: Tuple[int, ...] = ()  # sides of the convolution kernel in voxels; () without one
    # of a pool or an up-sampling, voxels of the finer grid along X, Y, Z for one of the coarser
    strides: Shape3 = (1, 1, 1)
    in_channels: int = 0  # channels of a convolution's input
    trainable: int = 0  # trainable parameters
    # parameters that training moves but does not differentiate (batch norm's moving statistics)
    frozen: int = 0
    plain: str = ""  # name of its operation in models/plain.py
    weights: Tuple[Tuple[str, Tuple[int, ...]], ...] = ()  # of that: name, shape

    @property
    def has_gradient(self) -> bool:
        """Whether training asks for the gradient of its output: not of the image, nor of its
        averages."""
        return self.name not in ("image", "average")

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def flops(self) -> int:
        """Operations of its forward pass for one sample, a multiply-add counted as 2; of
        convolutions alone, as the rest is limited by memory traffic. An up-convolution costs one
        kernel tap per output voxel."""
        if not self.kernel:
            return 0
        taps = 1 if self.kind is LayerKind.UP_CONV else math.prod(self.kernel)
        return 2 * taps * self.in_channels * self.elements

    @property
    def kernel_shape(self) -> Tuple[int, ...]:
        """(X, Y, Z, in, out), of a transposed convolution (X, Y, Z, out, in); () without one."""
        if not self.kernel:
            return ()
        read = self.in_channels
        made = self.shape[3]
        if self.kind is LayerKind.UP_CONV:
            return (*self.kernel, made, read)
        return (*self.kernel, read, made)

    @property
    def kernel_elements(self) -> int:
        """Weights of a layer's kernel, without a bias."""
        return math.prod(self.kernel_shape) if self.kernel else 0


def layer_plan(config: UNetConfig, shape: Shape3) -> Tuple[LayerOp, ...]:
    """The layers of `build_unet3d(config, shape)` in the order they run, for an image of `shape`
    (X, Y, Z). Raises ValueError when the shape does not divide."""
    config.check_shape(shape)
    every_map = dataclasses.replace(config, policy="speed")  # whole, and computed once
    program = network_program(every_map)
    layers = _Layers(config, shape)
    layers.made[program.image] = layers.add(
        "image", LayerKind.INPUT, (), config.image_level, config.channels
    )
    for op in program.forward:
        layer = LAYERS[op.kind](layers, op)
        if layer is not None:
            layers.made[op.made] = layer
    return tuple(layers.ops)


def training_flops(config: UNetConfig, shape: Shape3, batch: int = 1) -> int:
    """Floating-point operations of a training step's convolutions, a multiply-add counted as 2.
    Forward pass, filter and input gradient cost the same; the first layer has no input gradient.
    Recomputation is not counted."""
    plan = layer_plan(config, shape)
    given = {op.name for op in plan if not op.has_gradient}
    of_image = sum(op.flops for op in plan if given & {*op.inputs})
    return batch * (3 * sum(op.flops for op in plan) - of_image)


# --- Private helpers ---


class _Layers:
    """Collects the layers; knows the shape of each level."""

    def __init__(self, config: UNetConfig, shape: Shape3):
        self.config = config
        self.shape = shape
        self.ops: List[LayerOp] = []
        self.made: Dict[Value, LayerOp] = {}  # the layer whose output a value is
        self.entries: Dict[str, LayerOp] = {}  # that the first convolution of a block reads

    def add(
        self,
        name: str,
        kind: LayerKind,
        inputs: Tuple[LayerOp, ...],
        level: int,
        channels: int,
        **more: Any,
    ) -> LayerOp:
        names = tuple(op.name for op in inputs)
        grid = self.config.grid(self.shape, level)
        op = LayerOp(name, kind, names, level, (*grid, channels), **more)
        self.ops.append(op)
        return op

    def convolution(
        self, name: str, kind: LayerKind, x: LayerOp, level: int, channels: int, side: int
    ) -> LayerOp:
        fan_in = x.shape[3]
        weights = side**3 * fan_in * channels
        if kind is LayerKind.HEAD:
            weights += channels  # its bias
        more = {"kernel": 3 * (side,), "in_channels": fan_in, "trainable": weights}
        return self.add(name, kind, (x,), level, channels, **more)

    def entry(self, op: Op) -> LayerOp:
        """The layer that a convolution reads: of several maps one that puts them side by side."""
        inputs = tuple(self.made[each] for each in op.maps)
        if len(inputs) == 1:
            return inputs[0]
        channels = sum(layer.shape[3] for layer in inputs)
        name = f"{op.block}_concat"
        return self.add(name, LayerKind.CONCAT, inputs, op.made.level, channels)


def _convolve(layers: _Layers, op: Op) -> LayerOp:
    """With its norm: scale and shift train, or the shift alone; batch norm's moving mean and
    variance do not. A ReLU belongs to the norm, or follows a residual's sum."""
    channels = op.made.channels
    level = op.made.level
    entry = layers.entry(op)
    layers.entries.setdefault(op.block, entry)
    x = layers.convolution(op.layer, LayerKind.CONV, entry, level, channels, side=3)
    weights = NORMS[layers.config.norm]
    return layers.add(
        op.norm,
        LayerKind.NORM_ACT if op.has_relu else LayerKind.NORM,
        (x,),
        level,
        channels,
        trainable=channels * len(weights.trained),
        frozen=channels * len(weights.moving),
    )


def _max_pool(layers: _Layers, op: Op) -> LayerOp:
    source = layers.made[op.maps[0]]
    made = op.made
    return layers.add(
        op.layer, LayerKind.POOL, (source,), made.level, made.channels, strides=op.strides
    )


def _up_convolve(layers: _Layers, op: Op) -> LayerOp:
    below = layers.made[op.maps[0]]
    level = op.made.level
    width = op.made.channels
    strides = op.strides
    if layers.config.up == "transposed":
        fan_in = below.shape[3]
        weights = math.prod(strides) * fan_in * width
        more = {"kernel": strides, "in_channels": fan_in, "trainable": weights}
        inputs = (below,)
        kind = LayerKind.UP_CONV
        return layers.add(op.layer, kind, inputs, level, width, strides=strides, **more)
    # The 1x1x1 convolution and nearest-neighbour copying commute; on the coarse grid it costs an
    # eighth, where all axes are halved.
    x = layers.convolution(op.layer, LayerKind.CONV, below, level + 1, width, side=1)
    name = f"decoder{level}_up"
    return layers.add(name, LayerKind.UPSAMPLE, (x,), level, width, strides=strides)


def _project(layers: _Layers, op: Op) -> Optional[LayerOp]:
    if op.block:  # its shortcut, which is one layer with the sum
        return None
    source = layers.made[op.maps[0]]
    made = op.made
    return layers.convolution(op.layer, LayerKind.HEAD, source, made.level, made.channels, side=1)


def _residual_sum(layers: _Layers, op: Op) -> LayerOp:
    last = layers.made[op.maps[0]]
    entry = layers.entries[op.block]
    width = last.shape[3]
    weights = entry.shape[3] * width
    more = {"kernel": (1, 1, 1), "in_channels": entry.shape[3], "trainable": weights}
    name = f"{op.block}_shortcut"
    x = layers.add(name, LayerKind.SHORTCUT, (last, entry), last.level, width, **more)
    return layers.add(op.layer, LayerKind.ACT, (x,), last.level, width)


def _plain(layers: _Layers, op: Op) -> LayerOp:
    inputs = tuple(layers.made[each] for each in op.maps)
    weights = PLAIN[op.plain].weights([layer.shape[3] for layer in inputs])
    return layers.add(
        op.layer,
        LayerKind.PLAIN,
        inputs,
        op.made.level,
        op.made.channels,
        strides=op.strides,
        trainable=sum(map(math.prod, weights.values())),
        plain=op.plain,
        weights=tuple(weights.items()),
    )


LAYERS: Dict[Kind, Callable[[_Layers, Op], Optional[LayerOp]]] = {
    Kind.CONVOLVE: _convolve,
    Kind.MAX_POOL: _max_pool,
    Kind.UP_CONVOLVE: _up_convolve,
    Kind.PROJECT: _project,
    Kind.RESIDUAL_SUM: _residual_sum,
    Kind.PLAIN: _plain,
    Kind.KERNEL_ROWS: lambda layers, op: None,  # no layers, but parts of a kernel
    Kind.KERNEL_TAPS: lambda layers, op: None,
}
"""Kind of a forward operation -> the layers that it is; returns the one whose output it makes."""
