"""Worker processes of this host, started and watched together: the first that fails ends all, and
is named.

    run_workers([WorkerCommand("worker 0", command, environ, log), ...], run)

The others of a run cannot continue without one: their sum fails within seconds, and they end with
the code of WorkerLostError. So that code is never the cause if a worker ended in another way."""

import contextlib
import shlex
import signal
import socket
import subprocess
import time
from datetime import datetime
from pathlib import Path
from typing import Any, Callable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from cpu3d.errors import ENDINGS, InputError, Interrupted, WorkerLostError, ending_of
from cpu3d.run.heartbeat import (
    HANGING_S,
    Heartbeat,
    is_here,
    read_heartbeats,
)
from cpu3d.util.child import forward_signals, how_ended, last_words, start
from cpu3d.util.records import without_passwords

LOST = WorkerLostError.exit_code
# Exit codes of a worker that was asked to end.
STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM, -signal.SIGINT, -signal.SIGTERM)


POLL_S = 0.2
# From the first failure until the others are asked to end: they notice it, and the chief saves.
SETTLE_S = 8.0
# From there to SIGKILL: steps, validations and checkpoints may take long.
GRACE_S = 3600.0


class WorkerFailedError(InputError):
    """A worker that failed, and so all others with it."""

    def __init__(self, problem: str, exit_code: int):
        super().__init__(problem)
        self.exit_code = exit_code


class WorkerCommand(NamedTuple):
    """A worker to start, such as "worker 1": its whole environment, and the log that its output is
    added to."""

    name: str
    command: Tuple[str, ...]
    environ: Mapping[str, str]
    log: Path


def run_workers(
    commands: Sequence[WorkerCommand],
    run: Path,
    *,
    show: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Run the workers of a run until each has finished. Call it in the main thread; `show` is
    called often.

    SIGINT and SIGTERM are passed on, and when all have ended raised as Interrupted. Raises
    WorkerFailedError, of the first that failed. If this process is killed the workers get SIGTERM.
    """
    workers: List[_Worker] = []
    children: List[subprocess.Popen[Any]] = []
    with forward_signals(children, as_signal=_passed_on) as signals:
        try:
            for command in commands:
                workers.append(_Worker(command))
                children.append(workers[-1].child)
                if signals:  # while it was being started
                    workers[-1].child.send_signal(_passed_on(signals[0]))
            _watch(workers, signals, run, show, say)
        except BaseException:
            for worker in workers:
                worker.ask_to_end()
            _watch(workers, signals, run, show, say)
            raise
    failed = [worker for worker in workers if worker.failed(signals)]
    if failed:
        first = min(failed, key=lambda worker: worker.order)
        raise _failure(first, workers)
    if signals and any(worker.code for worker in workers):  # else it came when all was done
        message = "all workers have ended; the same command continues"
        raise Interrupted(message, _passed_on(signals[0]))


def wait_for_earlier(run: Path, say: Callable[[str], None], most_s: float = 60.0) -> None:
    """Return when `run` has no workers here: those of a launch that was killed still finish their
    step and save.

    Raises InputError if they take longer than `most_s` and three of their steps.
    """
    began_s = time.monotonic()
    is_printed = False
    # One that has noted its end has saved, and its process may be a notebook's, which stays.
    while left := [beat for beat in _beats_here(run) if beat.exit_code is None]:
        names = ", ".join(f"worker {beat.rank} (process {beat.pid})" for beat in left)
        longest_step_s = max(beat.longest_step_s or 0.0 for beat in left)
        if time.monotonic() - began_s > most_s + 3 * longest_step_s:
            raise InputError(
                f"run {run} must have no other workers, got {names}; wait for them, or end them"
            )
        if not is_printed:
            say(f"waiting for {names} of an earlier attempt to end")
        is_printed = True
        time.sleep(0.2)


# --- Private helpers ---


def _passed_on(number: int) -> int:
    """The signal that workers get: SIGTERM for a closed terminal, which asks to end like any
    other."""
    return signal.SIGTERM if number == signal.SIGHUP else number


class _Worker:
    """A worker that was started, and its state until it has ended."""

    def __init__(self, command: WorkerCommand):
        self.name = command.name
        self.log = command.log
        self.ended_s = 0.0  # 0 until it has
        self.asked_s: Optional[float] = None  # when it was asked to end, because others had failed
        self.hangs = ""  # why it counts as hanging
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        with self.log.open("ab") as file:
            words = without_passwords(shlex.join(command.command))
            file.write(f"--- {now} {self.name}: {words}\n".encode())
            file.flush()
            self.child = start(command.command, file, command.environ)
            self.begin = file.tell()  # of its output in the log
            self.began_s = time.monotonic()
        self.last_beat = 0.0  # by the time of day, which may jump
        self.beat_s = self.began_s  # when that changed

    def has_ended(self) -> bool:
        """Whether it has ended; notes when."""
        if not self.ended_s and self.child.poll() is not None:
            self.ended_s = time.monotonic()
        return self.ended_s > 0

    @property
    def code(self) -> int:
        """The exit code, below 0 for a signal."""
        return self.child.returncode or 0

    def ask_to_end(self) -> None:
        """Send SIGTERM once, if it has not ended; one that a signal has stopped goes on to get
        it."""
        if self.asked_s is None and not self.has_ended():
            self.asked_s = time.monotonic()
            self.child.terminate()
            self.child.send_signal(signal.SIGCONT)

    def kill_if_silent(self, beat: Heartbeat) -> None:
        """End it if its heartbeat is old, unless it waits for the chief."""
        if beat.beat != self.last_beat:
            self.last_beat = beat.beat
            self.beat_s = time.monotonic()
        silent_s = time.monotonic() - self.beat_s
        if silent_s > HANGING_S and beat.exit_code is None:
            self.hangs = f"no heartbeat for {silent_s:.0f} s while {beat.phase}"
            self.child.kill()

    def failed(self, signals: Sequence[int]) -> bool:
        """Whether it ended in a way that ends all."""
        return bool(self.hangs) or (self.code != 0 and not (signals and self.code in STOPPED))

    @property
    def order(self) -> Tuple[bool, bool, float]:
        """Sorts those that failed: who ended because we asked, and who lost another, come last."""
        is_stopped = self.code in (*STOPPED, -signal.SIGKILL) and not self.hangs
        return self.asked_s is not None and is_stopped, self.code == LOST, self.ended_s

    @property
    def ending(self) -> str:
        """Its end in words, such as "exit code 2 (bad input)"."""
        if self.hangs:
            return f"hangs, {self.hangs}"
        if not self.code:
            return "finished"
        ending = how_ended(self.code)
        words = ending_of(self.code).words
        return f"{ending} ({words})" if words else ending


def _watch(
    workers: Sequence[_Worker],
    signals: Sequence[int],
    run: Path,
    show: Callable[[], None],
    say: Callable[[str], None],
) -> None:
    """Return when all have ended. If one has failed, the others are asked to end, and killed if
    they do not."""
    is_printed = False
    while left := [worker for worker in workers if not worker.has_ended()]:
        now = time.monotonic()
        failed = [worker for worker in workers if worker.ended_s and worker.failed(signals)]
        if failed and not is_printed:
            first = failed[0]
            say(
                f"launch: {first.name} has ended with {first.ending}; waiting for the others to end"
            )
        is_printed = bool(failed)
        with contextlib.suppress(OSError):
            show()
            beats = {beat.pid: beat for beat in _beats_here(run)}
            for worker in left:
                if worker.child.pid in beats:
                    worker.kill_if_silent(beats[worker.child.pid])
        for worker in left:
            if any(now - other.ended_s >= SETTLE_S for other in failed):
                worker.ask_to_end()
            if worker.asked_s is not None and now - worker.asked_s > GRACE_S:
                worker.child.kill()
        time.sleep(POLL_S)
    with contextlib.suppress(OSError):
        show()


def _failure(failed: _Worker, workers: Sequence[_Worker]) -> WorkerFailedError:
    """The error that names the worker, with the last lines of its log and how the others ended."""
    lines = [last_words(failed.log, failed.begin)]
    if len(workers) > 1:
        endings = "; ".join(
            f"{worker.name} {worker.ending}" for worker in workers if worker is not failed
        )
        lines.append(f"others: {endings}")
    if failed.code == LOST and not failed.hangs:
        lines.append("all workers here lost another one; see the logs of the other hosts")
    rule = f"{failed.name} on {socket.gethostname()} (process {failed.child.pid}) must finish"
    after_s = failed.ended_s - failed.began_s
    got = f"{failed.ending}, after {after_s:.0f} s; its log {failed.log} ends:"
    code = 1
    if failed.hangs or failed.code < 0:
        code = LOST
    elif failed.code in ENDINGS:
        code = failed.code
    return WorkerFailedError("\n  ".join([f"{rule}, got {got}", *lines]), code)


def _beats_here(run: Path) -> List[Heartbeat]:
    """The heartbeats of the run's workers that are alive at this place."""
    return [
        beat
        for beat in read_heartbeats(run).values()
        if isinstance(beat, Heartbeat) and is_here(beat)
    ]
