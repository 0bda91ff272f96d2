"""Scores on whole held-out volumes while a run trains: each worker takes its share of the cases, all learn of all."""

from dataclasses import dataclass
from typing import Callable, Tuple

import numpy as np
import tensorflow as tf

from cpu3d.distributed.strategy import ALONE, Exchange
from cpu3d.feeds import Feeds
from cpu3d.learner import Learner
from cpu3d.losses import dice_cross_entropy, hard_dice_counts
from cpu3d.sliding_window import sliding_window


@dataclass(frozen=True)
class Validation:
    """Of one moment of a run."""

    loss: float
    """Mean over the cases."""
    dice: np.ndarray
    """(R,) hard Dice, mean over the cases."""
    cases: int


def validate(
    feeds: Feeds, learner: Learner, exchange: Exchange = ALONE, sign: Callable[[], None] = lambda: None
) -> Validation:
    """Score all held-out cases with the averaged weights, where the run averages; the learner is as before then.

    `sign` is called before each volume.
    """
    count, regions = feeds.held_out, feeds.config.unet.outputs
    rows = np.zeros((count, 1 + regions), np.float32 if exchange.count > 1 else np.float64)
    learner.swap_average()
    for case, (image, target) in zip(feeds.held_out_share(), feeds.validation()):
        sign()
        loss, counts = _score(target, whole_logits(feeds, learner.logits, image))
        rows[case] = [float(loss), *_dice(counts.numpy()[0])]
    learner.swap_average()
    if exchange.count > 1:  # a case's row is 0 on all workers but one
        rows = np.asarray(exchange.sum(rows.ravel())).reshape(rows.shape)
    mean = np.mean(rows, 0, dtype=np.float64)
    return Validation(float(mean[0]), mean[1:], count)


def whole_logits(feeds: Feeds, logits_of: Callable[[tf.Tensor], tf.Tensor], image: tf.Tensor) -> tf.Tensor:
    """Logits (1, X, Y, Z, R) of a whole volume at its own resolution, whatever the network sees at a time."""
    if feeds.config.is_patch:
        return sliding_window(logits_of, image, feeds.config.grid)[None]
    if feeds.resizing:
        return feeds.resizing.grow(logits_of(feeds.resizing.shrink(image)))
    return logits_of(image)


# --- Private helpers ---


@tf.function
def _score(target, logits) -> Tuple[tf.Tensor, tf.Tensor]:
    return dice_cross_entropy(target, logits)[0], hard_dice_counts(target, logits)


def _dice(counts: np.ndarray) -> np.ndarray:
    """(R,) from (R, 3) overlap, predicted, true. A region absent from both scores 1: nothing was missed or made up."""
    overlap, predicted, true = np.moveaxis(counts, -1, 0)
    total = predicted + true
    return np.where(total == 0, 1.0, 2 * overlap / np.maximum(total, 1))
