"""Measure what the real training step takes of memory, in a fresh process, beside what the estimator predicts.

    ./run.sh bench memory --shape 128 128 128 --filters 16 --dtype bfloat16 --json
    ./run.sh bench memory --shape 128 128 128 --trace process.mprof
    ./run.sh bench memory --policies --shape 128 128 128 --rounds 2 --peer "python other.py" --picture policies.png

Takes the estimator's arguments, --recipe and --run among them; of a run it measures the step alone, without averaged
weights and what a store does beside it. The allocator's peak is TensorFlow's own count, exact; stock TensorFlow does
not count oneDNN's scratch in it. The process's peak is the kernel's (VmHWM), exact too, split into anonymous memory and
file pages by looking at the process 50 times a second. `mprof plot FILE` reads the trace.

--policies measures the step under every memory policy and beside peers, in turn; a peer is a command whose last line of
output is JSON with "step_s", and "peak_rss_bytes" if it knows its peak. What a process dies of, as for want of memory,
becomes a row.
"""

import argparse
import math
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from cpu3d.bench import harness
from cpu3d.bench.harness import HOST_FACTS, Output, Result, Turns, deaths, host_of, title_of, with_range
from cpu3d.bench.step import StepOptions, add_step_options, measure, step_request
from cpu3d.errors import InputError
from cpu3d.host.memory import Resident, resident
from cpu3d.util.atomic import writable_folder
from memory_estimator.calibration import find_constants
from memory_estimator.estimate import estimate
from memory_estimator.schema import from_args, option
from memory_estimator.table import PALETTE, Table, new_figure, png
from memory_estimator.units import GIB, format_bytes
from memory_estimator.validation import has_known_engine
from memory_estimator.validation import job_from as measured_job
from models.config import POLICIES

HELP = "measure what the real training step takes of memory, under one policy or all, beside the prediction"

MIB = 2**20

FIGURES = ("allocator_peak_bytes", "process_peak_bytes", "step_s")
"""What is both measured and predicted, under one name."""

FIGURE_NAMES = {
    "allocator_peak_bytes": "allocator peak, GiB",
    "process_peak_bytes": "process peak, GiB",
    "anonymous_peak_bytes": "  anonymous",
    "file_peak_bytes": "  file pages",
    "upper_bound_bytes": "upper bound, GiB",
    "baseline_bytes": "before the first volume, GiB",
    "step_s": "s a step",
}

BASELINE = "speed"
"""The policy that times are relative to."""

Moment = Tuple[str, float, float]
"""A part of the work: (name, begin, end) in seconds of `time.time`."""


@dataclass(frozen=True)
class MemoryOptions(StepOptions):
    """What is measured, but for the job."""

    policies: bool = option(False, "compare all policies and peers")
    trace: Optional[Path] = option(None, "write the process's memory as an mprof trace", metavar="FILE")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_step_options(parser, MemoryOptions, Turns, Output)


def run(args: argparse.Namespace) -> int:
    options, turns, output = (from_args(cls, args) for cls in (MemoryOptions, Turns, Output))
    if options.trace:
        writable_folder(options.trace.parent, "folder")
    _check(options, turns, output, getattr(args, "policy", None))
    request = step_request(args, options)
    if options.policies:
        result = compare_policies(request, turns.peer, turns.rounds)
        output.publish("policies", result, [policies_table(result)], lambda: draw_policies(result))
        return 0
    result, seen = measure_memory({**request, "matmul": ["after"]})
    moments = result.pop("moments")
    result["predicted"] = predicted = predict(result)
    result["errors"] = predicted and {
        name: figure / result[name] - 1 if result.get(name) else None for name, figure in predicted.items()
    }
    if predicted:
        result["errors"]["upper_bound_bytes"] = predicted["upper_bound_bytes"] / result["process_peak_bytes"] - 1
    output.publish("memory", result, [_table(result)])
    if options.trace:
        harness.write_bytes(
            options.trace, mprof_trace(seen, moments, shlex.join(["python", "-m", "cpu3d", *sys.argv[1:]]))
        )
    return 0


def measure_memory(request: Dict[str, Any]) -> Tuple[Result, List[Resident]]:
    """Run the steps of `request` in a new process, and look at it from outside, which costs it nothing.

    Returns the result with the keys of `bench step` and more, and what was seen of the process up to its last step.
    `process_peak_bytes` is the kernel's own count; `anonymous_peak_bytes` and `file_peak_bytes` are the largest seen
    (None without /proc). `baseline_bytes` lay in memory when the network was built and no volume was there yet. Raises
    ProcessFailedError where the process dies, as the kernel's out-of-memory killer makes it.
    """
    looks: List[Optional[Resident]] = []
    request = {**request, "watched": True}
    result = harness.in_fresh_process(measure, request, look=lambda pid: looks.append(resident(pid)))
    last = result["moments"][-1][2]
    seen = [one for one in looks if one and one.time_s <= last]
    result["anonymous_peak_bytes"] = max((one.anonymous_bytes for one in seen), default=None)
    result["file_peak_bytes"] = max((one.file_bytes for one in seen), default=None)
    result["rounds"], result["peers"] = [result["step_s"]], []
    return result, seen


def predict(result: Result) -> Optional[Result]:
    """The estimator's figures for what was measured; None, with the reason on stderr, where it has none.

    It knows nothing of an engine without oneDNN, nor of what this host's calibration leaves out: no reason to lose a
    measurement.
    """
    try:
        if not has_known_engine(result):
            raise ValueError("engine must use oneDNN, got none; the estimator knows itex and stock")
        job = measured_job(result)
        found = estimate(job, find_constants(job.threads))
        return {name: getattr(found, name) for name in (*FIGURES, "upper_bound_bytes")}
    except ValueError as error:
        print(f"no prediction: {error}", file=sys.stderr)
        return None


# --- All policies ---


def compare_policies(request: Dict[str, Any], peers: Sequence[str], rounds: int) -> Result:
    """Measure the step of `request` under every policy and by peers, in turn; the content of a record.

    Raises InputError for a peer without a useful answer, and ProcessFailedError where none of ours could be measured.
    """
    requests = {policy: {**request, "unet": {**request["unet"], "policy": policy}} for policy in POLICIES}
    # Peers first: a command that is wrong is found out before ours took their time.
    ways: Dict[str, Any] = {command: lambda _, command=command: harness.run_peer(command) for command in peers}
    for policy, one in requests.items():
        ways[policy] = lambda _, one=one: harness.in_fresh_process(measure, one)
    found, failures = harness.in_turn(ways, rounds, "memory")
    measured = [one for policy in POLICIES for one in found[policy] if one]
    if not measured:
        raise failures[BASELINE]
    unit_bytes = math.prod(request["shape"]) * request["unet"]["filters"]
    unit_bytes *= 2 if request["unet"]["dtype"] == "bfloat16" else 4
    facts = {name: measured[0][name] for name in HOST_FACTS}
    rows: List[Result] = []
    for way in (*POLICIES, *peers):
        row = harness.summary(found[way], found[BASELINE])
        allocator, options, name = row["allocator_peak_bytes"], "", way
        if way in peers:
            options = harness.peer_options(way)
            name = next((one["peer"] for one in found[way] if one), options)
            name += f" {options}" * any(row["name"] == name for row in rows)
        kept = (*FIGURES, "step_s_min", "step_s_max")
        rows.append({
            "name": name,
            "kind": "peer" if way in peers else "policy",
            "options": options,
            **row,
            "units": None if allocator is None else allocator / unit_bytes,
            "rounds": [one and {name: one.get(name) for name in kept} for one in found[way]],
            "error": failures[way].reason if way in failures else None,
            "predicted": None if way in peers else predict({**requests[way], **facts}),
        })  # fmt: skip
    about = {name: value for name, value in request.items() if name != "matmul"}
    about["unet"] = {name: value for name, value in request["unet"].items() if name != "policy"}
    return {**about, "rounds": rounds, "unit_bytes": unit_bytes, "rows": rows, **facts}


def policies_table(record: Result) -> Table:
    """Peaks and seconds of every row, what is predicted of it below."""
    unit, batch, rows = record["unit_bytes"], f"batch {record['batch']}", []
    if record["micro_batch"] < record["batch"]:
        batch += f" ({record['micro_batch']} at a time, plain Keras and peers all at once)"
    for row in record["rows"]:
        figures = [*_peaks(row, unit), with_range(row, "step_s"), with_range(row, "ratio")]
        rows.append([row["name"], *(["-", "-", "-", "died", "-"] if row["error"] else figures)])
        if row["predicted"]:
            rows.append(["predicted", *_peaks(row["predicted"], unit), f"{row['predicted']['step_s']:.2f}", ""])
    columns = ("", "allocator peak, GiB", "units", "process peak, GiB", "s a step", f"against `{BASELINE}`")
    title = (
        f"{title_of(record, batch)}, {record['engine_name']}, {host_of(record)}; a unit is "
        f"{record['unet']['filters']} channels of one volume, {format_bytes(unit)}:"
    )
    return Table(columns, rows, title=title, caption=deaths(record["rows"]))


def draw_policies(record: Result) -> bytes:
    """Peaks and seconds row by row, as PNG."""
    rows = record["rows"]
    figure = new_figure(11, 0.42 * len(rows) + 1.2)
    allocator, process, seconds = figure.subplots(1, 3)
    peaks = {name: [row[name] and row[name] / GIB for row in rows] for name in FIGURES[:2]}
    # A peer knows no allocator: that is no death.
    units = ["not known" if row["units"] is None else f"{row['units']:.1f} units" for row in rows]
    harness.draw_bars(
        allocator, [None if row["error"] else peak or 0 for row, peak in zip(rows, peaks[FIGURES[0]])],
        "allocator peak, GiB", names=[row["name"] for row in rows], texts=units,
    )  # fmt: skip
    harness.draw_bars(process, peaks[FIGURES[1]], "process peak, GiB", colours=PALETTE[5])
    name = "ratio" if any(row["ratio"] for row in rows) else "step_s"
    harness.draw_bars(
        seconds, [None if row["error"] else row[name] for row in rows],
        "seconds a step" + f", relative to {BASELINE}" * (name == "ratio"),
        ends=[(row[f"{name}_min"] or 0, row[f"{name}_max"] or 0) for row in rows], colours=PALETTE[4],
    )  # fmt: skip
    figure.suptitle(f"One training step, {title_of(record)}", fontsize=10, fontweight="bold", x=0.01, ha="left")
    figure.tight_layout(pad=0.6, w_pad=1.4, rect=(0, 0, 1, 0.98))
    return png(figure)


# --- A process over time ---


def mprof_trace(seen: Sequence[Resident], moments: Sequence[Moment], command: str) -> bytes:
    """A process's memory as the text that `mprof plot` reads: resident MiB over time, and at both ends of each part."""

    def at(time_s: float) -> float:
        before = [one.total_bytes for one in seen if one.time_s <= time_s]
        return (before[-1] if before else 0) / MIB

    lines = [f"CMDLINE {command}"]
    lines += [f"FUNC {name} {at(begin):.4f} {begin:.4f} {at(end):.4f} {end:.4f} 0" for name, begin, end in moments]
    lines += [f"MEM {one.total_bytes / MIB:.6f} {one.time_s:.4f}" for one in seen]
    return ("\n".join(lines) + "\n").encode()


# --- Private helpers ---


def _check(options: MemoryOptions, turns: Turns, output: Output, policy: Optional[str]) -> None:
    """Raise InputError for options that contradict each other."""
    given, rule = {"policy": policy, "trace": options.trace}, "be left out with --policies, got it; drop it"
    if not options.policies:
        given = {"peer": turns.peer, "rounds": turns.rounds > 1, "picture": output.picture}
        rule = "come with --policies, got it alone; add that"
    problems = [f"{name} must {rule}" for name, value in given.items() if value]
    if problems:
        raise InputError(*problems)


def _peaks(figures: Result, unit_bytes: int) -> List[str]:
    allocator, process = figures["allocator_peak_bytes"], figures["process_peak_bytes"]
    sizes = ((allocator, GIB, 2), (allocator, unit_bytes, 1), (process, GIB, 2))
    return ["-" if size is None else f"{size / unit:.{digits}f}" for size, unit, digits in sizes]


def _table(result: Result) -> Table:
    predicted, errors = result["predicted"] or {}, result["errors"] or {}
    rows = []
    for key, name in FIGURE_NAMES.items():
        unit, error = (1 if key == "step_s" else GIB), errors.get(key)
        values = [figures.get(key) for figures in (result, predicted)]
        shown = ["-" if value is None else f"{value / unit:.2f}" for value in values]
        rows.append([name, *shown, "" if error is None else f"{error:+.1%}"])
    title = f"Memory of a training step, {title_of(result)}"
    return Table(("", "measured", "predicted", "error"), rows, title=title, caption=result["engine_name"])
