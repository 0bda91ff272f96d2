import json
import os
import resource
import signal
import stat

import pytest

from cpu3d.atomic import atomic_write, write_json


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


def test_json_is_written_whole_and_never_with_nan(tmp_path):
    write_json(tmp_path / "a.json", {"b": [1, 2.5]})
    assert json.loads((tmp_path / "a.json").read_text()) == {"b": [1, 2.5]}
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(tmp_path / "a.json", {"b": float("nan")})
    assert json.loads((tmp_path / "a.json").read_text()) == {"b": [1, 2.5]}
