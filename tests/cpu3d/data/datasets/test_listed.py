"""Raw data of nnU-Net 1 and 2, MONAI's lists, and regions by name: what is read, what it is
prepared to, and what is refused."""

import json
import re

import nibabel
import numpy as np
import pytest

from cpu3d.__main__ import main
from cpu3d.data.datasets.layouts import read_dataset
from cpu3d.data.fold import with_fold
from cpu3d.data.store import open_store
from cpu3d.data.stores.prepare import prepare
from cpu3d.data.stores.upkeep import append
from cpu3d.errors import InputError
from tests.cpu3d.data.made_datasets import (
    ALL,
    brats_case,
    content_of,
    dataset_json,
    decathlon,
    nnunet,
    tiny_image,
    tiny_label,
    write_nifti,
)

TUMOUR = {"air": 0, "whole": [1, 2, 3], "core": [2, 3], "enhancing": 3}


def ids_of(cases):
    return [case.case_id for case in cases]


def arrays_of(store):
    return {name: data for name, data in content_of(store / "cases").items() if "json" not in name}


def listing(cases):
    """The cases of `nnunet` as its dataset.json may list them."""
    names = [f"BRATS_{number:03d}" for number in range(cases)]
    return {
        name: {
            "images": [f"imagesTr/{name}_{channel:04d}.nii.gz" for channel in range(4)],
            "label": f"./labelsTr/{name}.nii.gz",
        }
        for name in names
    }


@pytest.mark.parametrize("how", [{"version": 1}, {}, {"dataset": listing(4)}])
def test_nnunets_raw_data_prepares_to_the_arrays_and_the_split_of_its_4d_files(tmp_path, how):
    thirds = {"fractions": (2, 1, 1), "workers": 1}
    expected = prepare(decathlon(tmp_path / "4D", 4), tmp_path / "expected", **thirds)
    manifest = prepare(nnunet(tmp_path / "raw", 4, **how), tmp_path / "store", **thirds)
    assert arrays_of(tmp_path / "store") == arrays_of(tmp_path / "expected")
    for name in ("channels", "labels", "regions", "split_hash"):
        assert getattr(manifest, name) == getattr(expected, name), name
    assert manifest.layout == "nnunet"
    assert [source.path for source in manifest.cases[0].sources] == [
        *(f"imagesTr/BRATS_000_{channel:04d}.nii.gz" for channel in range(4)),
        "labelsTr/BRATS_000.nii.gz",
    ]


def test_other_files_than_those_of_the_ending_are_left_alone(tmp_path):
    raw = nnunet(tmp_path, 1, file_ending=".nii")
    for channel in range(4):
        write_nifti(raw / f"imagesTr/a_{channel:04d}.nii", tiny_image(channel))
    write_nifti(raw / "labelsTr/a.nii", tiny_label(1))
    (case,) = read_dataset(raw).cases
    assert [path.name for path in case.images] == [f"a_{n:04d}.nii" for n in range(4)]


@pytest.mark.parametrize(("names", "places"), [(("t2", "FLAIR"), [3, 0]), (("flair",), [0])])
def test_channels_are_taken_by_name_in_any_order(tmp_path, names, places):
    (case,) = read_dataset(nnunet(tmp_path, 1)).with_channels(names).cases
    assert [int(path.name[-11:-7]) for path in case.images] == places


def test_labels_of_several_codes_are_regions_with_their_order_and_codes_get_names(tmp_path):
    labels = {**TUMOUR, "vessel": [7], "ignore": 9}
    dataset = read_dataset(nnunet(tmp_path, 1, labels=labels, regions_class_order=[1, 2, 3, 7]))
    assert list(dataset.regions.items()) == [
        ("whole", (1, 2, 3)), ("core", (2, 3)), ("enhancing", (3,)), ("vessel", (7,))
    ]  # fmt: skip
    assert (dataset.class_order, dataset.ignore) == ((1, 2, 3, 7), 9)
    assert dataset.labels == {
        0: "air",
        1: "code 1 of whole",
        2: "code 2 of core",
        3: "enhancing",
        7: "vessel",
        9: "ignore",
    }


def test_labels_of_one_code_each_are_labels_and_an_order_means_nothing(tmp_path):
    labels = {"background": 0, "a": 1, "b": [2], "c": 3, "ignore": 4}
    dataset = read_dataset(nnunet(tmp_path, 1, labels=labels, regions_class_order=[3, 2, 1]))
    assert (dataset.regions, dataset.class_order, dataset.ignore) == (None, (), 4)


OVERLAP = {"background": 0, "b": 1, "d": [3, 2], "c": 2}  # d is painted first, unless told


@pytest.mark.parametrize(
    ("order", "paint"), [(None, ()), ([1, 3, 2], (("b", 1), ("d", 3), ("c", 2)))]
)
def test_a_store_keeps_the_order_of_painting(tmp_path, order, paint):
    raw = nnunet(tmp_path / "raw", 2, labels=OVERLAP, regions_class_order=order)
    prepare(raw, tmp_path / "store", **ALL)
    manifest = open_store(tmp_path / "store").manifest
    assert manifest.paint == paint
    assert manifest.regions == {"b": (1,), "d": (2, 3), "c": (2,)}


NAMES = {"0": "FLAIR", "1": "T1w", "2": "t1gd", "3": "T2w"}
PAINTED = "code 1, code 1 of whole, .* painted as whole, got 3, which is whole, core and enhancing"
WRONG_LABELS = (
    None,
    {"background": 0},
    {"background": 0, "other": 0, "a": 1},
    {"background": 1, "a": 2},
    {"background": 0, "a": 1, "b": 1},
    {"background": 0, "a": 300},
    {"background": 0, "a": -1},
    {"background": 0, "a": [0, 1]},
    {"background": 0, "a": 1, "ignore": 0},
    {"background": 0, "a": 1, "ignore": 1},
    {"background": 0, "a": 1, "ignore": [2, 3]},
)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        *(({"labels": labels}, "distinct names") for labels in WRONG_LABELS),
        ({"file_ending": ".nrrd"}, r"file_ending .* \.nii\.gz or \.nii.* got \.nrrd"),
        ({"channel_names": None}, "must name channels"),
        ({"channel_names": {"0": "FLAIR", "1": "T1w"}}, "FLAIR, T1w, got BRATS_000_0002"),
        ({"channel_names": {"0": "FLAIR", "2": "T1w"}}, r"0, 1, ... without gaps, got \[0, 2\]"),
        ({"channel_names": {**NAMES, "3": "T1"}}, "different names, got T1w, T1,"),
        ({"numTraining": 3}, "numTraining .* 2, got 3"),
        ({"labels": TUMOUR, "regions_class_order": [1, 2]}, r"regions_class_order .*\[1, 2\]"),
        ({"labels": TUMOUR, "regions_class_order": [3, 2, 3]}, PAINTED),
        ({"dataset": {"../a": {"images": ["a.nii.gz"]}}}, "names of files, got '../a'"),
        ({"dataset": {".": {"images": ["a.nii.gz"]}}}, r"names of files, got '\.'"),
        ({"channel_names": None, "modality": NAMES}, "must list cases"),
    ],
)
def test_a_list_that_cannot_be_is_refused_in_one_line_and_nothing_is_written(
    tmp_path, changes, rule, capsys
):
    raw = nnunet(tmp_path / "raw", 2, **changes)
    store = tmp_path / "store"
    assert main(["prepare", "--dataset", str(raw), "--store", str(store)]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert str(raw) in line
    assert re.search(rule, line)
    assert not store.exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"modality": {"0": "\x7f[2J"}},
        {"labels": {"1": "a\x9f2J"}},
        {"name": "\u2028"},
        {"name": "\u2069"},
    ],
)
def test_a_name_with_control_characters_is_refused_and_shown_without_them(tmp_path, changes):
    with pytest.raises(InputError, match="must be without control characters") as caught:
        read_dataset(decathlon(tmp_path, 1, **changes))
    assert str(caught.value).isprintable()


def test_an_id_or_a_patient_with_control_characters_is_refused(tmp_path):
    brats_case(tmp_path / "BraTS-GLI-00001-000\x1b[2J")
    with pytest.raises(InputError, match=r"control characters, got 'BraTS-GLI-00001-000\\x1b\[2J'"):
        read_dataset(tmp_path)
    (tmp_path / "table").write_text("p,\x9bq")
    brats_case(tmp_path / "cases/p")
    with pytest.raises(InputError, match="names in --patients"):
        read_dataset(tmp_path / "cases", tmp_path / "table")


@pytest.mark.parametrize("image", ["s{0}/{0}/image.nii.gz", "{}/anat/image.nii.gz", "x/{}.nii.gz"])
def test_the_id_of_a_case_is_its_files_name_or_the_nearest_folders_that_tells_cases_apart(
    tmp_path, image
):
    ids = ["p3", "p1", "p2"]
    training = []
    for name in ids:
        entry = {"image": image.format(name), "label": f"labels/{name}.nii.gz"}
        for path in entry.values():
            write_nifti(tmp_path / path, tiny_image())
        training.append(entry)
    dataset = read_dataset(decathlon(tmp_path, 0, training=training, name=""))
    assert (ids_of(dataset.cases), dataset.name) == (sorted(ids), tmp_path.name)


@pytest.mark.parametrize("version", [1, 2])
def test_a_case_without_a_file_is_a_bad_case_and_the_others_are_good(tmp_path, version):
    raw = nnunet(tmp_path, 4, version)
    (raw / "imagesTr/BRATS_000_0002.nii.gz").unlink()
    (raw / "labelsTr/BRATS_001.nii.gz").unlink()
    dataset = read_dataset(raw)
    assert ids_of(dataset.cases) == ["BRATS_002", "BRATS_003"]
    kinds = {case_id: line.split()[0] for case_id, (line,) in dataset.problems.items()}
    assert kinds == {"BRATS_000": "image", "BRATS_001": "label"}


def test_a_label_alone_and_a_file_without_a_number_are_named(tmp_path):
    raw = nnunet(tmp_path, 2)
    for path in (raw / "imagesTr").glob("BRATS_001*"):
        path.unlink()
    (lines,) = read_dataset(raw).problems.values()
    assert ["image of case BRATS_001" in line for line in lines] == [True] * 4
    write_nifti(raw / "imagesTr/BRATS_002.nii.gz", tiny_image())
    with pytest.raises(InputError, match=r"CASE_0000.*got BRATS_002\.nii\.gz"):
        read_dataset(raw)


def test_a_listed_case_without_a_channel_or_of_channels_in_another_order_is_bad(tmp_path):
    cases = listing(3)
    cases["BRATS_001"]["images"].pop()
    names = [f"x_{name}.nii.gz" for name in ("flair", "t1ce", "t1", "t2")]
    cases["BRATS_002"]["images"] = names
    raw = nnunet(tmp_path, 3, dataset=cases)
    for name in names:
        write_nifti(raw / name, tiny_image())
    dataset = read_dataset(raw)
    assert ids_of(dataset.cases) == ["BRATS_000"]
    assert "got 3" in dataset.problems["BRATS_001"][0]
    assert "x_t1ce.nii.gz for T1w" in dataset.problems["BRATS_002"][0]


# --- MONAI's lists ---


def datalist(folder, **changes):
    """A list of five cases of four 3D files each, "fold" 0 to 2, and its path."""
    training = []
    for number in range(5):
        names = [f"p{number}/p{number}_{name}.nii.gz" for name in ("flair", "t1", "t1ce", "t2")]
        for channel, name in enumerate(names):
            write_nifti(folder / name, tiny_image(10 * number + channel))
        label = f"p{number}/p{number}_seg.nii.gz"
        write_nifti(folder / label, tiny_label(1, 2, 3))
        training.append({"image": names, "label": label, "fold": number % 3})
    labels = {"0": "background", "1": "core", "2": "edema", "3": "enhancing"}
    content = {"training": training, "labels": labels, "modality": NAMES, **changes}
    path = folder / "list.json"
    path.write_text(json.dumps(content))
    return path


def test_a_list_of_monais_gives_cases_channels_and_folds(tmp_path, capsys):
    path = datalist(tmp_path / "data", validation=[{}])
    manifest = prepare(path, tmp_path / "store", workers=1)
    assert 'warning: 1 case under "validation"' in capsys.readouterr().err
    assert (manifest.layout, manifest.channels) == ("datalist", tuple(NAMES.values()))
    assert ids_of(manifest.cases) == [f"p{number}" for number in range(5)]
    assert [fold["val"] for fold in manifest.folds] == [("p0", "p3"), ("p1", "p4"), ("p2",)]
    assert manifest.regions == {"WT": (1, 2, 3), "TC": (1, 3), "ET": (3,)}
    store = open_store(tmp_path / "store")
    view = with_fold(store, "2/3").manifest
    assert view.split == {"train": ("p0", "p2", "p3"), "val": ("p1", "p4"), "test": ()}
    assert prepare(path, tmp_path / "store", workers=1) == manifest
    t1ce = nibabel.load(tmp_path / "data/p1/p1_t1ce.nii.gz").dataobj
    np.testing.assert_array_equal(store.image("p1")[..., 2], t1ce)


def test_a_split_that_is_asked_for_goes_before_the_folds_of_a_list(tmp_path):
    path = datalist(tmp_path / "data")
    manifest = prepare(path, tmp_path / "store", workers=1, fractions=(8, 1, 1))
    assert (manifest.folds, len(manifest.split["test"])) == ((), 1)


def test_a_list_of_the_decathlons_form_may_have_folds_too(tmp_path):
    names = {"3": "ADC", "1": "T1w", "0": "FLAIR", "2": "t1gd"}
    folder = decathlon(tmp_path, 4, channel_names=names)
    with dataset_json(folder) as content:
        for number, entry in enumerate(content["training"][:3]):
            entry["fold"] = number % 2
    dataset = read_dataset(folder)
    assert (dataset.layout, dataset.channels[1:]) == ("decathlon", ("T1w", "t1gd", "ADC"))
    assert [fold["val"] for fold in dataset.folds] == [("BRATS_000", "BRATS_002"), ("BRATS_001",)]
    assert all("BRATS_003" in fold["train"] for fold in dataset.folds)
    with dataset_json(folder) as content:
        del content["training"][1]["fold"]
    (division,) = read_dataset(folder).folds
    assert division == {"train": ("BRATS_001", "BRATS_003"), "val": ("BRATS_000", "BRATS_002")}
    with dataset_json(folder) as content:
        for entry in content["training"]:
            entry["fold"] = 0
    assert read_dataset(folder).folds == ()


# --- Regions by name ---


def prepare_with_regions(tmp_path, *texts):
    """Run `prepare --regions ...`; returns its exit code and the store's folder."""
    store = tmp_path / "store"
    words = ["--dataset", decathlon(tmp_path / "data", 2), "--store", store, "--split", 1, 0, 0]
    return main(["prepare", *map(str, words), "--workers", "1", "--regions", *texts]), store


def test_regions_that_a_user_names_go_before_the_data_sets_own(tmp_path, capsys):
    code, store = prepare_with_regions(tmp_path, "in=ner=3,2", "edema=1")
    assert code == 0
    manifest = open_store(store).manifest
    assert list(manifest.regions.items()) == [("in=ner", (2, 3)), ("edema", (1,))]
    assert "1 edema -> edema" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("texts", "rule"),
    [
        (["=1"], "must be NAME=CODE or NAME=CODE,CODE,"),
        (["WT=1,1"], "of different codes 1 to 255, got WT=1,1;"),
        (["WT=256"], "of different codes 1 to 255, got WT=256;"),
        (["WT=0"], "of different codes 1 to 255, got WT=0;"),
        (["WT=1", "wt=2"], "different names"),
        (["WT=1,7"], r"region WT .* got 7"),
        (["WT=1,3", "--ignore", "3"], r"region WT .* got 3"),
    ],
)
def test_regions_that_cannot_be_are_refused_in_one_line(tmp_path, texts, rule, capsys):
    code, store = prepare_with_regions(tmp_path, *texts)
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert re.search(rule, line)
    assert (code, store.exists()) == (2, False)


@pytest.mark.parametrize(
    ("chosen", "is_noted"), [({"WT": (1, 2, 3), "ET": (3,)}, True), (None, False)]
)
def test_a_store_grows_with_its_own_regions_whatever_the_list_says(
    tmp_path, capsys, chosen, is_noted
):
    first = nnunet(tmp_path / "first", 2, labels=TUMOUR, regions_class_order=[1, 2, 3])
    before = prepare(first, tmp_path / "store", **ALL, regions=chosen)
    capsys.readouterr()
    done = append(tmp_path / "store", nnunet(tmp_path / "more", 3, labels=TUMOUR), workers=1)
    assert done.new == ("BRATS_002",)
    assert (done.manifest.regions, done.manifest.paint) == (before.regions, before.paint)
    assert ("note: regions are" in capsys.readouterr().err) == is_noted


def test_other_regions_or_another_painting_for_a_finished_store_are_refused(tmp_path):
    data = nnunet(tmp_path / "data", 2, labels=OVERLAP, regions_class_order=[1, 3, 2])
    store = tmp_path / "store"
    before = prepare(data, store, **ALL)
    assert prepare(data, store, **ALL) == before
    with pytest.raises(InputError, match="regions are now all=1,2,3"):
        prepare(data, store, **ALL, regions={"all": (1, 2, 3)})
    with dataset_json(data) as content:
        del content["regions_class_order"]
    with pytest.raises(InputError, match=r"regions_class_order is now \[\]"):
        prepare(data, store, **ALL)
    assert open_store(store).manifest == before


@pytest.mark.parametrize(
    ("how", "codes", "shown"),
    [
        ({}, [0, 1, 2, 3], "RC, if a label holds it"),
        ({"ignore": 4}, [0, 1, 2, 3, 4], "not annotated: .*, if a label holds it"),
        ({"regions": {"tumour": (1, 2, 3), "cavity": (4,)}}, [0, 1, 2, 3, 4], "cavity"),
    ],
)
def test_an_optional_code_is_in_a_store_if_a_region_names_it(tmp_path, capsys, how, codes, shown):
    brats_case(tmp_path / "data/BraTS-GLI-00001-000")
    manifest = prepare(tmp_path / "data", tmp_path / "store", **ALL, **how)
    assert sorted(manifest.labels) == codes
    assert re.search(f"  4 resection cavity -> {shown}\n", capsys.readouterr().out)
    assert append(tmp_path / "store", tmp_path / "data", workers=1).manifest == manifest
