import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpu3d.compare.statistics import (
    bootstrap_mean,
    difference_from_json,
    mean_and_sd_over_seeds,
    paired_difference,
    seed_bound,
)

BASE = np.array([[0.5, 0.25, 0.75], [0.5, 0.5, 0.25]])  # two seeds, three cases; sums are exact in binary


def test_a_constant_shift_is_that_difference_with_an_interval_of_no_width():
    found = paired_difference(BASE - 0.125, BASE)
    assert (found.mean, found.interval) == (-0.125, (-0.125, -0.125))
    assert (found.better, found.worse, found.equal) == (0, 3, 0)
    assert (found.seeds, found.cases) == (2, 3)
    assert found.is_clear


def test_identical_runs_do_not_differ():
    found = paired_difference(BASE, BASE)
    assert (found.mean, found.interval, found.equal) == (0, (0, 0), 3)
    assert not found.is_clear


def test_cases_are_judged_by_the_mean_over_their_seeds_and_shorter_distances_are_better():
    shift = np.array([[1.0, -1.0, 2.0], [-1.0, -1.0, 1.0]])
    larger, smaller = (paired_difference(BASE + shift, BASE, larger_is_better=way) for way in (True, False))
    assert (larger.better, larger.worse, larger.equal) == (1, 1, 1)
    assert (smaller.better, smaller.worse, smaller.equal) == (1, 1, 1)
    assert paired_difference(BASE + 1, BASE, larger_is_better=False).worse == 3


def test_the_interval_of_two_cases_of_one_seed_holds_all_four_resamples():
    """Means of (0, 1): 0 and 1 a quarter of the time each, 1/2 else: 2.5 % and 97.5 % are the ends."""
    assert bootstrap_mean(np.array([[0.0, 1.0]])) == (0, 1)


def test_an_interval_over_one_axis_is_that_of_the_other():
    values = np.arange(8.0) ** 2
    assert bootstrap_mean(values[None]) == pytest.approx(bootstrap_mean(values[:, None]), rel=0.15)


def test_of_many_independent_values_the_interval_is_the_normal_one():
    values = np.random.default_rng(0).normal(3, 2, (1, 400))
    low, high = bootstrap_mean(values)
    half = 1.96 * values.std() / np.sqrt(values.size)
    assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.02)


def test_seeds_that_differ_widen_the_interval_though_their_cases_do_not():
    cases_alone = np.tile([0.0, 1.0, 0.0, 1.0, 0.0, 1.0], (4, 1))
    seeds_too = cases_alone + np.array([[-2.0], [-1.0], [1.0], [2.0]])
    width = lambda values: np.ptp(bootstrap_mean(values))
    assert width(seeds_too) > 2 * width(cases_alone)


def test_a_single_pair_has_no_interval():
    found = paired_difference([[0.5]], [[0.25]])
    assert (found.mean, found.interval, found.is_clear) == (0.25, None, False)


def test_the_same_values_give_the_same_interval():
    values = np.random.default_rng(1).random((3, 5))
    assert bootstrap_mean(values) == bootstrap_mean(values)


@given(st.lists(st.lists(st.floats(-5, 5), min_size=3, max_size=3), min_size=1, max_size=4))
def test_the_interval_lies_within_the_values(rows):
    values = np.array(rows)
    low, high = bootstrap_mean(values)
    assert values.min() - 1e-9 <= low <= high <= values.max() + 1e-9


def test_the_sd_is_of_the_seeds_means():
    assert mean_and_sd_over_seeds(np.array([[1.0, 3.0], [3.0, 5.0]])) == (3, pytest.approx(np.sqrt(2)))
    assert mean_and_sd_over_seeds(np.array([[1.0, 3.0]])) == (2, None)


@pytest.mark.parametrize("values", [np.zeros((2, 2)), np.zeros((0, 3)), np.zeros(3)])
def test_values_that_do_not_pair_are_refused(values):
    with pytest.raises(ValueError, match="seeds, cases"):
        paired_difference(values, BASE)


def test_the_bound_of_the_seeds_is_students():
    """Of differences 0.1, 0.2 and 0.3 the deviation is 0.1; t(0.975, 2) is 4.303."""
    assert seed_bound([0.1, 0.2, 0.3]) == pytest.approx(4.3027 * 0.1 / np.sqrt(3), rel=1e-4)
    assert seed_bound([0.1, 0.3]) == pytest.approx(12.706 * 0.1414214 / np.sqrt(2), rel=1e-4)
    assert seed_bound([0.1]) is None
    assert seed_bound([0.1, 0.1, 0.1]) == 0


def test_of_three_seeds_students_interval_is_2_7_times_the_bootstraps():
    """So much narrower is the interval that resamples three seeds: what every report says of it."""
    values = np.random.default_rng(0).normal(0, 1, (3, 1))
    share = 1.96 * np.sqrt(2 / 3) * values.std(ddof=1) / np.sqrt(3)
    assert seed_bound(values[:, 0]) / share == pytest.approx(2.7, abs=0.02)


def test_a_difference_that_seeds_alone_may_make_does_not_count():
    """Three seeds are all better, by 0.1, 0.2 and 0.6: the interval leaves out 0, but Student's t is 0.657."""
    differences = np.array([[0.1], [0.2], [0.6]]) + np.zeros((1, 4))
    found = paired_difference(differences, np.zeros((3, 4)))
    assert found.leaves_out_zero
    assert found.mean == pytest.approx(0.3)
    assert found.seed_bound == pytest.approx(2.4841 * 0.264575, rel=1e-3)
    assert not found.is_clear
    assert paired_difference(differences + 1, np.zeros((3, 4))).is_clear


def test_with_one_seed_nothing_counts():
    found = paired_difference([[0.9, 0.8, 0.7]], [[0.1, 0.1, 0.1]])
    assert found.leaves_out_zero
    assert not found.is_clear


def test_a_difference_goes_to_json_and_back_and_one_without_a_bound_does_not_count():
    found = paired_difference(BASE - 0.125, BASE)
    content = json.loads(json.dumps(dataclasses.asdict(found)))
    assert difference_from_json(content) == found
    del content["seed_bound"]
    assert difference_from_json(content).mean == -0.125
    assert not difference_from_json(content).is_clear
