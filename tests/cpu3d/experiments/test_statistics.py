"""Paired differences, their intervals, and which of them count."""

import numpy as np
import pytest

from cpu3d.experiments.statistics import (
    bootstrap_mean,
    is_significant,
    paired_difference,
    seed_bound,
)

BASE = np.array([[0.5, 0.25, 0.75], [0.5, 0.5, 0.25]])  # two seeds, three cases; exact in binary


def test_a_constant_shift_is_that_difference_with_an_interval_of_no_width():
    result = paired_difference(BASE - 0.125, BASE)
    counts = {"seeds": 2, "cases": 3, "better": 0, "worse": 3, "equal": 0}
    interval = pytest.approx((-0.125, -0.125))
    assert result == {"mean": -0.125, "interval": interval, **counts, "seed_bound": 0}
    assert is_significant(result)


@pytest.mark.parametrize("larger_is_better", [True, False])
def test_cases_are_judged_by_the_mean_over_their_seeds_and_shorter_distances_are_better(
    larger_is_better,
):
    shift = np.array([[1.0, -1.0, 2.0], [-1.0, 3.0, 1.0]])
    result = paired_difference(BASE + shift, BASE, larger_is_better=larger_is_better)
    better = (2, 0) if larger_is_better else (0, 2)
    assert (result["better"], result["worse"], result["equal"]) == (*better, 1)


def test_the_interval_of_three_cases_of_one_seed_holds_all_resamples():
    """Means of (0, 1/2, 1) are 0 and 1 in one resample of 27 each, or 3.7 %: 2.5 % and 97.5 % are
    the ends, 5 % and 95 % are not."""
    assert bootstrap_mean(np.array([[0.0, 0.5, 1.0]])) == (0, 1)
    assert bootstrap_mean(np.array([[0.5]])) is None


def test_the_same_values_have_the_same_interval():
    values = np.linspace(0, 1, 9)[None] ** 3
    assert bootstrap_mean(values) == bootstrap_mean(values)


def test_seeds_and_cases_are_resampled_crossed():
    """A deviation of the seeds alone, or of the cases alone, is in the interval as a whole: it is
    that of a bootstrap over them, not one over all pairs, which would be narrower."""
    of_four = np.array([0.0, 1.0, 2.0, 3.0])
    alone = bootstrap_mean(of_four[None])
    assert alone == (0.5, 2.5)
    for values in (np.tile(of_four, (50, 1)), np.tile(of_four[:, None], (1, 50))):
        assert np.allclose(bootstrap_mean(values), alone, atol=0.2)


def test_the_bound_of_the_seeds_is_students():
    """Differences 0.1, 0.2 and 0.3 have the deviation 0.1; t(0.975, 2) is 4.303."""
    assert seed_bound([0.1, 0.2, 0.3]) == pytest.approx(4.3027 * 0.1 / np.sqrt(3), rel=1e-4)
    assert seed_bound([0.1]) is None
    assert seed_bound([0.1, 0.1, 0.1]) == 0


def test_a_difference_that_seeds_alone_may_make_does_not_count():
    """Three seeds are all better, by 0.1, 0.2 and 0.6: the interval leaves out 0, but Student's t
    is 0.657."""
    differences = np.array([[0.1], [0.2], [0.6]]) + np.zeros((1, 4))
    result = paired_difference(differences, np.zeros((3, 4)))
    assert result["interval"][0] > 0
    assert not is_significant(result)
    assert is_significant(paired_difference(differences + 1, np.zeros((3, 4))))
    assert not is_significant(paired_difference(differences[2:], np.zeros((1, 4)))), "a single seed"
    # All seeds agree, but the cases do not.
    assert not is_significant(paired_difference(np.array([[1.0, -0.5]] * 3), np.zeros((3, 2))))
