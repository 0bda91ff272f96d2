"""Regions to codes and back: by hand, one voxel a question."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpu3d.data.labels import (
    PaintedRegions,
    check_painting,
    code_meanings,
    label_from_regions,
    mirror_pair,
    painted_codes,
)
from cpu3d.errors import InputError

DECATHLON = {"WT": (1, 2, 3), "TC": (2, 3), "ET": (3,)}
BRATS_2021 = {"WT": (1, 2, 4), "TC": (1, 4), "ET": (4,)}
ORGANS = {"liver": (1,), "spleen": (2,)}
PARTS = {"both": (1, 2), "one": (1,), "two": (2,)}
NAMES = {0: "air", 1: "edema", 2: "core", 3: "enhancing"}


@pytest.mark.parametrize(
    ("regions", "answers", "code"),
    [
        (DECATHLON, (0.4, 0.3, 0.2), 0),
        (BRATS_2021, (0.9, 0.9, 0.2), 1),
        (BRATS_2021, (0.9, 0.9, 0.9), 4),
        (DECATHLON, (0.1, 0.1, 0.9), 3),  # the most specific region is believed
        (DECATHLON, (0.5, 0.0, 0.0), 1),
        (DECATHLON, (np.nan, np.nan, np.nan), 0),
        (ORGANS, (0.6, 0.8), 2),  # regions of equal size compete
        (ORGANS, (0.7, 0.7), 1),
        ({"WT": (1, 2, 3)}, (0.9,), 1),
        (PARTS, (0.9, 0.1, 0.1), 0),  # what smaller ones make up paints nothing
        (PARTS, (0.9, 0.1, 0.8), 2),
    ],
)
def test_the_code_that_is_painted_for_one_voxel(regions, answers, code):
    answers = np.array(answers, np.float32).reshape(1, 1, 1, -1)
    assert label_from_regions(answers, regions)[0, 0, 0] == code


def test_a_volume_that_is_painted_in_several_slabs_has_each_of_its_voxels():
    answers = np.ones((3, 2049, 2048, 1), bool)
    assert (label_from_regions(answers, {"a": (7,)}) == 7).all()


OVERLAPPING = {"a": (1, 2), "b": (2, 3), "c": (4,)}


@pytest.mark.parametrize(
    ("regions", "paint", "meanings"),
    [
        (
            PARTS,
            [("both", 3), ("one", 1), ("two", 2)],
            {1: "edema", 2: "core", 3: "both (edema, core)"},
        ),
        (
            OVERLAPPING,
            [("a", 2), ("b", 3), ("c", 4)],
            {2: "a (edema, core)", 3: "b (core, enhancing)", 4: "label 4"},
        ),
    ],
)
def test_what_a_painted_code_means(regions, paint, meanings):
    painted = PaintedRegions(regions, paint)
    assert code_meanings(painted, NAMES) == {0: "air", **meanings}


@pytest.mark.parametrize(
    ("regions", "class_order"),
    [
        (DECATHLON, (3, 2, 3)),
        (dict(reversed(DECATHLON.items())), (3, 2, 1)),
        (OVERLAPPING, (2, 2, 4)),
    ],
)
@given(seed=st.integers(0, 2**32 - 1))
def test_regions_with_an_order_are_painted_one_over_the_other_as_nnunet_does(
    regions, class_order, seed
):
    answers = np.random.default_rng(seed).random((3, 4, 2, len(regions)), np.float32)
    expected = np.zeros(answers.shape[:3], np.uint8)
    for position, code in enumerate(class_order):
        expected[answers[..., position] > 0.5] = code
    painted = PaintedRegions(regions, zip(regions, class_order))
    np.testing.assert_array_equal(label_from_regions(answers, painted), expected)


def test_regions_that_are_left_out_are_not_painted():
    some = PaintedRegions({"c": (4,), "a": (1, 2)}, [("a", 2), ("b", 3), ("c", 4)])
    assert painted_codes(some) == {"a": 2, "c": 4}
    assert painted_codes(PARTS) == {"one": 1, "two": 2}


@pytest.mark.parametrize(
    ("regions", "class_order", "lost"),
    [
        (DECATHLON, (1, 2, 3), ()),
        (DECATHLON, (), ()),
        (DECATHLON, (3, 2, 3), (1,)),
        (dict(reversed(DECATHLON.items())), (3, 2, 1), (2, 3)),
        ({"a": (1, 2), "b": (2, 3)}, (1, 3), (2,)),
        ({"tooth 1": (1, 3), "tooth 2": (2, 3), "pulp": (3,)}, (1, 2, 3), ()),
        (PARTS, (), ()),
    ],
)
def test_codes_that_a_perfect_answer_does_not_paint_back_are_named(regions, class_order, lost):
    painted = PaintedRegions(regions, zip(regions, class_order))
    try:
        check_painting(painted, {}, "store")
        problems = []
    except InputError as error:
        problems = error.problems
    assert [int(re.search(r"for code (\d+)", problem)[1]) for problem in problems] == list(lost)


PAIRS = """left kidney, right kidney
Kidney_L, Kidney_R
leftlung, rightlung
Lung_Lt, Lung_Rt
lftLung, rgtLung
cortex lh, cortex rh
lkidney, rkidney
lateral vessel l, lateral vessel r
Left Lung, lung right
left side of left lung, right side of right lung"""


@pytest.mark.parametrize("line", PAIRS.split("\n"))
def test_names_that_differ_in_left_and_right_alone_are_a_pair(line):
    pair = tuple(line.split(", "))
    assert mirror_pair(["background", *pair, "liver"]) == pair
    assert mirror_pair(["background", pair[0], "liver"]) is None


@pytest.mark.parametrize(
    "names",
    [
        ("edema", "non-enhancing tumor", "enhancing tumour"),
        ("LV", "RV", "myocardium"),
        ("left upper lobe", "right lower lobe"),
        ("bright", "blight"),
    ],
)
def test_other_names_are_no_pair(names):
    assert mirror_pair(["background", *names]) is None
