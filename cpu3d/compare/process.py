"""One subcommand in a process of its own: watched, told of signals, and ended with us."""

import contextlib
import os
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Any, Iterator, List, Optional, Sequence, Tuple

from cpu3d.distributed.plan import of_nobody
from cpu3d.errors import DivergedError, InputError
from cpu3d.util.child import PROGRAM, ROOT, how_ended, last_step, last_words, start, told_of_signals
from cpu3d.util.progress import bar

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
                step = min(last_step(run), steps) if run else 0
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
    ended = how_ended(returncode)
    problem = f"{label} must end well, got {ended}; all of it is in {log}, which ends:\n  {last_words(log, begin)}"
    if returncode == DivergedError.exit_code:
        return RunDivergedError(problem, returncode, f"{what} diverged")
    return RunFailedError(problem, returncode if returncode in range(1, 7) else 1, f"{what} ended with {ended}")


@contextlib.contextmanager
def _child(command: List[str], output: Any) -> Iterator[Tuple[subprocess.Popen, List[int]]]:
    """A process, and the signals of ours that it was told of, each as SIGINT: the second one stops it unsaved."""
    children: List[subprocess.Popen] = []
    with told_of_signals(children, as_signal=lambda number: signal.SIGINT) as told:
        child = start(command, output, of_nobody(os.environ), cwd=ROOT)
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
