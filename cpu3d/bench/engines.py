"""Time the same step on every engine, in float32 and bfloat16: the paper's Fig. 2.

    ./run.sh bench engines --shape 128 128 128

Engines: stock TensorFlow without oneDNN, stock with oneDNN, and with Intel's extension. A combination that the engine
cannot do is shown as such.
"""

import itertools
from dataclasses import dataclass
from typing import Any, Dict, Tuple

from cpu3d.bench.harness import Output, Result, fresh, gib, in_turn
from cpu3d.bench.step import MeasuredJob, StepOptions, measure, step_request
from cpu3d.errors import InputError
from cpu3d.host.apply import NO_ONEDNN
from cpu3d.util.records import by
from memory_estimator.schema import option
from memory_estimator.table import Table
from models.config import DTYPES

ENGINE_NAMES = {NO_ONEDNN: "stock, no oneDNN", "stock": "stock, oneDNN", "itex": "ITEX"}
"""In the order they are measured; the first is the baseline."""


@dataclass(frozen=True)
class Options(StepOptions):
    """The step that is measured on every engine."""

    steps: int = option(3, "steps timed", at_least=1, metavar="N")
    dtypes: Tuple[str, ...] = option(DTYPES, "dtypes, the first is the baseline's", choices=DTYPES)


OPTIONS = ((MeasuredJob,), Options, Output)


def run(given: Dict[str, Any], options: Options, output: Output) -> int:
    if "dtype" in given or "engine" in given:
        raise InputError("engine and dtype must be left out, got one; --dtypes chooses among the dtypes")
    requests = {
        (engine, dtype): step_request({**given, "engine": engine, "dtype": dtype}, options)
        for engine, dtype in itertools.product(ENGINE_NAMES, options.dtypes)
    }
    found, failures = in_turn({way: fresh(measure, request) for way, request in requests.items()}, 1, "engines")
    rows = [found[way][0] or {**requests[way], "step_s": None, "error": str(failures[way])} for way in requests]
    first = rows[0]["step_s"]
    for row in rows:
        row["speedup"] = first / row["step_s"] if first and row["step_s"] else None
    result = {"shape": rows[0]["shape"], "baseline": f"{NO_ONEDNN} {options.dtypes[0]}", "rows": rows}
    output.publish("engines", result, engines_table(result))
    return 0


def engines_table(record: Result) -> Table:
    """Every engine and dtype against the first."""
    rows = []
    for row in record["rows"]:
        cells = ["cannot", "-", "-"]
        if row["step_s"] is not None:
            speedup = "-" if row["speedup"] is None else f"{row['speedup']:.1f}"
            cells = [f"{row['step_s']:.2f}", speedup, gib(row["process_peak_bytes"], 1)]
        rows.append([ENGINE_NAMES[row["engine"]], row["unet"]["dtype"], *cells])
    title = f"{by(record['shape'], ' x ')}, the same network, each in a fresh process:"
    return Table(("engine", "dtype", "s a step", "speed-up", "process peak, GiB"), rows, title=title, names=2)
