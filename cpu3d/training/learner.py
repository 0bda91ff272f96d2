"""The compiled training step: network, loss and optimizer. `train` and `bench step` both
run this.

A batch in micro-batches is one compiled function for each, which adds its gradients to sums, and
one that updates the weights from them, in the memory of one micro-batch and one set of gradients.
The sums of several workers, each of which has its share of the micro-batches, are added up once a
step, and each updates its own weights from that, to the bit."""

import functools
import time
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterator, List, Mapping, Sequence, Tuple

import numpy as np
import tensorflow as tf

from cpu3d.data.region import Array
from cpu3d.distributed.all_reduce import ALONE, Exchange, array_from_chief
from cpu3d.errors import InputError, WorkerLostError, WorkersDifferError
from cpu3d.settings import RunConfig
from cpu3d.training.optimizers import RuleOptimizer
from models.losses import DEFAULT_LOSS
from models.unet3d import build_unet3d, finest, weight_names
from models.weights import is_frozen


@dataclass(frozen=True)
class Outcome:
    """The outcome of a step, the same on all workers."""

    losses: Array
    """Loss of each micro-batch before the update; not finite if its gradients are not. A worker
    skips its micro-batches after one that is not finite; their losses are 0."""
    dice: Array  # (batch, R) soft Dice before the update
    notes: Array  # (workers,) each worker's `note`
    exchange_s: float = 0.0  # of summing the workers' gradients, waiting for the slowest included

    @property
    def loss(self) -> float:
        """The loss of the batch; not finite if the weights were not updated."""
        return float(np.mean(self.losses, dtype=np.float64))


class Learner:
    """The network of a run with its optimizer. `arrays()` is all that a restart needs."""

    def __init__(self, config: RunConfig, exchange: Exchange = ALONE):
        self.config = config
        self._exchange = exchange
        self.model = build_unet3d(config.unet, batch_size=config.micro)
        for layer in self.model.layers:
            layer.trainable = not is_frozen(layer.name, config.freeze)
        # Those that a step moves without a gradient: frozen layers have none.
        self._moving = [
            statistic
            for layer in self.model.layers
            if layer.trainable
            for statistic in layer.non_trainable_variables
        ]
        self.optimizer = RuleOptimizer(config.optimizer, config.peak_rate)
        weights = self.model.trainable_variables
        self.optimizer.build(weights)
        self._updates = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._sums = []  # of gradients; not in a checkpoint, as they are zero at each step
        if config.micro_batches > 1:
            self._sums = [tf.Variable(tf.zeros(v.shape), trainable=False) for v in weights]
        # Without autograph: nothing in them branches on a tensor.
        compiled = functools.partial(tf.function, autograph=False)
        # Volumes of any size, for which one function is traced.
        volume = (config.micro, None, None, None)
        image = tf.TensorSpec((*volume, config.unet.channels), config.unet.dtype)
        target = tf.TensorSpec((*volume, config.unet.outputs), tf.uint8)
        one = tf.TensorSpec((1, *image.shape[1:]), image.dtype)
        self._step = compiled(self._train, [image, target])
        self._accumulate = compiled(self._add_micro_batch, [image, target])
        self._pack = compiled(self._packed)
        self._take = compiled(self._take_vector)
        self._apply = compiled(
            lambda: self._update([tf.convert_to_tensor(total) for total in self._sums])
        )
        self._predict = compiled(lambda image: finest(self.model(image, training=False)), [one])

    def step(
        self,
        micro_batches: Iterator[Tuple[tf.Tensor, tf.Tensor]],
        learning_rate: float,
        note: Callable[[], float] = lambda: 0.0,
        before_exchange: Callable[[], None] = lambda: None,
    ) -> Outcome:
        """Take an optimizer step on this worker's next micro-batches: image (micro, X, Y, Z, C) and
        target (micro, X, Y, Z, R) uint8. `note` is asked for a number once the gradients are
        there; all workers get it. With a loss that is not finite no worker updates its weights if
        there are several micro-batches; a single one updates them in any case.

        Raises WorkerLostError if another worker is gone, with all variables as they were before the
        step, and WorkersDifferError if one has other weights than the chief."""
        config = self.config
        self.optimizer.learning_rate.assign(learning_rate)
        if config.micro_batches == 1:
            loss, dice = self._step(*next(micro_batches))
            return Outcome(np.array([float(loss)]), dice.numpy(), np.array([note()]))
        self._clear_sums()
        before = []
        if self._exchange.count > 1:
            before = [moving.numpy() for moving in self._moving]
        share = config.micro_batches // self._exchange.count
        first = self._exchange.rank * share
        losses = np.zeros(config.micro_batches, np.float32)
        dice = np.zeros((config.batch, config.unet.outputs), np.float32)
        for index in range(first, first + share):
            # No name is kept for a micro-batch: it would live beside the next one.
            loss, own_dice = self._accumulate(*next(micro_batches))
            losses[index] = loss
            dice[index * config.micro : (index + 1) * config.micro] = own_dice
            if not np.isfinite(losses[index]):
                break
        own_note = float(note())
        notes = np.array([own_note])
        exchange_s = 0.0
        if self._exchange.count > 1:
            before_exchange()
            begin = time.perf_counter()
            try:
                losses, dice, notes = self._summed(losses, dice, own_note)
            except WorkerLostError:
                for moving, value in zip(self._moving, before):
                    moving.assign(value)
                raise
            exchange_s = time.perf_counter() - begin
        if np.isfinite(losses).all():
            self._apply()
        else:
            for total in self._sums:
                total.assign(tf.zeros(total.shape))
        return Outcome(losses, dice, notes, exchange_s)

    def logits(self, image: tf.Tensor) -> tf.Tensor:
        """Logits (N, X, Y, Z, R) of the finest head, inference mode."""
        return self._predict(image)

    def arrays(self) -> Dict[str, tf.Tensor]:
        """Every variable by a stable name, as a tensor on the same memory: a step that changes it
        copies it first."""
        return {name: variable.read_value() for name, variable in self.named_variables().items()}

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest of `arrays()`: the memory of a save, which writes one after
        another."""
        return max(v.dtype.size * v.shape.num_elements() for v in self.named_variables().values())

    @property
    def parameters(self) -> int:
        """The number of trainable parameters."""
        return sum(v.shape.num_elements() for v in self.model.trainable_variables)

    def start_from(self, first: Callable[[str, Array], Array]) -> None:
        """Take the network's first weights from a function of a weight's name in `arrays()` and of
        what it is by itself."""
        for name, weight in zip(weight_names(self.model.weights), self.model.weights):
            weight.assign(first(name, weight.numpy()))

    def restore(self, arrays: Mapping[str, Any]) -> None:
        """Assign `arrays()`, one at a time. Raises InputError for names or shapes of another
        run."""
        variables = self.named_variables()
        shapes = {name: tuple(variable.shape) for name, variable in variables.items()}
        got = {name: tuple(array.shape) for name, array in arrays.items()}
        if got != shapes:
            differing = [name for name in {**got, **shapes} if got.get(name) != shapes.get(name)]
            rule = f"checkpoint must hold this run's {len(variables)} variables"
            raise InputError(f"{rule}, got others for {differing[:3]}; it belongs to another run")
        for name, variable in variables.items():
            variable.assign(arrays[name])

    def take_from_chief(self) -> None:
        """Take the chief's value of every variable; all workers call this at once."""
        for variable in self.named_variables().values():
            variable.assign(array_from_chief(self._exchange, np.asarray(variable.read_value())))

    def release(self) -> None:
        """Give back the memory of all variables; the learner cannot be used any more. TensorFlow
        keeps the resources that a compiled function has read after the function is gone."""
        for variable in (*self.named_variables().values(), *self._sums):
            nothing = tf.zeros((0,), variable.dtype)
            tf.raw_ops.AssignVariableOp(resource=variable.handle, value=nothing)

    def weights(self) -> Dict[str, tf.Tensor]:
        """The network's weights alone, for prediction. As `arrays()`."""
        names = weight_names(self.model.weights)
        return {name: weight.read_value() for name, weight in zip(names, self.model.weights)}

    def named_variables(self) -> Dict[str, tf.Variable]:
        """Every variable by its name in `arrays()`."""
        groups = {
            "model": self.model.weights,
            "optimizer": self.optimizer.variables,
        }
        named = {
            f"{group}/{i:03d}": v
            for group, members in groups.items()
            for i, v in enumerate(members)
        }
        return {**named, "updates": self._updates}

    # --- Workers ---

    def _summed(self, losses: Array, dice: Array, note: float) -> Tuple[Array, Array, Array]:
        """Losses, Dice and notes of all workers, summed in one vector with the gradients, which
        `_take` puts in place."""
        workers = self._exchange.count
        is_native = np.zeros(workers, np.float32)  # 1 at this worker's rank
        is_native[self._exchange.rank] = 1
        total = self._exchange.sum(self._pack(losses, dice, note * is_native, is_native))
        sizes = (losses.size, dice.size, workers, workers)  # in the order of `_packed`
        end = total[-sum(sizes) :].numpy()
        losses, all_dice, notes, fingerprints = np.split(end, np.cumsum(sizes)[:-1])
        differing = np.flatnonzero(fingerprints != fingerprints[0])
        if differing.size:
            listed = [f"{fingerprints[rank]:.0f} on worker {rank}" for rank in (0, *differing)]
            rule = "weights must be the same on all workers"
            todo = "take out the host that computes wrong, or has another kind of CPU"
            raise WorkersDifferError(
                f"{rule}, got fingerprints {', '.join(listed)}; {todo}, then the same command "
                "continues from the last checkpoint"
            )
        self._take(total)
        return losses, all_dice.reshape(dice.shape), notes

    # --- Traced ---

    def _clear_sums(self) -> None:
        """Make the finite sums zeros where they are. `assign` would move them: each step would find
        another layout of memory, and some would take more than others."""
        for total in self._sums:
            total.assign_add(-total)

    def _packed(
        self, losses: tf.Tensor, dice: tf.Tensor, notes: tf.Tensor, is_native: tf.Tensor
    ) -> tf.Tensor:
        """(n,) float32: gradients, moving statistics, losses, Dice, notes, and the fingerprints of
        the workers' weights, of which this one knows its own."""
        are_moving = {id(moving) for moving in self._moving}
        alike = [weight for weight in self.model.weights if id(weight) not in are_moving]
        fingerprints = fingerprint(alike) * is_native
        shares = [moving / self._exchange.count for moving in self._moving]
        members = (*self._sums, *shares, losses, dice, notes, fingerprints)
        return tf.concat([tf.reshape(member, [-1]) for member in members], 0)

    def _take_vector(self, total: tf.Tensor) -> None:
        """Put the summed gradients and statistics in their places, those of `_packed`."""
        self._clear_sums()
        variables = (*self._sums, *self._moving)
        sizes = [variable.shape.num_elements() for variable in variables]
        values = tf.split(total[: sum(sizes)], sizes)
        for place, (variable, value) in enumerate(zip(variables, values)):
            value = tf.reshape(value, variable.shape)
            if place < len(self._sums):
                variable.assign_add(value)
            else:
                variable.assign(value)

    def _train(self, image: tf.Tensor, target: tf.Tensor) -> Tuple[tf.Tensor, tf.Tensor]:
        loss, dice, gradients = self._gradients(image, target)
        # The loss shows whether all gradients are finite. By itself TensorFlow reads that last, and
        # keeps them for it.
        with tf.control_dependencies([loss]):
            self._update(gradients)
        return loss, dice

    def _add_micro_batch(self, image: tf.Tensor, target: tf.Tensor) -> Tuple[tf.Tensor, tf.Tensor]:
        loss, dice, gradients = self._gradients(image, target)
        # All gradients first: additions in between would run in any order, and memory could not be
        # predicted.
        with tf.control_dependencies(gradients):
            for total, gradient in zip(self._sums, gradients):
                total.assign_add(gradient)
        return loss, dice

    def _gradients(
        self, image: tf.Tensor, target: tf.Tensor
    ) -> Tuple[tf.Tensor, tf.Tensor, List[tf.Tensor]]:
        """Loss, soft Dice, and the gradients of a micro-batch's share in the loss of the batch."""
        share = 1 / self.config.micro_batches
        loss, dice, gradients = self.model.loss_and_gradients(DEFAULT_LOSS, image, target, share)
        # A voxel that is NaN may not reach the loss, through a ReLU, but then it reaches a
        # gradient.
        with tf.control_dependencies(gradients):
            finite = tf.math.is_finite(
                tf.add_n([tf.nn.l2_loss(gradient) for gradient in gradients])
            )
        return tf.where(finite, loss, np.nan), dice, gradients

    def _update(self, gradients: Sequence[tf.Tensor]) -> None:
        # Without this TensorFlow mixes updates and gradients in any order, and memory cannot be
        # predicted. One edge an operation, from a group: one from each gradient would be most of
        # the graph.
        with tf.control_dependencies([tf.group(gradients)]):
            self.optimizer.apply_gradients(zip(gradients, self.model.trainable_variables))
        self._updates.assign_add(1)


def fingerprint(weights: Sequence[tf.Variable]) -> tf.Tensor:
    """24 bits of all the weights' bits, as a float32. They are added as integers, in which order
    does not matter."""
    total = tf.constant(0, tf.int32)
    for weight in weights:
        total = 31 * total + tf.reduce_sum(tf.bitcast(tf.convert_to_tensor(weight), tf.int32))
    mixed = tf.bitwise.bitwise_xor(total, tf.bitwise.right_shift(total, 16))
    return tf.cast(tf.bitwise.bitwise_and(mixed, 0xFFFFFF), tf.float32)
