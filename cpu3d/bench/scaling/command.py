"""One worker against several on this host: computing and exchanging timed apart, and what becomes of the gap.

    ./run.sh bench scaling --shape 240 240 160 --workers 1 2 --rounds 3 --record records/scaling.jsonl
    ./run.sh bench scaling --shape 128 128 128 --workers 2 4 --cores-per-worker 14 --picture scaling.png

Each worker is a process held to cores of its own and does the trainer's own step on made-up data. In turn, round by
round: one worker; one that adds its gradients up and updates its weights apart, as several have to; several that
exchange their gradients, each with as much to do; as many that do all but exchange, which shows what they take from
each other by being on one host; one worker with the cores of all. An efficiency of 1 would be as many times the volumes
a second. The estimator takes its constants for several hosts from the record.
"""

import argparse
import itertools
import json
import statistics
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

from rich.console import Console

from cpu3d.bench.scaling.loopback import loopback_bytes_per_s
from cpu3d.bench.scaling.processes import measure_together
from cpu3d.bench.scaling.table import gap_lines, scaling_table, title_of
from cpu3d.bench.step import add_step_options, step_request
from cpu3d.errors import InputError
from cpu3d.host.thread_plan import thread_plans
from cpu3d.host.topology import Cpu, Topology, read_topology
from cpu3d.util.atomic import atomic_write, writable_folder
from cpu3d.util.progress import bar
from cpu3d.util.records import append_record
from memory_estimator.scaling.costs import ALONE, APART, IN_PARTS, TOGETHER, WIDE

GRADIENT_BYTES = 4
"""Gradients are exchanged in float32."""

Way = Tuple[str, int, List[List[int]]]
"""Its name, its number of workers, and the CPUs of each process."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_step_options(parser)
    parser.add_argument(
        "--workers", type=int, nargs="+", default=[1, 2], metavar="N", help="how many, 1 is always there (default: 1 2)"
    )
    parser.add_argument(
        "--cores-per-worker", type=int, default=0, metavar="K", help="default: what the most workers leave each"
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="how often, in turn (default: 3)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--record", type=Path, metavar="FILE", help="append the result to a .jsonl file")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw where the seconds of a step go, as PNG")


def run(args: argparse.Namespace) -> int:
    for path in (args.record, args.picture):
        if path:
            writable_folder(path.parent, "folder")
    if args.rounds < 1:
        raise InputError(f"--rounds must be at least 1, got {args.rounds}; give a positive number")
    request = step_request(args)
    del request["matmul"]
    topology = read_topology()
    each = cores_each(topology, args.workers, args.cores_per_worker)
    result = compare_workers(request, ways(topology, args.workers, each), cores=each, rounds=args.rounds)
    result.update(cores_per_worker=each, host=topology.host.summary())
    if args.json:
        print(json.dumps(result))
    else:
        console = Console()
        console.print(scaling_table(result))
        for line in gap_lines(result):
            console.print(line, highlight=False)
    if args.record:
        append_record(args.record, "scaling", result)
    if args.picture:
        from cpu3d.bench.scaling.picture import draw_scaling

        with atomic_write(args.picture) as file:
            file.write(draw_scaling(result, title_of(result)))
    return 0


def cores_each(topology: Topology, workers: Sequence[int], asked: int = 0) -> int:
    """Cores of a worker: as asked for, else what `thread_plans` gives the most workers, of the smallest part.

    Raises InputError for less than two workers at the most, and where the host cannot be laid with them.
    """
    most = max(workers)
    if most < 2 or min(workers) < 1:
        raise InputError(f"--workers must have a number above 1, got {list(workers)}; write it like --workers 1 2")
    if asked < 0:
        raise InputError(f"--cores-per-worker must be at least 1, got {asked}; give a positive number")
    least = min(plan.intra_op for plan in thread_plans(topology, most))
    if asked > least:
        raise InputError(
            f"--cores-per-worker must be at most {least} with {most} workers here, got {asked}; give fewer"
        )
    return asked or least


def ways(topology: Topology, workers: Sequence[int], each: int) -> List[Way]:
    """All that is measured, in its order. Shares are parts of those of the most workers, as `train` would lay them:
    whole cores with all their hyper-threads; empty under a quota, where nothing is bound."""
    counts = sorted({number for number in workers if number > 1})
    plans = thread_plans(topology, counts[-1])
    shares = [
        [cpu.number for core in _cores_within(topology, plan.cpus)[:each] for cpu in core] if plan.cpus else []
        for plan in plans
    ]
    found: List[Way] = [(ALONE, 1, shares[:1]), (IN_PARTS, 1, shares[:1])]
    for count in counts:
        joined = [list(itertools.chain.from_iterable(shares[:count]))]
        found += [(TOGETHER, count, shares[:count]), (APART, count, shares[:count]), (WIDE, count, joined)]
    return found


def compare_workers(request: Dict[str, Any], found: Sequence[Way], *, cores: int, rounds: int) -> Dict[str, Any]:
    """Measure every way, `rounds` times in turn; the content of a record, but for the host and the `cores` of a worker.

    A row's figures are all of the round with its median step, so that a step's parts add up to it.
    """
    measured: List[List[Dict[str, Any]]] = [[] for _ in found]
    results: List[Dict[str, Any]] = []
    loopback: List[float] = []
    with bar("bench scaling", total=rounds * len(found)) as advance:
        for _ in range(rounds):
            loopback.append(loopback_bytes_per_s())
            for (name, count, cpus), rows in zip(found, measured):
                results = measure_together(
                    request,
                    cpus,
                    threads=cores * (count if name == WIDE else 1),
                    exchanging=name == TOGETHER,
                    in_parts=name in (IN_PARTS, APART),
                )
                rows.append(_one_round(results))
                advance()
    alone = [one["step_s"] for one in measured[0]]
    rows = []
    for (name, count, cpus), per_round in zip(found, measured):
        steps = [one["step_s"] for one in per_round]
        # Of one worker with all the cores: how many times as fast it is, over how many times the cores.
        shares = [base / step / (count if name == WIDE else 1) for base, step in zip(alone, steps)]
        rows.append(
            {
                "name": name,
                "workers": count,
                "processes": len(cpus),
                "cpus": [list(share) for share in cpus],
                **sorted(per_round, key=lambda one: one["step_s"])[(len(per_round) - 1) // 2],
                "process_peak_bytes": max(one["process_peak_bytes"] for one in per_round),
                "step_s_min": min(one["step_s_min"] for one in per_round),
                "step_s_max": max(one["step_s_max"] for one in per_round),
                "rounds": steps,
                "efficiency": statistics.median(shares),
                "efficiency_min": min(shares),
                "efficiency_max": max(shares),
            }
        )
    last = results[0]
    return {
        **request,
        "gradient_bytes": GRADIENT_BYTES * last["parameters"],
        "loopback_bytes_per_s": statistics.median(loopback),
        "rows": rows,
        **{name: last[name] for name in ("engine_name", "versions")},
        "threads": {row["name"]: row.pop("threads") for row in rows},
    }


# --- Private helpers ---


def _cores_within(topology: Topology, cpus: Sequence[int]) -> List[Tuple[Cpu, ...]]:
    return [core for core in topology.cores if {cpu.number for cpu in core} <= set(cpus)]


def _one_round(results: Sequence[Dict[str, Any]]) -> Dict[str, Any]:
    """Means over all steps of all workers, which add up: step = compute + wait + exchange + packing."""

    def mean(name: str) -> float:
        return (
            statistics.fmean(itertools.chain.from_iterable(one[name] for one in results)) if results[0][name] else 0.0
        )

    every = list(itertools.chain.from_iterable(one["step_s"] for one in results))
    step_s, wait_s, exchange_s, packing_s = (mean(name) for name in ("step_s", "wait_s", "sum_s", "packing_s"))
    return {
        "step_s": step_s,
        "step_s_min": min(every),
        "step_s_max": max(every),
        "compute_s": step_s - wait_s - exchange_s - packing_s,
        "wait_s": wait_s,
        "exchange_s": exchange_s,
        "packing_s": packing_s,
        **{name: statistics.fmean(one.get(name, 0.0) for one in results) for name in ("call_s", "message_s")},
        "process_peak_bytes": max(one["process_peak_bytes"] for one in results),
        "threads": results[0]["threads"],
    }
