"""The ends of a process: the table of endings, and the exceptions that lead to them.

The exceptions mean "your input, your host or your data, not our bug".
"""

import errno
import signal
from dataclasses import dataclass
from typing import Dict, Iterable, Optional

from memory_estimator.common.files import NotRegularError
from models.native.library import InstructionSetError


class InputError(Exception):
    """Bad input: one or more problems, each as *name* must *rule*, got *value*; *what to do*."""

    exit_code = 2

    def __init__(self, *problems: str):
        self.problems = problems
        super().__init__("\n".join(problems))


class DoesNotFitError(InputError):
    """A job that may not fit this host's free memory; a smaller job or a larger host could run
    it."""

    exit_code = 3


class DivergedError(InputError):
    """Losses that are too high, or numbers that are not finite: of a training, or a network's
    answers."""

    exit_code = 4


class MemoryRunsOutError(InputError):
    """A run that stopped and was saved before the kernel could kill it."""

    exit_code = 5


class WorkerLostError(InputError):
    """Another worker of the run, or the connection to it, is gone, or this one hangs."""

    exit_code = 6


class WorkersDifferError(WorkerLostError):
    """The workers must have the same weights but do not: no weights may be saved."""


class Interrupted(KeyboardInterrupt):
    """A signal that a run has answered by saving; the process ends with 128 + its number, as shells
    have it."""

    def __init__(self, message: str, signal_number: int = signal.SIGINT):
        self.exit_code = 128 + signal_number  # 130 after SIGINT, 143 after SIGTERM
        super().__init__(message)


FULL = (errno.ENOSPC, errno.EDQUOT)  # of a disk, and of a user's share of one


class NoRoomError(OSError):
    """A file that its disk has no room for; a file of that name from before is as it was."""

    def __str__(self) -> str:
        todo = "free space there and repeat the command"
        return f"{fault_of(self)}; {todo}: nothing is lost, files from before are as they were"


def fault_of(error: OSError) -> str:
    """What failed, with the name of the file, without Python's own words and without what to
    do."""
    words = error.strerror or "failed"
    if error.strerror is None or isinstance(error, NotRegularError):
        return str(error)
    if error.errno not in FULL:
        return f"{error.filename}: {words}" if error.filename else words
    return f"{error.filename or 'a file'} must fit on its disk, got {words}"


@dataclass(frozen=True)
class Ending:
    """A way for a process to end."""

    state: str  # of a worker that ended so, as `status` shows it
    words: str  # of the event, for --help and for `launch`
    # what to do next; {again}: the same command, and from where; {rates}: with half the rates
    advice: str = "{again}"


ENDINGS: Dict[int, Ending] = {
    0: Ending("finished", "done", "more --steps, --epochs or --budget-minutes continue it"),
    1: Ending(
        "failed", "failed, for example on a full disk", "correct what the error names; then {again}"
    ),
    InputError.exit_code: Ending(
        "failed", "bad input", "correct what the error names; then {again}"
    ),
    DoesNotFitError.exit_code: Ending(
        "too large",
        "does not fit the memory",
        "choose smaller settings, end other programs, or --force; then {again}",
    ),
    DivergedError.exit_code: Ending(
        "diverged",
        "diverged: losses too high or not finite",
        "correct the case, then {again}; or halve the rates: {again}{rates}",
    ),
    MemoryRunsOutError.exit_code: Ending(
        "out of memory",
        "memory was running out: stopped and saved",
        "end other programs, or take a leaner --policy or a larger host; then {again}",
    ),
    WorkerLostError.exit_code: Ending("broken off", "lost another worker, or hung"),
    128 + signal.SIGINT: Ending("interrupted", "stopped by SIGINT, and saved"),
    128 + signal.SIGTERM: Ending("interrupted", "stopped by SIGTERM, and saved"),
    -signal.SIGTERM: Ending("failed", "ended before it could save"),
    -signal.SIGKILL: Ending("failed", "killed by a user, or by the kernel when memory ran out"),
}
"""Exit code, or a signal's number below 0, -> its meaning: the one table, for --help, `status` and
`launch`."""


def ending_of(code: int) -> Ending:
    """The ending of an exit code; an unknown code has an ending without words."""
    return ENDINGS.get(code, Ending("failed", ""))


def exit_code_of(error: Optional[BaseException]) -> int:
    """The exit code of a process that ends with this exception; 0 for None."""
    if error is None:
        return 0
    if isinstance(error, (NotRegularError, InstructionSetError, ModuleNotFoundError)):
        return InputError.exit_code
    if hasattr(error, "exit_code"):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    return 1


def raise_if_any(problems: Iterable[str]) -> None:
    """Raise an InputError with all the problems, if there are any."""
    lines = tuple(problems)
    if lines:
        raise InputError(*lines)
