"""The estimator held against measured steps: what `bench memory` recorded, what is predicted of the same jobs.

Records are JSON, one a line, as `cpu3d.util.records` writes them.
"""

import math
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

from memory_estimator.files import parse_json
from memory_estimator.job import Job
from models.config import UNetConfig

SCHEMA = 1
KIND = "memory"

PUBLISHED = Path(__file__).resolve().parents[1] / "records" / "memory.jsonl"
"""The record that comes with the project; it may not be there."""

FITTED_VOXELS = 96**3
"""Constants of a host are fitted to volumes of at most this size; errors are told of larger ones alone."""

WORST_ALLOCATOR, WORST_PROCESS, WORST_STEP = 0.03, 0.05, 0.20
"""Errors above these are misses."""

MEDIAN_ALLOCATOR, MEDIAN_PROCESS, MEDIAN_STEP = 0.01, 0.02, 0.08
"""What is demanded of the medians."""

MEAN_SLACK = 0.06
"""How far upper bounds may lie above the measured peaks on average."""

PROCESS_FLOOR_BYTES = 150 * 2**20
"""A process's peak that is off by less is no miss: runtimes differ by as much from host to host."""

DISTURBED_SPREAD = 0.10
"""Timed steps that lie further apart than this share of their median were disturbed by something. The rule stood before
any step was measured again for it, and asks after no error."""


@dataclass(frozen=True)
class Measured:
    """One measured training step."""

    job: Job
    step_s: float = math.nan
    process_peak_bytes: int = 0
    allocator_peak_bytes: Optional[int] = None
    """None where the allocator keeps no count."""
    failure: str = ""
    """What went wrong instead; nothing was measured then."""
    host: str = ""
    """The CPU's name."""
    isa: Tuple[str, ...] = ()
    """Its instruction sets, which choose the constants to predict with."""
    date: str = ""
    step_spread: float = 0.0
    """(longest - shortest) / median of the timed steps; 0 where a single one was timed."""
    earlier: Tuple["Measured", ...] = ()
    """Measurements of the same job that this newer one stands for; the record still has them."""

    @property
    def disturbed(self) -> bool:
        """Whether the steps took too differently long to judge a predicted time by."""
        return self.step_spread > DISTURBED_SPREAD

    @property
    def held_out(self) -> bool:
        """Whether it is larger than anything that constants may be fitted to."""
        return math.prod(self.job.shape) > FITTED_VOXELS


@dataclass(frozen=True)
class Row:
    """A measured step beside what was predicted of it. Errors are signed shares of what was measured."""

    measured: Measured
    allocator_peak_bytes: int
    process_peak_bytes: int
    upper_bound_bytes: int
    step_s: float

    @property
    def allocator_error(self) -> Optional[float]:
        measured = self.measured.allocator_peak_bytes
        return None if measured is None else self.allocator_peak_bytes / measured - 1

    @property
    def process_error(self) -> float:
        return self.process_peak_bytes / self.measured.process_peak_bytes - 1

    @property
    def is_beyond_floor(self) -> bool:
        """Whether the process's peak is off by more than runtimes differ."""
        return abs(self.process_peak_bytes - self.measured.process_peak_bytes) > PROCESS_FLOOR_BYTES

    @property
    def slack(self) -> float:
        """How far the upper bound lies above the measured peak; negative is a broken promise."""
        return self.upper_bound_bytes / self.measured.process_peak_bytes - 1

    @property
    def step_error(self) -> float:
        return self.step_s / self.measured.step_s - 1

    @property
    def misses(self) -> Tuple[str, ...]:
        """Names of the figures that are further off than they may be."""
        wrong = {
            "allocator": abs(self.allocator_error or 0) > WORST_ALLOCATOR,
            "process": abs(self.process_error) > WORST_PROCESS and self.is_beyond_floor,
            "upper bound": self.slack < 0,
            "time": abs(self.step_error) > WORST_STEP,
        }
        return tuple(name for name, is_wrong in wrong.items() if is_wrong)


@dataclass(frozen=True)
class Spread:
    """How large some errors are."""

    count: int
    median: float
    """Of the absolute values."""
    worst: float
    """The largest one, with its sign."""
    mean: float
    """Of the signed values."""


@dataclass(frozen=True)
class Target:
    """What is demanded of one figure over all held-out steps, and what was found."""

    name: str
    demanded: float
    """The most that it may be."""
    found: float
    """NaN where nothing was measured, which meets nothing."""
    is_share: bool = True
    """False for a count."""

    @property
    def met(self) -> bool:
        return self.found <= self.demanded


def read_measured(path: Path) -> Tuple[Measured, ...]:
    """The measured steps of a record file, one a job and host: the newest, in the place of the oldest.

    Lines of an engine that the estimator knows nothing of are passed over. Raises ValueError for a missing file, and
    for a line that is damaged or of another schema.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"record file {path} must exist, found none; make it with `bench validate --record {path}`")
    found: Dict[Tuple[str, Tuple[str, ...], Job], Measured] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = parse_json(line)
            schema, kind = record["schema"], record["kind"]
            if schema == SCHEMA and kind == KIND and has_known_engine(record):
                one = measured_from(record)
                before = found.get((one.host, one.isa, one.job))
                if before:
                    one = replace(one, earlier=(*before.earlier, replace(before, earlier=())))
                found[one.host, one.isa, one.job] = one
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"record {path}:{number} must be a measured step as JSON, got {error!r}; remove the line"
            ) from None
        if schema != SCHEMA:
            raise ValueError(f"record {path}:{number} must have schema {SCHEMA}, got {schema}; measure again")
    return tuple(found.values())


def measured_from(record: Mapping[str, Any]) -> Measured:
    """One record, or one result of `bench memory`. Raises KeyError, TypeError or ValueError where it is none."""
    host = record["host"]
    about = {"host": host["cpu"], "isa": tuple(host["isa"]), "date": record.get("date", "")}
    if record.get("error"):
        return Measured(job_from(record), failure=record["error"], **about)
    return Measured(
        job_from(record),
        step_s=record["step_s"],
        process_peak_bytes=record["process_peak_bytes"],
        allocator_peak_bytes=record["allocator_peak_bytes"],
        step_spread=_spread_of_steps(record),
        **about,
    )


def has_known_engine(record: Mapping[str, Any]) -> bool:
    """Whether the estimator predicts for the engine of a record: any but TensorFlow without oneDNN."""
    return record.get("engine") != "stock-no-onednn" and "no oneDNN" not in record.get("engine_name", "")


def job_from(record: Mapping[str, Any]) -> Job:
    """The job that a record measured, on the engine that really ran."""
    engine = record["engine"]
    if engine == "auto":
        engine = "itex" if "ITEX" in record["engine_name"] else "stock"
    policy = record.get("policy", "speed")
    return Job(
        UNetConfig(**{"policy": policy, **record["unet"]}),
        shape=tuple(record["shape"]),
        batch=record["batch"],
        micro_batch=record.get("micro_batch", record["batch"]),  # older ones computed the whole batch at once
        optimizer=record["optimizer"],
        engine=engine,
        threads=int(record["threads"]["TF_NUM_INTRAOP_THREADS"]),
    ).canonical


def compare(measured: Iterable[Measured], predict: Callable[[Measured], Any]) -> List[Row]:
    """A row for every step that was measured; `predict` gives the Estimate of its job. Failures are left out."""
    rows = []
    for one in measured:
        if not one.failure:
            said = predict(one)
            rows.append(
                Row(one, said.allocator_peak_bytes, said.process_peak_bytes, said.upper_bound_bytes, said.step_s)
            )
    return rows


def spread(errors: Iterable[Optional[float]]) -> Spread:
    """Of the errors that are there; all NaN of none."""
    there = [error for error in errors if error is not None]
    if not there:
        return Spread(0, math.nan, math.nan, math.nan)
    return Spread(len(there), statistics.median(map(abs, there)), max(there, key=abs), statistics.fmean(there))


FIGURES: Dict[str, Callable[[Row], Optional[float]]] = {
    "allocator peak": lambda row: row.allocator_error,
    "process peak": lambda row: row.process_error,
    "upper bound": lambda row: row.slack,
    "seconds a step": lambda row: row.step_error,
}
"""What is compared, by its name in tables."""


def spreads(rows: Sequence[Row]) -> Dict[str, Spread]:
    """The spread of every figure's errors over `rows`."""
    return {name: spread(error(row) for row in rows) for name, error in FIGURES.items()}


def targets(rows: Sequence[Row]) -> Tuple[Target, ...]:
    """What is demanded of the errors over `rows`, each beside what was found. Worst ones are sizes, without a sign."""
    allocator, process, bound, step = spreads(rows).values()
    return (
        Target("allocator peak, median error", MEDIAN_ALLOCATOR, allocator.median),
        Target("allocator peak, worst error", WORST_ALLOCATOR, abs(allocator.worst)),
        Target("process peak, median error", MEDIAN_PROCESS, process.median),
        Target("process peak, worst error", WORST_PROCESS, _worst_beyond_floor(rows)),
        Target("peaks above their upper bound", 0, _exceeded(rows), is_share=False),
        Target("upper bound above the peak, mean", MEAN_SLACK, bound.mean),
        Target("seconds a step, median error", MEDIAN_STEP, step.median),
        Target("seconds a step, worst error", WORST_STEP, abs(step.worst)),
    )


# --- Private helpers ---


def _spread_of_steps(record: Mapping[str, Any]) -> float:
    shortest, longest = (record.get(f"step_s_{end}", record["step_s"]) for end in ("min", "max"))
    return (longest - shortest) / record["step_s"]


def _worst_beyond_floor(rows: Sequence[Row]) -> float:
    """The largest error of a process's peak, of those that are off by more than the floor."""
    return max((abs(row.process_error) for row in rows if row.is_beyond_floor), default=0.0) if rows else math.nan


def _exceeded(rows: Sequence[Row]) -> float:
    return sum(row.slack < 0 for row in rows) if rows else math.nan
