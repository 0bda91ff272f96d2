"""Normalisation and ReLU in one plain Keras layer."""

import tensorflow as tf

from models.config import EPSILON, MOMENTUM


class NormActivation(tf.keras.layers.Layer):
    """Instance, batch or no norm over (N, X, Y, Z, C), then ReLU unless `activate` is false. Same shape and dtype out.
    Without a norm it adds a bias, so that convolutions never need one. Statistics, scale and shift are float32."""

    def __init__(self, norm: str = "instance", activate: bool = True, **kwargs):
        super().__init__(**kwargs)
        self.norm, self.activate = norm, activate

    def build(self, input_shape):
        single = {"shape": (input_shape[-1],), "dtype": "float32", "experimental_autocast": False}
        if self.norm == "none":
            self.bias = self.add_weight(name="bias", initializer="zeros", **single)
        else:
            self.gamma = self.add_weight(name="gamma", initializer="ones", **single)
            self.beta = self.add_weight(name="beta", initializer="zeros", **single)
        if self.norm == "batch":
            more = {"trainable": False, **single}
            self.moving_mean = self.add_weight(name="moving_mean", initializer="zeros", **more)
            self.moving_variance = self.add_weight(name="moving_variance", initializer="ones", **more)
        super().build(input_shape)

    def call(self, x, training=None):
        if self.norm == "none":
            y = x + tf.cast(self.bias, x.dtype)
        elif self.norm == "instance":
            # The fused kernel over one sample is instance norm.
            samples = [x] if x.shape[0] in (1, None) else tf.split(x, x.shape[0])
            if x.shape[0] is None:
                y = tf.map_fn(lambda sample: self._fused(sample[None])[0][0], x)
            else:
                y = tf.concat([self._fused(sample)[0] for sample in samples], 0)
        elif training and self.trainable:
            y, mean, variance = self._fused(x)
            self.move(mean, variance)
        else:
            y = self._fused(x, mean=self.moving_mean, variance=self.moving_variance, is_training=False)[0]
        return tf.nn.relu(y) if self.activate else y

    def move(self, mean, variance):
        """Move batch norm's statistics towards those of a batch, (C,), as training does."""
        for moving, moment in ((self.moving_mean, mean), (self.moving_variance, variance)):
            moving.assign_sub((moving - moment) * (1 - MOMENTUM))

    def _fused(self, x, **more):
        """The norm of all voxels together, their mean and their unbiased variance."""
        _, *grid, channels = x.shape
        folded = tf.reshape(x, (-1, grid[0] * grid[1], grid[2], channels))  # the kernel takes four dimensions
        y, mean, variance = tf.compat.v1.nn.fused_batch_norm(folded, self.gamma, self.beta, epsilon=EPSILON, **more)
        return tf.reshape(y, (-1, *grid, channels)), mean, variance
