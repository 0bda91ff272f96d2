"""Scores by hand on tiny volumes, as surface-distance tests its own, and against brute force."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from cpu3d.inference.scores import METRICS, Metric, diagonal_mm, score_case, score_region, surface_distances_mm

SHAPE = (20, 20, 20)


def voxels(*positions, shape=SHAPE):
    mask = np.zeros(shape, bool)
    for position in positions:
        mask[position] = True
    return mask


def box(start, stop, shape=SHAPE):
    mask = np.zeros(shape, bool)
    mask[tuple(slice(a, b) for a, b in zip(start, stop))] = True
    return mask


@pytest.mark.parametrize(
    ("spacing_mm", "distance_mm"),
    [((1, 1, 1), math.sqrt(1 + 4 + 9)), ((3, 2, 1), math.sqrt(9 + 16 + 9)), ((0.5, 1, 10), math.sqrt(0.25 + 4 + 900))],
)
def test_two_single_voxels_are_as_far_apart_as_their_centres(spacing_mm, distance_mm):
    scores = score_region(voxels((5, 5, 5)), voxels((6, 7, 8)), spacing_mm)
    assert scores["dice"] == 0
    assert scores["surface_dice"] == 0
    assert scores["hd95_mm"] == pytest.approx(distance_mm)
    assert scores["empty"] == ""


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


def test_the_inside_of_a_solid_is_no_surface_and_the_image_border_is():
    # A 5-cube has 125 - 27 surface voxels, also where it touches the border of the image.
    for start in (0, 5, 15):
        cube = box((start,) * 3, (start + 5,) * 3)
        there, back = surface_distances_mm(cube, cube, (1, 1, 1))
        assert there.size == back.size == 98
        assert not there.any()
    hollow = box((5, 5, 5), (10, 10, 10)) & ~voxels((7, 7, 7))
    assert surface_distances_mm(hollow, hollow, (1, 1, 1))[0].size == 98 + 6


def test_equal_masks_are_perfect_and_two_empty_ones_too():
    same = score_region(box((2, 3, 4), (9, 9, 9)), box((2, 3, 4), (9, 9, 9)), (1, 1, 3))
    assert (same["dice"], same["hd95_mm"], same["surface_dice"], same["empty"]) == (1, 0, 1, "")
    scores = score_region(voxels(), voxels(), (1, 1, 1))
    assert (scores["dice"], scores["hd95_mm"], scores["surface_dice"], scores["empty"]) == (1, 0, 1, "both")


def test_a_metric_is_added_by_a_row_of_the_table(monkeypatch):
    ratio = Metric("volume ratio", lambda masks: masks.prediction.sum() / masks.truth.sum(), best=1.0, worst=0.0)
    monkeypatch.setitem(METRICS, "volume_ratio", ratio)
    assert score_region(box((0, 0, 0), (4, 4, 4)), box((0, 0, 0), (4, 4, 2)), (1, 1, 1))["volume_ratio"] == 0.5
    assert score_region(voxels(), box((0, 0, 0), (4, 4, 2)), (1, 1, 1))["volume_ratio"] == 0
    assert [metric.larger_is_better for metric in METRICS.values()] == [True, False, True, True]


@pytest.mark.parametrize("missing", ["truth", "prediction"])
def test_one_empty_mask_is_as_wrong_as_the_image_is_large(missing):
    some, none = voxels((1, 1, 1)), voxels()
    pair = (none, some) if missing == "truth" else (some, none)
    scores = score_region(*pair, (3, 4, 0.5))
    assert (scores["dice"], scores["surface_dice"], scores["empty"]) == (0, 0, missing)
    assert scores["hd95_mm"] == pytest.approx(math.sqrt(60**2 + 80**2 + 10**2))
    assert diagonal_mm((240, 240, 155), (1, 1, 1)) == pytest.approx(373.13, abs=0.005)  # the challenge's penalty


def test_volumes_are_in_millilitres():
    scores = score_region(box((0, 0, 0), (10, 10, 10)), box((0, 0, 0), (10, 10, 5)), (1, 1, 2))
    assert (scores["truth_voxels"], scores["prediction_voxels"]) == (1000, 500)
    assert (scores["truth_ml"], scores["prediction_ml"]) == pytest.approx((2.0, 1.0))


def test_a_case_is_scored_region_by_region_from_its_codes():
    truth, prediction = np.zeros(SHAPE, np.uint8), np.zeros(SHAPE, np.uint8)
    truth[5:9, 5:9, 5:9] = 2  # oedema in BraTS 2021 numbering
    truth[6:8, 6:8, 6:8] = 4
    prediction[5:9, 5:9, 5:9] = 2
    prediction[6:8, 6:8, 6:7] = 4
    scores = score_case(truth, prediction, {"WT": (1, 2, 4), "TC": (1, 4), "ET": (4,)}, (1, 1, 1))
    assert [scores[name]["dice"] for name in ("WT", "TC", "ET")] == pytest.approx([1, 8 / 12, 8 / 12])


@pytest.mark.parametrize(
    ("truth", "prediction", "spacing_mm", "tolerance_mm"),
    [
        (voxels(), voxels(shape=(20, 20, 21)), (1, 1, 1), 1),
        (voxels().astype(np.uint8), voxels(), (1, 1, 1), 1),
        (voxels(), voxels(), (1, 1, 0), 1),
        (voxels(), voxels(), (1, 1), 1),
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


@settings(max_examples=20)
@given(MASKS, MASKS)
def test_truth_and_prediction_can_change_places_and_the_grid_can_be_flipped(truth, prediction):
    scores, turned = score_region(truth, prediction, (1, 2, 3)), score_region(prediction, truth, (1, 2, 3))
    other = score_region(truth.T[::-1], prediction.T[::-1], (3, 2, 1))
    for name in METRICS:
        assert scores[name] == pytest.approx(turned[name])
        assert scores[name] == pytest.approx(other[name])


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
