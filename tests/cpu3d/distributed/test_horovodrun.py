"""Without Horovod: what ends its workers, and what it ends with."""

import os
import signal
import subprocess
import sys
import time

import pytest

from cpu3d.distributed.horovodrun import code_of, end_worker

SAVES = """
import signal, sys, time
told = []
signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
print("ready", flush=True)
end = time.monotonic() + 30
while not told and time.monotonic() < end:
    time.sleep(0.01)
time.sleep(0.3)
sys.exit(7)
"""


@pytest.mark.parametrize("becomes", ["", "; exit $?"], ids=["the shell has become it", "it is below the shell"])
def test_a_worker_has_the_time_to_save(becomes, tmp_path):
    (tmp_path / "worker.py").write_text(SAVES)
    command = f"exec {sys.executable} worker.py" if not becomes else f"{sys.executable} worker.py{becomes}"
    with subprocess.Popen(command, shell=True, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdout.readline() == "ready\n"
        end_worker(shell.pid)
        assert shell.wait(25) == 7
    end_worker(shell.pid)  # one that has ended


def test_a_worker_that_is_suspended_is_ended():
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"])
    os.kill(worker.pid, signal.SIGSTOP)
    os.waitpid(worker.pid, os.WUNTRACED)
    began_s = time.monotonic()
    end_worker(worker.pid)
    assert worker.wait(25) == -signal.SIGKILL
    assert time.monotonic() - began_s < 25, "it ends by itself after 30 s"


@pytest.mark.parametrize(
    ("ends", "code", "said"),
    [
        ({0: (0, 1.0), 1: (0, 2.0)}, 0, ""),
        # killed; the other one lost it
        ({0: (6, 3.0), 1: (137, 2.0)}, 6, "worker 1 has ended first, SIGKILL"),
        # the one who heard of it was gone before the one that failed
        ({0: (6, 1.0), 1: (4, 2.0)}, 4, "worker 1 has ended first, exit code 4"),
        ({0: (1, 3.0), 1: (4, 2.0), 2: (6, 1.0)}, 4, "worker 1 has ended first, exit code 4"),
        # all were told to
        ({0: (143, 3.0), 1: (143, 2.0)}, 143, "worker 1 has ended first, exit code 143"),
        ({0: (143, 3.0), 1: (1, 4.0)}, 1, "worker 1 has ended first, exit code 1"),
        ({0: (6, 3.0), 1: (6, 2.0)}, 6, "worker 1 has ended first, exit code 6"),
    ],
)
def test_the_first_that_failed_by_itself_is_named(ends, code, said):
    assert code_of(ends) == (code, said)
