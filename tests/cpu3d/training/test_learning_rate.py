"""The rate that a range test chooses, and what counts as divergence."""

import math

import pytest

from cpu3d.training.learning_rate import FEW, RATES, SHARE, LossWatch, best_rate, is_over


@pytest.mark.parametrize(
    ("losses", "best"),
    [
        ([1.5 - 0.1 * step for step in range(11)], RATES[-1]),
        ([1.5, 1.4, 1.2, 1.0, 1.3], RATES[2]),
        ([1.5, 1.4, 1.45, 1.0, math.nan], RATES[2]),  # a little higher than the lowest is no end
        ([1.5, 1.7], RATES[0]),
    ],
)
def test_the_rate_is_a_share_of_the_highest_that_still_learns(losses, best):
    assert is_over(losses)
    assert best_rate(losses) == pytest.approx(SHARE * best, rel=0.05)


@pytest.mark.parametrize("losses", [[1.5], [1.5, 1.4, 1.42], [1.5 - 0.1 * step for step in range(10)]])
def test_a_range_test_goes_on_while_rates_are_good(losses):
    assert not is_over(losses)


FALLING = [1.6, 1.2, 1.0, 0.8, 0.6, 0.5, 0.4, 0.4, 0.3, 0.3, 0.3]


@pytest.mark.parametrize(
    ("losses", "step"),
    [
        ([1.6, math.nan], 1),
        ([1.6, 1.2, 40.0], 2),
        ([*FALLING, *[2.0] * FEW], len(FALLING) + FEW - 1),
        ([1.6, 5.0, 9.0, *[9.0] * FEW], FEW),
        ([*FALLING, *([2.0] * (FEW - 1) + [0.4]) * 3], None),  # single cases are hard
        ([*FALLING, *[1.05] * 20], None),  # cases without any label cost as much as nothing predicted
        ([1.60, *[1.65] * 20], None),  # a rate that does nothing
        ([0.2, *[0.9] * 20], None),  # of a run from before its losses were kept
    ],
)
def test_a_run_diverges_where_losses_are_high_for_a_few_steps_or_not_finite(losses, step):
    watch = LossWatch()
    found = [number for number, loss in enumerate(losses) if watch.diverges(loss)]
    assert found[:1] == ([] if step is None else [step])
