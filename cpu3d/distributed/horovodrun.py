"""Horovod's launcher, which here lets workers save, and ends with the code of the one that failed first.

    python -m cpu3d.distributed.horovodrun -np 2 -H localhost:2 --gloo COMMAND ...

As it is (0.28.1), it kills workers 5 s after SIGTERM, or stops them at once where the shell that starts them becomes
them, and ends with 1 whatever happens. What ends them is replaced in this process and in those between it and the
workers, which import this file again, as `multiprocessing` does it. Who hangs is ended by `launch`.
"""

import contextlib
import os
import signal
import sys
from typing import Dict, Tuple

import psutil

from cpu3d.errors import WorkerLostError
from cpu3d.util.child import how_ended

STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
"""How a worker ends that was told to."""


def end_worker(shell_pid: int) -> None:
    """In the place of Horovod's: SIGTERM, and all the time that it takes; SIGKILL for one that is suspended.

    `shell_pid` is of the shell that has started the worker, or of the worker, where the shell has become it.
    """
    with contextlib.suppress(psutil.Error):
        shell = psutil.Process(shell_pid)
        workers = shell.children() if shell.cmdline()[1:2] == ["-c"] and shell.children() else [shell]
        for worker in workers:
            worker.kill() if worker.status() == psutil.STATUS_STOPPED else worker.terminate()


def code_of(ends: Dict[int, Tuple[int, float]]) -> Tuple[int, str]:
    """What to end with, and a line about the first worker that failed, of the (code, time) of each by its rank.

    Who lost another one, or was told to end, is not the first. Signals are told by a shell, as 128 + their number.
    """
    failed = sorted((at, rank, code) for rank, (code, at) in ends.items() if code)
    if not failed:
        return 0, ""
    own = [end for end in failed if end[2] not in (WorkerLostError.exit_code, *STOPPED)]
    _, rank, code = (own or failed)[0]
    killed = code > 128 and code not in STOPPED
    line = f"worker {rank} has ended first, {how_ended(128 - code) if killed else how_ended(code)}"
    return WorkerLostError.exit_code if killed else code, line


def main() -> int:
    """As `horovodrun` with the options of this process."""
    from horovod.runner import gloo_run, launch

    ends: Dict[int, Tuple[int, float]] = {}
    command_runner = gloo_run._exec_command_fn

    def noting(settings):
        run_command = command_runner(settings)

        def run_and_note(command, slot, events) -> Tuple[int, float]:
            ends[slot.rank] = run_command(command, slot, events)
            return ends[slot.rank]

        return run_and_note

    gloo_run._exec_command_fn = noting
    try:
        launch.run_commandline()
    except RuntimeError:
        if not ends:
            raise
    code, line = code_of(ends)
    if line:
        print(f"horovodrun: {line}", file=sys.stderr)
    return code


if __name__ in ("__main__", "__mp_main__"):
    # Horovod's launcher imports TensorFlow, which has nothing to say there; for the workers it is what they set anyway.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("ITEX_CPP_MIN_LOG_LEVEL", "3")
    from horovod.runner.common.util import safe_shell_exec

    safe_shell_exec.terminate_executor_shell_and_children = end_worker
if __name__ == "__main__":
    sys.exit(main())
