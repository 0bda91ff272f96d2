"""Errors of predictions and the margins that are made of them: the shipped ones are those of the
records."""

from pathlib import Path

import pytest

from memory_estimator.accuracy import load_accuracy
from records.measured import digest, left_out_in_turn, spread
from records.validate import validation

RECORDS = Path(__file__).resolve().parents[2] / "records"


@pytest.fixture(scope="module")
def validated(needs_native):
    return validation(RECORDS)[1]


def test_what_the_estimator_says_of_its_errors_is_what_was_measured(validated):
    remake = "run python -m records.tables --records records --accuracy"
    assert load_accuracy() == digest(validated), f"{remake} memory_estimator/hosts/accuracy.json"


def test_no_peak_lies_above_its_bound(validated):
    assert all(row.errors["upper_bound"] >= 0 for row in validated)
    assert left_out_in_turn(validated)[0] == 0  # nor above the bound that all other records make


@pytest.mark.parametrize(
    ("figure", "median", "worst"),
    [("allocator_peak", 0.001, 0.02), ("process_peak", 0.02, 0.1), ("step_s", 0.05, 0.25)],
)
def test_errors_over_all_records_are_as_small_as_the_docs_have_them(
    validated, figure, median, worst
):
    bound = spread(validated, figure)
    assert bound.median <= median
    assert abs(bound.worst) <= worst
