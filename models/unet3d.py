"""The 3D U-Net: down on the left, up on the right, skips across, as in the paper's figure."""

import dataclasses
from typing import Optional, Tuple

import tensorflow as tf

from models.blocks import decoder, down, encoder, head
from models.config import UNetConfig
from models.finest_level import SlabDecoder, finest_level
from models.supervision import Supervision


def build_unet3d(config: UNetConfig, shape: Tuple[int, int, int], batch_size: Optional[int] = None) -> tf.keras.Model:
    """The Keras model of `config` for images of `shape` (X, Y, Z), after Ojika et al. 2020 and Cicek et al. 2016.

    Takes (batch, X, Y, Z, channels) in `config.dtype` and gives logits (batch, X, Y, Z, outputs) in the same dtype;
    with deep supervision a list of logits: the finest first, then each coarser decoder level, deepest first. Give the
    `batch_size` where it is known: instance norm then runs at the speed of batch norm, and "lean" cuts slabs; without,
    "lean" is "balanced", which has the same weights. Raises ValueError when the shape does not divide.
    """
    config.check_shape(shape)
    if config.policy == "lean" and batch_size is None:
        config = dataclasses.replace(config, policy="balanced")
    image = x = tf.keras.Input((*shape, config.channels), batch_size, dtype=config.dtype, name="image")

    skips, finest = [], None
    if config.policy == "lean":
        finest = finest_level(config, shape)
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


def with_loss(model: tf.keras.Model, config: UNetConfig, loss) -> tf.keras.Model:
    """On the layers of a model of `config`: (image, target uint8 (N, X, Y, Z, R)) -> (loss, score (N, R)), to train.

    `loss` is an object as models/supervision.py has it. Under "lean" the finest logits are never one tensor.
    """
    logits = tf.nest.flatten(model.output)
    target = tf.keras.Input(logits[0].shape[1:], logits[0].shape[0], dtype="uint8", name="target")
    for finest in model.layers:
        if isinstance(finest, SlabDecoder):
            logits[0] = finest({**finest.get_input_at(0), "target": target}, loss=loss)
    by_pieces = config.policy != "speed" and target.shape[0] is not None
    heads = Supervision(loss, by_pieces=by_pieces, name="loss")
    return tf.keras.Model([model.input, target], heads(target, *logits), name=f"{config.network}_loss")
