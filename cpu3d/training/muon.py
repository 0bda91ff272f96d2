"""Muon: the optimizer whose update of a kernel is its momentum made orthogonal (Jordan 2024, "Muon: an optimizer for
hidden layers in neural networks").

With all singular values made equal, directions that few voxels speak for, such as a small lesion's, move as far as
those that all speak for. docs/log.md has what that saves in steps.
"""

import math
from typing import Tuple

import tensorflow as tf

# Jordan's polynomial: a x + b x^3 + c x^5 takes singular values of 0.01 to 1 into 0.7 to 1.2 in five times.
ITERATION, TIMES = (3.4445, -4.7750, 2.0315), 5


@tf.keras.utils.register_keras_serializable("cpu3d")
class Muon(tf.keras.optimizers.Optimizer):
    """Muon for kernels of more than one voxel, Adam (Kingma 2015) for norms, biases and 1x1x1 kernels.

    One float32 slot a kernel, two for what Adam has. Updates come one after another: memory holds one at a time.

    An update's length does not depend on that of the gradient, so one fixed rate serves every loss and data set. Adam's
    part has a rate of its own: at a third of it the head and the norms learn too slowly, whatever the kernels do.
    """

    def __init__(
        self,
        learning_rate=0.02,
        adam_scale: float = 1.5,
        momentum: float = 0.95,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        name: str = "Muon",
        **options,
    ):
        """`learning_rate` is of kernels; Adam's is `adam_scale` times that. `momentum` is of kernels, with Nesterov's
        look-ahead; `options` are those of every Keras optimizer, such as `clipnorm`."""
        super().__init__(name=name, **{"weight_decay": None, **options})
        self._learning_rate = self._build_learning_rate(learning_rate)
        self.adam_scale, self.momentum = adam_scale, momentum
        self.beta_1, self.beta_2, self.epsilon = beta_1, beta_2, epsilon

    def build(self, var_list) -> None:
        super().build(var_list)
        if getattr(self, "_built", False):
            return
        self._means = [self.add_variable_from_reference(v, "mean") for v in var_list]
        self._squares = [
            None if is_orthogonal(v.shape) else self.add_variable_from_reference(v, "square") for v in var_list
        ]
        self._built = True

    def apply_gradients(self, grads_and_vars, *args, **options):
        self._before = []
        try:
            return super().apply_gradients(grads_and_vars, *args, **options)
        finally:
            self._before = []  # what is left in it would be saved with a model

    def update_step(self, gradient, variable) -> None:
        """Update one variable, after those before it."""
        index = self._index_dict[self._var_key(variable)]
        with tf.control_dependencies(self._before):
            update = self._muon if is_orthogonal(variable.shape) else self._adam
            self._before = [variable.assign_sub(update(index, tf.convert_to_tensor(gradient)))]

    def get_config(self):
        own = {name: getattr(self, name) for name in ("adam_scale", "momentum", "beta_1", "beta_2", "epsilon")}
        return {**super().get_config(), "learning_rate": self._serialize_hyperparameter(self._learning_rate), **own}

    def _muon(self, index: int, gradient):
        mean = self._means[index]
        # Added to where it lies: a new mean in the place of the old one would lie elsewhere after every step.
        mean = mean.assign_add(gradient - (1 - self.momentum) * mean)
        ahead = gradient + self.momentum * mean
        return tf.cast(self.learning_rate, gradient.dtype) * orthogonal(ahead)

    def _adam(self, index: int, gradient):
        mean, square = self._means[index], self._squares[index]
        step = tf.cast(self.iterations + 1, gradient.dtype)
        corrected = tf.sqrt(1 - tf.pow(self.beta_2, step)) / (1 - tf.pow(self.beta_1, step))
        mean = mean.assign_add((gradient - mean) * (1 - self.beta_1))
        square = square.assign_add((tf.square(gradient) - square) * (1 - self.beta_2))
        rate = tf.cast(self.learning_rate, gradient.dtype) * self.adam_scale
        return rate * corrected * mean / (tf.sqrt(square) + self.epsilon)


def is_orthogonal(shape: Tuple[int, ...]) -> bool:
    """Whether a variable of this shape is a kernel of more than one voxel, whose updates are made orthogonal."""
    return len(shape) > 2 and math.prod(shape[:-2]) > 1


def orthogonal(kernel):
    """The orthogonal matrix nearest to a kernel (..., A, B) as a matrix of B columns, roughly, in the kernel's shape:
    singular values of 0.7 to 1.2, times the root of its rows over its columns where that is more than 1.

    A kernel's rows are its voxels times its inputs, A. Jordan's scale is the root of columns over rows: a decoder's
    first convolution, which has twice the rows, then learns more slowly than the others (docs/log.md).

    Newton and Schulz' iteration X <- X (a + b G + c G^2) with G = X'X. What X is multiplied with depends on G alone, so
    only that is iterated, B x B in size, and X, which has many more rows, is multiplied once.
    """
    matrix = tf.reshape(kernel, [-1, kernel.shape[-1]])
    rows, columns = matrix.shape
    wide = rows < columns
    gram = tf.matmul(matrix, matrix, transpose_a=not wide, transpose_b=wide)
    norm = tf.linalg.trace(gram) + 1e-30
    gram /= norm
    a, b, c = ITERATION
    # An operation: a constant would be part of the graph, and each of TensorFlow's passes over it keeps a copy, outside
    # the allocator. Without control dependencies, so that kernels of equal size share it.
    with tf.control_dependencies(None):
        scaled = {scale: scale * tf.eye(min(rows, columns), dtype=matrix.dtype) for scale in (a, b)}
    product = None
    for _ in range(TIMES):
        factor = scaled[a] + tf.matmul(gram, scaled[b] + c * gram)
        product = factor if product is None else tf.matmul(product, factor)
        gram = tf.matmul(tf.matmul(factor, gram), factor)
    found = tf.matmul(product, matrix) if wide else tf.matmul(matrix, product)
    return tf.reshape(found * (tf.math.rsqrt(norm) * math.sqrt(max(1.0, rows / columns))), kernel.shape)
