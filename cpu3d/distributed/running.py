"""A worker process of a launch: what is started, and what is known of it until it has ended."""

import contextlib
import os
import shlex
import signal
import subprocess
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Mapping, Optional, Sequence, Tuple

from cpu3d.errors import DivergedError, DoesNotFitError, InputError, MemoryRunsOutError, WorkerLostError
from cpu3d.util.child import family, how_ended, start

WORDS = {
    1: "it failed",
    InputError.exit_code: "bad input",
    DoesNotFitError.exit_code: "it does not fit the memory",
    DivergedError.exit_code: "it diverged",
    MemoryRunsOutError.exit_code: "memory was running out, and it saved",
    WorkerLostError.exit_code: "it lost another worker, or hung",
    128 + signal.SIGINT: "told by SIGINT",
    128 + signal.SIGTERM: "told by SIGTERM, and it saved",
    -signal.SIGTERM: "told to end before it could save",
    -signal.SIGKILL: "killed by someone, or by the kernel for want of memory",
}
"""What exit codes say, and signals, as negative numbers."""

STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM, -signal.SIGINT, -signal.SIGTERM)
"""How a worker ends that was told to."""


@dataclass(frozen=True)
class Job:
    """A worker to start."""

    name: str
    """Such as "worker 1"."""
    host: str
    """Where, for people."""
    command: Tuple[str, ...]
    environ: Mapping[str, str]
    """All of its environment."""
    log: Path
    """What it says is added to it; its folder exists."""


@dataclass
class Running:
    """A worker that was started."""

    job: Job
    child: subprocess.Popen
    begin: int
    """Where in the log this attempt begins."""
    began_s: float
    dies_s: float
    """From SIGKILL until nothing is expected any more."""
    ended_s: Optional[float] = None
    killed_s: Optional[float] = None
    stopped: bool = False
    """Whether it was still there when all were told to end."""
    hangs: str = ""
    """How one knows that it does."""

    def note_end(self) -> bool:
        """Whether it has ended, or nothing will end it."""
        now = time.monotonic()
        given_up = self.killed_s is not None and now - self.killed_s > self.dies_s
        if self.ended_s is None and (self.child.poll() is not None or given_up):
            self.ended_s = now
        return self.ended_s is not None

    @property
    def undying(self) -> bool:
        return self.ended_s is not None and self.child.returncode is None

    def kill(self) -> None:
        """With all that it has started."""
        if self.killed_s is None:
            self.killed_s = time.monotonic()
            for pid in family(self.child.pid) if self.child.poll() is None else ():
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)

    def end_hanging(self, why: str) -> None:
        """Kill it, as it would hear nothing else."""
        self.hangs = why
        self.kill()

    @property
    def code(self) -> int:
        return -signal.SIGKILL if self.undying else self.child.returncode or 0

    def failed(self, told: Sequence[int]) -> bool:
        """Whether it ended in a way that ends all."""
        return bool(self.hangs) or (self.code != 0 and not (told and self.code in STOPPED))

    @property
    def ending(self) -> str:
        """In words, such as "exit code 4, it diverged"."""
        hangs = f"hangs, {self.hangs}" if self.hangs else ""
        if self.undying:
            how = "see whether the file systems that it uses answer"
            return f"{hangs or 'no end'}; SIGKILL does not end process {self.child.pid}: {how}"
        if hangs:
            return hangs
        if self.code == 0:
            return "ended well"
        said = WORDS.get(self.code)
        return f"{how_ended(self.code)}{f' ({said})' if said else ''}"


def start_job(job: Job, dies_s: float) -> Running:
    """Start it, its words to be added to its log."""
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    with job.log.open("ab") as file:
        file.write(f"--- {now} {job.name} on {job.host}: {shlex.join(job.command)}\n".encode())
        file.flush()
        return Running(job, start(job.command, file, job.environ), file.tell(), time.monotonic(), dies_s)
