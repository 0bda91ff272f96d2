"""A checkpoint comes back as it was, or not at all."""

import errno
import io
import zipfile

import numpy as np
import pytest

from cpu3d.errors import InputError
from cpu3d.training.checkpoint import DamagedCheckpointError, load_checkpoint, save_checkpoint
from cpu3d.util import atomic

ARRAYS = {"model/000": np.arange(6, dtype="f4").reshape(2, 3), "updates": np.array(7)}


def test_arrays_and_state_come_back(tmp_path):
    size = save_checkpoint(tmp_path / "last.npz", ARRAYS, {"step": 3, "best": None})
    arrays, state = load_checkpoint(tmp_path / "last.npz")
    assert state == {"step": 3, "best": None}
    assert set(arrays) == set(ARRAYS)
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(arrays[name], array)
        assert arrays[name].dtype == array.dtype
    assert size == (tmp_path / "last.npz").stat().st_size


@pytest.mark.parametrize("damage", ["cut", "flip", "empty"])
def test_a_damaged_file_is_refused_by_name(tmp_path, damage):
    path = tmp_path / "last.npz"
    save_checkpoint(path, {"model/000": np.ones(1000, "f4")}, {"step": 3})
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
    path.write_bytes({"cut": content[:-50], "flip": content, "empty": b""}[damage])
    with pytest.raises(InputError, match=r"last\.npz must be whole"):
        load_checkpoint(path)


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "last.npz"
    save_checkpoint(path, ARRAYS, {"step": 3})

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(atomic.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(path, ARRAYS, {"step": 4})
    monkeypatch.undo()
    assert load_checkpoint(path)[1]["step"] == 3
    assert [file.name for file in tmp_path.iterdir()] == ["last.npz"]


def test_another_version_is_refused(tmp_path):
    save_checkpoint(tmp_path / "last.npz", ARRAYS, {"schema": 99})
    with pytest.raises(InputError, match="must have schema 1, got 99"):
        load_checkpoint(tmp_path / "last.npz")


def test_a_header_that_lies_is_damage_and_takes_no_memory(tmp_path):
    path, lie = tmp_path / "last.npz", io.BytesIO()
    save_checkpoint(path, {}, {"schema": 1, "names": ["model/000"]})
    np.lib.format.write_array_header_1_0(lie, {"descr": "<f4", "fortran_order": False, "shape": (2**40,)})
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("model/000.npy", lie.getvalue())
    with pytest.raises(DamagedCheckpointError, match="must be whole"):
        load_checkpoint(path)


def test_arrays_are_those_that_were_checked_whatever_happens_to_the_file(tmp_path):
    save_checkpoint(tmp_path / "last.npz", ARRAYS, {"step": 3})
    arrays, _ = load_checkpoint(tmp_path / "last.npz")
    save_checkpoint(tmp_path / "last.npz", {name: 0 * array for name, array in ARRAYS.items()}, {"step": 4})
    (tmp_path / "last.npz").unlink()
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(arrays[name], array)


def test_a_missing_one_is_refused(tmp_path):
    with pytest.raises(InputError, match="must exist, found none"):
        load_checkpoint(tmp_path / "best.npz")


def test_no_flipped_bit_loads_as_something_else(tmp_path):
    """Header, data, directory: whichever byte is hit, the file is refused or comes back as it was."""
    path = tmp_path / "last.npz"
    save_checkpoint(path, {"model/000": np.arange(24, dtype="f4").reshape(2, 3, 4)}, {"step": 3})
    good = path.read_bytes()
    for position in range(len(good)):
        path.write_bytes(good[:position] + bytes([good[position] ^ 1 << position % 8]) + good[position + 1 :])
        try:
            arrays, state = load_checkpoint(path)
        except InputError:
            continue
        assert state == {"step": 3}
        assert set(arrays) == {"model/000"}
        np.testing.assert_array_equal(arrays["model/000"].ravel(), np.arange(24))
        assert arrays["model/000"].shape == (2, 3, 4)
