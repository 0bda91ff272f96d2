"""The file that a worker writes, read whole, damaged and while it is written; and whether the
worker is alive."""

import os
import subprocess
import time

import pytest

from cpu3d.run.heartbeat import (
    Heartbeat,
    Life,
    heartbeat_path,
    is_here,
    life_of,
    process_start,
    read_heartbeats,
    write_heartbeat,
)
from tests.cpu3d.training.beats import beat


def test_what_is_written_is_read(tmp_path):
    assert read_heartbeats(tmp_path) == {}
    written = {rank: beat(rank=rank, workers=12) for rank in (0, 11)}
    for written_beat in written.values():
        write_heartbeat(tmp_path, written_beat)
    assert read_heartbeats(tmp_path) == written


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text.replace('"schema": 1', '"schema": 2'),
        lambda text: text.replace('"pid"', '"pit"'),
        lambda text: text.replace('"step": 120', '"step": "many"'),
    ],
)
def test_a_damaged_file_is_told_and_no_other_is_lost(tmp_path, damage):
    for rank in (0, 1):
        write_heartbeat(tmp_path, beat(rank=rank, workers=2))
    path = heartbeat_path(tmp_path, 1)
    path.write_text(damage(path.read_text()))
    heartbeats = read_heartbeats(tmp_path)
    assert isinstance(heartbeats[0], Heartbeat)
    assert heartbeats[1].startswith(f"{path} must ")


def test_a_process_is_told_from_others_by_its_start_and_watched_until_it_is_gone(tmp_path):
    name = tmp_path / "a) Z ("
    name.symlink_to("/bin/sleep")
    with subprocess.Popen([str(name), "60"]) as other:
        own = beat(pid=other.pid, process_start=process_start(other.pid))
        assert own.process_start >= process_start(os.getpid())
        assert is_here(own)
        assert life_of(tmp_path, own, time.time()) is Life.ALIVE
        assert not is_here(beat(pid=other.pid, process_start=own.process_start, place="elsewhere"))
        other.kill()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        assert not is_here(own), "a zombie"
        assert life_of(tmp_path, own, time.time()) is Life.ENDED
    assert not is_here(own)


@pytest.mark.parametrize(
    ("changes", "young", "old"),
    [
        ({}, Life.ALIVE, Life.SILENT),
        ({"process_start": 1}, Life.ENDED, Life.ENDED),  # a later process has the pid
        ({"pid": 2**22 + 1}, Life.ENDED, Life.ENDED),  # above the largest pid
        ({"pid": 2**22 + 1, "place": "elsewhere"}, Life.ALIVE, Life.SILENT),
        ({"pid": 2**22 + 1, "process_start": 0}, Life.ALIVE, Life.SILENT),  # was not known
    ],
)
def test_a_worker_of_this_host_lives_by_its_process_and_any_other_by_its_beats_age(
    tmp_path, changes, young, old
):
    now = time.time()
    own = beat(beat=now, **changes)
    assert life_of(tmp_path, own, now + 59) is young
    assert life_of(tmp_path, own, now + 61) is old


def test_a_clock_that_is_off_makes_nobody_silent(tmp_path):
    now = time.time()
    own = beat(beat=now - 1000, place="elsewhere")
    write_heartbeat(tmp_path, own)
    os.utime(heartbeat_path(tmp_path, 0), (now, now))  # by the clock of the file system
    assert life_of(tmp_path, own, now) is Life.ALIVE
