"""One subcommand in a process of its own: watched, told of signals, and ended with us."""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Iterator, List, Optional, Sequence, Tuple

from cpu3d.errors import InputError
from cpu3d.progress import bar

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = (sys.executable, "-m", "cpu3d")
"""What every run is done by."""

WITH_PARENT = (sys.executable, str(Path(__file__).with_name("with_parent.py")))

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals of ours that the process is told of, but for those that we were told to ignore, as `nohup` does."""

NOT_FINITE = "must be finite"
"""In the last words of a training whose loss or weights, or of an evaluation whose answers, are no numbers any more."""

LAST_LINES = 12
"""Of a failed process's words that are shown."""

POLL_S = 1.0


class RunFailedError(InputError):
    """A process that did not end well."""

    def __init__(self, problem: str, exit_code: int, why: str = "failed"):
        super().__init__(problem)
        self.exit_code = exit_code
        self.why = why
        """In a few words, without paths."""
        self.run: Any = None
        """The `PlannedRun` that failed, where it was one."""


class RunDivergedError(RunFailedError):
    """A training, or its evaluation, whose numbers are not finite. The same run would end so again."""


def call(command: Sequence[str], log: Path, label: str, *, run: Optional[Path] = None, steps: int = 1) -> None:
    """Do `python -m cpu3d command`, its words added to `log`, with a bar of the `steps` that the folder `run` logs.

    Raises RunDivergedError or RunFailedError, with the last of what it said, and KeyboardInterrupt when it has ended
    after a signal.
    """
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ cpu3d {shlex.join(command)}\n")
        file.flush()
        begin = os.fstat(file.fileno()).st_size  # what was said before is of an earlier attempt
        with bar(label, steps) as advance, _child([*PROGRAM, *command], file) as (child, told):
            shown = 0
            while child.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(POLL_S)
                step = min(_last_step(run), steps) if run else 0
                advance(step - shown)
                shown = step
            if child.returncode == 0:
                advance(steps - shown)
    if told:
        raise KeyboardInterrupt("the same command continues")
    if child.returncode != 0:
        raise _failure(child.returncode, command[0], label, log, begin)


# --- Private helpers ---


def _failure(returncode: int, what: str, label: str, log: Path, begin: int) -> RunFailedError:
    with log.open("rb") as file:
        file.seek(begin)
        said = file.read().decode("utf-8", errors="replace")
    ended = f"signal {-returncode}" if returncode < 0 else f"exit code {returncode}"
    last = "\n  ".join([line for line in said.splitlines() if line.strip()][-LAST_LINES:])
    problem = f"{label} must end well, got {ended}; all of it is in {log}, which ends:\n  {last}"
    if returncode == 2 and NOT_FINITE in " ".join(said.split()):
        return RunDivergedError(problem, 2, f"{what} diverged")
    return RunFailedError(problem, returncode if returncode in (1, 2, 3) else 1, f"{what} ended with {ended}")


@contextlib.contextmanager
def _child(command: List[str], output: Any) -> Iterator[Tuple[subprocess.Popen, List[int]]]:
    """A process, and the signals of ours that it was told of, each as SIGINT: the second one stops it unsaved.

    It is in a session of its own, as Ctrl-C of a terminal would reach it twice. When we are killed it gets SIGTERM.
    """
    told: List[int] = []
    children: List[subprocess.Popen] = []

    def pass_on(number, frame):
        told.append(number)
        for child in children:
            child.send_signal(signal.SIGINT)

    handled = [number for number in PASSED_ON if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, pass_on) for number in handled}
    try:
        with_us = [*WITH_PARENT, str(os.getpid()), *command]
        child = subprocess.Popen(with_us, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        children.append(child)
        if told:  # while it was being started
            child.send_signal(signal.SIGINT)
        try:
            yield child, told
        except BaseException:
            if not told:  # a second signal would stop it unsaved
                child.terminate()
            raise
        finally:
            child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _last_step(folder: Path) -> int:
    """The last step in the run's log, read from its end; 0 for none yet."""
    try:
        with (folder / "log.jsonl").open("rb") as file:
            file.seek(max(file.seek(0, 2) - 4096, 0))
            lines = file.read().splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        with contextlib.suppress(ValueError, TypeError, AttributeError):
            step = json.loads(line).get("step")
            if isinstance(step, int):
                return step
    return 0
