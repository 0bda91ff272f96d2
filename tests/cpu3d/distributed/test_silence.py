import os
import signal
import subprocess
import sys
import time

import pytest

from cpu3d.distributed.beats import Beats
from cpu3d.distributed.silence import Silence, SilenceBelow
from cpu3d.training.heartbeat import Heartbeat, heartbeat_path, process_start, this_place, write_heartbeat
from cpu3d.util.child import family


@pytest.fixture
def process():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"])
    yield child.pid
    child.kill()
    child.wait()


@pytest.fixture
def beat(tmp_path):
    def make(pid, beat, rank=0, **more):
        of_day = {"started": 0.0, "beat": beat, "phase_since": 0.0}
        place = {"process_start": process_start(pid) or 1, "place": this_place(), "host_name": "here"}
        content = {"phase": "computing", "step": 1, "steps": 9, **of_day, **place, **more}
        write_heartbeat(tmp_path, Heartbeat(rank=rank, workers=2, pid=pid, **content))

    return make


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_who_lives_and_beats_no_more_is_silent(tmp_path, process, beat):
    clock = Clock()
    silence = Silence(tmp_path, suspended_s=60, silent_s=300, clock=clock)
    assert silence([process]) == {}, "no heartbeat yet"
    beat(process, 1.0)
    beat(2**22 + 1, 1.0, rank=1)
    for clock.now in (1000.0, 1300.0):
        assert silence([process]) == {}
    beat(process, 2.0)
    for clock.now in (1310.0, 1610.0):
        assert silence([process]) == {}, "counted from the newest beat, by the own clock"
    clock.now = 1611.0
    assert silence([process]) == {process: "silent for 301 s while computing, though it lives"}
    assert silence([]) == {}, "of another's process nothing is said"


def test_who_was_suspended_is_waited_for_less(tmp_path, process, beat):
    clock = Clock()
    silence = Silence(tmp_path, suspended_s=60, silent_s=300, clock=clock)
    beat(process, 1.0)
    silence([process])
    clock.now = 61.0
    assert silence([process]) == {}
    os.kill(process, signal.SIGSTOP)
    os.waitpid(process, os.WUNTRACED)
    assert silence([process]) == {process: "silent for 61 s while computing, as a signal has stopped it"}


def test_a_disk_that_takes_no_files_tells_nothing(tmp_path, process, beat, monkeypatch):
    clock = Clock()
    silence = Silence(tmp_path, silent_s=300, clock=clock)
    beat(process, 1.0)
    silence([process])
    clock.now = 301.0
    monkeypatch.setattr(Silence, "_takes_files", lambda self: False)
    assert silence([process]) == {}


def test_a_damaged_heartbeat_is_nobodys(tmp_path, process, beat):
    beat(process, 1.0)
    heartbeat_path(tmp_path, 0).write_text("{")
    silence = Silence(tmp_path, silent_s=0, clock=Clock())
    assert silence([process]) == silence([process]) == {}


def test_who_has_noted_its_end_waits_for_the_chief_and_is_not_silent(tmp_path, process, beat):
    clock = Clock()
    silence = Silence(tmp_path, clock=clock)
    beat(process, 1.0, phase="ended", exit_code=0)
    silence([process])
    clock.now = 3600.0
    assert silence([process]) == {}
    os.kill(process, signal.SIGSTOP)
    os.waitpid(process, os.WUNTRACED)
    assert list(silence([process])) == [process], "but nobody waits for one that was suspended"


def test_a_worker_of_another_host_with_the_same_number_is_another(tmp_path, process, beat):
    clock = Clock()
    silence = Silence(tmp_path, clock=clock)
    for clock.now in (0.0, 301.0, 602.0):
        beat(process, 1.0)
        beat(process, clock.now, rank=1, place="there")
        found = silence([process])
    assert found == {process: "silent for 602 s while computing, though it lives"}
    assert [one.rank for one in Beats(tmp_path)(process)] == [0]


def test_below_a_launcher_the_one_that_hangs_is_ended_and_not_the_launcher(tmp_path, beat):
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(30)'])"
    launcher = subprocess.Popen([sys.executable, "-c", script])
    end = time.monotonic() + 60
    while len(family(launcher.pid)) < 2 and time.monotonic() < end:
        time.sleep(0.02)
    worker = family(launcher.pid)[1]
    said, silence = [], SilenceBelow(tmp_path, lambda line: said.append(line))
    beat(worker, 1.0, phase="exchanging")
    clock = silence._silence._clock = Clock()
    assert silence([launcher.pid]) == {}
    assert [one.pid for one in Beats(tmp_path)(launcher.pid)] == [worker]
    clock.now = 301.0
    assert silence([launcher.pid]) == {}
    assert launcher.wait(25) == 0, "which has seen its worker end"
    assert said == [f"launch: process {worker} hangs, silent for 301 s while exchanging, though it lives; it is ended"]
