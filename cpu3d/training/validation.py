"""Scores on whole held-out volumes while a run trains: each worker scores its share, and all get all scores."""

from dataclasses import dataclass
from typing import Callable, Optional, Tuple

import numpy as np
import tensorflow as tf

from cpu3d.data.windows import sliding_window
from cpu3d.distributed.all_reduce import ALONE, Exchange
from cpu3d.training.feeds import Feeds
from cpu3d.training.learner import Learner
from cpu3d.training.losses import TrainingLoss, hard_dice, hard_dice_counts
from models.layer_plan import PIECES
from models.supervision import supervise


@dataclass(frozen=True)
class Validation:
    """The scores at one moment of a run, means over the cases."""

    loss: float
    dice: np.ndarray  # (R,) hard Dice


def validate(
    feeds: Feeds,
    learner: Learner,
    exchange: Exchange = ALONE,
    phase: Callable[[str], None] = lambda name: None,
    wish: Callable[[], int] = lambda: 0,
) -> Tuple[Optional[Validation], int]:
    """Score all held-out cases, with the averaged weights if the run averages; returns the scores, and why the run
    must stop, 0 for nothing, the same on all workers.

    `phase` is called for each volume, `wish` returns why the run should stop. A single worker then stops between two
    volumes, without scores; several finish. Raises WorkerLostError if another worker is gone.
    """
    count, regions = feeds.held_out, feeds.config.unet.outputs
    rows = np.zeros((count, 1 + regions), np.float32 if exchange.count > 1 else np.float64)
    learner.swap_average()
    try:
        phase("validating")
        for case, (image, target) in zip(feeds.held_out_share(), feeds.validation()):
            logits = _whole_logits(feeds, learner.logits, image)
            loss, counts = _score(target, logits)
            del logits  # before the next are made
            rows[case] = [float(loss), *hard_dice(counts).numpy()[0]]
            phase("validating")
            if exchange.count == 1 and wish():
                return None, wish()
    finally:
        learner.swap_average()
    stop = 0
    if exchange.count > 1:  # a case's row is 0 on all workers but one
        phase("waiting for the others' validation")
        notes = np.zeros(exchange.count, np.float32)
        notes[exchange.rank] = wish()
        total = np.asarray(exchange.sum(np.concatenate([rows.ravel(), notes])))
        rows, stop = total[: rows.size].reshape(rows.shape), int(max(total[rows.size :]))
    mean = np.mean(rows, 0, dtype=np.float64)
    return Validation(float(mean[0]), mean[1:]), stop


# --- Private helpers ---


def _whole_logits(feeds: Feeds, logits_of: Callable[[tf.Tensor], tf.Tensor], image: tf.Tensor) -> tf.Tensor:
    """Logits (1, X, Y, Z, R) of a whole volume at its own resolution, by whole volumes or windows."""
    if feeds.config.is_patch:
        return sliding_window(logits_of, image, feeds.config.grid)[None]
    if feeds.resizing:
        return feeds.resizing.grow(logits_of(feeds.resizing.shrink(image)))
    return logits_of(image)


def _score(target, logits) -> Tuple[tf.Tensor, tf.Tensor]:
    """Loss and counts (1, R, 3), slab by slab of X: with many regions each map of a whole volume is a large one."""
    logits = tf.convert_to_tensor(logits)
    size = -(-logits.shape[1] // PIECES)
    slabs = [slice(first, first + size) for first in range(0, logits.shape[1], size)]
    return _loss(target, logits), sum(_counts(target[:, slab], logits[:, slab]) for slab in slabs)


@tf.function(autograph=False)
def _loss(target, logits):
    return supervise(TrainingLoss(), target, [logits]).loss


_counts = tf.function(hard_dice_counts, autograph=False)
