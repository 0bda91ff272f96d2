import contextlib
import errno
import os
import pickle
import subprocess
import sys
import tempfile
from unittest.mock import Mock

import pytest

from cpu3d.errors import InputError, NoRoomError
from cpu3d.util.atomic import (
    PARTIAL,
    atomic_write,
    remove_partials,
    replace_files,
    writable_folder,
    write_bytes,
    write_json,
)
from cpu3d.util.child import ROOT


@pytest.fixture
def path(tmp_path):
    """A file that is there."""
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    return path


def test_the_old_file_stays_until_the_new_one_is_whole(path):
    with atomic_write(path) as file:
        file.write(b"new and longer")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new and longer"
    assert os.listdir(path.parent) == ["a.bin"]
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(path, {"b": float("nan")})
    assert path.read_bytes() == b"new and longer"


def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(path):
    with contextlib.suppress(KeyboardInterrupt), atomic_write(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old"
    assert os.listdir(path.parent) == ["a.bin"]


def test_the_content_is_on_the_disk_before_the_name_and_then_the_name(path, monkeypatch):
    synced = {}

    def fsync(handle):
        synced[os.fstat(handle).st_ino] = path.read_bytes()

    monkeypatch.setattr(os, "fsync", fsync)
    write_bytes(path, b"new")
    assert synced == {path.stat().st_ino: b"old", path.parent.stat().st_ino: b"new"}


def test_a_full_disk_names_the_file_and_that_nothing_is_lost(path, monkeypatch):
    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(NoRoomError) as raised:
        write_bytes(path, bytes(3 << 20))
    rule = f"{path} must fit on its disk, got No space left on device;"
    assert str(raised.value).startswith(rule)
    again = pickle.loads(pickle.dumps(raised.value))  # as it comes from another process
    assert str(again) == str(raised.value)
    assert path.read_bytes() == b"old"
    assert os.listdir(path.parent) == ["a.bin"]


def test_only_unfinished_files_of_this_program_are_removed(path):
    folder = path.parent
    (folder / f".b.bin.1234{PARTIAL}").touch()  # as a killed process leaves it
    (folder / ".film.mkv.partial").touch()  # a browser's
    (folder / f".export.7{PARTIAL}").mkdir()  # being written by another process
    remove_partials(folder, folder / "none")
    assert {*os.listdir(folder)} == {".film.mkv.partial", f".export.7{PARTIAL}", "a.bin"}


KILLED = """
import os, sys
from pathlib import Path
from cpu3d.util.atomic import replace_files
left = int(sys.argv[2])
rename = Path.rename

def counted(*paths):
    global left
    left -= 1
    if left < 0:
        os._exit(9)
    return rename(*paths)

Path.rename = counted
with replace_files(Path(sys.argv[1]), ("a", "b")) as folder:
    for name in "ab":
        (folder / name).write_text("new")
"""


@pytest.mark.parametrize("renames", [0, 1, 2, 3, 4])
def test_a_process_that_is_killed_between_two_files_leaves_no_mixture(tmp_path, renames):
    for name in "ab":
        (tmp_path / name).write_text("old")
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(renames)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment)
    assert done.returncode == (9 if renames < 4 else 0)
    if (tmp_path / "b").exists():
        assert (tmp_path / "a").read_text() == (tmp_path / "b").read_text()
    with contextlib.suppress(KeyError), replace_files(tmp_path, ("a", "b")):
        raise KeyError
    assert len({(tmp_path / name).read_text() for name in "ab"}) == 1
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_a_folder_to_write_to_is_made_or_refused_with_the_reason(path):
    assert writable_folder(path.parent / "a/b", "--out").is_dir()
    with pytest.raises(InputError, match=f"--out {path} must be a folder to write to, got a file"):
        writable_folder(path, "--out")


@pytest.mark.parametrize(
    ("code", "kind", "problem"),
    [
        (errno.EACCES, InputError, "got Permission denied; choose another, or change its perm"),
        (errno.EDQUOT, NoRoomError, "must fit on its disk, got Disk quota .*; free space there"),
    ],
)
def test_a_folder_that_cannot_be_written_to_is_refused_with_what_to_do(
    tmp_path, monkeypatch, code, kind, problem
):
    refused = Mock(side_effect=OSError(code, os.strerror(code)))
    monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    with pytest.raises(kind, match=problem):
        writable_folder(tmp_path, "--out")
