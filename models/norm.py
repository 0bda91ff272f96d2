"""Normalisation and ReLU in one layer, at the speed of the fused batch-norm kernel."""

import tensorflow as tf

from models.ordered import add_bias

EPSILON = 1e-5
MOMENTUM = 0.9
"""Of batch norm's moving statistics: a run sees hundreds of whole volumes, not the 100,000 images of Keras' 0.99."""


class NormActivation(tf.keras.layers.Layer):
    """Instance, batch or no norm over (N, X, Y, Z, C), then ReLU unless `activate` is false. Same shape and dtype out.

    Without a norm it adds a bias, so that convolutions never need one.

    The fused batch-norm kernel over one sample *is* instance norm, at no extra cost; Keras' GroupNormalization
    is composed of many passes. Statistics know no layout, so X and Y are folded into one axis first: 4D is the rank for
    which ITEX fuses the ReLU into the kernel, which saves one pass over the map each way.
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
        if self.norm == "none":
            self.bias = self.add_weight(name="bias", shape=(input_shape[-1],), initializer="zeros")
        super().build(input_shape)

    def call(self, x, training=None):
        if self.norm == "instance":
            samples = x.shape[0]
            if samples is None:
                return self._activate(self._from_moments(x))
            parts = tf.split(x, samples) if samples > 1 else [x]
            parts = [self._unfold(self._activate(self._fused(self._fold(part))), part) for part in parts]
            return tf.concat(parts, 0) if samples > 1 else parts[0]
        if self.norm == "batch":
            return self._unfold(self._activate(self.batch_norm(self._fold(x), training=training)), x)
        return self._activate(add_bias(x, tf.convert_to_tensor(self.bias)))

    def get_config(self):
        return {**super().get_config(), "norm": self.norm, "activate": self.activate}

    def _activate(self, x):
        return tf.nn.relu(x) if self.activate else x

    def _fused(self, sample):
        return tf.compat.v1.nn.fused_batch_norm(sample, self.gamma, self.beta, epsilon=EPSILON, is_training=True)[0]

    def _from_moments(self, x):
        """The definition, for a batch size that is not known when the model is built."""
        mean, variance = tf.nn.moments(tf.cast(x, tf.float32), (1, 2, 3), keepdims=True)
        scale = self.gamma * tf.math.rsqrt(variance + EPSILON)
        return tf.cast(tf.cast(x, tf.float32) * scale + (self.beta - mean * scale), x.dtype)

    @staticmethod
    def _fold(x):
        """(N, X, Y, Z, C) -> (N, X*Y, Z, C): a view, no copy."""
        _, size_x, size_y, size_z, channels = x.shape
        return tf.reshape(x, (-1, size_x * size_y, size_z, channels))

    @staticmethod
    def _unfold(x, like):
        return tf.reshape(x, (-1, *like.shape[1:]))
