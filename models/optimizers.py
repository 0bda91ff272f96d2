"""How each optimizer changes a weight, written once: as arithmetic on whatever stands for the
weight's tensors. No TensorFlow.

cpu3d/training/optimizers.py runs a rule on tensors, and the memory estimator on their sizes
(memory_estimator/step/update.py). A new optimizer is a rule and a record of OPTIMIZERS.
"""

import math
from dataclasses import dataclass
from typing import Any, Callable, Sequence, Tuple

MOMENTUM = 0.95  # of Muon
SGD_MOMENTUM = 0.99
BETA_1 = 0.9  # of Adam's mean
BETA_2 = 0.999  # of its square
EPSILON = 1e-7


class Weight:
    """A variable that is updated. Its tensors have the shape of its value, and take +, -, *, / with
    each other, and * with numbers; a slot and the value also `assign_add` and `assign_sub`, which
    return what it is then.

    Whoever runs a rule has a class like this.
    """

    value: Any
    gradient: Any
    slots: Sequence[Any]  # by the names that the rule has for them
    rate: Any  # the learning rate
    momentum: Any  # of the optimizer: these are numbers
    one_less_momentum: Any
    one_less_beta_1: Any
    one_less_beta_2: Any
    epsilon: Any

    def each(self, function: str, tensor: Any) -> Any:
        """A function of TensorFlow's `tf.math` of each of its values, such as "sqrt"."""
        raise NotImplementedError

    def orthogonal(self, tensor: Any) -> Any:
        """The orthogonal matrix nearest to a kernel, as `models.native.operations.orthogonal`."""
        raise NotImplementedError


def _muon(weight: Weight) -> Any:
    """Jordan 2024, "Muon: an optimizer for hidden layers in neural networks": the momentum with
    Nesterov's look-ahead, made orthogonal. The mean is added to in place: a new one instead would
    be elsewhere in memory after every step."""
    (mean,) = weight.slots
    mean = mean.assign_add(weight.gradient - weight.one_less_momentum * mean)
    ahead = weight.gradient + weight.momentum * mean
    return weight.value.assign_sub(weight.rate * weight.orthogonal(ahead))


def _adam(weight: Weight) -> Any:
    """Kingma and Ba 2015."""
    mean, square = weight.slots
    mean = mean.assign_add((weight.gradient - mean) * weight.one_less_beta_1)
    square_change = weight.each("square", weight.gradient) - square
    square = square.assign_add(square_change * weight.one_less_beta_2)
    step = weight.rate * mean / (weight.each("sqrt", square) + weight.epsilon)
    return weight.value.assign_sub(step)


def _momentum(weight: Weight) -> Any:
    """Gradient descent with Nesterov's momentum, in place: m -= (1 - d) m + r g, w += d m - r g."""
    (mean,) = weight.slots
    step = weight.rate * weight.gradient
    mean = mean.assign_sub(weight.one_less_momentum * mean + step)
    return weight.value.assign_add(weight.momentum * mean - step)


@dataclass(frozen=True)
class Rule:
    """How one weight is changed."""

    update: Callable[[Weight], Any]  # returns the weight's new value
    slots: Tuple[str, ...]  # float32 tensors of the weight's shape that are kept from step to step
    is_corrected: bool = False  # whether Adam's bias correction is in the rate


MUON = Rule(_muon, ("mean",))
ADAM = Rule(_adam, ("mean", "square"), is_corrected=True)
DESCENT = Rule(_momentum, ("mean",))


@dataclass(frozen=True)
class Optimizer:
    """An optimizer of all weights."""

    learning_rate: (
        float  # if none is chosen: the best of several on untouched cases (records/log.md)
    )
    kernels: Rule  # of kernels of more than one voxel
    others: Rule  # of norms, biases and 1x1x1 kernels
    momentum: float = MOMENTUM
    slots_in_turn: bool = False
    """Whether the first slots of all weights are made before the second ones."""

    @property
    def has_two_rates(self) -> bool:
        return self.kernels is not self.others

    def rule_of(self, shape: Sequence[int]) -> Rule:
        """The rule of a variable of this shape."""
        return self.kernels if is_kernel(shape) else self.others


def is_kernel(shape: Sequence[int]) -> bool:
    """Whether a variable of this shape is a kernel of more than one voxel."""
    return len(shape) > 2 and math.prod(shape[:-2]) > 1


OPTIMIZERS = {
    "muon": Optimizer(0.02, kernels=MUON, others=ADAM, slots_in_turn=True),
    "adam": Optimizer(0.01, kernels=ADAM, others=ADAM),
    "sgd": Optimizer(0.1, kernels=DESCENT, others=DESCENT, momentum=SGD_MOMENTUM),
}
