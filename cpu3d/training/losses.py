"""The training loss, soft Dice and cross-entropy by region, float32 for any dtype of the network;
and hard Dice.

    model.compile("adam", loss=DiceCrossEntropy(), metrics=[RegionDice(0, name="WT")])

Both take logits, and a target of 0 and 1 of any dtype; a voxel of 255 (`IGNORED`) counts in
neither. With deep supervision each output is compared with every 2nd, 4th ... voxel of the same
target;
`loss_weights=head_weights(model.unet)` (models/supervision.py) makes of their losses the one
that `train` minimises."""

from typing import Any, Callable, Dict, Optional, Tuple

import tensorflow as tf

from models.losses import dice_cross_entropy
from models.native.shared import IGNORED
from models.supervision import supervise, thinned


@tf.keras.utils.register_keras_serializable("cpu3d")
class DiceCrossEntropy(tf.keras.losses.Loss):
    """Soft Dice and a cross-entropy of hard voxels. A class below it with another `formula` is
    another loss of models/losses.py."""

    formula = staticmethod(dice_cross_entropy)

    @tf.autograph.experimental.do_not_convert
    def call(self, y_true: Any, y_pred: Any) -> tf.Tensor:
        """(N,) of logits (N, X, Y, Z, R) and a target (N, X, Y, Z, R), whose grid may be a multiple
        of the logits'."""
        y_pred = tf.convert_to_tensor(y_pred)
        target = tf.stop_gradient(_on_grid_or_finer(y_pred, y_true))

        @tf.custom_gradient
        def of_samples(logits: tf.Tensor) -> Tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
            supervised = supervise(self.formula, target, [logits], by_sample=True)
            return supervised.loss, lambda upstream: supervised.slopes(upstream[:, None])[0]

        return of_samples(y_pred)[:, 0]


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
        dice = hard_dice(thinned(_on_grid_or_finer(y_pred, y_true), y_pred), y_pred)
        if self.region is None:
            return super().update_state(tf.reduce_mean(dice, 1), sample_weight)
        return super().update_state(dice[:, self.region], sample_weight)

    def get_config(self) -> Dict[str, Any]:
        return {**super().get_config(), "region": self.region}


def hard_dice(target: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """(N, R) float64, with a voxel predicted from a probability of 0.5 on; without those whose
    target is IGNORED. A region absent from both scores 1: nothing was missed or made up."""
    counts_at = tf.cast(target, tf.uint8) != IGNORED
    truth = tf.cast(target, tf.bool) & counts_at
    predicted = (logits >= 0) & counts_at
    overlap, all_predicted, all_true = (
        tf.math.count_nonzero(mask, (1, 2, 3), dtype=tf.int32)
        for mask in (truth & predicted, predicted, truth)
    )
    total = all_predicted + all_true
    dice = 2 * overlap / tf.maximum(total, 1)
    return tf.where(total == 0, tf.ones_like(dice), dice)


# --- Private helpers ---


def _on_grid_or_finer(logits: tf.Tensor, target: Any) -> tf.Tensor:
    """The target. Raises ValueError if it is no map of as many regions on that grid or a multiple
    of it."""
    target = tf.convert_to_tensor(target)
    if None not in logits.shape[1:] and (target.shape.rank is None or None in target.shape[1:]):
        target = tf.ensure_shape(target, logits.shape)
    sides = zip(target.shape[1:-1], logits.shape[1:-1])
    steps = {fine / coarse for fine, coarse in sides if fine and coarse}
    is_other = len(target.shape) != len(logits.shape) or target.shape[-1] != logits.shape[-1]
    if is_other or any(step % 1 for step in steps):
        got = f"{tuple(target.shape)} for {tuple(logits.shape)}"
        rule = "y_true must have the shape of y_pred or a finer grid"
        raise ValueError(f"{rule}, got {got}; give a map for each region")
    return target
