"""Measure the configurations that the estimator is judged by on this host, one fresh process each.

    ./run.sh bench validate --record my-host.jsonl
    ./run.sh bench validate --record my-host.jsonl --engine itex --first 12

Each fits a host with 24 GB of memory; all together take about half an hour on two quiet cores with AVX512_BF16. After
an interruption it continues: a configuration in the record is not measured again, also if it failed (remove its line to
repeat it). Use one record file per host.

The published records are the files in records/memory. `bench tables` makes accuracy.json from them, which the estimator
ships, and the validation page: every measured configuration with its prediction.
"""

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

from cpu3d.bench.harness import Output, ProcessFailedError, gib, in_fresh_process
from cpu3d.bench.step import has_known_engine, job_of_record, measure, request_for
from cpu3d.errors import InputError
from cpu3d.host.apply import installed
from cpu3d.host.thread_plan import thread_plan
from cpu3d.util.atomic import writable_folder
from cpu3d.util.progress import bar, say
from cpu3d.util.records import append_record, read_records
from memory_estimator.accuracy import (
    FIGURES,
    Accuracy,
    Measured,
    Row,
    accuracy_json,
    digest,
    left_out_in_turn,
    spread,
)
from memory_estimator.calibration import find_constants, shipped_constants
from memory_estimator.common.schema import option
from memory_estimator.common.table import Table
from memory_estimator.common.units import format_bytes
from memory_estimator.estimate import Estimate, estimate
from memory_estimator.host import Host, instruction_set, read_host
from memory_estimator.installed import ENGINES, engine_version, how_to_install
from memory_estimator.job import Job
from models.config import DTYPES, POLICIES, UNetConfig

VALIDATION = "memory"  # in the folder of records that of `bench validate`, a file a host
STEPS = 3  # timed, after two more: enough for a median

VALIDATION_HEAD = """\
# The estimator against measured steps

Made by `./run.sh bench tables --records records --page FILE` from records/memory (`bench validate`) and the code as it
stands. Errors are shares of what was measured: +2% is predicted too high. A group of
runs shows the median size and the worst error, and of the upper bound how far it is above the process's peak, the mean
and the least; it is wide where too few records of a kind tell how far the next is off. The margin of an
upper bound is that of all records of its kind: of a dtype and a policy.
"""


@dataclass(frozen=True)
class Options:
    """What `bench validate` measures."""

    record: Path = option(help=".jsonl file, continued if there", metavar="FILE")
    engine: Optional[str] = option(None, help="only this engine (default: all installed)", choices=ENGINES)
    first: Optional[int] = option(None, help="only the first N of the list", at_least=1, metavar="N")


OPTIONS = (Options,)


def run(options: Options) -> int:
    writable_folder(options.record.parent, "folder")
    host = read_host()
    threads = thread_plan(host).intra_op
    done = {one.job for one in _of_this_host(options.record, host)}
    if options.engine and not installed(options.engine):
        raise InputError(
            f"engine must be installed, got {options.engine}; {how_to_install(options.engine)} or leave it out"
        )
    engines = [one for one in ENGINES if options.engine in (None, one) and installed(one)]
    wanted = configurations(threads, engines)[: options.first]
    todo = [job for job in wanted if job not in done]
    constants = find_constants(host)
    with bar("validate", total=len(todo)) as advance:
        for job in todo:
            needed, free = estimate(job, constants).upper_bound_bytes, read_host().free_bytes
            outcome = f"left out, needs {format_bytes(needed)} where {format_bytes(free)} are free"
            if needed <= free:
                request = request_for(job, steps=STEPS)
                try:
                    record, outcome = in_fresh_process(measure, request), "measured"
                except ProcessFailedError as error:
                    environment = {**thread_plan(host).environment, "TF_NUM_INTRAOP_THREADS": str(job.threads)}
                    about, outcome = {"threads": environment, "host": host.summary()}, str(error)
                    record = {**request, "error": outcome, **about}
                append_record(options.record, "memory", record)
            say(f"{job.describe()}: {outcome}")
            advance()
    held_out = [one for one in _of_this_host(options.record, host) if one.held_out]
    # By what was known before: measuring adds to that. The page is made with the shipped constants alone.
    rows = compare(held_out, lambda one: estimate(one.job, constants))
    Output().publish("memory", {}, summary_table(rows))
    return 0


NETWORKS: Tuple[Tuple[Dict[str, Any], Tuple[int, int, int], Dict[str, Any]], ...] = (
    ({}, (64, 64, 64), {}),
    ({}, (96, 96, 96), {}),
    ({"filters": 8}, (96, 96, 96), {"optimizer": "adam"}),
    ({"filters": 48}, (48, 48, 48), {}),
    ({"network": "cicek2016", "filters": 24}, (32, 32, 32), {}),
    ({}, (128, 128, 128), {}),
    ({"residual": True}, (128, 112, 128), {}),
    ({"deep_supervision": True}, (128, 128, 112), {"optimizer": "adam"}),
    ({"norm": "batch", "up": "upsampling"}, (112, 112, 112), {"batch": 2}),
    ({"norm": "none", "filters": 12, "channels": 1, "outputs": 1}, (128, 128, 128), {"optimizer": "sgd"}),
    ({"filters": 32, "depth": 4}, (128, 128, 96), {}),
    ({"network": "cicek2016", "depth": 4, "filters": 16, "channels": 1, "outputs": 1}, (128, 96, 128), {}),
    ({"filters": 24, "depth": 3}, (128, 96, 128), {"batch": 2, "micro_batch": 1}),
    ({}, (144, 192, 144), {}),
    ({"filters": 48}, (96, 112, 96), {"batch": 1}),
    ({"filters": 8, "channels": 1}, (240, 240, 160), {}),
    ({}, (240, 240, 160), {}),
)
"""What is measured in each dtype under each policy: network, voxels and more of the job."""


def configurations(threads: int, engines: Sequence[str] = ENGINES) -> Tuple[Job, ...]:
    """Every job that `bench validate` measures on a host with so many threads; with further engines those of 128^3."""
    return tuple(
        Job(UNetConfig(**unet, dtype=dtype, policy=policy), shape, engine=engine, threads=threads, **more)
        for unet, shape, more in NETWORKS
        for dtype in DTYPES
        for policy in POLICIES
        for engine in (engines if shape == (128, 128, 128) else engines[:1])
    )


# --- What was measured, beside what is predicted ---


def read_measured(path: Path) -> Tuple[Measured, ...]:
    """The measured steps of a record file, or of all of a folder, one a job and host: the newest, in the place of the
    oldest. Lines of an engine that the estimator knows nothing of are passed over. A record may lack the seconds, where
    they were disturbed. Raises InputError for a missing file, and for a line that is damaged or of another schema."""

    def measured_from(record: Mapping[str, Any]) -> Optional[Measured]:
        if not has_known_engine(record):
            return None
        job, host = job_of_record(record), record["host"]
        about = {"host": host["cpu"], "isa": tuple(host["isa"]), "date": record.get("date", "")}
        about["version"] = engine_version(job.engine, record.get("versions", {}))
        if record.get("error"):
            return Measured(job, failure=record["error"], **about)
        peaks = {name: record[name] for name in ("process_peak_bytes", "allocator_peak_bytes")}
        return Measured(job, record.get("step_s") or math.nan, **peaks, **about)

    files = sorted(Path(path).glob("*.jsonl")) if Path(path).is_dir() else [path]
    read = [one for file in files for one in read_records(file, "memory", measured_from)]
    return tuple({(one.host, one.isa, one.job): one for one in read}.values())


def _of_this_host(path: Path, host: Host) -> Sequence[Measured]:
    """What the record holds, nothing where there is none yet. Raises InputError where it is another host's."""
    measured = read_measured(path) if path.exists() else ()
    others = {one.host for one in measured if (one.host, one.isa) != (host.cpu_model, tuple(host.isa))}
    if others:
        rule = f"be of this host, {host.cpu_model}, got {', '.join(others)}"
        raise InputError(f"record {path} must {rule}; give each host a file")
    return measured


def compare(measured: Iterable[Measured], predict: Callable[[Measured], Estimate]) -> List[Row]:
    """A row for every step that was measured; `predict` gives the estimate of its job. Failures are left out."""
    rows = []
    for one in (one for one in measured if not one.failure):
        found, allocator, process = predict(one), one.allocator_peak_bytes, one.process_peak_bytes
        errors = {
            "allocator_peak": None if allocator is None else found.allocator_peak_bytes / allocator - 1,
            "process_peak": found.process_peak_bytes / process - 1,
            "upper_bound": found.upper_bound_bytes / process - 1,
            "step_s": None if math.isnan(one.step_s) else found.step_s / one.step_s - 1,
        }
        rows.append(Row(one, found.process_peak_bytes, found.kind is not None, errors))
    return rows


def predicted(one: Measured, accuracy: Optional[Accuracy] = None) -> Estimate:
    """With the constants that are shipped, whatever this host's own are."""
    return estimate(one.job, _shipped(instruction_set(one.isa)), accuracy)


_shipped = functools.lru_cache(maxsize=None)(shipped_constants)


def validation(folder: Path) -> Tuple[Sequence[Measured], List[Row]]:
    """The measured steps in a folder of records, and each beside what the estimator as it stands predicts."""
    measured = read_measured(folder / VALIDATION)
    return measured, compare(measured, predicted)


def accuracy_of(folder: Path) -> bytes:
    """The content of the estimator's accuracy.json, from the records; its margins are what is worked out here."""
    return accuracy_json(digest(compare(read_measured(folder / VALIDATION), lambda one: predicted(one, Accuracy(())))))


# --- Tables and the page ---


def summary_table(rows: Sequence[Row]) -> Table:
    """Median (of the absolute errors) and worst error of every figure, for all rows and by host, engine and kind."""
    groups: Dict[Tuple[str, ...], List[Row]] = {("all", ""): list(rows)}
    for row in sorted(rows, key=_group):
        job = row.measured.job
        about = f"{instruction_set(row.measured.isa)}, {job.engine}, {job.unet.dtype}, {job.policy}"
        groups.setdefault((row.measured.host, about), []).append(row)
    cells = []
    for group, some in groups.items():
        spreads = [spread(some, figure) for figure in FIGURES]
        errors = [f"{one.median:.1%}, worst {signed(one.worst)}" if one.count else "-" for one in spreads]
        least = min((row.errors["upper_bound"] for row in some), default=math.nan)
        bound = f"{signed(spread(some, 'upper_bound').mean)} ({signed(least)})"
        bound += "" if any(row.covered for row in some) else ", wide"
        cells.append((*group, str(len(some)), *errors[:2], bound, errors[2]))
    columns = (
        "host",
        "kernels, engine, dtype, policy",
        "runs",
        "allocator peak",
        "process peak",
        "upper bound, mean (least)",
    )
    return Table((*columns, "seconds a step"), cells, names=2)


def _group(row: Row) -> Tuple[str, ...]:
    job = row.measured.job
    return (row.measured.host, job.engine, job.unet.dtype, job.policy)


def signed(share: Optional[float]) -> str:
    """For reading, such as "+6.3%"; "-" for what is not known."""
    return "-" if share is None or math.isnan(share) else f"{share:+.1%}"


def page(measured: Sequence[Measured], rows: Sequence[Row]) -> List[str]:
    """The lines of the validation page. `rows` are what `compare` makes of `measured`, which has the failures too."""
    (above, count), row_of = left_out_in_turn(rows), {row.measured: row for row in rows}
    lines = [*VALIDATION_HEAD.splitlines(), "", *summary_table(rows).markdown(), ""]
    lines.append(f"Left out of its kind in turn, {above} of {count} records are above the bound that the others make.")
    columns = ("configuration", "allocator, GiB", "error", "process, GiB", "error", "bound above", "s a step", "error")
    for host, isa in sorted({(one.host, one.isa) for one in measured}):
        own = [one for one in measured if (one.host, one.isa) == (host, isa)]
        own.sort(key=lambda one: (bool(one.failure), not one.held_out))
        about = "; ".join(sorted({f"{one.version}, {one.job.threads} threads, {one.date}" for one in own}))
        cells = [_cells(one, row_of.get(one)) for one in own]
        lines += ["", f"## {host}, {instruction_set(isa)}", "", *Table((*columns, ""), cells, title=about).markdown()]
    return lines


def _cells(one: Measured, row: Optional[Row]) -> Sequence[str]:
    """A configuration, and its errors; it has no row where it failed."""
    name = f"{one.job.describe()}{', upsampling' * (one.job.unet.up == 'upsampling')}"
    if row is None:
        return (name, *7 * ["-"], f"not measured: {one.failure}")
    allocator, process, bound, step = map(signed, row.errors.values())
    step_s = "-" if math.isnan(one.step_s) else f"{one.step_s:.2f}"
    sizes = gib(one.allocator_peak_bytes, 3), gib(one.process_peak_bytes, 3)
    return (name, sizes[0], allocator, sizes[1], process, bound, step_s, step, "" if row.covered else "wide")
