"""Scores by hand on tiny volumes, as surface-distance tests its own, and against brute force."""

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from cpu3d.inference.scores import score_region

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
    # Prediction: the truth's 4 voxels and one stray 10 mm off. Distances back: 0 0 0 0 10; rank
    # 0.95 * 4 = 3.8 -> 8 mm.
    truth = voxels(*[(i, 2, 2) for i in range(4)])
    scores = score_region(truth, truth | voxels((13, 2, 2)), (1, 1, 1))
    assert scores["hd95_mm"] == pytest.approx(8.0)
    assert scores["surface_dice"] == pytest.approx(8 / 9)
    assert score_region(truth | voxels((13, 2, 2)), truth, (1, 1, 1))["hd95_mm"] == pytest.approx(
        8.0
    )


@pytest.mark.parametrize(
    ("mask", "empty"), [(voxels((2, 3, 4), (2, 3, 5), (8, 8, 8)), ""), (voxels(), "both")]
)
def test_equal_masks_are_perfect_and_two_empty_ones_too(mask, empty):
    scores = score_region(mask, mask, (1, 1, 3))
    assert (scores["dice"], scores["surface_dice"]) == (1, 1)
    assert (scores["hd95_mm"], scores["empty"]) == (0, empty)


@pytest.mark.parametrize("missing", ["truth", "prediction"])
def test_one_empty_mask_is_as_wrong_as_the_image_is_large(missing):
    some, none = voxels((1, 1, 1)), voxels()
    pair = (none, some) if missing == "truth" else (some, none)
    scores = score_region(*pair, (3, 4, 0.5))
    assert (scores["dice"], scores["surface_dice"], scores["empty"]) == (0, 0, missing)
    assert scores["hd95_mm"] == pytest.approx(math.sqrt(60**2 + 80**2 + 10**2))


MASKS = arrays(bool, (4, 5, 3))


@settings(max_examples=60)
@given(
    MASKS,
    MASKS,
    st.tuples(*[st.sampled_from([0.5, 1.0, 2.5])] * 3),
    st.sampled_from([0.0, 1.0, 2.5]),
)
def test_scores_are_those_of_brute_force(truth, prediction, spacing_mm, tolerance_mm):
    scores = score_region(truth, prediction, spacing_mm, tolerance_mm)
    if not truth.any() or not prediction.any():
        assert scores["empty"]
        return
    forth, back = (
        _brute_force(truth, prediction, spacing_mm),
        _brute_force(prediction, truth, spacing_mm),
    )
    overlap = sum(bool(truth[v] and prediction[v]) for v in np.ndindex(truth.shape))
    assert scores["dice"] == pytest.approx(2 * overlap / (truth.sum() + prediction.sum()))
    assert scores["hd95_mm"] == pytest.approx(
        max(np.percentile(forth, 95), np.percentile(back, 95))
    )
    near = [d <= tolerance_mm + 1e-9 for d in forth + back]
    assert scores["surface_dice"] == pytest.approx(sum(near) / len(near))


def _brute_force(from_mask, to_mask, spacing_mm):
    """Distances from every surface voxel of one mask to the other's, by the definition and nothing
    else."""
    targets = [v * np.array(spacing_mm) for v in _surface(to_mask)]
    return [
        min(np.linalg.norm(v * np.array(spacing_mm) - b) for b in targets)
        for v in _surface(from_mask)
    ]


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
    alone = score_region(truth & ~ignored, prediction & ~ignored, spacing_mm)
    for name in ("dice", "lesion_dice", "lesion_sensitivity", "false_positives", "empty"):
        assert scores[name] == alone[name]


def test_the_surface_of_annotated_slices_is_their_outline():
    """A square of 6 x 6 voxels through all slices, answered a voxel off along X; every third slice
    is annotated. Of an outline's 20 voxels the 6 of one side are a voxel off the other outline, and
    of the side across from it the 4 between its ends."""
    truth = np.zeros((12, 12, 9), bool)
    truth[3:9, 3:9] = True
    prediction = np.roll(truth, 1, 0)
    ignored = np.ones(truth.shape, bool)
    ignored[..., 1::3] = False
    scores = score_region(truth, prediction, (1, 1, 1), 0.5, ignored)
    assert scores["dice"] == pytest.approx(30 / 36)
    assert scores["hd95_mm"] == 1
    assert scores["surface_dice"] == pytest.approx((20 - 4 - 6) / 20)
    whole = score_region(truth, prediction, (1, 1, 1), 0.5)
    assert whole["hd95_mm"] == 1


def test_a_mask_that_fills_what_is_annotated_has_the_surface_of_that():
    truth = np.zeros((9, 9, 9), bool)
    truth[2:7, 2:7, 2:7] = True
    ignored = np.ones(truth.shape, bool)
    ignored[3:6, 3:6, 4] = False
    prediction = truth.copy()
    prediction[5, :, 4] = False
    scores = score_region(truth, prediction, (1, 1, 1), 0.5, ignored)
    assert scores["dice"] == pytest.approx(2 * 6 / (9 + 6))
    assert 0 < scores["hd95_mm"] <= 2


def boxes(*corners, shape=(30, 12, 12)):
    """A mask of boxes, each (start, stop) along X, Y and Z."""
    mask = np.zeros(shape, bool)
    for corner in corners:
        mask[tuple(slice(*pair) for pair in corner)] = True
    return mask


FOUR = (4, 8)  # a cube of them has 64 voxels, more than 50 of 1 mm3
CUBE = (FOUR, FOUR, FOUR)
FAR = ((20, 24), FOUR, FOUR)
SMALL = ((20, 22), FOUR, FOUR)  # 32 voxels
MM = (1, 1, 1)


@pytest.mark.parametrize(
    ("truth", "prediction", "spacing_mm", "true", "detected", "false_positives", "dice"),
    [
        pytest.param((CUBE, FAR), (CUBE, FAR), MM, 2, 2, 0, 1, id="right"),
        pytest.param((CUBE, FAR), (CUBE,), MM, 2, 1, 0, 1 / 2, id="one missed"),
        pytest.param((CUBE,), (CUBE, FAR), MM, 1, 1, 1, 1 / 2, id="a false positive"),
        pytest.param(
            (CUBE,), (CUBE, ((20, 21), (4, 5), (4, 5))), MM, 1, 1, 1, 1 / 2, id="of any size"
        ),
        # Grown by 3 both ways, a gap of 6 closes, and one of 7 does not: 26 neighbours touch across
        # no gap.
        pytest.param(
            (CUBE, ((14, 18), FOUR, FOUR)), (CUBE,), MM, 1, 1, 0, 2 / 3, id="near lesions are one"
        ),
        pytest.param(
            (CUBE, ((15, 19), FOUR, FOUR)), (CUBE,), MM, 2, 1, 0, 1 / 2, id="less near ones are two"
        ),
        pytest.param((CUBE, SMALL), (CUBE,), MM, 1, 1, 0, 1, id="a small one need not be found"),
        pytest.param((CUBE, SMALL), (CUBE, SMALL), MM, 1, 1, 0, 1, id="and is not false"),
        pytest.param(
            (CUBE, SMALL), (CUBE, SMALL), (1, 1, 2), 2, 2, 0, 1, id="64 mm3 are not small"
        ),
        pytest.param((((5, 10), (5, 10), (5, 7)),), (), MM, 0, 0, 0, 1, id="50 mm3 are small"),
        pytest.param(
            (CUBE,),
            ((FOUR, FOUR, (4, 5)), (FOUR, FOUR, (7, 8))),
            MM,
            1,
            1,
            0,
            2 / 3,
            id="split prediction",
        ),
        pytest.param(
            (CUBE,), (((10, 14), FOUR, FOUR),), MM, 1, 1, 0, 0, id="found beside, 3 mm off"
        ),
        pytest.param((CUBE,), (((11, 15), FOUR, FOUR),), MM, 1, 0, 1, 0, id="4 mm off"),
        pytest.param(
            (CUBE, FAR),
            (((4, 24), FOUR, FOUR),),
            MM,
            2,
            2,
            0,
            2 * 64 / 384,
            id="one part, two lesions",
        ),
        # Of 2 mm, 3 mm are 1.5 voxels: 2 of them; of 5 mm 1; of 7 mm none.
        pytest.param(
            (CUBE, ((12, 16), FOUR, FOUR)),
            (CUBE,),
            (2, 1, 1),
            1,
            1,
            0,
            2 / 3,
            id="2 mm, a gap of 4",
        ),
        pytest.param(
            (CUBE, ((13, 17), FOUR, FOUR)),
            (CUBE,),
            (2, 1, 1),
            2,
            1,
            0,
            1 / 2,
            id="2 mm, a gap of 5",
        ),
        pytest.param((CUBE,), (((8, 12), FOUR, FOUR),), (5, 1, 1), 1, 1, 0, 0, id="5 mm, beside"),
        pytest.param((CUBE,), (((8, 12), FOUR, FOUR),), (7, 1, 1), 1, 0, 1, 0, id="7 mm, beside"),
        pytest.param((), (), MM, 0, 0, 0, 1, id="both empty"),
        pytest.param((), (CUBE, FAR), MM, 0, 0, 2, 0, id="truth empty"),
        pytest.param((CUBE, FAR), (), MM, 2, 0, 0, 0, id="prediction empty"),
    ],
)
def test_lesions_are_those_of_the_rule(
    truth, prediction, spacing_mm, true, detected, false_positives, dice
):
    masks = boxes(*truth), boxes(*prediction)
    scores = score_region(*masks, spacing_mm)
    counts = [scores[name] for name in ("true_lesions", "detected_lesions", "false_positives")]
    assert counts == [true, detected, false_positives]
    assert scores["lesion_sensitivity"] == pytest.approx(detected / true if true else 1)
    assert scores["lesion_dice"] == pytest.approx(dice)


def steps(lean_deg):
    """The steps of a grid of 1 x 1 x 2 mm whose third axis leans towards the second, as columns."""
    lean = np.radians(lean_deg)
    return np.array([[1, 0, 0], [0, 1, 2 * np.sin(lean)], [0, 0, 2 * np.cos(lean)]])


@settings(max_examples=40)
@given(MASKS, MASKS, st.sampled_from([-30.0, 0.0, 20.0]))
def test_on_a_sheared_grid_distances_are_those_of_the_voxels_places(truth, prediction, lean_deg):
    assume(truth.any() and prediction.any())
    scores = score_region(truth, prediction, steps(lean_deg), tolerance_mm=1.9)

    def distances(from_mask, to_mask):
        """By the voxels' places; the surface is that of the grid with a spacing of 1."""
        places = [
            np.array(list(_surface(mask))) @ steps(lean_deg).T for mask in (from_mask, to_mask)
        ]
        return [np.linalg.norm(places[1] - place, axis=1).min() for place in places[0]]

    forth, back = distances(truth, prediction), distances(prediction, truth)
    assert scores["hd95_mm"] == pytest.approx(
        max(np.percentile(forth, 95), np.percentile(back, 95))
    )
    near = [d <= 1.9 + 1e-9 for d in forth + back]
    assert scores["surface_dice"] == pytest.approx(sum(near) / len(near))


def test_volumes_and_the_diagonal_of_a_sheared_grid_worked_out_by_hand():
    scores = score_region(voxels((5, 5, 5), (5, 5, 6)), voxels(), steps(30))
    assert scores["truth_ml"] == pytest.approx(2 * 2 * math.cos(math.radians(30)) / 1000)
    # 20 voxels along each axis: (20, 20 + 20, 40 cos 30) is the longest way through.
    assert scores["hd95_mm"] == pytest.approx(math.sqrt(20**2 + 40**2 + 1200))
    assert score_region(voxels((1, 1, 1)), voxels(), np.diag([3, 4, 0.5])) == score_region(
        voxels((1, 1, 1)), voxels(), (3, 4, 0.5)
    )


@pytest.mark.parametrize(("lean_deg", "lesions"), [(0, 1), (30, 0)])
def test_a_lesion_of_a_sheared_grid_is_small_by_its_true_volume(lean_deg, lesions):
    """25 voxels: 50 mm3 if the third axis is upright, 43 if it leans."""
    truth = boxes(((5, 10), (5, 10), (5, 6)))
    grid = steps(lean_deg) * [[1], [1], [2.001 / 2]]
    assert score_region(truth, truth, grid)["true_lesions"] == lesions
