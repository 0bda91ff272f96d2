import dataclasses
import json
import math
import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpu3d.data.datasets.patients import TABLE, UNKNOWN, patient_of, read_patients
from cpu3d.data.fold import deal, parse_fold, with_fold, with_folds
from cpu3d.data.store import Store, open_store
from cpu3d.data.stores.prepare import USUAL_SPLIT, prepare
from cpu3d.data.stores.splits import split_cases
from cpu3d.data.stores.upkeep import append
from cpu3d.errors import InputError
from tests.cpu3d.data.made_datasets import ALL, dataset_json, decathlon

PATIENTS = st.dictionaries(st.text(min_size=1), st.sampled_from("abcdefghijkl"), min_size=1)
"""Case id -> patient."""


def one_each(count):
    return {f"case{number}": f"patient{number}" for number in range(count)}


def test_the_split_is_the_one_it_has_always_been():
    assert split_cases(one_each(10), fractions=USUAL_SPLIT, seed=0) == {
        "train": ("case0", "case1", "case3", "case4", "case5", "case6", "case7", "case8"),
        "val": ("case2",),
        "test": ("case9",),
    }


@pytest.mark.parametrize(
    ("patients", "fractions", "sizes"),
    [
        (4, (0.8, 0.1, 0.1), (2, 1, 1)),
        (484, (0.8, 0.1, 0.1), (387, 49, 48)),
        (5, (0, 0, 1), (0, 0, 5)),
        (4, (0.02, 0.49, 0.49), (1, 2, 1)),
        (30, (33.3, 33.3, 33.4), (10, 10, 10)),
    ],
)
def test_shares_are_near_the_fractions_and_never_nothing_where_something_was_asked(
    patients, fractions, sizes
):
    split = split_cases(one_each(patients), fractions=fractions, seed=0)
    assert tuple(map(len, split.values())) == sizes


@pytest.mark.parametrize("fractions", [(0, 0, 0), (2, -1, 0), (1, math.inf, 0)])
def test_shares_that_are_none_are_refused(fractions):
    with pytest.raises(InputError, match="--split must be three shares of at least 0, not all 0"):
        split_cases(one_each(4), fractions=fractions, seed=0)


def patients_in(parts, patients):
    """How many patients each part has. Every case is in one part, and so is every patient."""
    assert sorted(case_id for part in parts for case_id in part) == sorted(patients)
    counts = [len({patients[case_id] for case_id in part}) for part in parts]
    assert sum(counts) == len(set(patients.values()))
    return counts


@given(PATIENTS, st.integers(0, 5))
def test_splits_are_disjoint_cover_all_and_never_part_a_patient(patients, seed):
    if len(set(patients.values())) < 3:
        with pytest.raises(InputError, match="at least 3 patients"):
            split_cases(patients, fractions=USUAL_SPLIT, seed=seed)
        return
    split = split_cases(patients, fractions=USUAL_SPLIT, seed=seed)
    assert min(patients_in(split.values(), patients)) > 0


@pytest.mark.parametrize("text", ["6/5", "0/5", "1/1", "01/5", "1/5\n"])
def test_what_is_no_fold_is_refused_with_the_rule(text):
    with pytest.raises(InputError, match=r"fold must be I/K with 1 <= I <= K and K >= 2, got "):
        parse_fold(text)
    assert parse_fold("10/10") == (10, 10)


def test_the_folds_are_the_ones_they_have_always_been():
    held_out = [deal(one_each(5), f"{part}/2", seed=0) for part in (1, 2)]
    assert held_out == [("case0", "case2", "case3"), ("case1", "case4")]


@given(PATIENTS, st.integers(2, 6), st.integers(0, 5))
def test_parts_are_disjoint_cover_all_are_even_and_never_part_a_patient(patients, parts, seed):
    count = len(set(patients.values()))
    if count < parts:
        with pytest.raises(InputError, match=rf"at most .* on, {count}, got 1/{parts}"):
            deal(patients, f"1/{parts}", seed=seed)
        return
    held_out = [deal(patients, f"{part}/{parts}", seed=seed) for part in range(1, parts + 1)]
    counts = patients_in(held_out, patients)
    assert max(counts) - min(counts) <= 1


def test_a_view_holds_out_its_part_and_leaves_test_store_and_hash_as_they_are(tiny_store):
    before = tiny_store.manifest
    views = [with_fold(tiny_store, f"{part}/4").manifest for part in range(1, 5)]
    assert sorted(sum((view.split["val"] for view in views), ())) == ["a", "b", "c", "d"]
    for view in views:
        assert sorted(view.split["train"] + view.split["val"]) == ["a", "b", "c", "d"]
        assert (view.split["test"], view.split_hash) == (("e", "f"), before.split_hash)
    assert tiny_store.manifest == before
    assert with_fold(tiny_store, "") is tiny_store
    alike = [dataclasses.replace(case, image_voxels_sha256="0") for case in before.cases]
    store = Store(tiny_store.folder, dataclasses.replace(before, cases=alike))
    with pytest.raises(InputError, match="identical voxels"):
        with_fold(store, "1/4")


# --- Patients: no patient and no image is in two splits ---


@pytest.fixture
def dataset(tmp_path):
    """dataset(*case ids, folder="data"): a data set in the Decathlon layout with cases of these
    names."""

    def make(*case_ids, folder="data"):
        names = [f"{case_id}.nii.gz" for case_id in case_ids]
        training = [{"image": f"imagesTr/{name}", "label": f"labelsTr/{name}"} for name in names]
        path = decathlon(tmp_path / folder, len(case_ids), training=training)
        for number, name in enumerate(names):
            for kind in ("imagesTr", "labelsTr"):
                (path / kind / f"BRATS_{number:03d}.nii.gz").rename(path / kind / name)
        return path

    return make


CASES = """
BraTS-GLI-00005-100 BraTS-GLI-00005
BraTS2021_00495 BraTS2021_00495
Brats18_TCIA01_131_1 Brats18_TCIA01_131
TCGA-02-0006_2000.01.01 TCGA-02-0006
sub-01_ses-02 sub-01
patient001_frame01 patient001
UCSF-PDGM-0409_FU002d UCSF-PDGM-0409
A0S9V9_sa_ED A0S9V9
001_pre-op 001
OAS30001_MR_d0129 OAS30001
site1_day1_p1
case_00012_T1
10000_1000000 10000
ADNI_002_S_0295_MR ADNI_002_S_0295
psma_95b833d65be2_2018 psma_95b833d65be2
UPENN-GBM-00001_11 UPENN-GBM-00001
p12_baseline p12
p7_2019-04-12 p7
BRATS_001
LUNG1-001
sub-001-002
ES_001
BraTS-GLI-00005-1000
p7_phase2 p7
p7_week-012-3 p7
p7_month6 p7
p7_session2 p7
p7_visit_3b p7
p7_time-point2 p7
p7-TP1 p7
p7_year1_scan2 p7
p7_study-2 p7
p7_M12 p7
p7_M1
p7_V2_brain p7
p7_T3_gt p7
p7_T2
p7_20190412 p7
p7_20191312
p7_fu p7
p7_follow-up2 p7
p7_mid p7
p7_post_treatment p7
p7_intraRT p7
p7_pre-contrast_nifti p7
p7_2ch_ES p7
RHUH-0001_1 RHUH-0001
UCSD-PTGBM-0002_01 UCSD-PTGBM-0002
BraTSReg_001_00 BraTSReg_001
training01_02 training01
BraTS20_Training_001 BraTS20_Training_001
Brats17_2013_24_1 Brats17_2013_24
fdg_0123abcd_x fdg_0123abcd
002_S_0295 002_S_0295
OAS1_0001_MR1 OAS1_0001
"""


@pytest.mark.parametrize("line", CASES.strip().split("\n"))
def test_names_of_usual_data_sets_show_the_patient_in_any_layout(line):
    """Of a case beside its patient, or alone."""
    case_id, *patient = line.split()
    known, rule = patient_of(case_id)
    assert (known, rule == UNKNOWN) == ((*patient, case_id)[0], not patient)


def test_a_first_scan_that_is_named_as_its_patient_is_of_that_patient(tmp_path, dataset, capsys):
    data = dataset("UCSF-PDGM-0001", "UCSF-PDGM-0001_FU002d", "UCSF-PDGM-0002")
    found = prepare(data, tmp_path / "store", **ALL)
    assert [case.patient_id for case in found.cases] == [f"UCSF-PDGM-000{n}" for n in (1, 1, 2)]
    out = capsys.readouterr().out
    assert re.search("Patients: 2\n  2 cases: not known .*\n  1 case: UCSF.*\n  if a patient", out)
    assert re.search("3 of 2 patients, 0 unlabelled\n  patients 2 cases: not .*; 1 case: UCSF", out)


def test_cases_without_a_label_are_in_no_part_of_a_fold(tiny_store):
    cases = [
        dataclasses.replace(case, label_voxels={}) if case.case_id in "be" else case
        for case in tiny_store.manifest.cases
    ]
    manifest = dataclasses.replace(tiny_store.manifest, cases=tuple(cases), split_seed=2)
    store = Store(tiny_store.folder, manifest)
    views = [with_fold(store, fold).manifest.split for fold in ("1/3", "2/3", "3/3")]
    assert [view["val"] for view in views] == [("c",), ("d",), ("a",)]
    assert all("b" not in view["train"] for view in views)
    assert {view["test"] for view in views} == {("e", "f")}


@pytest.mark.parametrize(
    "text",
    ["case,patient\na,p\nb,p\n\n", "b;p\na;p", "a\tp\n\nb\tp\nz\tq", "\ufeffa, p\nb ,p\na,p"],
)
def test_a_table_of_patients_may_be_written_as_spreadsheets_do(tmp_path, text):
    (tmp_path / "table").write_text(text)
    assert {"a": "p", "b": "p"}.items() <= read_patients(tmp_path / "table", ["a", "b"]).items()


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"a,p", "case b"),
        (b"a,p\na,q\nb,p", ":2"),
        (b"a\nb,p", ":1"),
        (b"a,\nb,p", ":1"),
        (b"\xff", "UTF-8"),
    ],
)
def test_a_table_that_does_not_give_each_case_one_patient_is_refused(tmp_path, content, named):
    (tmp_path / "table").write_bytes(content)
    with pytest.raises(InputError, match=rf"--patients .*table.*{named}"):
        read_patients(tmp_path / "table", ["a", "b"])


def test_appended_cases_join_their_patients_by_the_table_that_the_store_has_them_from(
    tmp_path, dataset
):
    store = tmp_path / "store"
    table = tmp_path / "table"
    table.write_text("a,p\nb,q\nc,r\nd,q\n")
    old = prepare(dataset(*"abc"), store, fractions=(1, 1, 1), workers=1, patients=table)
    more = dataset(*"abcd", folder="more")
    with pytest.raises(InputError, match="--patients must be given"):
        append(store, more, workers=1)
    manifest = append(store, more, workers=1, patients=table).manifest
    assert manifest.patient_rules == {TABLE: 4}
    (name,) = [name for name, ids in old.split.items() if "b" in ids]
    assert manifest.split[name] == ("b", "d")
    table.write_text("a,p\nb,z\nc,r\nd,q\ne,z\n")
    with pytest.raises(InputError, match=r"case b must be of the patient .* q, got z"):
        append(store, dataset("e", folder="other"), workers=1, patients=table)


# --- Folds that are given ---

TWO = [
    {"train": ["a", "b"], "val": ["c"]},
    {"train": ["b.nii.gz", "c.nii.gz"], "val": ["a.nii.gz"]},
]
ONE = {"train": ["a", "b"], "val": ["c"]}


@pytest.fixture
def split_as(tmp_path):
    """split_as(content, data, store="store", **more): `prepare` with a file of these folds."""

    def run(content, data, store="store", **more):
        path = tmp_path / "splits_final.json"
        path.write_text(json.dumps(content))
        return prepare(data, tmp_path / store, workers=1, splits=path, **more)

    return run


def test_given_folds_are_kept_and_a_run_sees_exactly_its_own(tmp_path, dataset, split_as, capsys):
    data = dataset(*"abcd")
    manifest = split_as(TWO, data)
    folds = r"2 given .*: 2 \+ 1, 2 \+ 1; .* --fold I/2; .*; 1 case in no fold"
    assert re.search(folds, capsys.readouterr().out)
    opened = open_store(tmp_path / "store")
    own = {"train": ("a", "b"), "val": ("c",), "test": ("d",)}
    assert manifest.split == own, "without --fold as fold 1; what no fold names is untouched"
    assert with_fold(opened, "1/2").manifest.split == own
    second = {"train": ("b", "c"), "val": ("a",), "test": ("d",)}
    assert with_fold(opened, "2/2").manifest.split == second
    both = {"train": ("b",), "val": ("a", "c"), "test": ("d",)}  # what both train on
    assert with_folds(opened, ["1/2", "2/2"]).manifest.split == both
    with pytest.raises(InputError, match="--seed must be left out with --splits, got 1"):
        split_as(TWO, data, seed=1)
    with pytest.raises(InputError, match=r"fold must be one of the 2 .*, got 1/3"):
        with_fold(opened, "1/3")
    assert split_as(TWO, data) == manifest
    with pytest.raises(InputError, match=r"must have a drawn split .*, got 2 given folds"):
        append(tmp_path / "store", dataset(*"abcde", folder="more"), workers=1)


KEPT = "must keep its content.* than (the 2 folds of|1 train, 1 val, 1 test, seed 0)"


def test_the_hash_of_a_store_tells_its_folds_and_others_are_refused(tmp_path, dataset, split_as):
    data = dataset(*"abc")
    others = [TWO[0], {**TWO[1], "train": ["b"]}]
    drawn = tmp_path / "drawn"
    made = [prepare(data, drawn, workers=1), split_as(TWO, data), split_as(others, data, "others")]
    hashes = {manifest.split_hash for manifest in made}
    assert len(hashes) == 3, "a run of other folds has seen other cases"
    for make in (
        lambda: split_as(TWO, data, "drawn"),
        lambda: split_as(TWO, data, "others"),
        lambda: prepare(data, tmp_path / "store", workers=1),
    ):
        with pytest.raises(InputError, match=KEPT):
            make()


@pytest.mark.parametrize(
    ("content", "problems"),
    [
        ([], ["must be JSON of folds .* length >= 1"]),
        ({**ONE, "val": ["\x1b[2J"]}, [r"control characters, got '.x1b\[2J'"]),
        ([ONE, {"train": [], "val": ["a"]}], [r"must be JSON of folds .*\[1\].train"]),
        ([ONE, {"train": ["b", "b"], "val": ["b"]}], ["case b .* fold 2 .* once, got 3"]),
        ([ONE, {"train": ["b", "x"], "val": ["y"]}], ["case x .* got none", "case y .* got none"]),
        ([ONE, {"train": ["a"], "val": ["c"]}], ["case c .* one fold .*, got 2"]),
        ({**ONE, "test": ["a", "x"]}, ["case x .* got none", "case a .* once, got 2"]),
    ],
)
def test_a_file_of_other_folds_is_refused_a_line_a_problem_and_nothing_is_written(
    tmp_path, dataset, split_as, content, problems
):
    with pytest.raises(InputError) as caught:
        split_as(content, dataset(*"abc"))
    assert len(caught.value.problems) == len(problems)
    for line, pattern in zip(caught.value.problems, problems):
        assert re.search(pattern, line)
        assert "--splits" in line
    assert not (tmp_path / "store").exists()


def test_ids_with_accents_are_one_in_either_unicode_form(tmp_path, dataset):
    composed = ("\u00e91", "\u00e92", "\u00e93")
    data = dataset(*(unicodedata.normalize("NFD", name) for name in composed))  # as of macOS
    with dataset_json(data) as content:
        for case, name in zip(content["training"], composed):
            case.update(image=f"imagesTr/{name}.nii.gz", label=f"labelsTr/{name}.nii.gz")
    table = tmp_path / "table"
    table.write_text("".join(f"{name},p{name}\n" for name in composed))
    manifest = prepare(data, tmp_path / "store", workers=1, patients=table)
    assert sorted(case.case_id for case in manifest.cases) == list(composed)


@pytest.mark.parametrize("content", [[ONE], ONE, {**ONE, "test": ["d"]}])
def test_a_single_division_is_the_stores_own_and_gives_no_folds(
    tmp_path, dataset, split_as, content
):
    data = dataset(*"abcd")
    store = tmp_path / "store"
    manifest = split_as(content, data)
    assert manifest.split == {"train": ("a", "b"), "val": ("c",), "test": ("d",)}
    assert manifest.folds == ()
    with pytest.raises(InputError, match="--split"):
        prepare(data, store, workers=1)
    with pytest.raises(InputError, match="--split"):
        split_as({"train": ["a"], "val": ["c"]}, data)
    split = append(store, dataset(*"abcde", folder="more"), workers=1).manifest.split
    assert sorted(sum(split.values(), ())) == list("abcde")
    assert split_as(content, data).split == split


def test_a_patient_and_an_image_stay_in_one_part_of_a_given_fold(tmp_path, dataset, split_as):
    data = dataset(*"abcd")
    table = tmp_path / "table"
    table.write_text("a,p\nb,q\nc,p\nd,q\n")
    with pytest.raises(InputError) as caught:
        split_as(TWO, data, patients=table)
    words = "\n".join(caught.value.problems)
    assert "patient p must be in one split, got a in train and c in val" in words
    assert "patient q must be in one split, got b in train and d in test" in words
    assert "fold 2: patient p" in words
    assert not (tmp_path / "store").exists()
    (data / "imagesTr/c.nii.gz").write_bytes((data / "imagesTr/b.nii.gz").read_bytes())
    with pytest.raises(InputError, match=r"fold 1: image of cases .* identical voxels"):
        split_as(TWO, data)


def test_bad_cases_leave_given_folds_and_unlabelled_ones_are_refused(dataset, split_as):
    data = dataset(*"abc")
    (data / "imagesTr/a.nii.gz").unlink()
    with pytest.raises(InputError, match="val of fold 2 must have cases, got bad ones"):
        split_as(TWO, data, skip_bad=True)
    manifest = split_as([ONE, {"train": ["a", "c"], "val": ["b"]}], data, skip_bad=True)
    assert manifest.folds == ({"train": ("b",), "val": ("c",)}, {"train": ("c",), "val": ("b",)})
