"""Efficiency on paper: how well native operations of a training step fill many cores, measured on
few.

    python -m records.kernels --threads 28 56 --shape 240 240 160

It is the CPU time of one thread over T times the time with T threads, each on a core of its own.
The latter is the CPU time of what the caller alone does and of the busiest thread of each loop of
an operation; the threads compute one after the other. What cores do to each other by sharing
memory and caches is left out, and so is waking threads.
"""

import math
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from cpu3d.bench.harness import Result
from cpu3d.errors import InputError
from cpu3d.util.records import versions
from memory_estimator.common.table import Bold, Table
from memory_estimator.common.units import by
from memory_estimator.host import read_host
from memory_estimator.job import Job
from memory_estimator.step.scratch import scratch_bytes
from memory_estimator.step.timeline import NativeOperation
from memory_estimator.step.training_step import training_step
from models.config import UNetConfig
from models.native.calls import load
from models.native.library import native_operations
from records.calls import operation

INPUTS = "channels"
OUTPUTS = "outputs"
SAME = False  # the operation's grid, the coarser of two
FINER = True


class Maps(NamedTuple):
    """The maps of a kind, each with the field of its channels and its grid."""

    others: Sequence[Tuple[str, bool]] = ()
    made: Optional[Tuple[str, bool]] = None
    over_other: Optional[int] = None  # the other map that is written over in place of a new one
    is_finer: bool = SAME  # the first map
    first: str = INPUTS  # channels of it


MAPS = {
    "convolve": Maps(made=(OUTPUTS, SAME)),
    "input_gradient": Maps([(OUTPUTS, SAME), (INPUTS, SAME)], made=(OUTPUTS, SAME)),
    "filter_gradient": Maps([(OUTPUTS, SAME), (OUTPUTS, SAME)]),
    "max_pool": Maps(made=(INPUTS, SAME), is_finer=True),
    "max_pool_gradient": Maps([(INPUTS, SAME), (INPUTS, FINER)], over_other=1, is_finer=True),
    "residual_sum": Maps([(INPUTS, SAME)], over_other=0),
    "residual_gradient": Maps([(INPUTS, SAME), (INPUTS, SAME)], over_other=1),
    "to_raw": Maps([(INPUTS, SAME)], made=(INPUTS, SAME)),
    "project": Maps(made=(OUTPUTS, SAME)),
    "project_gradient": Maps([(OUTPUTS, SAME)], made=(INPUTS, SAME)),
    "project_sums": Maps([(OUTPUTS, SAME)]),
    "project_to_raw": Maps([(OUTPUTS, SAME)], made=(INPUTS, SAME)),
    "up_convolve": Maps(made=(OUTPUTS, FINER)),
    "up_input_gradient": Maps([(OUTPUTS, FINER)], made=(INPUTS, SAME)),
    "up_filter_gradient": Maps([(OUTPUTS, FINER)]),
    "loss_sums": Maps(),
    "loss_slope": Maps(made=(INPUTS, SAME)),
    "orthogonal": Maps(made=(OUTPUTS, SAME), first=OUTPUTS),
}
"""By kind, as native.h has them; the target of a loss comes on top."""

CONVOLUTIONS = ("convolve", "input_gradient", "filter_gradient")  # 3x3x3
WITH_SUMS = ("convolve", "input_gradient", "max_pool_gradient", "residual_gradient")
WITH_SUMS += ("project_gradient", "project_sums", "up_input_gradient")
WITH_FILTERS = ("convolve", "input_gradient", "project", "project_gradient", "project_sums")
WITH_FILTERS += ("project_to_raw", "up_convolve", "up_input_gradient")
WITH_FILTER_GRADIENT = ("filter_gradient", "project_gradient", "project_sums", "up_filter_gradient")


def efficiency_tables(record: Result) -> List[Table]:
    """A table of efficiencies, by grid and kind, and one of the threads' memory."""
    counts = record["paper_threads"]
    rows = record["rows"]
    of_counts = [f"T = {count}" for count in counts]
    heads = ("grid", "operation", "calls", "ms, 1 thread", *of_counts)
    lines = []
    update = [row for row in rows if row["kind"] == "orthogonal"]
    of_maps = [row for row in rows if row["kind"] != "orthogonal"]
    for grid in sorted({tuple(row["grid"]) for row in of_maps}, reverse=True):
        of_grid = [row for row in of_maps if tuple(row["grid"]) == grid]
        for kind in MAPS:
            of_kind = [row for row in of_grid if row["kind"] == kind]
            if of_kind:
                lines.append((by(grid), kind, *_figures(of_kind, counts)))
        lines.append([Bold(cell) for cell in (by(grid), "all", *_figures(of_grid, counts))])
    if update:
        lines.append(("kernels", "orthogonal", *_figures(update, counts)))
    lines.append([Bold(cell) for cell in ("all", "all", *_figures(rows, counts))])
    title = f"Efficiency on paper, {record['dtype']} by {record['instructions']}, "
    title += f"{record['host']['cpu']}: time of one thread over T times that of T threads"
    sizes = record["scratch_bytes"]
    memory = [(threads, f"{size / 2**20:.0f}") for threads, size in sizes.items()]
    of_memory = Table(
        ("threads", "MiB besides the maps"), memory, title="Memory of native operations"
    )
    return [Table(heads, lines, title=title, names=2), of_memory]


def efficiency(rows: Sequence[Result], threads: int) -> float:
    """Of operations together, each as often as a step has it."""
    alone_s = sum(row["calls"] * row["seconds"]["1"] for row in rows)
    return alone_s / threads / sum(row["calls"] * row["seconds"][str(threads)] for row in rows)


def _figures(rows: Sequence[Result], counts: Sequence[int]) -> List[str]:
    calls = sum(row["calls"] for row in rows)
    single_ms = 1e3 * sum(row["calls"] * row["seconds"]["1"] for row in rows)
    return [str(calls), f"{single_ms:.1f}", *(f"{efficiency(rows, count):.2f}" for count in counts)]


# --- In the measuring process ---


def measure(request: Dict[str, Any]) -> Result:
    """Seconds on paper of each different native operation of a step; raises InputError if there are
    none that load here."""
    own = native_operations()
    host = read_host()
    dtype = request["dtype"]
    if own.kernels is None:
        rule = f"native operations must load here, got none: {own.why}"
        raise InputError(f"{rule}; install a C compiler and run python -m models.native.build")
    instructions = own.of(dtype)
    counts = sorted({1, *request["threads"]})
    unet = UNetConfig(filters=request["filters"], dtype=dtype)
    program = training_step(Job(unet, tuple(request["shape"])))
    calls: Dict[Tuple[NativeOperation, bool], int] = {}
    for op in program.ops:
        if op.native:
            key = op.native, op.is_in_place
            calls[key] = calls.get(key, 0) + 1
    library = load(own.kernels)
    rows = []
    for (op, in_place), number in calls.items():
        seconds = seconds_on_paper(library, op, in_place, counts, request["rounds"])
        about = {"kind": op.kind, "grid": op.grid, "channels": op.channels, "outputs": op.outputs}
        rows.append({**about, "in_place": in_place, "calls": number, "seconds": seconds})
    l2_bytes = host.l2_bytes or 2**20
    sizes = {str(n): scratch_bytes(program.ops, n, instructions, l2_bytes) for n in counts}
    about = {"shape": request["shape"], "dtype": dtype, "instructions": instructions}
    facts = {"host": host.summary(), "versions": versions()}
    paper_threads = [count for count in counts if count > 1]
    return {**about, "paper_threads": paper_threads, "rows": rows, "scratch_bytes": sizes, **facts}


def seconds_on_paper(
    library: Any,
    op: NativeOperation,
    in_place: bool,
    counts: Sequence[int],
    rounds: int,
) -> Dict[str, float]:
    """Number of threads -> seconds, the fewest of `rounds` runs of each in turn."""
    call, _arrays = call_of(op, in_place)
    best = dict.fromkeys(map(str, counts), math.inf)
    for number in range(rounds + 1):
        is_first = number == 0  # touches the memory
        for count in counts[:1] if is_first else counts:
            call.threads = count
            library.native_time_on_paper(1)
            if library.native_run(None, call):
                rule = "memory must suffice for an operation, got too little"
                raise InputError(f"{rule}; end other programs")
            seconds = library.native_time_on_paper(0)
            if not is_first:
                best[str(count)] = min(best[str(count)], seconds)
    return best


def call_of(op: NativeOperation, in_place: bool) -> Tuple[Any, List[np.ndarray]]:
    """An operation on noise, and the arrays that it points to, which must live as long."""
    about = MAPS[op.kind]
    is_loss = op.kind.startswith("loss_")
    dtype = "float32" if op.value_bytes == 4 else "bfloat16"

    def map_of(channels: str, is_finer: bool) -> np.ndarray:
        grid = op.grid
        if is_finer:
            grid = [stride * side for stride, side in zip(op.strides, op.grid)]
        return _noise(dtype, op.batch, *grid, getattr(op, channels))

    values = map_of(about.first, about.is_finer)
    others = [map_of(*each) for each in about.others]
    if is_loss:
        others = [np.resize(np.array([0, 1, 1], np.uint8), values.shape)]
    arrays: Dict[str, np.ndarray] = {}
    if op.kind != "loss_sums":
        factors = 3 if is_loss else 6
        arrays["coefficients"] = np.abs(_noise("float32", op.batch, factors, op.channels))
        arrays["other_coefficients"] = np.abs(_noise("float32", op.batch, 6, max(op.outputs, 1)))
    if about.over_other is not None:
        arrays["map"] = others[about.over_other]
    elif in_place:
        arrays["map"] = values
    elif about.made:
        arrays["map"] = map_of(*about.made)
    if op.kind in CONVOLUTIONS:
        taps = 27
    elif op.kind.startswith("up_"):
        taps = math.prod(op.strides)
    else:
        taps = 1
    filters = _noise("float32", taps * op.channels * max(op.outputs, 1)) / 10
    if op.kind in WITH_FILTERS:
        arrays["filters"] = filters
    if op.kind in WITH_FILTER_GRADIENT:
        arrays["filter_gradient"] = np.empty_like(filters)
    if op.kind.startswith("project"):
        name = "bias" if op.kind == "project" else "bias_gradient"
        arrays[name] = np.zeros(op.outputs, np.float32)
    if op.kind in WITH_SUMS or op.kind == "loss_sums":
        arrays["sums_to"] = np.empty((op.batch, 4, max(op.channels, op.outputs)), np.float32)
    shape = (op.batch, *op.grid)
    maps = ([values], op.outputs, others)
    call = operation(op.kind, dtype, shape, 1, *maps, op.strides, **arrays)
    return call, [values, *others, *arrays.values()]


def _noise(dtype: str, *shape: int) -> np.ndarray:
    """Values of a normal distribution, some thousands of them over and over; bfloat16 as bits."""
    values = np.random.default_rng(0).standard_normal(9973).astype(np.float32)
    if dtype == "bfloat16":
        values = (values.view(np.uint32) >> 16).astype(np.uint16)
    return np.resize(values, shape)
