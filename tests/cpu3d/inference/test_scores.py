"""Scores by hand on tiny volumes, as surface-distance tests its own, and against brute force."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from cpu3d.inference.scores import diagonal_mm, score_region

SHAPE = (20, 20, 20)


def voxels(*positions, shape=SHAPE):
    mask = np.zeros(shape, bool)
    for position in positions:
        mask[position] = True
    return mask


def test_a_voxel_within_the_tolerance_counts_and_the_tolerance_itself_is_within():
    truth, prediction = voxels((5, 5, 5)), voxels((5, 5, 8))
    assert score_region(truth, prediction, (1, 1, 0.1), tolerance_mm=0.3)["surface_dice"] == 1
    assert score_region(truth, prediction, (1, 1, 0.1), tolerance_mm=0.29)["surface_dice"] == 0
    assert score_region(truth, prediction, (1, 1, 0.1), tolerance_mm=0.3)["dice"] == 0


def test_hd95_takes_the_larger_direction_and_interpolates_between_ranks():
    # Prediction: the truth's 4 voxels and one stray 10 mm off. Distances back: 0 0 0 0 10; rank 0.95 * 4 = 3.8 -> 8 mm.
    truth = voxels(*[(i, 2, 2) for i in range(4)])
    scores = score_region(truth, truth | voxels((13, 2, 2)), (1, 1, 1))
    assert scores["hd95_mm"] == pytest.approx(8.0)
    assert scores["surface_dice"] == pytest.approx(8 / 9)
    assert score_region(truth | voxels((13, 2, 2)), truth, (1, 1, 1))["hd95_mm"] == pytest.approx(8.0)


def test_equal_masks_are_perfect_and_two_empty_ones_too():
    for mask, empty in ((voxels((2, 3, 4), (2, 3, 5), (8, 8, 8)), ""), (voxels(), "both")):
        scores = score_region(mask, mask, (1, 1, 3))
        assert (scores["dice"], scores["hd95_mm"], scores["surface_dice"], scores["empty"]) == (1, 0, 1, empty)


@pytest.mark.parametrize("missing", ["truth", "prediction"])
def test_one_empty_mask_is_as_wrong_as_the_image_is_large(missing):
    some, none = voxels((1, 1, 1)), voxels()
    pair = (none, some) if missing == "truth" else (some, none)
    scores = score_region(*pair, (3, 4, 0.5))
    assert (scores["dice"], scores["surface_dice"], scores["empty"]) == (0, 0, missing)
    assert scores["hd95_mm"] == pytest.approx(math.sqrt(60**2 + 80**2 + 10**2))
    assert diagonal_mm((240, 240, 155), (1, 1, 1)) == pytest.approx(373.13, abs=0.005)  # the challenge's penalty


@pytest.mark.parametrize(
    ("truth", "prediction", "spacing_mm", "tolerance_mm"),
    [
        (voxels(), voxels(shape=(20, 20, 21)), (1, 1, 1), 1),
        (voxels().astype(np.uint8), voxels(), (1, 1, 1), 1),
        (voxels(), voxels(), (1, 1, 0), 1),
        (voxels(), voxels(), (1, 1, 1), -1),
    ],
)
def test_what_cannot_be_scored_is_refused(truth, prediction, spacing_mm, tolerance_mm):
    with pytest.raises(ValueError, match="must be"):
        score_region(truth, prediction, spacing_mm, tolerance_mm)


MASKS = arrays(bool, (4, 5, 3))


@settings(max_examples=60)
@given(MASKS, MASKS, st.tuples(*[st.sampled_from([0.5, 1.0, 2.5])] * 3), st.sampled_from([0.0, 1.0, 2.5]))
def test_scores_are_those_of_brute_force(truth, prediction, spacing_mm, tolerance_mm):
    scores = score_region(truth, prediction, spacing_mm, tolerance_mm)
    if not truth.any() or not prediction.any():
        assert scores["empty"]
        return
    there, back = _brute_force(truth, prediction, spacing_mm), _brute_force(prediction, truth, spacing_mm)
    overlap = sum(bool(truth[v] and prediction[v]) for v in np.ndindex(truth.shape))
    assert scores["dice"] == pytest.approx(2 * overlap / (truth.sum() + prediction.sum()))
    assert scores["hd95_mm"] == pytest.approx(max(np.percentile(there, 95), np.percentile(back, 95)))
    near = [d <= tolerance_mm + 1e-9 for d in there + back]
    assert scores["surface_dice"] == pytest.approx(sum(near) / len(near))


def _brute_force(from_mask, to_mask, spacing_mm):
    """Distances from every surface voxel of one mask to the other's, by the definition and nothing else."""

    steps = [sign * np.eye(3, dtype=int)[axis] for axis in range(3) for sign in (-1, 1)]

    def surface(mask):
        padded = np.pad(mask, 1)
        for v in np.argwhere(mask):
            if not all(padded[tuple(v + 1 + step)] for step in steps):
                yield v * np.array(spacing_mm)

    targets = list(surface(to_mask))
    return [min(np.linalg.norm(a - b) for b in targets) for a in surface(from_mask)]
