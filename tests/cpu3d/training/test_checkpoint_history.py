"""The checkpoints of a run: none is taken for damaged that could only not be read, none is there without its log."""

import builtins
import errno
import io
import json
import os
from pathlib import Path

import numpy as np
import pytest

from cpu3d.training.checkpoint_history import checkpoints, newest, set_aside, write_next
from cpu3d.training.run_log import append_event, read_events


@pytest.fixture
def run(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    for step in (1, 2):
        save(tmp_path, step)
    return tmp_path


def save(run, step):
    append_event(run, {"event": "step", "step": step})
    write_next(run, step, {"model/000": np.full(5000, step, "f4")}, {"step": step}, keep=3)


def fail_to_read(monkeypatch, path, part, error):
    """Whoever reads that part of the file gets the error: what opens it, or any read that begins in a range of it."""

    class File(io.FileIO):
        def __init__(self, file, *more):
            super().__init__(file, *more)
            self.bad = Path(file) == path
            self.fail_at(self.bad and part is None)

        def fail_at(self, here):
            if here:
                raise error

        def readinto(self, buffer):
            self.fail_at(self.bad and self.tell() in part)
            return super().readinto(buffer)

        def readall(self):
            self.fail_at(self.bad and self.tell() in part)
            return super().readall()

    def opened(file, mode="r", *more, **options):
        return io.BufferedReader(File(file)) if mode == "rb" else real(file, mode, *more, **options)

    real = io.open
    monkeypatch.setattr(io, "FileIO", File)
    monkeypatch.setattr(io, "open", opened)
    monkeypatch.setattr(builtins, "open", opened)


@pytest.mark.parametrize(
    "error", [OSError(errno.ESTALE, "Stale file handle"), OSError(errno.EIO, "I/O"), MemoryError()]
)
@pytest.mark.parametrize("part", [None, range(2**20), range(10_000)], ids=["opening", "everywhere", "first half"])
def test_a_checkpoint_that_cannot_be_read_just_now_is_not_damaged(run, monkeypatch, part, error):
    with monkeypatch.context() as patch:
        fail_to_read(patch, checkpoints(run)[0], part, error)
        with pytest.raises(type(error)) as caught:
            newest(run)
    assert caught.value is error
    found = newest(run)
    assert (found.state["step"], found.damaged) == (2, ())


def test_a_folder_that_cannot_be_listed_is_not_one_without_checkpoints(run, monkeypatch):
    def denied(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "listdir", denied)
    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(PermissionError):
        newest(run)


def test_a_damaged_checkpoint_is_renamed_to_a_name_that_is_free(run):
    path = checkpoints(run)[0]
    path.write_bytes(b"damaged")
    kept = path.with_suffix(".damaged1")
    kept.write_bytes(b"an earlier one")
    found = newest(run)
    assert found.state["step"] == 1
    set_aside(found)
    assert kept.read_bytes() == b"an earlier one"
    assert path.with_suffix(".damaged").read_bytes() == b"damaged"


def test_a_power_cut_leaves_no_checkpoint_without_its_log_lines(tmp_path, monkeypatch):
    """Of a file only what was synced outlives it, of a folder the names that were in it then."""
    (tmp_path / "checkpoints").mkdir()
    disk, left = {}, []
    fsync, replace = os.fsync, os.replace

    def synced(handle):
        fsync(handle)
        path = os.readlink(f"/proc/self/fd/{handle}")
        disk[path] = set(os.listdir(path)) if os.path.isdir(path) else Path(path).read_bytes()

    def replaced(old, new):
        replace(old, new)
        if Path(new).name.startswith("step-"):
            there = "log.jsonl" in disk.get(str(tmp_path), ())
            lines = disk.get(str(tmp_path / "log.jsonl"), b"").splitlines() if there else []
            left.append([json.loads(line)["step"] for line in lines])

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    for step in (1, 2, 3):
        save(tmp_path, step)
    assert left == [[1], [1, 2], [1, 2, 3]]
    assert len(read_events(tmp_path)) == 3
