"""The 3D U-Net: down on the left, up on the right, skips across, as in the paper's figure."""

import dataclasses
import sys
from typing import Any, Dict, Optional, Tuple

import tensorflow as tf

from models.blocks import Block, head_layer, precision
from models.config import UNetConfig
from models.finest_level import SlabDecoder, SlabEncoder
from models.recomputed import RecomputedBlock
from models.supervision import Supervision


@tf.keras.utils.register_keras_serializable("cpu3d")
class UNet3D(tf.keras.Model):
    """The model of `build_unet3d`. Its file holds that function's arguments, from which it is built on loading, its
    weights, `trainable` of each layer and what it was compiled with: its layers need no configs of their own."""

    def __init__(self, unet: UNetConfig, image, logits):
        super().__init__(image, logits, name=unet.network)
        self.unet = unet

    def get_config(self) -> Dict[str, Any]:
        batch_size, *shape, _ = self.input_shape
        frozen = [layer.name for layer in self.layers if not layer.trainable]
        return {"unet": dataclasses.asdict(self.unet), "shape": shape, "batch_size": batch_size, "frozen": frozen}

    def call(self, inputs, training=None, mask=None):
        """As Keras calls it. Under "lean" a batch has to have the size that was built for, also where it is only known
        when the step runs, as for `tf.data` without `drop_remainder`. Raises ValueError, or there TensorFlow's
        InvalidArgumentError, for another one."""
        batch_size = self.input_shape[0]
        if self.unet.policy == "lean":
            if inputs.shape[0] is None:
                inputs = tf.ensure_shape(inputs, (batch_size, None, None, None, None))
            elif inputs.shape[0] != batch_size:
                todo = "build for that size, or under another policy"
                raise ValueError(f"batch must be {batch_size}, as built, got {inputs.shape[0]}; {todo}")
        return super().call(inputs, training, mask)

    @classmethod
    def from_config(cls, config: Dict[str, Any], custom_objects: Any = None) -> "UNet3D":
        model = build_unet3d(UNetConfig(**config["unet"]), tuple(config["shape"]), config["batch_size"])
        for name in config["frozen"]:
            model.get_layer(name).trainable = False
        return model


def build_unet3d(config: UNetConfig, shape: Tuple[int, int, int], batch_size: Optional[int] = None) -> UNet3D:
    """The Keras model of `config` for images of `shape` (X, Y, Z), after Ojika et al. 2020 and Cicek et al. 2016.

    Takes (batch, X, Y, Z, channels) in `config.dtype` and gives logits (batch, X, Y, Z, outputs) in the same dtype;
    with deep supervision a list of logits: the finest first, then each coarser decoder level, deepest first. Give the
    `batch_size` where it is known: instance norm then runs at the speed of batch norm. The model is compiled, fitted
    and saved as any of Keras' own; its losses and metrics take logits (cpu3d/training/losses.py has some). Under "lean"
    `fit` makes the finest logits, and their gradient, as whole maps, which `with_loss` does not. Raises ValueError when
    the shape does not divide and for "lean" without a `batch_size`, and ImportError where tf.keras is not Keras 2.
    """
    _check_keras()
    config.check_shape(shape)
    if config.policy == "lean" and batch_size is None:
        raise ValueError("batch_size must be given under the policy lean, got None; give it, or take balanced")
    finest = SlabDecoder(config) if config.policy == "lean" else None
    image = x = tf.keras.Input((*shape, config.channels), batch_size, dtype=config.dtype, name="image")

    skips = []
    for level in range(config.depth - 1):
        if finest and not level:
            x, skip = SlabEncoder(finest)(image)
        else:
            skip = block(config, "encoder", level, x)
            x = tf.keras.layers.MaxPool3D(2, dtype=precision(config), name=f"encoder{level + 1}_pool")(skip)
        skips.append(skip)
    x = block(config, "encoder", config.depth - 1, x)

    coarse = []
    for level in range(config.depth - 2, 0, -1):
        x = block(config, "decoder", level, skips[level], x)
        coarse.append((level, x))
    if finest:
        logits = finest({"shares": skips[0], "below": x})
    else:
        logits = head_layer(config, "head")(block(config, "decoder", 0, skips[0], x))
    if config.deep_supervision:
        logits = [logits] + [head_layer(config, f"head{level}")(source) for level, source in coarse]
    model = UNet3D(config, image, logits)
    model.output_names[0] = "head"  # also where it comes out of a larger layer
    return model


def block(config: UNetConfig, side: str, level: int, *inputs):
    """What the block of a level makes, "encoder" (of the entry) or "decoder" (of skip and below), as the policy has it:
    single layers, or one."""
    if config.policy == "speed":
        return Block(config, side, level).layer_by_layer(*inputs)
    return RecomputedBlock(config, side, level)(inputs if len(inputs) > 1 else inputs[0])


def with_loss(model: tf.keras.Model, config: UNetConfig, loss) -> tf.keras.Model:
    """On the layers of a model of `config`: (image, target uint8 (N, X, Y, Z, R)) -> (loss, score (N, R)), to train.
    `loss` is an object as models/supervision.py has it. Under "lean" the finest logits are never one tensor."""
    logits = tf.nest.flatten(model.output)
    target = tf.keras.Input(logits[0].shape[1:], logits[0].shape[0], dtype="uint8", name="target")
    for finest in model.layers:
        if isinstance(finest, SlabDecoder):
            logits[0] = finest({**finest.get_input_at(0), "target": target}, loss=loss)
    by_pieces = config.policy != "speed" and target.shape[0] is not None
    heads = Supervision(loss, by_pieces=by_pieces, name="loss")
    return tf.keras.Model([model.input, target], heads(target, *logits), name=f"{config.network}_loss")


# --- Private helpers ---


def _check_keras() -> None:
    package = sys.modules[tf.keras.layers.Layer.__module__.partition(".")[0]]
    if not package.__version__.startswith("2."):
        todo = "install tf_keras, and set TF_USE_LEGACY_KERAS=1 before TensorFlow is imported"
        raise ImportError(f"tf.keras must be Keras 2, got {package.__version__}; {todo}")
