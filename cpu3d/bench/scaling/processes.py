"""Several measuring processes at a time, on cores of their own: started, waited for, ended together."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

from cpu3d.bench.harness import ROOT, ProcessFailedError
from cpu3d.distributed.hosts import LOOPBACK, free_ports
from cpu3d.util.child import start, told_of_signals

LOOK_EVERY_S = 0.1

THREADS = ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS")

NOT_OURS = ("TF_CONFIG", *THREADS, "KMP_AFFINITY")
"""Not handed on: the threads of a measuring process follow from the cores that it is given."""


def measure_together(
    request: Dict[str, Any], cpus: Sequence[Sequence[int]], *, threads: int, exchanging: bool, in_parts: bool
) -> List[Dict[str, Any]]:
    """What `work` says in as many processes as `cpus` has shares, all at once; by rank.

    A share without CPUs is a process that is held to none, of so many threads.

    Raises ProcessFailedError where one of them fails, once all have been ended, and KeyboardInterrupt for our signals.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-scaling-")))
        addresses = [f"{LOOPBACK}:{port}" for port in free_ports(len(cpus))] if exchanging else []
        shared = {**request, "addresses": addresses, "in_parts": in_parts, "folder": str(folder), "count": len(cpus)}
        requests = [{**shared, "rank": rank, "cpus": list(share)} for rank, share in enumerate(cpus)]
        environ = {name: value for name, value in os.environ.items() if name not in NOT_OURS}
        if not all(cpus):
            environ.update(dict.fromkeys(THREADS, str(threads)))
        processes: List[subprocess.Popen] = []
        told = stack.enter_context(told_of_signals(processes, lambda number: number))
        stack.callback(_end, processes)
        for rank, one in enumerate(requests):
            command = [sys.executable, "-m", "cpu3d.bench.scaling.work", json.dumps(one)]
            log = stack.enter_context((folder / f"log-{rank}").open("wb"))
            processes.append(start(command, log, environ, ROOT))
        while any(process.poll() is None for process in processes):
            if told or any(process.poll() for process in processes):
                break
            time.sleep(LOOK_EVERY_S)
        if told:
            raise KeyboardInterrupt
        return [_answer(process, folder / f"log-{rank}", rank) for rank, process in _failed_first(processes)]


# --- Private helpers ---


def _failed_first(processes: Sequence[subprocess.Popen]) -> List[Tuple[int, subprocess.Popen]]:
    """By rank; where one has failed, that one before those that fail without it."""
    return sorted(enumerate(processes), key=lambda pair: (not pair[1].poll(), pair[0]))


def _answer(process: subprocess.Popen, log: Path, rank: int) -> Dict[str, Any]:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    try:
        return json.loads(lines[-1])
    except (IndexError, ValueError):
        told = (lines or ["nothing"])[-1]
        raise ProcessFailedError(
            f"worker {rank} must end with a line of JSON, exited with {process.poll()} saying: {told}",
            process.poll() or 1,
            told,
        ) from None


def _end(processes: Sequence[subprocess.Popen]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()
