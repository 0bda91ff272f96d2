"""Normalisation and ReLU in one layer, at the speed of the fused batch-norm kernel."""

import tensorflow as tf

from models.config import EPSILON, has_fused_norm
from models.ordered import add_bias
from models.passes import affine, normalised, one_pass

MOMENTUM = 0.9
"""Of batch norm's moving statistics: a run sees hundreds of whole volumes, not the 100,000 images of Keras' 0.99."""


class NormActivation(tf.keras.layers.Layer):
    """Instance, batch or no norm over (N, X, Y, Z, C), then ReLU unless `activate` is false. Same shape and dtype out.

    Without a norm it adds a bias, so that convolutions never need one.

    The fused batch-norm kernel over one sample *is* instance norm, at no extra cost; Keras' GroupNormalization
    is composed of many passes. Statistics know no layout, so X and Y are folded into one axis first: 4D is the rank for
    which ITEX fuses the ReLU into the kernel, which saves one pass over the map each way. Channels for which the kernel
    is slow, and samples whose number is not known, are normalised in passes of our own (models/passes.py).
    """

    def __init__(self, norm: str = "instance", activate: bool = True, **kwargs):
        super().__init__(**kwargs)
        self.norm = norm
        self.activate = activate
        self.batch_norm = None
        if norm == "batch":
            self.batch_norm = tf.keras.layers.BatchNormalization(
                epsilon=EPSILON, momentum=MOMENTUM, dtype=self._dtype_policy, name="batch_norm"
            )

    def build(self, input_shape):
        if self.norm == "instance":
            # Statistics and affine stay float32: the kernel takes a bfloat16 map beside float32 vectors.
            shared = {"shape": (input_shape[-1],), "dtype": "float32", "experimental_autocast": False}
            self.gamma = self.add_weight(name="gamma", initializer="ones", **shared)
            self.beta = self.add_weight(name="beta", initializer="zeros", **shared)
        if self.norm == "batch":
            _, size_x, size_y, size_z, channels = input_shape
            self.batch_norm.build((None, size_x * size_y, size_z, channels))
        if self.norm == "none":
            self.bias = self.add_weight(name="bias", shape=(input_shape[-1],), initializer="zeros")
        super().build(input_shape)

    def call(self, x, training=None):
        parts = self.fold(x)
        if self.norm == "batch":
            return self.unfold(self._batch_norm(parts, training), x)
        return self.unfold(self.apply(parts, *self.values())[0], x)

    def get_config(self):
        return {**super().get_config(), "norm": self.norm, "activate": self.activate}

    # --- As a function of its weights ---

    def values(self, *before):
        """What it multiplies by and adds, as tensors, read once all of `before` is there."""
        owner = self.batch_norm or self
        with tf.control_dependencies(before):
            if self.norm == "none":
                return [tf.cast(tf.convert_to_tensor(self.bias), self.compute_dtype)]
            return [tf.convert_to_tensor(owner.gamma), tf.convert_to_tensor(owner.beta)]

    def apply(self, parts, *values):
        """The layer in training on a folded map: its parts again, and a batch's mean and variance (or nothing).

        `values` stand for its weights. Changes no variable, so it may be computed twice.
        """
        if self.norm == "none":
            return [self._activate(add_bias(part, *values)) for part in parts], []
        if parts[0].shape.rank == 5:
            y, *statistics = normalised(parts[0], *values, self.norm == "batch", self.activate)
            return [y], [each[0] for each in statistics] if self.norm == "batch" else []
        found = [self._fused(part, *values) for part in parts]
        return [self._activate(one[0]) for one in found], list(found[0][1:3]) if self.norm == "batch" else []

    def fold(self, x):
        """(N, X, Y, Z, C) -> the parts that are normalised each for itself, each (n, X*Y, Z, C): views, no copies.

        Without a norm, and for our own passes, it is x. Whoever computes `apply` twice must fold once, since
        ITEX's passes count the readers of a view alone: with one, they write the result over the map behind it.
        """
        samples, size_x, size_y, size_z, channels = x.shape
        apart = self.norm == "instance" and samples is None
        if self.norm == "none" or apart or not has_fused_norm(channels, x.dtype.name):
            return [x]
        shape = (size_x * size_y, size_z, channels)
        if self.norm == "batch" or samples == 1:
            return [tf.reshape(x, (-1, *shape))]
        return [tf.reshape(part, (1, *shape)) for part in tf.split(x, samples)]

    def unfold(self, parts, like):
        """The way back, to the grid of `like` (N, X, Y, Z, ...)."""
        if parts[0].shape.rank == 5:
            return parts[0]
        grid = like.shape[1:4]
        whole = [tf.reshape(part, (-1 if len(parts) == 1 else 1, *grid, part.shape[-1])) for part in parts]
        return tf.concat(whole, 0) if len(whole) > 1 else whole[0]

    def move(self, mean, variance):
        """Move batch norm's statistics towards those of a batch, as training does."""
        for moving, found in ((self.batch_norm.moving_mean, mean), (self.batch_norm.moving_variance, variance)):
            moving.assign_sub((moving - tf.cast(found, moving.dtype)) * (1 - MOMENTUM))

    # --- Private helpers ---

    def _batch_norm(self, parts, training):
        if parts[0].shape.rank == 4:
            return [self._activate(self.batch_norm(parts[0], training=training))]
        gamma, beta = self.values()
        if training:
            parts, statistics = self.apply(parts, gamma, beta)
            self.move(*statistics)
            return parts
        moving = self.batch_norm
        scale = gamma * tf.math.rsqrt(moving.moving_variance + EPSILON)
        return [one_pass(affine, parts, moving.moving_mean, scale, beta, relu=self.activate)]

    def _activate(self, x):
        return tf.nn.relu(x) if self.activate else x

    @staticmethod
    def _fused(sample, gamma, beta):
        return tf.compat.v1.nn.fused_batch_norm(sample, gamma, beta, epsilon=EPSILON, is_training=True)
