from pathlib import Path

import numpy as np
import pytest

from cpu3d.data.datasets.dataset import CaseFiles
from cpu3d.data.datasets.find import find_cases
from cpu3d.data.datasets.layouts import channels_of, label_codes_of, read_dataset, regions_of
from cpu3d.data.datasets.names import FileName, read_name, stem_of
from cpu3d.data.datasets.patients import patient_of, read_patients
from cpu3d.errors import InputError
from tests.cpu3d.data.made_datasets import (
    SUFFIXES,
    brats_case,
    dataset_json,
    decathlon,
    tiny_image,
    write_nifti,
)


def ids_of(dataset):
    return [case.case_id for case in dataset.cases]


OF_2017 = {"HGG/Brats17_A_1_1": "Brats17_A_1", "LGG/Brats17_A_1_2": "Brats17_A_1", "LGG/x": "x"}
OF_2023 = {
    "BraTS-GLI-00001-000": "BraTS-GLI-00001",
    "BraTS-GLI-00001-001": "BraTS-GLI-00001",
    "x": "x",
}


@pytest.mark.parametrize(
    ("layout", "cases", "regions"),
    [
        ("brats2017", OF_2017, {"WT": (1, 2, 4), "TC": (1, 4), "ET": (4,)}),
        ("brats2023", OF_2023, {"WT": (1, 2, 3), "TC": (1, 3), "ET": (3,), "RC": (4,)}),
    ],
)
def test_brats_folders_are_recognised_and_time_points_share_their_patient(
    tmp_path, layout, cases, regions
):
    for name, end in zip(cases, (".nii", ".NII.GZ", ".nii.gz")):
        brats_case(tmp_path / name, layout, end)
    dataset = read_dataset(tmp_path)
    assert (dataset.layout, regions_of(dataset.labels)) == (layout, regions)
    assert dataset.channels == ("FLAIR", "T1w", "T1gd", "T2w")
    patients = {case.case_id: case.patient_id for case in dataset.cases}
    assert patients == {name.split("/")[-1]: patient for name, patient in cases.items()}
    last = dataset.cases[2]
    assert [path.name for path in last.paths] == [f"x{end}.nii.gz" for end in SUFFIXES[layout]]
    assert read_dataset(last.label.parent).cases[0] == last


def test_paediatric_cases_are_never_read_with_the_codes_of_gliomas(tmp_path):
    for case_id in ("BraTS-GLI-00001-000", "BraTS-PED-00001-000", "BraTS-PED-00002-000"):
        brats_case(tmp_path / case_id)
    named = "got BraTS-PED: BraTS-PED-00001-000, BraTS-PED-00002-000; .* names their codes"
    with pytest.raises(InputError, match=named):
        read_dataset(tmp_path)


def test_every_missing_or_double_file_of_every_case_is_named_and_good_cases_stay(tmp_path):
    brats_case(tmp_path / "b/good")
    (tmp_path / "b/good/._good-seg.nii.gz").touch()  # as macOS leaves it
    (tmp_path / "b/good/good-seg.nii").mkdir()
    (tmp_path / "b/good/x_t1.nii").touch()  # one of another layout
    brats_case(tmp_path / "b/.trash/old")
    first = brats_case(tmp_path / "b/bad1")
    first["t1c"].unlink()
    first["seg"].unlink()
    brats_case(tmp_path / "b/bad2")
    brats_case(tmp_path / "b/bad2", end=".nii")
    dataset = read_dataset(tmp_path / "b")
    assert ids_of(dataset) == ["good"]
    assert [reason.split()[0] for reason in dataset.problems["bad1"]] == ["T1gd", "seg"]
    assert len(dataset.problems["bad2"]) == 5
    folder = decathlon(tmp_path / "d")
    (folder / "imagesTr/BRATS_001.nii.gz").unlink()
    with dataset_json(folder) as content:
        del content["training"][2]["label"]
    dataset = read_dataset(folder)
    assert ids_of(dataset) == ["BRATS_000"]
    assert [dataset.problems[f"BRATS_00{n}"][0].split()[0] for n in (1, 2)] == ["image", "label"]


def test_what_is_no_data_set_is_refused(tmp_path):
    for layout in ("brats2017", "brats2023"):
        brats_case(tmp_path / "two" / layout, layout)
        brats_case(tmp_path / "same" / layout / "x")
    (tmp_path / "empty").mkdir()
    for name, rule in {
        "none": "must be a folder, found none",
        "empty": "found neither",
        "two": "found brats2017 and brats2023",
        "same": "case id x in .* must be used once",
    }.items():
        with pytest.raises(InputError, match=rule):
            read_dataset(tmp_path / name)


CHANNELS = "flair t2f t2-Flair T\uff11 t1n t1w ce-gd_T1w t1ce t1c t1gd Gad-T1 contrast_t1 t2 t2w"
IN_STORES = "FLAIR FLAIR FLAIR T1w T1w T1w T1gd T1gd T1gd T1gd T1gd T1gd T2w T2w"


def test_a_channel_is_known_by_each_of_its_names():
    known = [read_name(Path(f"p_{name}.nii")).channel for name in CHANNELS.split()]
    assert " ".join(known) == IN_STORES
    assert {read_name(Path(f"p{mark}t1.nii")) for mark in " _.-"} == {FileName("p", "T1w")}
    assert read_name(Path("p_0001.nii"), ["0001"]) == FileName("p", number=1)


def test_parts_of_a_glioma_are_known_by_their_names_if_each_is_there_once():
    core = dict(enumerate(("", "Oedema", "Non enhancing", "Enhancing", "Cavity")))
    assert regions_of(core) == {"WT": (1, 2, 3), "TC": (2, 3), "ET": (3,), "RC": (4,)}
    assert "WT" not in regions_of({**core, 5: "old cavity"})


@pytest.mark.parametrize(
    ("names", "layout"),
    [
        ("x_T1CE x_t2", "brats2017"),
        ("BraTS-GLI-1-T2F", "brats2023"),
        ("brats-ped-1-t2f", None),
        ("x-t2f x", None),
    ],
)
def test_the_codes_of_images_without_a_list_are_those_of_their_names(names, layout):
    paths = tuple(Path(f"{name}.nii") for name in names.split())
    found = label_codes_of(CaseFiles(names[:11], "", paths, None))
    assert (found and found.of) == layout


CASES = """Brats15_A_1_1 sub-1-ses-2 TCGA-02-0006A 10000_10000000 002_S_029512 p7_20190432
RHUH-0001_100 fdg_0123abcz_x"""
PATIENTS = CASES.replace("A_1_1", "A_1").replace("-ses-2", "")


def test_patients_by_name_and_by_a_table(tmp_path):
    assert [patient_of(case_id)[0] for case_id in CASES.split()] == PATIENTS.split()
    table = tmp_path / "table"
    table.write_text("e\u0301;x\tp")
    assert read_patients(table, ["\xe9;x"]) == {"\xe9;x": "p"}


def test_masks_beside_images_are_no_cases(tmp_path):
    names = ["a", "a-MASK", "a_labels", "a_seg", "b_segmentation"]
    for name in names:
        write_nifti(tmp_path / f"{name}.nii.gz", tiny_image())
    found = find_cases([tmp_path], ("CT",), alone="CT")
    assert ids_of(found) == ["a"]
    assert list(map(stem_of, found.unread)) == names[1:]


def volumes(folder, names, channels):
    """Files of these names, in 4D those with a star, and cut those with a question mark."""
    for name in names.split():
        path = folder / f"{name.strip('*?')}.nii"
        path.unlink(missing_ok=True)
        write_nifti(path, np.stack([tiny_image()] * (channels if "*" in name else 1), -1))
        if "?" in name:
            path.write_bytes(b"")
        yield path


@pytest.mark.parametrize(
    ("names", "ids"),
    [
        ("a* b", "a b"),
        ("a* p_flair", "a p"),
        ("p_flair b", ""),
        ("x/flair y/flair", "x y"),
        ("p_t1 p_t1w", ""),
        ("q_0001 q_0002", "q_0001 q_0002"),
        ("q_0000 q_0001", "q"),
        ("d?", "d"),
        ("d_0001?", "d"),
        ("d_seg", ""),
    ],
)
def test_files_named_one_by_one_are_cases_by_their_names_or_are_refused(tmp_path, names, ids):
    paths = list(volumes(tmp_path, names, 2))
    found = find_cases(paths, ("FLAIR", "T1w"), alone="T1w")
    assert (sorted(ids_of(found)), len(found.problems)) == (ids.split(), not ids)


def test_a_list_above_or_beside_images_names_their_channels(tmp_path):
    for folder, taken in (("Images1", "d"), ("x", "d/x"), ("labelsTs", "d")):
        (image,) = volumes(tmp_path / "d" / folder, "a*", 2)
        decathlon(tmp_path / taken, 0, modality={"0": "b", "1": "c"})
        found = find_cases([image.parent], ())
        assert [case.names for case in found.cases] == [("b", "c")][: folder != "labelsTs"]
        assert len(found.problems) == (folder == "labelsTs")
    assert channels_of(tmp_path / "d/x/a.nii", 2) == ["b", "c"]
    assert channels_of(tmp_path / "d/x/a.nii", 1) == ["channel 1"]
    (tmp_path / "d/x/dataset.json").write_text("{")
    assert "must be JSON" in find_cases([tmp_path / "d/x"], ()).problems[0]
    (one,) = volumes(tmp_path, "p_0000", 1)
    assert find_cases([one], ("CT",)).numbered == []


def test_a_list_that_points_outside_its_folder_is_refused(tmp_path):
    folder = decathlon(tmp_path / "d")
    with dataset_json(folder) as content:
        content["training"][0]["image"] = "/etc/passwd.nii.gz"
        content["training"][1]["label"] = "link/../../out.nii.gz"
    with pytest.raises(InputError, match="inside its folder") as error:
        read_dataset(folder)
    assert len(error.value.problems) == 2
