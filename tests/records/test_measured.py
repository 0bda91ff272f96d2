"""Errors of predictions and the margin that is made of them, by hand; the shipped ones are those of
the records."""

from pathlib import Path

import pytest

from memory_estimator.accuracy import Accuracy, load_accuracy
from memory_estimator.job import Job
from models.config import UNetConfig
from records.measured import (
    LEAST_RECORDS,
    Measured,
    Row,
    digest,
    left_out_in_turn,
    margin_share,
    spread,
)
from records.tables import SECTIONS, tables
from records.validate import validation

GIB = 2**30


def row(process, side=128, threads=1, measured=10 * GIB, policy="speed", **about):
    """A step whose peak was predicted so."""
    job = Job(UNetConfig(policy=policy), (side,) * 3, threads=threads)
    step = Measured(job, 1.0, measured, measured, **about)
    errors = {"allocator_peak": 0.0, "process_peak": process / measured - 1, "step_s": None}
    return Row(step, process, True, {**errors, "upper_bound": 0.1})


def rows_of(errors, **about):
    """Steps whose peak is off by these shares."""
    return [row(process=int(10 * GIB * (1 + error)), **about) for error in errors]


ERRORS = (-0.031, 0.02, 0.01, 0.0, -0.01, 0.003, -0.002, 0.015, -0.004)


@pytest.mark.parametrize("errors", [ERRORS, (0.05, 0.04) * 6, (-0.005,) * 9])
def test_a_margin_lies_above_every_record_and_by_their_spread_above_the_next(errors):
    rows = rows_of(errors)
    share = margin_share(rows)
    assert share >= max(0, 1 / (1 + min(errors)) - 1)
    assert margin_share(rows_of([3 * error for error in errors])) >= share
    assert margin_share(rows_of([*errors, -0.1])) > 0.1


def test_errors_and_margins_are_those_of_a_kind_and_few_records_are_none():
    rows = [
        *rows_of(ERRORS, version="1"),
        *rows_of((0.0,) * 9, version="2", host="b", threads=4, policy="lean"),
    ]
    second, first = digest(rows).kinds
    assert (first.versions, first.records, first.held_out, first.threads) == (("1",), 9, 9, (1,))
    assert (first.process_peak.median, first.process_peak.worst) == (0.01, 0.031)
    assert (second.hosts, second.threads, second.process_peak.worst) == (("b",), (4,), 0.0)
    assert first.margin_share > second.margin_share == 0
    assert digest(rows_of((0.3,) * (LEAST_RECORDS - 1))) == Accuracy(())
    assert left_out_in_turn(rows) == (1, 18)  # the first of ERRORS
    assert left_out_in_turn(rows_of((*(0.0,) * 9, -0.2))) == (1, 10)


def test_the_errors_are_of_steps_that_no_constant_was_fitted_to():
    (kind,) = digest([*rows_of((0.01,) * 9), *rows_of((0.2,), side=64)]).kinds
    assert (kind.records, kind.held_out, kind.process_peak.worst) == (10, 9, 0.01)
    assert digest(rows_of((0.0,) * 9, side=64)) == Accuracy(())


# --- The published records ---


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


def test_the_page_of_results_is_made_of_the_records():
    page = "\n".join(tables(RECORDS))
    assert page.count("\n## ") == len([name for name in SECTIONS if (RECORDS / name).exists()])
    assert "| predicted |" in page
