"""Several measuring processes at a time, on cores of their own: started, waited for, ended together."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

from cpu3d.bench.step import ROOT, ProcessFailedError
from cpu3d.child import start, told_of_signals

LOOK_EVERY_S = 0.1

NOT_OURS = ("TF_CONFIG", "TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS", "KMP_AFFINITY")
"""Not handed on: the threads of a measuring process follow from the cores that it is given."""


def measure_together(
    request: Dict[str, Any], cpus: Sequence[Sequence[int]], *, exchanging: bool
) -> List[Dict[str, Any]]:
    """What `work` says in as many processes as `cpus` has shares, all at once; by rank.

    Raises ProcessFailedError where one of them fails, once all have been ended, and KeyboardInterrupt for our signals.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-scaling-")))
        addresses = free_addresses(len(cpus)) if exchanging else []
        shared = {**request, "addresses": addresses, "folder": str(folder), "count": len(cpus)}
        requests = [{**shared, "rank": rank, "cpus": list(share)} for rank, share in enumerate(cpus)]
        environ = {name: value for name, value in os.environ.items() if name not in NOT_OURS}
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


def free_addresses(count: int) -> List[str]:
    """Ports of this host that nobody has now, each another one."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]


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
