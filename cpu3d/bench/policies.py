"""Peak and time of a training step under every memory policy, beside the plain Keras graph and beside peers.

    ./run.sh bench memory --policies --shape 240 240 160 --rounds 2 --peer "python other_trainer.py --bf16"

Each in a fresh process, in turn, round by round; times are compared within a round. A peer is any command whose last
line of output is JSON with "step_s", and "peak_rss_bytes" where it knows its peak; its threads are its own affair.
What a process dies of, as for want of memory, becomes a row; the others stand.
"""

import argparse
import math
import shlex
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence

from rich.table import Table

from cpu3d.bench.step import ProcessFailedError, check_peers, measure_in_fresh_process, run_peer
from cpu3d.errors import InputError
from cpu3d.util.progress import bar
from memory_estimator.closed_form.writer import DTYPE_BYTES
from memory_estimator.units import GIB, format_bytes
from models.config import POLICIES

PLAIN = "plain Keras"

BASELINE = "speed"
"""The row that times are relative to."""

FIGURES = ("step_s", "step_s_min", "step_s_max", "allocator_peak_bytes", "process_peak_bytes")
"""What is kept of every round."""

OF_THE_HOST = ("engine_name", "threads", "host", "versions")
"""What one measurement says for all."""


@dataclass(frozen=True)
class Variant:
    """One way to do the step."""

    name: str
    kind: str
    """ "plain", "policy" or "peer"."""
    measure: Callable[[], Dict[str, Any]]
    """Does it in a fresh process. Raises ProcessFailedError where that dies."""
    options: str = ""
    """Of a peer: its command without the paths."""


def add_policies_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--policies", action="store_true", help="compare all policies, the plain Keras graph, peers")
    parser.add_argument(
        "--peer", action="append", default=[], metavar="COMMAND", help="with --policies: one more row; repeatable"
    )
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="with --policies: how often (default: 1)")


def check_policies_options(args: argparse.Namespace) -> None:
    """Raise InputError for options that contradict each other, and for peers that cannot be run."""
    problems = []
    if args.rounds < 1:
        problems.append(f"rounds must be at least 1, got {args.rounds}; give a positive number")
    if args.policies:
        one = {"policy": getattr(args, "policy", None), "trace": args.trace, "timeline": args.timeline}
        problems += [
            f"{name} must be left out with --policies, which measures them all, got {value}; leave one of the two out"
            for name, value in one.items()
            if value
        ]
    else:
        many = {"peer": args.peer, "rounds": args.rounds > 1}
        problems += [
            f"{name} must come with --policies, got it alone; add that" for name, given in many.items() if given
        ]
    if problems:
        raise InputError(*problems)
    check_peers(args.peer)


def compare_policies(
    request: Dict[str, Any],
    peers: Sequence[str],
    rounds: int,
    predict: Callable[[Dict[str, Any]], Optional[Dict[str, Any]]],
    threads: Optional[int] = None,
) -> Dict[str, Any]:
    """Measure every variant of the step of `request` in turn, `rounds` times; the content of a record.

    Each row has the medians over the rounds of its seconds and of its ratio to the baseline's in the same round, and
    the largest of its peaks. `predict` gives the estimator's figures for the request of a policy on the engine and the
    threads that ran, None where it has none.
    Raises InputError for a peer without a useful answer, and ProcessFailedError where none of ours could be measured.
    """
    ours = _ours(request, threads)
    theirs = [_peer(command) for command in peers]
    found: Dict[Variant, List[Optional[Dict[str, Any]]]] = {variant: [] for variant in (*ours, *theirs)}
    failures: Dict[Variant, ProcessFailedError] = {}
    with bar("bench memory", total=rounds * len(found)) as advance:
        for _ in range(rounds):
            # Peers first: a command that is wrong is found out before ours took their time.
            for variant in (*theirs, *ours):
                found[variant].append(None if variant in failures else _measured(variant, failures))
                advance()
    measured = [one for variant in ours for one in found[variant] if one]
    if not measured:
        raise failures[ours[0]]
    baseline = next(found[variant] for variant in ours if variant.name == BASELINE)
    unit_bytes = math.prod(request["shape"]) * request["unet"]["filters"] * DTYPE_BYTES[request["unet"]["dtype"]]
    of_the_host = {name: measured[0][name] for name in OF_THE_HOST}
    rows = []
    for variant, results in found.items():
        row = _row(variant, results, baseline, unit_bytes)
        row["error"] = failures[variant].reason if variant in failures else None
        unet = {**request["unet"], "policy": variant.name}
        row["predicted"] = predict({**request, **of_the_host, "unet": unet}) if variant.kind == "policy" else None
        rows.append(row)
    _tell_apart([row for row in rows if row["kind"] == "peer"])
    return {
        **{name: value for name, value in request.items() if name != "matmul"},
        "unet": {name: value for name, value in request["unet"].items() if name != "policy"},
        "rounds": rounds,
        "unit_bytes": unit_bytes,
        "rows": rows,
        **of_the_host,
    }


def policies_table(result: Dict[str, Any], title: str) -> Table:
    """For the terminal. `title` says what was measured."""
    table = Table(title=title, title_justify="left", caption_justify="left")
    notes = [f"{row['name']}: {row['error']}" for row in result["rows"] if row["error"]]
    table.caption = "\n".join([result["engine_name"], f"a unit is {unit_in_words(result)}", *notes])
    table.add_column("", min_width=11)
    for column in ("allocator\npeak, GiB", "\nunits", "process\npeak, GiB"):
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("\ns a step", f"against\n{BASELINE}"):
        table.add_column(column, justify="right")
    for row in result["rows"]:
        for line in lines_of(row, result["unit_bytes"]):
            table.add_row(*line)
    return table


def lines_of(row: Dict[str, Any], unit_bytes: int) -> List[List[str]]:
    """A row in words: name, allocator peak in GiB and in units, process peak in GiB, seconds, ratio.

    What is predicted of it follows as a line of its own.
    """
    first = [row["name"], "-", "-", "-", "died", "-"]
    if not row["error"]:
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}{_range(row, 'ratio')}"
        first = [row["name"], *_peaks(row, unit_bytes), f"{row['step_s']:.2f}{_range(row, 'step_s')}", ratio]
    said = row["predicted"]
    return [first, ["predicted", *_peaks(said, unit_bytes), f"{said['step_s']:.2f}", ""]] if said else [first]


def unit_in_words(result: Dict[str, Any]) -> str:
    """What a unit of a record is."""
    return f"{result['unet']['filters']} channels of one volume, {format_bytes(result['unit_bytes'])}"


# --- Private helpers ---


def _ours(request: Dict[str, Any], threads: Optional[int]) -> List[Variant]:
    def variant(name: str, kind: str, **more: Any) -> Variant:
        return Variant(name, kind, lambda: measure_in_fresh_process({**request, "matmul": [], **more}, threads=threads))

    # The plain graph computes a batch as a whole, and has no policy.
    return [
        variant(PLAIN, "plain", plain=True, micro_batch=request["batch"]),
        *(variant(policy, "policy", unet={**request["unet"], "policy": policy}) for policy in POLICIES),
    ]


def _peer(command: str) -> Variant:
    words = shlex.split(command)
    name = Path(next((word for word in words if word.endswith(".py")), words[0])).name
    options = " ".join(word for word in words if "/" not in word)

    def measure() -> Dict[str, Any]:
        said = run_peer(command)
        return {**said, "process_peak_bytes": said.get("peak_rss_bytes")}

    return Variant(name, "peer", measure, options)


def _measured(variant: Variant, failures: Dict[Variant, ProcessFailedError]) -> Optional[Dict[str, Any]]:
    """A measurement; None where the process died, which is then among the failures."""
    try:
        return variant.measure()
    except ProcessFailedError as error:
        if error.returncode == 0:  # it did not die, it has nothing to say
            raise
        failures[variant] = error
        return None


def _row(
    variant: Variant, results: List[Optional[Dict[str, Any]]], baseline: List[Optional[Dict[str, Any]]], unit_bytes: int
) -> Dict[str, Any]:
    there = [one for one in results if one]
    seconds = [one["step_s"] for one in there]
    ratios = [one["step_s"] / base["step_s"] for one, base in zip(results, baseline) if one and base]
    allocator, process = (
        max((one[name] for one in there if one.get(name) is not None), default=None)
        for name in ("allocator_peak_bytes", "process_peak_bytes")
    )
    return {
        "name": next((one["peer"] for one in there if "peer" in one), variant.name),
        "kind": variant.kind,
        "options": variant.options,
        "allocator_peak_bytes": allocator,
        "units": None if allocator is None else allocator / unit_bytes,
        "process_peak_bytes": process,
        **_spread("step_s", seconds),
        **_spread("ratio", ratios),
        "rounds": [one and {name: one.get(name) for name in FIGURES} for one in results],
    }


def _spread(name: str, values: List[float]) -> Dict[str, Optional[float]]:
    middle = statistics.median(values) if values else None
    return {name: middle, f"{name}_min": min(values, default=None), f"{name}_max": max(values, default=None)}


def _tell_apart(rows: List[Dict[str, Any]]) -> None:
    """Add to the names of peers that have the same one what only some of their commands say."""
    names = [row["name"] for row in rows]
    for name in set(names):
        alike = [row for row in rows if row["name"] == name]
        common = set.intersection(*(set(row["options"].split()) for row in alike))
        for row in alike:
            own = [word for word in row["options"].split() if word not in common]
            row["name"] = " ".join([name, *own])


def _range(row: Dict[str, Any], name: str) -> str:
    """ " (least to most)", where there was more than one round."""
    low, high = row[f"{name}_min"], row[f"{name}_max"]
    return f" ({low:.2f} to {high:.2f})" if high > low else ""


def _peaks(figures: Dict[str, Any], unit_bytes: int) -> List[str]:
    allocator, process = figures["allocator_peak_bytes"], figures["process_peak_bytes"]
    sizes = ((allocator, GIB, 2), (allocator, unit_bytes, 1), (process, GIB, 2))
    return ["-" if size is None else f"{size / unit:.{digits}f}" for size, unit, digits in sizes]
