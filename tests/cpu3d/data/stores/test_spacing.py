"""Stores of data sets whose voxels differ: prepared, grown, verified and repaired; and data sets
whose voxels agree, which are stored as they always were."""

import json

import numpy as np
import pytest

from cpu3d.data.cases.resample import Keep
from cpu3d.data.nifti import read_volume, to_ras, write_volume
from cpu3d.data.store import open_store
from cpu3d.data.stores.convert import StoreSettings
from cpu3d.data.stores.prepare import prepare
from cpu3d.data.stores.upkeep import append, verify
from cpu3d.errors import InputError
from tests.cpu3d.data.made_datasets import ALL, dataset_json
from tests.cpu3d.data.spaced import SPACINGS, spaced_set

ISO = (1.0, 1.0, 1.0)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return spaced_set(tmp_path_factory.mktemp("spaced") / "data")


@pytest.mark.parametrize("settings", [StoreSettings(), StoreSettings("b2nd", crop=True)])
def test_cases_of_several_spacings_become_one_and_keep_their_own_label(
    data, tmp_path, capsys, settings
):
    folder = tmp_path / "store"
    manifest = prepare(data, folder, **ALL, settings=settings)
    assert manifest.target_spacing_mm == ISO
    printed = capsys.readouterr().out
    assert "0.8 x 0.8 x 1 to 2 x 2 x 4 mm" in printed
    assert "1 x 1 x 1 mm, 3 cases resampled" in printed
    assert f"7 int16 .{settings.format}{' cropped' * settings.crop}; rounded by up to" in printed
    store = open_store(folder)
    for case_id, spacing_mm in SPACINGS.items():
        record = store.case(case_id)
        assert record.spacing_mm == pytest.approx(ISO)
        assert (record.resampled_from is not None) == bool(record.units) == (spacing_mm != ISO)
        source = to_ras(*read_volume(data / f"labelsTr/{case_id}.nii.gz"))
        np.testing.assert_array_equal(store.truth(case_id), source)
        assert not store.truth(case_id).flags.writeable
        assert store.image(case_id).shape == (*store.label(case_id).shape, 2) == (48, 40, 32, 2)
    assert verify(folder, workers=1) == ()
    for path in folder.glob("cases/*.t.*"):
        path.write_bytes(path.read_bytes()[:-1] + b"\x07")
    assert len(verify(folder, workers=1)) == 3


@pytest.mark.parametrize(
    ("spacings", "spacing"),
    [(dict.fromkeys("abc", (1.0, 1.0, 2.0)), Keep.AUTO), (SPACINGS, Keep.OFF)],
)
def test_without_resampling_images_are_as_their_files_have_them(
    tmp_path, capsys, spacings, spacing
):
    data = spaced_set(tmp_path / "data", spacings)
    manifest = prepare(data, tmp_path / "store", **ALL, spacing=spacing)
    assert manifest.target_spacing_mm is None
    assert ("by --spacing" in capsys.readouterr().out) == (spacing is Keep.OFF)
    store = open_store(tmp_path / "store")
    for record in manifest.cases:
        assert record.spacing_mm == pytest.approx(spacings[record.case_id])
        image = to_ras(*read_volume(data / f"imagesTr/{record.case_id}.nii.gz"))
        np.testing.assert_array_equal(store.image(record.case_id), image)
    assert not list(tmp_path.glob("store/cases/*.t.*"))


def test_only_the_training_cases_decide(tmp_path, capsys):
    spacings = {"a": ISO, "b": ISO, "c": (2.0, 2.0, 2.0)}
    folds = [{"train": ["a"], "val": ["b"]}, {"train": ["b"], "val": ["a"]}]  # c is a test case
    data = spaced_set(tmp_path / "data", spacings)
    (tmp_path / "folds.json").write_text(json.dumps(folds))
    manifest = prepare(data, tmp_path / "store", workers=1, splits=tmp_path / "folds.json")
    assert (manifest.split["test"], manifest.target_spacing_mm) == (("c",), None)
    assert "training cases have 1 x 1 x 1 mm" in capsys.readouterr().out


@pytest.mark.parametrize("finished", [True, False])
def test_a_store_stays_at_the_spacing_that_it_was_begun_with(data, tmp_path, finished):
    store = tmp_path / "store"
    before = prepare(data, store, **ALL, spacing=(1.0, 1.0, 2.125))
    if not finished:
        (store / "manifest.json").unlink()
    for spacing in (Keep.OFF, ISO):
        with pytest.raises(InputError, match=r"--spacing must be 1 x 1 x 2\.125 mm, as store"):
            prepare(data, store, **ALL, spacing=spacing)
    assert prepare(data, store, **ALL) == before  # by auto, which would have taken another one


def test_new_cases_are_resampled_as_the_stores_own(data, tmp_path):
    few = spaced_set(tmp_path / "few", {case_id: SPACINGS[case_id] for case_id in "abd"})
    store = tmp_path / "store"
    prepare(few, store, **ALL)
    done = append(store, data, workers=1)
    assert done.new == ("c", "e", "f", "g")
    assert done.manifest.target_spacing_mm == (1.0, 1.0, 2.0)
    assert {record.shape for record in done.manifest.cases} == {(48, 40, 16)}
    assert verify(store, workers=1) == ()


def test_what_is_not_annotated_stays_so_on_both_grids(tmp_path):
    data = spaced_set(tmp_path / "data", {"a": ISO, "b": (1.0, 1.0, 2.0), "c": ISO})
    with dataset_json(data) as content:
        content["labels"]["9"] = "not drawn"
    path = data / "labelsTr/b.nii.gz"
    label, geometry = read_volume(path)
    label = to_ras(label, geometry).copy()
    label[28:] = 9  # about the half of the field, in which the head reaches
    write_volume(path, label, geometry)
    manifest = prepare(data, tmp_path / "store", **ALL, ignore=9)
    assert (manifest.ignore, manifest.target_spacing_mm) == (9, ISO)
    store = open_store(tmp_path / "store")
    np.testing.assert_array_equal(store.truth("b"), label)
    half = np.zeros((48, 40, 32), bool)
    half[28:] = True
    box = store.case("b").box.slices(half.shape)
    np.testing.assert_array_equal((store.label("b") == 9)[box], half[box])
