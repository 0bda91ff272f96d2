"""Worker processes of this host, started and watched together: the first that fails ends all, and is named.

    supervise([Job("worker 0", command, environ, log), ...], run)

The others of a run cannot go on without one: their exchange fails within seconds, and they end with the code of
WorkerLostError. So that code is never the cause where a worker ended in another way. Whatever is read of the run's file
system, which may stop to answer, is read in a thread of its own.
"""

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from cpu3d.errors import DivergedError, DoesNotFitError, InputError, Interrupted, MemoryRunsOutError, WorkerLostError
from cpu3d.training.heartbeat import Heartbeat, is_here, is_suspended, read_heartbeats
from cpu3d.util.child import family, forward_signals, how_ended, last_words, start

LOST = WorkerLostError.exit_code

LAST_LOOK_S = 5.0
"""For what is still to be read when all have ended."""

WORDS = {
    1: "it failed",
    InputError.exit_code: "bad input",
    DoesNotFitError.exit_code: "it does not fit the memory",
    DivergedError.exit_code: "it diverged",
    MemoryRunsOutError.exit_code: "memory was running out, and it saved",
    LOST: "it lost another worker, or hung",
    128 + signal.SIGINT: "told by SIGINT",
    128 + signal.SIGTERM: "told by SIGTERM, and it saved",
    -signal.SIGTERM: "told to end before it could save",
    -signal.SIGKILL: "killed by someone, or by the kernel for want of memory",
}
"""What exit codes say, and signals, as negative numbers."""

STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM, -signal.SIGINT, -signal.SIGTERM)
"""How a worker ends that was told to."""

AT_ONCE = (InputError.exit_code, DoesNotFitError.exit_code)
"""How a worker ends that mostly has not begun: then the others wait for it in vain."""


@dataclass(frozen=True)
class Patience:
    """How long each wait may take, in seconds. A worker that hangs ends by its own watchdog, or a second Ctrl-C."""

    poll_s: float = 0.2
    settle_s: float = 8.0
    """From the first that failed until the others are asked to end: they hear of it as their exchange fails, and the
    chief saves. One that computes finishes its step in any case, whatever it is asked."""
    grace_s: float = 3600.0
    """From the request to end to SIGKILL: steps, validations and checkpoints may take long."""
    suspended_s: float = 60.0
    """Without a beat, of a worker that a signal has stopped: it holds up all others."""
    silent_s: float = 300.0
    """Of any other: there is a beat every few seconds, but importing a library from a slow disk may take long."""


class WorkerFailedError(InputError):
    """A worker that did not end well, and so all others with it."""

    def __init__(self, problem: str, exit_code: int):
        super().__init__(problem)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Job:
    """A worker to start."""

    name: str
    """Such as "worker 1"."""
    command: Tuple[str, ...]
    environ: Mapping[str, str]
    """All of its environment."""
    log: Path
    """What it says is added to it; its folder exists."""


def supervise(
    jobs: Sequence[Job],
    run: Path,
    *,
    show: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda line: None,
    patience: Patience = Patience(),
) -> None:
    """Run all `jobs` of a run until each has ended well. Call it in the main thread.

    `show` is called many times a second, in another thread, `say` with what is to be told at once. SIGINT and SIGTERM
    are passed on, and when all have ended so raised as Interrupted. Raises WorkerFailedError, of the first that failed,
    when none is left but such as nothing ends. When we are killed the workers get SIGTERM.
    """
    running: List[_Running] = []
    children: List[subprocess.Popen] = []
    with forward_signals(children, as_signal=_passed_on) as signals, _Observer(run, show, patience) as observer:
        try:
            for job in jobs:
                running.append(_Running(job))
                children.append(running[-1].child)
                if signals:  # while it was being started
                    running[-1].child.send_signal(_passed_on(signals[0]))
            _watch(running, signals, observer, say, patience)
        except BaseException:
            for worker in running:
                worker.ask_to_end()
            _watch(running, signals, observer, say, patience)
            raise
    failed = _culprit(running, signals)
    if failed:
        raise _failure(failed, running)
    if signals and any(worker.code for worker in running):  # else it came when all was done
        raise Interrupted("all workers have ended; the same command continues", _passed_on(signals[0]))


def wait_for_earlier(run: Path, say: Callable[[str], None], most_s: float = 60.0) -> None:
    """Return when `run` has no workers here: those of a launch that was killed still finish their step and save.

    Raises InputError where they go on for `most_s` and three of their steps, as those of a run that lives do.
    """
    begin_s, said = time.monotonic(), False
    while True:
        left = [beat for beat in read_heartbeats(run).values() if isinstance(beat, Heartbeat) and is_here(beat)]
        if not left:
            return
        names = ", ".join(f"worker {beat.rank} (process {beat.pid})" for beat in left)
        if time.monotonic() > begin_s + most_s + 3 * max(beat.longest_step_s or 0.0 for beat in left):
            raise InputError(f"run {run} must have no other workers, got {names}; wait for them, or end them")
        if not said:
            say(f"launch: waiting for {names} of an earlier attempt to end")
        said = True
        time.sleep(0.2)


# --- Private helpers ---


class _Running:
    """A worker that was started, and what is known of it until it has ended."""

    asked_s: Optional[float] = None
    """When it was asked to end, because others had failed."""
    hangs = ""
    """How one knows that it does."""
    ended_s: Optional[float] = None

    def __init__(self, job: Job):
        self.job = job
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        with job.log.open("ab") as file:
            file.write(f"--- {now} {job.name}: {shlex.join(job.command)}\n".encode())
            file.flush()
            self.child, self.begin, self.began_s = start(job.command, file, job.environ), file.tell(), time.monotonic()

    def has_ended(self) -> bool:
        """Look whether it has."""
        if self.ended_s is None and self.child.poll() is not None:
            self.ended_s = time.monotonic()
        return self.ended_s is not None

    @property
    def code(self) -> int:
        """What it has ended with, below 0 for a signal."""
        return self.child.returncode or 0

    def ask_to_end(self) -> None:
        """Once, where it has not ended; one that is suspended would not hear it."""
        if self.asked_s is None and not self.has_ended():
            self.asked_s = time.monotonic()
            if is_suspended(self.child.pid):
                self.kill("suspended by a signal")
            self.child.terminate()

    def kill(self, hangs: str = "") -> None:
        """With all that it has started."""
        self.hangs = self.hangs or hangs
        for pid in family(self.child.pid) if self.child.poll() is None else ():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def failed(self, signals: Sequence[int]) -> bool:
        """Whether it ended in a way that ends all."""
        return bool(self.hangs) or (self.code != 0 and not (signals and self.code in STOPPED))

    @property
    def ending(self) -> str:
        """In words, such as "exit code 4 (it diverged)"."""
        if self.hangs or not self.code:
            return f"hangs, {self.hangs}" if self.hangs else "ended well"
        return how_ended(self.code) + (f" ({WORDS[self.code]})" if self.code in WORDS else "")


class _Observer(threading.Thread):
    """Reads heartbeats, and shows what is new, until it is left."""

    def __init__(self, run: Path, show: Callable[[], None], patience: Patience):
        super().__init__(daemon=True)
        self._run, self._show, self._patience = run, show, patience
        self._done = threading.Event()
        self._seen: Dict[int, Tuple[float, float]] = {}
        """Process of this place -> its last beat, and when that was seen first: the time of day may jump."""
        self._hanging: Dict[int, str] = {}
        """Process -> how one knows that it hangs: it lives and beats no more."""

    def __enter__(self) -> "_Observer":
        self.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._done.set()
        self.join(LAST_LOOK_S)

    def run(self) -> None:
        done = False
        while not done:
            done = self._done.wait(self._patience.poll_s)
            with contextlib.suppress(OSError):
                self._show()
                for beat in read_heartbeats(self._run).values():
                    if isinstance(beat, Heartbeat) and is_here(beat):
                        self._note(beat)

    def hangs(self, worker: _Running) -> str:
        """How one knows that a worker hangs, or one below it, where it is Horovod's launcher; "" where none does."""
        return next((self._hanging[pid] for pid in family(worker.child.pid) if pid in self._hanging), "")

    def _note(self, beat: Heartbeat) -> None:
        last, seen_s = self._seen.get(beat.pid, (None, 0.0))
        if last != beat.beat:
            seen_s = time.monotonic()
        self._seen[beat.pid] = beat.beat, seen_s
        silent_s, suspended = time.monotonic() - seen_s, is_suspended(beat.pid)
        limit_s = self._patience.suspended_s if suspended else self._patience.silent_s
        if silent_s > limit_s and (suspended or beat.exit_code is None):  # one that has ended waits for the chief
            with tempfile.TemporaryFile(dir=self._run) as file:  # raises on a full disk, where beats are lost
                file.write(bytes(2**16))
            why = "as a signal has stopped it" if suspended else "though it lives"
            self._hanging[beat.pid] = f"silent for {silent_s:.0f} s while {beat.phase}, {why}"


def _watch(
    running: Sequence[_Running],
    signals: Sequence[int],
    observer: _Observer,
    say: Callable[[str], None],
    patience: Patience,
) -> None:
    """Return when all have ended. Where one has failed, the others are asked to, and in the end made to."""
    said = False
    while True:
        left, now = [worker for worker in running if not worker.has_ended()], time.monotonic()
        if not left:
            return
        failed = [worker for worker in running if worker.ended_s is not None and worker.failed(signals)]
        if failed and not said:
            said = True
            say(f"launch: {failed[0].job.name} has ended with {failed[0].ending}; waiting for the others to end")
        waits = [now - worker.ended_s < patience.settle_s and worker.code not in AT_ONCE for worker in failed]
        for worker in left:
            if failed and not all(waits):
                worker.ask_to_end()
            hangs = observer.hangs(worker)
            if hangs or (worker.asked_s is not None and now - worker.asked_s > patience.grace_s):
                worker.kill(hangs)
        time.sleep(patience.poll_s)


def _culprit(running: Sequence[_Running], signals: Sequence[int]) -> Optional[_Running]:
    """The first that failed by itself; else the first that lost another worker, which then is on another host."""
    failed = sorted((one for one in running if one.failed(signals)), key=lambda one: one.ended_s or 0.0)
    of_stopping = (*STOPPED, -signal.SIGKILL)
    own = [
        one
        for one in failed
        if one.hangs or not (one.code == LOST or (one.asked_s is not None and one.code in of_stopping))
    ]
    return next(iter([*own, *(one for one in failed if one.code == LOST), *failed]), None)


def _failure(failed: _Running, running: Sequence[_Running]) -> WorkerFailedError:
    job, words = failed.job, ["(no word: its file system does not answer)"]
    reader = threading.Thread(target=lambda: words.insert(0, last_words(job.log, failed.begin)), daemon=True)
    reader.start()
    reader.join(LAST_LOOK_S)
    others = [f"{other.job.name} {other.ending}" for other in running if other is not failed]
    rest = f"\n  the others: {'; '.join(others)}" if others else ""
    if failed.code == LOST and not failed.hangs:
        rest += "\n  no worker here failed in another way: where there are other hosts, look into their logs"
    code = LOST if failed.hangs or failed.code < 0 else failed.code if failed.code in WORDS else 1
    return WorkerFailedError(
        f"{job.name} on {socket.gethostname()} (process {failed.child.pid}) must end well, got {failed.ending}, after "
        f"{(failed.ended_s or 0) - failed.began_s:.0f} s; all of it is in {job.log}, which ends:\n  {words[0]}{rest}",
        code,
    )


def _passed_on(number: int) -> int:
    """What a worker is told when we are told `number`. A closed terminal is a request to end like any other."""
    return signal.SIGTERM if number == signal.SIGHUP else number
