"""The parts of a U-Net as plain functions on Keras tensors. Layer names are those of the layer plan."""

import tensorflow as tf

from models.config import UNetConfig
from models.layers import convolution_layer, initial_kernel, norm_layer, precision, up_layers
from models.ordered import Join, ShortcutSum
from models.recomputed import RecomputedBlock

PRIOR_LOGIT = -2.944
"""First bias of the head: a sigmoid of 0.05 (Lin et al. 2017). Tumour is a few per cent of a brain; from 0.5 the first
hundred steps do little but learn that. Dice WT/TC/ET of one real glioma after 40 steps: 0.88/0.84/0.71 from 0.5, so
0.96/0.93/0.75."""


def encoder(x, config: UNetConfig, level: int):
    """The block of an encoder level, or of the bottom."""
    name, widths = f"encoder{level}", config.encoder_widths(level)
    if config.policy == "speed":
        return _block(x, config, name, widths)
    return RecomputedBlock(config, widths, dtype=precision(config), name=name)(x)


def decoder(skip, x, config: UNetConfig, level: int):
    """Double the grid, add the skip connection (encoder maps first, then the up-sampled), and the level's block."""
    name, widths, up_width = f"decoder{level}", config.decoder_widths(level), config.up_width(level)
    if config.policy == "speed":
        for layer in up_layers(config, name, up_width):
            x = layer(x)
        x = Join(dtype=precision(config), name=f"{name}_concat")([skip, x])
        return _block(x, config, name, widths)
    return RecomputedBlock(config, widths, up_width, dtype=precision(config), name=name)([skip, x])


def down(x, config: UNetConfig, name: str):
    """Halve the grid: the maximum of each 2x2x2 voxels."""
    return tf.keras.layers.MaxPool3D(2, dtype=precision(config), name=f"{name}_pool")(x)


def head(x, config: UNetConfig, name: str):
    """One logit per output and voxel, in the compute dtype: the loss casts them to float32.

    Casting the head's *input* instead would hold a float32 copy of the widest map of the network.
    """
    return head_layer(config, name)(x)


def head_layer(config: UNetConfig, name: str):
    more = {"use_bias": True, "bias_initializer": tf.keras.initializers.Constant(PRIOR_LOGIT)}
    return convolution_layer(config, name, config.outputs, 1, by_planes=config.policy != "speed", **more)


# --- Private helpers ---


def _block(x, config: UNetConfig, name: str, widths):
    """Two 3x3x3 convolutions, each with norm and ReLU; `residual` adds the block's input before the last ReLU."""
    entry = x
    x = convolution_layer(config, f"{name}_conv1", widths[0], 3)(x)
    x = norm_layer(config, f"{name}_act1")(x)
    x = convolution_layer(config, f"{name}_conv2", widths[1], 3)(x)
    if not config.residual:
        return norm_layer(config, f"{name}_act2")(x)
    x = norm_layer(config, f"{name}_norm2", activate=False)(x)
    x = ShortcutSum(
        widths[1],
        initial_kernel(config, f"{name}_shortcut"),
        entry_learns=entry.name != "image",
        dtype=precision(config),
        name=f"{name}_shortcut",
    )([x, entry])
    return tf.keras.layers.ReLU(dtype=precision(config), name=f"{name}_act2")(x)
