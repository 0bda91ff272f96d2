"""The estimator against measured steps: which are measured, errors of predictions, kinds and a page
made of them.

rows = compare_steps(measured, lambda step: estimate(step.job, constants))
accuracy_json(digest(rows)), page(measured, rows)
"""

import dataclasses
import itertools
import json
import math
import statistics
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

from cpu3d.bench.step_costs import job_of_record
from memory_estimator.accuracy import SCHEMA, Accuracy, Bound, Kind
from memory_estimator.common.table import Table
from memory_estimator.common.units import GIB
from memory_estimator.estimate import Estimate
from memory_estimator.host import instruction_set
from memory_estimator.installed import ENGINES, engine_version
from memory_estimator.job import Job
from models.config import DTYPES, POLICIES, UNetConfig

# constants are fitted to volumes of at most this size; errors are those of larger ones alone
FITTED_VOXELS = 96**3

MARGIN_BYTES = 92 * 2**20
"""The least margin of an upper bound: the most that a runtime held beyond the prediction in small
steps, in which that is most of the error: 89 MiB in one of 1.4 GiB."""

SHARE = 0.99  # of the steps like its records, for which a bound is to hold
CONFIDENCE = 0.90  # with which it does
LEAST_RECORDS = 8  # of a kind: fewer steps do not show the spread of their errors
# that have errors: fields of `Kind`, keys of `Row.errors`
FIGURES = ("allocator_peak", "process_peak", "step_s")

NETWORKS: Tuple[Tuple[Dict[str, Any], Tuple[int, int, int], Dict[str, Any]], ...] = (
    ({}, (64, 64, 64), {}),
    ({}, (96, 96, 96), {}),
    ({"filters": 8}, (96, 96, 96), {"optimizer": "adam"}),
    ({"filters": 48}, (48, 48, 48), {}),
    ({"network": "cicek2016", "filters": 24}, (32, 32, 32), {}),
    ({}, (16, 16, 16), {"batch": 16, "micro_batch": 16}),
    ({}, (128, 128, 128), {}),
    ({"residual": True}, (128, 112, 128), {}),
    ({"deep_supervision": True}, (128, 128, 112), {"optimizer": "adam"}),
    ({"norm": "batch", "up": "upsampling"}, (112, 112, 112), {"batch": 2}),
    (
        {"norm": "none", "filters": 12, "channels": 1, "outputs": 1},
        (128, 128, 128),
        {"optimizer": "sgd"},
    ),
    ({"filters": 32, "depth": 4}, (128, 128, 96), {}),
    (
        {"network": "cicek2016", "depth": 4, "filters": 16, "channels": 1, "outputs": 1},
        (128, 96, 128),
        {},
    ),
    ({"filters": 24, "depth": 3}, (128, 96, 128), {"batch": 2}),
    ({}, (144, 192, 144), {}),
    ({"filters": 48}, (96, 112, 96), {"batch": 1}),
    ({"filters": 8, "channels": 1}, (240, 240, 160), {}),
    ({}, (240, 240, 160), {}),
)
"""Jobs that are measured in each dtype under each policy: network, voxels and other settings."""

ON_EVERY_ENGINE = ((32, 32, 32), (128, 128, 128))  # voxels; the others on the first engine alone


def configurations(threads: int, engines: Sequence[str] = ENGINES) -> Tuple[Job, ...]:
    """Every job that `records.validate` measures on a host with so many threads, some
    ON_EVERY_ENGINE."""
    jobs = []
    for unet, shape, more in NETWORKS:
        for dtype, policy in itertools.product(DTYPES, POLICIES):
            config = UNetConfig(**unet, dtype=dtype, policy=policy)
            measured = engines[:1]
            if shape in ON_EVERY_ENGINE:
                measured = engines
            for engine in measured:
                jobs.append(Job(config, shape, engine=engine, threads=threads, **more))
    return tuple(jobs)


@dataclass(frozen=True)
class Measured:
    """One measured training step."""

    job: Job
    step_s: float = math.nan
    process_peak_bytes: int = 0
    allocator_peak_bytes: Optional[int] = None  # None if it was not recorded
    failure: str = ""  # the error instead; nothing was measured then
    host: str = ""  # the CPU's name
    isa: Tuple[str, ...] = ()  # its flags
    instructions: str = ""  # the instruction set of native operations there
    version: str = ""  # of the engine, as of `engine_version`
    date: str = ""

    @property
    def held_out(self) -> bool:
        """Whether it is larger than any step that constants may be fitted to."""
        return math.prod(self.job.shape) > FITTED_VOXELS


def instructions_of(record: Mapping[str, Any]) -> str:
    """The instruction set of native operations in a record; "" if TensorFlow's layers computed.
    Records before 2026-11-27, all of native operations, do not have it, nor all flags: a CPU with
    AVX512_VNNI has these three."""
    host = record["host"]
    if "instructions" in host:
        return host["instructions"]
    flags = list(host["isa"])
    if "avx512_vnni" in flags:
        flags += ["avx512bw", "avx512dq", "avx512vl"]
    return instruction_set(flags, host["cpu"]) or "avx2"


def measured_from(record: Mapping[str, Any]) -> Optional[Measured]:
    """A record's step; None on an engine without constants, and by layers. A record may lack
    seconds, if they were disturbed."""
    job = job_of_record(record)
    instructions = instructions_of(record)
    if job is None or not instructions:
        return None
    step = Measured(
        job,
        host=record["host"]["cpu"],
        isa=tuple(record["host"]["isa"]),
        instructions=instructions,
        version=engine_version(job.engine, record.get("versions", {})),
        date=record.get("date", ""),
    )
    if record.get("error"):
        return dataclasses.replace(step, failure=record["error"])
    return dataclasses.replace(
        step,
        step_s=record.get("step_s") or math.nan,
        process_peak_bytes=record["process_peak_bytes"],
        allocator_peak_bytes=record["allocator_peak_bytes"],
    )


@dataclass(frozen=True)
class Row:
    """A measured step and its prediction."""

    measured: Measured
    process_peak_bytes: int  # predicted
    covered: bool  # whether a kind of records covers it; else its upper bound is wide
    errors: Dict[str, Optional[float]]
    """FIGURES and "upper_bound" -> signed shares of the measured value, None if it was not
    recorded. The upper bound's is of the measured peak; a negative one is too low."""


def compare_steps(
    measured: Iterable[Measured], predict: Callable[[Measured], Estimate]
) -> List[Row]:
    """A row for every step that was measured; `predict` gives the estimate of its job. Failures are
    left out."""
    rows = []
    for step in measured:
        if step.failure:
            continue
        predicted = predict(step)
        errors = {
            "allocator_peak": _error(predicted.allocator_peak_bytes, step.allocator_peak_bytes),
            "process_peak": _error(predicted.process_peak_bytes, step.process_peak_bytes),
            "upper_bound": _error(predicted.upper_bound_bytes, step.process_peak_bytes),
            "step_s": _error(predicted.step_s, step.step_s),
        }
        rows.append(Row(step, predicted.process_peak_bytes, predicted.kind is not None, errors))
    return rows


def _error(predicted: float, measured: Optional[float]) -> Optional[float]:
    """As a share of what was measured; None if it was not."""
    if measured is None or math.isnan(measured):
        return None
    return predicted / measured - 1


def _errors(rows: Iterable[Row], figure: str) -> List[float]:
    """Those that are known."""
    errors = [row.errors[figure] for row in rows]
    return [error for error in errors if error is not None]


def spread(rows: Iterable[Row], figure: str) -> Optional[Bound]:
    """The size of a figure's errors over `rows`, the worst with its sign; None if none is known."""
    errors = _errors(rows, figure)
    if not errors:
        return None
    return Bound(statistics.median(map(abs, errors)), max(errors, key=abs))


# --- Kinds of steps, made of rows ---


def digest(rows: Iterable[Row]) -> Accuracy:
    """The accuracy of each kind: errors over the records that no constant was fitted to, and the
    margin of the upper bound from all of them. Kinds with fewer than LEAST_RECORDS are left out: no
    kind covers such jobs."""
    return Accuracy(tuple(_kind(key, some) for key, some in sorted(_covered(rows).items())))


def accuracy_json(accuracy: Accuracy) -> bytes:
    content = {"schema": SCHEMA, "kinds": dataclasses.asdict(accuracy)["kinds"]}
    return (json.dumps(content, indent=1) + "\n").encode()


def margin_share(rows: Sequence[Row]) -> float:
    """The share of a predicted peak to be added, to a tenth of a per cent: so much that no peak of
    these rows is above both that and MARGIN_BYTES, and that SHARE of all such steps are below with
    CONFIDENCE. That is the one-sided tolerance limit of a normal distribution (NIST/SEMATECH
    Handbook, 7.2.6.3) around the median; its spread is that of the rows above the median, as a peak
    that is predicted too high harms no bound."""
    needed = []
    beyond = []  # those that MARGIN_BYTES do not cover
    for row in rows:
        measured_bytes = row.measured.process_peak_bytes
        needed.append(measured_bytes / row.process_peak_bytes - 1)
        if measured_bytes > row.process_peak_bytes + MARGIN_BYTES:
            beyond.append(needed[-1])
    median = statistics.median(needed)
    squares = [(error - median) ** 2 for error in needed if error >= median]
    deviation = math.sqrt(statistics.fmean(squares))
    quantile = statistics.NormalDist().inv_cdf
    share = quantile(SHARE)
    sure = quantile(CONFIDENCE)
    a = 1 - sure**2 / (2 * (len(rows) - 1))
    b = share**2 - sure**2 / len(rows)
    limit = median + (share + math.sqrt(share**2 - a * b)) / a * deviation
    return math.ceil(1000 * max(limit, 0.0, *beyond)) / 1000


def left_out_in_turn(rows: Iterable[Row]) -> Tuple[int, int]:
    """Numbers of rows of covered kinds: those above the bound that the other rows of their kind
    make, and all."""
    above = 0
    count = 0
    for key, some in _covered(rows).items():
        for index, row in enumerate(some):
            bound = _kind(key, some[:index] + some[index + 1 :]).upper_bound(row.process_peak_bytes)
            above += row.measured.process_peak_bytes > bound
        count += len(some)
    return above, count


Key = Tuple[str, str]  # (dtype, policy)


def _covered(rows: Iterable[Row]) -> Dict[Key, List[Row]]:
    """The rows of each kind that has enough of them to predict the error of the next one."""
    kinds: Dict[Key, List[Row]] = {}
    for row in rows:
        job = row.measured.job
        kinds.setdefault((job.unet.dtype, job.policy), []).append(row)
    return {
        key: some
        for key, some in kinds.items()
        if len(some) >= LEAST_RECORDS and any(row.measured.held_out for row in some)
    }


def _kind(key: Key, rows: Sequence[Row]) -> Kind:
    held_out = [row for row in rows if row.measured.held_out]
    dtype, policy = key
    return Kind(
        dtype=dtype,
        policy=policy,
        versions=tuple(sorted({row.measured.version for row in rows})),
        hosts=tuple(sorted({row.measured.host for row in rows})),
        instructions=tuple(sorted({row.measured.instructions for row in rows})),
        threads=tuple(sorted({row.measured.job.threads for row in rows})),
        networks=tuple(sorted({row.measured.job.unet.network for row in rows})),
        records=len(rows),
        held_out=len(held_out),
        allocator_peak=_shipped(spread(held_out, "allocator_peak")),
        process_peak=_shipped(spread(held_out, "process_peak")),
        step_s=_shipped(spread(held_out, "step_s")),
        margin_share=margin_share(rows),
        margin_bytes=MARGIN_BYTES,
    )


def _shipped(bound: Optional[Bound]) -> Optional[Bound]:
    if bound is None:
        return None
    return Bound(round(bound.median, 4), round(abs(bound.worst), 4))


# --- Tables and the page ---

VALIDATION_HEAD = """\
# The estimator against measured steps

Made by `python -m records.tables --records records --page FILE` from records/memory (`bench
validate`) and the code as it stands. Errors are shares of the measured value: +2% is predicted
too high. A group of runs shows the median size and the worst error, and how far the upper bound
is above the process's peak, the mean and the least; it is "wide", of the largest margin, if a
kind has too few records to predict the next error. The margin of an upper bound is that of all
records of its kind: of a dtype and a policy.
"""


def error_table(rows: Sequence[Row]) -> Table:
    """Median (of the absolute errors) and worst error of every figure, for all rows and by host,
    engine and kind."""
    groups: Dict[Tuple[str, str], List[Row]] = {}
    for row in rows:
        job = row.measured.job
        about = f"{row.measured.instructions}, {job.engine}, {job.unet.dtype}, {job.policy}"
        groups.setdefault((row.measured.host, about), []).append(row)
    cells = []
    for group, some in [(("all", ""), rows), *sorted(groups.items())]:
        allocator, process, seconds = (_spread_text(some, figure) for figure in FIGURES)
        above = _errors(some, "upper_bound")
        mean = "-"
        if above:
            mean = f"{signed(statistics.fmean(above))} ({signed(min(above))})"
        if not any(row.covered for row in some):
            mean += ", wide"
        cells.append((*group, str(len(some)), allocator, process, mean, seconds))
    columns = (
        "host",
        "instruction set, engine, dtype, policy",
        "runs",
        "allocator peak",
        "process peak",
        "upper bound, mean (least)",
        "seconds a step",
    )
    return Table(columns, cells, names=2)


def _spread_text(rows: Iterable[Row], figure: str) -> str:
    bound = spread(rows, figure)
    return f"{bound.median:.1%}, worst {signed(bound.worst)}" if bound else "-"


def signed(share: Optional[float]) -> str:
    """For reading, such as "+6.3%"; "-" if it is not known."""
    return _cell(share, "+.1%")


def _cell(figure: Optional[float], form: str) -> str:
    return "-" if figure is None or math.isnan(figure) else f"{figure:{form}}"


def page(measured: Sequence[Measured], rows: Sequence[Row]) -> List[str]:
    """The lines of the validation page. `rows` are those of `compare_steps`; the steps include
    failures."""
    row_of = {row.measured: row for row in rows}
    lines = [*VALIDATION_HEAD.splitlines(), "", *error_table(rows).markdown(), ""]
    above, count = left_out_in_turn(rows)
    beyond = f"{above} of {count} records are above the bound that the others make"
    lines.append(f"Left out of its kind in turn, {beyond}.")
    columns = (
        "configuration",
        "allocator, GiB",
        "error",
        "process, GiB",
        "error",
        "bound above",
        "s a step",
        "error",
    )
    for host, instructions in sorted({(step.host, step.instructions) for step in measured}):
        own = [step for step in measured if (step.host, step.instructions) == (host, instructions)]
        own.sort(key=lambda step: (bool(step.failure), not step.held_out))
        about = {f"{step.version}, {step.job.threads} threads, {step.date}" for step in own}
        cells = [_cells(step, row_of.get(step)) for step in own]
        table = Table((*columns, ""), cells, title="; ".join(sorted(about)))
        lines += ["", f"## {host}, {instructions}", "", *table.markdown()]
    return lines


def _cells(step: Measured, row: Optional[Row]) -> Sequence[str]:
    """A configuration, and its errors; it has no row if it failed."""
    name = step.job.describe()
    if step.job.unet.up == "upsampling":
        name += ", upsampling"
    if row is None:
        return (name, *7 * ["-"], f"not measured: {step.failure}")
    allocator, process, bound, seconds = map(signed, row.errors.values())
    allocator_gib = None
    if step.allocator_peak_bytes is not None:
        allocator_gib = step.allocator_peak_bytes / GIB
    return (
        name,
        _cell(allocator_gib, ".3f"),
        allocator,
        _cell(step.process_peak_bytes / GIB, ".3f"),
        process,
        bound,
        _cell(step.step_s, ".2f"),
        seconds,
        "" if row.covered else "wide",
    )
