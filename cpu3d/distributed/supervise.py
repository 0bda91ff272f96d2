"""Worker processes of this host, started and watched together: the first that fails ends all, and is named.

    supervise([Job("worker 0", "this host", command, environ, log), ...])

The others of a run cannot go on without one: their exchange fails within seconds, and they end with the code of
WorkerLostError. So that code is never the cause where a worker ended in another way.
"""

import signal
import subprocess
import time
from typing import Callable, Dict, List, Mapping, Optional, Sequence

from cpu3d.distributed.patience import PATIENCE, Patience
from cpu3d.distributed.patiently import Patiently
from cpu3d.distributed.running import STOPPED, WORDS, Job, Running, start_job
from cpu3d.errors import InputError, Interrupted, WorkerLostError
from cpu3d.training.guard.heartbeat import Heartbeat, is_suspended
from cpu3d.util.child import forward_signals, last_words

LOST = WorkerLostError.exit_code

LOG_S = 5.0
"""For the last words of a log."""


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
    beats: Callable[[int], Sequence[Heartbeat]] = lambda pid: (),
    patience: Patience = PATIENCE,
) -> None:
    """Run all `jobs` until each has ended well. Call it in the main thread.

    `show` is called many times a second, `say` with what is to be told at once, `hanging` now and then: with the
    process ids, it says which of them hang and how one knows. `beats` tells the last heartbeats of a process, by which
    it is given the time that it needs. None of them may wait for a file system for long. SIGINT and SIGTERM are passed
    on, and when all have ended so raised as Interrupted. Raises WorkerFailedError, of the first that failed, when none
    is left but such as nothing ends. When we are killed the workers get SIGTERM.
    """
    running: List[Running] = []
    children: List[subprocess.Popen] = []
    with forward_signals(children, as_signal=_as_told) as told:
        try:
            for job in jobs:
                running.append(start_job(job, patience.dies_s))
                children.append(running[-1].child)
                if told:  # while it was being started
                    running[-1].child.send_signal(_as_told(told[0]))
            _watch(running, told, show, say, hanging, beats, patience)
        finally:
            _stop(running, show, beats, patience)
            show()
    failed = _culprit(running, told)
    if failed:
        raise _failure(failed, running)
    if told and any(worker.code for worker in running):  # else it came when all was done
        raise Interrupted("all workers have ended; the same command continues", _as_told(told[0]))


# --- Private helpers ---


def _as_told(number: int) -> int:
    """What a worker is told when we are told `number`. A closed terminal is a request to end like any other."""
    return signal.SIGTERM if number == signal.SIGHUP else number


def _left(running: Sequence[Running]) -> List[Running]:
    """Those that have not ended, after a look at all of them."""
    return [worker for worker in running if not worker.note_end()]


def _watch(
    running: Sequence[Running],
    told: Sequence[int],
    show: Callable[[], None],
    say: Callable[[str], None],
    hanging: Callable[[Sequence[int]], Mapping[int, str]],
    beats: Callable[[int], Sequence[Heartbeat]],
    patience: Patience,
) -> None:
    """Until all have ended, or one has failed and the others have had the time that they need then."""
    looked_s = time.monotonic()
    said = False
    while True:
        left = _left(running)
        if not left:
            return
        show()
        failed = [worker for worker in running if worker.ended_s is not None and worker.failed(told)]
        if failed and not said:
            say(f"launch: {failed[0].job.name} has ended with {failed[0].ending}; waiting for the others to end")
            said = True
        others = [beat for worker in left for beat in beats(worker.child.pid)] if failed else []
        for worker in failed:
            if time.monotonic() - worker.ended_s >= patience.before_stop_s(worker.code, others):
                return
        if time.monotonic() - looked_s >= patience.look_s:
            looked_s = time.monotonic()
            _end_hanging(_left(running), hanging)
        time.sleep(patience.poll_s)


def _end_hanging(running: Sequence[Running], hanging: Callable[[Sequence[int]], Mapping[int, str]]) -> None:
    found: Dict[int, str] = dict(hanging([worker.child.pid for worker in running]))
    for worker in running:
        if worker.child.pid in found:
            worker.end_hanging(found[worker.child.pid])


def _stop(
    running: Sequence[Running],
    show: Callable[[], None],
    beats: Callable[[int], Sequence[Heartbeat]],
    patience: Patience,
) -> None:
    """Ask those that are left to end, and when they have had the time that they need make them."""
    left = _left(running)
    for worker in left:
        if is_suspended(worker.child.pid):
            worker.end_hanging("suspended by a signal")
        worker.stopped = True
        worker.child.terminate()
    told_s = time.monotonic()
    while True:
        left = _left(left)
        if not left:
            return
        show()
        for worker in left:
            if time.monotonic() - told_s > patience.before_kill_s(beats(worker.child.pid)):
                worker.kill()
        time.sleep(patience.poll_s)


def _culprit(running: Sequence[Running], told: Sequence[int]) -> Optional[Running]:
    """The first that failed by itself; else the first that lost another worker, which then is on another host."""
    by_end = sorted(running, key=lambda worker: worker.ended_s or 0.0)
    failed = [worker for worker in by_end if worker.failed(told)]
    of_stopping = (*STOPPED, -signal.SIGKILL)
    own = [w for w in failed if w.hangs or not (w.code == LOST or (w.stopped and w.code in of_stopping))]
    own += [w for w in failed if w.undying]
    lost = [w for w in failed if w.code == LOST]
    return next(iter(own + lost + failed), None)


def _failure(failed: Running, running: Sequence[Running]) -> WorkerFailedError:
    job, after_s = failed.job, (failed.ended_s or 0) - failed.began_s
    words = Patiently(last_words, LOG_S, "(no word: its file system does not answer)")(job.log, failed.begin)
    others = [f"{other.job.name} {other.ending}" for other in running if other is not failed]
    rest = f"\n  the others: {'; '.join(others)}" if others else ""
    if failed.code == LOST and not failed.hangs:
        rest += "\n  no worker here failed in another way: where there are other hosts, look into their logs"
    problem = (
        f"{job.name} on {job.host} (process {failed.child.pid}) must end well, got {failed.ending}, after "
        f"{after_s:.0f} s; all of it is in {job.log}, which ends:\n  {words}{rest}"
    )
    if failed.hangs or failed.code < 0:
        return WorkerFailedError(problem, LOST)
    return WorkerFailedError(problem, failed.code if failed.code in WORDS else 1)
