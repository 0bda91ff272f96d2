"""A process under a real memory limit: the guard has it stop, or ends it, before the kernel kills it."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cpu3d.training.guard.heartbeat import read_heartbeats

MIB = 2**20

LIMIT_BYTES = 200 * MIB
"""Above the floor of 64 MiB and an interpreter of 20."""

EATER = """
import sys, time
from pathlib import Path
from cpu3d.training.guard.guard import Guard, UNGUARDED

group, run, guarded, bytes_a_step, steps = Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:])
(group / "cgroup.procs").write_text("0")
held = []

def train(guard):
    for step in range(steps):
        guard.phase("computing", step=step)
        held.append(b"x" * bytes_a_step)
        time.sleep(0.02)
        if guard.stop:
            print(f"stopped after {step + 1} steps: {guard.why}", flush=True)
            raise SystemExit(5)

if guarded:
    with Guard(run, say=lambda line: print(line, flush=True), bound_bytes=60 * 2**20) as guard:
        train(guard)
else:
    train(UNGUARDED)
"""

OPEN = """
import mmap
file = open(run / "store", "rb")
view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
"""

READ = "sum(view[step * bytes_a_step : (step + 1) * bytes_a_step : 4096])"


@pytest.fixture
def group():
    """A cgroup of its own with LIMIT_BYTES, removed afterwards."""
    top = Path("/sys/fs/cgroup")
    version_1 = (top / "memory/memory.limit_in_bytes").is_file()
    folder = (top / "memory" if version_1 else top) / f"cpu3d-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"needs to make a cgroup: {error}")
    try:
        limit = folder / ("memory.limit_in_bytes" if version_1 else "memory.max")
        if not limit.is_file():
            pytest.skip("needs the memory controller in its cgroups")
        limit.write_text(str(LIMIT_BYTES))
        for swap in ("memory.memsw.limit_in_bytes", "memory.swap.max"):
            with contextlib.suppress(OSError):
                (folder / swap).write_text(str(LIMIT_BYTES if "memsw" in swap else 0))
        yield folder
    finally:
        folder.rmdir()


def eat(group, run, *, mib_a_step, guarded=True, steps=10**6, script=EATER):
    command = [sys.executable, "-c", script, str(group), str(run), *map(str, (int(guarded), mib_a_step * MIB, steps))]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[4])


def test_memory_that_grows_slowly_stops_the_run_before_the_killer(group, tmp_path):
    done = eat(group, tmp_path, mib_a_step=2)
    assert done.returncode == 5, (done.returncode, done.stdout, done.stderr)
    said = done.stdout.splitlines()
    assert "must stay below the plan's upper bound of 60 MiB" in said[0]
    assert "free of the limit of this container or job" in said[1]
    assert said[-1].startswith("stopped after")
    beat = read_heartbeats(tmp_path)[0]
    assert (beat.exit_code, beat.limit_bytes) == (5, LIMIT_BYTES)
    assert "memory must keep 64 MiB free" in beat.stop
    assert 60 * MIB < beat.peak_bytes < LIMIT_BYTES


def test_memory_that_is_gone_before_the_end_of_the_step_ends_the_process_with_a_word(group, tmp_path):
    """The loop never looks at what the guard says, as in a step that does not end."""
    done = eat(group, tmp_path, mib_a_step=3, script=EATER.replace("if guard.stop:", "if False:"))
    assert done.returncode == 5, (done.returncode, done.stdout, done.stderr)
    assert "error: memory must last to the end of a step" in done.stdout
    beat = read_heartbeats(tmp_path)[0]
    assert (beat.exit_code, beat.phase) == (5, "computing")
    assert "falling by" in beat.reason


def test_without_the_guard_the_kernel_kills_it(group, tmp_path):
    """Or the tests above would show nothing."""
    done = eat(group, tmp_path, guarded=False, mib_a_step=16)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == ""


def test_the_pages_of_a_file_are_no_reason_to_stop(group, tmp_path):
    """More of them than the limit: the kernel drops the first for the last."""
    with (tmp_path / "store").open("wb") as file:
        file.write(b"x" * (LIMIT_BYTES * 3 // 2))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # whoever reads them first is charged for them
    script = EATER.replace("held = []", OPEN).replace('held.append(b"x" * bytes_a_step)', READ)
    done = eat(group, tmp_path, mib_a_step=5, steps=60, script=script)
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert "warning" not in done.stdout
    assert "all of it mapped files" in done.stdout
    beat = read_heartbeats(tmp_path)[0]
    assert beat.reason == "finished"
    assert beat.file_bytes > LIMIT_BYTES // 2
