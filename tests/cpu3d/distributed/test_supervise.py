"""With tiny processes in the workers' place."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from cpu3d.distributed import running
from cpu3d.distributed import supervise as module
from cpu3d.distributed.patience import Patience
from cpu3d.distributed.running import Job
from cpu3d.distributed.supervise import WorkerFailedError, supervise
from cpu3d.errors import Interrupted
from cpu3d.util.child import ROOT
from tests.cpu3d.training.beats import beat

QUICK = Patience(poll_s=0.02, look_s=0.1, settle_s=0.6, hears_s=0.6, grace_s=5.0)

WORKS = "import time; time.sleep(30)"

SAVES = """
import os, signal, sys, time
told = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: told.append(number))
print("ready", flush=True)
end = time.monotonic() + 30
while not told and time.monotonic() < end:
    time.sleep(0.01)
time.sleep(0.1)
print("saved", flush=True)
sys.exit(128 + told[0])
"""
"""A training: it takes a while to end after a signal."""

SUSPENDED = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"

LOSES_ANOTHER = "import sys, time; time.sleep({after_s}); print('error: lost'); sys.exit(6)"

FAILS = "import sys, time; time.sleep({after_s}); print('error: no case is left'); sys.exit({code})"


@pytest.fixture
def job(tmp_path):
    """job(0, script): a worker."""

    def make(rank, script):
        command = (sys.executable, "-c", script)
        return Job(f"worker {rank}", "this host", command, dict(os.environ), tmp_path / f"worker-{rank}.log")

    return make


def waited_for(path, words, most_s=60.0):
    end = time.monotonic() + most_s
    while not (path.exists() and words in path.read_text().split()):
        assert time.monotonic() < end, f"no {words!r} in {path}"
        time.sleep(0.01)


def failure(jobs, **more):
    with pytest.raises(WorkerFailedError) as caught:
        supervise(jobs, patience=QUICK, **more)
    return caught.value


def test_workers_that_end_well_leave_their_words_after_those_of_before(job):
    jobs = [job(rank, f"print('hello from {rank}')") for rank in (0, 1)]
    shown = []
    for attempts in (1, 2):
        supervise(jobs, show=lambda: shown.append(jobs[0].log.read_text()), patience=QUICK)
        for rank in (0, 1):
            header, words = jobs[rank].log.read_text().splitlines()[-2:]
            assert header.startswith("--- 20")
            assert f"worker {rank} on this host: " in header
            assert words == f"hello from {rank}"
            assert jobs[rank].log.read_text().count("\nhello") == attempts
    assert "hello" in shown[-1], "shown once more when all have ended"


def test_the_first_failure_stops_the_others_and_is_named_with_its_last_words(job):
    jobs = [job(0, SAVES), job(1, FAILS.format(after_s=0.3, code=2)), job(2, SAVES)]
    began_s = time.monotonic()
    error = failure(jobs)
    assert time.monotonic() - began_s < 25, "they end by themselves after 30 s"
    assert error.exit_code == 2
    told = str(error)
    assert told.startswith("worker 1 on this host (process ")
    assert "got exit code 2 (bad input)" in told
    assert f"all of it is in {jobs[1].log}, which ends:\n  error: no case is left" in told
    assert told.count("told by SIGTERM, and it saved") == 2
    assert "saved" in jobs[0].log.read_text()


def test_last_words_are_of_this_attempt(job):
    failure([job(0, FAILS.format(after_s=0, code=1))])
    assert "no case is left" not in str(failure([job(0, "import sys; sys.exit(1)")]))


@pytest.mark.parametrize(
    ("scripts", "culprit", "code"),
    [
        # the other hears of it and is gone before the one that fails
        ((LOSES_ANOTHER.format(after_s=0), FAILS.format(after_s=0.3, code=4)), "worker 1", 4),
        # at the same moment
        ((LOSES_ANOTHER.format(after_s=0), FAILS.format(after_s=0, code=1)), "worker 1", 1),
        # killed by someone
        (("import os; os.kill(os.getpid(), 9)", LOSES_ANOTHER.format(after_s=0.1)), "worker 0", 6),
        (("import os; os.kill(os.getpid(), 11)", WORKS), "worker 0", 6),
        # both lost one that is not here
        ((LOSES_ANOTHER.format(after_s=0.3), LOSES_ANOTHER.format(after_s=0)), "worker 1", 6),
        # lost, while the one that hangs goes on
        ((LOSES_ANOTHER.format(after_s=0), SAVES), "worker 0", 6),
        # the others agree to end as well, and the chief takes longer to save
        (("import sys, time; time.sleep(0.5); sys.exit(5)", FAILS.format(after_s=0, code=5)), "worker 1", 5),
        # it ends with what others do not end with
        ((WORKS, FAILS.format(after_s=0, code=77)), "worker 1", 1),
    ],
)
def test_the_cause_is_named_and_not_who_heard_of_it(job, scripts, culprit, code):
    error = failure([job(rank, script) for rank, script in enumerate(scripts)])
    assert str(error).startswith(f"{culprit} on")
    assert error.exit_code == code
    lost_elsewhere = all("exit(6)" in script or script == SAVES for script in scripts)
    assert ("look into their logs" in str(error)) == lost_elsewhere


def test_who_saves_as_all_have_agreed_is_given_the_time(job):
    slow = "import sys, time; time.sleep(0.7); print('saved'); sys.exit(143)"
    jobs = [job(0, slow), job(1, "import sys; sys.exit(143)")]
    assert failure(jobs).exit_code == 143
    assert "saved" in jobs[0].log.read_text().split()


def test_who_is_suspended_is_the_cause_where_another_has_lost_it(job):
    jobs = [
        job(0, LOSES_ANOTHER.format(after_s=0.2)),
        job(1, SUSPENDED),
    ]
    said = []
    error = failure(jobs, say=said.append)
    assert str(error).startswith("worker 1 on")
    assert "got hangs, suspended by a signal" in str(error)
    (line,) = said
    assert line.startswith("launch: worker 0 has ended with exit code 6 ")


def test_a_signal_is_told_in_words(job):
    told = str(failure([job(0, "import os; os.kill(os.getpid(), 9)")]))
    assert "got SIGKILL (killed by someone, or by the kernel for want of memory)" in told


def test_who_does_not_end_is_made_to(job):
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); " + WORKS
    jobs = [job(0, deaf), job(1, FAILS.format(after_s=0.5, code=1))]
    with pytest.raises(WorkerFailedError, match="worker 1 on") as caught:
        supervise(jobs, patience=Patience(poll_s=0.02, hears_s=0.1, grace_s=0.2))
    assert "worker 0 SIGKILL" in str(caught.value)


def test_who_hangs_is_ended_and_named(job):
    """Two workers: one is suspended, and the other ends when it is told of the loss."""
    jobs = [job(0, SAVES), job(1, SUSPENDED)]
    asked = []

    def hanging(pids):
        asked.append(list(pids))
        return {pids[1]: "silent for 61 s"} if len(asked) == 3 else {}

    error = failure(jobs, hanging=hanging)
    assert error.exit_code == 6
    assert "worker 1 on" in str(error)
    assert "got hangs, silent for 61 s" in str(error)
    assert [len(pids) for pids in asked] == [2, 2, 2]


def test_who_was_suspended_is_not_taken_for_the_first_that_failed(job):
    jobs = [job(0, SUSPENDED), job(1, FAILS.format(after_s=0.3, code=4))]
    error = failure(jobs)
    assert (error.exit_code, str(error).startswith("worker 1 on")) == (4, True)
    assert "worker 0 hangs, suspended by a signal" in str(error)


def test_who_cannot_be_ended_is_named_and_left(job, monkeypatch):
    """As one that waits in the kernel for a file system: here nothing is sent to it."""
    monkeypatch.setattr(running, "family", lambda pid: ())
    children, start = [], running.start
    monkeypatch.setattr(running, "start", lambda *words: children.append(start(*words)) or children[-1])
    deaf = "import os, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(os.getpid(), flush=True); " + WORKS
    jobs = [job(0, deaf), job(1, LOSES_ANOTHER.format(after_s=0.5))]
    short = Patience(poll_s=0.02, settle_s=0.1, grace_s=0.1, dies_s=0.2)
    began_s = time.monotonic()
    with pytest.raises(WorkerFailedError) as caught:
        supervise(jobs, patience=short)
    pid = int(jobs[0].log.read_text().splitlines()[1])
    os.kill(pid, signal.SIGKILL)
    children[0].wait()
    assert time.monotonic() - began_s < 25
    assert caught.value.exit_code == 6
    assert str(caught.value).startswith("worker 0 on")
    assert f"SIGKILL does not end process {pid}: see whether the file systems" in str(caught.value)


def test_a_log_that_cannot_be_read_any_more_holds_nobody(job, monkeypatch):
    held = threading.Event()
    monkeypatch.setattr(module, "last_words", lambda log, begin: held.wait(60))
    monkeypatch.setattr(module, "LOG_S", 0.2)
    error = failure([job(0, FAILS.format(after_s=0, code=4))])
    held.set()
    assert (error.exit_code, "its file system does not answer" in str(error)) == (4, True)


@pytest.mark.parametrize(("phase", "saved"), [("computing", True), ("starting", False)])
def test_who_trains_is_given_the_time_for_its_step_and_who_does_not_is_not(job, phase, saved):
    """The step takes 1 s, longer than all other patience; after it the worker hears of the loss, saves and ends."""
    step = "import sys, time; print('ready', flush=True); time.sleep(1); print('saved'); sys.exit(6)"
    for code in (2, 3):
        jobs = [job(0, step), job(1, FAILS.format(after_s=0.3, code=code))]
        short = Patience(poll_s=0.02, hears_s=0.1, grace_s=0.1, unforeseen_s=0.1)
        jobs[0].log.unlink(missing_ok=True)
        with pytest.raises(WorkerFailedError) as caught:
            supervise(jobs, patience=short, beats=lambda pid: [beat(phase=phase, longest_step_s=1.5)])
        assert caught.value.exit_code == code
        assert ("saved" in jobs[0].log.read_text().split()) == saved


def test_a_step_in_flight_is_not_cut_off_by_force(job):
    slow = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1.5); print('saved')"
    jobs = [job(0, slow), job(1, LOSES_ANOTHER.format(after_s=0.4))]
    short = Patience(poll_s=0.02, settle_s=0.05, grace_s=0.05)
    with pytest.raises(WorkerFailedError):
        supervise(jobs, patience=short, beats=lambda pid: [beat(phase="computing", longest_step_s=2.0)])
    assert "saved" in jobs[0].log.read_text().split()


@pytest.mark.parametrize(
    ("number", "passed_on"),
    [(signal.SIGINT, signal.SIGINT), (signal.SIGTERM, signal.SIGTERM), (signal.SIGHUP, signal.SIGTERM)],
)
def test_signals_are_passed_on_and_all_are_waited_for(job, number, passed_on):
    jobs = [job(rank, SAVES) for rank in (0, 1)]

    def interrupt():
        for one in jobs:
            waited_for(one.log, "ready")
        os.kill(os.getpid(), number)

    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # else a test under `nohup` would not pass it on
    try:
        threading.Thread(target=interrupt).start()
        with pytest.raises(Interrupted) as caught:
            supervise(jobs, patience=QUICK)
    finally:
        signal.signal(signal.SIGHUP, before[signal.SIGHUP])
    assert caught.value.signal_number == passed_on
    assert all("saved" in one.log.read_text() for one in jobs)
    assert {one: signal.getsignal(one) for one in before} == before


def test_a_signal_that_comes_when_all_is_done_changes_nothing(job):
    jobs = [job(0, SAVES.replace("sys.exit(128 + told[0])", ""))]

    def interrupt():
        waited_for(jobs[0].log, "ready")
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt).start()
    supervise(jobs, patience=QUICK)
    assert "saved" in jobs[0].log.read_text().split()


def test_a_failure_while_saving_is_not_taken_for_an_interruption(job):
    fails = SAVES.replace("sys.exit(128 + told[0])", "print('error: No space left'); sys.exit(1)")
    jobs = [job(0, fails), job(1, SAVES)]

    def interrupt():
        for one in jobs:
            waited_for(one.log, "ready")
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt).start()
    error = failure(jobs)
    assert (error.exit_code, "No space left" in str(error)) == (1, True)


ALONE = """
import os, sys
from pathlib import Path
from cpu3d.distributed.running import Job
from cpu3d.distributed.supervise import supervise
logs = [Path(log) for log in sys.argv[2:]]
supervise([Job(log.stem, "this host", (sys.executable, "-c", sys.argv[1]), dict(os.environ), log) for log in logs])
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="parents are watched on Linux alone")
def test_no_worker_outlives_a_launch_that_is_killed(tmp_path):
    logs = [tmp_path / f"worker-{rank}.log" for rank in (0, 1)]
    launch = subprocess.Popen([sys.executable, "-c", ALONE, SAVES, *map(str, logs)], cwd=ROOT)
    try:
        for log in logs:
            waited_for(log, "ready")
    finally:
        launch.kill()
        launch.wait()
    for log in logs:
        waited_for(log, "saved")
