"""Worker processes of this host, started and watched together: the first that fails ends all, and is named.

    supervise([Job("worker 0", "this host", command, environ, log), ...])

The others of a run cannot go on without one: TensorFlow tells them within seconds, and they end with the code of
WorkerLostError. So that code is never the cause where a worker ended in another way.
"""

import contextlib
import shlex
import signal
import subprocess
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from cpu3d.child import how_ended, last_words, start, told_of_signals
from cpu3d.errors import (
    DivergedError,
    DoesNotFitError,
    InputError,
    Interrupted,
    MemoryRunsOutError,
    WorkerLostError,
)
from cpu3d.guard.heartbeat import is_suspended

LOST = WorkerLostError.exit_code

WORDS = {
    1: "it failed",
    InputError.exit_code: "bad input",
    DoesNotFitError.exit_code: "it does not fit the memory",
    DivergedError.exit_code: "it diverged",
    MemoryRunsOutError.exit_code: "memory was running out, and it saved",
    LOST: "it lost another worker, or hung",
    128 + signal.SIGINT: "told by SIGINT, and it saved",
    128 + signal.SIGTERM: "told by SIGTERM, and it saved",
    -signal.SIGTERM: "told to end before it could save",
    -signal.SIGKILL: "killed by someone, or by the kernel for want of memory",
}
"""What exit codes say, and signals, as negative numbers."""

STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM, -signal.SIGINT, -signal.SIGTERM)
"""How a worker ends that was told to."""

TOGETHER = (MemoryRunsOutError.exit_code, 128 + signal.SIGINT, 128 + signal.SIGTERM)
"""How workers end that have agreed to: they do so after the same step, and the chief saves."""


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


@dataclass(frozen=True)
class Patience:
    """How long what may take."""

    poll_s: float = 0.2
    look_s: float = 5.0
    """Between two looks for workers that hang."""
    settle_s: float = 8.0
    """From the first that lost another worker until that one is looked for elsewhere: a failing process takes a while
    to end, and the others are told before it has."""
    saving_s: float = 300.0
    """From the first that ended by agreement until the others are asked to end as well."""
    hears_s: float = 20.0
    """From any other failure while training: the others hear of it, and the chief saves."""
    grace_s: float = 300.0
    """From the request to end to SIGKILL: a step of the largest volumes takes minutes."""

    def before_stop_s(self, code: int) -> float:
        """From a worker's end by `code` until the others are asked to end."""
        if code in (InputError.exit_code, DoesNotFitError.exit_code):  # before training, so the others wait for it
            return 0.0
        return self.settle_s if code == LOST else self.saving_s if code in TOGETHER else self.hears_s


class WorkerFailedError(InputError):
    """A worker that did not end well, and so all others with it."""

    def __init__(self, problem: str, exit_code: int):
        super().__init__(problem)
        self.exit_code = exit_code


def supervise(
    jobs: Sequence[Job],
    *,
    show: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda line: None,
    hanging: Callable[[Sequence[int]], Mapping[int, str]] = lambda pids: {},
    patience: Patience = Patience(),
) -> None:
    """Run all `jobs` until each has ended well. Call it in the main thread.

    `show` is called many times a second, `say` with what is to be told at once, `hanging` now and then: with the
    process ids, it says which of them hang and how one knows. SIGINT and SIGTERM are passed on, and when all have ended
    so raised as Interrupted. Raises WorkerFailedError, of the first that failed, when none is left. When we are killed
    the workers get SIGTERM.
    """
    running: List[_Running] = []
    children: List[subprocess.Popen] = []
    with contextlib.ExitStack() as logs, told_of_signals(children, as_signal=_as_told) as told:
        try:
            for job in jobs:
                running.append(_start(job, logs))
                children.append(running[-1].child)
                if told:  # while it was being started
                    running[-1].child.send_signal(_as_told(told[0]))
            _watch(running, told, show, say, hanging, patience)
        finally:
            _stop(running, show, patience)
            show()
    failed = _culprit(running, told)
    if failed:
        raise _failure(failed, running)
    if told and any(worker.code for worker in running):  # else it came when all was done
        raise Interrupted("all workers have ended; the same command continues", _as_told(told[0]))


# --- Private helpers ---


@dataclass
class _Running:
    """A worker that was started."""

    job: Job
    child: subprocess.Popen
    begin: int
    """Where in the log this attempt begins."""
    began_s: float
    ended_s: Optional[float] = None
    stopped: bool = False
    """Whether it was still there when all were told to end."""
    hangs: str = ""
    """How one knows that it does."""

    def note_end(self) -> bool:
        """Whether it has ended."""
        if self.ended_s is None and self.child.poll() is not None:
            self.ended_s = time.monotonic()
        return self.ended_s is not None

    def end_hanging(self, why: str) -> None:
        """Kill it, as it would hear nothing else."""
        self.hangs = why
        self.child.kill()
        self.child.wait()

    @property
    def code(self) -> int:
        return 0 if self.child.returncode is None else self.child.returncode

    def failed(self, told: Sequence[int]) -> bool:
        """Whether it ended in a way that ends all."""
        return bool(self.hangs) or (self.code != 0 and not (told and self.code in STOPPED))


def _as_told(number: int) -> int:
    """What a worker is told when we are told `number`. A closed terminal is a request to end like any other."""
    return signal.SIGTERM if number == signal.SIGHUP else number


def _start(job: Job, logs: contextlib.ExitStack) -> _Running:
    file = logs.enter_context(job.log.open("ab"))
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    file.write(f"--- {now} {job.name} on {job.host}: {shlex.join(job.command)}\n".encode())
    file.flush()
    return _Running(job, start(job.command, file, job.environ), file.tell(), time.monotonic())


def _left(running: Sequence[_Running]) -> List[_Running]:
    """Those that have not ended, after a look at all of them."""
    return [worker for worker in running if not worker.note_end()]


def _watch(
    running: Sequence[_Running],
    told: Sequence[int],
    show: Callable[[], None],
    say: Callable[[str], None],
    hanging: Callable[[Sequence[int]], Mapping[int, str]],
    patience: Patience,
) -> None:
    """Until all have ended, or one has failed and the others have had the time that they need then."""
    looked_s = time.monotonic()
    said = False
    while _left(running):
        show()
        for worker in running:
            if not worker.failed(told):
                continue
            if not said:
                say(f"launch: {worker.job.name} has ended with {_ending(worker)}; waiting for the others to end")
                said = True
            if time.monotonic() - (worker.ended_s or 0) >= patience.before_stop_s(worker.code):
                return
        if time.monotonic() - looked_s >= patience.look_s:
            looked_s = time.monotonic()
            _end_hanging(_left(running), hanging)
        time.sleep(patience.poll_s)


def _end_hanging(running: Sequence[_Running], hanging: Callable[[Sequence[int]], Mapping[int, str]]) -> None:
    found: Dict[int, str] = dict(hanging([worker.child.pid for worker in running]))
    for worker in running:
        if worker.child.pid in found:
            worker.end_hanging(found[worker.child.pid])


def _stop(running: Sequence[_Running], show: Callable[[], None], patience: Patience) -> None:
    """Ask those that are left to end, and after a while make them."""
    left = _left(running)
    for worker in left:
        if is_suspended(worker.child.pid):
            worker.end_hanging("suspended by a signal")
        worker.stopped = True
        worker.child.terminate()
    until_s = time.monotonic() + patience.grace_s
    while _left(left):
        show()
        if time.monotonic() > until_s:
            for worker in left:
                worker.child.kill()
        time.sleep(patience.poll_s)


def _culprit(running: Sequence[_Running], told: Sequence[int]) -> Optional[_Running]:
    """The first that failed by itself; else the first that lost another worker, which then is on another host."""
    by_end = sorted(running, key=lambda worker: (not worker.hangs, worker.ended_s))
    failed = [worker for worker in by_end if worker.failed(told)]
    of_stopping = (*STOPPED, -signal.SIGKILL)
    own = [w for w in failed if w.hangs or not (w.code == LOST or (w.stopped and w.code in of_stopping))]
    lost = [w for w in failed if w.code == LOST]
    return next(iter(own + lost + failed), None)


def _failure(failed: _Running, running: Sequence[_Running]) -> WorkerFailedError:
    job, after_s = failed.job, (failed.ended_s or 0) - failed.began_s
    others = [f"{other.job.name} {_ending(other)}" for other in running if other is not failed]
    rest = f"\n  the others: {'; '.join(others)}" if others else ""
    if failed.code == LOST and not failed.hangs:
        rest += "\n  no worker here failed in another way: where there are other hosts, look into their logs"
    problem = (
        f"{job.name} on {job.host} (process {failed.child.pid}) must end well, got {_ending(failed)}, after "
        f"{after_s:.0f} s; all of it is in {job.log}, which ends:\n  {last_words(job.log, failed.begin)}{rest}"
    )
    if failed.hangs or failed.code < 0:
        return WorkerFailedError(problem, LOST)
    return WorkerFailedError(problem, failed.code if failed.code in WORDS else 1)


def _ending(worker: _Running) -> str:
    """In words, such as "exit code 4, it diverged"."""
    if worker.hangs:
        return f"hangs, {worker.hangs}"
    if worker.code == 0:
        return "ended well"
    said = WORDS.get(worker.code)
    return f"{how_ended(worker.code)}{f' ({said})' if said else ''}"
