"""Time native operations (models/native), the 3x3x3 convolutions, and the engine's in turn.

    python -m records.kernels
    python -m records.kernels --dtype bfloat16 --record records/kernels.jsonl
    python -m records.kernels --threads 2 8 28 56      # how well so many cores are filled
    python -m records.kernels --overlap                # AMX: products, vectors, and both at once
    python -m records.tables --records records --roofline docs/pictures/roofline.png

GFLOP/s count the multiplications and additions of a plain convolution, however an operation
computes it. All read plain maps; the own forward convolution also computes mean and variance of its
output. Bytes are those of the maps that are read and written, once each. The host's limits are
measured too: products of values that stay in the cache L1, which an operation with a transform may
exceed, and a copy of memory by all threads."""

import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import numpy as np

from cpu3d.bench.harness import Output, Result, host_of, in_fresh_process, seconds_of, set_up_for
from cpu3d.errors import InputError
from cpu3d.report.pictures import Line, chart
from memory_estimator.common.schema import option
from memory_estimator.common.table import PALETTE, Table
from memory_estimator.common.units import by
from memory_estimator.host import read_host
from models.config import DTYPES
from models.engine import check_layers
from models.native.library import native_operations
from models.native.shared import MOST_THREADS
from records import cores, overlap
from records.calls import products_per_s
from records.command import main

CASES = ((128, 16, 16), (128, 32, 16), (128, 16, 32), (64, 32, 32), (128, 4, 16))
"""Edge of a cube, channels in and out: the finest levels of a U-Net with 16 filters."""

Pair = Tuple[Callable[[], Any], Callable[[], Any]]  # the engine's operation and the own one

COPIED_BYTES = 2**28  # a thread; the C library writes as much past the caches


@dataclass(frozen=True)
class Options:
    """The options of `records.kernels`."""

    dtype: Optional[str] = option(
        None, "compute dtype (default: all that the host computes fast)", choices=DTYPES
    )
    threads: Optional[Tuple[int, ...]] = option(
        None,
        "threads (default: those of a training step); several, or more than this host has cores: "
        "efficiency on paper of all native operations of a step",
        "N",
        at_least=1,
        at_most=MOST_THREADS,
    )
    shape: Tuple[int, int, int] = option(
        (240, 240, 160), "voxels of that step", ("X", "Y", "Z"), at_least=16
    )
    filters: int = option(16, "feature maps of its first convolution", "F", at_least=1)
    rounds: int = option(5, "runs of each operation; the fastest counts", at_least=1)
    overlap: bool = option(
        False,
        "with AMX: native operations of a step beside their products of tiles alone, and the rest "
        "alone; compiles the library twice",
    )


OPTIONS = (Options, Output)


def run(options: Options, output: Output) -> int:
    host = read_host()
    request = dict(vars(options))
    threads = options.threads or ()
    if options.overlap:
        _check_overlap(options, host.usable_cores)
        request["threads"] = threads[0] if threads else host.usable_cores
        result = in_fresh_process(overlap.measure, request)
        output.publish("overlap", result, overlap.overlap_table(result))
        return 0
    if len(threads) > 1 or max(threads, default=0) > host.usable_cores:
        request["dtype"] = options.dtype or host.best_dtype
        result = in_fresh_process(cores.measure, request)
        output.publish("cores", result, *cores.efficiency_tables(result))
        return 0
    request["threads"] = threads[0] if threads else None
    if options.dtype:
        request["dtypes"] = [options.dtype]
    elif host.fast_bfloat16:
        request["dtypes"] = tuple(DTYPES)
    else:
        request["dtypes"] = ("float32",)
    result = in_fresh_process(measure, request)
    output.publish("kernels", result, kernels_table(result))
    return 0


def _check_overlap(options: Options, cores: int) -> None:
    """Raise InputError for options that `--overlap` has no use for on a host of so many cores."""
    if options.dtype not in (None, overlap.DTYPE):
        rule = f"--dtype must be {overlap.DTYPE} with --overlap"
        raise InputError(f"{rule}, got {options.dtype}; leave it out")
    threads = options.threads or ()
    if len(threads) > 1 or max(threads, default=0) > cores:
        rule = f"--threads must be one number of at most {cores}, the cores here, with --overlap"
        raise InputError(f"{rule}, got {by(threads, ' ')}; give one, or leave it out")


def kernels_table(record: Result) -> Table:
    """GFLOP/s, a row for each dtype, grid, channels and operation."""
    rows = []
    for row in record["rows"]:
        engine = row["engine_gflops"]
        own = row["own_gflops"]
        name = f"{by((row['edge'],) * 3)}, {row['inputs']} to {row['outputs']}"
        figures = [f"{engine:.0f}", f"{own:.0f}", f"{own / engine:.2f}"]
        figures.append(f"{own / _intensity(row):.1f}")
        rows.append((row["dtype"], name, row["operation"], *figures))
    threads = record["threads"].get("TF_NUM_INTRAOP_THREADS", "all")
    limits = record["limits"]
    rates = limits["products_gflops"].items()
    products = ", ".join(f"{dtype} {rate:.0f} GFLOP/s" for dtype, rate in rates)
    title = f"GFLOP/s on {host_of(record)}, {threads} threads, {record['engine_name']}"
    title += f"; products alone: {products}; a copy: {limits['copy_gbytes']:.1f} GB/s"
    heads = ("dtype", "grid, channels", "operation", "engine", "own", "own / engine", "own, GB/s")
    return Table(heads, rows, title=title, names=3)


def draw_roofline(record: Result) -> bytes:
    """GFLOP/s of every operation over its FLOPs a byte, own and the engine's, below the host's
    limits, as PNG."""
    lines = []
    limits = record["limits"]
    for (dtype, products), colour in zip(limits["products_gflops"].items(), PALETTE):
        rows = [row for row in record["rows"] if row["dtype"] == dtype]
        x = [_intensity(row) for row in rows]
        corner = products / limits["copy_gbytes"]  # where both limits are equal
        limit_x = (corner / 4, corner, 2 * max(x))
        limit_y = (products / 4, products, products)
        lines.append(Line("", limit_x, limit_y, colour, marks="-"))
        for name, marks in (("own", "o"), ("engine", "x")):
            y = [row[f"{name}_gflops"] for row in rows]
            lines.append(Line(f"{dtype}, {name}", x, y, colour, marks=marks))
    title = f"3x3x3 convolutions below the limits of {host_of(record)}"
    axes = {"x_label": "FLOPs a byte of the maps", "y_label": "GFLOP/s"}
    return chart(lines, title=title, log=True, **axes)


def _intensity(row: Result) -> float:
    """FLOPs a byte of the maps."""
    flops = 2 * 27 * row["inputs"] * row["outputs"]  # a voxel
    values = row["inputs"] + row["outputs"]
    return flops / (values * DTYPES[row["dtype"]].bytes)


# --- In the measuring process ---


def measure(request: Dict[str, Any]) -> Result:
    """Time every operation in `request["dtypes"]`; raises InputError if native operations cannot be
    loaded."""
    tf, facts = set_up_for(request)
    from models.native.operations import available

    if not available():
        rule = f"native operations must load here, got none: {native_operations().why}"
        raise InputError(f"{rule}; install a C compiler and run python -m models.native.build")
    for dtype in request["dtypes"]:
        check_layers(dtype)
    rows: List[Result] = []
    for dtype, (edge, inputs, outputs) in itertools.product(request["dtypes"], CASES):
        rows += timed_operations(tf, dtype, edge, inputs, outputs, request["rounds"])
    return {"rows": rows, "limits": limits(request), **facts}


def limits(request: Dict[str, Any]) -> Result:
    """The host's limits: GFLOP/s of products from the cache L1 in each dtype, GB/s that a copy
    reads and writes."""
    threads = int(os.environ["TF_NUM_INTRAOP_THREADS"])
    products = {}
    for dtype in request["dtypes"]:
        products[dtype] = round(products_per_s(dtype, threads) / 1e9, 1)
    targets = [np.full(COPIED_BYTES, 0, np.uint8) for _ in range(threads)]
    sources = [np.full(COPIED_BYTES, 1, np.uint8) for _ in range(threads)]
    with ThreadPoolExecutor(threads) as pool:

        def copy() -> None:
            list(pool.map(np.copyto, targets, sources))

        seconds = min(seconds_of(copy) for _ in range(request["rounds"]))
    copied_bytes = 2 * COPIED_BYTES * threads  # read and written
    return {
        "products_gflops": products,
        "copy_gbytes": round(copied_bytes / seconds / 1e9, 1),
    }


def timed_operations(
    tf: Any, dtype: str, edge: int, inputs: int, outputs: int, rounds: int
) -> Iterator[Result]:
    """A row for each operation on a cube: GFLOP/s of the engine's and the own one, the fastest of
    `rounds` in turn."""
    gflop = 2 * 27 * inputs * outputs * edge**3 / 1e9
    for operation, pair in _operations(tf, dtype, (1, edge, edge, edge), inputs, outputs).items():
        functions = [tf.function(work, autograph=False, jit_compile=False) for work in pair]
        for function in functions:
            function()  # traces, and touches its memory
        engine_s = []
        own_s = []
        for _ in range(rounds):
            engine_s.append(seconds_of(functions[0]))
            own_s.append(seconds_of(functions[1]))
        yield {
            "dtype": dtype,
            "edge": edge,
            "inputs": inputs,
            "outputs": outputs,
            "operation": operation,
            "engine_gflops": round(gflop / min(engine_s), 1),
            "own_gflops": round(gflop / min(own_s), 1),
        }


def _operations(
    tf: Any, dtype: str, grid: Tuple[int, ...], inputs: int, outputs: int
) -> Dict[str, Pair]:
    """Name -> the engine's and the native operation, without arguments."""
    from models.native.operations import Gradient, Source, convolve, filter_gradient, input_gradient

    same = {"strides": [1] * 5, "padding": "SAME"}
    values = tf.cast(tf.random.normal((*grid, inputs)), dtype)
    out = tf.cast(tf.random.normal((*grid, outputs)), dtype)
    filters = tf.random.normal((3, 3, 3, inputs, outputs))
    cast = tf.cast(filters, dtype)

    def engine_forward():
        return tf.nn.conv3d(values, cast, **same)

    def engine_input_gradient():
        return tf.raw_ops.Conv3DBackpropInputV2(
            input_sizes=values.shape, filter=cast, out_backprop=out, **same
        )

    def engine_filter_gradient():
        return tf.raw_ops.Conv3DBackpropFilterV2(
            input=values, filter_sizes=filters.shape, out_backprop=out, **same
        )

    return {
        "forward": (engine_forward, lambda: convolve([Source(values)], filters)),
        "input gradient": (engine_input_gradient, lambda: input_gradient(Gradient(out), filters)),
        "filter gradient": (
            engine_filter_gradient,
            lambda: filter_gradient([Source(values)], Gradient(out)),
        ),
    }


if __name__ == "__main__":
    main("records.kernels")
