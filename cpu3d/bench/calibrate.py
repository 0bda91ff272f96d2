"""Measure this host's constants for the estimator: what the runtime holds in memory, how fast each kind of work goes.

    ./run.sh calibrate
    ./run.sh calibrate --all --out other.json

Runs a few small training steps under TensorFlow's profiler, in a fresh process for each dtype, within a minute on two
cores. Estimates and training on this host then use the file by themselves. Wants a quiet machine.
"""

import argparse
import dataclasses
import datetime
import json
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, Tuple

from rich.console import Console
from rich.table import Table

from cpu3d.atomic import writable_folder, write_json
from cpu3d.bench.fit_costs import fit_costs, straight_line
from cpu3d.bench.step import last_json_line
from cpu3d.host.apply import ENGINES, installed
from cpu3d.progress import bar
from memory_estimator.calibration import OWN, HostConstants, shipped_constants, to_json
from memory_estimator.host import Host, cache_bytes, read_host
from models.config import UNetConfig

SHAPE = (96, 96, 96)
"""The largest that constants are fitted to: what is larger is for checking them."""

QUIET = 0.1
"""CPUs that other processes may keep busy before the times are called disturbed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    engines = [engine for engine in ENGINES if engine != "stock-no-onednn"]
    parser.add_argument("--engine", choices=engines, default="auto", help="default: auto, what `train` would use")
    parser.add_argument("--all", action="store_true", help="every engine that is installed; twice as long")
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
        for engine, dtype in runs:
            results.append((dtype, _measure(engine, dtype, host)))
            advance()
    constants = put_together(results, host, args.name)
    seconds = time.perf_counter() - begin
    last = results[-1][1]
    about = {"seconds": round(seconds, 1), "versions": last["versions"], "environment": last["environment"]}
    disturbed = max((network["others"] or 0.0 for _, result in results for network in result["networks"]), default=0.0)
    write_json(args.out, {**to_json(constants), **about, "cpus_busy_with_others": round(disturbed, 2)})
    console = Console()
    console.print(table(constants))
    console.print(f"{args.out} written after {seconds:.0f} s")
    if disturbed > QUIET:
        console.print(f"other processes kept {disturbed:.1f} CPUs busy: times are too long, calibrate again when quiet")
    return 0


def put_together(results: List[Tuple[str, Dict[str, Any]]], host: Host, name: str = "") -> HostConstants:
    """Constants from (dtype, result of `cpu3d.bench.op_times.measure`) of each process, all of one host."""
    costs: Dict[str, Dict[str, Any]] = {}
    runtime: Dict[str, List[Dict[str, int]]] = {}
    for dtype, result in results:
        costs.setdefault(result["engine"], {})[dtype] = fit_costs(result["networks"])
        runtime.setdefault(result["engine"], []).append(result["runtime"])
    lines = {engine: straight_line(points) for engine, points in runtime.items()}
    shipped = shipped_constants(host.isa)
    today = datetime.date.today().isoformat()
    how = f"measured: calibrate, {today}"
    return HostConstants(
        name=name or host.cpu_model,
        cpu=host.cpu_model,
        origin="measured",
        origins={
            "costs": f"{how}, operations of small training steps under TensorFlow's profiler",
            "baseline_bytes": f"{how}, resident memory less the step's tensors",
            "op_bytes": f"{how}, the same of a shallow and a deep network",
            "cache_bytes": "measured: /sys/devices/system/cpu",
            "saturating_threads": shipped.origins["saturating_threads"],
        },
        record=f"calibrate {today}, {', '.join(result['engine_name'] for _, result in results[:: len(results)])}",
        date=today,
        threads=results[0][1]["threads"],
        cache_bytes=cache_bytes() or shipped.cache_bytes,
        saturating_threads=shipped.saturating_threads,
        baseline_bytes={engine: line["bytes"] for engine, line in lines.items()},
        op_bytes={engine: line["op_bytes"] for engine, line in lines.items()},
        costs=costs,
    )


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
    """A tiny network for the runtime's memory, then three widths, one of them with one channel, for the costs.

    The two dtypes' tiny networks differ in depth, which tells apart what grows with it. The widest has fewer voxels:
    that saves most of the time, and its maps still are far beyond any cache.
    """
    x, y, z = SHAPE
    tiny = UNetConfig(filters=8, depth=3 if dtype == "float32" else 5, dtype=dtype)
    narrow = UNetConfig(filters=8, dtype=dtype)
    middle = UNetConfig(filters=16, channels=1, dtype=dtype)
    wide = UNetConfig(filters=32, dtype=dtype)
    return [
        {"unet": dataclasses.asdict(unet), "shape": shape, "steps": steps}
        for unet, shape, steps in (
            (tiny, (32, 32, 32), 0),
            (narrow, SHAPE, 3),
            (middle, SHAPE, 3),
            (wide, (x // 2, y, z), 2),
        )
    ]


def _measure(engine: str, dtype: str, host: Host) -> Dict[str, Any]:
    size = cache_bytes() or shipped_constants(host.isa).cache_bytes
    request = {"engine": engine, "cache_bytes": size, "networks": _networks(dtype)}
    command = [sys.executable, "-m", "cpu3d.bench.op_times", json.dumps(request)]
    return last_json_line(command, f"calibration on {engine} in {dtype}")


def _rate(groups: Dict[str, Dict[str, float]], group: str) -> float:
    """Operations a second of a convolution from 32 to 32 channels: two vectors each."""
    costs = groups.get(group, {})
    per_work = costs.get("work", 0) + costs.get("work/out", 0) / 2 + costs.get("work/out^2", 0) / 4
    per_work += costs.get("work/in", 0) / 2 + costs.get("work/out^2/in", 0) / 8
    return 1 / per_work if per_work else 0.0
