"""Measure this host's constants for the estimator: what the runtime holds in memory, how fast each kind of work goes.

    ./run.sh calibrate
    ./run.sh calibrate --all --out other.json

Runs a few small training steps under TensorFlow's profiler, in a fresh process for each dtype, within a minute for each
engine: a slow host does fewer. Estimates and training on this host then use the file by themselves. Wants a quiet
machine.

Scratch of operations is not fitted: it follows from rules that were read off oneDNN's AVX-512 kernels. So the peaks of
one of the networks are measured too, and printed beside what is predicted of them: more than a fifth between the two
says that the rules do not hold here.
"""

import argparse
import dataclasses
import datetime
import json
import sys
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

from rich.console import Console
from rich.table import Table

from cpu3d.bench.campaign import describe
from cpu3d.bench.fit_costs import fit_costs, straight_line
from cpu3d.bench.harness import last_json_line
from cpu3d.host.apply import ENGINES, installed
from cpu3d.util.atomic import writable_folder, write_json
from cpu3d.util.progress import bar
from memory_estimator.calibration import GROUPS, OWN, HostConstants, load_constants, shipped_constants, to_json
from memory_estimator.estimate import estimate
from memory_estimator.files import read_json
from memory_estimator.host import Host, read_host
from memory_estimator.job import Job
from memory_estimator.proc import cache_bytes
from memory_estimator.units import format_bytes
from models.config import UNetConfig

SHAPE = (96, 96, 96)
"""The largest that constants are fitted to: what is larger is for checking them."""

BUDGET_S = 60
"""For one engine in all its dtypes, start-up included. A network's first step is always done."""

QUIET = 0.1
"""CPUs that other processes may keep busy before the times are called disturbed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    engines = [engine for engine in ENGINES if engine != "stock-no-onednn"]
    parser.add_argument("--engine", choices=engines, default="auto", help="default: auto, what `train` would use")
    parser.add_argument("--all", action="store_true", help="every engine that is installed, a minute each")
    parser.add_argument(
        "--out", type=Path, default=OWN, metavar="FILE", help=f"default: {OWN.name} in the project's root"
    )
    parser.add_argument("--name", default="", help="default: the CPU's name")


def run(args: argparse.Namespace) -> int:
    writable_folder(args.out.parent, "folder")
    host, begin = read_host(), time.perf_counter()
    engines = [engine for engine in ("itex", "stock") if installed(engine)] if args.all else [args.engine]
    dtypes = ["bfloat16", "float32"] if host.fast_bfloat16 else ["float32"]
    runs = [(engine, dtype) for engine in engines for dtype in dtypes]
    results: List[Tuple[str, Dict[str, Any]]] = []
    with bar("calibrate", total=len(runs)) as advance:
        for number, (engine, dtype) in enumerate(runs):
            left_s = BUDGET_S * len(engines) - (time.perf_counter() - begin)
            results.append((dtype, _measure(engine, dtype, host, left_s / (len(runs) - number))))
            advance()
    constants = put_together(results, host, args.name)
    content = {
        **to_json(constants),
        "seconds": round(time.perf_counter() - begin, 1),
        "budget_s": BUDGET_S * len(engines),
        "networks_left_out": sum(len(result["left_out"]) for _, result in results),
        "cpus_busy_with_others": round(_busy_with_others(results), 2),
        "check": [check(constants, dtype, result) for dtype, result in results],
        "versions": results[-1][1]["versions"],
        "environment": results[-1][1]["environment"],
    }
    console = Console()
    console.print(table(constants))
    for line in content["check"]:
        console.print(_told(line), highlight=False)
    if content["networks_left_out"]:
        console.print(f"{content['networks_left_out']} networks left out: this host needs more than the time allotted")
    if content["cpus_busy_with_others"] > QUIET:
        console.print(
            f"other processes kept {content['cpus_busy_with_others']:.1f} CPUs busy: times are too long, "
            "calibrate again when quiet"
        )
        if _is_undisturbed(args.out, constants):
            console.print(f"{args.out} left as it was: it was measured when quiet; remove it to have this one")
            return 0
    write_json(args.out, content)
    console.print(f"{args.out} written after {content['seconds']:.0f} s")
    return 0


def put_together(results: List[Tuple[str, Dict[str, Any]]], host: Host, name: str = "") -> HostConstants:
    """Constants from (dtype, result of `cpu3d.bench.op_times.measure`) of each process, all of one host."""
    costs: Dict[str, Dict[str, Any]] = {}
    runtime: Dict[str, List[Dict[str, int]]] = {}
    for dtype, result in results:
        costs.setdefault(result["engine"], {})[dtype] = fit_costs(result["networks"])
        runtime.setdefault(result["engine"], []).append(result["runtime"])
    lines = {engine: straight_line(points) for engine, points in runtime.items()}
    threads = results[0][1]["threads"]
    shipped = shipped_constants(host.isa).for_threads(threads)
    today = datetime.date.today().isoformat()
    how = f"measured: calibrate, {today}"
    busy = _busy_with_others(results)
    disturbed = f", disturbed by other processes on {busy:.1f} CPUs" if busy > QUIET else ""
    missing = [told for engine in costs for told in _fill_up(costs[engine], engine, shipped)]
    filled = f"; not told apart here and taken from {shipped.name}: {', '.join(missing)}" if missing else ""
    return HostConstants(
        name=name or host.cpu_model,
        cpu=host.cpu_model,
        origin="measured",
        origins={
            "costs": f"{how}, operations of small training steps under TensorFlow's profiler{disturbed}{filled}",
            "baseline_bytes": f"{how}, resident memory less the step's tensors",
            "op_bytes": f"{how}, the same of a shallow and a deep network",
            "cache_bytes": "measured: /sys/devices/system/cpu",
            "saturating_threads": shipped.origins["saturating_threads"],
        },
        record=f"calibrate {today}, {'; '.join(dict.fromkeys(result['engine_name'] for _, result in results))}",
        date=today,
        threads=threads,
        cache_bytes=cache_bytes() or shipped.cache_bytes,
        saturating_threads=shipped.saturating_threads,
        baseline_bytes={engine: line["bytes"] for engine, line in lines.items()},
        op_bytes={engine: line["op_bytes"] for engine, line in lines.items()},
        costs=costs,
    )


def check(constants: HostConstants, dtype: str, result: Dict[str, Any]) -> Dict[str, Any]:
    """The peaks of one network as measured, beside what these constants and the rules for scratch say of them.

    The process has run a tiny network before, whose remains are in the way: some per cent of the process's peak, and up
    to a fifth of so small an allocator's (bfloat16, on the development host). What is further off is the rules' fault.
    """
    found, engine = result["check"], result["engine"]
    job = Job(UNetConfig(**found["unet"]), tuple(found["shape"]), engine=engine, threads=constants.threads)
    said = estimate(job, constants)
    return {
        "job": describe(job),
        "allocator_peak_bytes": {
            "measured": found["allocator_peak_bytes"],
            "predicted": said.allocator_peak_bytes,
        },
        "process_peak_bytes": {
            "measured": found["process_peak_bytes"],
            "predicted": said.process_peak_bytes,
        },
    }


def table(constants: HostConstants) -> Table:
    """The main figures: baseline, and the rates that the costs come to."""
    title = f"{constants.name}, {constants.threads} threads"
    shown = Table(title=title, title_justify="left")
    for column in (
        "engine",
        "dtype",
        "baseline",
        "forward",
        "filter gradient",
        "input gradient",
        "norm",
        "between ops",
    ):
        shown.add_column(column, justify="left" if column in ("engine", "dtype") else "right")
    for engine, by_dtype in constants.costs.items():
        for dtype, groups in by_dtype.items():
            rates = (_rate(groups, group) for group in ("conv", "conv_filter_gradient", "conv_input_gradient"))
            passing = groups.get("norm", {}).get("traffic")
            shown.add_row(
                engine,
                dtype,
                f"{constants.baseline_bytes[engine] / 2**20:.0f} MiB",
                *(f"{rate / 1e9:.0f} GFLOP/s" if rate else "-" for rate in rates),
                f"{1e-9 / passing:.0f} GB/s" if passing else "-",
                f"{groups['every_op']['seconds'] * 1e6:.0f} us",
            )
    return shown


# --- Private helpers ---


def _networks(dtype: str) -> List[Dict[str, Any]]:
    """A tiny network for the runtime's memory, then five for the costs, which differ in width and in what they have.

    The two dtypes' tiny networks differ in depth, which tells apart what grows with it. Most have half the voxels: that
    saves time, and their maps still are beyond any cache. The narrow one comes first, as it has every group of
    operations; where time is short the last are left out.
    """
    x, y, z = SHAPE
    tiny = UNetConfig(filters=8, depth=3 if dtype == "float32" else 5, dtype=dtype)
    narrow = UNetConfig(filters=8, dtype=dtype)
    middle = UNetConfig(filters=16, channels=1, dtype=dtype)
    wide = UNetConfig(filters=32, dtype=dtype)
    bare = UNetConfig(filters=16, channels=1, outputs=1, norm="none", dtype=dtype)
    uneven = UNetConfig(filters=24, depth=3, dtype=dtype)
    half = (x // 2, y, z)
    return [
        {"unet": dataclasses.asdict(unet), "shape": shape, "steps": steps}
        for unet, shape, steps in (
            (tiny, (32, 32, 32), 0),
            (narrow, SHAPE, 2),
            (middle, SHAPE, 2),
            (wide, half, 2),
            (bare, half, 2),
            (uneven, half, 2),
        )
    ]


def _measure(engine: str, dtype: str, host: Host, budget_s: float) -> Dict[str, Any]:
    size = cache_bytes() or shipped_constants(host.isa).cache_bytes
    request = {"engine": engine, "cache_bytes": size, "networks": _networks(dtype), "budget_s": budget_s}
    command = [sys.executable, "-m", "cpu3d.bench.op_times", json.dumps(request)]
    return last_json_line(command, f"calibration on {engine} in {dtype}")


def _rate(groups: Dict[str, Dict[str, float]], group: str) -> float:
    """Operations a second of a convolution from 32 to 32 channels: two vectors each."""
    costs = groups.get(group, {})
    per_work = costs.get("work", 0) + costs.get("work/out", 0) / 2 + costs.get("work/out^2", 0) / 4
    per_work += costs.get("work/in", 0) / 2 + costs.get("work/out^2/in", 0) / 8
    return 1 / per_work if per_work else 0.0


def _busy_with_others(results: List[Tuple[str, Dict[str, Any]]]) -> float:
    """CPUs that other processes kept busy during the worst of the measurements."""
    return max((network["others"] or 0.0 for _, result in results for network in result["networks"]), default=0.0)


def _fill_up(by_dtype: Dict[str, Any], engine: str, shipped: HostConstants) -> Iterator[str]:
    """Put the shipped costs in for groups without a time, as where a TensorFlow calls them otherwise; names them."""
    for dtype, costs in by_dtype.items():
        for group in GROUPS:
            if not costs.get(group):
                costs[group] = dict(shipped.speeds(engine, dtype)[group])
                yield f"{group} ({engine}, {dtype})"


def _is_undisturbed(path: Path, constants: HostConstants) -> bool:
    """Whether a calibration is there already, of this host, measured when quiet, that knows as much as `constants`."""
    try:
        there = load_constants(path)
        busy = read_json(path).get("cpus_busy_with_others", 0.0)
    except (OSError, ValueError):
        return False
    knows = all(set(dtypes) <= set(there.costs.get(engine, ())) for engine, dtypes in constants.costs.items())
    return there.cpu == constants.cpu and knows and busy <= QUIET


def _told(line: Dict[str, Any]) -> str:
    """One line of the check, in words."""
    parts = []
    for name, what in (("allocator_peak_bytes", "allocator peak"), ("process_peak_bytes", "process peak")):
        measured, predicted = line[name]["measured"], line[name]["predicted"]
        if measured:
            error = f"{predicted / measured - 1:+.1%}"
            parts.append(f"{what} {format_bytes(measured)}, predicted {format_bytes(predicted)} ({error})")
    return f"check, {line['job']}: {'; '.join(parts)}"
