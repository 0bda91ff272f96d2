"""Jobs in processes. They are expressions for `eval`: a spawned process can import that, wherever
the tests are."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from cpu3d.util.child import forward_signals, run_jobs

DIE = "__import__('os')._exit(9)"
SLEEP = "__import__('time').sleep(60)"
MAIN = """
import sys
from cpu3d.util.child import run_jobs
for _ in run_jobs(eval, sys.argv[1:], 2):
    pass
"""


def test_a_process_that_is_killed_is_an_error_with_what_to_do():
    with pytest.raises(MemoryError, match="use fewer --workers"):
        list(run_jobs(eval, ["1 + 1", DIE, "3 + 3"], 2))
    assert workers_left() == []
    assert dict(run_jobs(eval, ["1", "2", "3"], 2)) == {"1": 1, "2": 2, "3": 3}


def workers_left():
    """Worker processes that still run, as the kernel has it: multiprocessing's own list can lag
    behind shared joins."""
    children = [
        child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE
    ]
    return [child for child in children if "spawn_main" in " ".join(child.cmdline())]


def test_what_a_job_raises_is_raised_here_and_no_process_is_left():
    with pytest.raises(ZeroDivisionError):
        list(run_jobs(eval, ["1 / 0", SLEEP], 2))
    assert workers_left() == []


def test_closing_ends_the_processes_at_once_and_ctrl_c_is_blocked_in_them_alone():
    blocked = "__import__('signal').pthread_sigmask(0, [])"
    started = time.monotonic()
    with contextlib.closing(run_jobs(eval, [blocked, SLEEP, SLEEP], 2)) as results:
        assert signal.SIGINT in next(results)[1]
    assert workers_left() == []
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert time.monotonic() - started < 55, "they would sleep for 60 s"


def test_a_signal_that_is_ignored_as_under_nohup_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with forward_signals([], int) as received:
        os.kill(os.getpid(), signal.SIGHUP)
    signal.signal(signal.SIGHUP, before)
    assert received == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_their_parent(tmp_path, number):
    jobs = [
        f"(open('{tmp_path}/{name}', 'w').write(str(__import__('os').getpid())), {SLEEP})"
        for name in "ab"
    ]
    command = [sys.executable, "-c", MAIN, *jobs]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            while sum(path.stat().st_size > 0 for path in tmp_path.iterdir()) < 2:
                assert process.poll() is None
                time.sleep(0.05)
            workers = [psutil.Process(int(path.read_text())) for path in tmp_path.iterdir()]
            if number == signal.SIGINT:  # as a terminal sends it: to all of them
                os.killpg(process.pid, number)
                assert process.communicate(timeout=30)[1].count("Traceback") == 1
            else:
                process.send_signal(number)
            assert psutil.wait_procs(workers, 20)[1] == []
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
