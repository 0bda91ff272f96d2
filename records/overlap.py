"""How far work in vectors is done beside products of tiles: the time of the operations that AMX
computes, beside that of their products alone and of their vectors alone.

    python -m records.kernels --overlap
    python -m records.kernels --overlap --threads 1 --record records/overlap.jsonl

For the two parts the library is compiled twice more, into a temporary folder: once with nothing
formed and finished, once without tile instructions (models/native/amx.h). All three run in turn.
Were the parts done one after the other, the whole would take as long as both; if all of the shorter
one went on beside the longer, as long as the longer.
"""

import functools
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Dict, List, Tuple

from cpu3d.bench.harness import Result, seconds_of
from cpu3d.errors import InputError
from cpu3d.util.records import versions
from memory_estimator.common.table import Bold, Table
from memory_estimator.common.units import by
from memory_estimator.host import read_host
from memory_estimator.job import Job
from memory_estimator.step.timeline import NativeOperation
from memory_estimator.step.training_step import training_step
from models.config import UNetConfig
from models.native.build import build
from models.native.calls import load
from models.native.instruction_sets import DIRECT_PRODUCTS
from models.native.library import native_operations
from records.cores import call_of

DTYPE = "bfloat16"
IN_TILES = ("convolve", "input_gradient", "filter_gradient", "project")
IN_TILES += ("up_convolve", "up_input_gradient", "up_filter_gradient")
WHOLE = "whole"
PRODUCTS = "products"
VECTORS = "vectors"
LEFT_OUT = {PRODUCTS: "VECTORS_LEFT_OUT", VECTORS: "TILES_LEFT_OUT"}
"""A part -> the switch of amx.h that leaves the other one out."""


def overlap_table(record: Result) -> Table:
    """Milliseconds of a call, a row for each different operation of a step, and of all calls."""
    heads = (
        "grid",
        "operation",
        "channels",
        "calls",
        "ms",
        "products",
        "vectors",
        "both",
        "beside",
    )
    lines: List[List[Any]] = []
    for row in record["rows"]:
        channels = f"{row['channels']}, {row['outputs']}"
        about = [by(row["grid"]), row["kind"], channels, str(row["calls"])]
        lines.append([*about, *_figures(row["seconds"])])
    total = dict.fromkeys((WHOLE, *LEFT_OUT), 0.0)
    for row in record["rows"]:
        for part, seconds in row["seconds"].items():
            total[part] += row["calls"] * seconds
    calls = sum(row["calls"] for row in record["rows"])
    about = ["all", "all", "", str(calls)]
    lines.append([Bold(cell) for cell in [*about, *_figures(total)]])
    title = f"Products of tiles and vectors beside them, {record['instructions']}, "
    title += f"{record['threads']} threads of {record['host']['cpu']}"
    return Table(heads, lines, title=title, names=3)


def beside(seconds: Dict[str, float]) -> float:
    """The share of the shorter part that went on beside the longer one: 1 all of it, 0 none."""
    both_s = seconds[PRODUCTS] + seconds[VECTORS]
    return (both_s - seconds[WHOLE]) / min(seconds[PRODUCTS], seconds[VECTORS])


def _figures(seconds: Dict[str, float]) -> List[str]:
    both_s = seconds[PRODUCTS] + seconds[VECTORS]
    every = (seconds[WHOLE], seconds[PRODUCTS], seconds[VECTORS], both_s)
    return [*(f"{1e3 * each:.2f}" for each in every), f"{beside(seconds):.2f}"]


# --- In the measuring process ---


def measure(request: Dict[str, Any]) -> Result:
    """Seconds of each different operation of a step that is computed in tiles; raises InputError
    where none is, and where the parts cannot be built."""
    own = native_operations()
    instructions = own.of(DTYPE)
    if own.kernels is None or instructions not in DIRECT_PRODUCTS:
        rule = "native operations must compute by amx here"
        raise InputError(f"{rule}, got {instructions or own.why}; run it on a CPU with AMX")
    threads = request["threads"]
    calls: Dict[Tuple[NativeOperation, bool], int] = {}
    unet = UNetConfig(filters=request["filters"], dtype=DTYPE)
    for step_op in training_step(Job(unet, tuple(request["shape"]))).ops:
        if step_op.native and step_op.native.kind in IN_TILES:
            key = step_op.native, step_op.is_in_place
            calls[key] = calls.get(key, 0) + 1
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        libraries = {WHOLE: load(own.kernels)}
        for part, switch in LEFT_OUT.items():
            libraries[part] = load(_built(switch, Path(folder) / part))
        for (op, in_place), number in calls.items():
            about = {"kind": op.kind, "grid": op.grid, "channels": op.channels}
            about.update(outputs=op.outputs, in_place=in_place, calls=number)
            seconds = _seconds(libraries, op, in_place, threads, request["rounds"])
            rows.append({**about, "seconds": seconds})
    facts = {"host": read_host().summary(), "versions": versions()}
    about = {"shape": request["shape"], "instructions": instructions, "threads": threads}
    return {**about, "rows": rows, **facts}


def _built(switch: str, folder: Path) -> Path:
    try:
        return build([f"-D{switch}"], folder).kernels
    except (OSError, subprocess.CalledProcessError) as error:
        rule = "native operations must be compiled here for their parts"
        raise InputError(f"{rule}, got {error}; install a C compiler") from None


def _seconds(
    libraries: Dict[str, Any], op: NativeOperation, in_place: bool, threads: int, rounds: int
) -> Dict[str, float]:
    """The fewest seconds of each library, in turn."""
    call, _arrays = call_of(op, in_place)
    call.threads = threads

    def run(library: Any) -> None:
        if library.native_run(None, call):
            rule = "memory must suffice for an operation, got too little"
            raise InputError(f"{rule}; end other programs")

    for library in libraries.values():
        run(library)  # touches the memory
    every: Dict[str, List[float]] = {part: [] for part in libraries}
    for _ in range(rounds):
        for part, library in libraries.items():
            every[part].append(seconds_of(functools.partial(run, library)))
    return {part: min(seconds) for part, seconds in every.items()}
