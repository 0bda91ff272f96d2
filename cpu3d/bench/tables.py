"""Make the page of results from benchmark records: a section a kind, the newest record of each job.

    ./run.sh bench tables --records records                         # prints it
    ./run.sh bench tables --records records --out docs/results.md
    ./run.sh bench tables --records records --page docs/validation.md

What is predicted is what the estimator says now, with the constants that it ships. The validation page holds every
measured configuration beside that; its upper bounds follow from accuracy.json, which `python -m
memory_estimator.validation` makes of the same record: run that first.
"""

import argparse
import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from cpu3d.bench import data
from cpu3d.bench.engines import engines_table
from cpu3d.bench.faults import faults_table
from cpu3d.bench.harness import host_of, title_of, valid, with_range, write_bytes
from cpu3d.bench.memory import policies_table
from cpu3d.bench.scaling import scaling_lines
from cpu3d.bench.validate import describe
from cpu3d.bench.windows import windows_table
from cpu3d.compare.report import comparisons_markdown
from cpu3d.util.records import newest, read_records
from memory_estimator.calibration import shipped_constants
from memory_estimator.estimate import estimate
from memory_estimator.scaling.model import read_scaling
from memory_estimator.schema import add_options, from_args, option
from memory_estimator.table import Table
from memory_estimator.units import GIB
from memory_estimator.validation import (
    Measured,
    Row,
    compare,
    has_known_engine,
    job_from,
    read_measured,
    spreads,
    targets,
)

HELP = "make the pages of results from benchmark records"

VALIDATION = "memory.jsonl"
"""In the folder of records: what `bench validate` measured."""

HEAD = """\
# Results

Made of [records](../records) by `./run.sh bench tables --records records --out docs/results.md`. Ranges are the least
to the most of the rounds. How each was measured stands in the help of its command.
"""

VALIDATION_HEAD = """\
# The estimator against measured steps

Made by `./run.sh bench tables --records records --page docs/validation.md` from records/memory.jsonl (`bench validate`)
and the code as it stands. Errors are signed, as shares of what was measured: +2 % is predicted too high. Of more than
one run the median size and the worst stand there; of the upper bound how far it is above the process's peak, the mean
and the least.

Constants of the host and the margin of the upper bound are fitted to volumes of at most 96^3 voxels; the errors in all
are of the larger ones. The rules (what each operation keeps, the scratch of a kernel, how the allocator grows) are not
held out: they were found with runs of up to 128^3 voxels in view.

A configuration reads: shape, f(ilters), d(epth), b(atch), c(hannels), k outputs, dtype, engine, norm, optimizer, and
what differs from the default. Disturbed is a measurement whose steps lie further apart than a tenth of their median.
"""


@dataclass(frozen=True)
class TableOptions:
    """Which records, and which pages are written."""

    records: Path = option(help="folder of .jsonl records", metavar="DIR")
    out: Optional[Path] = option(None, "write the page of results; else it is printed", metavar="FILE")
    page: Optional[Path] = option(None, "write the validation page", metavar="FILE")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, TableOptions)


def run(args: argparse.Namespace) -> int:
    options = from_args(TableOptions, args)
    if options.page:
        write_bytes(options.page, ("\n".join(page(*validation(options.records))) + "\n").encode())
    text = "\n".join(tables(options.records)) + "\n"
    if options.out:
        write_bytes(options.out, text.encode())
    else:
        print(text, end="")
    return 0


def tables(folder: Path) -> List[str]:
    """The lines of the page of results. What was not recorded has no section."""
    lines = HEAD.splitlines()
    for kind, (heading, section) in SECTIONS.items():
        path = Path(folder) / f"{kind}.jsonl"
        if path.is_file():
            lines += ["", f"## {heading}", "", *section(path)]
            while not lines[-1]:
                lines.pop()
    return lines


# --- The validation page ---


def validation(folder: Path) -> Tuple[Sequence[Measured], List[Row]]:
    """The measured steps, and each beside what the estimator as it stands predicts."""
    # The shipped constants, whatever this host's own are: the page is the same wherever it is made.
    constants = functools.lru_cache(maxsize=None)(shipped_constants)
    measured = valid(read_measured, folder / VALIDATION)
    return measured, compare(measured, lambda one: estimate(one.job, constants(one.isa)))


def page(measured: Sequence[Measured], rows: Sequence[Row]) -> List[str]:
    """The lines of the validation page. `rows` are what `compare` makes of `measured`, which has the failures too."""
    held_out = sorted(rows, key=lambda row: not row.measured.held_out)
    cells = [_detail(row) for row in held_out]
    cells += [(describe(one.job), *7 * ["-"], f"not measured: {one.failure}") for one in measured if one.failure]
    hosts = sorted({f"{one.host}, {one.job.threads} threads, {one.date}" for one in measured})
    columns = ("configuration", "allocator, GiB", "error", "process, GiB", "error", "bound above", "s a step", "error")
    details = Table((*columns, ""), cells, title=f"Measured on {'; '.join(hosts)}.")
    summaries = [summary_table([row for row in rows if row.measured.held_out]), _target_table(rows)]
    return VALIDATION_HEAD.splitlines() + [line for one in (*summaries, details) for line in ("", *one.markdown())]


def summary_table(rows: Sequence[Row]) -> Table:
    """Median (of the absolute errors) and worst error of every figure, for all rows and by engine and dtype."""
    groups: Dict[str, List[Row]] = {"all": list(rows)}
    for row in sorted(rows, key=lambda row: (row.measured.job.engine, row.measured.job.unet.dtype)):
        groups.setdefault(f"{row.measured.job.engine}, {row.measured.job.unet.dtype}", []).append(row)
    cells = []
    for group, some in groups.items():
        found, least = spreads(some), min((row.slack for row in some), default=math.nan)
        allocator, process, step = (
            f"{_percent(one.median)}, worst {_signed(one.worst)}" if one.count else "-"
            for one in (found[name] for name in ("allocator peak", "process peak", "seconds a step"))
        )
        bound = f"{_signed(found['upper bound'].mean)} ({_signed(least)})"
        cells.append((group, str(len(some)), allocator, process, bound, step))
    columns = ("engine, dtype", "runs", "allocator peak", "process peak", "upper bound, mean (least)", "seconds a step")
    return Table(columns, cells)


def _target_table(rows: Sequence[Row]) -> Table:
    """What is demanded of the errors beside what was found."""
    cells = []
    for one in targets([row for row in rows if row.measured.held_out]):
        demanded, found = (
            "-" if math.isnan(value) else _percent(value) if one.is_share else f"{value:.0f}"
            for value in (one.demanded, one.found)
        )
        cells.append((one.name, demanded, found, "met" if one.met else "**not met**"))
    return Table(("figure", "demanded, at most", "found", ""), cells)


def _detail(row: Row) -> Sequence[str]:
    """A configuration: each figure as measured and the error of what is predicted, then what is wrong with it."""
    one = row.measured
    allocator = "-" if one.allocator_peak_bytes is None else f"{one.allocator_peak_bytes / GIB:.3f}"
    process = [f"{one.process_peak_bytes / GIB:.3f}", _signed(row.process_error), _signed(row.slack)]
    step = [f"{one.step_s:.2f}", _signed(row.step_error)]
    notes = [f"misses {name}" for name in row.misses] + ["disturbed"] * one.disturbed
    return [describe(one.job), allocator, _signed(row.allocator_error), *process, *step, ", ".join(notes)]


# --- Sections of the page of results ---


def _each(kind: str, names: Sequence[str], table: Callable[[Dict[str, Any]], Table]) -> Callable[[Path], List[str]]:
    """A section with a table of the newest record of each job, which the named fields and the CPU tell apart."""

    def section(path: Path) -> List[str]:
        def job(record: Dict[str, Any]) -> str:
            return json.dumps([*(record.get(name, "cpu") for name in names), record["host"]["cpu"]], sort_keys=True)

        return [line for record in newest(read_records(path, kind), job) for line in (*table(record).markdown(), "")]

    return section


def _step(path: Path) -> List[str]:
    record = read_records(path, "step")[-1]
    rows = [[f"this project, {record['engine_name']}", f"{record['step_s']:.2f}", _gib(record), ""]]
    for peer in record["peers"]:
        name = f"{peer['peer']}, {'compiled' if '--compile' in peer['options'] else 'eager'}"
        rows.append([name, f"{peer['step_s']:.2f}", _gib(peer), with_range(peer, "ratio")])
    rate = (
        f"Our step runs at {record['gflops']:.0f} GFLOP/s, {record['matmul_peak_share']:.0%} of the matrix product of "
        f"this host ({record['matmul_gflops']:.0f})."
    )
    title = f"{title_of(record)}, {host_of(record)}:"
    return Table(("", "s a step", "process peak", "against ours"), rows, title=title, caption=rate).markdown()


def _policies(record: Dict[str, Any]) -> Table:
    """The table with what the estimator says now; nothing for an engine that it does not know."""

    def predicted(row: Dict[str, Any]) -> Optional[Mapping[str, Any]]:
        if row["kind"] != "policy" or not has_known_engine(record):
            return None
        job = job_from({**record, "unet": {**record["unet"], "policy": row["name"]}})
        return vars(estimate(job, shipped_constants(tuple(record["host"]["isa"]))))

    rows = [{**row, "predicted": predicted(row)} for row in record["rows"]]
    return policies_table({**record, "rows": rows})


def _estimator(path: Path) -> List[str]:
    rows = [row for row in validation(path.parent)[1] if row.measured.held_out]
    return [*summary_table(rows).markdown(), "", "Every configuration stands in [validation.md](validation.md)."]


def _comparisons(kind: str) -> Callable[[Path], List[str]]:
    return lambda path: comparisons_markdown(read_records(path, kind))


SECTIONS: Dict[str, Tuple[str, Callable[[Path], List[str]]]] = {
    "step": ("The training step beside others", _step),
    "engines": ("Engines", lambda path: engines_table(read_records(path, "engines")[-1]).markdown()),
    "policies": (
        "Memory policies",
        _each("policies", ("shape", "batch", "micro_batch", "unet", "optimizer", "engine_name"), _policies),
    ),
    "memory": ("The estimator against larger configurations than it was fitted to", _estimator),
    "data": ("Loading", lambda path: data.page_lines(read_records(path, "data"))),
    "compare": ("Whole volumes against patches", _comparisons("compare")),
    "resolutions": ("Resolution, effective batch and learning rate", _comparisons("resolutions")),
    "windows": (
        "One pass against a sliding window",
        _each(
            "windows",
            ("name", "cases", "mode", "grid", "unet", "device"),
            windows_table,
        ),
    ),
    "scaling": ("Several workers", lambda path: scaling_lines(valid(read_scaling, path))),
    "faults": (
        "Killed at random moments",
        _each("faults", ("workers",), faults_table),
    ),
}
"""Kind of record, which is its file's name too -> heading and lines."""


# --- Private helpers ---


def _gib(row: Dict[str, Any]) -> str:
    size_bytes = row["process_peak_bytes"]
    return "-" if size_bytes is None else f"{size_bytes / GIB:.1f} GiB"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _signed(share: Optional[float]) -> str:
    return "-" if share is None or math.isnan(share) else f"{100 * share:+.1f} %"
