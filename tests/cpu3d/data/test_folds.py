"""Folds: a store seen with its training and validation cases dealt anew."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpu3d.data.folds import deal, parse_fold, with_fold
from cpu3d.data.records import remake
from cpu3d.data.store import open_store, write_store
from cpu3d.errors import InputError
from cpu3d.inference.evaluate import evaluate_split
from cpu3d.inference.runs import store_of_run
from cpu3d.settings import load_config
from tests.cpu3d.conftest import LABELS, REGIONS, FakePredictor


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


@given(st.permutations([(f"case{number}", f"patient{number // 2}") for number in range(12)]))
def test_the_order_in_which_cases_are_found_does_not_matter(pairs):
    assert deal(dict(pairs), "2/3", seed=1) == deal(dict(sorted(pairs)), "2/3", seed=1)


def test_another_seed_of_the_store_deals_other_folds():
    patients = {f"case{number}": f"patient{number}" for number in range(30)}
    assert deal(patients, "1/3", seed=0) != deal(patients, "1/3", seed=1)


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


def test_a_view_of_a_view_is_one_of_the_store(tiny_store):
    twice = with_fold(with_fold(tiny_store, "1/2"), "3/4")
    assert twice.manifest.split == with_fold(tiny_store, "3/4").manifest.split
    twice.check_split()


def test_a_damaged_store_is_told_of_through_its_view_too(tiny_store):
    manifest = tiny_store.manifest
    write_store(
        tiny_store.folder,
        dataclasses.replace(manifest, split={**manifest.split, "val": ("c",), "train": ("a", "b", "d")}),
    )
    view = with_fold(open_store(tiny_store.folder), "1/2")
    with pytest.raises(InputError, match="must have hash"):
        view.check_split()


def test_cases_of_one_patient_are_held_out_together(tiny_store):
    cases = [
        dataclasses.replace(case, patient_id="twice") if case.case_id in "ab" else case
        for case in tiny_store.manifest.cases
    ]
    write_store(tiny_store.folder, remake(tiny_store.manifest, cases=cases))
    store = open_store(tiny_store.folder)
    for fold in ("1/3", "2/3", "3/3"):
        assert len({"a", "b"} & set(with_fold(store, fold).manifest.split["val"])) in (0, 2)
    with pytest.raises(InputError, match=r"patients to train and validate on, 3, got 1/4; use fewer parts"):
        with_fold(store, "1/4")


def test_a_run_is_scored_on_the_cases_of_its_fold(tiny_store, tiny_run):
    view = store_of_run(dataclasses.replace(load_config(tiny_run), fold="2/2"))
    scores = evaluate_split(FakePredictor(tiny_store.folder, REGIONS, LABELS), view, "val", tiny_run)
    assert tuple(case["case_id"] for case in scores["cases"]) == view.manifest.split["val"]


@pytest.mark.parametrize("fold", ["1/2", "2/2"])
def test_volumes_come_from_the_cases_of_the_fold(tiny_store, fold):
    from cpu3d.data.source import open_reading, volume_dataset

    view = with_fold(tiny_store, fold)
    for split in ("train", "val"):
        case_ids = view.manifest.split[split]
        reading = open_reading(view, (split,), free_bytes=2**30)
        volumes = volume_dataset(view, split=split, shuffle=False, read_mode=reading, stop=len(case_ids))
        found = [target.numpy()[0, ..., 0] for _, target in volumes]
        assert len(found) == len(case_ids)
        for case_id, target in zip(case_ids, found):
            assert np.count_nonzero(target) == np.count_nonzero(tiny_store.label(case_id))
