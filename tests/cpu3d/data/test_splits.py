import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpu3d.data.splits import split_cases
from cpu3d.errors import InputError

THIRDS = (0.8, 0.1, 0.1)


def one_each(count):
    return {f"case{number}": f"patient{number}" for number in range(count)}


def test_the_split_is_the_one_it_has_always_been():
    assert split_cases(one_each(10), fractions=THIRDS, seed=0) == {
        "train": ("case0", "case1", "case3", "case4", "case5", "case6", "case7", "case8"),
        "val": ("case2",),
        "test": ("case9",),
    }


@pytest.mark.parametrize(
    ("patients", "fractions", "sizes"),
    [
        (10, (0.8, 0.1, 0.1), (8, 1, 1)),
        (3, (0.8, 0.1, 0.1), (1, 1, 1)),
        (4, (0.8, 0.1, 0.1), (2, 1, 1)),
        (484, (0.8, 0.1, 0.1), (387, 49, 48)),
        (1, (1, 0, 0), (1, 0, 0)),
        (5, (0, 0, 1), (0, 0, 5)),
        (4, (0.02, 0.49, 0.49), (1, 2, 1)),
        (3, (1 / 3, 1 / 3, 1 / 3), (1, 1, 1)),
    ],
)
def test_shares_are_near_the_fractions_and_never_nothing_where_something_was_asked(patients, fractions, sizes):
    split = split_cases(one_each(patients), fractions=fractions, seed=0)
    assert tuple(map(len, split.values())) == sizes


@given(st.dictionaries(st.text(min_size=1), st.integers(0, 20), min_size=1), st.integers(0, 5))
def test_splits_are_disjoint_cover_all_and_never_part_a_patient(patients, seed):
    patients = {case: f"patient{number}" for case, number in patients.items()}
    if len(set(patients.values())) < 3:
        with pytest.raises(InputError, match="at least 3 patients"):
            split_cases(patients, fractions=THIRDS, seed=seed)
        return
    split = split_cases(patients, fractions=THIRDS, seed=seed)
    everyone = [case for part in split.values() for case in part]
    assert sorted(everyone) == sorted(patients)
    owners = [{patients[case] for case in part} for part in split.values()]
    assert all(owners)
    assert sum(map(len, owners)) == len(set(patients.values()))


def test_too_few_patients_are_refused_with_the_way_out():
    with pytest.raises(InputError, match=r"at least 3 patients, got 2; .*--split 1 0 0"):
        split_cases({"a": "p", "b": "p", "c": "q"}, fractions=THIRDS, seed=0)
    with pytest.raises(InputError, match="--split 80 10 10 must have at least 3"):
        split_cases(one_each(2), fractions=(80, 10, 10), seed=0)
    with pytest.raises(InputError, match="got 0"):
        split_cases({}, fractions=(1, 0, 0), seed=0)
