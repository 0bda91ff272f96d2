"""Scores on whole held-out volumes while a run trains: each worker scores its share, and all get
all scores.

The loss is of each region's map. Dice is of the regions as `evaluate --raw` paints them, on the
same grid: ET counts as TC wherever it is painted, whatever the map of TC says there, so the weights
that are best are those whose label map is best. With whole volumes it is that of `evaluate` to
rounding, if no case is larger than the training grid. Windows are placed over the largest box of
the set here and over each case's own there, so a run on patches differs a little.
"""

from dataclasses import dataclass
from typing import Callable, Mapping, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf

from cpu3d.data.labels import label_from_regions, region_mask
from cpu3d.data.windows import sliding_window
from cpu3d.distributed.all_reduce import ALONE, Exchange
from cpu3d.training.feeds import Feeds, Inside
from cpu3d.training.learner import Learner
from memory_estimator.step.training_step import SCORED_SLABS
from models.losses import DEFAULT, LOSSES
from models.supervision import supervise


@dataclass(frozen=True)
class Validation:
    """The scores at one moment of a run, means over the cases."""

    loss: float
    dice: np.ndarray  # (R,) hard Dice of the painted regions


def validate(
    feeds: Feeds,
    learner: Learner,
    exchange: Exchange = ALONE,
    phase: Callable[[str], None] = lambda name: None,
    wish: Callable[[], int] = lambda: 0,
) -> Tuple[Optional[Validation], int]:
    """Score all held-out cases, with the averaged weights if the run averages; returns the scores,
    and why the run must stop, 0 for nothing, the same on all workers.

    `phase` is called for each volume, `wish` returns why the run should stop. A single worker then
    stops between two volumes, without scores; several finish. Raises WorkerLostError if another
    worker is gone."""
    count, regions = feeds.held_out, feeds.config.codes_by_region
    rows = np.zeros((count, 1 + len(regions)), np.float32 if exchange.count > 1 else np.float64)
    learner.swap_average()
    try:
        phase("validating")
        for case, (image, target) in zip(feeds.held_out_share(), feeds.validation()):
            logits = _whole_logits(feeds, learner.logits, image)
            logits = tf.convert_to_tensor(logits)
            dice = _painted_dice(target, logits, regions, feeds.inside(case))
            rows[case] = [float(_loss(target, logits)), *dice]
            del logits  # before the next are made
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


def _whole_logits(
    feeds: Feeds, logits_of: Callable[[tf.Tensor], tf.Tensor], image: tf.Tensor
) -> tf.Tensor:
    """Logits (1, X, Y, Z, R) of a whole volume at its own resolution, by whole volumes or
    windows."""
    if feeds.config.is_patch:
        return sliding_window(logits_of, image, feeds.config.grid)[None]
    if feeds.resizing:
        return feeds.resizing.grow(logits_of(feeds.resizing.shrink(image)))
    return logits_of(image)


def _painted_dice(
    target: tf.Tensor, logits: tf.Tensor, regions: Mapping[str, Sequence[int]], inside: Inside
) -> np.ndarray:
    """(R,) Dice of the regions of the painted label of a case, in its own voxels `inside` the
    volume. Slab by slab of X, as each map of a whole volume is a large one."""
    counts = np.zeros((len(regions), 3), np.int64)  # voxels: of both, predicted, true
    along_x, *across = inside
    size = -(-logits.shape[1] // SCORED_SLABS)
    for first in range(along_x.start, along_x.stop, size):
        slab = (0, slice(first, min(first + size, along_x.stop)), *across)
        probabilities = tf.sigmoid(tf.cast(logits[slab], tf.float32)).numpy()
        label = label_from_regions(probabilities, regions)
        truth = np.asarray(target[slab], bool)
        for position, codes in enumerate(regions.values()):
            true, predicted = truth[..., position], region_mask(label, codes)
            for column, mask in enumerate((true & predicted, predicted, true)):
                counts[position, column] += np.count_nonzero(mask)
    both, predicted, true = counts.T
    is_empty = predicted + true == 0
    return np.where(is_empty, 1.0, 2 * both / np.maximum(predicted + true, 1))


@tf.function(autograph=False)
def _loss(target, logits):
    return supervise(LOSSES[DEFAULT], target, [logits]).loss
