"""The file that a worker writes, read whole, damaged and while it is written."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cpu3d.training.guard.heartbeat import (
    Heartbeat,
    Unreadable,
    heartbeat_path,
    is_suspended,
    process_start,
    read_heartbeats,
    this_place,
    write_heartbeat,
)
from tests.cpu3d.training.guard.beats import beat


def test_what_is_written_is_read(tmp_path):
    written = {rank: beat(rank=rank, workers=12) for rank in (0, 11)}
    for one in written.values():
        write_heartbeat(tmp_path, one)
    assert read_heartbeats(tmp_path) == written
    assert {path.name for path in (tmp_path / "heartbeats").iterdir()} == {"worker-0.json", "worker-11.json"}


def test_a_run_without_heartbeats_has_none(tmp_path):
    assert read_heartbeats(tmp_path) == {}
    (tmp_path / "heartbeats").write_text("a file")
    assert read_heartbeats(tmp_path) == {}


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda text: "", "must be JSON"),
        (lambda text: text[: len(text) // 2], "must be JSON"),
        (lambda text: "\0" * len(text), "must be JSON"),
        (lambda text: "[1, 2]", "must be JSON with a schema"),
        (lambda text: text.replace('"schema": 1', '"schema": 2'), "must have schema 1, got 2"),
        (lambda text: text.replace('"pid"', '"pit"'), "must be complete"),
        (lambda text: text.replace('"step": 120', '"step": "many"'), "heartbeat.step must be int, got many"),
        (
            lambda text: text.replace('"checkpoint_step": 110', '"checkpoint_step": "x"'),
            "heartbeat.checkpoint_step must be",
        ),
    ],
)
def test_a_damaged_file_is_told_and_no_other_is_lost(tmp_path, damage, said):
    for rank in (0, 1):
        write_heartbeat(tmp_path, beat(rank=rank, workers=2))
    path = heartbeat_path(tmp_path, 1)
    path.write_text(damage(path.read_text()))
    found = read_heartbeats(tmp_path)
    assert isinstance(found[0], Heartbeat)
    assert isinstance(found[1], Unreadable)
    assert said in found[1]
    assert str(path) in found[1]
    assert found[1].endswith(
        ("; a worker that lives writes it anew with its next beat", "; look with the version that runs")
    )


def test_a_reader_never_sees_half_a_file(tmp_path):
    write_heartbeat(tmp_path, beat())
    done = threading.Event()

    def write():
        for step in range(300):
            write_heartbeat(tmp_path, beat(step=step))
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    seen = []
    while not done.is_set():
        seen.append(read_heartbeats(tmp_path)[0])
    thread.join()
    assert all(isinstance(one, Heartbeat) for one in seen)


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from tests.cpu3d.training.guard.beats import beat
from cpu3d.training.guard.heartbeat import read_heartbeats, write_heartbeat
run = Path(sys.argv[1])
write_heartbeat(run, beat(step=1))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
try:
    write_heartbeat(run, beat(step=2))
except OSError as error:
    print("refused", read_heartbeats(run)[0].step, sorted(path.name for path in (run / "heartbeats").iterdir()))
"""


def test_a_file_that_cannot_be_written_leaves_the_old_one_and_nothing_else(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True, cwd=Path(__file__).parents[4]
    )
    assert done.stdout == "refused 1 ['worker-0.json']\n", done.stderr


def test_a_process_is_told_from_a_later_one_with_its_number():
    ours = process_start(os.getpid())
    assert ours == process_start(os.getpid())
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        theirs = process_start(other.pid)
        assert theirs >= ours
        assert not is_suspended(other.pid)
        other.stdin.close()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        assert process_start(other.pid) is None, "a zombie"
    assert process_start(other.pid) is None


@pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="needs /proc")
def test_a_process_may_be_named_anything(tmp_path):
    name = tmp_path / "a) Z ("
    name.symlink_to("/bin/sleep")
    with subprocess.Popen([str(name), "60"]) as odd:
        try:
            assert process_start(odd.pid) >= process_start(os.getpid())
        finally:
            odd.kill()


def test_this_place_is_the_same_for_a_child():
    script = "from cpu3d.training.guard.heartbeat import this_place; print(this_place())"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[4]
    )
    assert done.stdout.strip() == this_place()


def test_the_content_is_json_of_one_level(tmp_path):
    write_heartbeat(tmp_path, beat())
    content = json.loads(heartbeat_path(tmp_path, 0).read_text())
    assert content["schema"] == 1
    assert not any(isinstance(value, (dict, list)) for value in content.values())
