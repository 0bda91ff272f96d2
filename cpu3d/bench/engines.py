"""Time the same step on every engine, in float32 and bfloat16: the paper's Fig. 2.

    ./run.sh bench engines --shape 128 128 128 --picture engines.png

Engines: stock TensorFlow without oneDNN, stock with oneDNN, and with Intel's extension. A combination that the engine
cannot do is shown as such.
"""

import argparse
import itertools
from dataclasses import dataclass
from typing import Sequence, Tuple

from cpu3d.bench import harness
from cpu3d.bench.harness import Output, Result, times
from cpu3d.bench.step import StepOptions, add_step_options, measure, step_request
from cpu3d.errors import InputError
from memory_estimator.schema import from_args, option
from memory_estimator.table import PALETTE, Table, new_figure, png
from memory_estimator.units import GIB
from models.config import DTYPES

HELP = "time the same step on every engine, in float32 and bfloat16: the paper's Fig. 2"

ENGINE_NAMES = {"stock-no-onednn": "stock, no oneDNN", "stock": "stock, oneDNN", "itex": "ITEX"}
"""In the order they are measured; the first is the baseline."""


@dataclass(frozen=True)
class Options(StepOptions):
    """The step that is measured on every engine."""

    steps: int = option(3, "steps timed", at_least=1, metavar="N")
    dtypes: Tuple[str, ...] = option(DTYPES, "dtypes, the first is the baseline's", choices=DTYPES)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_step_options(parser, Options, Output)


def run(args: argparse.Namespace) -> int:
    output, options = from_args(Output, args), from_args(Options, args)
    if hasattr(args, "dtype") or hasattr(args, "engine"):
        raise InputError("engine and dtype must be left out, got one; --dtypes chooses among the dtypes")
    requests = {}
    for engine, args.dtype in itertools.product(ENGINE_NAMES, options.dtypes):
        requests[engine, args.dtype] = step_request(args, options, engine=engine)
    ways = {name: lambda _, one=one: harness.in_fresh_process(measure, one) for name, one in requests.items()}
    found, failures = harness.in_turn(ways, 1, "engines")
    rows = [
        found[name][0] or {**request, "step_s": None, "error": str(failures[name])}
        for name, request in requests.items()
    ]
    first = rows[0]["step_s"]
    for row in rows:
        row["speedup"] = first / row["step_s"] if first and row["step_s"] else None
    result = {"shape": rows[0]["shape"], "baseline": f"stock-no-onednn {options.dtypes[0]}", "rows": rows}
    output.publish("engines", result, [engines_table(result)], lambda: draw_engines(rows))
    return 0


def engines_table(result: Result) -> Table:
    """Every engine and dtype against the first."""
    rows = []
    for row in result["rows"]:
        cells = ["cannot", "-", "-"]
        if row["step_s"] is not None:
            speedup = "-" if row["speedup"] is None else f"{row['speedup']:.1f}"
            cells = [f"{row['step_s']:.2f}", speedup, f"{row['process_peak_bytes'] / GIB:.1f} GiB"]
        rows.append([ENGINE_NAMES[row["engine"]], row["unet"]["dtype"], *cells])
    title = f"{times(result['shape'])}, the same network, each in a fresh process:"
    return Table(("engine", "dtype", "s a step", "speed-up", "process peak"), rows, title=title, names=2)


def draw_engines(rows: Sequence[Result]) -> bytes:
    """Seconds a step of every engine and dtype that could on a logarithmic axis, as PNG."""
    done = [row for row in rows if row["step_s"]]
    seconds, unet = [row["step_s"] for row in done], done[0]["unet"]
    figure = new_figure(7, 0.5 * len(done) + 1.2)
    axes = figure.add_subplot()
    harness.draw_bars(
        axes, seconds, "seconds a training step (logarithmic)",
        names=[f"{ENGINE_NAMES[row['engine']]}, {row['unet']['dtype']}" for row in done],
        texts=[f"{row['step_s']:.2f} s" + f"  ({row['speedup']:.1f}x)" * bool(row["speedup"]) for row in done],
        colours=[PALETTE[("float32", "bfloat16").index(row["unet"]["dtype"])] for row in done], is_log=True,
    )  # fmt: skip
    title = f"3D U-Net, {times(done[0]['shape'])}, {unet['filters']} filters, {done[0]['host']['cores']} cores"
    axes.set_title(title, fontsize=10, loc="left")
    figure.tight_layout(pad=0.6)
    return png(figure)
