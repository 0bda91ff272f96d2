"""The benchmark's files, the same voxels in every form; rounds that take turns; pages dropped; a disk made slow."""

import dataclasses
import os

import nibabel
import numpy as np
import pytest

from cpu3d.bench.data import timing
from cpu3d.bench.data.files import AIR_HU, TINY, Files, array_files, ct_case, ct_files
from cpu3d.bench.data.timing import drop_pages, in_turn, read_through, resident_bytes, slow_disk, touch
from cpu3d.data.files.reader import MEMORY, file_system
from cpu3d.data.store import open_store
from cpu3d.data.stores.phantom import write_phantom
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


def test_a_case_of_one_s_own_can_take_the_phantom_s_place(tmp_path):
    write_phantom(tmp_path / "mine", cases=1, shape=(28, 28, 24), seed=5, workers=1)
    store = open_store(Files(tmp_path / "work", TINY, tmp_path / "mine").one_case()["npy"])
    assert store.cases("train")[0].shape == (28, 28, 24)


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


def test_variants_take_turns_and_a_first_round_is_not_counted():
    calls = []

    def variant(name, seconds):
        def work(number):
            calls.append((name, number))
            return seconds + number

        return work

    found = in_turn({"a": variant("a", 1.0), "b": variant("b", 10.0)}, 2)
    assert found == {"a": [1.0, 2.0], "b": [10.0, 11.0]}
    assert calls == [("a", 0), ("b", 0), ("a", 0), ("b", 0), ("a", 1), ("b", 1)]


@pytest.mark.parametrize("order", ["C", "F"])
def test_touching_reads_one_value_of_every_page_in_either_order(order):
    array = np.zeros((64, 64), np.float32, order=order)
    array.ravel(order="K")[::1024] = 1
    assert touch(array) == 4


@pytest.fixture
def on_disk(tmp_path):
    if file_system(tmp_path) in MEMORY:
        pytest.skip("needs a temporary folder on a disk: pages of a file system in memory cannot be dropped")
    return tmp_path


def test_pages_are_there_after_reading_and_gone_after_dropping(on_disk):
    path = on_disk / "file"
    path.write_bytes(os.urandom(300_000))
    read_through([path])
    assert resident_bytes(path) == 300_000
    assert drop_pages([path]) == 0
    assert resident_bytes(path) == 0
    read_through([path])
    assert resident_bytes(path) == 300_000


def test_pages_in_use_are_told_as_kept(on_disk):
    path = on_disk / "file"
    path.write_bytes(os.urandom(400_000))
    drop_pages([path])
    held = np.memmap(path, np.uint8, "r")
    assert held[:4096].sum() > 0
    assert 0 < drop_pages([path]) <= 1


def test_a_slow_disk_is_a_group_that_goes_or_none(tmp_path, monkeypatch):
    with slow_disk(tmp_path, 20_000_000) as group:
        assert not group or os.path.isdir(group)
    assert not group or not os.path.exists(group)
    made = tmp_path / "groups" / "blkio"
    made.mkdir(parents=True)
    (made / "cgroup.procs").touch()
    monkeypatch.setattr(timing, "CGROUPS", tmp_path / "groups")
    with slow_disk(tmp_path, 1000) as group:
        assert group == ""  # without the setting there is no controller
    assert [path.name for path in made.iterdir()] == ["cgroup.procs"]
