"""What a heartbeat says of its worker, by its process where that is here, else by its age."""

import os
import signal
import subprocess
import sys
import time

import pytest

from cpu3d.report.status.worker_state import state_of
from cpu3d.training.heartbeat import heartbeat_path, process_start, write_heartbeat
from tests.cpu3d.training.beats import beat


def state(run, one, written_s_ago=0.0):
    write_heartbeat(run, one)
    written = time.time() - written_s_ago
    os.utime(heartbeat_path(run, one.rank), (written, written))
    return state_of(run, one)


@pytest.mark.parametrize(
    ("changes", "written_s_ago", "expected", "said"),
    [
        ({}, 0, "running", ""),
        ({"phase": "starting"}, 0, "starting", ""),
        ({"stop": "memory must keep"}, 0, "stopping", "memory must keep"),
        ({"stalled": "the run must give a sign"}, 0, "stalled", "the run must give a sign"),
        ({"process_start": 1}, 0, "dead", "is gone without a word"),
        ({"beat": time.time() - 500}, 500, "silent", "look at process"),
        ({"place": "elsewhere"}, 0, "running", ""),
        ({"place": "elsewhere", "process_start": 1}, 0, "running", ""),
        ({"place": "elsewhere", "beat": time.time() - 500}, 500, "silent", "look on node-17 whether process"),
        # Its clock is five minutes slow, or fast; the file's tells.
        ({"place": "elsewhere", "beat": time.time() - 300}, 3, "running", ""),
        ({"place": "elsewhere", "beat": time.time() + 300}, 3, "running", ""),
        ({"exit_code": 0, "reason": "early stop"}, 500, "finished", "early stop"),
        ({"exit_code": 0, "reason": "finished", "process_start": 1}, 500, "finished", "finished"),
        ({"exit_code": 1, "reason": "OSError: full"}, 0, "failed", "OSError: full"),
        ({"exit_code": 2, "reason": "bad"}, 0, "failed", "bad"),
        ({"exit_code": 3}, 0, "too large", ""),
        ({"exit_code": 4}, 0, "diverged", ""),
        ({"exit_code": 5, "stop": "low"}, 0, "out of memory", ""),
        ({"exit_code": 6, "stalled": "hangs"}, 0, "broken off", ""),
        ({"exit_code": 130}, 0, "interrupted", ""),
        ({"exit_code": 143}, 0, "interrupted", ""),
    ],
)
def test_a_worker_is_in_the_state_that_its_heartbeat_tells(tmp_path, changes, written_s_ago, expected, said):
    found = state(tmp_path, beat(**changes), written_s_ago)
    assert found.state == expected
    assert said in found.detail
    assert found.is_fine is (expected in ("running", "starting", "stopping", "finished"))


def test_a_process_is_watched_while_it_lives_is_suspended_and_dies(tmp_path):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        try:
            one = beat(pid=other.pid, process_start=process_start(other.pid))
            assert state(tmp_path, one).state == "running"
            other.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, other.pid, os.WSTOPPED)
            suspended = state(tmp_path, one)
            assert suspended.state == "suspended"
            assert f"kill -CONT {other.pid}" in suspended.detail
        finally:
            other.kill()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        assert state(tmp_path, one).state == "dead", "a zombie"
    assert state(tmp_path, one).state == "dead"
