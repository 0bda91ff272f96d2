"""Normalisation and ReLU in one layer, at the speed of the fused batch-norm kernel."""

from typing import Callable

import tensorflow as tf

from models.config import EPSILON
from models.ordered import add_bias

MOMENTUM = 0.9
"""Of batch norm's moving statistics: a run sees hundreds of whole volumes, not the 100,000 images of Keras' 0.99."""

PIECE_BYTES = 4 * 2**20  # of float32 values that a sum is made of at a time


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
        if self.norm == "batch":
            _, size_x, size_y, size_z, channels = input_shape
            self.batch_norm.build((None, size_x * size_y, size_z, channels))
        if self.norm == "none":
            self.bias = self.add_weight(name="bias", shape=(input_shape[-1],), initializer="zeros")
        super().build(input_shape)

    def call(self, x, training=None):
        parts = self.fold(x)
        if self.norm == "batch":
            return self.unfold([self._activate(self.batch_norm(parts[0], training=training))], x)
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
        if self.norm == "instance" and parts[0].shape[0] is None:
            return [self._activate(self._from_moments(part, *values)) for part in parts], []
        found = [self._fused(part, *values) for part in parts]
        return [self._activate(one[0]) for one in found], list(found[0][1:3]) if self.norm == "batch" else []

    def fold(self, x):
        """(N, X, Y, Z, C) -> the parts that are normalised each for itself, each (n, X*Y, Z, C): views, no copies.

        Without a norm it is x: the kernels then take any rank. Whoever computes `apply` twice must fold once, since
        ITEX's passes count the readers of a view alone: with one, they write the result over the map behind it.
        """
        if self.norm == "none":
            return [x]
        samples, size_x, size_y, size_z, channels = x.shape
        shape = (size_x * size_y, size_z, channels)
        if self.norm == "batch" or samples in (None, 1):
            return [tf.reshape(x, (-1, *shape))]
        return [tf.reshape(part, (1, *shape)) for part in tf.split(x, samples)]

    def unfold(self, parts, like):
        """The way back, to the grid of `like` (N, X, Y, Z, ...)."""
        if self.norm == "none":
            return parts[0]
        grid = like.shape[1:4]
        whole = [tf.reshape(part, (-1 if len(parts) == 1 else 1, *grid, part.shape[-1])) for part in parts]
        return tf.concat(whole, 0) if len(whole) > 1 else whole[0]

    def move(self, mean, variance):
        """Move batch norm's statistics towards those of a batch, as training does."""
        for moving, found in ((self.batch_norm.moving_mean, mean), (self.batch_norm.moving_variance, variance)):
            moving.assign_sub((moving - tf.cast(found, moving.dtype)) * (1 - MOMENTUM))

    # --- Private helpers ---

    def _activate(self, x):
        return tf.nn.relu(x) if self.activate else x

    @staticmethod
    def _fused(sample, gamma, beta):
        return tf.compat.v1.nn.fused_batch_norm(sample, gamma, beta, epsilon=EPSILON, is_training=True)

    @staticmethod
    def _from_moments(x, gamma, beta):
        """The definition, for a batch size that is not known when the model is built.

        Row by row, so that no float32 sum has more than a few hundred terms: over millions of voxels, as the fused
        kernel adds them up, the third digit is lost.
        """

        def mean_of(values):
            rows = tf.cast(tf.reduce_mean(values, 2, keepdims=True), tf.float64)
            return tf.cast(tf.reduce_mean(rows, 1, keepdims=True), tf.float32)

        values = tf.cast(x, tf.float32)
        mean = mean_of(values)
        scale = gamma * tf.math.rsqrt(mean_of(tf.math.squared_difference(values, mean)) + EPSILON)
        return tf.cast(values * scale + (beta - mean * scale), x.dtype)


# --- Arithmetic of a slab (X, Y, Z, C), by the channels ---


def statistics(slab):
    """(2, C) float32: a slab's means, and its sums of squares about them."""
    mean = column_sums(slab) / float(slab.shape[:3].num_elements())
    return tf.stack([mean, column_sums(slab, about=mean)])


def column_sums(slab, other=None, about=None):
    """Of (X, Y, Z, C), of its product with `other`, or of its squares about (C,): (C,) float32, by the channels.

    A few planes at a time: what is made on the way is then small, and stays in the cache.
    """
    plane_bytes = 4 * slab.shape[1:].num_elements()
    planes, total = max(1, PIECE_BYTES // plane_bytes), None
    for first in range(0, slab.shape[0], planes):
        with tf.control_dependencies([] if total is None else [total]):
            piece = slab[first : first + planes]
            rows = _rows(piece)
            if other is not None:
                rows = rows * _rows(other[first : first + planes])
            if about is not None:
                rows = tf.math.squared_difference(rows, _like_row(about, slab))
            row = tf.reduce_sum(rows, 0)
        total = row if total is None else total + row
    return tf.reduce_sum(tf.reshape(total, slab.shape[2:]), 0)


def fused(function: Callable):
    """Pointwise arithmetic of slabs as one pass over memory, compiled; of single planes, operation by operation."""
    compiled = tf.function(function, autograph=False, jit_compile=True)
    return lambda slab, *others: (compiled if slab.shape[0] > 1 else function)(slab, *others)


@fused
def affine(slab, mean, scale, shift):
    """(slab - mean) * scale + shift, by the channels."""
    y = (_rows(slab) - _like_row(mean, slab)) * _like_row(scale, slab) + _like_row(shift, slab)
    return tf.reshape(tf.cast(y, slab.dtype), slab.shape)


@fused
def affine_relu(slab, mean, scale, shift):
    """max((slab - mean) * scale + shift, 0), by the channels."""
    y = (_rows(slab) - _like_row(mean, slab)) * _like_row(scale, slab) + _like_row(shift, slab)
    y = tf.nn.relu(y)
    return tf.reshape(tf.cast(y, slab.dtype), slab.shape)


@fused
def combined(upstream, slab, scale, mean, along, shift):
    """upstream * scale + (slab - mean) * along + shift, by the channels."""
    y = (_rows(slab) - _like_row(mean, slab)) * _like_row(along, slab) + _like_row(shift, slab)
    y = y + _rows(upstream) * _like_row(scale, slab)
    return tf.reshape(tf.cast(y, slab.dtype), slab.shape)


def _rows(slab):
    """(X, Y, Z, C) -> (X * Y, Z * C) float32: broadcasting a few values over the last axis is slow."""
    x, y, z, c = slab.shape
    return tf.cast(tf.reshape(slab, (x * y, z * c)), tf.float32)


def _like_row(vector, slab):
    """(C,) -> (Z * C,)"""
    return tf.tile(vector, [slab.shape[2]])
