"""The network on paper: every layer's name, shape, dtype, parameters and work, in the order it
runs. No TensorFlow.

The Keras model, the memory estimator and the exporter are made from it.
"""

import math
from dataclasses import dataclass
from typing import List, Tuple

from models.config import UNetConfig

Shape3 = Tuple[int, int, int]


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
    kernel: int = 0  # side of the convolution kernel in voxels; 0 without one
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
            return 2 * self.kernel**3 * self.in_channels * self.elements
        return 2 * self.in_channels * self.elements if self.kind == "up_conv" else 0


def layer_plan(config: UNetConfig, shape: Shape3) -> Tuple[LayerOp, ...]:
    """The layers of `build_unet3d(config, shape)` in the order they run, for an image of `shape`
    (X, Y, Z). Raises ValueError when the shape does not divide."""
    config.check_shape(shape)
    plan = _Plan(config, shape)
    x = plan.add("image", "input", (), 0, config.channels)
    skips = []
    for level in range(config.depth):
        if level:
            x = plan.add(f"encoder{level}_pool", "pool", (x,), level, x.shape[3])
        x = plan.block(f"encoder{level}", x, level, config.encoder_widths(level))
        skips.append(x)
    deep_heads = []
    for level in reversed(range(config.depth - 1)):
        up = plan.up(x, level)
        channels = skips[level].shape[3] + up.shape[3]
        x = plan.add(f"decoder{level}_concat", "concat", (skips[level], up), level, channels)
        x = plan.block(f"decoder{level}", x, level, (skips[level].shape[3],) * 2)
        if config.deep_supervision and level:
            deep_heads.append((level, x))
    plan.convolution("head", "head", x, 0, config.outputs, kernel=1)
    for level, source in deep_heads:
        plan.convolution(f"head{level}", "head", source, level, config.outputs, kernel=1)
    return tuple(plan.ops)


def training_flops(config: UNetConfig, shape: Shape3, batch: int = 1) -> int:
    """Floating-point operations of a training step's convolutions, a multiply-add counted as 2.
    Forward pass, filter and input gradient cost the same; the first layer has no input gradient.
    Recomputation is not counted."""
    plan = layer_plan(config, shape)
    image = plan[0].name
    return batch * sum(op.flops * (2 if image in op.inputs else 3) for op in plan)


# --- Private helpers ---


class _Plan:
    """Collects the layers; knows the shape of each level."""

    def __init__(self, config: UNetConfig, shape: Shape3):
        self.config, self.shape = config, shape
        self.ops: List[LayerOp] = []

    def add(
        self,
        name: str,
        kind: str,
        inputs: Tuple[LayerOp, ...],
        level: int,
        channels: int,
        **more: int,
    ) -> LayerOp:
        grid = tuple(n // 2**level for n in self.shape)
        op = LayerOp(name, kind, tuple(op.name for op in inputs), level, (*grid, channels), **more)
        self.ops.append(op)
        return op

    def convolution(
        self, name: str, kind: str, x: LayerOp, level: int, channels: int, kernel: int
    ) -> LayerOp:
        fan_in = x.shape[3]
        weights = kernel**3 * fan_in * channels + (channels if kind == "head" else 0)
        return self.add(
            name, kind, (x,), level, channels, kernel=kernel, in_channels=fan_in, trainable=weights
        )

    def block(self, name: str, entry: LayerOp, level: int, widths: Tuple[int, int]) -> LayerOp:
        """Two convolutions, each with norm and ReLU; `residual` adds the block's input before the
        last ReLU."""
        x = self.convolution(f"{name}_conv1", "conv", entry, level, widths[0], kernel=3)
        x = self.norm(f"{name}_act1", "norm_act", x)
        x = self.convolution(f"{name}_conv2", "conv", x, level, widths[1], kernel=3)
        if not self.config.residual:
            return self.norm(f"{name}_act2", "norm_act", x)
        x = self.norm(f"{name}_norm2", "norm", x)
        more = {"kernel": 1, "in_channels": entry.shape[3], "trainable": entry.shape[3] * widths[1]}
        x = self.add(f"{name}_shortcut", "shortcut", (x, entry), level, widths[1], **more)
        return self.add(f"{name}_act2", "act", (x,), level, widths[1])

    def norm(self, name: str, kind: str, x: LayerOp) -> LayerOp:
        """Scale and shift train, or the shift alone; batch norm's moving mean and variance do
        not."""
        channels = x.shape[3]
        trainable = channels if self.config.norm == "none" else 2 * channels
        frozen = 2 * channels if self.config.norm == "batch" else 0
        return self.add(name, kind, (x,), x.level, channels, trainable=trainable, frozen=frozen)

    def up(self, x: LayerOp, level: int) -> LayerOp:
        """Double the resolution on the way into decoder `level`."""
        width, name = self.config.up_width(level), f"decoder{level}_up"
        if self.config.up == "transposed":
            weights = 8 * x.shape[3] * width
            return self.add(
                name,
                "up_conv",
                (x,),
                level,
                width,
                kernel=2,
                in_channels=x.shape[3],
                trainable=weights,
            )
        # The 1x1x1 convolution and nearest-neighbour copying commute; on the coarse grid it costs
        # an eighth.
        x = self.convolution(f"{name}_conv", "conv", x, level + 1, width, kernel=1)
        return self.add(name, "upsample", (x,), level, width)
