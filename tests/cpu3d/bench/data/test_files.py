"""The benchmark's files: the same voxels in every form, found again by a second run, removed without a trace."""

import dataclasses

import nibabel
import numpy as np
import pytest

from cpu3d.bench.data.ct_phantom import AIR_HU, ct_case
from cpu3d.bench.data.files import Files, array_files, ct_files
from cpu3d.bench.data.scale import TINY
from cpu3d.data.store import open_store
from cpu3d.errors import InputError


def test_a_case_has_the_same_voxels_in_every_form(bench_files):
    paths = bench_files.one_case()
    store = open_store(paths["npy"])
    (record,) = store.cases("train")
    image = store.image(record.case_id)
    assert image.shape == (*TINY.case, 4)
    for dtype in ("float32", "int16"):
        for ending in ("nii", "nii.gz"):
            found = nibabel.load(paths[f"{dtype}.{ending}"])
            assert found.get_data_dtype() == np.dtype(dtype)
            np.testing.assert_array_equal(np.asarray(found.dataobj), image)
    packed = open_store(paths["b2nd"])
    np.testing.assert_array_equal(packed.image(record.case_id), image)
    assert open_store(paths["float16"]).cases("train")[0].image_dtype == "float16"


def test_cts_have_the_same_voxels_in_every_form(bench_files):
    folders = bench_files.cts()
    store = open_store(folders["npy"])
    records = store.cases("train")
    assert len(records) == TINY.cts
    for name in ("nii", "gz"):
        pairs = ct_files(folders[name], name == "gz")
        for record, (image, label) in zip(records, pairs):
            np.testing.assert_array_equal(np.asarray(nibabel.load(image).dataobj), store.image(record.case_id)[..., 0])
            np.testing.assert_array_equal(np.asarray(nibabel.load(label).dataobj), store.label(record.case_id))


def test_a_ct_is_air_outside_and_depends_on_its_seed_alone():
    image, label = ct_case((20, 24, 16), 3)
    again, _ = ct_case((20, 24, 16), 3)
    other, _ = ct_case((20, 24, 16), 4)
    np.testing.assert_array_equal(image, again)
    assert not np.array_equal(image, other)
    assert (image[0] == AIR_HU).all()
    assert (image[:, 0] == AIR_HU).all()
    assert image[label == 1].min() > 0
    assert 0.002 < label.mean() < 0.02
    assert image[10, 12, 8] > -300


def test_a_large_store_has_its_entries_over_the_arrays_of_a_few(bench_files):
    store = open_store(bench_files.many())
    records = store.cases("train")
    assert len(records) == TINY.originals * TINY.copies
    assert len({record.stem for record in records}) == TINY.originals
    inodes = {path.stat().st_ino for path in array_files(store.folder)}
    assert len(inodes) == 8  # four phantoms, an image and a label each


def test_files_are_made_once_and_anew_for_other_sizes(tmp_path):
    files = Files(tmp_path / "work", TINY)
    before = {name: path.stat().st_mtime_ns for name, path in files.one_case().items()}
    again = Files(tmp_path / "work", TINY).one_case()
    assert {name: path.stat().st_mtime_ns for name, path in again.items()} == before
    other = Files(tmp_path / "work", dataclasses.replace(TINY, case=(28, 28, 24))).one_case()
    assert open_store(other["npy"]).manifest.largest_shape == (28, 28, 24)


def test_a_real_case_can_take_the_phantom_s_place(tmp_path, real_cases):
    case = real_cases / "brats-gli-real" / "BraTS-GLI-99001-000"
    files = Files(tmp_path / "work", TINY, case)
    assert open_store(files.one_case()["npy"]).cases("train")[0].shape == (240, 240, 155)


def test_a_disk_without_room_for_the_cts_is_told_before_any_is_written(tmp_path):
    files = Files(tmp_path / "work", dataclasses.replace(TINY, cts=10**12))
    with pytest.raises(InputError, match=r"--workdir .* must have .* GB free for ct, got .*fewer --volumes$"):
        files.cts()


def test_a_folder_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match="must be empty or an earlier run's"):
        Files(tmp_path, TINY)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_cleaning_removes_what_was_made_and_nothing_else(tmp_path):
    files = Files(tmp_path / "work", TINY)
    files.one_case()
    files.clean()
    assert not (tmp_path / "work").exists()
    files = Files(tmp_path / "work", TINY)
    (files.folder / "notes.txt").write_text("mine")
    files.clean()
    assert [path.name for path in files.folder.iterdir()] == ["notes.txt"]
