"""A function over many jobs in processes that end well: on Ctrl-C, with their parent, and when the kernel kills one."""

import collections
import multiprocessing
import os
import signal
import threading
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Callable, Deque, Dict, Iterator, Optional, Sequence, Tuple

from cpu3d.errors import InputError

KILLED = object()
"""What comes of a job whose process was killed, most likely for want of memory, though it ran alone."""


def worker_count(asked: Optional[int]) -> int:
    """`asked`, or one worker per core that this process may use. Raises InputError below 1."""
    if asked is None:
        return len(os.sched_getaffinity(0))
    if asked < 1:
        raise InputError(f"--workers must be at least 1, got {asked}; leave it away for one per core")
    return asked


def run_jobs(function: Callable[[Any], Any], jobs: Sequence[Any], workers: int) -> Iterator[Tuple[Any, Any]]:
    """Call `function(job)` for all jobs and yield (job, result) as they end: in `workers` processes, or here for one.

    When a process dies, the jobs in flight are tried again one at a time: one that kills its process even alone yields
    KILLED, and the others go on with half the workers. Exceptions of `function` are raised here. Closing the generator
    kills the processes. They are spawned, so `function` and jobs must be picklable.
    """
    if min(workers, len(jobs)) <= 1:
        for job in jobs:
            yield job, function(job)
        return
    waiting = collections.deque(jobs)
    while waiting:
        lost = yield from _through_pool(function, waiting, min(workers, len(waiting)))
        for job in lost:
            if (yield from _through_pool(function, collections.deque([job]), 1)):
                yield job, KILLED
        workers = max(1, workers // 2)


# --- Private helpers ---


def _through_pool(function: Callable[[Any], Any], waiting: Deque[Any], workers: int):
    """Take jobs from `waiting` through a pool and yield (job, result). Returns the jobs in flight when a process died.

    No more jobs than workers are in flight, so that a death leaves few suspects.
    """
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"), initializer=_end_with_parent)
    running: Dict[Future, Any] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                future = _submit(pool, function, waiting[0])
                running[future] = waiting.popleft()
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                result = future.result()
                yield running.pop(future), result
        return []
    except BrokenProcessPool:
        return list(running.values())
    finally:
        pool.shutdown(wait=not running, cancel_futures=True)
        for child in set(multiprocessing.active_children()) - others:
            child.terminate()
            child.join()


def _submit(pool: ProcessPoolExecutor, function: Callable[[Any], Any], job: Any) -> Future:
    """Submit with SIGINT blocked: processes start here and inherit that, so Ctrl-C reaches the parent alone."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return pool.submit(function, job)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with_parent() -> None:
    """In a worker: end when the parent does. One whose parent was killed would wait for work for ever."""
    parent = multiprocessing.parent_process()

    def watch():
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
