"""Normalisation and ReLU in one layer, at the speed of the fused batch-norm kernel."""

import tensorflow as tf

from models.config import EPSILON, has_fused_norm
from models.ordered import add_bias
from models.passes import affine, normalised, one_pass

MOMENTUM = 0.9  # of moving statistics: a run sees hundreds of volumes, not the 100,000 images of Keras' 0.99


class NormActivation(tf.keras.layers.Layer):
    """Instance, batch or no norm over (N, X, Y, Z, C), then ReLU unless `activate` is false. Same shape and dtype out.
    Without a norm it adds a bias, so that convolutions never need one.

    The fused batch-norm kernel over one sample is instance norm. X and Y are folded into one axis first: 4D is the rank
    for which ITEX fuses the ReLU into the kernel. Channels for which the kernel is slow, and samples whose number is
    not known, are normalised in passes of our own (models/passes.py).
    """

    def __init__(self, norm: str = "instance", activate: bool = True, **kwargs):
        super().__init__(**kwargs)
        self.norm, self.activate = norm, activate

    def build(self, input_shape):
        channels = (input_shape[-1],)
        # Statistics and affine stay float32: the kernel takes a bfloat16 map beside float32 vectors.
        single = {"shape": channels, "dtype": "float32", "experimental_autocast": False}
        if self.norm == "none":
            self.bias = self.add_weight(name="bias", shape=channels, initializer="zeros")
        else:
            self.gamma = self.add_weight(name="gamma", initializer="ones", **single)
            self.beta = self.add_weight(name="beta", initializer="zeros", **single)
        if self.norm == "batch":
            self.moving_mean = self.add_weight(name="moving_mean", initializer="zeros", trainable=False, **single)
            self.moving_variance = self.add_weight(
                name="moving_variance", initializer="ones", trainable=False, **single
            )
        super().build(input_shape)

    def call(self, x, training=None):
        parts, values = self.fold(x), self.values(training)
        if self.norm == "batch" and len(values) == 2 and parts[0].shape.rank == 4:
            return self.unfold([self._fused_batch_norm(parts[0], *values)], x)
        parts, statistics = self.apply(parts, *values)
        if statistics:
            self.move(*statistics)
        return self.unfold(parts, x)

    # --- As a function of its weights ---

    def values(self, training, *before):
        """Its weights as tensors, read once all of `before` is there: what it multiplies by and adds. A batch norm's
        moving mean and variance are among them in inference, and in training where it is frozen."""
        with tf.control_dependencies(before):
            if self.norm == "none":
                return [tf.cast(tf.convert_to_tensor(self.bias), self.compute_dtype)]
            weights = [self.gamma, self.beta]
            if self.norm == "batch" and not (training and self.trainable):
                weights += [self.moving_mean, self.moving_variance]
            return [tf.convert_to_tensor(weight) for weight in weights]

    def apply(self, parts, *values):
        """The layer as a function of `values` on a folded map: its parts again, and the mean and variance of the batch
        where they are to move the moving ones. Changes no variable, so it may be computed twice.
        """
        if self.norm == "none":
            return [self._activate(add_bias(part, *values)) for part in parts], []
        if len(values) == 4:
            return [self._with_moving_statistics(parts[0], *values)], []
        if parts[0].shape.rank == 5:
            y, *statistics = normalised(parts[0], *values, self.norm == "batch", self.activate)
            return [y], [each[0] for each in statistics] if self.norm == "batch" else []
        found = [tf.compat.v1.nn.fused_batch_norm(part, *values, epsilon=EPSILON) for part in parts]
        return [self._activate(one[0]) for one in found], list(found[0][1:]) if self.norm == "batch" else []

    def fold(self, x):
        """(N, X, Y, Z, C) -> views (n, X*Y, Z, C) that are normalised separately; x for passes of our own.

        To compute `apply` twice, fold once: ITEX counts the readers of each view, and writes the result of its only
        reader over the map behind it.
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
        for moving, moment in ((self.moving_mean, mean), (self.moving_variance, variance)):
            moving.assign_sub((moving - tf.cast(moment, moving.dtype)) * (1 - MOMENTUM))

    # --- Private helpers ---

    def _with_moving_statistics(self, x, gamma, beta, mean, variance):
        if x.shape.rank == 5:
            return one_pass(affine, [x], mean, gamma * tf.math.rsqrt(variance + EPSILON), beta, relu=self.activate)
        y, *_ = tf.compat.v1.nn.fused_batch_norm(x, gamma, beta, mean, variance, epsilon=EPSILON, is_training=False)
        return self._activate(y)

    def _fused_batch_norm(self, x, gamma, beta):
        """By the fused kernel in training, which computes the moved statistics as well."""
        moving = (self.moving_mean, self.moving_variance)
        more = {"epsilon": EPSILON, "exponential_avg_factor": 1 - MOMENTUM}
        y, *moved = tf.compat.v1.nn.fused_batch_norm(x, gamma, beta, *moving, **more)
        for variable, value in zip(moving, moved):
            variable.assign(value)
        return self._activate(y)

    def _activate(self, x):
        return tf.nn.relu(x) if self.activate else x
