"""Processes that this one starts: ended with it, told of its signals, their words in a file, their steps in a log.

with told_of_signals(children) as told:
    children.append(start(command, log))
"""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, Any, Callable, Iterator, List, Mapping, Optional, Sequence, Tuple

import psutil

from memory_estimator.files import open_regular, parse_json

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = (sys.executable, "-m", "cpu3d")
"""What every run is done by."""

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals of ours that children are told of, but for those that we were told to ignore, as `nohup` does."""

LAST_LINES = 12
"""Of a failed process's words that are shown."""

_WITH_PARENT = (sys.executable, str(Path(__file__).with_name("with_parent.py")))


def start(
    command: Sequence[str], output: IO[Any], environ: Optional[Mapping[str, str]] = None, cwd: Optional[Path] = None
) -> subprocess.Popen:
    """Start `command`, all it says going to `output`, with our environment or `environ`. Call it in the main thread.

    It is in a session of its own, as Ctrl-C of a terminal would reach it twice. When we are killed it gets SIGTERM.
    """
    return subprocess.Popen(
        [*_WITH_PARENT, str(os.getpid()), *command],
        cwd=cwd,
        env=None if environ is None else dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


@contextlib.contextmanager
def told_of_signals(children: List[subprocess.Popen], as_signal: Callable[[int], int]) -> Iterator[List[int]]:
    """Pass our signals on to `children`, each number as `as_signal` says; yields the list of those that came.

    `children` may grow. One that is added after a signal has come is for the caller to tell.
    """
    told: List[int] = []

    def pass_on(number, frame):
        told.append(number)
        for child in list(children):
            child.send_signal(as_signal(number))

    handled = [number for number in PASSED_ON if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, pass_on) for number in handled}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def family(pid: int) -> Tuple[int, ...]:
    """The process and all that it has started, and those have; itself alone where it is gone."""
    with contextlib.suppress(psutil.Error):
        return (pid, *(child.pid for child in psutil.Process(pid).children(recursive=True)))
    return (pid,)


def how_ended(returncode: int) -> str:
    """In a few words, such as "exit code 2" or "SIGKILL"."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"signal {-returncode}"


def last_words(log: Path, begin: int = 0, count: int = LAST_LINES) -> str:
    """The last lines of `log` from byte `begin` on, those that hold something, indented for a message."""
    with log.open("rb") as file:
        file.seek(begin)
        said = file.read().decode("utf-8", errors="replace")
    return "\n  ".join([line for line in said.splitlines() if line.strip()][-count:])


def last_step(run: Path) -> int:
    """The last step in the run's log, read from its end; 0 for none yet."""
    try:
        with os.fdopen(open_regular(run / "log.jsonl"), "rb") as file:
            file.seek(max(file.seek(0, 2) - 4096, 0))
            lines = file.read().splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        with contextlib.suppress(ValueError, TypeError, AttributeError):
            step = parse_json(line).get("step")
            if isinstance(step, int):
                return step
    return 0
