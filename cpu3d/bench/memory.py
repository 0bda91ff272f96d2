"""Measure what the real training step takes of memory, in a fresh process, beside what the estimator predicts.

    ./run.sh bench memory --shape 128 128 128 --filters 16 --dtype bfloat16 --json
    ./run.sh bench memory --shape 128 128 128 --picture process.png --trace process.mprof --timeline step.png
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
import math
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from cpu3d.bench.harness import (
    HOST_FACTS,
    Output,
    Result,
    Turns,
    check_peers,
    draw_bars,
    in_turn,
    peer_options,
    read_options,
    run_peer,
    summary,
    with_range,
    write_bytes,
)
from cpu3d.bench.step import WARM_UP_STEPS, measure_in_fresh_process, title_of
from cpu3d.errors import InputError
from cpu3d.host.apply import ENGINES
from cpu3d.host.memory import Resident, resident
from cpu3d.util.atomic import writable_folder
from memory_estimator.calibration import find_constants
from memory_estimator.estimate import Estimate, estimate
from memory_estimator.figure import PALETTE, draw_timeline, new_figure, plain, png
from memory_estimator.host import read_host
from memory_estimator.job import DTYPE_BYTES, Job, add_job_options, add_source_options, job_from, source_job
from memory_estimator.job import ENGINES as KNOWN_ENGINES
from memory_estimator.schema import add_options, option
from memory_estimator.step.allocator import counted_by_op
from memory_estimator.step.timing import step_seconds
from memory_estimator.step.training_step import training_step
from memory_estimator.table import Table
from memory_estimator.units import GIB, format_bytes
from memory_estimator.validation import has_known_engine
from memory_estimator.validation import job_from as measured_job
from models.config import DTYPES, POLICIES, UNetConfig

MIB = 2**20

FIGURES = ("allocator_peak_bytes", "process_peak_bytes", "step_s")
"""What is both measured and predicted, under one name."""

PLAIN = "plain Keras"

BASELINE = "speed"
"""The policy that times are relative to."""

Moment = Tuple[str, float, float]
"""A part of the work: (name, begin, end) in seconds of `time.time`."""


@dataclass(frozen=True)
class MemoryOptions:
    """What is measured, but for the job."""

    steps: int = option(5, "steps timed", at_least=1, metavar="N")
    warm_up: int = option(WARM_UP_STEPS, "steps before those, not timed", at_least=0, metavar="N")
    policies: bool = option(False, "compare all policies, the plain Keras graph, peers")
    trace: Optional[Path] = option(None, "write the process's memory as an mprof trace", metavar="FILE")
    timeline: Optional[Path] = option(None, "draw live bytes over one step, as PNG", metavar="FILE")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_source_options(parser)
    add_job_options(parser, [engine for engine in ENGINES if engine != "auto"], ("auto", *DTYPES))
    for cls in (MemoryOptions, Turns, Output):
        add_options(parser, cls)


def run(args: argparse.Namespace) -> int:
    options, turns, output = (read_options(cls, args) for cls in (MemoryOptions, Turns, Output))
    threads = getattr(args, "threads", None)
    for path in filter(None, (options.trace, options.timeline)):
        writable_folder(path.parent, "folder")
    _check(options, turns, getattr(args, "policy", None))
    request = _request(args, options)
    if options.policies:
        result = compare_policies(request, turns.peer, turns.rounds, _figures, threads)
        output.publish("policies", result, policies_table(result), lambda: draw_policies(result))
        return 0
    result, seen = measure_memory({**request, "matmul": ["after"], "profile": bool(options.timeline)}, threads)
    allocations, moments = result.pop("allocations", None), result.pop("moments")
    prediction = predict(result)
    result.update(against(result, prediction))
    output.publish("memory", result, _table(result), lambda: draw_process(seen, moments, result))
    if options.trace:
        write_bytes(options.trace, mprof_trace(seen, moments, shlex.join(["python", "-m", "cpu3d", *sys.argv[1:]])))
    if options.timeline:
        if isinstance(allocations, str):
            print(f"no live curve: {allocations}", file=sys.stderr)
            allocations = None
        write_bytes(options.timeline, _timeline(result, prediction, allocations or []))
    return 0


def measure_memory(request: Dict[str, Any], threads: Optional[int] = None) -> Tuple[Result, List[Resident]]:
    """Run the steps of `request` in a new process, and look at it from outside, which costs it nothing.

    Returns the result with the keys of `bench step` and more, and what was seen of the process up to its last step.
    `process_peak_bytes` is the kernel's own count; `anonymous_peak_bytes` and `file_peak_bytes` are the largest seen
    (None without /proc). `baseline_bytes` lay in memory when the network was built and no volume was there yet. Raises
    ProcessFailedError where the process dies, as the kernel's out-of-memory killer makes it.
    """
    looks: List[Optional[Resident]] = []
    result = measure_in_fresh_process(
        {**request, "watched": True}, look=lambda pid: looks.append(resident(pid)), threads=threads
    )
    ends = [end for name, _, end in result["moments"] if name == "step"]
    last = ends[-2 if request.get("profile") else -1]  # the profiler takes memory of its own
    result["moments"] = [moment for moment in result["moments"] if moment[2] <= last]
    seen = [one for one in looks if one and one.time_s <= last]
    result["anonymous_peak_bytes"] = max((one.anonymous_bytes for one in seen), default=None)
    result["file_peak_bytes"] = max((one.file_bytes for one in seen), default=None)
    result["rounds"], result["peers"] = [result["step_s"]], []
    return result, seen


def predict(result: Result) -> Optional[Estimate]:
    """The estimator's prediction of what was measured; None, with the reason on stderr, where it has none.

    It knows nothing of an engine without oneDNN, nor of what this host's calibration leaves out: no reason to lose a
    measurement.
    """
    try:
        if not has_known_engine(result):
            raise ValueError("engine must use oneDNN, got none; the estimator knows itex and stock")
        job = measured_job(result)
        return estimate(job, find_constants(job.threads))
    except ValueError as error:
        print(f"no prediction: {error}", file=sys.stderr)
        return None


def against(result: Result, prediction: Optional[Estimate]) -> Result:
    """`predicted` beside `errors`, which are signed shares of what was measured."""
    if prediction is None:
        return {"predicted": None, "errors": None}
    predicted = {name: getattr(prediction, name) for name in (*FIGURES, "upper_bound_bytes")}
    errors = {name: predicted[name] / result[name] - 1 if result[name] else None for name in FIGURES}
    errors["upper_bound_bytes"] = predicted["upper_bound_bytes"] / result["process_peak_bytes"] - 1
    return {"predicted": predicted, "errors": errors}


# --- All policies ---


def compare_policies(
    request: Dict[str, Any],
    peers: Sequence[str],
    rounds: int,
    predict: Callable[[Result], Optional[Result]],
    threads: Optional[int] = None,
) -> Result:
    """Measure the step of `request` plain, under every policy and by peers, in turn; the content of a record.

    `predict` gives the estimator's figures for the request of a policy on the engine and threads that ran. Raises
    InputError for a peer without a useful answer, and ProcessFailedError where none of ours could be measured.
    """
    variants = {PLAIN: {"plain": True, "micro_batch": request["batch"]}}  # the plain graph computes a batch as a whole
    variants.update({policy: {"unet": {**request["unet"], "policy": policy}} for policy in POLICIES})
    ways: Dict[Any, Callable[[int], Result]] = {
        (number, command): lambda _, command=command: run_peer(command) for number, command in enumerate(peers)
    }
    peer_ways = tuple(ways)  # first: a command that is wrong is found out before ours took their time
    for name, more in variants.items():
        one = {**request, "matmul": [], **more}
        ways[name] = lambda _, one=one: measure_in_fresh_process(one, threads=threads)
    found, failures = in_turn(ways, rounds, "memory")
    measured = [one for name in variants for one in found[name] if one]
    if not measured:
        raise failures[PLAIN]
    unit_bytes = math.prod(request["shape"]) * request["unet"]["filters"] * DTYPE_BYTES[request["unet"]["dtype"]]
    facts = {name: measured[0][name] for name in HOST_FACTS}
    names = _peer_names(peer_ways, found)
    rows = []
    for way in (*variants, *peer_ways):
        row = summary(found[way], found[BASELINE])
        allocator = row["allocator_peak_bytes"]
        policy = {**request, **facts, **variants[way]} if way in POLICIES else None
        rows.append({
            "name": names.get(way, way),
            "kind": "peer" if way in names else "policy" if policy else "plain",
            "options": peer_options(way[1]) if way in names else "",
            **row,
            "units": None if allocator is None else allocator / unit_bytes,
            "rounds": [
                one and {name: one.get(name) for name in (*FIGURES, "step_s_min", "step_s_max")} for one in found[way]
            ],
            "error": failures[way].reason if way in failures else None,
            "predicted": predict(policy) if policy else None,
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
        figures = [*_peaks(row, unit), with_range(row, "step_s"), with_range(row, "ratio")]
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
    draw_bars(
        allocator, [None if row["error"] else peak or 0 for row, peak in zip(rows, peaks[FIGURES[0]])],
        "allocator peak, GiB", names=[row["name"] for row in rows], texts=units,
    )  # fmt: skip
    draw_bars(process, peaks[FIGURES[1]], "process peak, GiB", colours=PALETTE[5])
    name = "ratio" if any(row["ratio"] for row in rows) else "step_s"
    draw_bars(
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


def draw_process(seen: Sequence[Resident], moments: Sequence[Moment], result: Result) -> bytes:
    """Anonymous memory and file pages over time, the steps as grey bands, the predicted peak as a line. PNG."""
    figure = new_figure(7.2, 3.2)
    axes = figure.add_subplot()
    start = seen[0].time_s if seen else 0
    times_s = [one.time_s - start for one in seen]
    anonymous, total = ([size / GIB for size in sizes] for sizes in (
        [one.anonymous_bytes for one in seen], [one.total_bytes for one in seen],
    ))  # fmt: skip
    axes.fill_between(times_s, anonymous, color=PALETTE[0], alpha=0.9, linewidth=0, label="anonymous")
    axes.fill_between(times_s, anonymous, total, color=PALETTE[4], alpha=0.9, linewidth=0, label="file pages")
    for number, (_, begin, end) in enumerate(moments):
        axes.axvspan(begin - start, end - start, color="#000000", alpha=0.10 if number % 2 else 0.05, linewidth=0)
    if result["predicted"]:
        peak = result["predicted"]["process_peak_bytes"] / GIB
        axes.axhline(peak, color=PALETTE[1], linewidth=1.4, linestyle="--", label=f"predicted peak, {peak:.2f} GiB")
    axes.set_xlim(0, (times_s[-1] if times_s else 0) or 1)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds since the start of the process")
    axes.set_ylabel("resident, GiB")
    plain(axes, title_of(result))
    axes.legend(frameon=False, fontsize=8, loc="lower right", ncols=3)
    figure.tight_layout(pad=0.6)
    return png(figure)


# --- Private helpers ---


def _check(options: MemoryOptions, turns: Turns, policy: Optional[str]) -> None:
    """Raise InputError for options that contradict each other, and for peers that cannot be run."""
    if options.policies:
        one = {"policy": policy, "trace": options.trace, "timeline": options.timeline}
        problems = [f"{name} must be left out with --policies, got {one[name]}; drop it" for name in one if one[name]]
    else:
        many = {"peer": turns.peer, "rounds": turns.rounds > 1}
        problems = [f"{name} must come with --policies, got it alone; add that" for name in many if many[name]]
    if problems:
        raise InputError(*problems)
    check_peers(turns.peer)


def _request(args: argparse.Namespace, options: MemoryOptions) -> Dict[str, Any]:
    """What `step.measure` is to do, 128^3 where no shape is given. Raises InputError for a job that cannot be."""
    engine = getattr(args, "engine", "auto")
    if engine not in KNOWN_ENGINES:
        args.engine = "auto"  # a job has none that the estimator does not know
    if getattr(args, "dtype", "auto") == "auto":
        vars(args).pop("dtype", None)
    try:
        whole = source_job(args)
        job = job_from(args, whole or Job(UNetConfig(dtype=read_host().best_dtype)))
    except ValueError as error:
        raise InputError(str(error)) from None
    return {
        "shape": list(job.shape),
        "batch": job.batch,
        "micro_batch": job.micro,
        "unet": dataclasses.asdict(job.unet),
        "optimizer": job.optimizer,
        "steps": options.steps,
        "warm_up": options.warm_up,
        "engine": job.engine if whole and engine == "auto" else engine,
    }


def _figures(variant: Result) -> Optional[Result]:
    """The estimator's figures for a policy."""
    prediction = predict(variant)
    return prediction and {name: getattr(prediction, name) for name in (*FIGURES, "upper_bound_bytes")}


def _peer_names(ways: Sequence[Tuple[int, str]], found: Dict[Any, List[Optional[Result]]]) -> Dict[Any, str]:
    """What each peer calls itself, else its script; for those of one name also what only some of their commands say."""
    names, words = {}, {way: shlex.split(way[1]) for way in ways}
    for way in ways:
        script = Path(next((word for word in words[way] if word.endswith(".py")), words[way][0])).name
        names[way] = next((one["peer"] for one in found[way] if one and "peer" in one), script)
    same = {name: [way for way in ways if names[way] == name] for name in names.values()}
    return {
        way: " ".join([name, *(
            word for word in peer_options(way[1]).split() if not all(word in words[other] for other in same[name])
        )])
        for way, name in names.items()
    }  # fmt: skip


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
        values = [figures.get(key) for figures in (result, predicted)]
        unit, error = (1 if key == "step_s" else GIB), errors.get(key)
        shown = ["-" if value is None else f"{value / unit:.2f}" for value in values]
        rows.append([name, *shown, "" if error is None else f"{error:+.1%}"])
    title = f"Memory of a training step, {title_of(result)}"
    return Table(("", "measured", "predicted", "error"), rows, title=title, caption=result["engine_name"])


def _timeline(result: Result, prediction: Optional[Estimate], allocations: List[Any]) -> bytes:
    title, ops, counted, seconds = f"One training step, {title_of(result)}", [], [], []
    if prediction:
        program = training_step(prediction.job)
        ops, counted = [op.name for op in program.ops], counted_by_op(program)
        seconds = step_seconds(program, prediction.constants, prediction.job).op_s
    return draw_timeline(ops, counted, seconds, title=title, measured=allocations)
