"""The estimator held against measured steps: what `bench memory` recorded, what is predicted of the same jobs.

Records are JSON, one a line, as `cpu3d.bench.record` writes them.
"""

import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

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

PROCESS_FLOOR_BYTES = 150 * 2**20
"""A process's peak that is off by less is no miss: runtimes differ by as much from host to host."""


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
    def slack(self) -> float:
        """How far the upper bound lies above the measured peak; negative is a broken promise."""
        return self.upper_bound_bytes / self.measured.process_peak_bytes - 1

    @property
    def step_error(self) -> float:
        return self.step_s / self.measured.step_s - 1

    @property
    def misses(self) -> Tuple[str, ...]:
        """Names of the figures that are further off than they may be."""
        off_bytes = abs(self.process_peak_bytes - self.measured.process_peak_bytes)
        wrong = {
            "allocator": abs(self.allocator_error or 0) > WORST_ALLOCATOR,
            "process": abs(self.process_error) > WORST_PROCESS and off_bytes > PROCESS_FLOOR_BYTES,
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


def read_measured(path: Path) -> Tuple[Measured, ...]:
    """The measured steps of a record file, in its order. Raises ValueError for a missing or foreign one."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"record file {path} must exist, found none; make it with `bench validate --record {path}`")
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = json.loads(line)
            schema, kind = record["schema"], record["kind"]
            if schema == SCHEMA and kind == KIND:
                found.append(measured_from(record))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"record {path}:{number} must be a measured step as JSON, got {error!r}; remove the line"
            ) from None
        if schema != SCHEMA:
            raise ValueError(f"record {path}:{number} must have schema {SCHEMA}, got {schema}; measure again")
    return tuple(found)


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
        **about,
    )


def job_from(record: Mapping[str, Any]) -> Job:
    """The job that a record measured, on the engine that really ran."""
    engine = record["engine"]
    if engine == "auto":
        engine = "itex" if "ITEX" in record["engine_name"] else "stock"
    return Job(
        UNetConfig(**record["unet"]),
        shape=tuple(record["shape"]),
        batch=record["batch"],
        optimizer=record["optimizer"],
        engine=engine,
        policy=record.get("policy", "speed"),
        threads=int(record["threads"]["TF_NUM_INTRAOP_THREADS"]),
    )


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
