"""Folds: a store seen with its training and validation cases dealt anew."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpu3d.data.splits import deal, parse_fold, with_fold
from cpu3d.errors import InputError


@pytest.mark.parametrize(("text", "fold"), [("1/2", (1, 2)), ("2/5", (2, 5)), ("10/10", (10, 10))])
def test_a_fold_is_the_ith_of_k_parts(text, fold):
    assert parse_fold(text) == fold


@pytest.mark.parametrize(
    "text", ["6/5", "0/5", "1/1", "1", "1/", "/5", "a/5", "-1/5", " 1/5", "01/5", "1/5/2", "1.0/5", "¹/5", "1/5\n"]
)
def test_what_is_no_fold_is_refused_with_the_rule(text):
    with pytest.raises(InputError, match=r"fold must be I/K with 1 <= I <= K and K >= 2, got (.|\n)*; 1/5 holds out"):
        parse_fold(text)


def test_the_folds_are_the_ones_they_have_always_been():
    patients = {f"case{number}": f"patient{number}" for number in range(5)}
    held_out = [deal(patients, f"{part}/2", seed=0)["val"] for part in (1, 2)]
    assert held_out == [("case0", "case2", "case3"), ("case1", "case4")]


@given(
    st.dictionaries(st.text(min_size=1), st.integers(0, 12), min_size=1, max_size=30),
    st.integers(2, 6),
    st.integers(0, 5),
)
def test_parts_are_disjoint_cover_all_are_even_and_never_part_a_patient(owners, parts, seed):
    patients = {case_id: f"patient{owner}" for case_id, owner in owners.items()}
    count = len(set(patients.values()))
    if count < parts:
        with pytest.raises(InputError, match=rf"at most as many parts as .* validate on, {count}, got 1/{parts};"):
            deal(patients, f"1/{parts}", seed=seed)
        return
    splits = [deal(patients, f"{part}/{parts}", seed=seed) for part in range(1, parts + 1)]
    assert sorted(case_id for split in splits for case_id in split["val"]) == sorted(patients)
    for split in splits:
        assert sorted(split["train"] + split["val"]) == sorted(patients)
        assert not {patients[one] for one in split["train"]} & {patients[one] for one in split["val"]}
    sizes = [len({patients[case_id] for case_id in split["val"]}) for split in splits]
    assert max(sizes) - min(sizes) <= 1


def test_a_view_holds_out_its_part_and_leaves_test_store_and_hash_as_they_are(tiny_store):
    before = tiny_store.manifest.split
    held_out = []
    for part in ("1/4", "2/4", "3/4", "4/4"):
        view = with_fold(tiny_store, part)
        held_out += view.manifest.split["val"]
        assert sorted(view.manifest.split["train"] + view.manifest.split["val"]) == ["a", "b", "c", "d"]
        assert [record.case_id for record in view.cases("val")] == list(view.manifest.split["val"])
        assert [record.case_id for record in view.cases("test")] == ["e", "f"]
        assert view.case("a") == tiny_store.case("a")
        assert view.manifest.split_hash == tiny_store.manifest.split_hash
        view.check_split()
    assert sorted(held_out) == ["a", "b", "c", "d"]
    assert tiny_store.manifest.split == before
    assert with_fold(tiny_store, "") is tiny_store
