"""The parts of a U-Net as plain functions on Keras tensors. Layer names are those of the layer plan."""

import zlib

import tensorflow as tf

from models.config import UNetConfig
from models.norm import NormActivation
from models.ordered import Convolution, Join, ShortcutSum, UpConvolution

layers = tf.keras.layers

PRIOR_LOGIT = -2.944
"""First bias of the head: a sigmoid of 0.05 (Lin et al. 2017). Tumour is a few per cent of a brain; from 0.5 the first
hundred steps do little but learn that. Dice WT/TC/ET of one real glioma after 40 steps: 0.88/0.84/0.71 from 0.5, so
0.96/0.93/0.75."""


def policy(config: UNetConfig) -> str:
    """Keras' name for "compute in `config.dtype`, keep weights in float32"."""
    return "mixed_bfloat16" if config.dtype == "bfloat16" else "float32"


def initial_kernel(config: UNetConfig, name: str):
    """Glorot's uniform, from the network's seed and the layer's name: no layer depends on what was built before.

    A norm follows every convolution, so the scale only sets how fast it turns: on one real glioma Glorot's smaller
    kernels reach in 20 steps what He's reach in 30.
    """
    return tf.keras.initializers.GlorotUniform(seed=zlib.crc32(f"{config.seed}/{name}".encode()) & 0x7FFFFFFF)


def convolution(x, config: UNetConfig, name: str, channels: int, kernel: int):
    """A convolution that keeps the grid, without bias: what follows normalises or adds one."""
    return Convolution(
        channels,
        kernel,
        padding="same",
        use_bias=False,
        kernel_initializer=initial_kernel(config, name),
        dtype=policy(config),
        name=name,
    )(x)


def block(x, config: UNetConfig, name: str, widths):
    """Two 3x3x3 convolutions, each with norm and ReLU; `residual` adds the block's input before the last ReLU."""
    entry = x
    x = convolution(x, config, f"{name}_conv1", widths[0], 3)
    x = NormActivation(config.norm, dtype=policy(config), name=f"{name}_act1")(x)
    x = convolution(x, config, f"{name}_conv2", widths[1], 3)
    if not config.residual:
        return NormActivation(config.norm, dtype=policy(config), name=f"{name}_act2")(x)
    x = NormActivation(config.norm, activate=False, dtype=policy(config), name=f"{name}_norm2")(x)
    x = ShortcutSum(
        widths[1],
        initial_kernel(config, f"{name}_shortcut"),
        entry_learns=entry.name != "image",
        dtype=policy(config),
        name=f"{name}_shortcut",
    )([x, entry])
    return layers.ReLU(dtype=policy(config), name=f"{name}_act2")(x)


def down(x, config: UNetConfig, name: str):
    """Halve the grid: the maximum of each 2x2x2 voxels."""
    return layers.MaxPool3D(2, dtype=policy(config), name=f"{name}_pool")(x)


def up(x, config: UNetConfig, name: str, width: int):
    """Double the grid. Bias-free: the next norm takes a constant out again, and its gradient is a pass over the map."""
    if config.up == "transposed":
        return UpConvolution(
            width,
            2,
            strides=2,
            use_bias=False,
            kernel_initializer=initial_kernel(config, f"{name}_up"),
            dtype=policy(config),
            name=f"{name}_up",
        )(x)
    # The 1x1x1 convolution and nearest-neighbour copying commute; on the coarse grid it costs an eighth.
    x = convolution(x, config, f"{name}_up_conv", width, 1)
    return layers.UpSampling3D(2, dtype=policy(config), name=f"{name}_up")(x)


def join(skip, x, config: UNetConfig, name: str):
    """The skip connection: encoder maps first, then the up-sampled ones."""
    return Join(dtype=policy(config), name=f"{name}_concat")([skip, x])


def head(x, config: UNetConfig, name: str):
    """One logit per output and voxel, in the compute dtype: the loss casts them to float32.

    Casting the head's *input* instead would hold a float32 copy of the widest map of the network.
    """
    return Convolution(
        config.outputs,
        1,
        kernel_initializer=initial_kernel(config, name),
        bias_initializer=tf.keras.initializers.Constant(PRIOR_LOGIT),
        dtype=policy(config),
        name=name,
    )(x)
