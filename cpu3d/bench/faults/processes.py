"""One attempt of a command that may be killed under way: start it, find the worker to kill, see that all of it ends."""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, List, Optional, Sequence

import psutil

from cpu3d.errors import InputError
from cpu3d.util.child import PROGRAM, ROOT, start

END_S = 60.0
"""Within which all processes of a command must have ended when one of them was killed."""

POLL_S, LOOK_S = 0.05, 0.3
"""Between two looks for a worker that is not there yet, and for which process it is."""

Alive = Callable[[], bool]


class CommandFailedError(InputError):
    """A command that nobody has disturbed did not end well."""

    exit_code = 1


@dataclass(frozen=True)
class Ended:
    """How an attempt came to its end."""

    exit_code: int
    """Of the process that was started; -9 where it was the one to be killed."""
    killed: bool
    """Whether there was a kill; otherwise it has ended by itself."""
    at_s: float
    """From its start to the kill, or to its end without one."""
    ended_s: float
    """From the kill until no process was left."""
    problems: List[str]


def attempt(
    command: Sequence[str], log: Path, *, victim: Optional[int] = None, wait: Callable[[float, Alive], bool]
) -> Ended:
    """Do `python -m cpu3d command` and send SIGKILL once `wait(begin, alive)` says so, by returning True.

    `victim` is the rank of the worker to kill among those of `launch`; None is the process itself.
    """
    with log.open("a", encoding="utf-8") as output:
        output.write(f"$ cpu3d {shlex.join(command)}\n")
        output.flush()
        begin = time.monotonic()
        child = start([*PROGRAM, *command], output, cwd=ROOT)
        try:
            family = _Family(child, victim)
            is_time = wait(begin, family.alive)
            while is_time and family.target is None and family.alive():
                time.sleep(POLL_S)
            killed = is_time and family.target is not None and family.alive() and _killed(family.target)
            at_s = time.monotonic() - begin
            if killed:
                output.write(f"SIGKILL to {'the process' if victim is None else f'worker {victim}'}\n")
            problems = _wait_until_gone(child, family.members()) if killed else []
            child.wait()
            return Ended(child.returncode, killed, at_s, time.monotonic() - begin - at_s, problems)
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()


# --- Private helpers ---


class _Family:
    """A command's process, all those that it starts, and which of them is to be killed."""

    def __init__(self, child: subprocess.Popen, victim: Optional[int]):
        self._child, self._victim = child, victim
        self._sessions = {child.pid}
        self._looked_at = 0.0
        self.target = psutil.Process(child.pid) if victim is None else None

    def alive(self) -> bool:
        """Whether the command's own process is; looks for the target meanwhile, which takes milliseconds."""
        if self.target is None and time.monotonic() - self._looked_at > LOOK_S:
            self._look()
        return self._child.poll() is None

    def members(self) -> List[psutil.Process]:
        """What lives of it, with or without its parent: each worker of `launch` is in a session of its own."""
        self._look()
        return [process for process in psutil.process_iter() if _session(process) in self._sessions]

    def _look(self) -> None:
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(self._child.pid).children(recursive=True):
                self._sessions.add(process.pid)
                if self.target is None and _rank(process) == self._victim:
                    self.target = process
        self._looked_at = time.monotonic()


def _rank(process: psutil.Process) -> Optional[int]:
    """Which worker a process is, by what it was started with."""
    with contextlib.suppress(psutil.Error, ValueError, KeyError, TypeError):
        return int(json.loads(process.environ()["TF_CONFIG"])["task"]["index"])
    return None


def _session(process: psutil.Process) -> Optional[int]:
    with contextlib.suppress(OSError):
        return os.getsid(process.pid)
    return None


def _killed(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        process.send_signal(signal.SIGKILL)
        return True
    return False


def _wait_until_gone(child: subprocess.Popen, others: List[psutil.Process]) -> List[str]:
    """Wait for the command and all that it had started; end by force what does not go, and say so."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(END_S)
    problems = []
    if child.poll() is None:
        problems.append(f"the command must end within {END_S:g} s of the kill, it did not")
        child.kill()
    _, left = psutil.wait_procs([process for process in others if process.pid != child.pid], timeout=END_S)
    for process in left:
        problems.append(f"process {process.pid} must end within {END_S:g} s of the kill, it did not")
        _killed(process)
    return problems
