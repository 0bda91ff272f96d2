"""Measure what the real training step takes of memory, in a fresh process, beside what the estimator predicts.

    ./run.sh bench memory --shape 128 128 128 --filters 16 --dtype bfloat16 --json
    ./run.sh bench memory --shape 128 128 128 --trace process.mprof
    ./run.sh bench memory --policies --shape 128 128 128 --rounds 2 --peer "python other.py" --picture policies.png

Takes the estimator's arguments, --recipe and --run among them; of a run it measures the step alone, without averaged
weights and what a store does beside it. The allocator's peak is TensorFlow's own count, exact; stock TensorFlow does
not count oneDNN's scratch in it. The process's peak is the kernel's (VmHWM), exact too, split into anonymous memory and
file pages by looking at the process 50 times a second. `mprof plot FILE` reads the trace.

--policies measures the step under every memory policy, beside the plain Keras graph and beside peers, in turn; a peer
is a command whose last line of output is JSON with "step_s", and "peak_rss_bytes" if it knows its peak. What a process
dies of, as for want of memory, becomes a row.
"""

import argparse
import dataclasses
import functools
import math
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, TypeVar

from cpu3d.bench import harness
from cpu3d.bench.harness import HOST_FACTS, Output, ProcessFailedError, Result, Turns
from cpu3d.bench.step import (
    StepOptions,
    add_step_options,
    has_plain,
    measure,
    request_for,
    step_request,
    title_of,
)
from cpu3d.errors import InputError
from cpu3d.host.apply import installed
from cpu3d.host.memory import Resident, resident
from cpu3d.host.thread_plan import thread_plan
from cpu3d.util.atomic import writable_folder
from cpu3d.util.progress import bar
from cpu3d.util.records import append_record
from memory_estimator.calibration import find_constants
from memory_estimator.estimate import estimate
from memory_estimator.figure import PALETTE, new_figure, png
from memory_estimator.host import Host, read_host
from memory_estimator.job import ENGINES, Job
from memory_estimator.schema import add_options, option
from memory_estimator.table import Table
from memory_estimator.units import GIB, format_bytes
from memory_estimator.validation import (
    DISTURBED_SPREAD,
    PUBLISHED,
    Measured,
    compare,
    has_known_engine,
    read_measured,
    spreads,
)
from memory_estimator.validation import job_from as measured_job
from models.config import POLICIES, UNetConfig

MIB = 2**20

FIGURES = ("allocator_peak_bytes", "process_peak_bytes", "step_s")
"""What is both measured and predicted, under one name."""

PLAIN = "plain Keras"

VALIDATION_STEPS = 3
"""Timed, after two more: enough for a median."""

BASELINE = "speed"
"""The policy that times are relative to."""

T = TypeVar("T")

Moment = Tuple[str, float, float]
"""A part of the work: (name, begin, end) in seconds of `time.time`."""


@dataclass(frozen=True)
class MemoryOptions(StepOptions):
    """What is measured, but for the job."""

    policies: bool = option(False, "compare all policies, the plain Keras graph, peers")
    trace: Optional[Path] = option(None, "write the process's memory as an mprof trace", metavar="FILE")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_step_options(parser, MemoryOptions, Turns, Output)


def run(args: argparse.Namespace) -> int:
    options, turns, output = (harness.read_options(cls, args) for cls in (MemoryOptions, Turns, Output))
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
    """Measure the step of `request` plain, under every policy and by peers, in turn; the content of a record.

    Raises InputError for a peer without a useful answer, and ProcessFailedError where none of ours could be measured.
    """
    variants: Dict[str, Any] = {}
    if has_plain(UNetConfig(**request["unet"])):  # it computes a batch as a whole
        variants[PLAIN] = {"plain": True, "micro_batch": request["batch"]}
    variants.update({policy: {"unet": {**request["unet"], "policy": policy}} for policy in POLICIES})
    # Peers first: a command that is wrong is found out before ours took their time.
    ways: Dict[str, Any] = {command: lambda _, command=command: harness.run_peer(command) for command in peers}
    for name, more in variants.items():
        ways[name] = lambda _, one={**request, **more}: harness.in_fresh_process(measure, one)
    found, failures = harness.in_turn(ways, rounds, "memory")
    measured = [one for name in variants for one in found[name] if one]
    if not measured:
        raise failures[BASELINE]
    unit_bytes = math.prod(request["shape"]) * request["unet"]["filters"]
    unit_bytes *= 2 if request["unet"]["dtype"] == "bfloat16" else 4
    facts = {name: measured[0][name] for name in HOST_FACTS}
    rows = []
    for way in (*variants, *peers):
        row = harness.summary(found[way], found[BASELINE])
        allocator, kind = row["allocator_peak_bytes"], "plain" if way == PLAIN else "policy"
        name, options = way, ""
        if way in peers:
            kind, options = "peer", harness.peer_options(way)
            name = next((one["peer"] for one in found[way] if one), options)
            name += f" {options}" * any(row["name"] == name for row in rows)
        rows.append({
            "name": name,
            "kind": kind,
            "options": options,
            **row,
            "units": None if allocator is None else allocator / unit_bytes,
            "rounds": [
                one and {name: one.get(name) for name in (*FIGURES, "step_s_min", "step_s_max")} for one in found[way]
            ],
            "error": failures[way].reason if way in failures else None,
            "predicted": predict({**request, **facts, **variants[way]}) if kind == "policy" else None,
        })  # fmt: skip
    return {
        **{name: value for name, value in request.items() if name != "matmul"},
        "unet": {name: value for name, value in request["unet"].items() if name != "policy"},
        "rounds": rounds,
        "unit_bytes": unit_bytes,
        "rows": rows,
        **facts,
    }


def policies_table(record: Result) -> Table:
    """Peaks and seconds of every row, what is predicted of it below."""
    unit, batch, rows = record["unit_bytes"], f"batch {record['batch']}", []
    if record["micro_batch"] < record["batch"]:
        batch += f" ({record['micro_batch']} at a time, plain Keras and peers all at once)"
    for row in record["rows"]:
        figures = [*_peaks(row, unit), harness.with_range(row, "step_s"), harness.with_range(row, "ratio")]
        rows.append([row["name"], *(["-", "-", "-", "died", "-"] if row["error"] else figures)])
        if row["predicted"]:
            rows.append(["predicted", *_peaks(row["predicted"], unit), f"{row['predicted']['step_s']:.2f}", ""])
    columns = ("", "allocator peak, GiB", "units", "process peak, GiB", "s a step", f"against `{BASELINE}`")
    title = (
        f"{title_of(record, batch)}, {record['engine_name']}, {record['host']['cores']} cores of "
        f"{record['host']['cpu']}; a unit is {record['unet']['filters']} channels of one volume, {format_bytes(unit)}:"
    )
    died = "\n".join(f"{row['name']}: {row['error']}." for row in record["rows"] if row["error"])
    return Table(columns, rows, title=title, caption=died)


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


# --- Every configuration that the estimator is judged by ---


@dataclass(frozen=True)
class ValidateOptions:
    """What `bench validate` measures."""

    record: Path = option(help=".jsonl file, continued if there", metavar="FILE")
    engine: Optional[str] = option(None, help="only this one (default: all installed)", choices=ENGINES)
    first: Optional[int] = option(None, help="only the first N of the list", at_least=1, metavar="N")
    again_disturbed: bool = option(
        False, help=f"measure again whose steps lie further apart than {100 * DISTURBED_SPREAD:.0f} %% of their median"
    )


def add_validate_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, ValidateOptions)


def run_validate(args: argparse.Namespace) -> int:
    """Measure the configurations that the estimator is judged by on this host, one fresh process each.

        ./run.sh bench validate --record other-host.jsonl
        ./run.sh bench validate --record other-host.jsonl --engine stock --first 3
        ./run.sh bench validate --record records/memory.jsonl --again-disturbed

    They are those of the published record, records/memory.jsonl: far apart in everything that memory and time depend
    on, and each fits a host with 24 GB of memory. Some 600 training steps, in under an hour on two quiet cores with
    AVX512_BF16. Cut off, it continues: what the record holds is not measured again, failures included (remove a line to
    try again). The newest line of a configuration counts. One record file a host.
    """
    options = harness.read_options(ValidateOptions, args)
    writable_folder(options.record.parent, "folder")
    host = read_host()
    threads = thread_plan(host).intra_op
    before = _read(options.record, host)
    if options.engine and not installed(options.engine):
        raise InputError(f"engine must be installed, got {options.engine}; run `./run.sh setup` or leave it out")
    engines = [one for one in ENGINES if options.engine in (None, one) and installed(one)]
    wanted = [job for job in configurations(threads) if job.engine in engines][: options.first]
    done = {one.job for one in before if not (options.again_disturbed and one.disturbed)}
    todo = [job for job in wanted if job not in done]
    constants = _valid(find_constants, threads)
    with bar("validate", total=len(todo)) as advance:
        for job in todo:
            needed, free = estimate(job, constants).upper_bound_bytes, read_host().free_bytes
            if needed > free:
                outcome = f"left out, needs {needed / GIB:.1f} GiB where {free / GIB:.1f} GiB are free"
            else:
                record = measured_record(job, host)
                append_record(options.record, "memory", record)
                outcome = record.get("error") or (
                    f"{record['process_peak_bytes'] / GIB:.2f} GiB, {record['step_s']:.2f} s"
                )
            print(f"{describe(job)}: {outcome}", file=sys.stderr)
            advance()
    predict = functools.lru_cache(maxsize=None)(find_constants)
    held_out = [one for one in _read(options.record, host) if one.held_out]
    rows = compare(held_out, lambda one: estimate(one.job, predict(one.job.threads)))
    cells = [
        (name, f"{one.median:.1%}", f"{one.worst:+.1%}", f"{one.mean:+.1%}") for name, one in spreads(rows).items()
    ]
    title = f"{len(rows)} held-out configurations, predicted against measured"
    # The page is made with the shipped constants alone, and may say otherwise where this host has its own.
    harness.show(
        Table(("", "median", "worst", "mean"), cells, title, f"constants: {constants.name}, {constants.origin}")
    )
    return 0


def measured_record(job: Job, host: Host) -> Dict[str, Any]:
    """What the record keeps of one configuration: the measurement, or what the process died of.

    Raises InputError where no process was started, which says nothing of the job.
    """
    request = request_for(job, steps=VALIDATION_STEPS)
    try:
        result, _ = measure_memory(request)
    except ProcessFailedError as error:
        environment = {**thread_plan(host).environment, "TF_NUM_INTRAOP_THREADS": str(job.threads)}
        return {**request, "error": str(error), "threads": environment, "host": host.summary()}
    return {name: value for name, value in result.items() if name not in ("moments", "rounds", "peers")}


def configurations(threads: int) -> Tuple[Job, ...]:
    """Every job of the published record, as on a host with so many threads."""
    return tuple(dataclasses.replace(one.job, threads=threads) for one in _valid(read_measured, PUBLISHED))


def describe(job: Job) -> str:
    """A job in one line: "128x128x128 f16 d5 b1 c4 k3 bfloat16 itex instance adam", and what differs from the default.

    f(ilters), d(epth), b(atch; 4/1 is computed one at a time), c(hannels), k outputs.
    """
    unet = job.unet
    words: List[str] = ["x".join(map(str, job.shape)), f"f{unet.filters}", f"d{unet.depth}"]
    words.append(f"b{job.batch}" if job.parts == 1 else f"b{job.batch}/{job.micro}")
    words += [f"c{unet.channels}", f"k{unet.outputs}", unet.dtype, job.engine, unet.norm, job.optimizer]
    words += ["cicek2016"] * (unet.network == "cicek2016") + ["residual"] * unet.residual
    words += ["upsampling"] * (unet.up == "upsampling") + ["deep"] * unet.deep_supervision
    return " ".join([*words, *([unet.policy] if unet.policy != "speed" else [])])


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
    """Raise InputError for options that contradict each other, and for peers that cannot be run."""
    if options.policies:
        given, rule = {"policy": policy, "trace": options.trace}, "be left out with --policies, got it; drop it"
    else:
        given = {"peer": turns.peer, "rounds": turns.rounds > 1, "picture": output.picture}
        rule = "come with --policies, got it alone; add that"
    problems = [f"{name} must {rule}" for name, value in given.items() if value]
    if problems:
        raise InputError(*problems)
    harness.check_peers(turns.peer)


def _peaks(figures: Result, unit_bytes: int) -> List[str]:
    allocator, process = figures["allocator_peak_bytes"], figures["process_peak_bytes"]
    sizes = ((allocator, GIB, 2), (allocator, unit_bytes, 1), (process, GIB, 2))
    return ["-" if size is None else f"{size / unit:.{digits}f}" for size, unit, digits in sizes]


def _table(result: Result) -> Table:
    predicted, errors = result["predicted"] or {}, result["errors"] or {}
    rows = []
    for name, key in (
        ("allocator peak, GiB", "allocator_peak_bytes"),
        ("process peak, GiB", "process_peak_bytes"),
        ("  anonymous", "anonymous_peak_bytes"),
        ("  file pages", "file_peak_bytes"),
        ("upper bound, GiB", "upper_bound_bytes"),
        ("before the first volume, GiB", "baseline_bytes"),
        ("s a step", "step_s"),
    ):
        unit, error = (1 if key == "step_s" else GIB), errors.get(key)
        values = [figures.get(key) for figures in (result, predicted)]
        shown = ["-" if value is None else f"{value / unit:.2f}" for value in values]
        rows.append([name, *shown, "" if error is None else f"{error:+.1%}"])
    title = f"Memory of a training step, {title_of(result)}"
    return Table(("", "measured", "predicted", "error"), rows, title=title, caption=result["engine_name"])


def _read(path: Path, host: Host) -> Sequence[Measured]:
    """What the record holds, nothing where there is none yet. Raises InputError where it is another host's."""
    measured = _valid(read_measured, path) if path.exists() else ()
    others = sorted({one.host for one in measured if (one.host, one.isa) != (host.cpu_model, tuple(host.isa))})
    if others:
        raise InputError(
            f"record {path} must be of this host, {host.cpu_model}, got {', '.join(others)}; give each host a file"
        )
    return measured


def _valid(read: Callable[[Any], T], what: Any) -> T:
    """`read(what)`, with InputError in place of ValueError."""
    try:
        return read(what)
    except ValueError as error:
        raise InputError(str(error)) from None
