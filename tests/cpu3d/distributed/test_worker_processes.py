"""With tiny processes in the workers' place."""

import contextlib
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
def patience(monkeypatch):
    """patience(GRACE_S=0.2) changes the limits, which are short here."""

    def change(**limits_s):
        for name, seconds in limits_s.items():
            monkeypatch.setattr(worker_processes, name, seconds)

    change(POLL_S=0.02, SETTLE_S=0.6, GRACE_S=8.0)
    return change


WORKS = "import time; time.sleep(30)"

SUSPENDED = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"

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

LOSES_ANOTHER = "import sys, time; time.sleep({after_s}); print('error: lost'); sys.exit(6)"

FAILS = "import sys, time; time.sleep({after_s}); print('error: no case is left'); sys.exit({code})"

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


def test_a_log_names_the_command_without_the_password_of_a_uri(job, tmp_path):
    job0 = job(0, "")._replace(
        command=(sys.executable, "-c", "'http://someone:s3cret@localhost:5000'")
    )
    run_workers([job0], tmp_path)
    assert "s3cret" not in job0.log.read_text()
    assert "http://someone:***@localhost:5000" in job0.log.read_text()


def words(job):
    return job.log.read_text().split() if job.log.exists() else []


def failure(jobs, **more):
    with pytest.raises(WorkerFailedError) as caught:
        run_workers(jobs, jobs[0].log.parent, **more)
    return caught.value


def test_workers_that_finish_add_to_the_logs_of_before(job, tmp_path):
    jobs = [job(rank, f"print('hello from {rank}')") for rank in (0, 1)]
    shown = []
    for _ in range(2):
        run_workers(jobs, tmp_path, show=lambda: shown.append(jobs[0].log.read_text()))
    for rank in (0, 1):
        lines = jobs[rank].log.read_text().splitlines()
        assert [
            line.startswith("--- 20") and f"worker {rank}: " in line for line in lines[::2]
        ] == [True] * 2
        assert lines[1::2] == [f"hello from {rank}"] * 2
    assert "hello" in shown[-1], "shown once more when all have ended"


def test_the_first_failure_stops_the_others_and_is_named_with_its_last_words(job):
    jobs = [job(0, SAVES), job(1, FAILS.format(after_s=0.3, code=2)), job(2, SAVES)]
    error = failure(jobs)
    assert error.exit_code == 2
    message = str(error)
    assert re.match("worker 1 on .* got exit code 2", message)
    assert re.search(rf"{jobs[1].log} .*\n *error: no case is left", message)
    assert message.count("SIGTERM") == 2
    assert "saved" in words(jobs[0])
    assert "no case is left" not in str(
        failure([jobs[1]._replace(command=(sys.executable, "-c", "exit(1)"))])
    )


@pytest.mark.parametrize(
    ("scripts", "culprit", "code"),
    [
        # the other hears of it and is gone before the one that fails
        ((LOSES_ANOTHER.format(after_s=0), FAILS.format(after_s=0.1, code=4)), "worker 1", 4),
        # killed by someone
        (("import os; os.kill(os.getpid(), 9)", LOSES_ANOTHER.format(after_s=0.1)), "worker 0", 6),
        # both lost one that is not here
        ((LOSES_ANOTHER.format(after_s=2), LOSES_ANOTHER.format(after_s=0)), "worker 1", 6),
        # the others agree to end as well, and the chief takes longer to save
        (
            ("import sys, time; time.sleep(0.5); sys.exit(5)", FAILS.format(after_s=0, code=5)),
            "worker 1",
            5,
        ),
        # suspended, but not the one that failed
        ((SUSPENDED, FAILS.format(after_s=0.3, code=4)), "worker 1", 4),
    ],
)
def test_the_cause_is_named_and_not_who_heard_of_it(job, scripts, culprit, code):
    error = failure([job(rank, script) for rank, script in enumerate(scripts)])
    assert str(error).startswith(f"{culprit} on")
    assert error.exit_code == code
    assert ("see the logs of the other hosts" in str(error)) == all(
        "exit(6)" in script for script in scripts
    )


def test_who_does_not_end_is_made_to(job, patience):
    patience(SETTLE_S=0.3, GRACE_S=0.2)
    jobs = [job(0, DEAF), job(1, FAILS.format(after_s=0.5, code=1))]
    error = failure(jobs)
    assert str(error).startswith("worker 1 on")
    assert "worker 0 SIGKILL" in str(error)


# --- By heartbeats ---


def beating(run, **changes):
    """Writes the heartbeat of each process that reports its number in a log of `run`, as of the
    moment."""

    def show():
        for log in run.glob("worker-*.log"):
            pids = [word for word in log.read_text().split() if word.isdigit()]
            with contextlib.suppress(IndexError):
                pid = int(pids[-1])
                rank = int(log.stem[-1])
                write_heartbeat(
                    run, beat(rank=rank, pid=pid, process_start=process_start(pid) or 0, **changes)
                )

    return show


REPORTS = "import os; print(os.getpid(), flush=True); "


def test_who_lives_and_beats_no_more_is_ended_and_named(job, tmp_path, patience):
    patience(SETTLE_S=0.1, HANGING_S=0.3)
    jobs = [job(0, SAVES), job(1, REPORTS + WORKS)]
    error = failure(jobs, show=beating(tmp_path, beat=1.0, phase="saving"))
    assert error.exit_code == 6
    assert str(error).startswith("worker 1 on")
    assert re.search(r"no heartbeat for .* s while saving", str(error))


@pytest.mark.parametrize(
    "changes", [{"place": "elsewhere"}, {"phase": "ended", "exit_code": 0}], ids=["host", "end"]
)
def test_one_of_another_host_and_one_that_waits_for_the_chief_are_let_go_on(
    job, tmp_path, changes, patience
):
    patience(SETTLE_S=0.1, HANGING_S=0.2)
    script = REPORTS + "import time; time.sleep(0.6)"
    run_workers([job(0, script)], tmp_path, show=beating(tmp_path, beat=1.0, **changes))


def test_workers_of_an_earlier_launch_are_waited_for(tmp_path):
    lines = []
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as saves:
        start = process_start(saves.pid)
        write_heartbeat(
            tmp_path, beat(pid=saves.pid, process_start=start, phase="saving", longest_step_s=None)
        )
        with pytest.raises(
            InputError, match=rf"no other workers, got worker 0 \(process {saves.pid}\)"
        ):
            wait_for_earlier(tmp_path, lines.append, most_s=0.3)
        threading.Timer(0.3, saves.stdin.close).start()
        wait_for_earlier(tmp_path, lines.append, most_s=30)
    assert "waiting for worker 0" in lines[0]


# --- Signals ---


@pytest.mark.parametrize(
    ("number", "passed_on"), [(signal.SIGINT, signal.SIGINT), (signal.SIGHUP, signal.SIGTERM)]
)
def test_signals_are_passed_on_and_all_are_waited_for(job, tmp_path, number, passed_on):
    def interrupt():
        end = time.monotonic() + 60
        while not all("ready" in words(job) for job in jobs) and time.monotonic() < end:
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    jobs = [job(rank, SAVES) for rank in (0, 1)]
    before = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # else a test under `nohup` would not pass it on
    try:
        threading.Thread(target=interrupt).start()
        with pytest.raises(Interrupted) as caught:
            run_workers(jobs, tmp_path)
    finally:
        signal.signal(signal.SIGHUP, before[signal.SIGHUP])
    assert caught.value.exit_code == 128 + passed_on
    assert all("saved" in words(job) for job in jobs)
    assert {number: signal.getsignal(number) for number in before} == before
