"""Medians, ratios round by round, and targets that are met or missed."""

import pytest

from cpu3d.bench.data.results import Line, Target, find, ratio, times_slower
from cpu3d.bench.data.tables import amount


def test_a_ratio_is_taken_round_by_round():
    # The second round was slow for both: medians alone would say 10 / 1.
    slow, fast = Line("slow", "warm", (10.0, 40.0, 10.0)), Line("fast", "warm", (1.0, 2.0, 5.0))
    assert ratio(slow, fast) == 10
    assert ratio(slow, Line("once", "warm", (4.0,))) == 2.5


@pytest.mark.parametrize(
    ("value", "rule", "met"), [(3.2, ">=", True), (3.1, ">=", False), (3.2, "<=", True), (3.3, "<=", False)]
)
def test_a_target_is_met_at_its_bound(value, rule, met):
    assert Target("t", value, rule, 3.2).met is met


def test_a_mark_says_what_the_line_would_have_to_take():
    slow, fast = Line("slow", "cold", (30.0,)), Line("fast", "cold", (2.0,))
    target = times_slower("t", slow, fast, ">=", 10)
    assert (target.value, target.met, target.mark) == (15, True, ("slow", "cold", 20.0))


def test_a_line_s_spread_is_in_its_json():
    content = Line("a", "warm", (3.0, 1.0, 2.0), note="n").to_json()
    assert content == {
        "name": "a",
        "state": "warm",
        "unit": "s",
        "median": 2.0,
        "min": 1.0,
        "max": 3.0,
        "n": 3,
        "note": "n",
    }


def test_a_line_that_is_not_there_is_an_error():
    with pytest.raises(LookupError, match="no line 'a', 'cold'"):
        find([Line("a", "warm", (1.0,))], "a", "cold")


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (1.5, "s", "1.5 s"),
        (0.0123, "s", "12.3 ms"),
        (4.2e-5, "s", "42 us"),
        (1234.5, "MiB", "1234 MiB"),
        (0.5, "%", "0.5 %"),
    ],
)
def test_amounts_are_written_in_the_unit_that_reads_best(value, unit, text):
    assert amount(value, unit) == text
