"""Which patient a case is of, and that no patient and no image is in two splits."""

import json

import pytest

from cpu3d.data.splits import TABLE, read_patients
from cpu3d.data.store import open_store
from cpu3d.data.stores.layouts import UNKNOWN, patient_of
from cpu3d.data.stores.prepare import prepare
from cpu3d.data.stores.upkeep import append
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
        ("BraTS2021_00495", "BraTS2021_00495"),
        ("Brats18_TCIA01_131_1", "Brats18_TCIA01_131"),
        ("TCGA-02-0006_2000.01.01", "TCGA-02-0006"),
        ("BRATS_001", None),
        ("spleen-0001-002", None),
        ("BraTS-GLI-00005-1000", None),
    ],
)
def test_the_patient_is_told_by_names_of_brats_in_any_layout(case_id, patient):
    found, rule = patient_of(case_id, "decathlon")
    assert (found, rule == UNKNOWN) == (patient or case_id, patient is None)


@pytest.mark.parametrize(
    "text", ["case,patient\na,p\nb,p\n\n", "b;p\na;p", "a\tp\nb\tp\nz\tq", "\ufeffa, p\nb ,p\na,p"]
)
def test_a_table_of_patients_may_be_written_as_spreadsheets_do(tmp_path, text):
    (tmp_path / "table").write_text(text)
    assert {"a": "p", "b": "p"}.items() <= read_patients(tmp_path / "table", ["a", "b"]).items()


@pytest.mark.parametrize(
    ("content", "named"),
    [(b"a,p", "case b"), (b"a,p\na,q\nb,p", ":2"), (b"a\nb,p", ":1"), (b"a,\nb,p", ":1"), (b"\xff", "UTF-8")],
)
def test_a_table_that_does_not_give_each_case_one_patient_is_refused(tmp_path, content, named):
    (tmp_path / "table").write_bytes(content)
    with pytest.raises(InputError, match=rf"--patients .*table.*{named}"):
        read_patients(tmp_path / "table", ["a", "b"])
    with pytest.raises(InputError, match="--patients"):
        read_patients(tmp_path, ["a", "b"])


def test_time_points_of_a_patient_stay_together_in_the_decathlon_layout(tmp_path, dataset):
    names = [f"BraTS-PED-0000{patient}-00{time}" for patient in range(3) for time in range(2)]
    manifest = prepare(dataset(*names), tmp_path / "store", **THIRDS)
    assert [len({case_id[:-4] for case_id in ids}) for ids in manifest.split.values()] == [1, 1, 1]
    assert list(open_store(tmp_path / "store").manifest.patient_rules.values()) == [6]


def test_identical_images_in_two_splits_are_refused_until_they_have_one_patient(tmp_path, dataset):
    data, store, table = dataset("a", "b", "c", "d"), tmp_path / "store", tmp_path / "table"
    copy = data / "imagesTr/b.nii.gz"
    copy.write_bytes((data / "imagesTr/a.nii.gz").read_bytes())
    with pytest.raises(InputError, match=r"(a|b) \(\w+\) and (a|b) \(\w+\) must be in one split, got identical voxels"):
        prepare(data, store, fractions=(1, 1, 2), workers=1, seed=1)
    table.write_text("a,p\nb,p\nc,c\nd,d\n")
    manifest = prepare(data, store, **THIRDS, patients=table)
    assert {"a", "b"} in map(set, manifest.split.values())


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
    table.write_text("a,p\nb,z\nc,r\nd,q\ne,z\n")
    with pytest.raises(InputError, match=r"case b must be of the patient that store .* has, q, got z"):
        append(store, dataset("e", folder="other"), workers=1, patients=table)
