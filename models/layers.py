"""The single layers of a U-Net, as its configuration has them: what the blocks of every memory policy are made of."""

import zlib

import tensorflow as tf

from models.config import UNetConfig
from models.norm import NormActivation
from models.ordered import Convolution, UpConvolution


def precision(config: UNetConfig) -> str:
    """Keras' name for "compute in `config.dtype`, keep weights in float32"."""
    return "mixed_bfloat16" if config.dtype == "bfloat16" else "float32"


def initial_kernel(config: UNetConfig, name: str):
    """Glorot's uniform, from the network's seed and the layer's name: no layer depends on what was built before.

    A norm follows every convolution, so the scale only sets how fast it turns: on one real glioma Glorot's smaller
    kernels reach in 20 steps what He's reach in 30.
    """
    return tf.keras.initializers.GlorotUniform(seed=zlib.crc32(f"{config.seed}/{name}".encode()) & 0x7FFFFFFF)


def convolution_layer(config: UNetConfig, name: str, channels: int, kernel: int, **more):
    """A convolution that keeps the grid, without bias: what follows normalises or adds one."""
    return Convolution(
        channels,
        kernel,
        padding="same",
        kernel_initializer=initial_kernel(config, name),
        dtype=precision(config),
        name=name,
        **{"use_bias": False, **more},
    )


def norm_layer(config: UNetConfig, name: str, activate: bool = True):
    return NormActivation(config.norm, activate, dtype=precision(config), name=name)


def up_layers(config: UNetConfig, name: str, width: int):
    """Double the grid. Bias-free: the next norm takes a constant out again, and its gradient is a pass over the map."""
    if config.up == "transposed":
        return [
            UpConvolution(
                width,
                2,
                strides=2,
                use_bias=False,
                kernel_initializer=initial_kernel(config, f"{name}_up"),
                dtype=precision(config),
                name=f"{name}_up",
            )
        ]
    # The 1x1x1 convolution and nearest-neighbour copying commute; on the coarse grid it costs an eighth.
    return [
        convolution_layer(config, f"{name}_up_conv", width, 1),
        tf.keras.layers.UpSampling3D(2, dtype=precision(config), name=f"{name}_up"),
    ]


def build_by_name(layer: tf.keras.layers.Layer, shape) -> None:
    """Make the weights of a layer within another one, under its name: files of weights tell them apart by that."""
    with tf.name_scope(layer.name):
        layer.build(tf.TensorShape(shape))
