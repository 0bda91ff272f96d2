"""With tiny processes in the workers' place."""

import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from cpu3d.distributed import worker_processes
from cpu3d.distributed.worker_processes import (
    WorkerCommand,
    WorkerFailedError,
    run_workers,
    wait_for_earlier,
)
from cpu3d.errors import InputError, Interrupted
from cpu3d.run.heartbeat import process_start, write_heartbeat
from tests.cpu3d.training.beats import beat


@pytest.fixture(autouse=True)
def _limits(monkeypatch):
    """They are short here."""
    for name, seconds in (("POLL_S", 0.02), ("SETTLE_S", 0.6), ("GRACE_S", 8.0)):
        monkeypatch.setattr(worker_processes, name, seconds)


WORKS = "import time; time.sleep(30)"

SUSPENDED = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"

KILLED = "import os; os.kill(os.getpid(), 9)"

SAVES = """
import os, signal, sys, time
got = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: got.append(number))
print("ready", flush=True)
end = time.monotonic() + 30
while not got and time.monotonic() < end:
    time.sleep(0.01)
time.sleep(0.1)
print("saved", flush=True)
sys.exit(128 + got[0])
"""
"""A training: it takes a while to end after a signal."""

DEAF = (
    "import os, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "print(os.getpid(), flush=True); " + WORKS
)


ALL_STARTED = """
import os, pathlib, time
folder = pathlib.Path(os.environ["STARTED"])
folder.joinpath(os.environ["RANK"]).touch()
while len(list(folder.iterdir())) < int(folder.with_name("jobs").read_text()):
    time.sleep(0.01)
"""
"""No worker does anything before all are there: on a busy host a Python takes seconds to start."""


def fails(after_s, code):
    """Its last words are more than `launch` shows."""
    words = "'.\\n\\n' * 12 + 'error: no case is left'"
    return f"import time; time.sleep({after_s}); print({words}); exit({code})"


@pytest.fixture
def job(tmp_path):
    """job(0, script): a worker."""
    started = tmp_path / "started"
    ranks = set()
    started.mkdir()

    def make(rank, script):
        ranks.add(rank)
        (tmp_path / "jobs").write_text(str(len(ranks)))
        environ = {
            **os.environ,
            "STARTED": str(started),
            "RANK": str(rank),
            "SCRIPT": ALL_STARTED + script,
        }
        command = (sys.executable, "-c", "import os; exec(os.environ['SCRIPT'])")
        return WorkerCommand(f"worker {rank}", command, environ, tmp_path / f"worker-{rank}.log")

    return make


def words(job):
    return job.log.read_text().split() if job.log.exists() else []


def failure(jobs, **more):
    with pytest.raises(WorkerFailedError) as caught:
        run_workers(jobs, jobs[0].log.parent, **more)
    return caught.value


def test_workers_that_finish_add_to_the_logs_of_before(job, tmp_path):
    jobs = [job(rank, f"print('hello from {rank}')") for rank in (0, 1)]
    jobs = [one._replace(command=(*one.command, "http://me:s3cret@localhost:5")) for one in jobs]
    shown = []
    for _ in range(2):
        run_workers(jobs, tmp_path, show=lambda: shown.append(jobs[0].log.read_text()))
    for rank in (0, 1):
        first, hello, *again = jobs[rank].log.read_text().splitlines()
        assert re.match(rf"--- 20.* worker {rank}: .* http://me:\*\*\*@localhost:5", first)
        assert hello == again[1] == f"hello from {rank}"
    assert "hello" in shown[-1], "shown once more when all have ended"


def test_the_first_failure_stops_the_others_and_is_named_with_its_last_words(job):
    jobs = [job(0, SAVES), job(1, fails(0.3, 2)), job(2, SAVES)]
    error = failure(jobs)
    assert error.exit_code == 2
    rule = rf"worker 1 on .* 2 .*{jobs[1].log} ends:(\n  \.){{11}}\n  error: no case is left"
    assert re.match(rule, str(error))
    assert str(error).count("SIGTERM") == 2
    assert "saved" in words(jobs[0])
    again = failure([jobs[1]._replace(command=(sys.executable, "-c", "exit(1)"))])
    assert "no case is left" not in str(again), "words of an earlier attempt"


@pytest.mark.parametrize(
    ("scripts", "culprit", "code"),
    [
        # another hears of it, and one fails later
        ((fails(0, 6), fails(0.5, 4), fails(0, 4)), 2, 4),
        # killed by someone
        ((KILLED, fails(0.1, 6)), 0, 6),
        # both lost one that is not here
        ((fails(2, 6), fails(0, 6)), 1, 6),
        # suspended, but not the one that failed
        ((SUSPENDED, fails(0.3, 4)), 1, 4),
    ],
)
def test_the_cause_is_named_and_not_who_heard_of_it(job, scripts, culprit, code):
    error = failure([job(rank, script) for rank, script in enumerate(scripts)])
    assert str(error).startswith(f"worker {culprit} on")
    assert error.exit_code == code
    assert ("SIGKILL" in str(error)) == (KILLED in scripts)
    all_lost = all("exit(6)" in script for script in scripts)
    assert ("see the logs of the other hosts" in str(error)) == all_lost


def test_who_does_not_end_is_made_to(job, monkeypatch):
    monkeypatch.setattr(worker_processes, "GRACE_S", 0.2)
    error = failure([job(0, DEAF), job(1, fails(0.5, 1))])
    assert re.match(r"worker 1 on (.*\n)+.*worker 0 SIGKILL \(killed by", str(error))


# --- By heartbeats ---


def beating(job, **changes):
    """Writes the heartbeat of a worker that prints the number of its process, always as of the same
    moment."""

    def show():
        pids = [int(word) for word in words(job) if word.isdigit()]
        for pid in pids:
            made = beat(beat=1.0, pid=pid, process_start=process_start(pid) or 0, **changes)
            write_heartbeat(job.log.parent, made)

    return show


REPORTS = "import os; print(os.getpid(), flush=True); "


def test_who_lives_and_beats_no_more_is_ended_and_named(job, monkeypatch):
    monkeypatch.setattr(worker_processes, "HANGING_S", 0.3)
    jobs = [job(0, SAVES), job(1, REPORTS + WORKS)]
    error = failure(jobs, show=beating(jobs[1], phase="saving"))
    assert error.exit_code == 6
    assert re.match(r"worker 1 on .* no heartbeat for .* s while saving", str(error))


@pytest.mark.parametrize("changes", [{"place": "elsewhere"}, {"exit_code": 0}])
def test_one_of_another_host_and_one_that_waits_for_the_chief_are_let_go_on(
    job, tmp_path, changes, monkeypatch
):
    monkeypatch.setattr(worker_processes, "HANGING_S", 0.2)
    one = job(0, REPORTS + "import time; time.sleep(0.6)")
    run_workers([one], tmp_path, show=beating(one, **changes))


def test_workers_of_an_earlier_launch_are_waited_for(tmp_path):
    lines = []
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as saves:
        alive = beat(pid=saves.pid, process_start=process_start(saves.pid), longest_step_s=None)
        alive.exit_code = 0
        write_heartbeat(tmp_path, alive)
        wait_for_earlier(tmp_path, lines.append, most_s=0)  # it has saved
        alive.exit_code = None
        write_heartbeat(tmp_path, alive)
        named = rf"no other workers, got worker 0 \(process {saves.pid}\)"
        with pytest.raises(InputError, match=named):
            wait_for_earlier(tmp_path, lines.append, most_s=0.3)
        alive.longest_step_s = 10.0
        write_heartbeat(tmp_path, alive)
        threading.Timer(0.3, saves.stdin.close).start()
        wait_for_earlier(tmp_path, lines.append, most_s=0)
    first, _ = lines  # one for each of the two calls that had to wait
    assert "waiting for worker 0" in first


# --- Signals ---


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGHUP, 143)])
def test_signals_are_passed_on_and_all_are_waited_for(job, tmp_path, number, exit_code):
    def interrupt():
        while not all("ready" in words(job) for job in jobs):
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    jobs = [job(rank, SAVES) for rank in (0, 1)]
    # else a test under `nohup` would not pass it on
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        threading.Thread(target=interrupt).start()
        with pytest.raises(Interrupted) as caught:
            run_workers(jobs, tmp_path)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)
    assert caught.value.exit_code == exit_code
    assert all("saved" in words(job) for job in jobs)
