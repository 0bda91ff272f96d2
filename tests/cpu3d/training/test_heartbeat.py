"""The file that a worker writes, read whole, damaged and while it is written; and whether the worker is alive."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from cpu3d.training import heartbeat
from cpu3d.training.heartbeat import (
    Heartbeat,
    heartbeat_path,
    life_of,
    process_start,
    read_heartbeats,
    write_heartbeat,
)
from tests.cpu3d.training.beats import beat


def test_what_is_written_is_read_as_json_of_one_level(tmp_path):
    assert read_heartbeats(tmp_path) == {}
    written = {rank: beat(rank=rank, workers=12) for rank in (0, 11)}
    for one in written.values():
        write_heartbeat(tmp_path, one)
    assert read_heartbeats(tmp_path) == written
    assert {path.name for path in (tmp_path / "heartbeats").iterdir()} == {"worker-0.json", "worker-11.json"}
    content = json.loads(heartbeat_path(tmp_path, 0).read_text())
    assert content["schema"] == 1
    assert not any(isinstance(value, (dict, list)) for value in content.values())


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[1, 2]",
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
    found = read_heartbeats(tmp_path)
    assert isinstance(found[0], Heartbeat)
    assert found[1].startswith(f"{path} must ")


def test_a_reader_never_sees_half_a_file(tmp_path):
    write_heartbeat(tmp_path, beat())
    writer = threading.Thread(target=lambda: [write_heartbeat(tmp_path, beat(step=step)) for step in range(100)])
    writer.start()
    seen = []
    while writer.is_alive():
        seen.append(read_heartbeats(tmp_path)[0])
    assert all(isinstance(one, Heartbeat) for one in seen)


def test_a_file_that_cannot_be_written_leaves_the_old_one_and_nothing_else(tmp_path, monkeypatch):
    def full(old, new):
        raise OSError(errno.ENOSPC, "No space left on device")

    write_heartbeat(tmp_path, beat(step=1))
    monkeypatch.setattr(heartbeat.os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_heartbeat(tmp_path, beat(step=2))
    assert read_heartbeats(tmp_path)[0].step == 1
    assert os.listdir(tmp_path / "heartbeats") == ["worker-0.json"]


NOW = time.time()


@pytest.mark.parametrize(
    ("changes", "life"),
    [
        ({}, "alive"),
        ({"beat": NOW - 59}, "alive"),
        ({"beat": NOW - 61}, "silent"),
        ({"process_start": 1}, "dead"),
        ({"place": "elsewhere", "process_start": 1}, "alive"),
        ({"place": "elsewhere", "beat": NOW - 500}, "silent"),
        ({"exit_code": 0, "beat": NOW - 500, "process_start": 1}, "ended"),
    ],
)
def test_a_worker_is_alive_by_the_age_of_its_beat_and_by_its_process_where_that_is_here(tmp_path, changes, life):
    assert life_of(tmp_path, beat(**changes), NOW) == life


@pytest.mark.parametrize("fast_s", [-300, 300])
def test_the_file_s_time_tells_where_the_worker_s_clock_is_slow_or_fast(tmp_path, fast_s):
    one = beat(place="elsewhere", beat=time.time() + fast_s)
    write_heartbeat(tmp_path, one)
    assert life_of(tmp_path, one) == "alive"


def test_a_process_is_told_from_others_by_its_start_and_watched_until_it_is_gone(tmp_path):
    name = tmp_path / "a) Z ("
    name.symlink_to("/bin/sleep")
    with subprocess.Popen([str(name), "60"]) as other:
        one = beat(pid=other.pid, process_start=process_start(other.pid))
        assert one.process_start >= process_start(os.getpid())
        assert life_of(tmp_path, one) == "alive"
        other.send_signal(signal.SIGSTOP)
        os.waitpid(other.pid, os.WUNTRACED)
        assert life_of(tmp_path, one) == "suspended"
        other.kill()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        assert life_of(tmp_path, one) == "dead", "a zombie"
    assert life_of(tmp_path, one) == "dead"


def test_the_place_is_the_same_for_a_child():
    script = "from cpu3d.training.heartbeat import this_place; print(this_place())"
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout.strip() == heartbeat.this_place()
