"""The losses, each as one expression of four sums over the voxels of a region. TensorFlow is
imported where one is computed.

With p the sigmoid of the logits and t the target, the sums are those of the cross-entropy, of p *
t, of p, and of t; models/supervision.py makes the sums of logits, and differentiates the expression
by them. A new loss is an expression and its line in LOSSES.

Voxels whose target is IGNORED (`models.native.shared`) are in none of the sums, so that no loss
knows of them.
"""

from typing import Any, Callable, Dict, NamedTuple

# Voxels added to both sides of the Dice ratio: an absent region scores 1, and less with every voxel
# that is predicted.
SMOOTH = 1.0
HARD = 0.1  # weight of the cross-entropy beside Dice: the best of those tried (records/log.md)


class Sums(NamedTuple):
    """Of each sample and region, (N, R)."""

    cross_entropy: Any
    overlap: Any  # of p * t
    predicted: Any  # of p
    true: Any  # of t


Formula = Callable[[Sums], Any]  # the loss of each sample and region, (N, R)


def soft_dice(sums: Sums) -> Any:
    """The score that is logged of every loss."""
    return (2 * sums.overlap + SMOOTH) / (sums.predicted + sums.true + SMOOTH)


def dice_cross_entropy(sums: Sums) -> Any:
    """1 - soft Dice + HARD times a cross-entropy of hard voxels.

    Dice has no slope where probabilities are close to 0 or 1, so it neither finds a small region
    that is predicted nowhere nor takes away an island that is predicted with certainty; and a mean
    of the cross-entropy over all voxels gives both the weight of their share of the volume. Here
    each voxel of a region counts by its error |p - t|, divided by the sum of these errors: d loss /
    d z is HARD |p - t| (p - t) / sum |p - t|, for any size of the region.

    As |p - t| (p - t) is the slope of a voxel's cross-entropy less its error, the term is (sum of
    cross-entropies - sum of errors) / sum of errors, the divisor taken as constant, and needs no
    map of its own."""
    import tensorflow as tf

    errors = sums.predicted + sums.true - 2 * sums.overlap
    divisor = tf.stop_gradient(tf.maximum(errors, 0.0) + SMOOTH)
    return 1 - soft_dice(sums) + HARD * (sums.cross_entropy - errors) / divisor


DEFAULT_LOSS = "dice-cross-entropy"
LOSSES: Dict[str, Formula] = {DEFAULT_LOSS: dice_cross_entropy}
"""Name, as on the command line -> expression."""
