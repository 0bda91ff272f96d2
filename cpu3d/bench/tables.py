"""Make the page of results from benchmark records: a section a kind, the newest record of each job.

    ./run.sh bench tables --records records                         # prints it
    ./run.sh bench tables --records records --out docs/results.md
    ./run.sh bench tables --records records --page docs/validation.md --picture docs/pictures/policies.png

What is predicted is what the estimator says now, with the constants that it ships. The validation page holds every
measured configuration beside that, a section a host; its upper bounds follow from accuracy.json, which `python -m
memory_estimator.validation` makes of the same records: run that first.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from cpu3d.bench.data import page_lines
from cpu3d.bench.engines import engines_table
from cpu3d.bench.faults import faults_table
from cpu3d.bench.harness import gib, valid
from cpu3d.bench.memory import draw_policies, policies_table
from cpu3d.bench.scaling import scaling_lines
from cpu3d.bench.step import step_table
from cpu3d.bench.validate import signed, summary_table
from cpu3d.bench.windows import windows_table
from cpu3d.compare.report import comparisons_markdown
from cpu3d.errors import InputError
from cpu3d.util.atomic import write_bytes
from cpu3d.util.records import newest, read_records
from memory_estimator.calibration import shipped_constants
from memory_estimator.estimate import estimate
from memory_estimator.job import Job
from memory_estimator.scaling import read_scaling
from memory_estimator.schema import option
from memory_estimator.step.onednn import Kernels, highest_isa
from memory_estimator.table import Table
from memory_estimator.validation import (
    Measured,
    Row,
    compare,
    has_known_engine,
    job_from,
    left_out_in_turn,
    predicted,
    read_measured,
    targets,
)
from models.config import POLICIES, UNetConfig

HELP = "make the pages of results from benchmark records"

VALIDATION = "memory"  # in the folder of records that of `bench validate`, a file a host

HEAD = """\
# Results

Made of `records/` by `./run.sh bench tables --records records --out docs/results.md`. Ranges are the least
to the most of the rounds. How each was measured stands in the help of its command.
"""

VALIDATION_HEAD = """\
# The estimator against measured steps

Made by `./run.sh bench tables --records records --page docs/validation.md` from records/memory (`bench validate`) and
the code as it stands. Errors are shares of what was measured: +2% is predicted too high. Of more than one run the
median size and the worst stand there; of the upper bound how far above the process's peak, the mean and the least; it
is wide where too few records of a kind say how far the next is off. What of the figures is fitted to some of these
records stands in [estimator.md](estimator.md): the rules were found with runs of up to 128^3 voxels in view, the margin
of an upper bound is that of all records of its kind. Disturbed is a measurement whose steps lie further apart than a
tenth of their median.
"""


@dataclass(frozen=True)
class TableOptions:
    """Which records, and which pages are written."""

    records: Path = option(help="folder of .jsonl records", metavar="DIR")
    out: Optional[Path] = option(None, "write the page of results; else it is printed", metavar="FILE")
    page: Optional[Path] = option(None, "write the validation page", metavar="FILE")
    picture: Optional[Path] = option(None, "draw the newest comparison of policies as PNG", metavar="FILE")


OPTIONS = (TableOptions,)


def run(options: TableOptions) -> int:
    if options.picture:
        write_bytes(options.picture, picture(options.records / "policies.jsonl"))
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
        path = Path(folder) / (kind if kind == VALIDATION else f"{kind}.jsonl")
        if path.exists():
            lines += ["", f"## {heading}", "", *section(path)]
            while not lines[-1]:
                lines.pop()
    return lines


def picture(path: Path) -> bytes:
    """PNG of the newest comparison of policies that has the bytes live over a step, with the peaks of peers that any
    comparison at the same job had, on whatever host. Raises InputError where there is none."""

    def job(record: Dict[str, Any]) -> Tuple[Any, ...]:
        unet = UNetConfig(**{**record["unet"], "policy": POLICIES[0]})
        return unet, *(record[name] for name in ("shape", "batch", "micro_batch"))

    records = read_records(path, "policies")
    drawn = next((one for one in reversed(records) if any(row.get("live_bytes") for row in one["rows"])), None)
    if not drawn:
        raise InputError(f"records {path} must have live_bytes, got none; measure with `bench memory --policies`")
    return draw_policies(drawn, [one for one in records if job(one) == job(drawn)])


# --- Sections of the page of results ---


def _each(table: Callable[[Dict[str, Any]], Table], *names: str) -> Callable[[Path], List[str]]:
    """A section with a table of the newest record of each job, which the named fields and the CPU tell apart."""

    def section(path: Path) -> List[str]:
        def job(record: Dict[str, Any]) -> str:
            cpu = record.get("host", {}).get("cpu")
            return json.dumps([*(record.get(name, "cpu") for name in names), cpu], sort_keys=True)

        records = newest(read_records(path, path.stem), job)
        return [line for record in records for line in (*table(record).markdown(), "")]

    return section


def _policies(record: Dict[str, Any]) -> Table:
    """The table with what the estimator says now; nothing for an engine that it does not know."""

    def predicted(row: Dict[str, Any]) -> Optional[Mapping[str, Any]]:
        if row["kind"] != "policy" or not has_known_engine(record):
            return None
        job = job_from({**record, "unet": {**record["unet"], "policy": row["name"]}})
        return vars(estimate(job, shipped_constants(Kernels(highest_isa(record["host"]["isa"])))))

    return policies_table({**record, "rows": [{**row, "predicted": predicted(row)} for row in record["rows"]]})


def _estimator(path: Path) -> List[str]:
    rows = validation(path.parent)[1]
    return [*summary_table(rows).markdown(), "", "Every configuration stands in [validation.md](validation.md)."]


def _comparisons(path: Path) -> List[str]:
    return comparisons_markdown(read_records(path, path.stem))


_STEP = ("shape", "batch", "micro_batch", "unet", "optimizer", "engine_name")
_WINDOWS = ("name", "cases", "mode", "grid", "unet", "device")
SECTIONS: Dict[str, Tuple[str, Callable[[Path], List[str]]]] = {
    "step": ("The training step beside others", _each(step_table, *_STEP)),
    "engines": ("Engines", _each(engines_table, *_STEP)),
    "policies": ("Memory policies", _each(_policies, *_STEP)),
    "memory": ("The estimator against measured steps", _estimator),
    "data": ("Loading", lambda path: page_lines(read_records(path, "data"))),
    "compare": ("Whole volumes against patches", _comparisons),
    "resolutions": ("Resolution, effective batch and learning rate", _comparisons),
    "windows": ("One pass against a sliding window", _each(windows_table, *_WINDOWS)),
    "scaling": ("Several workers", lambda path: scaling_lines(valid(read_scaling, path))),
    "faults": ("Killed at random moments", _each(faults_table, "workers")),
}
"""Kind of record, which is its file's name too -> heading and lines."""


# --- The validation page ---


def validation(folder: Path) -> Tuple[Sequence[Measured], List[Row]]:
    """The measured steps, and each beside what the estimator as it stands predicts."""
    measured = valid(read_measured, folder / VALIDATION)
    return measured, compare(measured, predicted)


def page(measured: Sequence[Measured], rows: Sequence[Row]) -> List[str]:
    """The lines of the validation page. `rows` are what `compare` makes of `measured`, which has the failures too."""
    above, count = left_out_in_turn(rows)
    lines = [*VALIDATION_HEAD.splitlines(), "", *summary_table(rows).markdown(), ""]
    lines.append(f"Left out of its kind in turn, {above} of {count} records lie above the bound that the others make.")
    for host, isa in sorted({(one.host, one.kernels.isa) for one in measured}):
        own = [one for one in measured if (one.host, one.kernels.isa) == (host, isa)]
        lines += ["", f"## {host}, {isa}", *_host_lines(own, [row for row in rows if row.measured in own])]
    return lines


def _host_lines(measured: Sequence[Measured], rows: Sequence[Row]) -> List[str]:
    """What is demanded of one host's errors, and every configuration."""
    demanded, details = [], []
    for one in targets(rows):
        show = ("{:.1%}" if one.demanded else "{:.0f}").format  # none of a count
        figures = ("-" if math.isnan(value) else show(value) for value in (one.demanded, one.found))
        met = "not recorded" if math.isnan(one.found) else "met" if one.met else "**not met**"
        demanded.append((one.name, *figures, met))
    for row in sorted(rows, key=lambda row: not row.measured.held_out):
        one, allocator, process = row.measured, row.measured.allocator_peak_bytes, row.measured.process_peak_bytes
        error = {name: signed(share) for name, share in row.errors.items()}
        cells = [_name(one.job), gib(allocator, 3), error["allocator peak"], gib(process, 3)]
        cells += [error["process peak"], error["upper bound"]]
        cells += ["-" if math.isnan(one.step_s) else f"{one.step_s:.2f}", error["seconds a step"]]
        remarks = [f"misses {name}" for name in row.misses] + ["disturbed"] * one.disturbed
        remarks += ["wide"] * (not row.covered)
        details.append([*cells, ", ".join(remarks)])
    failed = [one for one in measured if one.failure]
    details += [(_name(one.job), *7 * ["-"], f"not measured: {one.failure}") for one in failed]
    about = "; ".join(sorted({f"{one.version}, {one.job.threads} threads, {one.date}" for one in measured}))
    columns = ("configuration", "allocator, GiB", "error", "process, GiB", "error", "bound above", "s a step", "error")
    found = [Table(("figure", "demanded, at most", "found", ""), demanded)]
    found.append(Table((*columns, ""), details, title=about))
    return [line for one in found for line in ("", *one.markdown())]


def _name(job: Job) -> str:
    return f"{job.describe()}{', upsampling' * (job.unet.up == 'upsampling')}"
