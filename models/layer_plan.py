"""The layers of a network: name, shape, parameters and work of each, in the order they run, as the
forward operations of models/program.py have them. No TensorFlow.

The Keras model, the memory estimator and the exporter are made from it.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Tuple

from models.config import UNetConfig
from models.network import network_program
from models.program import Kind, Op, Value
from models.strides import Shape3


@dataclass(frozen=True)
class LayerOp:
    """One layer of the network."""

    name: str  # the Keras layer's name, such as "encoder0_conv1"
    kind: str
    """ "input", "conv", "norm_act" (norm and ReLU), "norm", "act", "pool", "up_conv", "upsample",
    "concat", "shortcut" (a residual block's sum), or "head"."""
    inputs: Tuple[str, ...]  # names of the layers whose outputs it reads
    level: int  # resolution level of its output, 0 is the finest
    shape: Tuple[int, int, int, int]  # of its output for one sample: (X, Y, Z, C)
    kernel: Tuple[int, ...] = ()  # sides of the convolution kernel in voxels; () without one
    # of a pool or an up-sampling, voxels of the finer grid along X, Y, Z for one of the coarser
    strides: Shape3 = (1, 1, 1)
    in_channels: int = 0  # channels of a convolution's input
    trainable: int = 0  # trainable parameters
    # parameters that training moves but does not differentiate (batch norm's moving statistics)
    frozen: int = 0

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def flops(self) -> int:
        """Operations of its forward pass for one sample, a multiply-add counted as 2; of
        convolutions alone, as the rest is limited by memory traffic. An up-convolution costs one
        kernel tap per output voxel."""
        if self.kind in ("conv", "head", "shortcut"):
            return 2 * math.prod(self.kernel) * self.in_channels * self.elements
        if self.kind == "up_conv":
            return 2 * self.in_channels * self.elements
        return 0


def layer_plan(config: UNetConfig, shape: Shape3) -> Tuple[LayerOp, ...]:
    """The layers of `build_unet3d(config, shape)` in the order they run, for an image of `shape`
    (X, Y, Z). Raises ValueError when the shape does not divide."""
    config.check_shape(shape)
    every_map = dataclasses.replace(config, policy="speed")  # whole, and computed once
    program = network_program(every_map)
    layers = _Layers(config, shape)
    layers.made[program.image] = layers.add("image", "input", (), 0, config.channels)
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
    image = plan[0].name
    return batch * sum(op.flops * (2 if image in op.inputs else 3) for op in plan)


# --- Private helpers ---


class _Layers:
    """Collects the layers; knows the shape of each level."""

    def __init__(self, config: UNetConfig, shape: Shape3):
        self.config = config
        self.shape = shape
        self.ops: List[LayerOp] = []
        self.made: Dict[Value, LayerOp] = {}  # the layer whose output a value is
        self._entries: Dict[Tuple[Value, ...], LayerOp] = {}

    def add(
        self,
        name: str,
        kind: str,
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
        self, name: str, kind: str, x: LayerOp, level: int, channels: int, side: int
    ) -> LayerOp:
        fan_in = x.shape[3]
        weights = side**3 * fan_in * channels
        if kind == "head":
            weights += channels  # its bias
        more = {"kernel": 3 * (side,), "in_channels": fan_in, "trainable": weights}
        return self.add(name, kind, (x,), level, channels, **more)

    def entry(self, op: Op) -> LayerOp:
        """The layer that a convolution reads: of several maps one that puts them side by side."""
        if len(op.maps) == 1:
            return self.made[op.maps[0]]
        if op.maps not in self._entries:
            inputs = tuple(self.made[each] for each in op.maps)
            block = op.layer.rpartition("_")[0]
            channels = sum(layer.shape[3] for layer in inputs)
            joined = self.add(f"{block}_concat", "concat", inputs, op.made.level, channels)
            self._entries[op.maps] = joined
        return self._entries[op.maps]


def _convolve(layers: _Layers, op: Op) -> LayerOp:
    """With its norm: scale and shift train, or the shift alone; batch norm's moving mean and
    variance do not. A ReLU belongs to the norm, or follows a residual's sum."""
    channels = op.made.channels
    level = op.made.level
    x = layers.convolution(op.layer, "conv", layers.entry(op), level, channels, side=3)
    norm = layers.config.norm
    trainable = channels if norm == "none" else 2 * channels
    frozen = 2 * channels if norm == "batch" else 0
    kind = "norm_act" if "_act" in op.norm else "norm"
    return layers.add(op.norm, kind, (x,), level, channels, trainable=trainable, frozen=frozen)


def _max_pool(layers: _Layers, op: Op) -> LayerOp:
    source = layers.made[op.maps[0]]
    level = op.made.level
    return layers.add(op.layer, "pool", (source,), level, op.made.channels, strides=op.strides)


def _up_convolve(layers: _Layers, op: Op) -> LayerOp:
    below = layers.made[op.maps[0]]
    level = op.made.level
    width = op.made.channels
    strides = op.strides
    if layers.config.up == "transposed":
        fan_in = below.shape[3]
        weights = math.prod(strides) * fan_in * width
        more = {"kernel": strides, "in_channels": fan_in, "trainable": weights}
        return layers.add(op.layer, "up_conv", (below,), level, width, strides=strides, **more)
    # The 1x1x1 convolution and nearest-neighbour copying commute; on the coarse grid it costs an
    # eighth, where all axes are halved.
    x = layers.convolution(op.layer, "conv", below, level + 1, width, side=1)
    return layers.add(f"decoder{level}_up", "upsample", (x,), level, width, strides=strides)


def _project(layers: _Layers, op: Op) -> Optional[LayerOp]:
    if not op.layer.startswith("head"):  # a shortcut, which is one layer with its sum
        return None
    source = layers.made[op.maps[0]]
    return layers.convolution(op.layer, "head", source, op.made.level, op.made.channels, side=1)


def _residual_sum(layers: _Layers, op: Op) -> LayerOp:
    last = layers.made[op.maps[0]]
    block = op.layer.rpartition("_")[0]
    entry = _entry_of(layers, block)
    width = last.shape[3]
    weights = entry.shape[3] * width
    more = {"kernel": (1, 1, 1), "in_channels": entry.shape[3], "trainable": weights}
    x = layers.add(f"{block}_shortcut", "shortcut", (last, entry), last.level, width, **more)
    return layers.add(op.layer, "act", (x,), last.level, width)


def _entry_of(layers: _Layers, block: str) -> LayerOp:
    """The layer that a block's first convolution reads."""
    by_name = {layer.name: layer for layer in layers.ops}
    return by_name[by_name[f"{block}_conv1"].inputs[0]]


LAYERS: Dict[Kind, Callable[[_Layers, Op], Optional[LayerOp]]] = {
    Kind.CONVOLVE: _convolve,
    Kind.MAX_POOL: _max_pool,
    Kind.UP_CONVOLVE: _up_convolve,
    Kind.PROJECT: _project,
    Kind.RESIDUAL_SUM: _residual_sum,
    Kind.KERNEL_ROWS: lambda layers, op: None,  # no layers, but parts of a kernel
    Kind.KERNEL_TAPS: lambda layers, op: None,
}
"""Kind of a forward operation -> the layers that it is; returns the one whose output it makes."""
