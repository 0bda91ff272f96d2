"""The 3D U-Net: down on the left, up on the right, skips across, as in the paper's figure."""

from typing import Optional, Tuple

import tensorflow as tf

from models.blocks import decoder, down, encoder, head
from models.config import UNetConfig
from models.slabs import finest_level


def build_unet3d(config: UNetConfig, shape: Tuple[int, int, int], batch_size: Optional[int] = None) -> tf.keras.Model:
    """The Keras model of `config` for images of `shape` (X, Y, Z), after Ojika et al. 2020 and Cicek et al. 2016.

    Takes (batch, X, Y, Z, channels) in `config.dtype` and gives logits (batch, X, Y, Z, outputs) in the same dtype;
    with deep supervision a list of logits: the finest first, then each coarser decoder level, deepest first. Give the
    `batch_size` where it is known: instance norm then runs at the speed of batch norm. Raises ValueError when the shape
    does not divide.
    """
    config.check_shape(shape)
    image = x = tf.keras.Input((*shape, config.channels), batch_size, dtype=config.dtype, name="image")

    skips, finest = [], None
    if config.policy == "lean":
        finest = finest_level(config, shape, batch_size)
        x, skip = finest[0](image)
        skips.append(skip)
    for level in range(len(skips), config.depth):
        if level > len(finest or ()) // 2:
            x = down(x, config, f"encoder{level}")
        x = encoder(x, config, level)
        skips.append(x)

    coarse = []
    for level in reversed(range(1 if finest else 0, config.depth - 1)):
        x = decoder(skips[level], x, config, level)
        if config.deep_supervision and level:
            coarse.append((level, x))

    logits = finest[1]({**skips[0], "below": x}) if finest else head(x, config, "head")
    if config.deep_supervision:
        logits = [logits] + [head(source, config, f"head{level}") for level, source in coarse]
    return tf.keras.Model(image, logits, name=config.network)
