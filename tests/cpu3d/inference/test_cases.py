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
NAMES = {"FLAIR": "FLAIR", "flair": "FLAIR", "t1w": "T1w", "t2": "T2w", "T1-CE": "t1gd"}
"""What a list calls a channel -> the channel."""


def volume(channel):
    """A 3D image of a channel; of None, any other."""
    image = tiny_image(VALUES.get(channel, 7))
    return np.where(image > 0, VALUES.get(channel, 50) + image % 9, 0).astype(np.int16)


def write_4d(path, channels=STORE):
    return write_nifti(path, np.stack([volume(channel) for channel in channels], -1))


def predictor_of(*inputs, store=STORE):
    """One of a run that has learnt from these channels of its store, by default from all."""
    return FakePredictor(None, REGIONS, LABELS, channels=store, inputs=inputs or store)


def write_list(folder, names, key="modality", **more):
    """Write a dataset.json that names channels; returns the folder of its images."""
    labels = {"0": "background", "1": "edema", "2": "non-enhancing tumor", "3": "enhancing tumour"}
    if key == "channel_names":
        labels = {name: int(code) for code, name in labels.items()}
    content = {key: {str(n): name for n, name in enumerate(names)}, "labels": labels, **more}
    (folder / "imagesTs").mkdir(parents=True, exist_ok=True)
    (folder / "dataset.json").write_text(json.dumps(content))
    return folder / "imagesTs"


def channels_by_case(paths, predictor, **how):
    """Case -> the channels that it was loaded with, which must hold the voxels that they stand
    for."""
    result = cases_to_predict(paths, predictor, **how)
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
        ("modality", ("ADC", "t2", "flair", "t1w", "T1-CE"), (), STORE),
        ("modality", ("t2", "flair"), ("FLAIR",), ("FLAIR",)),
        ("channel_names", ("t1w", "T1-CE", "t2", "FLAIR"), ("FLAIR",), STORE),
    ],
)
def test_channels_of_a_4d_file_are_those_of_the_list_above_it(tmp_path, key, names, inputs, taken):
    folder = write_list(tmp_path, names, key)
    predictor = predictor_of(*inputs)
    path = write_4d(folder / "site1/a.nii.gz", [NAMES.get(name) for name in names])
    assert channels_by_case([path], predictor) == {"a": taken}
    (case,) = cases_to_predict([folder], predictor).cases
    assert (case.codes_of, case.labels[3]) == (str(tmp_path / "dataset.json"), "enhancing tumour")


def test_channels_of_other_names_are_refused_with_both_lists(tmp_path):
    path = write_4d(write_list(tmp_path, ("t1w", "ADC", "t2", "FLAIR")) / "a.nii.gz")
    message = problem_of([path], predictor_of())
    assert "FLAIR, T1w, t1gd, T2w" in message
    assert "t1w, ADC, t2, FLAIR" in message
    write_list(tmp_path, ("t1w", "flair", "t2"))
    (case,) = cases_to_predict([path], predictor_of("FLAIR")).cases
    with pytest.raises(InputError, match=r"3 channels.*got 4"):
        load_case(case.files, channels=case.channels)


def numbered(folder, case, order=STORE, numbers=(0, 1, 2, 3)):
    """nnU-Net's files of a case."""
    return [write_nifti(folder / f"{case}_{n:04d}.nii.gz", volume(order[n])) for n in numbers]


def test_nnunets_numbers_tell_the_channels_in_any_order_of_the_files(tmp_path):
    first, second = numbered(tmp_path, "case_000"), numbered(tmp_path, "case_001")
    mixed = [first[3], second[1], first[1], second[0], first[0], first[2], second[3], second[2]]
    expected = {"case_000": STORE, "case_001": STORE}
    assert channels_by_case(mixed, predictor_of()) == expected
    (note,) = cases_to_predict(first[1:3], predictor_of(*BOTH)).notes
    assert "taken to be FLAIR, T1w, t1gd, T2w" in note
    order = ("T2w", "t1gd", "FLAIR", "T1w")
    folder = write_list(tmp_path / "data", order, "channel_names")
    numbered(folder, "p", order)
    assert channels_by_case([folder], predictor_of()) == {"p": STORE}
    assert cases_to_predict([folder], predictor_of()).notes == []


@pytest.mark.parametrize(
    ("numbers", "wrong"),
    [((0, 1, 3), "got FLAIR, T1w, T2w"), (range(5), "got case_000_0004.nii.gz")],
)
def test_numbers_that_are_missing_or_of_no_channel_are_named(tmp_path, numbers, wrong):
    numbered(tmp_path, "case_000", (*STORE, None), numbers)
    assert wrong in problem_of([tmp_path], predictor_of())


def test_numbers_of_patients_are_no_channels(tmp_path):
    numbered(tmp_path, "lung", ["FLAIR"] * 18, (0, 1, 17))
    for predictor in (predictor_of(store=("FLAIR",)), predictor_of("FLAIR")):
        cases = channels_by_case([tmp_path], predictor)
        assert set(cases) == {"lung_0000", "lung_0001", "lung_0017"}
        assert cases_to_predict([tmp_path], predictor).notes == []


def test_files_are_sorted_by_the_channels_at_the_ends_of_their_names(tmp_path):
    for case in ("p1", "p2"):
        for name, channel in (("adc", None), ("T2", "T2w")):
            write_nifti(tmp_path / f"{case}_{name}.NII.GZ", volume(channel))
    for paths in (sorted(tmp_path.iterdir())[::-1], [tmp_path]):
        cases = channels_by_case(paths, predictor_of(store=("T2w", "ADC")))
        assert cases == {"p1": ("T2w", "ADC"), "p2": ("T2w", "ADC")}


def test_a_channel_elsewhere_than_at_the_end_of_a_name_is_refused(tmp_path):
    for name, end in zip(STORE, ("FLAIR", "T1", "t1ce", "T2")):
        write_nifti(tmp_path / f"sub-1_{end}_brain.nii", volume(name))
    for paths in (sorted(tmp_path.iterdir()), [tmp_path]):
        assert "names tell their channel" in problem_of(paths, predictor_of())


def test_every_case_in_a_folder_is_found_and_a_folder_of_no_cases_says_so(tmp_path):
    flat, deep, plain = tmp_path / "flat", tmp_path / "deep", tmp_path / "plain"
    for name in "ab":
        write_4d(flat / f"{name}.Nii.gz")
        write_nifti(flat / f"{name}_label.nii.gz", volume(None))
        write_nifti(plain / f"{name}.nii", volume("FLAIR"))
        write_4d(tmp_path / f"patients/{name}/image.nii.gz")
        for end, channel in zip(("flair", "t1", "t1ce", "t2", "seg"), (*STORE, None)):
            write_nifti(deep / f"HGG/{name}/{name}_{end}.nii.gz", volume(channel))
    (deep / "HGG/notes").mkdir()
    write_nifti(deep / "out/b.nii.gz", volume("FLAIR"))
    *unread, note = cases_to_predict([flat], predictor_of()).notes
    assert unread == [f"not read: {flat / name}_label.nii.gz" for name in "ab"]
    assert note.startswith("note: a and b: no ")
    assert note.endswith(" FLAIR, T1w, t1gd, T2w")
    for folder in (flat, deep, tmp_path / "patients"):
        cases = channels_by_case([folder], predictor_of(), out=deep / "out")
        assert cases == {"a": STORE, "b": STORE}
    assert channels_by_case([plain], predictor_of("FLAIR")) == {"a": ("FLAIR",), "b": ("FLAIR",)}
    assert "0002" in problem_of([plain], predictor_of())
    assert "found none" in problem_of([deep / "HGG/notes"], predictor_of())
    write_list(tmp_path / "data", STORE)
    assert "imagesTs" in problem_of([tmp_path / "data"], predictor_of())


BOTH_SIDES = {"background": 0, "Left": 9, "right": 8}


@pytest.mark.parametrize(
    ("labels", "order"),
    [(BOTH_SIDES, None), ({**BOTH_SIDES, "both": [8, 9]}, [9, 8, 8])],
)
def test_regions_are_painted_in_the_order_of_the_run_alone(tmp_path, labels, order):
    folder = write_list(tmp_path, STORE, "channel_names", labels=labels, regions_class_order=order)
    numbered(folder, "x")
    predictor = predictor_of()
    predictor.regions = PaintedRegions({"left": (1,), "right": (2,)}, [("right", 2), ("left", 1)])
    predictor.labels = {0: "background", 1: "left", 2: "right"}
    (case,) = cases_to_predict([folder], predictor).cases
    assert (case.files.case_id, case.codes_of) == ("x", str(tmp_path / "dataset.json"))
    assert case.regions == {"left": (9,), "right": (8,)}
    assert list(case.regions.paint.items()) == [("right", 8), ("left", 9)]


FILES = {  # name -> the channel whose voxels it holds
    "x_T1_Gd.NII.GZ": "t1gd",
    "case_0001.nii": "T1w",
    "case_0002.nii": "t1gd",
    "case_0003.nii": "T2w",
    "sub-1_T1w.nii": "T1w",
    "sub-1_ce-gd_T1w.nii": "t1gd",
    "one.nii": "T1w",
    "two.nii": "t1gd",
}
BOTH = ("T1w", "t1gd")


@pytest.mark.parametrize(
    ("names", "inputs", "is_told"),
    [
        ("x_T1_Gd.NII.GZ", ("t1gd",), True),
        ("case_0002.nii", ("t1gd",), True),
        ("one.nii one_seg.nii", ("T1w",), True),
        ("one.nii two.nii", BOTH, True),
        ("one.nii two.nii three.nii", BOTH, False),
        ("case_0002.nii case_0001.nii", BOTH, True),
        ("case_0003.nii case_0001.nii", BOTH, False),
        ("sub-1_ce-gd_T1w.nii sub-1_T1w.nii", BOTH, True),
        ("sub-1_ce-gd_T1w.nii", ("T1w",), False),
    ],
)
def test_each_channel_is_the_file_whose_name_tells_it(tmp_path, names, inputs, is_told):
    paths = [write_nifti(tmp_path / name, volume(FILES.get(name))) for name in names.split()]
    if is_told:
        assert list(channels_by_case(paths, predictor_of(*inputs)).values()) == [inputs]
    else:
        assert problem_of(paths, predictor_of(*inputs))
