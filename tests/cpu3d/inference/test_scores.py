"""Scores by hand on tiny volumes, as surface-distance tests its own, and against brute force."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from cpu3d.inference.scores import score_region

MM = (1, 1, 1)
MASKS = arrays(bool, (4, 5, 3))


def steps(lean_deg):
    """The steps of a grid of 1 x 1 x 2 mm whose third axis leans towards the second, as columns."""
    lean = np.radians(lean_deg)
    return np.array([[1, 0, 0], [0, 1, 2 * np.sin(lean)], [0, 0, 2 * np.cos(lean)]])


@pytest.mark.parametrize(
    ("empty", "spacing_mm", "hd95_mm"),
    [
        ("both", (3, 4, 0.5), 0),
        ("truth", (3, 4, 0.5), 10100**0.5),  # 60, 80 and 10 mm
        ("prediction", (3, 4, 0.5), 10100**0.5),
        # 20 voxels along each axis: (20, 20 + 20, 40 cos 30) is the longest way through.
        ("prediction", steps(-30), 3200**0.5),
    ],
)
def test_one_empty_mask_is_as_wrong_as_the_image_is_large_and_two_are_right(
    empty, spacing_mm, hd95_mm
):
    masks = np.zeros((2, 20, 20, 20), bool)
    masks[:, 5, 5, 5] = [empty == "prediction", empty == "truth"]
    scores = score_region(*masks, spacing_mm)
    assert scores["dice"] == scores["surface_dice"] == (empty == "both")
    assert scores["hd95_mm"] == pytest.approx(hd95_mm)
    assert scores["empty"] == empty


@settings(max_examples=80)
@given(
    MASKS,
    MASKS,
    st.sampled_from([np.diag([0.1, 1.0, 2.5]), np.diag([2.5, 1, 1]), steps(-30), steps(20)]),
    st.sampled_from([0.0, 0.3, 1.0, 2.5]),
)
def test_scores_are_those_of_brute_force(truth, prediction, steps_mm, tolerance_mm):
    """Also where the grid is sheared: the surface is that of the grid, distances are of places."""
    scores = score_region(truth, prediction, steps_mm, tolerance_mm)
    assert scores["truth_ml"] == pytest.approx(truth.sum() * np.linalg.det(steps_mm) / 1000)
    if not truth.any() or not prediction.any():
        assert scores["empty"]
        return
    places = [np.array(list(_surface(mask))) @ steps_mm.T for mask in (truth, prediction)]
    distances = np.linalg.norm(places[0][:, None] - places[1], axis=-1)
    forth, back = distances.min(1), distances.min(0)
    overlap = np.count_nonzero(truth & prediction)
    assert scores["dice"] == pytest.approx(2 * overlap / (truth.sum() + prediction.sum()))
    expected = max(np.percentile(forth, 95), np.percentile(back, 95))
    assert scores["hd95_mm"] == pytest.approx(expected)
    near = np.concatenate([forth, back]) <= tolerance_mm + 1e-9  # 3 x 0.1 mm are 0.3 mm
    assert scores["surface_dice"] == pytest.approx(near.mean())


def _surface(mask):
    """The voxels of a mask with a face neighbour outside of it."""
    neighbours = [sign * np.eye(3, dtype=int)[axis] for axis in range(3) for sign in (-1, 1)]
    padded = np.pad(mask, 1)
    for v in np.argwhere(mask):
        if not all(padded[tuple(v + 1 + step)] for step in neighbours):
            yield v


@settings(max_examples=60)
@given(MASKS, MASKS, MASKS, MASKS)
def test_what_is_in_ignored_voxels_changes_no_score(truth, prediction, ignored, other):
    spacing_mm = (1, 1, 2.5)
    scores = score_region(truth & ~ignored, prediction & ~ignored, spacing_mm, ignored=ignored)
    more = score_region(truth, prediction ^ (other & ignored), spacing_mm, ignored=ignored)
    assert more == scores
    left = (truth & ~ignored).sum(), (prediction & ~ignored).sum()
    assert (scores["truth_voxels"], scores["prediction_voxels"]) == left


def test_the_surface_of_annotated_slices_is_their_outline():
    """A square of 6 x 6 voxels through all slices, answered a voxel off along X; every third slice
    is annotated. Of an outline's 20 voxels the 6 of one side are a voxel off the other outline, and
    of the side across from it the 4 between its ends."""
    truth = np.zeros((12, 12, 9), bool)
    truth[3:9, 3:9] = True
    ignored = np.ones(truth.shape, bool)
    ignored[..., 1::3] = False
    scores = score_region(truth, np.roll(truth, 1, 0), MM, 0.5, ignored)
    assert scores["dice"] == pytest.approx(30 / 36)
    assert scores["hd95_mm"] == 1
    assert scores["surface_dice"] == pytest.approx((20 - 4 - 6) / 20)


def test_a_mask_that_fills_what_is_annotated_has_the_surface_of_that():
    truth = np.zeros((9, 9, 9), bool)
    truth[2:7, 2:7, 2:7] = True
    ignored = np.ones(truth.shape, bool)
    ignored[3:6, 3:6, 4] = False
    prediction = truth.copy()
    prediction[5] = False
    assert 0 < score_region(truth, prediction, MM, ignored=ignored)["hd95_mm"] <= 2


def spans(text, axis):
    """A mask of boxes of 4 x 4 voxels across an axis, as "4-8 20-24" along it."""
    mask = np.zeros((30, 12, 12), bool)
    for span in text.split():
        start, stop = map(int, span.split("-"))
        mask[start:stop, 4:8, 4:8] = True
    return np.moveaxis(mask, 0, axis)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize(
    ("truth", "prediction", "step_mm", "true", "detected", "false_positives", "dice"),
    [
        ("4-8", "4-8 20-21", 1, 1, 1, 1, 1 / 2),  # a false positive of any size
        # Grown by 3 both ways, a gap of 6 closes, and one of 7 does not: 26 neighbours touch across
        # no gap.
        ("4-8 14-18", "4-8", 1, 1, 1, 0, 2 / 3),
        ("4-8 15-19", "4-8", 1, 2, 1, 0, 1 / 2),  # one missed
        # 32 mm3 are small, and not false
        ("4-8 20-22", "4-8 20-22", 1, 1, 1, 0, 1),
        ("4-8 20-22", "4-8 20-22", 2, 2, 2, 0, 1),
        ("20-22", "", 50 / 32, 0, 0, 0, 1),  # 50 mm3 are small
        ("4-8", "4-5 7-8", 1, 1, 1, 0, 2 / 3),  # a prediction in two
        ("4-8", "10-14", 1, 1, 1, 0, 0),  # found beside, 3 mm off
        ("4-8", "11-15", 1, 1, 0, 1, 0),  # 4 mm off
        ("4-8 20-24", "4-24", 1, 2, 2, 0, 2 * 64 / 384),  # one part, two lesions
        # Of 2 mm, 3 mm are 1.5 voxels: 2 of them; of 7 mm none.
        ("4-8 12-16", "4-8", 2, 1, 1, 0, 2 / 3),
        ("4-8", "8-12", 7, 1, 0, 1, 0),
        ("", "", 1, 0, 0, 0, 1),
        ("", "4-8 20-24", 1, 0, 0, 2, 0),
    ],
)
def test_lesions_are_those_of_the_rule(
    truth, prediction, step_mm, true, detected, false_positives, dice, axis
):
    spacing_mm = np.ones(3)
    spacing_mm[axis] = step_mm
    scores = score_region(spans(truth, axis), spans(prediction, axis), spacing_mm)
    counts = [scores[name] for name in ("true_lesions", "detected_lesions", "false_positives")]
    assert counts == [true, detected, false_positives]
    assert scores["lesion_sensitivity"] == pytest.approx(detected / true if true else 1)
    assert scores["lesion_dice"] == pytest.approx(dice)


@pytest.mark.parametrize(("voxel", "detected"), [((6, 6, 3), 1), ((6, 6, 6), 0)])
def test_lesions_grow_to_18_neighbours(voxel, detected):
    truth, prediction = np.zeros((2, 9, 9, 9), bool)
    truth[:4, :4, :4] = True
    prediction[voxel] = True
    assert score_region(truth, prediction, MM)["detected_lesions"] == detected
