"""The harness of all benchmarks: work in fresh processes, commands of peers, and the output of a
result.

`python -m cpu3d.bench.harness MODULE FUNCTION '{"shape": ...}'` is one measuring process: it calls
the function with the JSON and prints its result as the last line."""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from cpu3d.errors import InputError
from cpu3d.host import apply
from cpu3d.util.atomic import writable_folder
from cpu3d.util.child import ROOT, forward_signals, how_ended, start
from cpu3d.util.records import append_record, versions
from memory_estimator.common.schema import option
from memory_estimator.common.table import Table, new_console

Result = Dict[str, Any]  # the JSON object that a measuring process ends with
FACTS = ("engine_name", "threads", "host", "versions")  # where it ran


class ProcessFailedError(InputError):
    """A measuring process ended without a result."""


@dataclass(frozen=True)
class Output:
    """Options of the output of a result."""

    json: bool = option(False, "print one JSON object")
    record: Optional[Path] = option(None, "append the result to a .jsonl file", metavar="FILE")

    def __post_init__(self):
        if self.record:
            writable_folder(self.record.parent, "folder")

    def publish(self, kind: str, result: Result, *tables: Table) -> None:
        """Print the result, as tables or JSON, and append it to the record."""
        if self.json:
            print(json.dumps(result))
        else:
            new_console().print(*tables)
        if self.record:
            append_record(self.record, kind, result)


def valid(read: Callable[..., Any], *arguments: Any) -> Any:
    """`read(*arguments)`, with InputError in place of ValueError."""
    try:
        return read(*arguments)
    except ValueError as error:
        raise InputError(str(error)) from None


def host_of(record: Result) -> str:
    """ "2 cores of AMD EPYC"."""
    return f"{record['host']['cores']} cores of {record['host']['cpu']}"


# --- Measuring processes ---


def in_fresh_process(work: Callable[[Dict[str, Any]], Result], request: Dict[str, Any]) -> Result:
    """The result of `work(request)` in a new process, where nothing was allocated or compiled
    before."""
    command = [sys.executable, "-m", "cpu3d.bench.harness", work.__module__, work.__qualname__]
    return run_command([*command, json.dumps(request, default=str)], f"bench, {work.__name__},")


def set_up_for(request: Dict[str, Any]) -> Tuple[Any, Result]:
    """TensorFlow with the "engine" and "threads" of a request, and the FACTS for its record; in a
    measuring process. Without "engine" or "threads" they are those of the host or the
    environment."""
    if request.get("threads"):
        os.environ["TF_NUM_INTRAOP_THREADS"] = str(request["threads"])
        os.environ["OMP_NUM_THREADS"] = str(request["threads"])
    host, plan, tf = apply.set_up(request.get("engine"))
    return tf, {
        "engine_name": apply.engine_name(tf),
        "threads": apply.in_force(plan),
        "host": host.summary(),
        "versions": versions(),
    }


def seconds_of(function: Callable[[], Any]) -> float:
    """Seconds that a call takes."""
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def run_command(command: Sequence[str], name: str, cwd: Optional[Path] = ROOT) -> Result:
    """The JSON object that a command prints as its last line. SIGINT and SIGTERM end it
    (KeyboardInterrupt).

    Raises ProcessFailedError if the command fails, or prints no such line.
    """
    processes: List[subprocess.Popen] = []
    with (
        tempfile.TemporaryFile() as log,
        forward_signals(processes, lambda _: signal.SIGKILL) as signals,
    ):
        processes.append(start(command, log, cwd=cwd))
        if signals:  # while it was being started
            processes[0].kill()
        code = processes[0].wait()
        log.seek(0)
        lines = log.read().decode("utf-8", errors="replace").strip().splitlines()
    if signals:
        raise KeyboardInterrupt
    if code == 0:
        for line in reversed(lines):  # a library may print after it
            if line.startswith("{"):
                with contextlib.suppress(ValueError):
                    return json.loads(line)
    last = lines[-1] if lines else "nothing"
    raise ProcessFailedError(f"{name} must end with a line of JSON, got {how_ended(code)}: {last}")


if __name__ == "__main__":
    _, module, function, request = sys.argv
    work = getattr(importlib.import_module(module), function)
    print(json.dumps(work(json.loads(request))))
