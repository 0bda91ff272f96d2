"""Which patient a case is of, and that no patient and no image is in two splits."""

import dataclasses
import json

import pytest

from cpu3d.__main__ import main
from cpu3d.data.folds import deal, with_fold
from cpu3d.data.patients import TABLE, UNKNOWN, patient_of, read_patients
from cpu3d.data.prepare import prepare
from cpu3d.data.records import remake
from cpu3d.data.store import open_store, sealed, write_store
from cpu3d.data.upkeep.append import append
from cpu3d.errors import InputError

THIRDS = {"fractions": (1, 1, 1), "workers": 1}


@pytest.fixture
def dataset(tmp_path, decathlon):
    """dataset(*case ids, folder="data"): a data set in the Decathlon layout with cases of these names."""

    def make(*case_ids, folder="data"):
        path = decathlon(tmp_path / folder, len(case_ids))
        content = json.loads((path / "dataset.json").read_text())
        for number, case_id in enumerate(case_ids):
            for kind in ("images", "labels"):
                (path / f"{kind}Tr/BRATS_{number:03d}.nii.gz").rename(path / f"{kind}Tr/{case_id}.nii.gz")
                content["training"][number][kind[:-1]] = f"./{kind}Tr/{case_id}.nii.gz"
        (path / "dataset.json").write_text(json.dumps(content))
        return path

    return make


@pytest.mark.parametrize(
    ("case_id", "patient"),
    [
        ("BraTS-GLI-00005-100", "BraTS-GLI-00005"),
        ("BraTS-PED-00001-002", "BraTS-PED-00001"),
        ("BraTS-MET-00110-000-t1c", "BraTS-MET-00110"),
        ("BraTS-MEN-RT-0001-1", "BraTS-MEN-RT-0001"),
        ("BraTS2021_00495", "BraTS2021_00495"),
        ("BraTS20_Training_001", "BraTS20_Training_001"),
        ("Brats18_TCIA01_131_1", "Brats18_TCIA01_131"),
        ("Brats17_2013_10_1", "Brats17_2013_10"),
        ("TCGA-DU-7294", "TCGA-DU-7294"),
        ("TCGA-02-0006_2000.01.01", "TCGA-02-0006"),
        ("BRATS_001", None),
        ("spleen-0001-002", None),
        ("BraTS-GLI-00005-1000", None),
    ],
)
def test_the_patient_is_told_by_names_of_brats_in_any_layout(case_id, patient):
    found, rule = patient_of(case_id, "decathlon")
    assert (found, rule == UNKNOWN) == (patient or case_id, patient is None)


def test_other_names_tell_the_patient_in_the_layout_that_has_time_points():
    assert patient_of("CLINIC-7-001", "brats2023")[0] == "CLINIC-7"
    assert patient_of("CLINIC-7-001", "brats2017") == ("CLINIC-7-001", UNKNOWN)


@pytest.mark.parametrize(
    "text", ["case,patient\na,p\nb,p\n\n", "b;p\na;p", "a\tp\nb\tp\nz\tq", "\ufeffa, p\nb ,p\na,p"]
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
        (b"a,p,q\nb,p", ":1"),
        (b"a,\nb,p", ":1"),
        (b"\xff", ""),
    ],
)
def test_a_table_that_does_not_give_each_case_one_patient_is_refused(tmp_path, content, named):
    (tmp_path / "table").write_bytes(content)
    with pytest.raises(InputError, match=r"--patients .*table") as error:
        read_patients(tmp_path / "table", ["a", "b"])
    assert named in str(error.value)
    with pytest.raises(InputError, match="--patients"):
        read_patients(tmp_path, ["a", "b"])


@pytest.mark.parametrize("seed", range(3))
def test_time_points_of_a_patient_stay_together_in_the_decathlon_layout_and_the_rule_is_told(
    tmp_path, dataset, capsys, seed
):
    names = [f"BraTS-PED-0000{patient}-00{time}" for patient in range(3) for time in range(2)]
    manifest = prepare(dataset(*names), tmp_path / "store", **THIRDS, seed=seed)
    assert [len({case_id[:-4] for case_id in ids}) for ids in manifest.split.values()] == [1, 1, 1]
    (rule,) = manifest.patient_rules
    assert manifest.patient_rules == {rule: 6}
    assert f"6 cases: {rule}" in capsys.readouterr().out
    assert open_store(tmp_path / "store").manifest.patient_rules == manifest.patient_rules
    main(["store", "info", str(tmp_path / "store"), "--json"])
    assert json.loads(capsys.readouterr().out)["patient_rules"] == {rule: 6}


def test_where_names_do_not_tell_a_table_does_and_what_is_finished_is_done_again_for_other_patients_only(
    tmp_path, dataset, capsys
):
    data, store, table = dataset("BRATS_101", "BRATS_102", "BRATS_103", "BRATS_104"), tmp_path / "store", tmp_path / "t"
    assert prepare(data, store, **THIRDS).patient_rules == {UNKNOWN: 4}
    assert f"4 cases: {UNKNOWN}" in capsys.readouterr().out
    (store / "manifest.json").unlink()
    before = (store / "cases/BRATS_103.json").stat().st_mtime_ns
    table.write_text("BRATS_101,p\nBRATS_102,p\nBRATS_103,BRATS_103\nBRATS_104,BRATS_104\n")
    where = ["--dataset", str(data), "--store", str(store), "--split", "1", "1", "1", "--workers", "1"]
    assert main(["prepare", *where, "--patients", str(table)]) == 0
    manifest = open_store(store).manifest
    assert manifest.patient_rules == {TABLE: 4}
    assert {"BRATS_101", "BRATS_102"} in map(set, manifest.split.values())
    assert (store / "cases/BRATS_103.json").stat().st_mtime_ns == before


def test_identical_images_in_two_splits_are_refused_until_they_have_one_patient(tmp_path, dataset):
    data, store, table = dataset("a", "b", "c", "d"), tmp_path / "store", tmp_path / "table"
    copy = data / "imagesTr/b.nii.gz"
    copy.write_bytes((data / "imagesTr/a.nii.gz").read_bytes())
    with pytest.raises(InputError, match=r"(a|b) \(\w+\) and (a|b) \(\w+\) must be in one split, got identical voxels"):
        prepare(data, store, fractions=(1, 1, 2), workers=1, seed=1)
    table.write_text("a,p\nb,p\nc,c\nd,d\n")
    manifest = prepare(data, store, **THIRDS, patients=table)
    assert {"a", "b"} in map(set, manifest.split.values())


def fold_of(case_id, records):
    """The fold of four cases that holds this one out."""
    patients = {record.case_id: record.patient_id for record in records}
    return next(fold for fold in ("1/4", "2/4", "3/4", "4/4") if deal(patients, fold, seed=3)["val"] == (case_id,))


def test_identical_images_of_one_split_are_refused_where_a_fold_parts_them(tmp_path, make_record, manifest_of):
    records = [make_record(name, image_voxels_sha256="same" if name in "ab" else name) for name in "abcd"]
    write_store(tmp_path, manifest_of(records))
    assert with_fold(open_store(tmp_path), fold_of("c", records)).manifest.split["val"] == ("c",)
    for case_id in "ab":
        with pytest.raises(InputError, match=r"of cases [ab] .* and [ab] .* got identical voxels"):
            with_fold(open_store(tmp_path), fold_of(case_id, records))


def test_a_store_from_before_opens_and_prepare_tells_the_patients_that_it_has_in_two_splits(tmp_path, dataset, capsys):
    data, store = dataset("BraTS-PED-00001-000", "BraTS-PED-00001-001", "BraTS-PED-00002-000"), tmp_path / "store"
    new = prepare(data, store, fractions=(1, 0, 0), workers=1)
    cases = [dataclasses.replace(case, patient_id=case.case_id) for case in new.cases]
    ids = [case.case_id for case in cases]
    write_store(store, remake(new, cases=cases, split={"train": ids[:1], "val": ids[1:2], "test": ids[2:]}))
    content = json.loads((store / "manifest.json").read_text())
    del content["patient_rules"]
    (store / "manifest.json").write_text(json.dumps(sealed(content)))
    open_store(store).check_split()
    assert main(["store", "info", str(store)]) == 0
    assert "3 cases: not recorded" in capsys.readouterr().out
    with pytest.raises(InputError, match="patient BraTS-PED-00001 is in train and val"):
        prepare(data, store, fractions=(1, 0, 0), workers=1)
    more = dataset("BraTS-PED-00002-001", folder="more")
    (more / "imagesTr/BraTS-PED-00002-001.nii.gz").write_bytes((data / f"imagesTr/{ids[2]}.nii.gz").read_bytes())
    assert append(store, more, workers=1).manifest.split["test"] == ("BraTS-PED-00002-000", "BraTS-PED-00002-001")


def test_appended_cases_join_their_patients_by_the_table_that_the_store_has_them_from(tmp_path, dataset):
    data, store, table = dataset("a", "b", "c"), tmp_path / "store", tmp_path / "table"
    table.write_text("a,p\nb,q\nc,r\nd,q\n")
    old = prepare(data, store, **THIRDS, patients=table)
    more = dataset("a", "b", "c", "d", folder="more")
    with pytest.raises(InputError, match="--patients must name a table"):
        append(store, more, workers=1)
    manifest = append(store, more, workers=1, patients=table).manifest
    assert manifest.patient_rules == {TABLE: 4}
    (name,) = [name for name, ids in old.split.items() if "b" in ids]
    assert manifest.split[name] == ("b", "d")


def test_a_table_that_parts_what_the_store_has_as_one_patient_each_is_refused(tmp_path, dataset):
    data, store, table = dataset("a", "b", "c"), tmp_path / "store", tmp_path / "table"
    prepare(data, store, **THIRDS)
    table.write_text("a,p\nb,p\nc,q\nd,q\n")
    with pytest.raises(InputError, match=r"case a must be of the patient that store .* has, a, got p"):
        append(store, dataset("d", folder="more"), workers=1, patients=table)
    prepare(data, tmp_path / "together", fractions=(1, 0, 0), workers=1)
    with pytest.raises(InputError, match="patient p counts as 2 patients, a, b"):
        prepare(data, tmp_path / "together", fractions=(1, 0, 0), workers=1, patients=table)
