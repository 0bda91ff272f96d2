from pathlib import Path

import pytest

from cpu3d.data.datasets.find import find_cases
from cpu3d.data.datasets.layouts import read_dataset, regions_of
from cpu3d.data.datasets.names import read_name, stem_of
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


CHANNELS = "flair t2f t2flair t1 t1n t1w ce-gd_T1w t1ce t1c t1gd t2 t2w"
IN_STORES = "FLAIR FLAIR FLAIR T1w T1w T1w T1gd T1gd T1gd T1gd T2w T2w"


def test_a_channel_is_known_by_each_of_its_names():
    known = [read_name(Path(f"p_{name}.nii")).channel for name in CHANNELS.split()]
    assert " ".join(known) == IN_STORES


def test_masks_beside_images_are_no_cases(tmp_path):
    names = ["a", "a-mask", "a_labels", "a_seg", "b_segmentation"]
    for name in names:
        write_nifti(tmp_path / f"{name}.nii.gz", tiny_image())
    found = find_cases([tmp_path], ("CT",), alone="CT")
    assert ids_of(found) == ["a"]
    assert list(map(stem_of, found.unread)) == names[1:]


def test_a_list_that_points_outside_its_folder_is_refused(tmp_path):
    folder = decathlon(tmp_path / "d")
    with dataset_json(folder) as content:
        content["training"][0]["image"] = "/etc/passwd.nii.gz"
        content["training"][1]["label"] = "link/../../out.nii.gz"
    with pytest.raises(InputError, match="inside its folder") as error:
        read_dataset(folder)
    assert len(error.value.problems) == 2
