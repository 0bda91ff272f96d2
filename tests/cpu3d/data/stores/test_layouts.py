import json

import numpy as np
import pytest

from cpu3d.data.stores.layouts import case_files, read_dataset
from cpu3d.errors import InputError

CANONICAL = ("FLAIR", "T1w", "T1gd", "T2w")


def names(paths):
    return [path.name for path in paths]


def test_decathlon_takes_channels_labels_and_cases_from_its_list(tmp_path, decathlon):
    dataset = read_dataset(decathlon(tmp_path / "Task01"))
    assert (dataset.layout, dataset.name) == ("decathlon", "BRATS")
    assert dataset.channels == ("FLAIR", "T1w", "t1gd", "T2w")
    assert dataset.labels[3] == "enhancing tumour"
    assert dataset.regions == {"WT": (1, 2, 3), "TC": (2, 3), "ET": (3,)}
    assert [case.case_id for case in dataset.cases] == ["BRATS_000", "BRATS_001", "BRATS_002"]
    assert dataset.cases[1].images == (tmp_path / "Task01/imagesTr/BRATS_001.nii.gz",)
    assert dataset.problems == ()


@pytest.mark.parametrize("end", [".nii", ".nii.gz"])
def test_brats_2017_folders_are_recognised_below_hgg_and_lgg(tmp_path, brats_case, end):
    brats_case(tmp_path / "HGG" / "Brats17_A_1", "brats2017", end)
    brats_case(tmp_path / "LGG" / "Brats17_B_1", "brats2017", end)
    dataset = read_dataset(tmp_path)
    assert dataset.layout == "brats2017"
    assert dataset.channels == CANONICAL
    assert dataset.regions == {"WT": (1, 2, 4), "TC": (1, 4), "ET": (4,)}
    assert [case.case_id for case in dataset.cases] == ["Brats17_A_1", "Brats17_B_1"]
    assert [name.split("_")[-1].split(".")[0] for name in names(dataset.cases[0].images)] == [
        "flair",
        "t1",
        "t1ce",
        "t2",
    ]


def test_brats_2023_folders_are_recognised_and_time_points_share_their_patient(tmp_path, brats_case):
    for case_id in ("BraTS-GLI-00001-000", "BraTS-GLI-00001-001", "BraTS-GLI-00002-000"):
        brats_case(tmp_path / case_id)
    dataset = read_dataset(tmp_path)
    assert dataset.layout == "brats2023"
    assert dataset.regions == {"WT": (1, 2, 3), "TC": (1, 3), "ET": (3,), "RC": (4,)}
    assert [case.patient_id for case in dataset.cases] == ["BraTS-GLI-00001", "BraTS-GLI-00001", "BraTS-GLI-00002"]
    assert [name[-10:-7] for name in names(dataset.cases[0].images)] == ["t2f", "t1n", "t1c", "t2w"]
    assert dataset.cases[0].label.name == "BraTS-GLI-00001-000-seg.nii.gz"


def test_paediatric_cases_are_all_told_and_never_read_with_the_codes_of_gliomas(tmp_path, brats_case):
    for case_id in ("BraTS-GLI-00001-000", "BraTS-PED-00001-000", "BraTS-PED-00002-000"):
        brats_case(tmp_path / case_id)
    with pytest.raises(InputError, match=r"Decathlon layout with a dataset\.json that names their codes") as error:
        read_dataset(tmp_path)
    assert [problem.split()[1] for problem in error.value.problems[:-1]] == [
        "BraTS-PED-00001-000",
        "BraTS-PED-00002-000",
    ]
    assert case_files([tmp_path / "BraTS-PED-00001-000"], CANONICAL).images  # an image has no codes


def test_every_missing_or_double_file_of_every_case_is_told_and_good_cases_stay(tmp_path, brats_case):
    brats_case(tmp_path / "good")
    first = brats_case(tmp_path / "bad1")
    first["t1c"].unlink()
    first["seg"].unlink()
    brats_case(tmp_path / "bad2")
    brats_case(tmp_path / "bad2", end=".nii")
    (tmp_path / "bad3").mkdir()
    dataset = read_dataset(tmp_path)
    assert [case.case_id for case in dataset.cases] == ["good"]
    told = {(problem.case_id, problem.reason.split()[0]) for problem in dataset.problems}
    assert told == {(case, what) for case in ("bad1", "bad2", "bad3") for what in ("modality", "label")}
    assert len(dataset.problems) == 2 + 5 + 5
    assert any("bad1-t1c" in p.reason or "-t1c.nii.gz" in p.reason for p in dataset.problems)


@pytest.mark.parametrize(
    "path", ["/etc/passwd.nii.gz", "../out.nii.gz", "./imagesTr/../../out.nii.gz", "link/../../out.nii.gz"]
)
def test_a_list_that_points_outside_its_folder_is_refused(tmp_path, decathlon, path):
    folder = decathlon(tmp_path / "d")
    (tmp_path / "out.nii.gz").write_bytes(b"")
    (folder / "link").symlink_to(folder)
    content = json.loads((folder / "dataset.json").read_text())
    content["training"][0]["image"] = path
    content["training"][1]["label"] = path
    (folder / "dataset.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match="inside its folder") as error:
        read_dataset(folder)
    assert len(error.value.problems) == 2


@pytest.mark.parametrize("layout", ["decathlon", "brats2017", "brats2023"])
@pytest.mark.parametrize("linked", ["file", "folder"])
def test_volumes_that_are_kept_elsewhere_may_be_linked_into_every_layout(
    tmp_path, decathlon, brats_case, layout, linked
):
    folder, disk = tmp_path / "d", tmp_path / "disk"
    if layout == "decathlon":
        decathlon(folder)
    else:
        brats_case(folder / "a", layout)
    names = [path.relative_to(folder) for path in sorted(folder.rglob("*.nii.gz"))]
    there = [case.images for case in read_dataset(folder).cases]
    for name in {name.parent for name in names} if linked == "folder" else names:
        (disk / name.parent).mkdir(parents=True, exist_ok=True)
        (folder / name).rename(disk / name)
        (folder / name).symlink_to(disk / name)
    dataset = read_dataset(folder)
    assert dataset.problems == ()
    assert [case.images for case in dataset.cases] == there


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"labels": {"0": "b", "1": "t"}, "modality": {"0": "CT"}}',
        '{"labels": {"0": "b", "1": "t"}, "modality": {"0": "CT"}, "training": []}',
        '{"labels": {"0": "b", "1": "t"}, "modality": {"0": "CT"}, "training": [{"image": 3}]}',
        '{"labels": {"0": "b", "1": "t"}, "modality": {"1": "CT"}, "training": [{"image": "a"}]}',
        '{"labels": {"a": 1, "b": 1}, "modality": {"0": "CT"}, "training": [{"image": "a"}]}',
        '{"labels": {"0": "b"}, "modality": {"0": "CT"}, "training": [{"image": "a"}]}',
        '{"labels": {"0": "b", "300": "t"}, "modality": {"0": "CT"}, "training": [{"image": "a"}]}',
        '{"labels": {"all": [1, 2]}, "modality": {"0": "CT"}, "training": [{"image": "a"}]}',
    ],
)
def test_a_damaged_list_is_refused_by_name(tmp_path, content):
    (tmp_path / "dataset.json").write_text(content)
    with pytest.raises(InputError, match=r"dataset\.json"):
        read_dataset(tmp_path)


def test_a_case_to_predict_may_be_a_folder_of_either_release_in_any_channel_spelling(tmp_path, brats_case):
    brats_case(tmp_path / "x", "brats2017")
    files = case_files([tmp_path / "x"], ("T2w", "t1gd", "FLAIR", "T1w"))
    assert names(files.images) == ["x_t2.nii.gz", "x_t1ce.nii.gz", "x_flair.nii.gz", "x_t1.nii.gz"]
    assert (files.case_id, files.label) == ("x", None)
    brats_case(tmp_path / "y")
    assert names(case_files([tmp_path / "y"], ("FLAIR",)).images) == ["y-t2f.nii.gz"]


def test_files_to_predict_are_put_in_order_by_their_names_or_taken_in_theirs(tmp_path, brats_case, write_nifti):
    files = brats_case(tmp_path / "x")
    shuffled = [files[suffix] for suffix in ("seg", "t2w", "t1c", "t1n", "t2f")]
    found = case_files(shuffled, CANONICAL)
    assert names(found.images) == [f"x-{suffix}.nii.gz" for suffix in ("t2f", "t1n", "t1c", "t2w")]
    assert found.case_id == "x"
    plain = [write_nifti(tmp_path / f"{name}.nii.gz", np.zeros((2, 2, 2), np.int16)) for name in "cab"]
    assert names(case_files(plain, ("one", "two", "three")).images) == ["c.nii.gz", "a.nii.gz", "b.nii.gz"]
    assert case_files(plain[:1], CANONICAL).case_id == "c"


def test_files_to_predict_that_do_not_match_the_channels_are_refused(tmp_path, brats_case, write_nifti):
    files = brats_case(tmp_path / "x")
    files["t1c"].unlink()
    files["t2w"].unlink()
    with pytest.raises(InputError) as error:
        case_files([tmp_path / "x"], CANONICAL)
    assert [problem.split()[1] for problem in error.value.problems] == ["T1gd", "T2w"]
    with pytest.raises(InputError, match="found none") as error:
        case_files([tmp_path / "no1.nii", tmp_path / "no2.nii"], CANONICAL)
    assert len(error.value.problems) == 2
    plain = [write_nifti(tmp_path / f"{name}.nii.gz", np.zeros((2, 2, 2), np.int16)) for name in "ab"]
    with pytest.raises(InputError, match="got 2 files"):
        case_files(plain, CANONICAL)
    with pytest.raises(InputError, match="got a folder"):
        case_files([tmp_path / "x", plain[0]], CANONICAL)
