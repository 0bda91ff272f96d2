"""The jobs here are expressions for `eval`: a spawned process can import that, wherever the tests lie."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from cpu3d.errors import InputError
from cpu3d.util.workers import KILLED, run_jobs, worker_count

DIE = "__import__('os')._exit(9)"
SLEEP = "__import__('time').sleep(60)"
MAIN = "import sys; from cpu3d.util.workers import run_jobs\nfor _ in run_jobs(eval, sys.argv[1:], 2): pass"


@pytest.mark.parametrize("workers", [1, 2])
def test_every_job_comes_back_with_its_result(workers):
    results = dict(run_jobs(eval, ["1 + 1", "2 + 2", "3 + 3"], workers))
    assert results == {"1 + 1": 2, "2 + 2": 4, "3 + 3": 6}


def test_one_worker_is_this_process():
    assert dict(run_jobs(eval, ["__import__('os').getpid()"], 8)).popitem()[1] == os.getpid()


def test_a_job_that_kills_its_process_is_told_and_the_others_are_done():
    assert dict(run_jobs(eval, ["1 + 1", DIE, "2 + 2", "3 + 3"], 2)) == {
        "1 + 1": 2,
        DIE: KILLED,
        "2 + 2": 4,
        "3 + 3": 6,
    }


def test_a_job_whose_process_dies_once_is_tried_again_alone(tmp_path):
    marker = tmp_path / "tried"
    once = f"__import__('os').path.exists({str(marker)!r}) or (open({str(marker)!r}, 'w').close(), {DIE})"
    assert dict(run_jobs(eval, [once, "1 + 1"], 2)) == {once: True, "1 + 1": 2}


def workers_left():
    """Worker processes that still run, as the kernel has it: multiprocessing's own list can lag behind shared joins."""
    children = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in children if "spawn_main" in " ".join(child.cmdline())]


def test_what_a_job_raises_is_raised_here_and_no_process_is_left():
    with pytest.raises(ZeroDivisionError):
        list(run_jobs(eval, ["1 / 0", SLEEP], 2))
    assert workers_left() == []


def test_closing_ends_the_processes_at_once():
    started = time.monotonic()
    with contextlib.closing(run_jobs(eval, ["1 + 1", SLEEP, SLEEP], 2)) as results:
        assert next(results) == ("1 + 1", 2)
    assert workers_left() == []
    assert time.monotonic() - started < 55, "they would sleep for 60 s"


def test_workers_leave_ctrl_c_to_their_parent():
    blocked = "__import__('signal').pthread_sigmask(0, [])"
    for _, signals in run_jobs(eval, [blocked, blocked], 2):
        assert signal.SIGINT in signals
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


@pytest.fixture
def sleepers(tmp_path):
    """A process whose two workers sleep, once both do; their pids."""
    jobs = [f"(open('{tmp_path}/{name}', 'w').write(str(__import__('os').getpid())), {SLEEP})" for name in "ab"]
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, *jobs], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while sum(path.stat().st_size > 0 for path in tmp_path.iterdir()) < 2:
        assert process.poll() is None
        time.sleep(0.05)
    yield process, [int(path.read_text()) for path in tmp_path.iterdir()]
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def gone(pids, within_s=20):
    until = time.monotonic() + within_s
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def test_ctrl_c_reaches_the_parent_alone_and_ends_all_quietly(sleepers):
    process, pids = sleepers
    os.killpg(process.pid, signal.SIGINT)
    _, told = process.communicate(timeout=30)
    assert gone(pids)
    assert told.count("Traceback") == 1
    assert "KeyboardInterrupt" in told


def test_workers_end_when_their_parent_is_killed(sleepers):
    process, pids = sleepers
    process.kill()
    assert gone(pids)


def test_the_number_of_workers_is_checked():
    assert worker_count(3) == 3
    assert worker_count(None) == len(os.sched_getaffinity(0))
    with pytest.raises(InputError, match="--workers must be at least 1, got 0"):
        worker_count(0)
