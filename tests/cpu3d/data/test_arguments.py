"""What is wrong with a dataset's arguments is told at once."""

import numpy as np
import pytest

from cpu3d.data.arguments import Checks, check_stream, is_integer
from cpu3d.errors import InputError

GOOD = {"start": 0, "stop": None, "seed": -1, "batch": 1, "threads": 1, "page_budget_bytes": None}


def test_what_is_in_range_is_let_through():
    check_stream(**GOOD)
    check_stream(**{**GOOD, "stop": 0, "page_budget_bytes": 0, "start": np.int64(3)})


def test_every_number_out_of_range_is_told():
    wrong = {"start": -1, "stop": -1, "seed": 0.5, "batch": True, "threads": "2", "page_budget_bytes": -1}
    with pytest.raises(InputError) as caught:
        check_stream(**wrong)
    assert {problem.split()[0] for problem in caught.value.problems} == set(wrong)


def test_checks_gather_each_problem_once_and_give_what_was_good():
    def refuse(*problems):
        raise InputError(*problems)

    checks = Checks()
    checks.done()
    assert checks.of(max, 1, 2) == 2
    assert checks.of(refuse, "a", "b") is None
    assert checks.of(refuse, "b", "c") is None
    with pytest.raises(InputError) as caught:
        checks.done()
    assert caught.value.problems == ("a", "b", "c")


@pytest.mark.parametrize(("value", "expected"), [(1, True), (np.uint8(1), True), (True, False), (1.0, False)])
def test_what_an_integer_is(value, expected):
    assert is_integer(value) is expected
