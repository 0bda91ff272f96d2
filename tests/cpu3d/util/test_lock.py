"""One process at a time in a folder. A second handle on it locks like a second process."""

import contextlib
import errno
import fcntl
from unittest.mock import Mock

import pytest

from cpu3d.errors import InputError
from cpu3d.util.lock import locked


def test_a_second_one_is_refused_until_the_first_is_done_or_has_failed(tmp_path):
    (tmp_path / "below").mkdir()
    with locked(tmp_path, "run"), locked(tmp_path / "below", "run"):
        rule = f"run {tmp_path} must be written by one process at a time"
        with pytest.raises(InputError, match=rule), locked(tmp_path, "run"):
            pytest.fail("both are in")
    with contextlib.suppress(KeyError), locked(tmp_path, "run"):
        raise KeyError
    with locked(tmp_path, "run"):
        pass


def test_a_file_system_without_locks_is_no_obstacle(tmp_path, monkeypatch):
    unsupported = Mock(side_effect=OSError(errno.ENOLCK, "No locks available"))
    monkeypatch.setattr(fcntl, "flock", unsupported)
    with locked(tmp_path, "run"):
        pass
