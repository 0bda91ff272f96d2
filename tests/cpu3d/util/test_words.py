import pytest

from cpu3d.util.words import listed, markdown_table, number, plus_minus, seconds


@pytest.mark.parametrize(("items", "words"), [([1], "1"), ("ab", "a and b"), (["a", "b", 3], "a, b and 3")])
def test_a_list_ends_with_and(items, words):
    assert listed(items) == words


@pytest.mark.parametrize(
    ("value", "unit", "words"),
    [
        (None, 1, "-"),
        (0.12345, 1, "0.123"),
        (99.4, 1, "99.4"),
        (3 * 2**30, 2**30, "3"),
        (1234.4, 1, "1,234"),
    ],
)
def test_a_number_has_three_digits(value, unit, words):
    assert number(value, unit) == words


def test_a_mean_has_its_deviation_where_there_is_one():
    assert plus_minus(0.9124, 0.0041, 3) == "0.912 \u00b1 0.004"
    assert plus_minus(0.9124, None, 2) == "0.91"


@pytest.mark.parametrize(("value", "words"), [(None, "-"), (0.25, "0.25 s"), (99.9, "99.9 s"), (123, "0:02:03")])
def test_seconds_are_minutes_and_hours_where_there_are_many(value, words):
    assert seconds(value) == words


def test_a_table_has_its_header_a_line_and_its_rows():
    assert markdown_table(["", "b"], [["1", "2"], ["3", "4"]], bold=[1]) == [
        "|  | b |",
        "|---|---|",
        "| 1 | 2 |",
        "| **3** | **4** |",
    ]
