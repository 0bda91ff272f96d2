"""Scores on whole held-out volumes while a run trains: each worker scores its share, and all get
all scores.

The loss is of each region's map. Dice is of the regions as `evaluate --raw` paints them, on the
same grid: ET counts as TC wherever it is painted, whatever the map of TC says there, so the weights
that are best are those whose label map is best. With whole volumes it is that of `evaluate` to
rounding, in one pass, and without the second answer of runs on crops.
"""

import functools
from dataclasses import dataclass
from typing import Callable, Mapping, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf

from cpu3d.data.labels import label_from_regions, region_mask
from cpu3d.data.region import Array
from cpu3d.data.windows import sliding_window
from cpu3d.distributed.all_reduce import ALONE, Exchange
from cpu3d.training.learner import Learner
from cpu3d.training.run_data import Inside, RunData
from cpu3d.training.watchdog import StopRequest
from memory_estimator.step.training_step import SCORED_SLABS
from models.losses import DEFAULT_LOSS, LOSSES
from models.native.shared import IGNORED
from models.strides import shape3
from models.supervision import supervise


@dataclass(frozen=True)
class Validation:
    """The scores at one moment of a run, means over the cases."""

    loss: float
    dice: Array  # (R,) hard Dice of the painted regions


def validate(
    data: RunData,
    learner: Learner,
    exchange: Exchange = ALONE,
    phase: Callable[[str], None] = lambda name: None,
    stop_request: Callable[[], StopRequest] = lambda: StopRequest.NONE,
) -> Tuple[Optional[Validation], StopRequest]:
    """Score all held-out cases; returns the scores, and why the run must stop, the same on all
    workers.

    `phase` is called for each volume. If a stop is requested a single worker stops between two
    volumes, without scores; several finish. Raises WorkerLostError if another worker is gone."""
    regions = data.config.codes_by_region
    # A row for each case: its loss, then the Dice of each region. Workers sum them in float32.
    dtype = np.float32 if exchange.count > 1 else np.float64
    rows: Array = np.zeros((data.held_out, 1 + len(regions)), dtype)
    phase("validating")
    for case, (image, target) in zip(data.held_out_share(), data.validation()):
        logits = tf.convert_to_tensor(_whole_logits(data, learner.logits, image))
        dice = _painted_dice(target, logits, regions, data.inside(case))
        loss = _compiled_loss(len(regions), logits.dtype)
        rows[case] = [float(loss(target, logits)), *dice]
        del logits  # before the next are made
        phase("validating")
        if exchange.count == 1 and stop_request():
            return None, stop_request()
    stop = StopRequest.NONE
    if exchange.count > 1:
        phase("waiting for the others' validation")
        requests = np.zeros(exchange.count, np.float32)
        requests[exchange.rank] = stop_request()
        # A case's row is 0 on all workers but one.
        total = np.asarray(exchange.sum(np.concatenate([rows.ravel(), requests])))
        rows = total[: rows.size].reshape(rows.shape)
        stop = StopRequest(int(max(total[rows.size :])))
    mean = np.mean(rows, 0, dtype=np.float64)
    return Validation(loss=float(mean[0]), dice=mean[1:]), stop


# --- Private helpers ---


def _whole_logits(
    data: RunData, logits_of: Callable[[tf.Tensor], tf.Tensor], image: tf.Tensor
) -> tf.Tensor:
    """Logits (1, X, Y, Z, R) of a whole volume, in one pass or by windows."""
    config = data.config
    shape = shape3(image.shape[1:4])
    if config.is_patch:
        return sliding_window(logits_of, image, shape3(map(min, config.grid, shape)))[None]
    return logits_of(image)


def _painted_dice(
    target: tf.Tensor, logits: tf.Tensor, regions: Mapping[str, Sequence[int]], inside: Inside
) -> Array:
    """(R,) Dice of the regions of the painted label of a case, in its own voxels `inside` the
    volume that are not IGNORED. Slab by slab of X, as each map of a whole volume is a large one."""
    counts = np.zeros((len(regions), 3), np.int64)  # voxels: of both, predicted, true
    along_x, *across = inside
    size = -(-logits.shape[1] // SCORED_SLABS)
    for first in range(along_x.start, along_x.stop, size):
        slab = (0, slice(first, min(first + size, along_x.stop)), *across)
        probabilities = tf.sigmoid(tf.cast(logits[slab], tf.float32)).numpy()
        label = label_from_regions(probabilities, regions)
        truth = np.asarray(target[slab])
        label[truth[..., 0] == IGNORED] = 0  # of all regions alike
        for position, codes in enumerate(regions.values()):
            true = truth[..., position] == 1
            predicted = region_mask(label, codes)
            for column, mask in enumerate((true & predicted, predicted, true)):
                counts[position, column] += np.count_nonzero(mask)
    both, predicted, true = counts.T
    is_empty = predicted + true == 0
    return np.where(is_empty, 1.0, 2 * both / np.maximum(predicted + true, 1))


@functools.cache
def _compiled_loss(regions: int, dtype: tf.DType) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
    """The loss that is minimised: target and logits of a whole volume -> a number."""

    def loss(target: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
        return supervise(LOSSES[DEFAULT_LOSS], target, [logits]).loss

    volume = (1, None, None, None, regions)
    signature = [tf.TensorSpec(volume, tf.uint8), tf.TensorSpec(volume, dtype)]
    return tf.function(loss, signature, autograph=False)
