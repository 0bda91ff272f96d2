"""The estimator held against measured steps: what `bench memory` recorded, what is predicted of the same jobs.

    python -m memory_estimator.validation records/memory.jsonl > memory_estimator/accuracy.json

works out anew how far predictions are off, and the upper bound's margin: after `bench validate`, and after changes.
"""

import functools
import json
import math
import statistics
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from memory_estimator.calibration import shipped_constants
from memory_estimator.estimate import Accuracy, Bound, estimate
from memory_estimator.files import read_records
from memory_estimator.job import AUTO, Job
from memory_estimator.step.onednn import Kernels, highest_isa
from models.config import UNetConfig

PUBLISHED = Path(__file__).resolve().parents[1] / "records" / "memory.jsonl"  # which may not be there

FITTED_VOXELS = 96**3
"""Constants of a host are fitted to volumes of at most this size; errors are those of larger ones alone."""

TARGETS = {
    "allocator peak, median error": 0.01,
    "allocator peak, worst error": 0.03,
    "process peak, median error": 0.02,
    "process peak, worst error": 0.05,
    "peaks above their upper bound": 0,
    "upper bound above the peak, mean": 0.06,
    "seconds a step, median error": 0.08,
    "seconds a step, worst error": 0.20,
}
"""What is demanded of the errors of held-out steps: the most that each may be."""

PROCESS_FLOOR_BYTES = 150 * 2**20
"""A process's peak that is off by less is no miss: runtimes differ by as much from host to host."""

DISTURBED_SPREAD = 0.10
"""Timed steps that lie further apart than this share of their median were disturbed by something."""

MARGIN_BYTES = 64 * 2**20
"""The fixed part of the upper bound's margin: what a runtime holds more or less from start to start."""

RESERVE_SHARE = 0.03
"""Added to what the fitted shapes ask for: half of the 6 % that upper bounds may lie above the peaks on average."""


@dataclass(frozen=True)
class Measured:
    """One measured training step."""

    job: Job
    step_s: float = math.nan
    process_peak_bytes: int = 0
    allocator_peak_bytes: Optional[int] = None  # None where the allocator keeps no count
    failure: str = ""  # what went wrong instead; nothing was measured then
    host: str = ""  # the CPU's name
    isa: Tuple[str, ...] = ()  # its instruction sets, which choose the constants to predict with
    date: str = ""
    step_spread: float = 0.0  # (longest - shortest) / median of the timed steps; 0 where a single one was timed

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
    process_peak_bytes: int  # predicted
    allocator_error: Optional[float]
    process_error: float
    slack: float  # how far the upper bound lies above the measured peak; negative is a broken promise
    step_error: float

    @property
    def is_beyond_floor(self) -> bool:
        """Whether the process's peak is off by more than runtimes differ."""
        return abs(self.process_peak_bytes - self.measured.process_peak_bytes) > PROCESS_FLOOR_BYTES

    @property
    def misses(self) -> Tuple[str, ...]:
        """Names of the figures that are further off than they may be."""
        wrong = {
            "allocator": abs(self.allocator_error or 0) > TARGETS["allocator peak, worst error"],
            "process": abs(self.process_error) > TARGETS["process peak, worst error"] and self.is_beyond_floor,
            "upper bound": self.slack < 0,
            "time": abs(self.step_error) > TARGETS["seconds a step, worst error"],
        }
        return tuple(name for name, is_wrong in wrong.items() if is_wrong)


class Spread(NamedTuple):
    """How large some errors are: the median of their sizes, the largest one and the mean with their signs."""

    count: int
    median: float
    worst: float
    mean: float


class Target(NamedTuple):
    """The most that a figure may be over all held-out steps, and what was found: NaN, which meets nothing, of none."""

    name: str
    demanded: float
    found: float

    @property
    def met(self) -> bool:
        return self.found <= self.demanded

    @property
    def is_share(self) -> bool:
        """False for a count."""
        return self.demanded != 0


def read_measured(path: Path) -> Tuple[Measured, ...]:
    """The measured steps of a record file, one a job and host: the newest, in the place of the oldest. Lines of an
    engine that the estimator knows nothing of are passed over. Raises ValueError for a missing file, and for a line
    that is damaged or of another schema."""

    def measured_from(record: Mapping[str, Any]) -> Optional[Measured]:
        if not has_known_engine(record):
            return None
        host = record["host"]
        about = {"host": host["cpu"], "isa": tuple(host["isa"]), "date": record.get("date", "")}
        if record.get("error"):
            return Measured(job_from(record), failure=record["error"], **about)
        step_s = record["step_s"]
        shortest, longest = (record.get(f"step_s_{end}", step_s) for end in ("min", "max"))
        peaks = {name: record[name] for name in ("process_peak_bytes", "allocator_peak_bytes")}
        return Measured(job_from(record), step_s=step_s, step_spread=(longest - shortest) / step_s, **peaks, **about)

    read = read_records(path, "memory", measured_from)
    return tuple({(one.host, one.isa, one.job): one for one in read}.values())


def has_known_engine(record: Mapping[str, Any]) -> bool:
    """Whether the estimator predicts for the engine of a record: any but TensorFlow without oneDNN."""
    return record.get("engine") != "stock-no-onednn" and "no oneDNN" not in record.get("engine_name", "")


def job_from(record: Mapping[str, Any]) -> Job:
    """The job that a record measured, on the engine that really ran."""
    engine = record["engine"]
    if engine in (None, AUTO):
        engine = "itex" if "ITEX" in record["engine_name"] else "stock"
    job = Job(
        UNetConfig(**{"policy": record.get("policy", "speed"), **record["unet"]}),
        shape=tuple(record["shape"]),
        batch=record["batch"],
        micro_batch=record.get("micro_batch", record["batch"]),  # older ones computed the whole batch at once
        optimizer=record["optimizer"],
        engine=engine,
        threads=int(record["threads"]["TF_NUM_INTRAOP_THREADS"]),
    )
    by_rule = replace(job, micro_batch=0)  # so that equal jobs compare equal
    return by_rule if by_rule.micro == job.micro else job


def compare(measured: Iterable[Measured], predict: Callable[[Measured], Any]) -> List[Row]:
    """A row for every step that was measured; `predict` gives the Estimate of its job. Failures are left out."""
    rows = []
    for one in (one for one in measured if not one.failure):
        found, allocator, process = predict(one), one.allocator_peak_bytes, one.process_peak_bytes
        peak_error = None if allocator is None else found.allocator_peak_bytes / allocator - 1
        errors = (found.process_peak_bytes / process - 1, found.upper_bound_bytes / process - 1)
        rows.append(Row(one, found.process_peak_bytes, peak_error, *errors, found.step_s / one.step_s - 1))
    return rows


def spread(errors: Iterable[Optional[float]]) -> Spread:
    """Of the errors that are there; all NaN of none."""
    there = [error for error in errors if error is not None]
    if not there:
        return Spread(0, math.nan, math.nan, math.nan)
    return Spread(len(there), statistics.median(map(abs, there)), max(there, key=abs), statistics.fmean(there))


def spreads(rows: Sequence[Row]) -> Dict[str, Spread]:
    """The spread of every figure's errors over `rows`, by the figure's name in tables."""
    return {
        "allocator peak": spread(row.allocator_error for row in rows),
        "process peak": spread(row.process_error for row in rows),
        "upper bound": spread(row.slack for row in rows),
        "seconds a step": spread(row.step_error for row in rows),
    }


def targets(rows: Sequence[Row]) -> Tuple[Target, ...]:
    """What is demanded of the errors over `rows`, each beside what was found. Worst ones are sizes, without a sign."""
    allocator, process, bound, step = spreads(rows).values()
    beyond = max((abs(row.process_error) for row in rows if row.is_beyond_floor), default=0.0) if rows else math.nan
    exceeded = sum(row.slack < 0 for row in rows) if rows else math.nan
    found = (allocator.median, abs(allocator.worst), process.median, beyond, exceeded, bound.mean, step.median)
    return tuple(Target(*demanded, one) for demanded, one in zip(TARGETS.items(), (*found, abs(step.worst))))


def digest(rows: Sequence[Row], record: str) -> Accuracy:
    """Errors over the rows that no constant was fitted to, and a margin for upper bounds, made without these rows. The
    margin is the least, in steps of half a per cent, that leaves no peak of the fitted shapes above its bound, and
    RESERVE_SHARE. Whether it holds is for the held-out rows to say (`targets`). Raises ValueError where the record
    lacks either."""
    held_out = [row for row in rows if row.measured.held_out]
    fitted = [row for row in rows if not row.measured.held_out]
    for some, what in ((held_out, "above"), (fitted, "of at most")):
        if not some:
            raise ValueError(
                f"record {record} must hold steps on volumes {what} {FITTED_VOXELS} voxels, got none; "
                "let `bench validate` measure its whole list"
            )
    bounds = (Bound(round(one.median, 4), round(abs(one.worst), 4)) for one in spreads(held_out).values())
    allocator, process, _, step = bounds
    excess = max((row.measured.process_peak_bytes - MARGIN_BYTES) / row.process_peak_bytes - 1 for row in fitted)
    margin_share = round(max(0, math.ceil(excess * 200)) / 200 + RESERVE_SHARE, 4)
    return Accuracy(record, len(held_out), allocator, process, step, margin_share, MARGIN_BYTES)


def main(argv: Optional[List[str]] = None) -> int:
    """Print the digest of a record. Exit codes: 0 done, 2 bad input."""
    names = sys.argv[1:] if argv is None else argv
    if len(names) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    constants = functools.lru_cache(maxsize=None)(lambda isa: shipped_constants(Kernels(highest_isa(isa))))
    unknown = Accuracy("", 0, *3 * (Bound(0.0, 0.0),), 0.0, 0)  # stands in while the errors themselves are computed
    try:
        rows = compare(read_measured(Path(names[0])), lambda one: estimate(one.job, constants(one.isa), unknown))
        print(json.dumps(asdict(digest(rows, names[0])), indent=1))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
