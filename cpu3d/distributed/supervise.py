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
from cpu3d.training.heartbeat import STEP_PHASES, Heartbeat, is_here, is_suspended, read_heartbeats
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


@dataclass(frozen=True)
class Patience:
    """How long each wait may take, in seconds. A worker that hangs ends by its own watchdog, or a second Ctrl-C."""

    poll_s: float = 0.2
    settle_s: float = 8.0
    """From the first that lost another worker until that one is looked for elsewhere: a failing process takes a while
    to end, and the others are told before it has."""
    saving_s: float = 300.0
    """From the first that ended by agreement, after a signal or for want of memory: the chief saves."""
    hears_s: float = 20.0
    """From any other failure while training, besides the step in flight: the others hear of it."""
    grace_s: float = 300.0
    """From the request to end to SIGKILL, besides what is in flight."""
    unknown_s: float = 3600.0
    """For what is in flight where nothing tells how long it takes: a first step, a validation, a checkpoint."""
    dies_s: float = 30.0
    """From SIGKILL until a process counts as one that nothing ends, as where the kernel waits for a file system."""
    suspended_s: float = 60.0
    """Without a beat, of a worker that a signal has stopped: it holds up all others."""
    silent_s: float = 300.0
    """Of any other: there is a beat every few seconds, but importing a library from a slow disk may take long."""
    file_system_s: float = 60.0
    """Until it is said that the run's file system does not answer."""

    def before_stop_s(self, code: int, others: Sequence[Heartbeat]) -> float:
        """From a worker's end by `code` until the others, whose heartbeats these are, are asked to end."""
        if code in (MemoryRunsOutError.exit_code, *STOPPED[:2]):
            return self.saving_s
        if code == LOST:
            return self.settle_s
        busy = _busy(others)
        return self.hears_s + max(beat.longest_step_s or 0.0 for beat in busy) if busy else 0.0

    def before_kill_s(self, beats: Sequence[Heartbeat]) -> float:
        """From the request to end to SIGKILL, of the process with these heartbeats."""
        known = [2 * (beat.longest_step_s or 0.0) if beat.phase in STEP_PHASES else 0.0 for beat in _busy(beats)]
        return self.grace_s + max((seconds or self.unknown_s for seconds in known), default=0.0)


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
                running.append(_Running(job, patience))
                children.append(running[-1].child)
                if signals:  # while it was being started
                    running[-1].child.send_signal(_passed_on(signals[0]))
            _watch(running, signals, observer, say, patience)
        finally:
            _stop(running, observer, patience)
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

    def __init__(self, job: Job, patience: Patience):
        self.job, self._dies_s = job, patience.dies_s
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        with job.log.open("ab") as file:
            file.write(f"--- {now} {job.name}: {shlex.join(job.command)}\n".encode())
            file.flush()
            self.child, self.begin, self.began_s = start(job.command, file, job.environ), file.tell(), time.monotonic()
        self.ended_s: Optional[float] = None
        self._killed_s: Optional[float] = None
        self.stopped, self.hangs = False, ""
        """Whether it was still there when all were told to end, and how one knows that it hangs."""

    def note_end(self) -> bool:
        """Whether it has ended, or nothing will end it."""
        now = time.monotonic()
        given_up = self._killed_s is not None and now - self._killed_s > self._dies_s
        if self.ended_s is None and (self.child.poll() is not None or given_up):
            self.ended_s = now
        return self.ended_s is not None

    @property
    def undying(self) -> bool:
        return self.ended_s is not None and self.child.returncode is None

    def kill(self, hangs: str = "") -> None:
        """With all that it has started."""
        self.hangs = self.hangs or hangs
        if self._killed_s is None:
            self._killed_s = time.monotonic()
            for pid in family(self.child.pid) if self.child.poll() is None else ():
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)

    @property
    def code(self) -> int:
        return -signal.SIGKILL if self.undying else self.child.returncode or 0

    def failed(self, signals: Sequence[int]) -> bool:
        """Whether it ended in a way that ends all."""
        return bool(self.hangs) or (self.code != 0 and not (signals and self.code in STOPPED))

    @property
    def ending(self) -> str:
        """In words, such as "exit code 4 (it diverged)"."""
        hangs = f"hangs, {self.hangs}" if self.hangs else ""
        if self.undying:
            how = "see whether the file systems that it uses answer"
            return f"{hangs or 'no end'}; SIGKILL does not end process {self.child.pid}: {how}"
        words = f" ({WORDS[self.code]})" if self.code in WORDS else ""
        return hangs or ("ended well" if self.code == 0 else f"{how_ended(self.code)}{words}")


class _Observer(threading.Thread):
    """Reads heartbeats, and shows what is new, until it is left."""

    def __init__(self, run: Path, show: Callable[[], None], patience: Patience):
        super().__init__(daemon=True)
        self._run, self._show, self._patience = run, show, patience
        self._done = threading.Event()
        self._seen_s: Dict[int, float] = {}
        """Process -> when its last beat was seen first, by a clock of our own: the time of day may jump."""
        self.answered_s = time.monotonic()
        """When the file system did last."""
        self.beats: Dict[int, Heartbeat] = {}
        """Process of this place -> its last beat."""
        self.hanging: Dict[int, str] = {}
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
            self.answered_s = time.monotonic()

    def _note(self, beat: Heartbeat) -> None:
        before, now = self.beats.get(beat.pid), time.monotonic()
        self.beats[beat.pid] = beat
        if before is None or before.beat != beat.beat:
            self._seen_s[beat.pid] = now
        silent_s, suspended = now - self._seen_s[beat.pid], is_suspended(beat.pid)
        if suspended:
            why, limit_s = "as a signal has stopped it", self._patience.suspended_s
        else:
            why, limit_s = "though it lives", self._patience.silent_s
        # One that has noted its end waits for the chief. On a disk that takes no files beats are lost.
        if silent_s > limit_s and (suspended or (beat.exit_code is None and self._takes_files())):
            self.hanging[beat.pid] = f"silent for {silent_s:.0f} s while {beat.phase}, {why}"

    def _takes_files(self) -> bool:
        with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=self._run) as file:
            return bool(file.write(bytes(2**16)))
        return False

    def beats_below(self, pid: int) -> List[Heartbeat]:
        """Of a process and of all that it has started."""
        return [self.beats[member] for member in family(pid) if member in self.beats]


def _passed_on(number: int) -> int:
    """What a worker is told when we are told `number`. A closed terminal is a request to end like any other."""
    return signal.SIGTERM if number == signal.SIGHUP else number


def _left(running: Sequence[_Running]) -> List[_Running]:
    """Those that have not ended, after a look at all of them."""
    return [worker for worker in running if not worker.note_end()]


def _watch(
    running: Sequence[_Running],
    signals: Sequence[int],
    observer: _Observer,
    say: Callable[[str], None],
    patience: Patience,
) -> None:
    """Until all have ended, or one has failed and the others have had the time that they need then."""
    said = set()
    while True:
        left = _left(running)
        if not left:
            return
        failed = [worker for worker in running if worker.ended_s is not None and worker.failed(signals)]
        others = [beat for worker in left for beat in observer.beats_below(worker.child.pid)] if failed else []
        for worker in failed:
            if "failed" not in said:
                said.add("failed")
                say(f"launch: {worker.job.name} has ended with {worker.ending}; waiting for the others to end")
            if time.monotonic() - worker.ended_s >= patience.before_stop_s(worker.code, others):
                return
        for worker in left:
            for pid in set(observer.hanging).intersection(family(worker.child.pid)) - said:
                said.add(pid)
                if pid == worker.child.pid:
                    worker.kill(hangs=observer.hanging[pid])
                else:  # below Horovod's launcher, which ends all of them when one has ended
                    say(f"launch: process {pid} hangs, {observer.hanging[pid]}; it is ended")
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
        no_answer_s = time.monotonic() - observer.answered_s
        if no_answer_s > patience.file_system_s and "file system" not in said:
            said.add("file system")
            say(f"launch: the run's file system must answer, got nothing for {no_answer_s:.0f} s; the workers wait too")
        time.sleep(patience.poll_s)


def _stop(running: Sequence[_Running], observer: _Observer, patience: Patience) -> None:
    """Ask those that are left to end, and when they have had the time that they need make them."""
    left, asked_s = _left(running), time.monotonic()
    for worker in left:
        if is_suspended(worker.child.pid):
            worker.kill(hangs="suspended by a signal")
        worker.stopped = True
        worker.child.terminate()
    while left:
        for worker in left:
            if time.monotonic() - asked_s > patience.before_kill_s(observer.beats_below(worker.child.pid)):
                worker.kill()
        time.sleep(patience.poll_s)
        left = _left(left)


def _busy(beats: Sequence[Heartbeat]) -> List[Heartbeat]:
    """Of workers that have something to save."""
    return [beat for beat in beats if beat.phase not in ("starting", "ended")]


def _culprit(running: Sequence[_Running], signals: Sequence[int]) -> Optional[_Running]:
    """The first that failed by itself; else the first that lost another worker, which then is on another host."""
    by_end = sorted(running, key=lambda worker: worker.ended_s or 0.0)
    failed = [worker for worker in by_end if worker.failed(signals)]
    of_stopping = (*STOPPED, -signal.SIGKILL)
    own = [w for w in failed if w.hangs or not (w.code == LOST or (w.stopped and w.code in of_stopping))]
    own += [w for w in failed if w.undying]
    lost = [w for w in failed if w.code == LOST]
    return next(iter(own + lost + failed), None)


def _failure(failed: _Running, running: Sequence[_Running]) -> WorkerFailedError:
    job, after_s = failed.job, (failed.ended_s or 0) - failed.began_s
    words: List[str] = []
    reader = threading.Thread(target=lambda: words.append(last_words(job.log, failed.begin)), daemon=True)
    reader.start()
    reader.join(LAST_LOOK_S)
    others = [f"{other.job.name} {other.ending}" for other in running if other is not failed]
    rest = f"\n  the others: {'; '.join(others)}" if others else ""
    if failed.code == LOST and not failed.hangs:
        rest += "\n  no worker here failed in another way: where there are other hosts, look into their logs"
    problem = (
        f"{job.name} on {socket.gethostname()} (process {failed.child.pid}) must end well, got {failed.ending}, after "
        f"{after_s:.0f} s; all of it is in {job.log}, which ends:\n  "
        f"{words[0] if words else '(no word: its file system does not answer)'}{rest}"
    )
    code = LOST if failed.hangs or failed.code < 0 else failed.code if failed.code in WORDS else 1
    return WorkerFailedError(problem, code)
