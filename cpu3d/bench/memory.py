"""Measure what the real training step takes of memory, in a fresh process, beside what the estimator predicts.

    ./run.sh bench memory --shape 128 128 128 --filters 16 --dtype bfloat16 --json
    ./run.sh bench memory --policies --shape 128 128 128 --rounds 2 --peer "python other.py" --record r/policies.jsonl

Takes the estimator's arguments; of a --run it measures the step alone, without averaged weights and the store's work.
The allocator's peak is TensorFlow's own count, in which stock TensorFlow leaves out oneDNN's scratch; the process's is
the kernel's (VmHWM). Both are exact.

--policies measures the step under every memory policy and beside peers, in turn; a peer is a command whose last line of
output is JSON with "step_s", and "peak_rss_bytes" if it knows its peak. What a process dies of becomes a row. The bytes
live over a step are those of one more, of which TensorFlow's profiler tells every request to the allocator; `bench
tables --picture` draws them.
"""

import math
import sys
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Sequence

from cpu3d.bench import harness
from cpu3d.bench.harness import HOST_FACTS, Output, Result, Turns, deaths, gib, host_of, title_of, with_range
from cpu3d.bench.step import (
    MeasuredJob,
    StepOptions,
    has_known_engine,
    job_of_record,
    measure,
    step_request,
)
from cpu3d.errors import InputError
from memory_estimator.calibration import HostConstants, find_constants
from memory_estimator.common.schema import option
from memory_estimator.common.table import PALETTE, Table, new_figure, plain, png
from memory_estimator.common.units import GIB, format_bytes
from memory_estimator.estimate import estimate
from models.config import POLICIES

FIGURES = ("allocator_peak_bytes", "process_peak_bytes", "step_s")  # measured and predicted

BASELINE = "speed"  # times are relative to its


@dataclass(frozen=True)
class MemoryOptions(StepOptions):
    """What is measured, but for the job."""

    policies: bool = option(False, "compare all policies and peers")


OPTIONS = ((MeasuredJob,), MemoryOptions, Turns, Output)


def run(given: Dict[str, Any], options: MemoryOptions, turns: Turns, output: Output) -> int:
    if options.policies and "policy" in given:
        raise InputError("policy must be left out with --policies, got it; drop it")
    if not options.policies and (turns.peer or turns.rounds > 1):
        raise InputError("peer and rounds must come with --policies, got one alone; add that")
    request = step_request(given, options)
    if options.policies:
        result = compare_policies(request, turns.peer, turns.rounds)
        output.publish("policies", result, policies_table(result))
    else:
        constants = find_constants()
        result = harness.in_fresh_process(measure, request)
        result["predicted"] = predict(result, constants)
        output.publish("memory", result, memory_table(result))
    return 0


def predict(result: Result, constants: HostConstants) -> Optional[Result]:
    """The estimator's figures for what was measured; None, with the reason on stderr, where it has none."""
    try:
        if not has_known_engine(result):
            raise ValueError("engine must use oneDNN, got none; the estimator knows itex and stock")
        found = estimate(job_of_record(result), constants)
        return {name: getattr(found, name) for name in (*FIGURES, "upper_bound_bytes")}
    except ValueError as error:
        print(f"no prediction: {error}", file=sys.stderr)
        return None


def memory_table(result: Result) -> Table:
    """What was measured and predicted of one step."""
    figures, rows = ("allocator_peak_bytes", "process_peak_bytes", "upper_bound_bytes"), []
    for name, found in (("measured", result), ("predicted", result["predicted"])):
        rows += [[name, *(gib(found.get(figure)) for figure in figures), f"{found['step_s']:.2f}"]] if found else []
    columns = ("", "allocator peak, GiB", "process peak, GiB", "upper bound, GiB", "s a step")
    return Table(columns, rows, f"Memory of a training step, {title_of(result)}", result["engine_name"])


# --- All policies ---


def compare_policies(request: Dict[str, Any], peers: Sequence[str], rounds: int) -> Result:
    """Measure the step of `request` under every policy and by peers, in turn; the content of a record.

    Raises InputError for a peer without a useful answer, and ProcessFailedError where none of ours could be measured.
    """
    requests = {policy: {**request, "unet": {**request["unet"], "policy": policy}} for policy in POLICIES}
    ours = {
        policy: lambda number, one=one: harness.in_fresh_process(measure, {**one, "live": number == 0})
        for policy, one in requests.items()
    }
    constants = find_constants()
    found, failures = harness.in_turn({**harness.peers(peers), **ours}, rounds, "memory")
    measured = next((one for policy in POLICIES for one in found[policy] if one), None)
    if not measured:
        raise failures[BASELINE]
    facts = {name: measured[name] for name in HOST_FACTS}
    size = 2 if request["unet"]["dtype"] == "bfloat16" else 4
    unit_bytes = math.prod(request["shape"]) * request["unet"]["filters"] * size
    abouts = {peer: harness.peer_of(peer, found[peer]) for peer in peers}
    options = [about["options"].split() for about in abouts.values()]
    shared = set(options[0]).intersection(*options) if options else ()  # what all peers are told says the job
    names = {
        peer: " ".join([about["peer"], *(word for word in about["options"].split() if word not in shared)])
        for peer, about in abouts.items()
    }
    rows: List[Result] = []
    for way in (*POLICIES, *peers):
        row, is_ours = harness.summary(found[way], found[BASELINE]), way in requests
        allocator = row["allocator_peak_bytes"]
        row["units"] = None if allocator is None else allocator / unit_bytes
        row["live_bytes"] = (found[way][0] or {}).get("live_bytes")  # asked for in the first round
        row["rounds"] = [one and {name: one.get(name) for name in FIGURES} for one in found[way]]
        row["error"] = failures[way].reason if way in failures else None
        row["predicted"] = predict({**requests[way], **facts}, constants) if is_ours else None
        about = {"name": way, "kind": "policy"} if is_ours else {**abouts[way], "name": names[way], "kind": "peer"}
        rows.append({**about, **row})
    return {**request, "rounds": rounds, "unit_bytes": unit_bytes, "rows": rows, **facts}


def policies_table(record: Result) -> Table:
    """Peaks and seconds of every row, what is predicted of it below."""
    unit, batch, rows = record["unit_bytes"], f"batch {record['batch']}", []

    def peaks(figures: Result) -> List[str]:
        allocator = figures["allocator_peak_bytes"]
        units = "-" if allocator is None else f"{allocator / unit:.1f}"
        return [gib(allocator), units, gib(figures["process_peak_bytes"])]

    for row in record["rows"]:
        figures = [*peaks(row), with_range(row, "step_s"), with_range(row, "ratio")]
        rows.append([row["name"], *(["-", "-", "-", "died", "-"] if row["error"] else figures)])
        if row["predicted"]:
            rows.append(["predicted", *peaks(row["predicted"]), f"{row['predicted']['step_s']:.2f}", ""])
    if record["micro_batch"] < record["batch"]:
        batch += f" ({record['micro_batch']} at a time, peers all at once)"
    columns = ("", "allocator peak, GiB", "units", "process peak, GiB", "s a step", f"against `{BASELINE}`")
    title = (
        f"{title_of(record, batch)}, {record['engine_name']}, {host_of(record)}; a unit is "
        f"{record['unet']['filters']} channels of one volume, {format_bytes(unit)}:"
    )
    return Table(columns, rows, title=title, caption=deaths(record["rows"]))


def draw_policies(record: Result, records: Sequence[Result]) -> bytes:
    """What the process holds over one step under each policy, panels as wide as their steps take long, and the peaks of
    the peers of `records` at the same job, as lines, as PNG. Below it stand the hosts, and what a policy died of.

    What the allocator has handed out is drawn above all else that the process holds at its peak: so the highest point
    is the process's peak, which is what is known of a peer.
    """
    drawn = [row for row in record["rows"] if row.get("live_bytes")]
    times = [row["step_s"] / drawn[0]["step_s"] for row in drawn]
    measured = [(row, one) for one in records for row in one["rows"] if row["kind"] == "peer"]
    found = {
        row["name"]: (row["process_peak_bytes"] / GIB, host_of(one))
        for row, one in measured
        if row["process_peak_bytes"]
    }
    peers = sorted((peak, name) for name, (peak, _) in found.items())
    highest = 1.15 * max([row["process_peak_bytes"] / GIB for row in drawn] + [peak for peak, _ in peers])
    figure = new_figure(10, 4.2)
    widths = {"width_ratios": [max(time, sum(times) / 8) for time in times]}  # a title has room in an eighth
    panels = figure.subplots(1, len(drawn), sharey=True, squeeze=False, gridspec_kw=widths)[0]
    for axes, row, time in zip(panels, drawn, times):
        beside, live = (row["process_peak_bytes"] - row["allocator_peak_bytes"]) / GIB, row["live_bytes"]
        colour = PALETTE[POLICIES.index(row["name"])]
        # Parts of a step, each as high as the most in it; the step begins with what is live at its end.
        parts = [time * part / len(live) for part in range(len(live) + 1)]
        held = [beside + size / GIB for size in (live[-1], *live)]
        axes.fill_between(parts, 0, beside, color="#888888", alpha=0.3, linewidth=0)
        axes.fill_between(parts, beside, held, color=colour, alpha=0.3, linewidth=0, step="pre")
        axes.step(parts, held, color=colour, linewidth=1.3, where="pre")
        plain(axes, f"{row['name']}\n{max(held):.2f} GiB, {time:.2f} x")
        for peak, _ in peers:
            axes.axhline(peak, color="#444444", linewidth=1, linestyle=(0, (5, 3)))
        axes.set_xlim(0, time)
        axes.set_ylim(0, highest)
        axes.set_xticks([part / 2 for part in range(1 + int(2 * time))])
        axes.tick_params(left=axes is panels[0])
    above = -highest
    for peak, name in peers:
        above = max(peak, above + highest / 20)  # names do not overlap
        panels[-1].annotate(
            f"{name}: {peak:.2f} GiB", (times[-1], above), (-4, 3), textcoords="offset points",
            color="#444444", fontsize=8, ha="right",
        )  # fmt: skip
    panels[0].set_ylabel("held by the process, GiB")
    panels[0].annotate("beside the allocator", (0.04, 0.06), fontsize=8, color="#444444")
    below, ours = f"time, in steps of {drawn[0]['name']}", host_of(record)
    hosts = {host for _, host in found.values()}
    below += f"; policies on {ours}, peers on {', '.join(sorted(hosts))}" if hosts - {ours} else ""
    died = [
        f"{row['name']}: {row['error'][:120]}" for row in record["rows"] if row["kind"] == "policy" and row["error"]
    ]
    figure.supxlabel("\n".join((below, *died)), fontsize=9)
    figure.suptitle(f"One training step, {title_of(record)}", fontsize=10, fontweight="bold", x=0.01, ha="left")
    figure.tight_layout(pad=0.6, w_pad=0.8)
    return png(figure)
