"""The compiled training step: network, loss, optimizer and averaged weights. `train` and `bench step` both run this.

A batch that is computed in parts is one compiled function for each part, which adds its gradients to sums, and one that
updates the weights from them. Its peak is that of one part and one set of gradients.
"""

import contextlib
from typing import Dict, Iterator, List, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf

from cpu3d.config import RunConfig
from cpu3d.errors import InputError
from cpu3d.losses import deep_supervision_loss, dice_cross_entropy
from memory_estimator.host import read_host
from memory_estimator.region import MIB, region_bytes
from models.unet3d import build_unet3d


class Learner:
    """What a run learns with. Everything a restart needs is in `arrays()`."""

    def __init__(self, config: RunConfig):
        self.config = config
        if config.device == "cpu":
            take_region(region_bytes(config.unet, config.grid, config.micro, read_host().memory_bytes))
        self.model = build_unet3d(config.unet, config.grid, config.micro)
        self.optimizer = optimizer_of(config)
        self.optimizer.build(self.model.trainable_variables)
        self._average = [tf.Variable(v, trainable=False) for v in self.model.trainable_variables] if config.ema else []
        self._updates = tf.Variable(0, dtype=tf.int64, trainable=False)
        # Not in a checkpoint: every step starts them at zero.
        summed = self.model.trainable_variables if config.parts > 1 else []
        self._sums = [tf.Variable(tf.zeros(v.shape), trainable=False) for v in summed]
        self._step = tf.function(self._train)
        self._accumulate = tf.function(self._add_part)
        self._apply = tf.function(self._update_from_sums)
        self._predict = tf.function(self._infer)

    def step(self, parts: Iterator[Tuple[tf.Tensor, tf.Tensor]], learning_rate: float) -> Tuple[float, np.ndarray]:
        """One optimizer step on the next `config.parts` of `parts`, which are taken one after another.

        A part is image (micro, X, Y, Z, C) and target (micro, X, Y, Z, R) uint8. Returns the loss and the soft Dice
        (batch, R), both before the update. A batch in several parts ends with the first whose loss is not finite: that
        is the loss returned then, and the weights stay as they were.
        """
        self.optimizer.learning_rate.assign(learning_rate)
        if self.config.parts == 1:
            loss, dice = self._step(*next(parts))
            return float(loss), dice.numpy()
        for total in self._sums:
            total.assign(tf.zeros(total.shape))
        losses, scores = [], []
        for _ in range(self.config.parts):
            loss, dice = self._accumulate(*next(parts))  # no name is kept for a part: it would live beside the next one
            losses.append(float(loss))
            scores.append(dice.numpy())
            if not np.isfinite(losses[-1]):
                return losses[-1], np.concatenate(scores)
        self._apply()
        return float(np.mean(losses)), np.concatenate(scores)

    def logits(self, image) -> tf.Tensor:
        """Logits (N, X, Y, Z, R) of the finest head, inference mode."""
        return self._predict(image)

    def arrays(self) -> Dict[str, np.ndarray]:
        """Every variable by a stable name: the network's, the optimizer's, the averaged ones."""
        return {name: variable.numpy() for name, variable in self._variables().items()}

    def restore(self, arrays: Dict[str, np.ndarray]) -> None:
        """The way back from `arrays()`. Raises InputError when names or shapes are another network's."""
        variables = self._variables()
        if set(arrays) != set(variables):
            odd = sorted(set(arrays) ^ set(variables))
            raise InputError(
                f"checkpoint must hold this run's {len(variables)} variables, got others at {', '.join(odd[:3])}; "
                "it belongs to another run"
            )
        for name, variable in variables.items():
            if arrays[name].shape != tuple(variable.shape):
                raise InputError(
                    f"checkpoint array {name} must have shape {tuple(variable.shape)}, got {arrays[name].shape}; "
                    "it belongs to another run"
                )
            variable.assign(arrays[name])

    def weights(self) -> Dict[str, np.ndarray]:
        """The network's weights alone, averaged where the run averages: what prediction needs."""
        averaged = {id(v): mean for v, mean in zip(self.model.trainable_variables, self._average)}
        names = weight_names(self.model.weights)
        return {name: averaged.get(id(v), v).numpy() for name, v in zip(names, self.model.weights)}

    def swap_average(self) -> None:
        """Exchange the network's weights with their average; a second call puts them back. Nothing without EMA."""
        for variable, mean in zip(self.model.trainable_variables, self._average):
            current = variable.numpy()
            variable.assign(mean)
            mean.assign(current)

    def _variables(self) -> Dict[str, tf.Variable]:
        groups = {"model": self.model.weights, "optimizer": self.optimizer.variables, "average": self._average}
        named = {f"{group}/{i:03d}": v for group, found in groups.items() for i, v in enumerate(found)}
        return {**named, "updates": self._updates}

    # --- Traced ---

    def _train(self, image, target):
        loss, dice, gradients = self._gradients(image, target)
        self._update(gradients)
        return loss, dice

    def _add_part(self, image, target):
        loss, dice, gradients = self._gradients(image, target)
        # All of them first: an addition in between would have its turn by accident, and memory with it.
        with tf.control_dependencies(gradients):
            for total, gradient in zip(self._sums, gradients):
                total.assign_add(gradient)
        return loss, dice

    def _update_from_sums(self):
        self._update([tf.convert_to_tensor(total) for total in self._sums])

    def _gradients(self, image, target):
        """Loss, soft Dice, and the gradients of the part's share in the loss of the batch."""
        with tf.GradientTape() as tape:
            logits = self.model(image, training=True)
            many = isinstance(logits, (list, tuple))
            loss_of = deep_supervision_loss if many else dice_cross_entropy
            loss, dice = loss_of(target, logits, by_slabs=self.config.unet.policy != "speed")
            share = loss / self.config.parts if self.config.parts > 1 else loss
        return loss, dice, tape.gradient(share, self.model.trainable_variables)

    def _update(self, gradients):
        # Left alone, updates and gradients take turns by accident; memory is then hard to tell beforehand.
        with tf.control_dependencies(gradients):
            self.optimizer.apply_gradients(zip(gradients, self.model.trainable_variables))
        self._updates.assign_add(1)
        # The early average is a plain mean: 1 - 1/n until the decay is reached, so that it never starts from noise.
        updates = tf.cast(self._updates, tf.float32)
        for mean, variable in zip(self._average, self.model.trainable_variables):
            decay = tf.minimum(self.config.ema, 1 - 1 / updates)
            mean.assign(decay * mean + (1 - decay) * variable)

    def _infer(self, image):
        return finest(self.model(image, training=False))


def optimizer_of(config: RunConfig) -> tf.keras.optimizers.Optimizer:
    """The optimizer that a run asks for, fresh."""
    if config.optimizer == "sgd":
        return tf.keras.optimizers.SGD(config.learning_rate, momentum=0.99, nesterov=True)
    return tf.keras.optimizers.Adam(config.learning_rate)


def take_region(size_bytes: int) -> None:
    """Have the allocator make a region of whole MiB; nothing is written to it. One that is refused is done without."""
    if size_bytes:
        with contextlib.suppress(tf.errors.ResourceExhaustedError), tf.device("CPU:0"):
            tf.raw_ops.Empty(shape=[size_bytes // MIB, MIB], dtype=tf.uint8)


def finest(logits) -> tf.Tensor:
    """The full-resolution logits of a network's answer, which is a list under deep supervision."""
    return logits[0] if isinstance(logits, (list, tuple)) else logits


def weight_names(weights: Sequence[tf.Variable]) -> List[str]:
    """What a checkpoint calls a network's weights, in Keras' order."""
    return [f"model/{index:03d}" for index in range(len(weights))]


def parameter_count(model: tf.keras.Model) -> int:
    """Trainable parameters."""
    return int(sum(np.prod(v.shape) for v in model.trainable_variables))


def allocator_peak_bytes(device: str = "CPU:0") -> Optional[int]:
    """TensorFlow's own count of its largest heap, in bytes; None where the allocator keeps none (oneDNN off)."""
    try:
        return int(tf.config.experimental.get_memory_info(device)["peak"])
    except (ValueError, KeyError, tf.errors.OpError):
        return None
