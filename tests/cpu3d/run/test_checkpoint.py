"""A checkpoint comes back as it was, or not at all; none is there without its log; none is damaged
that is not."""

import errno
import json
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest

from cpu3d.errors import InputError
from cpu3d.run.checkpoint import (
    DamagedCheckpointError,
    load_checkpoint,
    newest,
    save_checkpoint,
    weights_file,
    write_next,
)
from cpu3d.run.log import append_event, read_events

ARRAYS = {"model/000": np.arange(6, dtype="f4").reshape(2, 3), "updates": np.array(7)}


def test_another_version_and_a_missing_one_are_refused(tmp_path):
    save_checkpoint(tmp_path / "last.npz", ARRAYS, {"schema": 99})
    with pytest.raises(InputError, match="must have schema 1, got 99"):
        load_checkpoint(tmp_path / "last.npz")
    with pytest.raises(InputError, match="must exist, found none"):
        load_checkpoint(tmp_path / "best.npz")


def test_best_weights_that_are_lost_are_named_with_what_to_do(tmp_path):
    with pytest.raises(InputError, match="must hold its best weights, found none"):
        weights_file(tmp_path, "best")
    (tmp_path / "checkpoints").mkdir()
    best = tmp_path / "checkpoints/best.npz"
    best.write_bytes(b"PK")
    with pytest.raises(
        DamagedCheckpointError, match=r"best\.npz must be whole.*`train`.*--weights last"
    ):
        load_checkpoint(best)


def test_arrays_and_state_come_back_as_they_were_checked_whatever_happens_to_the_file(tmp_path):
    path = tmp_path / "last.npz"
    size = save_checkpoint(path, ARRAYS, {"step": 3, "best": None})
    assert size == path.stat().st_size
    arrays, state = load_checkpoint(path)
    assert state == {"step": 3, "best": None}
    save_checkpoint(path, {name: 0 * array for name, array in ARRAYS.items()}, {"step": 4})
    path.unlink()
    np.testing.assert_equal(dict(arrays), ARRAYS)
    assert arrays["model/000"].dtype == np.float32


def test_no_flipped_bit_loads_as_something_else(tmp_path):
    """Header, data, directory: whichever byte is hit, the file is refused or comes back as it
    was."""
    path = tmp_path / "last.npz"
    save_checkpoint(path, ARRAYS, {"step": 3})
    good = path.read_bytes()
    for position in range(len(good)):
        flipped = bytes([good[position] ^ 1 << position % 8])
        path.write_bytes(good[:position] + flipped + good[position + 1 :])
        try:
            arrays, state = load_checkpoint(path)
        except InputError:
            continue
        assert state == {"step": 3}
        np.testing.assert_equal(dict(arrays), ARRAYS)


@pytest.mark.parametrize(
    ("packing", "shape"), [(zipfile.ZIP_STORED, b"(9, 9)"), (zipfile.ZIP_DEFLATED, b"(2, 3)")]
)
def test_a_header_that_lies_about_sizes_is_damage_although_its_sums_are_right(
    tmp_path, packing, shape
):
    path = tmp_path / "last.npz"
    save_checkpoint(path, ARRAYS, {})
    with zipfile.ZipFile(path) as file:
        members = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(path, "w", packing) as file:
        for name, content in members.items():
            file.writestr(name, content.replace(b"(2, 3)", shape))
    with pytest.raises(DamagedCheckpointError, match="must be whole"):
        load_checkpoint(path)


# --- Of a run ---


@pytest.fixture
def run(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    for step in (1, 2):
        save(tmp_path, step)
    return tmp_path


def save(run, step):
    append_event(run, {"event": "step", "step": step})
    write_next(run, step, {"model/000": np.zeros(5000)}, {"step": step})


@pytest.mark.parametrize("error", [OSError(errno.ESTALE, "Stale file handle"), MemoryError()])
def test_a_checkpoint_that_cannot_be_read_just_now_is_not_damaged(run, monkeypatch, error):
    def fail(file):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(zipfile.ZipFile, "testzip", fail)
        with pytest.raises(type(error)):
            newest(run)
    checkpoint = newest(run)
    assert (checkpoint.state["step"], checkpoint.damaged) == (2, {})


def test_a_folder_that_cannot_be_listed_is_not_one_without_checkpoints(run, monkeypatch):
    def denied(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "listdir", denied)
    with pytest.raises(PermissionError):
        newest(run)


def test_a_power_cut_leaves_no_checkpoint_without_its_log_lines(tmp_path, monkeypatch):
    """Only synced content of a file outlives it, and of a folder the names that were in it at its
    sync."""
    (tmp_path / "checkpoints").mkdir()
    log = tmp_path / "log.jsonl"
    disk = {}
    left = []
    fsync = os.fsync
    replace = os.replace

    def synced(handle):
        fsync(handle)
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        disk[path] = list(path.iterdir()) if path.is_dir() else path.read_bytes().splitlines()

    def replaced(old, new):
        replace(old, new)
        if Path(new).name.startswith("step-"):
            lines = disk[log] if log in disk.get(tmp_path, ()) else []
            left.append([json.loads(line)["step"] for line in lines])

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    for step in (1, 2, 3):
        save(tmp_path, step)
    assert left == [[1], [1, 2], [1, 2, 3]]
    assert len(read_events(tmp_path)) == 3
