"""Which cases lie in the paths that a user gives, and which of their files and volumes is which
channel."""

import json

import numpy as np
import pytest

from cpu3d.data.cases.case import load_case
from cpu3d.data.labels import PaintedRegions
from cpu3d.errors import InputError
from cpu3d.inference.cases import cases_to_predict
from tests.cpu3d.conftest import LABELS, REGIONS, FakePredictor
from tests.cpu3d.data.made_datasets import tiny_image, write_nifti

STORE = ("FLAIR", "T1w", "t1gd", "T2w")
VALUES = dict(zip(STORE, (100, 200, 300, 400)))
"""Channel -> the value of its voxels, by which it is known again."""
NAMES = {"FLAIR": "FLAIR", "flair": "FLAIR", "t1w": "T1w", "t2": "T2w", "ADC": None}
NAMES.update({"T1-CE": "t1gd", "T1gd": "t1gd"})


def volume(channel):
    """A 3D image of a channel; of None, any other."""
    image = tiny_image(VALUES.get(channel, 7))
    return np.where(image > 0, VALUES.get(channel, 50) + image % 9, 0).astype(np.int16)


def of_run(*inputs, store=STORE):
    return FakePredictor(None, REGIONS, LABELS, channels=store, inputs=inputs or store)


def listed(folder, names, key="modality", **more):
    """A dataset.json that names channels; returns the folder of its images."""
    labels = {"0": "background", "1": "edema", "2": "non-enhancing tumor", "3": "enhancing tumour"}
    if key == "channel_names":
        labels = {name: int(code) for code, name in labels.items()}
    content = {key: {str(n): name for n, name in enumerate(names)}, "labels": labels, **more}
    (folder / "imagesTs").mkdir(parents=True, exist_ok=True)
    (folder / "dataset.json").write_text(json.dumps(content))
    return folder / "imagesTs"


def found_in(paths, predictor):
    """Case -> the channels that it was loaded with, which must hold the voxels that they stand
    for."""
    result = cases_to_predict(paths, predictor)
    assert result.problems == []
    cases = {}
    for case in result.cases:
        image = load_case(case.files, channels=case.channels).image
        for place, channel in enumerate(case.channels):
            np.testing.assert_array_equal(image[..., place], volume(channel), channel)
        cases[case.files.case_id] = case.channels
    return cases


def problem_of(paths, predictor):
    result = cases_to_predict(paths, predictor)
    assert result.cases == []
    return "\n".join(result.problems)


@pytest.mark.parametrize(
    ("key", "names", "inputs", "taken"),
    [
        ("modality", ("ADC", "t2", "flair", "t1w", "T1gd"), (), STORE),
        ("modality", ("t2", "flair"), ("FLAIR",), ("FLAIR",)),
        ("channel_names", ("t1w", "T1-CE", "t2", "FLAIR"), ("FLAIR",), STORE),
    ],
)
def test_channels_of_a_4d_file_are_those_of_its_dataset_json(tmp_path, key, names, inputs, taken):
    folder = listed(tmp_path, names, key)
    write_nifti(folder / "a.nii.gz", np.stack([volume(NAMES[name]) for name in names], -1))
    assert found_in([folder / "a.nii.gz"], of_run(*inputs)) == {"a": taken}
    (case,) = cases_to_predict([folder], of_run(*inputs)).cases
    assert (case.codes_of, case.labels[3]) == (str(tmp_path / "dataset.json"), "enhancing tumour")


def test_cases_of_one_name_in_each_patients_folder_are_called_after_the_folders(tmp_path):
    for name in ("p1", "p2"):
        stacked = np.stack([volume(channel) for channel in STORE], -1)
        write_nifti(tmp_path / f"new/{name}/image.nii.gz", stacked)
    assert sorted(found_in([tmp_path / "new"], of_run())) == ["p1", "p2"]


def test_channels_of_other_names_are_refused_with_both_lists(tmp_path):
    folder = listed(tmp_path, ("t1w", "ADC", "t2", "FLAIR"))
    write_nifti(folder / "a.nii.gz", np.stack([volume(name) for name in STORE], -1))
    message = problem_of([folder / "a.nii.gz"], of_run())
    assert "FLAIR, T1w, t1gd, T2w" in message
    assert "t1w, ADC, t2, FLAIR" in message
    listed(tmp_path, ("t1w", "flair", "t2"))
    (case,) = cases_to_predict([folder / "a.nii.gz"], of_run("FLAIR")).cases
    with pytest.raises(InputError, match=r"3 channels.*got 4"):
        load_case(case.files, channels=case.channels)


def test_a_4d_file_that_no_list_names_has_the_runs_order_and_a_note_says_so(tmp_path):
    image = np.stack([volume(name) for name in STORE], -1)
    paths = [write_nifti(tmp_path / f"{name}.nii.gz", image) for name in "ab"]
    assert found_in(paths, of_run()) == {"a": STORE, "b": STORE}
    (note,) = cases_to_predict(paths, of_run()).notes
    assert "a and b" in note
    assert "FLAIR, T1w, t1gd, T2w" in note


def numbered(folder, case, order=STORE, numbers=(0, 1, 2, 3)):
    """nnU-Net's files of a case."""
    return [write_nifti(folder / f"{case}_{n:04d}.nii.gz", volume(order[n])) for n in numbers]


def test_nnunets_numbers_tell_the_channels_in_any_order_of_the_files(tmp_path):
    first, second = numbered(tmp_path, "case_000"), numbered(tmp_path, "case_001")
    mixed = [first[3], second[1], first[1], second[0], first[0], first[2], second[3], second[2]]
    assert found_in(mixed, of_run()) == {"case_000": STORE, "case_001": STORE}
    assert found_in([first[0]], of_run("FLAIR")) == {"case_000": ("FLAIR",)}
    order = ("T2w", "t1gd", "FLAIR", "T1w")
    folder = listed(tmp_path / "data", order, "channel_names")
    numbered(folder, "p", order)
    assert found_in([folder], of_run()) == {"p": STORE}


@pytest.mark.parametrize(
    ("numbers", "wrong"),
    [
        ((0, 1, 3), "got FLAIR, T1w, T2w"),
        (range(5), "got case_000_0004.nii.gz"),
        ((1, 2, 3), "got T1w, t1gd, T2w"),
    ],
)
def test_numbers_that_are_missing_or_of_no_channel_are_named(tmp_path, numbers, wrong):
    numbered(tmp_path, "case_000", (*STORE, None), numbers)
    assert wrong in problem_of([tmp_path], of_run())


def test_numbers_of_patients_are_no_channels(tmp_path):
    for number in (0, 1, 17):
        write_nifti(tmp_path / f"lung_{number:04d}.nii.gz", volume("FLAIR"))
    for run in (of_run(store=("FLAIR",)), of_run("FLAIR")):
        assert set(found_in([tmp_path], run)) == {"lung_0000", "lung_0001", "lung_0017"}


def test_files_are_sorted_by_the_channels_at_the_ends_of_their_names(tmp_path):
    of_prostate = of_run(store=("T2w", "ADC"))
    for case in ("p1", "p2"):
        for name in ("adc", "T2"):
            write_nifti(tmp_path / f"{case}_{name}.NII.GZ", volume(NAMES.get(name.lower())))
    for paths in (sorted(tmp_path.iterdir())[::-1], [tmp_path]):
        assert found_in(paths, of_prostate) == {"p1": ("T2w", "ADC"), "p2": ("T2w", "ADC")}


@pytest.mark.parametrize("pattern", ["{}_p1.nii.gz", "sub-1_{}_brain.nii"])
def test_a_channel_elsewhere_than_at_the_end_of_a_name_is_refused(tmp_path, pattern):
    for name, end in zip(STORE, ("FLAIR", "T1", "t1ce", "T2")):
        write_nifti(tmp_path / pattern.format(end), volume(name))
    for paths in (sorted(tmp_path.iterdir()), [tmp_path]):
        assert "names tell their channel" in problem_of(paths, of_run())


def test_every_case_in_a_folder_is_found_and_a_folder_of_no_cases_says_so(tmp_path):
    flat, deep, plain = tmp_path / "flat", tmp_path / "deep", tmp_path / "plain"
    for name in "ab":
        write_nifti(flat / f"{name}.Nii.gz", np.stack([volume(name) for name in STORE], -1))
        write_nifti(flat / f"{name}_label.nii.gz", volume(None))
        write_nifti(plain / f"{name}.nii", volume("FLAIR"))
        for end, channel in zip(("flair", "t1", "t1ce", "t2", "seg"), (*STORE, None)):
            write_nifti(deep / f"HGG/{name}/{name}_{end}.nii.gz", volume(channel))
    (deep / "HGG/notes").mkdir()
    write_nifti(deep / "out/b.nii.gz", volume("FLAIR"))
    assert found_in([flat], of_run()) == {"a": STORE, "b": STORE}
    result = cases_to_predict([deep], of_run(), out=deep / "out")
    assert [case.files.case_id for case in result.cases] == ["a", "b"]
    assert found_in([plain], of_run("FLAIR")) == {"a": ("FLAIR",), "b": ("FLAIR",)}
    assert "0002" in problem_of([plain], of_run())
    assert "found none" in problem_of([deep / "HGG/notes"], of_run())
    listed(tmp_path / "data", STORE)
    assert "imagesTs" in problem_of([tmp_path / "data"], of_run())


TWO = {"left": (1,), "right": (2,)}  # regions that nothing is common to
BOTH_SIDES = {"background": 0, "Left": 9, "right": 8}


@pytest.mark.parametrize(
    ("of_run", "labels", "order"),
    [
        (TWO, BOTH_SIDES, None),
        (TWO, {**BOTH_SIDES, "both": [8, 9]}, [9, 8, 8]),
    ],
)
def test_regions_are_painted_in_the_order_of_the_run_alone(tmp_path, of_run, labels, order):
    run = PaintedRegions(of_run, [("right", 2), ("left", 1)])
    folder = listed(tmp_path, STORE, key="channel_names")
    path = tmp_path / "dataset.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "labels": labels, "regions_class_order": order}))
    for number, channel in enumerate(STORE):
        write_nifti(folder / f"x_{number:04d}.nii.gz", volume(channel))
    predictor = FakePredictor(None, run, {0: "background", 1: "left", 2: "right"}, channels=STORE)
    predictor.inputs = STORE
    (case,) = cases_to_predict([folder], predictor).cases
    assert (case.files.case_id, case.codes_of) == ("x", str(path))
    codes = {name.casefold(): labels[name] for name in labels}
    assert case.regions == {name: tuple(np.atleast_1d(codes[name])) for name in ("left", "right")}
    assert list(case.regions.paint.items()) == [("right", 8), ("left", 9)]


def taken_by_predict(paths, inputs):
    """The values of `VALUES` in the network's channels of one case, or None if it is refused."""
    result = cases_to_predict(paths, of_run(*inputs))
    if result.problems:
        return None
    (case,) = result.cases
    image = load_case(case.files, channels=case.channels).image
    return [int(image[..., case.channels.index(name)].max()) // 100 for name in inputs]


FILES = {  # name -> the channel whose voxels it holds
    "x_T1_Gd.NII.GZ": "t1gd",
    "case_0000.nii.gz": "FLAIR",
    "case_0001.nii.gz": "T1w",
    "case_0002.nii.gz": "t1gd",
    "case_0003.nii.gz": "T2w",
    "sub-1_T1w.nii.gz": "T1w",
    "sub-1_ce-gd_T1w.nii.gz": "t1gd",
    "one.nii.gz": "T1w",
    "two.nii.gz": "t1gd",
    "p_0042.nii.gz": "t1gd",
}
BOTH = ("T1w", "t1gd")


@pytest.mark.parametrize(
    ("names", "inputs", "expected"),
    [
        ("x_T1_Gd.NII.GZ", ("t1gd",), [3]),
        ("case_0000.nii.gz", ("t1gd",), None),
        ("case_0002.nii.gz", ("t1gd",), [3]),
        ("p_0042.nii.gz", ("t1gd",), [3]),
        ("one.nii.gz two.nii.gz", BOTH, [2, 3]),
        ("case_0002.nii.gz case_0001.nii.gz", BOTH, [2, 3]),
        ("case_0003.nii.gz case_0001.nii.gz", BOTH, None),
        ("sub-1_ce-gd_T1w.nii.gz sub-1_T1w.nii.gz", BOTH, [2, 3]),
        ("sub-1_ce-gd_T1w.nii.gz", ("T1w",), None),
    ],
)
def test_each_channel_is_the_file_whose_name_tells_it(tmp_path, names, inputs, expected):
    paths = [write_nifti(tmp_path / name, volume(FILES[name])) for name in names.split()]
    assert taken_by_predict(paths, inputs) == expected


def test_a_list_above_imagests_is_found_from_a_folder_within_it_too(tmp_path):
    folder = listed(tmp_path, ("T1-CE", "flair", "T1", "T2"))
    order = ("t1gd", "FLAIR", "T1w", "T2w")
    image = np.stack([volume(name) for name in order], -1)
    path = write_nifti(folder / "site1/a.nii.gz", image)
    assert taken_by_predict([path], STORE) == [1, 2, 3, 4]
