"""The network's settings, as one frozen record. No TensorFlow: the estimator and the command line
read it too."""

import dataclasses
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Dict, List, Tuple

from models.strides import (
    EVERY_AXIS,
    NO_AXIS,
    Shape3,
    Strides,
    checked_average,
    checked_strides,
    divisors_text,
    shape3,
)

IMAGE_LEVEL = -1  # of an image with more voxels than the finest level, and of logits likewise


@dataclass(frozen=True)
class Widths:
    """How many feature maps a network's convolutions make."""

    summary: str  # for --help
    convolutions: Tuple[int, ...]  # of a level l, over filters * 2**l, in their order
    up: Fraction  # of an up-sampled map, over those of the level below


NETWORKS: Dict[str, Widths] = {
    "unet3d": Widths("the paper's", (1, 1), up=Fraction(1, 2)),
    # 32-64, 64-128, 128-256, 256-512 for filters 32, depth 4
    "cicek2016": Widths("the wider original", (1, 2), up=Fraction(1)),
}


@dataclass(frozen=True)
class NormWeights:
    """The weights of the layer after a convolution, a value for each channel in each."""

    trained: Tuple[str, ...]
    moving: Tuple[str, ...] = ()  # statistics, which training moves without a gradient


NORMS: Dict[str, NormWeights] = {
    "instance": NormWeights(("gamma", "beta")),
    "batch": NormWeights(("gamma", "beta"), ("moving_mean", "moving_variance")),
    "none": NormWeights(("bias",)),
}
UPS = ("transposed", "upsampling")


@dataclass(frozen=True)
class Dtype:
    """What the maps of hidden layers are computed and kept in."""

    bytes: int  # of a value
    keras_policy: str  # Keras' name of it, with weights in float32


DTYPES: Dict[str, Dtype] = {
    "float32": Dtype(4, "float32"),
    "bfloat16": Dtype(2, "mixed_bfloat16"),
}
POLICIES = ("speed", "lean")
"""Ways to save memory in a training step (models/network.py), the fastest first.

"speed"  keeps the raw sum of every convolution.
"lean"   keeps those of the decoder and, below the finest level, the encoder's last; computes the
         others again.
"""

MOST_SIDE = 2**31 - 1  # voxels along an axis
MOST_CHANNELS = 2**14  # of a map, as native operations take it (models/native/tf_ops.c)
EPSILON = 1e-5  # added to the variance by every norm
# of moving statistics: a run sees hundreds of volumes, not the 100,000 images of Keras' 0.99
MOMENTUM = 0.9


@dataclass(frozen=True)
class UNetConfig:
    """A 3D U-Net. The defaults are the network of the paper (Ojika et al. 2020) with instance for
    batch norm."""

    channels: int = 4  # image channels: 4 for BraTS (FLAIR, T1w, T1gd, T2w), 1 for FLAIR alone
    outputs: int = 3  # output maps, each with its own sigmoid: 3 for the nested regions WT, TC, ET
    filters: int = 16  # feature maps of the first convolution; level l has filters * 2**l
    depth: int = 5  # levels of resolution, the bottom included; the input is halved depth - 1 times
    network: str = "unet3d"
    """One of NETWORKS. "unet3d": both convolutions of a level are equally wide. "cicek2016": the
    wider original (Cicek et al. 2016), whose second convolution doubles the maps."""
    norm: str = "instance"
    """Instance by default: with one whole volume a step, batch statistics are that volume's own
    anyway, and only per-sample statistics make an accumulated batch equal to a full one."""
    # "transposed": one of the level's stride; "upsampling": nearest neighbour, then a 1x1x1
    # convolution
    up: str = "transposed"
    # add each block's input, through a 1x1x1 convolution, before the last activation
    residual: bool = False
    # one more head on every decoder level below the finest, for the loss only
    deep_supervision: bool = False
    seed: int = 0  # of the initial weights
    # of the hidden layers; weights, statistics and the loss are float32 either way
    dtype: str = "float32"
    policy: str = "speed"  # one of POLICIES
    # of each of the depth - 1 halvings, as models/strides.py has them; () halves every axis
    strides: Strides = ()
    average: Shape3 = NO_AXIS
    """Voxels of the image along X, Y, Z, 2 or 1, whose mean is one voxel of the finest level; the
    logits are interpolated back to the image's voxels. So a network of fewer voxels learns from
    targets of all of them."""

    def __post_init__(self) -> None:
        # Names are as options are typed; the numbers of channels and outputs are no options.
        for name, maps in (
            ("channels", self.channels),
            ("outputs", self.outputs),
            ("--filters", self.filters),
        ):
            if not isinstance(maps, int) or not 1 <= maps <= MOST_CHANNELS:
                rule = f"{name} must be an integer from 1 to {MOST_CHANNELS}"
                raise ValueError(f"{rule}, got {maps!r:.40}; give such a number")
        if not isinstance(self.depth, int) or not 2 <= self.depth <= 8:
            got = f"{self.depth!r:.40}"
            raise ValueError(f"--depth must be between 2 and 8, got {got}; 5 is the paper's")
        choices = {
            "network": tuple(NETWORKS),
            "norm": tuple(NORMS),
            "up": UPS,
            "dtype": tuple(DTYPES),
            "policy": POLICIES,
        }
        for name, allowed in choices.items():
            value = getattr(self, name)
            if value not in allowed:
                rule = f"--{name} must be one of {', '.join(allowed)}"
                raise ValueError(f"{rule}, got {value!r}; pick one")
        if self.filters > self.most_filters:
            rule = f"be at most {self.most_filters} on {self.depth} levels of {self.network}"
            got = f"{self.filters}: a map has at most {MOST_CHANNELS} channels"
            raise ValueError(f"--filters must {rule}, got {got}; lower --filters or --depth")
        object.__setattr__(self, "strides", checked_strides(self.strides, self.depth))
        object.__setattr__(self, "average", checked_average(self.average))

    def to_json(self) -> Dict[str, Any]:
        """JSON content, of which the network can be made again; without strides if it halves all
        axes each time."""
        fields = dataclasses.asdict(self)
        if not self.strides:
            del fields["strides"]
        return fields

    @property
    def averages(self) -> bool:
        """Whether its finest level has fewer voxels than the image."""
        return self.average != NO_AXIS

    @property
    def image_level(self) -> int:
        """The level of the image and of the finest logits: 0, or IMAGE_LEVEL of a network that
        averages."""
        return IMAGE_LEVEL if self.averages else 0

    @property
    def widths(self) -> Widths:
        return NETWORKS[self.network]

    @property
    def value_bytes(self) -> int:
        """Bytes of a value of a hidden layer's map."""
        return DTYPES[self.dtype].bytes

    @property
    def most_filters(self) -> int:
        """The filters of which the deepest level, the widest, has MOST_CHANNELS."""
        return MOST_CHANNELS // (max(self.widths.convolutions) * 2 ** (self.depth - 1))

    def stride(self, level: int) -> Shape3:
        """Voxels of `level` along X, Y, Z that become one of the next coarser level."""
        return self.strides[level] if self.strides else EVERY_AXIS

    @property
    def every_stride(self) -> Strides:
        """The strides of each halving, also where `strides` is () for those of all axes."""
        return tuple(map(self.stride, range(self.depth - 1)))

    def reduction(self, level: int) -> Shape3:
        """Voxels of the input along X, Y, Z that become one of `level`."""
        first = NO_AXIS if level == IMAGE_LEVEL else self.average
        return shape3(map(math.prod, zip(first, *map(self.stride, range(level)))))

    def averaging(self) -> "UNetConfig":
        """The network with means of the image in place of its finest level."""
        average, *rest = self.every_stride
        return dataclasses.replace(self, depth=self.depth - 1, strides=tuple(rest), average=average)

    @property
    def divisors(self) -> Shape3:
        """The sides X, Y, Z of the input must be multiples of these."""
        return self.reduction(self.depth - 1)

    def grid(self, shape: Shape3, level: int) -> Shape3:
        """Voxels X, Y, Z of `level`, of an input of `shape`."""
        return shape3(side // voxels for side, voxels in zip(shape, self.reduction(level)))

    def encoder_widths(self, level: int) -> Tuple[int, ...]:
        """Feature maps after each convolution of an encoder level (the bottom is depth - 1)."""
        return tuple(self.filters * 2**level * width for width in self.widths.convolutions)

    def decoder_widths(self, level: int) -> Tuple[int, ...]:
        """Feature maps after each convolution of a decoder level: as many as the skip has."""
        return (self.encoder_widths(level)[-1],) * self.convolutions

    @property
    def convolutions(self) -> int:
        """Convolutions of a level's block."""
        return len(self.widths.convolutions)

    def up_parts(self, level: int) -> List[Tuple[int, int]]:
        """Channels, first and past the last, of the up-sampled input to decoder `level` that are in
        memory at a time: all, but under "lean" no more than the skip has. With `residual` all stay
        until its sum."""
        width = int(self.encoder_widths(level + 1)[-1] * self.widths.up)
        most = self.encoder_widths(level)[-1] if self.policy == "lean" else width
        return [(first, min(first + most, width)) for first in range(0, width, most)]

    def check_shape(self, shape: Tuple[int, int, int], name: str = "shape") -> None:
        """Raise ValueError unless the network can take an image of `shape` (X, Y, Z), with the
        nearest ones. `name` is that of the shape in the error."""
        if len(shape) != 3 or min(shape) < 1 or max(shape) > MOST_SIDE:
            rule = f"{name} must be three numbers from 1 to {MOST_SIDE}"
            raise ValueError(f"{rule}, got {tuple(shape)!s:.80}; give X Y Z in voxels")
        if any(n % divisor for n, divisor in zip(shape, self.divisors)):
            up = tuple(-(-n // d) * d for n, d in zip(shape, self.divisors))
            down = tuple(max(n // d, 1) * d for n, d in zip(shape, self.divisors))
            todo = f"pad to {up} or crop to {down}"
            by = divisors_text(self.divisors)
            raise ValueError(f"{name} {tuple(shape)} must be divisible by {by}; {todo}")
