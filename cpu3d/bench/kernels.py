"""Time our own convolutions (models/native) and the engine's in turn, operation by operation.

    ./run.sh bench kernels
    ./run.sh bench kernels --dtype bfloat16 --record records/kernels.jsonl
    ./run.sh bench tables --records records --roofline docs/pictures/roofline.png

GFLOP/s count the multiplications and additions of a plain convolution, however an operation computes it. All read plain
maps; our forward convolution also computes mean and variance of its output. Bytes are those of the maps that are read
and written, once each. The host's limits are measured too: products of values that stay in the cache L1, which a
transform may exceed, and a copy of memory by all threads.
"""

import itertools
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterator, Optional, Tuple

import numpy as np

from cpu3d.bench.harness import Output, Result, host_of, in_fresh_process
from cpu3d.errors import InputError
from cpu3d.host.apply import engine_name, in_force, set_up
from cpu3d.util.records import by, versions
from memory_estimator.common.schema import option
from memory_estimator.common.table import PALETTE, Table, new_figure, plain, png
from memory_estimator.host import read_host
from memory_estimator.job import DTYPE_BYTES

CASES = ((128, 16, 16), (128, 32, 16), (128, 16, 32), (64, 32, 32), (128, 4, 16))
"""Edge of a cube, channels in and out: the finest levels of a U-Net with 16 filters."""

DTYPES = ("bfloat16", "float32")

COPIED_BYTES = 2**28  # a thread; the C library writes as much past the caches


@dataclass(frozen=True)
class Options:
    """What is timed."""

    dtype: Optional[str] = option(None, "default: all that the host computes fast", choices=DTYPES)
    threads: Optional[int] = option(None, "default: those of a training step", at_least=1)
    rounds: int = option(5, "runs of each operation, of which the fastest counts", at_least=1)


OPTIONS = (Options, Output)


def run(options: Options, output: Output) -> int:
    dtypes = [options.dtype] if options.dtype else list(DTYPES[not read_host().fast_bfloat16 :])
    request = {"dtypes": dtypes, "threads": options.threads, "rounds": options.rounds}
    result = in_fresh_process(measure, request)
    output.publish("kernels", result, kernels_table(result))
    return 0


def kernels_table(record: Result) -> Table:
    """GFLOP/s, a row for each dtype, grid, channels and operation."""
    rows = []
    for row in record["rows"]:
        engine, own = row["engine_gflops"], row["own_gflops"]
        name = f"{by((row['edge'],) * 3)}, {row['inputs']} to {row['outputs']}"
        figures = (f"{engine:.0f}", f"{own:.0f}", f"{own / engine:.2f}", f"{own / _intensity(row):.1f}")
        rows.append((row["dtype"], name, row["operation"], *figures))
    threads, limits = record["threads"].get("TF_NUM_INTRAOP_THREADS", "all"), record["limits"]
    products = ", ".join(f"{dtype} {rate:.0f} GFLOP/s" for dtype, rate in limits["products_gflops"].items())
    title = f"GFLOP/s on {host_of(record)}, {threads} threads, {record['engine_name']}"
    title += f"; products alone: {products}; a copy: {limits['copy_gbytes']:.1f} GB/s"
    heads = ("dtype", "grid, channels", "operation", "engine", "own", "own / engine", "own, GB/s")
    return Table(heads, rows, title=title, names=3)


def draw_roofline(record: Result) -> bytes:
    """PNG: GFLOP/s of every operation over its FLOPs a byte, own and the engine's, below the host's limits."""
    figure = new_figure(5.4, 3.4)
    axes = figure.add_subplot()
    for dtype, colour in zip(record["limits"]["products_gflops"], PALETTE):
        products, copy = record["limits"]["products_gflops"][dtype], record["limits"]["copy_gbytes"]
        rows = [row for row in record["rows"] if row["dtype"] == dtype]
        x = [_intensity(row) for row in rows]
        ends = np.array([products / copy / 4, products / copy, max(x) * 2])
        axes.plot(ends, np.minimum(ends * copy, products), color=colour, linewidth=1)
        for name, style in (("own", {}), ("engine", {"markerfacecolor": "none"})):
            y = [row[f"{name}_gflops"] for row in rows]
            axes.plot(x, y, "o", color=colour, markersize=4, label=f"{dtype}, {name}", **style)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("FLOPs a byte of the maps")
    axes.set_ylabel("GFLOP/s")
    plain(axes, f"3x3x3 convolutions below the limits of {host_of(record)}")
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    figure.tight_layout(pad=0.6)
    return png(figure)


def _intensity(row: Result) -> float:
    """FLOPs a byte of the maps."""
    return 54 * row["inputs"] * row["outputs"] / ((row["inputs"] + row["outputs"]) * DTYPE_BYTES[row["dtype"]])


# --- In the measuring process ---


def measure(request: Dict[str, Any]) -> Result:
    """Time every operation in `request["dtypes"]`; raises InputError where the own ones cannot be loaded."""
    if request["threads"]:
        os.environ.update(dict.fromkeys(("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS"), str(request["threads"])))
    host, threads, tf = set_up()
    from models.native.operations import available

    if not available():
        raise InputError("own kernels must be built, got none; run python -m models.native.build")
    rows = [
        row
        for dtype, case in itertools.product(request["dtypes"], CASES)
        for row in timed_operations(tf, dtype, *case, request["rounds"])
    ]
    about = {"engine_name": engine_name(tf), "threads": in_force(threads), "host": host.summary()}
    return {"rows": rows, "limits": limits(request), **about, "versions": versions()}


def limits(request: Dict[str, Any]) -> Result:
    """The host's own: GFLOP/s of products from the cache L1, of each dtype, and GB/s that a copy reads and writes."""
    from models.native.operations import products_per_s

    threads = int(os.environ["TF_NUM_INTRAOP_THREADS"])
    products = {dtype: round(products_per_s(dtype, threads) / 1e9, 1) for dtype in request["dtypes"]}
    blocks = [[np.full(COPIED_BYTES, n, np.uint8) for n in range(2)] for _ in range(threads)]
    with ThreadPoolExecutor(len(blocks)) as pool:
        seconds = min(_seconds(lambda: list(pool.map(np.copyto, *zip(*blocks)))) for _ in range(request["rounds"]))
    return {"products_gflops": products, "copy_gbytes": round(2 * COPIED_BYTES * len(blocks) / seconds / 1e9, 1)}


def timed_operations(tf: Any, dtype: str, edge: int, inputs: int, outputs: int, rounds: int) -> Iterator[Result]:
    """A row for each operation on a cube: GFLOP/s of the engine and of the own one, the fastest of `rounds` in turn."""
    gflop = 2 * 27 * inputs * outputs * edge**3 / 1e9
    for operation, functions in _operations(tf, dtype, (1, edge, edge, edge), inputs, outputs).items():
        for function in functions:
            function()  # traces, and touches its memory
        seconds = [min(times) for times in zip(*([_seconds(one) for one in functions] for _ in range(rounds)))]
        engine, own = (round(gflop / each, 1) for each in seconds)
        case = {"dtype": dtype, "edge": edge, "inputs": inputs, "outputs": outputs, "operation": operation}
        yield {**case, "engine_gflops": engine, "own_gflops": own}


def _operations(
    tf: Any, dtype: str, grid: Tuple[int, ...], inputs: int, outputs: int
) -> Dict[str, Tuple[Callable[[], Any], Callable[[], Any]]]:
    """Operation -> the engine's and the own one, of no arguments."""
    from models.native.operations import Gradient, Source, convolve, filter_gradient, input_gradient

    values, gradient = (tf.cast(tf.random.normal((*grid, one)), dtype) for one in (inputs, outputs))
    filters = tf.random.normal((3, 3, 3, inputs, outputs))
    engine_filters, same = tf.cast(filters, dtype), {"strides": [1] * 5, "padding": "SAME"}
    raw_ops, pairs = tf.raw_ops, {}
    pairs["forward"] = (
        lambda: tf.nn.conv3d(values, engine_filters, **same),
        lambda: convolve([Source(values)], filters),
    )
    pairs["input gradient"] = (
        lambda: raw_ops.Conv3DBackpropInputV2(
            input_sizes=values.shape, filter=engine_filters, out_backprop=gradient, **same
        ),
        lambda: input_gradient(Gradient(gradient), filters),
    )
    pairs["filter gradient"] = (
        lambda: raw_ops.Conv3DBackpropFilterV2(input=values, filter_sizes=filters.shape, out_backprop=gradient, **same),
        lambda: filter_gradient([Source(values)], Gradient(gradient)),
    )
    return {
        name: tuple(tf.function(one, autograph=False, jit_compile=False) for one in pair)
        for name, pair in pairs.items()
    }


def _seconds(function: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin
