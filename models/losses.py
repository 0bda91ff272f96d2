"""The losses, each as a formula of four sums over the voxels of a region. TensorFlow is imported
where one is computed.

With p the sigmoid of the logits and t the target, the sums are those of the cross-entropy, of p *
t, of p, and of t; models/supervision.py has what makes the sums of logits, and the logits' gradient
of the formula's derivatives. A new loss is a formula and its line in LOSSES.

Voxels whose target is IGNORED (`models.native.shared`) are in none of the sums, so that no formula
knows of them.
"""

from typing import Any, Callable, Dict, NamedTuple, Tuple

# Voxels added to both sides of the Dice ratio: an absent region scores 1, and less with every voxel
# that is predicted.
SMOOTH = 1.0
HARD = 0.1  # weight of the cross-entropy beside Dice: the best of those tried (docs/log.md)


class Sums(NamedTuple):
    """Of each sample and region, (N, R)."""

    cross_entropy: Any
    overlap: Any  # of p * t
    predicted: Any  # of p
    true: Any  # of t


class OfRegion(NamedTuple):
    """A loss of each sample and region, (N, R); the loss of a batch is the mean."""

    loss: Any
    score: Any  # what is logged of it
    derivatives: Tuple[Any, Any, Any]  # of the loss, by the first three sums


Formula = Callable[[Sums], OfRegion]


def dice_cross_entropy(sums: Sums) -> OfRegion:
    """1 - soft Dice + HARD times a cross-entropy of hard voxels; the score is the soft Dice.

    Dice has no slope where probabilities are close to 0 or 1, so it neither finds a small region
    that is predicted nowhere nor takes away an island that is predicted with certainty; and a mean
    of the cross-entropy over all voxels gives both the weight of their share of the volume. Here
    each voxel of a region counts by its error |p - t|, divided by the sum of these errors: d loss /
    d z is HARD |p - t| (p - t) / sum |p - t|, for any size of the region.

    As |p - t| (p - t) is the slope of a voxel's cross-entropy less its error, the term is (sum of
    cross-entropies - sum of errors) / sum of errors, the divisor taken as constant, and needs no
    map of its own."""
    import tensorflow as tf

    size = sums.predicted + sums.true + SMOOTH
    errors = tf.maximum(sums.predicted + sums.true - 2 * sums.overlap, 0.0)
    dice = (2 * sums.overlap + SMOOTH) / size
    weight = HARD / (errors + SMOOTH)
    # d errors is d predicted - 2 d overlap.
    derivatives = (weight, 2 * weight - 2 / size, dice / size - weight)
    return OfRegion(1 - dice + weight * (sums.cross_entropy - errors), dice, derivatives)


DEFAULT_LOSS = "dice-cross-entropy"
LOSSES: Dict[str, Formula] = {DEFAULT_LOSS: dice_cross_entropy}
"""Name, as on the command line -> formula."""
