"""Rules: what is removed and what it becomes."""

import numpy as np
import pytest

from cpu3d.data.labels import PaintedRegions
from cpu3d.inference.postprocessing.rules import PostProcessing, Rule, common_rules
from tests.cpu3d.conftest import REGIONS
from tests.cpu3d.inference.postprocessing.made import BIG, MM, answers_of, label_of


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({"WT": Rule(share=0.1)}, (0, 2, 3, 3)),
        ({"TC": Rule(share=0.5)}, (1, 1, 1, 3)),  # oedema, and the ET within it too
        ({"ET": Rule(share=0.5)}, (1, 2, 2, 3)),  # the rest of the core
        ({"WT": Rule(share=0.9), "TC": Rule(region_mm3=8001), "ET": Rule()}, (0, 1, 1, 1)),
        ({"ET": Rule(region_mm3=133)}, (1, 2, 3, 3)),  # there are 8 and 125 voxels of it
        ({"ET": Rule(region_mm3=134)}, (1, 2, 2, 2)),
        ({"ET": Rule(share=0.5, region_mm3=126)}, (1, 2, 2, 2)),  # 125 are left
    ],
)
def test_a_part_that_is_removed_becomes_the_next_larger_region(rules, expected):
    answers = answers_of(
        BIG,
        (1, (40, 20, 20), (1, 1, 1)),
        (2, (4, 4, 4), (2, 2, 4)),
        (3, (4, 4, 4), (2, 2, 2)),
        (3, (10, 10, 10), (5, 5, 5)),
    )
    kept = answers.copy()
    painted = PostProcessing(rules).paint(answers, REGIONS, MM)
    places = ((40, 20, 20), (4, 4, 6), (4, 4, 4), (12, 12, 12))
    assert tuple(painted[at] for at in places) == expected
    np.testing.assert_array_equal(answers, kept)


@pytest.mark.parametrize(("paint", "kept"), [([], 1), ([("WT", 2), ("ET", 3)], 2)])
def test_a_part_that_is_removed_becomes_what_its_larger_region_is_painted_with(paint, kept):
    regions = PaintedRegions({"WT": (1, 2, 3), "ET": (3,)}, paint)
    answers = np.zeros((4, 1, 1, 2), np.float32)
    answers[:3, ..., 0] = 0.9
    answers[1, ..., 1] = 0.9
    chosen = PostProcessing({"ET": Rule(region_mm3=2)})
    assert PostProcessing().paint(answers, regions, MM).ravel().tolist() == [kept, 3, kept, 0]
    assert chosen.paint(answers, regions, MM).ravel().tolist() == [kept, kept, kept, 0]


@pytest.mark.parametrize(
    ("spacing_mm", "kept"),
    [
        ((1, 1, 6), False),  # 8 voxels are 48 mm3
        ((1, 1, 6.25), True),
        ([[1, 0, 0], [0, 1, 4], [0, 0, 6]], False),  # slanted voxels
    ],
)
def test_a_bound_is_a_volume_and_parts_touch_at_corners(spacing_mm, kept):
    answers = answers_of((1, (40, 20, 20), (2, 3, 1)), (1, (42, 23, 21), (2, 1, 1)))
    rules = {"WT": Rule(share=1, region_mm3=50)}
    assert PostProcessing(rules).paint(answers, REGIONS, spacing_mm).any() == kept


def test_several_runs_remove_what_each_of_them_would():
    """But for a rule that asks how sure a network is, which is not how sure their mean is."""
    sure = Rule(share=0.1, stays_from=0.95)
    rules = {"WT": Rule(share=0.1, region_mm3=9), "TC": Rule(share=0.1), "ET": sure}
    first = PostProcessing(rules)
    other = PostProcessing({"WT": Rule(share=0.01, region_mm3=90), "ET": sure})
    assert common_rules([first, other]) == PostProcessing({"WT": Rule(share=0.01, region_mm3=9)})
    off = PostProcessing(off="why")
    assert (common_rules([first, off]), common_rules([first])) == (off, first)
    only = PostProcessing({"ET": sure})
    assert common_rules([only, only]).off


def test_a_small_part_of_which_the_network_is_sure_anywhere_stays():
    sure = (1, (40, 2, 2), (3, 3, 3), 0.6)
    peak = (1, (41, 3, 3), (1, 1, 1), 0.75)
    island = (1, (50, 20, 20), (3, 3, 3), 0.74)
    rule = PostProcessing({"WT": Rule(share=0.1, stays_from=0.75)})
    painted = rule.paint(answers_of(BIG, sure, peak, island), REGIONS, MM)
    np.testing.assert_array_equal(painted, label_of(BIG, sure))


def test_words_name_each_bound():
    rule = Rule(share=0.03, stays_from=0.95, region_mm3=200)
    words = PostProcessing({"ET": rule}).words
    for part in ("ET", "3 %", "0.95", "200 mm"):
        assert part in words
