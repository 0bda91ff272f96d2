"""Child processes: commands that end with this process and get its signals, or a function applied
to many jobs.

with forward_signals(children, as_signal) as received:
    children.append(start(command, log))

for job, result in run_jobs(function, jobs, workers=4):
    ...
"""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import FrameType
from typing import (
    IO,
    Any,
    Callable,
    Generator,
    Iterator,
    List,
    Mapping,
    Optional,
    Sequence,
    Tuple,
)

ROOT = Path(__file__).resolve().parents[2]  # holds the package; PROGRAM is started there
PROGRAM = (sys.executable, "-m", "cpu3d")  # the command line, before its subcommand

_WITH_PARENT = """
import ctypes, os, signal, sys
if sys.platform.startswith("linux"):
    PR_SET_PDEATHSIG = 1  # of linux/prctl.h; it outlives the exec
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(sys.argv[1]):  # the parent died before the line above
        sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


def start(
    command: Sequence[str],
    output: IO[Any],
    environ: Optional[Mapping[str, str]] = None,
    cwd: Optional[Path] = None,
) -> "subprocess.Popen[bytes]":
    """Start `command`, its stdout and stderr going to `output`, with our environment or `environ`.

    It is in a session of its own, as Ctrl-C of a terminal would reach it twice. If this process is
    killed, it gets SIGTERM. To be called in the main thread. What it prints is UTF-8, whatever our
    terminal has."""
    environ = dict(os.environ if environ is None else environ)
    environ["PYTHONIOENCODING"] = "utf-8:replace"
    return subprocess.Popen(
        [sys.executable, "-I", "-c", _WITH_PARENT, str(os.getpid()), *command],
        cwd=cwd,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


@contextlib.contextmanager
def forward_signals(
    children: List["subprocess.Popen[bytes]"], as_signal: Callable[[int], int]
) -> Iterator[List[int]]:
    """Send SIGINT, SIGTERM and SIGHUP on to `children`, each as `as_signal` of its number; yields
    those received.

    `children` may grow; one that is added after a signal has come is the caller's to signal. A
    signal that this process ignores, as under `nohup`, stays ignored."""
    received: List[int] = []

    def forward(number: int, frame: Optional[FrameType]) -> None:
        received.append(number)
        for child in list(children):
            child.send_signal(as_signal(number))

    forwarded = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handled = [number for number in forwarded if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, forward) for number in handled}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def how_ended(returncode: int) -> str:
    """The end of a process in words, such as "exit code 2" or "SIGKILL"."""
    if returncode >= 0:
        return f"exit code {returncode}"
    return signal.Signals(-returncode).name


def last_words(log: Path, begin: int) -> str:
    """The last 12 lines of `log` from byte `begin` on that are not empty, indented for a
    message."""
    with log.open("rb") as file:
        file.seek(begin)
        text = file.read().decode("utf-8", errors="replace")
    return "\n  ".join([line for line in text.splitlines() if line.strip()][-12:])


def worker_count(requested: Optional[int]) -> int:
    """`requested`, or one worker per core that this process may use."""
    return len(os.sched_getaffinity(0)) if requested is None else requested


def run_jobs(
    function: Callable[[Any], Any], jobs: Sequence[Any], workers: int
) -> Generator[Tuple[Any, Any], None, None]:
    """Call `function(job)` for all jobs and yield (job, result) as they end: in `workers`
    processes, or here for one.

    Exceptions of `function` are raised here; MemoryError if a process was killed, most likely for
    lack of memory. Closing the generator kills the processes. They are spawned, so `function` and
    jobs must be picklable."""
    workers = min(workers, len(jobs))
    if workers <= 1:
        for job in jobs:
            yield job, function(job)
        return
    earlier = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        workers, mp_context=multiprocessing.get_context("spawn"), initializer=_end_with_parent
    )
    try:
        # Processes start here and inherit what is blocked, so Ctrl-C reaches the parent alone.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            running = {pool.submit(function, job): job for job in jobs}
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for future in as_completed(running):
            yield running[future], future.result()
    except BrokenProcessPool:
        raise MemoryError("a worker process was killed: use fewer --workers") from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in set(multiprocessing.active_children()) - earlier:
            child.terminate()
            child.join()


# --- Private helpers ---


def _end_with_parent() -> None:
    """End this worker when its parent ends. It would wait without end for the work of a killed
    parent."""
    parent = multiprocessing.parent_process()
    if parent is None:  # not a worker
        return

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
