"""The training loss, soft Dice and cross-entropy by region, float32 for any dtype of the network;
and hard Dice.

    model.compile("adam", loss=DiceCrossEntropy(), metrics=[RegionDice(0, name="WT")])

Another loss is another formula of models/losses.py, by its name: `RegionLoss(name)`.

Both take logits, and a target of 0 and 1 of any dtype; a voxel of 255 (`IGNORED`) counts in
neither. With deep supervision each output is compared with every 2nd, 4th ... voxel of the same
target;
`loss_weights=head_weights(model.outputs)` (models/supervision.py) makes of their losses the one
that `train` minimises."""

from typing import Any, Callable, Dict, Optional, Tuple

import tensorflow as tf

from models.losses import DEFAULT_LOSS, LOSSES
from models.native.shared import IGNORED
from models.supervision import supervise, thinned


@tf.keras.utils.register_keras_serializable("cpu3d")
class RegionLoss(tf.keras.losses.Loss):
    """A loss of models/losses.py, by its name there, as one of Keras."""

    def __init__(
        self, formula: str = DEFAULT_LOSS, reduction: str = "auto", name: str = "region_loss"
    ):
        super().__init__(reduction, name)
        self.formula = formula

    @tf.autograph.experimental.do_not_convert
    def call(self, y_true: Any, y_pred: Any) -> tf.Tensor:
        """(N,) of logits (N, X, Y, Z, R) and a target (N, X, Y, Z, R), whose grid may be a multiple
        of the logits'."""
        y_pred = tf.convert_to_tensor(y_pred)
        target = tf.stop_gradient(_on_grid_or_finer(y_pred, y_true))

        @tf.custom_gradient
        def of_samples(logits: tf.Tensor) -> Tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
            supervised = supervise(LOSSES[self.formula], target, [logits], by_sample=True)
            return supervised.loss, lambda upstream: supervised.slopes(upstream[:, None])[0]

        return of_samples(y_pred)[:, 0]

    def get_config(self) -> Dict[str, Any]:
        return {**super().get_config(), "formula": self.formula}


@tf.keras.utils.register_keras_serializable("cpu3d")
class DiceCrossEntropy(RegionLoss):
    """Soft Dice and a cross-entropy of hard voxels (`models.losses.dice_cross_entropy`)."""


# compile(loss="dice_cross_entropy"). No class: a model that is loaded from a .keras file calls what
# the name stands for with a target and logits.
tf.keras.utils.get_custom_objects()["dice_cross_entropy"] = DiceCrossEntropy()


@tf.keras.utils.register_keras_serializable("cpu3d")
class RegionDice(tf.keras.metrics.Mean):
    """Mean hard Dice of the cases, as `hard_dice` has it: of the region at an index of the last
    axis, or of all."""

    def __init__(
        self, region: Optional[int] = None, name: str = "dice", dtype: Optional[str] = None
    ):
        super().__init__(name, dtype)
        self.region = region

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """Add the Dice of cases; arguments as of `DiceCrossEntropy.call`."""
        y_pred = tf.convert_to_tensor(y_pred)
        dice = hard_dice(
            hard_dice_counts(thinned(_on_grid_or_finer(y_pred, y_true), y_pred), y_pred)
        )
        if self.region is not None and not 0 <= self.region < dice.shape[1]:
            rule = f"region must be at least 0, below {dice.shape[1]}"
            raise ValueError(f"{rule}, got {self.region}; give an index")
        if self.region is None:
            return super().update_state(tf.reduce_mean(dice, 1), sample_weight)
        return super().update_state(dice[:, self.region], sample_weight)

    def get_config(self) -> Dict[str, Any]:
        return {**super().get_config(), "region": self.region}


def hard_dice(counts: tf.Tensor) -> tf.Tensor:
    """(N, R) of `hard_dice_counts`. A region absent from both scores 1: nothing was missed or made
    up."""
    overlap, predicted, true = tf.unstack(counts, axis=-1)
    total = predicted + true
    return tf.where(total == 0, tf.ones_like(total), 2 * overlap / tf.maximum(total, 1))


def hard_dice_counts(target: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """Voxel counts (N, R, 3) float64: overlap, predicted, true, with a voxel predicted from a
    probability of 0.5 on; without those whose target is IGNORED."""
    counts_at = tf.cast(target, tf.uint8) != IGNORED
    truth = tf.cast(target, tf.bool) & counts_at
    predicted = (logits >= 0) & counts_at
    counts = [
        # Counted per X slab in float32 (exact below 2**24 voxels), then summed in float64.
        tf.reduce_sum(tf.cast(tf.reduce_sum(tf.cast(mask, tf.float32), (2, 3)), tf.float64), 1)
        for mask in (truth & predicted, predicted, truth)
    ]
    return tf.stack(counts, -1)


# --- Private helpers ---


def _on_grid_or_finer(logits: tf.Tensor, target: Any) -> tf.Tensor:
    """The target. Raises ValueError if it is no map of as many regions on that grid or a multiple
    of it."""
    target = tf.convert_to_tensor(target)
    if target.shape.rank is None or None in target.shape[1:]:
        target = tf.ensure_shape(target, logits.shape)
    steps = {fine / coarse for fine, coarse in zip(target.shape[1:-1], logits.shape[1:-1])}
    is_other = len(target.shape) != len(logits.shape) or target.shape[-1] != logits.shape[-1]
    if is_other or any(step % 1 or step < 1 for step in steps):
        got = f"{tuple(target.shape)} for {tuple(logits.shape)}"
        rule = "y_true must have the shape of y_pred or a finer grid"
        raise ValueError(f"{rule}, got {got}; give a map for each region")
    return target
