"""Muon, whose update of a kernel is its momentum made orthogonal (Jordan 2024, "Muon: an optimizer
for hidden layers in neural networks"); Adam and Nesterov's SGD. Each updates one variable after
another.

All singular values become equal, so directions that few voxels support, such as a small lesion's,
move as far as those that all voxels support. docs/log.md has the steps that this saves."""

import math
from typing import Any, Callable, Optional, Tuple

import tensorflow as tf

from cpu3d.settings import RunConfig
from memory_estimator.job import is_orthogonal
from models.native import operations

# Jordan's polynomial: a x + b x^3 + c x^5 takes singular values of 0.01 to 1 into 0.7 to 1.2 in
# five times.
ITERATION = (3.4445, -4.7750, 2.0315)
TIMES = 5


class InOrder(tf.keras.optimizers.Optimizer):
    """A Keras optimizer whose updates each wait for the one before. In any other order the places
    of small tensors, and whether a large one fits between them, would depend on timing. On a card
    Keras would compile each update as a graph of its own, which could not wait."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **{"jit_compile": False, **options})

    def apply_gradients(self, *arguments, **options):
        self._before = []  # the last update
        self._shared = {}  # tensors that the updates of a subclass share
        try:
            return super().apply_gradients(*arguments, **options)
        finally:  # tensors left in them would be saved with a model
            self._before = []
            self._shared = {}

    def update_step(self, gradient, variable) -> None:
        with tf.control_dependencies(self._before):
            self._before = [self.change(gradient, variable)]

    def change(self, gradient, variable):
        """Update a variable; returns the tensor that the next update waits for."""
        super().update_step(gradient, variable)
        return variable.read_value()


class Adam(InOrder, tf.keras.optimizers.Adam):
    """Keras' own Adam, in order."""


class Sgd(InOrder, tf.keras.optimizers.SGD):
    """Nesterov's momentum, in place: a new one, as Keras makes it, would be elsewhere after every
    step."""

    def change(self, gradient, variable):
        mean = self.momentums[self._index_dict[self._var_key(variable)]]
        step = tf.cast(self.learning_rate, variable.dtype) * gradient
        mean.assign_sub((1 - self.momentum) * mean + step)
        return variable.assign_add(self.momentum * mean - step)


@tf.keras.utils.register_keras_serializable("cpu3d")
class Muon(InOrder):
    """Muon for kernels of more than one voxel, Adam (Kingma 2015) for norms, biases and 1x1x1
    kernels.

    One float32 slot a kernel, two for each variable of Adam's.

    An update's length does not depend on that of the gradient, so one fixed rate serves every loss
    and data set. Adam's part has a rate of its own: at a third of it the head and the norms learn
    too slowly, at any rate of the kernels."""

    def __init__(
        self,
        learning_rate=0.02,
        adam_scale: float = 1.5,
        momentum: float = 0.95,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        kernel_decay: float = 0.0,
        name: str = "Muon",
        **options,
    ):
        """`learning_rate` is of kernels; Adam's is `adam_scale` times that. `momentum` is of
        kernels, with Nesterov's look-ahead. Each step takes `learning_rate` times `kernel_decay` of
        a kernel away, as in AdamW (Loshchilov and Hutter 2019): a norm follows each, so only its
        direction counts, and one that grows learns more slowly. `options` are those of every Keras
        optimizer, such as `clipnorm`."""
        super().__init__(name=name, **{"weight_decay": None, **options})
        self._learning_rate = self._build_learning_rate(learning_rate)
        self.adam_scale = adam_scale
        self.momentum = momentum
        self.beta_1 = beta_1
        self.beta_2 = beta_2
        self.epsilon = epsilon
        self.kernel_decay = kernel_decay

    def build(self, var_list) -> None:
        super().build(var_list)
        if getattr(self, "_built", False):
            return
        self._means = [self.add_variable_from_reference(v, "mean") for v in var_list]
        self._squares = []  # by the index of a variable; None for those that Adam does not update
        for variable in var_list:
            square = None
            if not is_orthogonal(variable.shape):
                square = self.add_variable_from_reference(variable, "square")
            self._squares.append(square)
        self._built = True

    def change(self, gradient, variable):
        index = self._index_dict[self._var_key(variable)]
        gradient = tf.convert_to_tensor(gradient)
        if not is_orthogonal(variable.shape):
            return variable.assign_sub(self._adam(index, gradient))
        before = []
        if self.kernel_decay:
            decay = self._constant(self.kernel_decay, gradient.dtype)
            share = self._kernel_rate(gradient.dtype) * decay
            before = [variable.assign_sub(share * variable)]
        with tf.control_dependencies(before):  # or both would hold a tensor of the kernel's size
            return variable.assign_sub(self._muon(index, gradient))

    def get_config(self):
        names = ("adam_scale", "momentum", "beta_1", "beta_2", "epsilon", "kernel_decay")
        own = {name: getattr(self, name) for name in names}
        return {
            **super().get_config(),
            "learning_rate": self._serialize_hyperparameter(self._learning_rate),
            **own,
        }

    def _muon(self, index: int, gradient):
        mean = self._means[index]
        dtype = gradient.dtype
        rate = self._kernel_rate(dtype)
        # Added to in place: a new mean instead of the old one would be elsewhere after every step.
        mean = mean.assign_add(gradient - self._constant(1 - self.momentum, dtype) * mean)
        ahead = gradient + self._constant(self.momentum, dtype) * mean
        if operations.in_use() and dtype == tf.float32:
            return rate * operations.orthogonal(ahead)
        side = min(matrix_shape(gradient.shape))
        terms = self._once(f"terms {side}", lambda: first_terms(side, dtype))
        return rate * orthogonal(ahead, terms)

    def _kernel_rate(self, dtype):
        return self._once("kernels' rate", lambda: tf.cast(self.learning_rate, dtype))

    def _adam(self, index: int, gradient):
        mean = self._means[index]
        square = self._squares[index]
        dtype = gradient.dtype
        rate = self._once("rate", lambda: self._adam_rate(dtype))
        new_share = self._constant(1 - self.beta_1, dtype)
        mean = mean.assign_add((gradient - mean) * new_share)
        new_share = self._constant(1 - self.beta_2, dtype)
        square = square.assign_add((tf.square(gradient) - square) * new_share)
        return rate * mean / (tf.sqrt(square) + self._constant(self.epsilon, dtype))

    def _adam_rate(self, dtype):
        """Adam's rate, corrected for means that begin at 0."""
        step = tf.cast(self.iterations + 1, dtype)
        corrected = tf.sqrt(1 - tf.pow(self.beta_2, step)) / (1 - tf.pow(self.beta_1, step))
        return tf.cast(self.learning_rate, dtype) * self.adam_scale * corrected

    def _constant(self, value: float, dtype):
        return self._once(f"{value}", lambda: tf.constant(value, dtype))

    def _once(self, name: str, make: Callable[[], Any]) -> Any:
        """A tensor that the updates of a step share, made once. It waits for none of them."""
        if name not in self._shared:
            with tf.control_dependencies(None):
                self._shared[name] = make()
        return self._shared[name]


def optimizer_of(config: RunConfig) -> tf.keras.optimizers.Optimizer:
    """A new optimizer with the settings of a run; its facts are in
    `memory_estimator.job.OPTIMIZERS`."""
    rate = config.peak_rate
    if config.optimizer == "muon":
        return Muon(rate, config.adam_rate / rate, kernel_decay=config.weight_decay)
    if config.optimizer == "adam":
        return Adam(rate)
    return Sgd(rate, momentum=0.99)


def matrix_shape(shape: Tuple[int, ...]) -> Tuple[int, int]:
    """Rows, a kernel's voxels times its inputs, and columns, its outputs."""
    return math.prod(shape[:-1]), shape[-1]


def first_terms(side: int, dtype) -> Tuple[tf.Tensor, tf.Tensor]:
    """The terms that the polynomial of a `side` x `side` matrix is added to, for all kernels of
    that side.

    Operations: a constant would be part of the graph, and each of TensorFlow's passes over it keeps
    a copy, outside the allocator."""
    a, b, c = ITERATION
    identity = tf.eye(side, dtype=dtype)
    return a * identity, b / math.sqrt(c) * identity


def orthogonal(kernel, terms: Optional[Tuple[tf.Tensor, tf.Tensor]] = None):
    """The orthogonal matrix nearest to a kernel (..., A, B) as a matrix of B columns, roughly, in
    the kernel's shape: singular values of 0.7 to 1.2, times the root of its rows over its columns
    if that is more than 1. `terms` are `first_terms` of the smaller side.

    A kernel's rows are its voxels times its inputs, A. Jordan's scale is the root of columns over
    rows: a decoder's first convolution, which has twice the rows, then learns more slowly than the
    others (docs/log.md).

    Newton and Schulz' iteration X <- X (a + b G + c G^2) with G = X'X. The factor of X depends on G
    alone, so only that is iterated, B x B in size, times the root of c, and X, which has many more
    rows, is multiplied once. `operations.orthogonal` is the same, faster, where own operations run.
    """
    rows, columns = matrix_shape(kernel.shape)
    is_wide = rows < columns
    matrix = tf.reshape(kernel, (rows, columns))
    gram = tf.matmul(matrix, matrix, transpose_a=not is_wide, transpose_b=is_wide)
    square = 2 * tf.nn.l2_loss(matrix) + 1e-30
    gram *= math.sqrt(ITERATION[2]) / square
    if terms is None:
        terms = first_terms(min(rows, columns), matrix.dtype)
    first, second = terms
    product = None
    for time in range(TIMES):
        factor = first + tf.matmul(gram, second + gram)
        product = factor if product is None else tf.matmul(product, factor)
        if time < TIMES - 1:
            gram = tf.matmul(tf.matmul(factor, gram), factor)
    nearest = tf.matmul(product, matrix) if is_wide else tf.matmul(matrix, product)
    scale = tf.math.rsqrt(square) * math.sqrt(max(1.0, rows / columns))
    return tf.reshape(nearest * scale, kernel.shape)
