import json
import os
import resource
import signal
import stat
import tempfile
from pathlib import Path

import pytest

from cpu3d.errors import InputError
from cpu3d.util import atomic
from cpu3d.util.atomic import atomic_write, remove_partials, writable_folder, write_json


def test_the_old_file_stays_until_the_new_one_is_whole(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    with atomic_write(path) as file:
        file.write(b"new and longer")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new and longer"
    assert os.listdir(tmp_path) == ["a.bin"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(tmp_path, error):
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")

    def write_half():
        with atomic_write(path) as file:
            file.write(b"half")
            raise error

    with pytest.raises(error if isinstance(error, type) else OSError):
        write_half()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.bin"]


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"), atomic_write(tmp_path / "a.bin") as file:
            file.write(b"x" * 100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert os.listdir(tmp_path) == []


def test_files_are_as_readable_as_the_umask_says(tmp_path):
    before = os.umask(0o027)
    try:
        with atomic_write(tmp_path / "a", "w") as file:
            file.write("é")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640
    assert (tmp_path / "a").read_text(encoding="utf-8") == "é"


def test_the_umask_is_read_and_never_changed_while_other_threads_may_make_files(tmp_path, monkeypatch):
    if "\nUmask:" not in Path("/proc/self/status").read_text():
        pytest.skip("this kernel does not tell the umask")
    monkeypatch.setattr(os, "umask", lambda mask: pytest.fail("the umask was changed"))
    write_json(tmp_path / "a.json", {})


def test_where_the_kernel_does_not_tell_the_umask_it_is_asked_once(monkeypatch):
    atomic._umask_by_setting.cache_clear()
    asked, real = [], os.umask
    monkeypatch.setattr(os, "umask", lambda mask: asked.append(mask) or real(mask))
    before = real(0o027)
    try:
        assert (atomic._umask_by_setting(), atomic._umask_by_setting()) == (0o027, 0o027)
    finally:
        real(before)
        atomic._umask_by_setting.cache_clear()
    assert asked == [0o077, 0o027]


def test_only_unfinished_files_of_this_program_are_swept(tmp_path):
    with atomic_write(tmp_path / "a.bin"):
        (unfinished,) = tmp_path.iterdir()
        os.link(unfinished, tmp_path / unfinished.name.replace("a.bin", "b.bin"))  # as a killed process leaves it
    (tmp_path / ".film.mkv.partial").write_bytes(b"a browser's")
    (tmp_path / f".export.7{atomic.PARTIAL}").mkdir()  # being written by another process
    remove_partials(tmp_path, tmp_path / "none")
    assert sorted(os.listdir(tmp_path)) == sorted([".film.mkv.partial", f".export.7{atomic.PARTIAL}", "a.bin"])


def test_a_folder_to_write_to_is_made_and_left_empty(tmp_path):
    assert writable_folder(tmp_path / "a/b", "--out") == tmp_path / "a/b"
    assert os.listdir(writable_folder(tmp_path / "a/b", "--out")) == []


def test_a_folder_that_cannot_be_written_is_refused_with_the_reason(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(InputError, match=f"--out {file} must be a folder to write to, got a file; choose another"):
        writable_folder(file, "--out")
    with pytest.raises(InputError, match="got Not a directory; choose another or mend its permissions"):
        writable_folder(file / "below", "--out")

    def denied(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", denied)
    with pytest.raises(InputError, match="got Permission denied"):
        writable_folder(tmp_path, "--out")


def test_json_is_written_whole_and_never_with_nan(tmp_path):
    write_json(tmp_path / "a.json", {"b": [1, 2.5]})
    assert json.loads((tmp_path / "a.json").read_text()) == {"b": [1, 2.5]}
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(tmp_path / "a.json", {"b": float("nan")})
    assert json.loads((tmp_path / "a.json").read_text()) == {"b": [1, 2.5]}
