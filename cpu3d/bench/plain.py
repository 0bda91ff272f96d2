"""The network and its training step as anyone would write them with tf.keras: what memory policies are held against.

The same function as `build_unet3d`, weights in the same order, with the same loss and optimizer. Convolutions,
concatenations and gradients are Keras' and TensorFlow's own, and so is the order in which they run.
"""

from typing import Iterator, Tuple

import numpy as np
import tensorflow as tf

from cpu3d.config import RunConfig
from cpu3d.training.learner import optimizer_of
from cpu3d.training.losses import deep_supervision_loss, dice_cross_entropy
from models.config import EPSILON, UNetConfig
from models.layers import precision
from models.norm import MOMENTUM


class PlainLearner:
    """A stand-in for `training.learner.Learner`: gradients, then the update, in no fixed order, no averaged weights.

    The batch is computed as a whole; raises ValueError for a run that computes it in parts.
    """

    def __init__(self, config: RunConfig):
        if config.parts != 1:
            raise ValueError(
                f"micro_batch must be the whole batch of {config.batch} with the plain Keras graph, got "
                f"{config.micro}; give {config.batch}"
            )
        self.model = build_plain(config.unet, config.grid, config.batch)
        self.optimizer = optimizer_of(config)
        self.optimizer.build(self.model.trainable_variables)
        self._step = tf.function(self._train)

    def step(self, parts: Iterator[Tuple[tf.Tensor, tf.Tensor]], learning_rate: float) -> Tuple[float, np.ndarray]:
        """One optimizer step on the next of `parts`, as the learner's."""
        self.optimizer.learning_rate.assign(learning_rate)
        loss, dice = self._step(*next(parts))
        return float(loss), dice.numpy()

    def _train(self, image, target):
        with tf.GradientTape() as tape:
            logits = self.model(image, training=True)
            loss_of = deep_supervision_loss if isinstance(logits, (list, tuple)) else dice_cross_entropy
            loss, dice = loss_of(target, logits)
        variables = self.model.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return loss, dice


def build_plain(config: UNetConfig, shape: Tuple[int, int, int], batch_size: int) -> tf.keras.Model:
    """`build_unet3d(config, shape, batch_size)` from single Keras layers, whatever the policy of `config`."""
    config.check_shape(shape)
    image = x = tf.keras.Input((*shape, config.channels), batch_size, dtype=config.dtype)

    skips = []
    for level in range(config.depth):
        if level:
            x = tf.keras.layers.MaxPool3D(2, dtype=precision(config))(x)
        x = _block(x, config, config.encoder_widths(level))
        skips.append(x)

    levels = []
    for level in reversed(range(config.depth - 1)):
        x = _up(x, config, config.up_width(level))
        x = tf.keras.layers.Concatenate(dtype=precision(config))([skips[level], x])
        x = _block(x, config, config.decoder_widths(level))
        levels.append(x)

    # As in build_unet3d: the finest first, then from the deepest up.
    sources = [x, *levels[:-1]] if config.deep_supervision else [x]
    logits = [_convolution(source, config, config.outputs, 1, use_bias=True) for source in sources]
    return tf.keras.Model(image, logits if config.deep_supervision else logits[0])


class InstanceNorm(tf.keras.layers.Layer):
    """Each sample of (N, X, Y, Z, C) normalised for itself, which the fused batch-norm kernel over one sample does."""

    def build(self, input_shape):
        shared = {"shape": (input_shape[-1],), "dtype": "float32", "experimental_autocast": False}
        self.gamma = self.add_weight(name="gamma", initializer="ones", **shared)
        self.beta = self.add_weight(name="beta", initializer="zeros", **shared)

    def call(self, x):
        samples = tf.split(x, x.shape[0]) if x.shape[0] > 1 else [x]
        normalised = [self._of_one(sample) for sample in samples]
        return tf.concat(normalised, 0) if len(samples) > 1 else normalised[0]

    def _of_one(self, sample):
        return tf.compat.v1.nn.fused_batch_norm(
            sample, self.gamma, self.beta, epsilon=EPSILON, data_format="NDHWC", is_training=True
        )[0]


# --- Private helpers ---


def _block(x, config, widths):
    entry = x
    x = _relu(_norm(_convolution(x, config, widths[0], 3), config), config)
    x = _norm(_convolution(x, config, widths[1], 3), config)
    if config.residual:
        x = tf.keras.layers.Add(dtype=precision(config))([x, _convolution(entry, config, widths[1], 1, use_bias=False)])
    return _relu(x, config)


def _convolution(x, config, channels, kernel, use_bias=None):
    """With a bias where none is asked for and no norm follows."""
    use_bias = config.norm == "none" if use_bias is None else use_bias
    layer = tf.keras.layers.Conv3D(channels, kernel, padding="same", use_bias=use_bias, dtype=precision(config))
    return layer(x)


def _norm(x, config):
    if config.norm == "instance":
        return InstanceNorm(dtype=precision(config))(x)
    if config.norm == "batch":
        return tf.keras.layers.BatchNormalization(epsilon=EPSILON, momentum=MOMENTUM, dtype=precision(config))(x)
    return x


def _relu(x, config):
    return tf.keras.layers.ReLU(dtype=precision(config))(x)


def _up(x, config, width):
    if config.up == "transposed":
        return tf.keras.layers.Conv3DTranspose(width, 2, strides=2, use_bias=False, dtype=precision(config))(x)
    return tf.keras.layers.UpSampling3D(2, dtype=precision(config))(_convolution(x, config, width, 1, use_bias=False))
