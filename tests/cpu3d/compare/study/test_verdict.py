"""Sentences that the numbers of made-up studies decide. Seeds and cases move together, so intervals are known."""

import pytest

from cpu3d.compare.study.learning_rates import Trial
from cpu3d.compare.study.verdict import difference, limits, rates_as_good, seed_noise, sentences, told_apart
from tests.cpu3d.compare.study.studies import arm, study


def of(*arms):
    return " ".join(sentences(study(*arms)))


def test_differences_are_paired_by_seed_and_case():
    """Seeds differ by 0.1, cases by 0.01, and the two arms by 0.05 everywhere: nothing is left to chance."""
    found = difference(arm(0.5, (0.75, 0.65)), arm(1.0, (0.70, 0.60)))
    assert found.mean == pytest.approx(0.05)
    assert found.interval == pytest.approx((0.05, 0.05))


def test_a_difference_that_seeds_alone_may_make_is_none():
    """The bootstrap leaves out zero, as both seeds are better; by 0.05 and 0.15, and Student's t is 0.635."""
    arms = arm(0.5, (0.60, 0.80)), arm(1.0, (0.55, 0.65))
    assert difference(*arms).leaves_out_zero
    assert told_apart(arms[0], arms[1:]) == []
    text = of(*arms)
    assert (
        "Within the noise of seeds and cases (seeds alone may make 0.635), no resolution from 0.5 to 1 is told apart"
        in text
    )


def test_dice_peaks_inside_where_both_neighbours_are_lower():
    text = of(arm(0.5, (0.70, 0.71)), arm(0.75, (0.80, 0.81)), arm(1.0, (0.75, 0.76)))
    assert "Dice peaks at resolution 0.75, with 0.790: 0.5 is 0.100 lower (95 % 0.100 to 0.100), 1 is 0.050" in text


def test_a_peak_beside_a_neighbour_that_may_be_as_good_is_none():
    text = of(arm(0.5, (0.70, 0.71)), arm(0.75, (0.80, 0.81)), arm(1.0, (0.82, 0.77)))
    assert "Dice is highest at resolution 0.75" in text
    assert "not told apart from it: 1 is 0.010 lower" in text


@pytest.mark.parametrize(
    ("seeds", "expected"),
    [
        (((0.6, 0.6), (0.7, 0.7), (0.8, 0.8)), "Dice rises to resolution 1,"),
        (((0.6, 0.6), (0.5, 0.5), (0.8, 0.8)), "Dice is highest at resolution 1,"),
        (((0.8, 0.8), (0.7, 0.7), (0.6, 0.6)), "Dice falls from resolution 0.5,"),
    ],
)
def test_dice_rises_or_falls_only_when_it_does_all_the_way(seeds, expected):
    assert expected in of(*(arm(resolution, dice) for resolution, dice in zip((0.5, 0.75, 1.0), seeds)))


def test_what_seeds_disagree_about_is_noise():
    text = of(arm(0.5, (0.70, 0.80)), arm(1.0, (0.80, 0.71)))
    assert text.startswith(
        "Within the noise of seeds and cases (seeds alone may make 1.207), no resolution from 0.5 to 1 is told apart"
    )


def test_one_seed_tells_nothing_apart():
    text = of(arm(0.5, (0.6,)), arm(0.75, (0.8,)), arm(1.0, (0.7,)))
    assert text.startswith(
        "The highest mean is 0.785 at resolution 0.75, 0.5 is 0.200 lower (95 % 0.200 to 0.200), 1 is"
    )
    assert "one seed, so nothing is told apart." in text
    assert "Dice peaks" not in text
    assert "One seed: intervals are over cases alone" in text
    text = of(arm(1.0, (0.7,)), arm(1.0, (0.6,), batch=4))
    assert "Resolution 1: the highest mean is 0.685 with batch 1, batch 4 is 0.100 lower" in text
    assert "is best" not in text


def test_few_seeds_are_owned_up_to():
    assert "2 seeds and 4 cases: so few" in of(arm(0.5, (0.7, 0.7)), arm(1.0, (0.8, 0.8)))


def test_batches_are_compared_at_each_resolution():
    text = of(arm(1.0, (0.7, 0.71)), arm(1.0, (0.6, 0.61), batch=4))
    assert "Resolution 1: with equal data batch 1 is best, with 0.690: batch 4 is 0.100 lower" in text
    text = of(arm(1.0, (0.7, 0.61)), arm(1.0, (0.6, 0.70), batch=4))
    assert "Resolution 1: batches 1 and 4 are not told apart (seeds alone may make 1.207); 1 has 0.640, " in text


def test_a_batch_that_may_be_as_good_as_the_best_is_told_from_those_that_are_not():
    text = of(arm(1.0, (0.7, 0.71)), arm(1.0, (0.6, 0.61), batch=2), arm(1.0, (0.72, 0.67), batch=4))
    assert "batch 1 is best, with 0.690: batch 2 is 0.100 lower" in text
    assert "; not told apart from it: batch 4 is 0.010 lower" in text


def test_equal_rates_are_said_to_be_equal():
    assert "The best learning rate is 0.002 at every resolution." in of(arm(0.5, (0.7, 0.7)), arm(1.0, (0.8, 0.8)))


RISING = (Trial(0.001, 0.50), Trial(0.002, 0.58), Trial(0.004, 0.60), Trial(0.008, 0.50))
FALLING = (Trial(0.0005, 0.5), Trial(0.001, 0.58), Trial(0.002, 0.60), Trial(0.004, 0.55))


def test_a_rate_that_differs_by_more_than_the_seeds_do_is_a_finding():
    """Seeds at 0.700 and 0.701 have a deviation of 0.0007; the rate next to the best lost 0.02."""
    text = of(arm(0.5, (0.70, 0.701), rate=0.004, trials=RISING), arm(1.0, (0.8, 0.801), trials=FALLING))
    assert "The best learning rate is 0.004 at 0.5 and 0.002 at 1, which is twice at 0.5 what it is at 1" in text
    assert (
        "no one rate is within the seed noise of full runs (Dice 0.001) of the best at all, and short ones may" in text
    )


def test_a_rate_that_differs_by_less_than_the_seeds_do_is_noise():
    """Seeds at 0.70 and 0.74 have a deviation of 0.028: with 0.002 both arms lose no more than 0.02."""
    arms = (arm(0.5, (0.70, 0.74), rate=0.004, trials=RISING), arm(1.0, (0.8, 0.84), trials=FALLING))
    assert seed_noise(arms) == pytest.approx(0.0283, abs=1e-4)
    assert rates_as_good(arms[0], 0.0283) == [0.002, 0.004]
    assert rates_as_good(arms[1], 0.0283) == [0.001, 0.002]
    assert "within the seed noise of full runs (Dice 0.028) 0.002 would have done at every resolution" in of(*arms)


def test_a_search_that_ended_at_an_end_is_told():
    open_end = (Trial(0.001, 0.5), Trial(0.002, 0.6))
    text = of(arm(0.5, (0.7,), trials=open_end), arm(1.0, (0.7,)))
    assert "at an end of what was tried at 0.5 (batch 1)" in text
    assert "at an end" not in of(arm(0.5, (0.7,), trials=(*open_end, Trial(0.004, None))), arm(1.0, (0.7,)))


def test_the_cost_of_the_lowest_and_the_highest_resolution_is_told():
    text = of(arm(0.5, (0.7,), step_s=0.25), arm(1.0, (0.7,), step_s=2.0))
    assert "A step takes 0.25 s at resolution 0.5 and 2 s at 1, training peaks at 1.00 and 1.00 GiB." in text


def test_one_arm_has_nothing_to_be_compared_with():
    assert sentences(study(arm(1.0, (0.7, 0.8)))) == []


def test_a_rate_that_diverged_in_full_length_is_told():
    text = of(arm(0.5, (0.7, 0.7)), arm(1.0, (0.8, 0.8), rate=0.001, diverged=(0.002,)))
    assert (
        "At resolution 1, batch 1, 0.002 won the search but diverged in full length; 0.001, the next best, is" in text
    )
    assert 0.002 not in rates_as_good(arm(1.0, (0.8,), rate=0.001, diverged=(0.002,)), 1.0)


def test_limits_follow_from_how_it_was_done():
    slow = study(arm(0.5, (0.7,)), arm(1.0, (0.8,), train_s=240.0), arm(1.0, (0.8,), batch=4), split="val")
    text = " ".join(limits(slow))
    assert "a run at resolution 1 took 4 times the seconds of one at 0.5" in text
    assert "25 % of a full run's steps and the 4 validation cases" in text
    assert "The best of 3 arms is picked by the scores" in text
    assert 'split "val" were seen' in text
    both = study(arm(1.0, (0.8,), trials=()), arm(1.0, (0.8,), batch=4, trials=()))
    text = " ".join(limits(both))
    assert "240 at batch 1, 60 at 4" in text
    assert "The search" not in text
    assert "were seen" not in text
