"""The estimator against measured steps: which are measured, errors of predictions, kinds and a page
made of them.

rows = compare_steps(measured, lambda step: estimate(step.job, constants))
accuracy_json(digest(rows)), page(measured, rows)
"""

import dataclasses
import json
import math
import statistics
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

from memory_estimator.accuracy import SCHEMA, Accuracy, Bound, Kind
from memory_estimator.common.table import Table
from memory_estimator.common.units import GIB
from memory_estimator.estimate import Estimate
from memory_estimator.host import instruction_set
from memory_estimator.installed import ENGINES, engine_version
from memory_estimator.job import AUTO, Job
from models.config import DTYPES, POLICIES, UNetConfig

FITTED_VOXELS = (
    96**3
)  # constants are fitted to volumes of at most this size; errors are those of larger ones alone

MARGIN_BYTES = 92 * 2**20
"""The least margin of an upper bound: the most that a runtime held beyond the prediction in small
steps, in which that is most of the error: 89 MiB in one of 1.4 GiB."""

SHARE, CONFIDENCE = (
    0.99,
    0.90,
)  # a bound is to hold for this share of the steps like its records, so surely
LEAST_RECORDS = 8  # of a kind: fewer steps do not show the spread of their errors
FIGURES = (
    "allocator_peak",
    "process_peak",
    "step_s",
)  # that have errors: fields of `Kind`, keys of `Row.errors`

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
    """Every job that `bench validate` measures on a host with so many threads, some
    ON_EVERY_ENGINE."""
    return tuple(
        Job(
            UNetConfig(**unet, dtype=dtype, policy=policy),
            shape,
            engine=engine,
            threads=threads,
            **more,
        )
        for unet, shape, more in NETWORKS
        for dtype in DTYPES
        for policy in POLICIES
        for engine in (engines if shape in ON_EVERY_ENGINE else engines[:1])
    )


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
    instructions: str = ""  # the instruction set of own operations there
    version: str = ""  # of the engine, as of `engine_version`
    date: str = ""

    @property
    def held_out(self) -> bool:
        """Whether it is larger than any step that constants may be fitted to."""
        return math.prod(self.job.shape) > FITTED_VOXELS


def request_for(job: Job, **more: Any) -> Dict[str, Any]:
    """The request that `bench` makes of a job, which its record begins with, with `more` in it."""
    request = {
        "shape": list(job.shape),
        "batch": job.batch,
        "micro_batch": job.micro,
        "optimizer": job.optimizer,
    }
    request.update(unet=dataclasses.asdict(job.unet), engine=job.engine, threads=job.threads)
    return {**request, **more}


def job_of_record(record: Mapping[str, Any]) -> Optional[Job]:
    """A record's job, on the engine that really ran; None for TensorFlow without oneDNN, which has
    no constants."""
    engine, name = record["engine"], record.get("engine_name", "")
    if "no oneDNN" in name:
        return None
    if engine in (None, AUTO):
        engine = "itex" if "ITEX" in name else "stock"
    sizes = {name: record[name] for name in ("batch", "micro_batch", "optimizer")}
    threads = int(record["threads"]["TF_NUM_INTRAOP_THREADS"])
    job = Job(
        UNetConfig(**record["unet"]),
        tuple(record["shape"]),
        **sizes,
        engine=engine,
        threads=threads,
    )
    by_rule = dataclasses.replace(job, micro_batch=0)  # so that equal jobs compare equal
    return by_rule if by_rule.micro == job.micro else job


def instructions_of(record: Mapping[str, Any]) -> str:
    """The instruction set of own operations in a record; "" if TensorFlow's layers computed.
    Records before 2026-11-27, all of own operations, do not have it, nor all flags: a CPU with
    AVX512_VNNI has these three."""
    host = record["host"]
    if "instructions" in host:
        return host["instructions"]
    implied = ("avx512bw", "avx512dq", "avx512vl") if "avx512_vnni" in host["isa"] else ()
    return instruction_set((*host["isa"], *implied), host["cpu"]) or "avx2"


def measured_from(record: Mapping[str, Any]) -> Optional[Measured]:
    """A record's step; None on an engine without constants, and by layers. A record may lack
    seconds, if they were disturbed."""
    job, host, instructions = job_of_record(record), record["host"], instructions_of(record)
    if not job or not instructions:
        return None
    about = {"host": host["cpu"], "isa": tuple(host["isa"]), "date": record.get("date", "")}
    about["instructions"] = instructions
    about["version"] = engine_version(job.engine, record.get("versions", {}))
    if record.get("error"):
        return Measured(job, failure=record["error"], **about)
    peaks = {name: record[name] for name in ("process_peak_bytes", "allocator_peak_bytes")}
    return Measured(job, record.get("step_s") or math.nan, **peaks, **about)


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
    for step in (step for step in measured if not step.failure):
        predicted, allocator, process = (
            predict(step),
            step.allocator_peak_bytes,
            step.process_peak_bytes,
        )
        errors = {
            "allocator_peak": None
            if allocator is None
            else predicted.allocator_peak_bytes / allocator - 1,
            "process_peak": predicted.process_peak_bytes / process - 1,
            "upper_bound": predicted.upper_bound_bytes / process - 1,
            "step_s": None if math.isnan(step.step_s) else predicted.step_s / step.step_s - 1,
        }
        rows.append(Row(step, predicted.process_peak_bytes, predicted.kind is not None, errors))
    return rows


def spread(rows: Iterable[Row], figure: str) -> Optional[Bound]:
    """The size of a figure's errors over `rows`, the worst with its sign; None if none is known."""
    known = [row.errors[figure] for row in rows if row.errors[figure] is not None]
    return Bound(statistics.median(map(abs, known)), max(known, key=abs)) if known else None


# --- Kinds of steps, made of rows ---


def digest(rows: Iterable[Row]) -> Accuracy:
    """The accuracy of each kind: errors over the records that no constant was fitted to, and the
    margin of the upper bound from all of them. Kinds with fewer than LEAST_RECORDS are left out: no
    kind covers such jobs."""
    return Accuracy(tuple(_kind(key, some) for key, some in sorted(_covered(rows).items())))


def accuracy_json(accuracy: Accuracy) -> bytes:
    return (
        json.dumps({"schema": SCHEMA, "kinds": dataclasses.asdict(accuracy)["kinds"]}, indent=1)
        + "\n"
    ).encode()


def margin_share(rows: Sequence[Row]) -> float:
    """The share of a predicted peak to be added, to a tenth of a per cent: so much that no peak of
    these rows is above both that and MARGIN_BYTES, and that SHARE of all such steps are below with
    CONFIDENCE. That is the one-sided tolerance limit of a normal distribution (NIST/SEMATECH
    Handbook, 7.2.6.3) around the median; its spread is that of the rows above the median, as a peak
    that is predicted too high harms no bound."""
    needed = [row.measured.process_peak_bytes / row.process_peak_bytes - 1 for row in rows]
    beyond = [
        row.measured.process_peak_bytes > row.process_peak_bytes + MARGIN_BYTES for row in rows
    ]
    median, quantile = statistics.median(needed), statistics.NormalDist().inv_cdf
    deviation = math.sqrt(
        statistics.fmean((error - median) ** 2 for error in needed if error >= median)
    )
    share, sure = quantile(SHARE), quantile(CONFIDENCE)
    a, b = 1 - sure**2 / (2 * (len(rows) - 1)), share**2 - sure**2 / len(rows)
    limit = median + (share + math.sqrt(share**2 - a * b)) / a * deviation
    return (
        math.ceil(
            1000
            * max(limit, 0.0, *(error for error, is_beyond in zip(needed, beyond) if is_beyond))
        )
        / 1000
    )


def left_out_in_turn(rows: Iterable[Row]) -> Tuple[int, int]:
    """Numbers of rows of covered kinds: those above the bound that the other rows of their kind
    make, and all."""
    above = count = 0
    for key, some in _covered(rows).items():
        for place, row in enumerate(some):
            bound = _kind(key, some[:place] + some[place + 1 :]).upper_bound(row.process_peak_bytes)
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
    return Kind(
        *key,
        versions=tuple(sorted({row.measured.version for row in rows})),
        hosts=tuple(sorted({row.measured.host for row in rows})),
        instructions=tuple(sorted({row.measured.instructions for row in rows})),
        threads=tuple(sorted({row.measured.job.threads for row in rows})),
        networks=tuple(sorted({row.measured.job.unet.network for row in rows})),
        records=len(rows),
        held_out=len(held_out),
        **{figure: _shipped(spread(held_out, figure)) for figure in FIGURES},
        margin_share=margin_share(rows),
        margin_bytes=MARGIN_BYTES,
    )


def _shipped(bound: Optional[Bound]) -> Optional[Bound]:
    return bound and Bound(round(bound.median, 4), round(abs(bound.worst), 4))


# --- Tables and the page ---

VALIDATION_HEAD = """\
# The estimator against measured steps

Made by `./run.sh bench tables --records records --page FILE` from records/memory (`bench validate`) and the code as it
stands. Errors are shares of the measured value: +2% is predicted too high. A group of runs shows the median size and
the worst error, and how far the upper bound is above the process's peak, the mean and the least; it is "wide", of the
largest margin, if a kind has too few records to predict the next error. The margin of an upper bound is that of all
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
        spreads = [spread(some, figure) for figure in FIGURES]
        errors = [
            f"{bound.median:.1%}, worst {signed(bound.worst)}" if bound else "-"
            for bound in spreads
        ]
        above = [row.errors["upper_bound"] for row in some]
        mean = f"{signed(statistics.fmean(above))} ({signed(min(above))})" if above else "-"
        mean += "" if any(row.covered for row in some) else ", wide"
        cells.append((*group, str(len(some)), *errors[:2], mean, errors[2]))
    columns = (
        "host",
        "instruction set, engine, dtype, policy",
        "runs",
        "allocator peak",
        "process peak",
    )
    return Table((*columns, "upper bound, mean (least)", "seconds a step"), cells, names=2)


def signed(share: Optional[float]) -> str:
    """For reading, such as "+6.3%"; "-" if it is not known."""
    return "-" if share is None or math.isnan(share) else f"{share:+.1%}"


def page(measured: Sequence[Measured], rows: Sequence[Row]) -> List[str]:
    """The lines of the validation page. `rows` are those of `compare_steps`; the steps include
    failures."""
    (above, count), row_of = left_out_in_turn(rows), {row.measured: row for row in rows}
    lines = [*VALIDATION_HEAD.splitlines(), "", *error_table(rows).markdown(), ""]
    lines.append(
        f"Left out of its kind in turn, {above} of {count} records are above the bound that the others make."
    )
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
        about = "; ".join(
            sorted({f"{step.version}, {step.job.threads} threads, {step.date}" for step in own})
        )
        cells = [_cells(step, row_of.get(step)) for step in own]
        lines += [
            "",
            f"## {host}, {instructions}",
            "",
            *Table((*columns, ""), cells, title=about).markdown(),
        ]
    return lines


def _cells(step: Measured, row: Optional[Row]) -> Sequence[str]:
    """A configuration, and its errors; it has no row if it failed."""
    name = f"{step.job.describe()}{', upsampling' * (step.job.unet.up == 'upsampling')}"
    if row is None:
        return (name, *7 * ["-"], f"not measured: {step.failure}")
    allocator, process, bound, seconds = map(signed, row.errors.values())
    step_s = "-" if math.isnan(step.step_s) else f"{step.step_s:.2f}"
    peaks = (step.allocator_peak_bytes, step.process_peak_bytes)
    sizes = ["-" if size is None else f"{size / GIB:.3f}" for size in peaks]
    return (
        name,
        sizes[0],
        allocator,
        sizes[1],
        process,
        bound,
        step_s,
        seconds,
        "" if row.covered else "wide",
    )
