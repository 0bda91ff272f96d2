"""The harness of all benchmarks: work in fresh processes, in turn with others; medians; table, record, picture.

`python -m cpu3d.bench.harness MODULE FUNCTION '{"shape": ...}'` is one measuring process: it calls the function with
the JSON and prints what that returns as its last line.
"""

import contextlib
import importlib
import json
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Hashable, List, Optional, Sequence, Tuple, TypeVar

from cpu3d.errors import InputError
from cpu3d.host.apply import engine_name, in_force
from cpu3d.host.memory import peak_rss_bytes
from cpu3d.util.atomic import writable_folder
from cpu3d.util.child import ROOT, forward_signals, start
from cpu3d.util.records import append_record, by, versions
from memory_estimator.common.schema import option
from memory_estimator.common.table import Table, new_console
from memory_estimator.common.units import GIB

HOST_FACTS = ("engine_name", "threads", "host", "versions")  # the same in all measurements of a record

Result = Dict[str, Any]
"""The JSON object that a measuring process ends with."""

Work = Callable[[Dict[str, Any]], Result]
"""A function of a module, which a measuring process calls with its request."""

Ways = Dict[Hashable, Callable[[int], Result]]
"""Name -> measures this way to do a thing once, by the round's number."""

T = TypeVar("T")


class ProcessFailedError(InputError):
    """A measuring process ended without a result. `returncode` is negative for a signal; `last_line` is its last."""

    def __init__(self, problem: str, returncode: int = 1, last_line: str = ""):
        super().__init__(problem)
        self.returncode, self.last_line = returncode, last_line

    @property
    def reason(self) -> str:
        """In a few words, for a table."""
        if self.returncode in (-9, 128 + 9):  # alone, and under a shell
            return "killed, as the kernel does when memory runs out"
        return f"exited with {self.returncode} saying: {self.last_line}"


@dataclass(frozen=True)
class Output:
    """Where a result goes."""

    json: bool = option(False, "print one JSON object")
    record: Optional[Path] = option(None, "append the result to a .jsonl file", metavar="FILE")

    def __post_init__(self):
        if self.record:
            writable_folder(self.record.parent, "folder")

    def publish(self, kind: str, result: Result, *tables: Table) -> None:
        """Print the result, as tables or JSON, and append it to the record."""
        if self.json:
            print(json.dumps(result))
        for table in () if self.json else tables:
            new_console().print(table)
        if self.record:
            append_record(self.record, kind, result)


@dataclass(frozen=True)
class Turns:
    """What is measured in turn with ours."""

    peer: Tuple[str, ...] = option(
        (), 'command whose last line is JSON with "step_s", in turn with ours; repeatable', metavar="COMMAND",
        repeat=True,
    )  # fmt: skip
    rounds: int = option(1, "how often, in turn", at_least=1, metavar="N")


def valid(read: Callable[..., T], *arguments: Any) -> T:
    """`read(*arguments)`, with InputError in place of ValueError."""
    try:
        return read(*arguments)
    except ValueError as error:
        raise InputError(str(error)) from None


# --- Measuring processes ---


def in_fresh_process(work: Work, request: Dict[str, Any]) -> Result:
    """What `work(request)` returns in a new process, where nothing was allocated or compiled before."""
    command = [sys.executable, "-m", "cpu3d.bench.harness", work.__module__, work.__qualname__]
    return run_command([*command, json.dumps(request, default=str)], f"bench, {work.__name__},")


def run_command(command: Sequence[str], who: str, cwd: Optional[Path] = ROOT) -> Result:
    """The JSON object that a command prints as its last line. SIGINT and SIGTERM end it (KeyboardInterrupt).

    Raises ProcessFailedError where the command fails, or prints no such line.
    """
    processes: List[subprocess.Popen] = []
    with tempfile.TemporaryFile() as log, forward_signals(processes, lambda _: signal.SIGKILL) as signals:
        process = start(command, log, cwd=cwd)
        processes.append(process)
        try:
            while not signals and process.poll() is None:
                time.sleep(0.02)
        finally:
            process.kill()
            process.wait()
        if signals:
            raise KeyboardInterrupt
        log.seek(0)
        lines = log.read().decode("utf-8", errors="replace").strip().splitlines() or ["nothing"]
    for line in reversed(lines if process.returncode == 0 else []):  # a library may speak after it
        if line.startswith("{"):
            with contextlib.suppress(ValueError):
                return json.loads(line)
    problem = f"{who} must end with a line of JSON, exited with {process.returncode} saying: {lines[-1]}"
    raise ProcessFailedError(problem, process.returncode, lines[-1])


def run_peer(command: str) -> Result:
    """A peer's JSON, with its "peer" (else its script's name) and its peak. Raises InputError without step_s."""
    words: List[str] = []
    with contextlib.suppress(ValueError):  # such as an open quotation
        words = shlex.split(command)
    program = shutil.which(words[0]) if words else None
    if not program:
        raise InputError(f"peer must be a command that begins with an installed program, got {command!r}; mend it")
    result = run_command([program, *words[1:]], f"peer {command!r}", cwd=None)
    if not isinstance(result.get("step_s"), (int, float)):
        raise InputError(f"peer must print JSON with step_s, got {sorted(result)} from {command!r}; adapt it")
    script = next((word for word in words if word.endswith(".py")), words[0])
    return {"peer": Path(script).name, **result, "process_peak_bytes": result.get("peak_rss_bytes")}


def facts_of(tf: Any, threads: Any, host: Any) -> Result:
    """What ends each measurement's result: the process's peak, HOST_FACTS. `set_up` gives all three."""
    about = {"engine_name": engine_name(tf), "threads": in_force(threads), "host": host.summary()}
    return {"process_peak_bytes": peak_rss_bytes(), **about, "versions": versions()}


# --- Several ways, in turn ---


def in_turn(
    ways: Ways, rounds: int, label: str, *, keep_going: bool = True
) -> Tuple[Dict[Hashable, List[Optional[Result]]], Dict[Hashable, ProcessFailedError]]:
    """Measure every way in every round: (results, failures) of each way.

    A way whose process died has None from there on and is not tried again, unless `keep_going` is False. Raises
    ProcessFailedError then, where all died, and for one that ended well without a result.
    """
    from cpu3d.util.progress import bar  # not into the memory of a measuring process

    found: Dict[Hashable, List[Optional[Result]]] = {name: [] for name in ways}
    failures: Dict[Hashable, ProcessFailedError] = {}
    with bar(f"bench {label}", total=rounds * len(ways)) as advance:
        for number in range(rounds):
            for name, measure in ways.items():
                result = None
                try:
                    result = None if name in failures else measure(number)
                except ProcessFailedError as error:
                    if not keep_going or error.returncode == 0:
                        raise
                    failures[name] = error
                found[name].append(result)
                advance()
    if len(failures) == len(ways) and not any(any(results) for results in found.values()):
        raise next(iter(failures.values()))
    return found, failures


def fresh(work: Work, request: Dict[str, Any]) -> Callable[[int], Result]:
    """One of the ways of `in_turn`: `work(request)` in a new process."""
    return lambda _: in_fresh_process(work, request)


def peers(commands: Sequence[str]) -> Ways:
    """Ways of `in_turn`. Put before ours, a command that is wrong is found out before ours took their time."""
    return {command: lambda _, command=command: run_peer(command) for command in commands}


def peer_of(command: str, results: Sequence[Optional[Result]]) -> Dict[str, str]:
    """A peer's name, and its options: the words of the command that are no path, for paths are of one machine."""
    options = " ".join(word for word in shlex.split(command) if "/" not in word)
    return {"peer": next((one["peer"] for one in results if one), options), "options": options}


def summary(results: Sequence[Optional[Result]], baseline: Sequence[Optional[Result]]) -> Result:
    """Median and range of a way's step_s and of their ratio to the baseline's in the same round; highest peaks."""
    found: Result = {}
    for name in ("allocator_peak_bytes", "process_peak_bytes"):
        found[name] = max((one[name] for one in results if one and one.get(name) is not None), default=None)
    ratios = [one["step_s"] / base["step_s"] for one, base in zip(results, baseline) if one and base]
    for name, values in (("step_s", [one["step_s"] for one in results if one]), ("ratio", ratios)):
        found[name] = statistics.median(values) if values else None
        found.update({f"{name}_min": min(values, default=None), f"{name}_max": max(values, default=None)})
    return found


def middle(results: Sequence[Result]) -> Result:
    """The result with the (lower) median step, whole: its figures belong together."""
    return sorted(results, key=lambda one: one["step_s"])[(len(results) - 1) // 2]


# --- For tables ---


def with_range(row: Result, name: str) -> str:
    """A median as "3.00 (2.00 to 4.00)", "3.00" where there was one round, "-" for none."""
    if row[name] is None:
        return "-"
    low, high = row.get(f"{name}_min") or 0, row.get(f"{name}_max") or 0
    return f"{row[name]:.2f}" + (f" ({low:.2f} to {high:.2f})" if high > low else "")


def gib(size_bytes: Optional[float], digits: int = 2) -> str:
    """A size in GiB without its unit, "-" for what is not known."""
    return "-" if size_bytes is None else f"{size_bytes / GIB:.{digits}f}"


def title_of(result: Result, batch: str = "") -> str:
    """What step was measured, in one line."""
    unet, batch = result["unet"], batch or f"batch {result['batch']}"
    shape = by([*result["shape"], unet["channels"]], " x ")
    return f"{shape}, {unet['filters']} filters, {batch}, {unet['dtype']}, {unet['norm']} norm"


def host_of(record: Result) -> str:
    """ "2 cores of AMD EPYC"."""
    return f"{record['host']['cores']} cores of {record['host']['cpu']}"


def deaths(rows: Sequence[Result]) -> str:
    """A line for each row that has an error."""
    return "\n".join(f"{row['name']}: {row['error']}." for row in rows if row["error"])


if __name__ == "__main__":
    print(json.dumps(getattr(importlib.import_module(sys.argv[1]), sys.argv[2])(json.loads(sys.argv[3]))))
