"""The exceptions that mean "your input, your host or your data, not our bug", and what a process ends with for each."""

import platform
import signal
import sys
from typing import Iterable

from memory_estimator.common.schema import in_checkout


class InputError(Exception):
    """Bad input: one or more problems, each as *name* must *rule*, got *value*; *what to do*.

    The command line prints them, one a line, and exits with `exit_code`.
    """

    exit_code = 2

    def __init__(self, *problems: str):
        self.problems = problems
        super().__init__("\n".join(problems))


class DoesNotFitError(InputError):
    """A job that this host's free memory may not hold; it could run elsewhere, or smaller."""

    exit_code = 3


class DivergedError(InputError):
    """Losses of a training that are too high, or numbers that are not finite: of a training, or a network's answers."""

    exit_code = 4


class MemoryRunsOutError(InputError):
    """A run that was stopped, and saved, before the kernel would have killed it."""

    exit_code = 5


class WorkerLostError(InputError):
    """Another worker of the run, or the way to it, is gone, or this one hangs."""

    exit_code = 6


class WorkersDifferError(WorkerLostError):
    """Workers that should have the same weights do not: none of them is to be saved."""


class Interrupted(KeyboardInterrupt):
    """A signal that a run has answered by saving; the process ends with 128 + its number, as shells have it."""

    def __init__(self, message: str, signal_number: int = signal.SIGINT):
        self.signal_number = signal_number
        super().__init__(message)

    @property
    def exit_code(self) -> int:
        """130 after SIGINT, 143 after SIGTERM."""
        return 128 + self.signal_number


def refuse(problems: Iterable[str]) -> None:
    """Raise one InputError with all the problems, where there are any."""
    problems = tuple(problems)
    if problems:
        raise InputError(*problems)


def how_to_install(extra: str = "") -> str:
    """The command that installs an extra of pyproject.toml, by default this host's engine; run.sh's in a checkout."""
    if in_checkout() and extra == "mlflow":
        return f"run `{sys.executable} -m pip install -r requirements-mlflow.txt`"
    if in_checkout():
        return f"run `./run.sh setup{' --gpu' if extra == 'gpu' else ''}`"
    has_itex = sys.platform == "linux" and platform.machine() == "x86_64" and sys.version_info < (3, 12)
    engine = "itex" if has_itex else "tensorflow"
    # MLflow together with the engine: alone it would bring a protobuf that ITEX cannot take.
    extras = {"": engine, "mlflow": f"{engine},mlflow"}.get(extra, extra)
    return f"run `pip install 'cpu3d[{extras}]'`"
