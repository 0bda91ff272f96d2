"""The estimator held against measured steps: what `bench validate` recorded, what is predicted of the same jobs.

    python -m memory_estimator.validation records/memory > memory_estimator/accuracy.json

works out anew, kind by kind of records, how far predictions are off, and the upper bound's margin: after a record has
come in, and after changes.
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
from memory_estimator.estimate import Accuracy, Bound, Estimate, Kind, estimate, family_of
from memory_estimator.files import read_records
from memory_estimator.job import AUTO, Job, engine_version
from memory_estimator.step.onednn import USUAL, Kernels, highest_isa
from models.config import POLICIES, UNetConfig

PUBLISHED = Path(__file__).resolve().parents[1] / "records" / "memory"
"""The folder of published records, a file a host; it may not be there."""

FITTED_VOXELS = 96**3
"""Constants of a host are fitted to volumes of at most this size; errors are those of larger ones alone."""

LIMITS = {"allocator peak": (0.005, 0.02), "process peak": (0.02, 0.05), "seconds a step": (0.05, 0.20)}
AMX_LIMITS = {**LIMITS, "allocator peak": (0.01, 0.03)}
"""What is demanded of the errors over all of a host's records: the most that their median and the worst may be. Of AMX
the kernels' buffers are others."""

MOST_SLACK = 0.06  # what the upper bounds may lie above the peaks, on the mean

DISTURBED_SPREAD = 0.10
"""Timed steps that lie further apart than this share of their median were disturbed by something."""

MARGIN_BYTES = 84 * 2**20
"""The least margin of an upper bound: the most that a runtime was seen to hold beyond what is predicted of small steps,
82 MiB in one of 1.2 GiB, where that outweighs all else."""

SHARE, CONFIDENCE = 0.99, 0.90
"""A kind's bound is to hold for this share of the steps that are like its records, with this confidence."""

LEAST_RECORDS = 8
"""Of a kind: from fewer steps the spread of their errors is not told."""


@dataclass(frozen=True)
class Measured:
    """One measured training step."""

    job: Job
    step_s: float = math.nan
    process_peak_bytes: int = 0
    allocator_peak_bytes: Optional[int] = None  # None where the allocator keeps no count
    failure: str = ""  # what went wrong instead; nothing was measured then
    host: str = ""  # the CPU's name
    isa: Tuple[str, ...] = ()  # its instruction sets
    kernels: Kernels = USUAL  # that oneDNN took there, which choose the constants to predict with
    version: str = ""  # of the engine, as of `job.engine_version`
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
    """A measured step beside what was predicted of it."""

    measured: Measured
    process_peak_bytes: int  # predicted
    isa: str  # of the kernels that it was predicted with
    covered: bool
    """Whether a kind of records covers it; else its upper bound is wide."""
    errors: Dict[str, Optional[float]]
    """Of "allocator peak", "process peak", "upper bound" and "seconds a step": signed shares of what was measured, None
    where that was not recorded. The upper bound's is how far it lies above the measured peak."""

    @property
    def limits(self) -> Dict[str, Tuple[float, float]]:
        """What is demanded on a host with these kernels."""
        return AMX_LIMITS if self.isa == "avx512_core_amx" else LIMITS

    @property
    def slack(self) -> float:
        """How far the upper bound lies above the measured peak; negative is a broken promise."""
        return self.errors["upper bound"]

    @property
    def misses(self) -> Tuple[str, ...]:
        """Names of the figures that are further off than they may be."""
        wrong = [name for name, (_, worst) in self.limits.items() if abs(self.errors[name] or 0) > worst]
        return (*wrong, *["upper bound"] * (self.slack < 0))


class Spread(NamedTuple):
    """How large some errors are: the median of their sizes, the largest one and the mean with their signs."""

    count: int
    median: float
    worst: float
    mean: float


class Target(NamedTuple):
    """The most that a figure may be over some steps, 0 for a count, and what was found: NaN of none."""

    name: str
    demanded: float
    found: float

    @property
    def met(self) -> bool:
        return self.found <= self.demanded or math.isnan(self.found)


def read_measured(path: Path) -> Tuple[Measured, ...]:
    """The measured steps of a record file, or of all of a folder, one a job and host: the newest, in the place of the
    oldest. Lines of an engine that the estimator knows nothing of are passed over. A record may lack the seconds, where
    they were disturbed. Raises ValueError for a missing file, and for a line that is damaged or of another schema."""

    def measured_from(record: Mapping[str, Any]) -> Optional[Measured]:
        if not has_known_engine(record):
            return None
        job, host = job_from(record), record["host"]
        about = {"host": host["cpu"], "isa": tuple(host["isa"]), "date": record.get("date", "")}
        about["kernels"] = Kernels(**host.get("kernels", {"isa": highest_isa(host["isa"])}))
        about["version"] = engine_version(job.engine, record.get("versions", {}))
        if record.get("error"):
            return Measured(job, failure=record["error"], **about)
        if record.get("step_s"):
            step_s = record["step_s"]
            shortest, longest = (record.get(f"step_s_{end}", step_s) for end in ("min", "max"))
            about.update(step_s=step_s, step_spread=(longest - shortest) / step_s)
        peaks = {name: record[name] for name in ("process_peak_bytes", "allocator_peak_bytes")}
        return Measured(job, **peaks, **about)

    files = sorted(Path(path).glob("*.jsonl")) if Path(path).is_dir() else [path]
    read = [one for file in files for one in read_records(file, "memory", measured_from)]
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
        UNetConfig(**record["unet"]),
        shape=tuple(record["shape"]),
        batch=record["batch"],
        micro_batch=record.get("micro_batch", record["batch"]),  # older ones computed the whole batch at once
        optimizer=record["optimizer"],
        engine=engine,
        threads=int(record["threads"]["TF_NUM_INTRAOP_THREADS"]),
    )
    by_rule = replace(job, micro_batch=0)  # so that equal jobs compare equal
    return by_rule if by_rule.micro == job.micro else job


def compare(measured: Iterable[Measured], predict: Callable[[Measured], Estimate]) -> List[Row]:
    """A row for every step that was measured; `predict` gives the estimate of its job. Failures are left out."""
    rows = []
    for one in (one for one in measured if not one.failure):
        found, allocator, process = predict(one), one.allocator_peak_bytes, one.process_peak_bytes
        errors = {
            "allocator peak": None if allocator is None else found.allocator_peak_bytes / allocator - 1,
            "process peak": found.process_peak_bytes / process - 1,
            "upper bound": found.upper_bound_bytes / process - 1,
            "seconds a step": None if math.isnan(one.step_s) else found.step_s / one.step_s - 1,
        }
        how = (found.process_peak_bytes, found.constants.kernels.isa, found.kind is not None)
        rows.append(Row(one, *how, errors))
    return rows


def predicted(one: Measured, accuracy: Optional[Accuracy] = None) -> Estimate:
    """With the constants that are shipped, whatever this host's own are."""
    return estimate(one.job, _shipped(one.kernels), accuracy)


def spread(errors: Iterable[Optional[float]]) -> Spread:
    """Of the errors that are there; all NaN of none."""
    there = [error for error in errors if error is not None]
    if not there:
        return Spread(0, math.nan, math.nan, math.nan)
    return Spread(len(there), statistics.median(map(abs, there)), max(there, key=abs), statistics.fmean(there))


def spreads(rows: Sequence[Row]) -> Dict[str, Spread]:
    """The spread of every figure's errors over `rows`, by the figure's name."""
    names = ("allocator peak", "process peak", "upper bound", "seconds a step")
    return {name: spread(row.errors[name] for row in rows) for name in names}


def targets(rows: Sequence[Row]) -> Tuple[Target, ...]:
    """What is demanded of the errors over `rows`, which are of one host, each beside what was found. Worst ones are
    sizes, without a sign; the mean reserve is that of rows which some kind covers."""
    limits, found = rows[0].limits if rows else LIMITS, spreads(rows)
    errors = [
        Target(f"{name}, {of} error", most, value)
        for name, both in limits.items()
        for of, most, value in zip(("median", "worst"), both, (found[name].median, abs(found[name].worst)))
    ]
    exceeded = sum(row.slack < 0 for row in rows) if rows else math.nan
    slack = spread(row.slack for row in rows if row.covered).mean
    above = Target("upper bound above the peak, mean", MOST_SLACK, slack)
    return (*errors, Target("peaks above their upper bound", 0, exceeded), above)


_shipped = functools.lru_cache(maxsize=None)(shipped_constants)


# --- Accuracy by kind ---


def digest(rows: Iterable[Row]) -> Accuracy:
    """What the records of each kind say: errors over those that no constant was fitted to, and the margin of the upper
    bound from all of them. Kinds with fewer than LEAST_RECORDS are left out: nothing covers such jobs."""
    return Accuracy(tuple(_kind(key, some) for key, some in sorted(by_kind(rows).items()) if covers(some)))


Key = Tuple[str, str, str, str]


def by_kind(rows: Iterable[Row]) -> Dict[Key, List[Row]]:
    """(engine, version, dtype, family of kernels) -> its rows."""
    found: Dict[Key, List[Row]] = {}
    for row in rows:
        job = row.measured.job
        key = (job.engine, row.measured.version, job.unet.dtype, family_of(row.isa, job.unet.dtype))
        found.setdefault(key, []).append(row)
    return found


def covers(rows: Sequence[Row]) -> bool:
    """Whether these records of a kind are enough to say how far the next one is off."""
    return len(rows) >= LEAST_RECORDS and any(row.measured.held_out for row in rows)


def margin_share(rows: Sequence[Row]) -> float:
    """What share of a predicted peak has to be added, to a tenth of a per cent: so much that no peak of these rows lies
    above both that and MARGIN_BYTES, and that SHARE of all such steps lie below with CONFIDENCE. That is the one-sided
    tolerance limit of a normal distribution (NIST/SEMATECH Handbook, 7.2.6.3) around the median; its spread is that of
    the rows above the median, as a peak that is predicted too high harms no bound."""
    needed = [row.measured.process_peak_bytes / row.process_peak_bytes - 1 for row in rows]
    beyond = [row.measured.process_peak_bytes > row.process_peak_bytes + MARGIN_BYTES for row in rows]
    median, quantile = statistics.median(needed), statistics.NormalDist().inv_cdf
    spread = math.sqrt(statistics.fmean((one - median) ** 2 for one in needed if one >= median))
    share, sure = quantile(SHARE), quantile(CONFIDENCE)
    a, b = 1 - sure**2 / (2 * (len(rows) - 1)), share**2 - sure**2 / len(rows)
    limit = median + (share + math.sqrt(share**2 - a * b)) / a * spread
    return math.ceil(1000 * max(limit, 0.0, *(one for one, is_beyond in zip(needed, beyond) if is_beyond))) / 1000


def left_out_in_turn(rows: Iterable[Row]) -> Tuple[int, int]:
    """Of the rows of covered kinds, how many lie above the bound that the others of their kind make; and all."""
    above = count = 0
    for some in filter(covers, by_kind(rows).values()):
        for place, row in enumerate(some):
            share = margin_share(some[:place] + some[place + 1 :])
            margin = max(row.process_peak_bytes * share, MARGIN_BYTES)
            above += row.measured.process_peak_bytes > row.process_peak_bytes + margin
        count += len(some)
    return above, count


def _kind(key: Key, rows: Sequence[Row]) -> Kind:
    held_out = [row for row in rows if row.measured.held_out]
    found = spreads(held_out)
    bounds = {
        name: Bound(round(found[figure].median, 4), round(abs(found[figure].worst), 4)) if found[figure].count else None
        for name, figure in zip(("allocator_peak", "process_peak", "step_s"), LIMITS)
    }
    return Kind(
        *key,
        hosts=tuple(sorted({row.measured.host for row in rows})),
        threads=tuple(sorted({row.measured.job.threads for row in rows})),
        policies=tuple(sorted({row.measured.job.policy for row in rows}, key=POLICIES.index)),
        records=len(rows),
        held_out=len(held_out),
        **bounds,
        margin_share=margin_share(rows),
        margin_bytes=MARGIN_BYTES,
    )


def main(argv: Optional[List[str]] = None) -> int:
    """Print the digest of records, a file or a folder of them. Exit codes: 0 done, 2 bad input."""
    names = sys.argv[1:] if argv is None else argv
    if len(names) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        unbounded = Accuracy(())  # the margins are what is worked out here
        rows = compare(read_measured(Path(names[0])), lambda one: predicted(one, unbounded))
        print(json.dumps({"kinds": asdict(digest(rows))["kinds"]}, indent=1))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
