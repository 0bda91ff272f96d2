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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

from cpu3d.bench import windows
from cpu3d.bench.data import command as data_command
from cpu3d.bench.faults import faults_lines
from cpu3d.bench.faults import newest as newest_faults
from cpu3d.bench.harness import read_options, with_range, write_bytes
from cpu3d.bench.memory import policies_table
from cpu3d.bench.scaling import scaling_lines
from cpu3d.bench.step import engines_table, title_of
from cpu3d.bench.validate import page, summary_table
from cpu3d.compare.report import comparisons_markdown, summary_markdown
from cpu3d.compare.resolutions import studies_markdown
from cpu3d.errors import InputError
from cpu3d.util.records import newest, read_records
from memory_estimator.calibration import shipped_constants
from memory_estimator.estimate import estimate, load_accuracy
from memory_estimator.scaling.costs import read_scaling
from memory_estimator.schema import add_options, option
from memory_estimator.table import Table
from memory_estimator.units import GIB
from memory_estimator.validation import Measured, Row, compare, has_known_engine, job_from, read_measured

VALIDATION = "memory.jsonl"
"""In the folder of records: what `bench validate` measured."""

SCALING = "scaling.jsonl"
"""In the folder of records: what `bench scaling` measured."""

HEAD = """\
# Results

Made of [records](../records) by `./run.sh bench tables --records records --out docs/results.md`. Ranges are the least
to the most of the rounds. How each was measured stands in the help of its command.
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
    options = read_options(TableOptions, args)
    if options.page:
        write_bytes(options.page, ("\n".join(page(*validation(options.records), load_accuracy())) + "\n").encode())
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


def validation(folder: Path) -> Tuple[Tuple[Measured, ...], List[Row]]:
    """The measured steps, and each beside what the estimator as it stands predicts."""
    # The shipped constants, whatever this host's own are: the page is the same wherever it is made.
    constants = functools.lru_cache(maxsize=None)(shipped_constants)
    try:
        measured = read_measured(folder / VALIDATION)
        return measured, compare(measured, lambda one: estimate(one.job, constants(one.isa)))
    except ValueError as error:
        raise InputError(str(error)) from None


def scaling_records(folder: Path) -> Tuple[Mapping[str, Any], ...]:
    """The newest of each job, read as the estimator reads them. Raises InputError for what it cannot read."""
    try:
        return read_scaling(folder / SCALING)
    except ValueError as error:
        raise InputError(str(error)) from None


# --- Sections ---


def _step(path: Path) -> List[str]:
    record = read_records(path, "step")[-1]
    rows = [[f"this project, {record['engine_name']}", f"{record['step_s']:.2f}", _gib(record), ""]]
    for peer in record["peers"]:
        name = f"{peer['peer']}, {'compiled' if '--compile' in peer['options'] else 'eager'}"
        rows.append([name, f"{peer['step_s']:.2f}", _gib(peer), with_range(peer, "ratio")])
    title = f"{title_of(record)}, {record['host']['cores']} cores of {record['host']['cpu']}:"
    rate = (
        f"Our step runs at {record['gflops']:.0f} GFLOP/s, {record['matmul_peak_share']:.0%} of the matrix product of "
        f"this host ({record['matmul_gflops']:.0f})."
    )
    return Table(("", "s a step", "process peak", "against ours"), rows, title=title, caption=rate).markdown()


def _policies(path: Path) -> List[str]:
    def job(record: Dict[str, Any]) -> str:
        names = ("shape", "batch", "micro_batch", "unet", "optimizer", "engine_name")
        return json.dumps([*(record[name] for name in names), record["host"]["cpu"]], sort_keys=True)

    lines: List[str] = []
    for record in newest(read_records(path, "policies"), job):
        rows = [{**row, "predicted": _predicted(record, row)} for row in record["rows"]]
        lines += [*policies_table({**record, "rows": rows}).markdown(), ""]
    return lines


def _predicted(record: Dict[str, Any], row: Dict[str, Any]) -> Optional[Dict[str, Any]]:
    """The estimator's figures as it stands; None for what is no policy and for an engine that it does not know."""
    if row["kind"] != "policy" or not has_known_engine(record):
        return None
    job = job_from({**record, "unet": {**record["unet"], "policy": row["name"]}})
    return vars(estimate(job, shipped_constants(tuple(record["host"]["isa"]))))


def _estimator(path: Path) -> List[str]:
    rows = [row for row in validation(path.parent)[1] if row.measured.held_out]
    return [*summary_table(rows), "", "Every configuration stands in [validation.md](validation.md)."]


def _data(path: Path) -> List[str]:
    records = read_records(path, "data")
    return [*data_command.targets_lines(records), "", *data_command.page_lines(records)]


def _compare(path: Path) -> List[str]:
    records = read_records(path, "compare")
    return [*summary_markdown(records), "", *comparisons_markdown(records)]


def _resolutions(path: Path) -> List[str]:
    return studies_markdown(read_records(path, "resolutions"))


def _windows(path: Path) -> List[str]:
    def job(record: Dict[str, Any]) -> str:
        own = [record[name] for name in ("name", "cases", "mode", "grid", "unet")]
        return json.dumps([*own, record["host"]["cpu"], windows.device_of(record)])

    lines: List[str] = []
    for record in newest(read_records(path, "windows"), job):
        distances = windows.distances_table(record)
        lines += [*windows.windows_table(record).markdown(), "", *(distances.markdown() if distances else []), ""]
    return lines


def _faults(path: Path) -> List[str]:
    return [line for record in newest_faults(read_records(path, "faults")) for line in (*faults_lines(record), "")]


SECTIONS: Dict[str, Tuple[str, Callable[[Path], List[str]]]] = {
    "step": ("The training step beside others", _step),
    "engines": ("Engines", lambda path: engines_table(read_records(path, "engines")[-1]).markdown()),
    "policies": ("Memory policies", _policies),
    "memory": ("The estimator against larger configurations than it was fitted to", _estimator),
    "data": ("Loading", _data),
    "compare": ("Whole volumes against patches", _compare),
    "resolutions": ("Resolution, effective batch and learning rate", _resolutions),
    "windows": ("One pass against a sliding window", _windows),
    "scaling": ("Several workers", lambda path: scaling_lines(scaling_records(path.parent))),
    "faults": ("Killed at random moments", _faults),
}
"""Kind of record, which is its file's name too -> heading and lines."""


def _gib(row: Dict[str, Any]) -> str:
    size_bytes = row["process_peak_bytes"]
    return "-" if size_bytes is None else f"{size_bytes / GIB:.1f} GiB"
