"""Which rules the evidence of cases chooses, and which it does not."""

import pytest

from cpu3d.data.labels import PaintedRegions
from cpu3d.inference.postprocessing.choice import best_rules
from cpu3d.inference.postprocessing.evidence import Means
from cpu3d.inference.postprocessing.rules import Rule
from cpu3d.inference.postprocessing.run_rules import cross_fitted
from tests.cpu3d.conftest import REGIONS
from tests.cpu3d.inference.postprocessing.made import (
    BIG,
    CORE,
    ENHANCING,
    evidences_of,
    unsure,
)

SMALL = (1, (40, 2, 2), (11, 37, 1))  # 407 voxels: 5.1 % of BIG
ISLAND = (1, (40, 20, 20), (10, 10, 3))  # 300 voxels: 3.75 %
SPECK = (1, (40, 20, 20), (2, 2, 2))  # 8 voxels: 0.1 %
CLEAN = ((BIG,), (BIG,))


def choose(*pairs, alone=True, regions=REGIONS):
    return best_rules(evidences_of(*pairs, regions=regions), regions, alone=alone)


def unsure_rule(share):
    return Rule(share=share, stays_from=0.95)


def test_islands_of_which_the_network_is_unsure_go_with_two_cases():
    choice = choose(((BIG, unsure(ISLAND)), (BIG,)), CLEAN)
    assert choice.chosen.rules == {"WT": unsure_rule(0.1)}  # 3 % would leave it
    dice = 2 * 8000 / (8000 + 8300)
    assert choice.before["WT"] == Means(0.75, 0.5, pytest.approx((dice + 1) / 2))
    assert choice.after["WT"] == Means(1, 0, 1)
    assert choice.before["ET"] == choice.after["ET"] == Means(1, 0, 1)
    assert choice.cases_with == {"WT": 2, "TC": 0, "ET": 0}


def test_of_equal_rules_the_middle_one_is_taken():
    """0.3, 1 and 3 % remove 8 of 8000 voxels, and so does 10 %; 0.1 % does not."""
    assert choose(((BIG, unsure(SPECK)), (BIG,)), CLEAN).chosen.rules == {"WT": unsure_rule(0.01)}


def test_the_mean_of_several_networks_is_not_asked_how_sure_it_is():
    pairs = [((BIG, SMALL, unsure(ISLAND)), (BIG, SMALL))] * 2
    assert choose(*pairs, alone=False).chosen.rules == {}  # a share takes the true lesion
    pairs = [((BIG, unsure(ISLAND)), (BIG,))] * 2
    assert choose(*pairs, alone=False).chosen.rules == {"WT": Rule(share=0.1)}


@pytest.mark.parametrize(
    ("island", "with_island", "expected"),
    [
        (ISLAND, 1, {}),
        (ISLAND, 2, {"WT": Rule(share=0.1)}),
        (unsure(ISLAND), 1, {"WT": unsure_rule(0.1)}),
    ],
)
def test_sure_parts_go_if_more_is_gained_than_is_risked(island, with_island, expected):
    """Beside three large false parts an island costs 1/4 - 1/5: less than 0.1, but not twice."""
    large = [(1, corner, (10, 10, 10)) for corner in ((30, 2, 2), (30, 20, 2), (30, 2, 20))]
    pairs = [((BIG, *large, island), (BIG,))] * with_island + [((BIG, *large), (BIG,))]
    assert choose(*pairs).chosen.rules == expected


def test_no_rule_takes_a_true_part_that_was_found_however_small_it_is():
    tiny = (1, (40, 2, 2), (2, 2, 2))  # 8 voxels: too small to count as a lesion by BraTS
    others = [((BIG, unsure(ISLAND)), (BIG,))] * 3
    choice = choose(((BIG, unsure(tiny), unsure(ISLAND)), (BIG, tiny)), *others)
    assert "WT" not in choice.chosen.rules


@pytest.mark.parametrize(("answered", "is_lost"), [(3, False), (4, True)])
def test_a_true_part_counts_as_found_from_a_tenth_of_its_voxels_on(answered, is_lost):
    true = (1, (40, 2, 2), (10, 4, 1))
    part = unsure((1, (40, 2, 2), (answered, 1, 3)))
    others = [((BIG, unsure(ISLAND)), (BIG,))] * 3
    choice = choose(((BIG, part, unsure(ISLAND)), (BIG, true)), *others)
    assert ("WT" in choice.chosen.rules) != is_lost


def test_of_two_true_parts_of_one_lesion_neither_is_lost():
    """By BraTS parts that are 2 mm apart are one lesion, which the larger one detects alone."""
    near = (1, (24, 2, 2), (3, 3, 3))
    assert choose(*[((BIG, unsure(near), unsure(ISLAND)), (BIG, near))] * 3).chosen.rules == {}


@pytest.mark.parametrize(
    ("size", "expected"),
    [(8, {}), (13, {"WT": unsure_rule(0.01)})],  # 160 and 260 voxels
)
def test_true_lesions_must_be_larger_than_a_bound_by_a_margin(size, expected):
    """50 voxels are 0.6 %, the true 160 are 2 %: 1 % would do, but not its threefold."""
    false = unsure((1, (40, 20, 20), (5, 5, 2)))
    true = unsure((1, (40, 2, 2), (size, 5, 4)))
    choice = choose(*[((BIG, true, false), (BIG, true))] * 2)
    assert choice.chosen.rules == expected


# --- A rule needs evidence of its own ---


FALSE_ET = (3, (12, 12, 12), (3, 3, 3))  # 27 voxels of ET in a core without any
WITH_ET = ((BIG, CORE, ENHANCING), (BIG, CORE, ENHANCING))


def test_little_of_a_region_that_a_case_lacks_becomes_the_next_larger_region():
    choice = choose(WITH_ET, WITH_ET, ((BIG, CORE, FALSE_ET), (BIG, CORE)))
    assert choice.chosen.rules == {"ET": Rule(region_mm3=50)}  # 3 * 100 are more than 216
    two_thirds = pytest.approx(2 / 3)
    assert choice.before["ET"] == Means(two_thirds, pytest.approx(1 / 3), two_thirds)
    assert choice.after["ET"] == Means(1, 0, 1)


@pytest.mark.parametrize("with_it", [1, 2])
def test_a_region_has_a_rule_only_if_two_cases_have_it(with_it):
    """Where no case has it every part is an island, and a rule takes true lesions of other
    cases."""
    false = unsure(FALSE_ET)
    true = (BIG, CORE, ENHANCING)
    has, lacks = ((*true, false), true), ((BIG, CORE, false), (BIG, CORE))
    choice = choose(*[has] * with_it, *[lacks] * (3 - with_it))
    assert set(choice.chosen.rules) == ({"ET"} if with_it == 2 else set())


def test_no_rule_lowers_another_region():
    """A slice of the lesion is apart from the rest of it, and the island would go with it."""
    core = (2, (4, 4, 4), (12, 12, 18))
    gap = (0, (2, 2, 20), (20, 20, 1))
    apart = unsure((1, (2, 2, 21), (20, 20, 1)))
    core_apart = unsure((2, (4, 4, 21), (12, 12, 1)))
    pair = ((BIG, core, gap, apart, core_apart, unsure(ISLAND)), (BIG, core))
    assert choose(pair, pair).chosen.rules == {}


def test_regions_that_share_some_of_their_voxels_have_no_rule():
    """Removing one would take voxels from the other, or paint into it."""
    codes = {"all": (1, 2, 3, 4), "a": (1, 2), "b": (2, 3)}
    crossing = PaintedRegions(codes, [("all", 4), ("a", 1), ("b", 3)])
    true = ((3, *BIG[1:]), (1, (30, 2, 2), (12, 12, 12)))
    false = unsure((1, (10, 10, 10), (3, 3, 3)))
    assert choose(*[((*true, false), true)] * 3, regions=crossing).chosen.off


def test_organs_are_decided_too():
    organs = {"a": (1,), "b": (2,)}
    choice = choose(*[((BIG, unsure(ISLAND)), (BIG,))] * 2, regions=organs)
    assert choice.chosen.rules == {"a": unsure_rule(0.1)}


def test_the_cases_of_a_fold_are_judged_by_rules_that_others_decide():
    """Two cases decide that the island goes, one alone nothing."""
    a, b, c = evidences_of(*[((BIG, ISLAND), (BIG,))] * 3)
    scores = cross_fitted({"1/2": {"a": a, "b": b}, "2/2": {"c": c}}, REGIONS)
    before, after = [[case["WT"].false_positives for case in each.values()] for each in scores]
    assert before == [1, 1, 1]
    assert after == [1, 1, 0]
