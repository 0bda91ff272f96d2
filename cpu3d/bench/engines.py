"""Time the same step on every engine, in float32 and bfloat16: the paper's Fig. 2.

    ./run.sh bench engines --shape 128 128 128 --picture engines.png

Engines: stock TensorFlow without oneDNN, stock with oneDNN, and with Intel's extension. A combination that the engine
cannot do is shown as such.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any, Dict, List, Optional

from rich.console import Console
from rich.table import Table

from cpu3d.bench.record import append_record
from cpu3d.bench.step import add_step_options, measure_in_fresh_process, step_request
from cpu3d.errors import InputError
from cpu3d.util.atomic import atomic_write
from cpu3d.util.progress import bar
from models.config import DTYPES

ENGINE_NAMES = {"stock-no-onednn": "stock, no oneDNN", "stock": "stock, oneDNN", "itex": "ITEX"}
"""In the order they are measured; the first is the baseline."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_step_options(parser)
    parser.set_defaults(steps=3)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES, help="default: both")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--record", type=Path, metavar="FILE", help="append the result to a .jsonl file")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="write a bar chart as PNG")


def run(args: argparse.Namespace) -> int:
    rows: List[Dict[str, Any]] = []
    with bar("bench engines", total=len(ENGINE_NAMES) * len(args.dtypes)) as advance:
        for engine in ENGINE_NAMES:
            for dtype in args.dtypes:
                rows.append(_measure(step_request(args, dtype=dtype, engine=engine)))
                advance()
    baseline = next(
        row for row in rows if row["engine"] == "stock-no-onednn" and row["unet"]["dtype"] == args.dtypes[0]
    )
    for row in rows:
        row["speedup"] = baseline["step_s"] / row["step_s"] if baseline["step_s"] and row["step_s"] else None
    result = {"shape": list(args.shape), "baseline": f"stock-no-onednn {args.dtypes[0]}", "rows": rows}
    if args.json:
        print(json.dumps(result))
    else:
        Console().print(_table(result))
    if args.record:
        append_record(args.record, "engines", result)
    if args.picture and any(row["step_s"] for row in rows):
        args.picture.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(args.picture) as file:
            file.write(picture(rows))
    return 0


def picture(rows: List[Dict[str, Any]]) -> bytes:
    """A bar for every engine and dtype, seconds a step on a logarithmic axis, as PNG."""
    import io

    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    done = [row for row in rows if row["step_s"]]
    figure = Figure(figsize=(7, 0.6 * len(done) + 1.2), layout="constrained")
    axes = figure.subplots()
    names = [f"{ENGINE_NAMES[row['engine']]}, {row['unet']['dtype']}" for row in done]
    colours = ["#9aa5b1" if row["unet"]["dtype"] == "float32" else "#3b6ea8" for row in done]
    bars = axes.barh(names, [row["step_s"] for row in done], color=colours)
    axes.bar_label(bars, [f"{row['step_s']:.2f} s  ({_times(row['speedup'])})" for row in done], padding=4, fontsize=9)
    axes.set_xscale("log")
    longest = max(row["step_s"] for row in done)
    axes.set_xlim(min(row["step_s"] for row in done) / 2, longest * 10 ** (0.35 * max(1.0, math.log10(longest))))
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("seconds per training step (logarithmic)")
    shape = " x ".join(map(str, done[0]["shape"]))
    axes.set_title(
        f"3D U-Net, {shape}, {done[0]['unet']['filters']} filters, {done[0]['host']['cores']} cores", fontsize=10
    )
    FigureCanvasAgg(figure)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=150)
    return file.getvalue()


# --- Private helpers ---


def _measure(request: Dict[str, Any]) -> Dict[str, Any]:
    try:
        return measure_in_fresh_process(request)
    except InputError as error:
        return {**request, "step_s": None, "error": str(error)}


def _times(speedup: Optional[float]) -> str:
    return "-" if speedup is None else f"{speedup:.1f}x"


def _table(result: Dict[str, Any]) -> Table:
    table = Table(title=f"Training step at {' x '.join(map(str, result['shape']))}", title_justify="left")
    for column in ("engine", "dtype", "step", "speed-up", "GFLOP/s", "process peak"):
        table.add_column(column, justify="left" if column in ("engine", "dtype") else "right")
    for row in result["rows"]:
        if row["step_s"] is None:
            table.add_row(ENGINE_NAMES[row["engine"]], row["unet"]["dtype"], "cannot", "-", "-", row["error"])
            continue
        table.add_row(
            ENGINE_NAMES[row["engine"]],
            row["unet"]["dtype"],
            f"{row['step_s']:.2f} s",
            _times(row["speedup"]),
            f"{row['gflops']:.0f}",
            f"{row['process_peak_bytes'] / 2**30:.2f} GiB",
        )
    return table
