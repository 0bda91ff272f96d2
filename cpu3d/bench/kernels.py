"""Time own operations (models/native), the 3x3x3 convolutions, and the engine's in turn.

    ./run.sh bench kernels
    ./run.sh bench kernels --dtype bfloat16 --record records/kernels.jsonl
    ./run.sh bench kernels --threads 2 8 28 56              # how well that many cores are filled, on paper
    ./run.sh bench tables --records records --roofline docs/pictures/roofline.png

GFLOP/s count the multiplications and additions of a plain convolution, however an operation
computes it. All read plain maps; the own forward convolution also computes mean and variance of its
output. Bytes are those of the maps that are read and written, once each. The host's limits are
measured too: products of values that stay in the cache L1, which an operation with a transform may
exceed, and a copy of memory by all threads."""

import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterator, Optional, Tuple

import numpy as np

from cpu3d.bench import cores
from cpu3d.bench.harness import Output, Result, host_of, in_fresh_process, seconds_of, set_up_for
from cpu3d.errors import InputError
from cpu3d.report.pictures import Line, chart
from memory_estimator.common.schema import option
from memory_estimator.common.table import PALETTE, Table
from memory_estimator.common.units import by
from memory_estimator.host import read_host
from memory_estimator.job import DTYPE_BYTES
from models.config import DTYPES
from models.native.library import own_operations
from models.native.shared import MOST_THREADS

CASES = ((128, 16, 16), (128, 32, 16), (128, 16, 32), (64, 32, 32), (128, 4, 16))
"""Edge of a cube, channels in and out: the finest levels of a U-Net with 16 filters."""

Pair = Tuple[Callable[[], Any], Callable[[], Any]]  # the engine's operation and the own one

COPIED_BYTES = 2**28  # a thread; the C library writes as much past the caches


@dataclass(frozen=True)
class Options:
    """The options of `bench kernels`."""

    dtype: Optional[str] = option(
        None, "compute dtype (default: all that the host computes fast)", choices=DTYPES
    )
    threads: Optional[Tuple[int, ...]] = option(
        None,
        "threads (default: those of a training step); several, or more than this host has cores: "
        "efficiency on paper of all own operations of a step",
        "N",
        at_least=1,
        at_most=MOST_THREADS,
    )
    shape: Tuple[int, int, int] = option(
        (240, 240, 160), "voxels of that step", ("X", "Y", "Z"), at_least=16
    )
    filters: int = option(16, "feature maps of its first convolution", "F", at_least=1)
    rounds: int = option(5, "runs of each operation; the fastest counts", at_least=1)


OPTIONS = (Options, Output)


def run(options: Options, output: Output) -> int:
    host, threads = read_host(), options.threads or ()
    if len(threads) > 1 or max(threads, default=0) > host.usable_cores:
        paper = {**vars(options), "dtype": options.dtype or host.best_dtype}
        result = in_fresh_process(cores.measure, paper)
        output.publish("cores", result, *cores.efficiency_tables(result))
        return 0
    dtypes = [options.dtype] if options.dtype else DTYPES[: 1 + host.fast_bfloat16]
    request = {**vars(options), "threads": next(iter(threads), None), "dtypes": dtypes}
    result = in_fresh_process(measure, request)
    output.publish("kernels", result, kernels_table(result))
    return 0


def kernels_table(record: Result) -> Table:
    """GFLOP/s, a row for each dtype, grid, channels and operation."""
    rows = []
    for row in record["rows"]:
        engine, own = row["engine_gflops"], row["own_gflops"]
        name = f"{by((row['edge'],) * 3)}, {row['inputs']} to {row['outputs']}"
        figures = (
            f"{engine:.0f}",
            f"{own:.0f}",
            f"{own / engine:.2f}",
            f"{own / _intensity(row):.1f}",
        )
        rows.append((row["dtype"], name, row["operation"], *figures))
    threads, limits = record["threads"].get("TF_NUM_INTRAOP_THREADS", "all"), record["limits"]
    products = ", ".join(
        f"{dtype} {rate:.0f} GFLOP/s" for dtype, rate in limits["products_gflops"].items()
    )
    title = f"GFLOP/s on {host_of(record)}, {threads} threads, {record['engine_name']}"
    title += f"; products alone: {products}; a copy: {limits['copy_gbytes']:.1f} GB/s"
    heads = ("dtype", "grid, channels", "operation", "engine", "own", "own / engine", "own, GB/s")
    return Table(heads, rows, title=title, names=3)


def draw_roofline(record: Result) -> bytes:
    """GFLOP/s of every operation over its FLOPs a byte, own and the engine's, below the host's
    limits, as PNG."""
    lines, limits = [], record["limits"]
    for (dtype, products), colour in zip(limits["products_gflops"].items(), PALETTE):
        rows = [row for row in record["rows"] if row["dtype"] == dtype]
        x, corner = [_intensity(row) for row in rows], products / limits["copy_gbytes"]
        lines.append(
            Line(
                "",
                (corner / 4, corner, 2 * max(x)),
                (products / 4, products, products),
                colour,
                marks="-",
            )
        )
        for name, marks in (("own", "o"), ("engine", "x")):
            lines.append(
                Line(
                    f"{dtype}, {name}",
                    x,
                    [row[f"{name}_gflops"] for row in rows],
                    colour,
                    marks=marks,
                )
            )
    title = f"3x3x3 convolutions below the limits of {host_of(record)}"
    return chart(
        lines, title=title, x_label="FLOPs a byte of the maps", y_label="GFLOP/s", log=True
    )


def _intensity(row: Result) -> float:
    """FLOPs a byte of the maps."""
    return (
        54
        * row["inputs"]
        * row["outputs"]
        / ((row["inputs"] + row["outputs"]) * DTYPE_BYTES[row["dtype"]])
    )


# --- In the measuring process ---


def measure(request: Dict[str, Any]) -> Result:
    """Time every operation in `request["dtypes"]`; raises InputError if own operations cannot be
    loaded."""
    tf, facts = set_up_for(request)
    from models.native.operations import available

    if not available():
        rule = f"own operations must load here, got none: {own_operations().why}"
        raise InputError(f"{rule}; install a C compiler and run python -m models.native.build")
    cases = itertools.product(request["dtypes"], CASES)
    rows = [
        row
        for dtype, case in cases
        for row in timed_operations(tf, dtype, *case, request["rounds"])
    ]
    return {"rows": rows, "limits": limits(request), **facts}


def limits(request: Dict[str, Any]) -> Result:
    """The host's limits: GFLOP/s of products from the cache L1 in each dtype, GB/s that a copy
    reads and writes."""
    from models.native.operations import products_per_s

    threads = int(os.environ["TF_NUM_INTRAOP_THREADS"])
    products = {
        dtype: round(products_per_s(dtype, threads) / 1e9, 1) for dtype in request["dtypes"]
    }
    blocks = [[np.full(COPIED_BYTES, n, np.uint8) for n in range(2)] for _ in range(threads)]
    with ThreadPoolExecutor(len(blocks)) as pool:
        seconds = min(
            seconds_of(lambda: list(pool.map(np.copyto, *zip(*blocks))))
            for _ in range(request["rounds"])
        )
    return {
        "products_gflops": products,
        "copy_gbytes": round(2 * COPIED_BYTES * len(blocks) / seconds / 1e9, 1),
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
        seconds = zip(*([seconds_of(function) for function in functions] for _ in range(rounds)))
        engine, own = (round(gflop / min(times), 1) for times in seconds)
        case = {
            "dtype": dtype,
            "edge": edge,
            "inputs": inputs,
            "outputs": outputs,
            "operation": operation,
        }
        yield {**case, "engine_gflops": engine, "own_gflops": own}


def _operations(
    tf: Any, dtype: str, grid: Tuple[int, ...], inputs: int, outputs: int
) -> Dict[str, Pair]:
    """Name -> the engine's and the own operation, without arguments."""
    from models.native.operations import Gradient, Source, convolve, filter_gradient, input_gradient

    raw, same = tf.raw_ops, {"strides": [1] * 5, "padding": "SAME"}
    values, out = (
        tf.cast(tf.random.normal((*grid, channels)), dtype) for channels in (inputs, outputs)
    )
    filters = tf.random.normal((3, 3, 3, inputs, outputs))
    cast, size, sizes = tf.cast(filters, dtype), values.shape, filters.shape
    return {
        "forward": (
            lambda: tf.nn.conv3d(values, cast, **same),
            lambda: convolve([Source(values)], filters),
        ),
        "input gradient": (
            lambda: raw.Conv3DBackpropInputV2(
                input_sizes=size, filter=cast, out_backprop=out, **same
            ),
            lambda: input_gradient(Gradient(out), filters),
        ),
        "filter gradient": (
            lambda: raw.Conv3DBackpropFilterV2(
                input=values, filter_sizes=sizes, out_backprop=out, **same
            ),
            lambda: filter_gradient([Source(values)], Gradient(out)),
        ),
    }
