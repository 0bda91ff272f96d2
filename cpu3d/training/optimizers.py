"""The optimizers of models/optimizers.py on TensorFlow's tensors, as optimizers of Keras.

Muon makes all singular values of an update equal, so directions that few voxels support, such as a
small lesion's, move as far as those that all voxels support. records/log.md has the steps that this
saves. It is for kernels of more than one voxel; norms, biases and 1x1x1 kernels have Adam, at a
rate of its own: at a third of it the head and the norms learn too slowly, at any rate of the
kernels. One float32 slot a kernel, two for each variable of Adam's. An update's length does not
depend on that of the gradient, so one fixed rate serves every loss and data set."""

import math
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import tensorflow as tf

from models.native import operations
from models.optimizers import BETA_1, BETA_2, EPSILON, OPTIMIZERS, Weight

# Jordan's polynomial: a x + b x^3 + c x^5 takes singular values of 0.01 to 1 into 0.7 to 1.2 in
# five times.
ITERATION = (3.4445, -4.7750, 2.0315)
TIMES = 5
ADAM_SCALE = 1.5  # Adam's rate, of norms, biases and the head, as a share of Muon's


@tf.keras.utils.register_keras_serializable("cpu3d")
class RuleOptimizer(tf.keras.optimizers.Optimizer):
    """An optimizer of models/optimizers.py as one of Keras, by its name there.

    Each update waits for the one before: in any other order the places of small tensors, and
    whether a large one fits between them, would depend on timing. On a card Keras would compile
    each update as a graph of its own, which could not wait."""

    def __init__(
        self,
        rules: str = "muon",
        learning_rate: Optional[float] = None,
        momentum: Optional[float] = None,
        **options: Any,
    ):
        """`learning_rate` is of kernels, by default the optimizer's own; if other variables have a
        rule of their own, their rate is ADAM_SCALE times that. `options`
        are those of every Keras optimizer, such as `clipnorm`."""
        unless_given = {"name": rules, "weight_decay": None, "jit_compile": False}
        super().__init__(**{**unless_given, **options})
        self.rules = rules
        self.optimizer = OPTIMIZERS[rules]
        if learning_rate is None:
            learning_rate = self.optimizer.learning_rate
        if momentum is None:
            momentum = self.optimizer.momentum
        self._learning_rate = self._build_learning_rate(learning_rate)
        self.momentum = momentum

    def build(self, var_list: Sequence[tf.Variable]) -> None:
        super().build(var_list)
        if getattr(self, "_built", False):
            return
        rules = [self.optimizer.rule_of(variable.shape) for variable in var_list]
        places = [
            (number, index) for index, rule in enumerate(rules) for number in range(len(rule.slots))
        ]
        if self.optimizer.slots_in_turn:
            places.sort()
        self._slots: List[List[tf.Variable]] = [[] for _ in var_list]
        for number, index in places:
            name = rules[index].slots[number]
            slot = self.add_variable_from_reference(var_list[index], name)
            self._slots[index].append(slot)
        self._built = True

    def apply_gradients(self, *arguments: Any, **options: Any) -> Any:
        self._forget()
        try:
            return super().apply_gradients(*arguments, **options)
        finally:  # tensors left in them would be saved with a model
            self._forget()

    def _forget(self) -> None:
        self._before: List[tf.Tensor] = []  # the last update
        self._shared: Dict[str, Any] = {}  # tensors that the updates share

    def update_step(self, gradient: tf.Tensor, variable: tf.Variable) -> None:
        index = self._index_dict[self._var_key(variable)]
        rule = self.optimizer.rule_of(variable.shape)
        with tf.control_dependencies(self._before):
            weight = _Tensors(self, variable, tf.convert_to_tensor(gradient), self._slots[index])
            self._before = [rule.update(weight)]

    def get_config(self) -> Dict[str, Any]:
        return {
            **super().get_config(),
            "rules": self.rules,
            "learning_rate": self._serialize_hyperparameter(self._learning_rate),
            "momentum": self.momentum,
        }

    def rate_of(self, variable: tf.Variable) -> tf.Tensor:
        """The learning rate of a variable."""
        rule = self.optimizer.rule_of(variable.shape)
        is_other = self.optimizer.has_two_rates and rule is self.optimizer.others
        scale = ADAM_SCALE if is_other else 1.0

        def make() -> tf.Tensor:
            rate = tf.cast(self.learning_rate, variable.dtype)
            if scale != 1:
                rate = rate * scale
            if not rule.is_corrected:
                return rate
            step = tf.cast(self.iterations + 1, variable.dtype)
            corrected = tf.sqrt(1 - tf.pow(BETA_2, step)) / (1 - tf.pow(BETA_1, step))
            return rate * corrected

        return self.once(f"rate, {scale}, {rule.is_corrected}", make)

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """A tensor that the updates of a step share, made once. It waits for none of them."""
        if name not in self._shared:
            with tf.control_dependencies(None):
                self._shared[name] = make()
        return self._shared[name]


class _Tensors(Weight):
    """A variable and its tensors, as a rule takes them."""

    def __init__(
        self,
        optimizer: RuleOptimizer,
        variable: tf.Variable,
        gradient: tf.Tensor,
        slots: Sequence[tf.Variable],
    ):
        self._optimizer = optimizer
        self.value = variable
        self.gradient = gradient
        self.slots = slots
        self.rate = optimizer.rate_of(variable)
        self.momentum = self.number(optimizer.momentum)
        self.one_less_momentum = self.number(1 - optimizer.momentum)
        self.one_less_beta_1 = self.number(1 - BETA_1)
        self.one_less_beta_2 = self.number(1 - BETA_2)
        self.epsilon = self.number(EPSILON)

    def number(self, value: float) -> tf.Tensor:
        dtype = self.gradient.dtype
        return self._optimizer.once(f"{value}", lambda: tf.constant(value, dtype))

    def each(self, function: str, tensor: tf.Tensor) -> tf.Tensor:
        return getattr(tf.math, function)(tensor)

    def orthogonal(self, tensor: tf.Tensor) -> tf.Tensor:
        if operations.in_use() and tensor.dtype == tf.float32:
            return operations.orthogonal(tensor)
        side = min(matrix_shape(tensor.shape))
        terms = self._optimizer.once(f"terms {side}", lambda: first_terms(side, tensor.dtype))
        return orthogonal(tensor, terms)


def matrix_shape(shape: Tuple[int, ...]) -> Tuple[int, int]:
    """Rows, a kernel's voxels times its inputs, and columns, its outputs."""
    return math.prod(shape[:-1]), shape[-1]


def first_terms(side: int, dtype: tf.DType) -> Tuple[tf.Tensor, tf.Tensor]:
    """The terms that the polynomial of a `side` x `side` matrix is added to, for all kernels of
    that side.

    Operations: a constant would be part of the graph, and each of TensorFlow's passes over it keeps
    a copy, outside the allocator."""
    a, b, c = ITERATION
    identity = tf.eye(side, dtype=dtype)
    return a * identity, b / math.sqrt(c) * identity


def orthogonal(kernel: tf.Tensor, terms: Optional[Tuple[tf.Tensor, tf.Tensor]] = None) -> tf.Tensor:
    """The orthogonal matrix nearest to a kernel (..., A, B) as a matrix of B columns, roughly, in
    the kernel's shape: singular values of 0.7 to 1.2, times the root of its rows over its columns
    if that is more than 1. `terms` are `first_terms` of the smaller side.

    A kernel's rows are its voxels times its inputs, A. Jordan's scale is the root of columns over
    rows: a decoder's first convolution, which has twice the rows, then learns more slowly than the
    others (records/log.md).

    Newton and Schulz' iteration X <- X (a + b G + c G^2) with G = X'X. The factor of X depends on G
    alone, so only that is iterated, B x B in size, times the root of c, and X, which has many more
    rows, is multiplied once. `operations.orthogonal` is the same, faster, where native operations
    run."""
    rows, columns = matrix_shape(kernel.shape)
    matrix = tf.reshape(kernel, (rows, columns))
    wide = rows < columns
    gram = tf.matmul(matrix, matrix, transpose_a=not wide, transpose_b=wide)
    square = 2 * tf.nn.l2_loss(matrix) + 1e-30
    gram *= math.sqrt(ITERATION[2]) / square
    first, second = terms or first_terms(min(rows, columns), matrix.dtype)
    product = None
    for time in range(TIMES):
        factor = first + tf.matmul(gram, second + gram)
        product = factor if product is None else tf.matmul(product, factor)
        if time < TIMES - 1:
            gram = tf.matmul(tf.matmul(factor, gram), factor)
    nearest = tf.matmul(product, matrix) if wide else tf.matmul(matrix, product)
    return tf.reshape(
        nearest * (tf.math.rsqrt(square) * math.sqrt(max(1.0, rows / columns))), kernel.shape
    )
