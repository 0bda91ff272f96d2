"""How far predictions are off, by kind of measured step, and the margin of an upper bound that follows from it.

accuracy.json holds it for the records in records/memory; `bench tables --accuracy` writes that file.
"""

import dataclasses
import json
import math
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

from memory_estimator.common.files import read_json, reason, typed
from memory_estimator.job import Job

SHIPPED = Path(__file__).with_name("accuracy.json")

FITTED_VOXELS = 96**3  # constants are fitted to volumes of at most this size; errors are those of larger ones alone

MARGIN_BYTES = 84 * 2**20
"""The least margin of an upper bound: the most that a runtime was seen to hold beyond what is predicted of small steps,
82 MiB in one of 1.2 GiB, where that outweighs all else."""

SHARE, CONFIDENCE = 0.99, 0.90  # a bound is to hold for this share of the steps like its records, so surely

LEAST_RECORDS = 8  # of a kind: fewer steps do not tell the spread of their errors

FIGURES = ("allocator_peak", "process_peak", "step_s")  # what has an error: fields of `Kind`, keys of `Row.errors`

WIDE_SHARE = 0.25  # of a peak, that the bound lies above it where there are no records at all


@dataclass(frozen=True)
class Bound:
    """Errors as shares of what was measured, without their signs."""

    median: float
    worst: float


@dataclass(frozen=True)
class Kind:
    """What held over the measured steps of one kind: which those are, how far they were off, and the margin."""

    dtype: str
    policy: str  # of memory
    versions: Tuple[str, ...]  # of the engines, as of `engine_version`
    hosts: Tuple[str, ...]  # the CPUs' names
    threads: Tuple[int, ...]  # numbers of threads that were measured
    networks: Tuple[str, ...]  # that were measured
    records: int  # measured steps, all of which the margin is made of
    held_out: int  # of them, those that no constant was fitted to, which the errors are of
    allocator_peak: Optional[Bound]
    process_peak: Optional[Bound]
    step_s: Optional[Bound]  # None where no seconds were recorded
    margin_share: float  # of the process's peak: what the upper bound lies above it
    margin_bytes: int  # the least that it does

    def upper_bound(self, process_peak_bytes: int) -> int:
        """What has to be free for a predicted peak: the peak and the margin."""
        return process_peak_bytes + max(math.ceil(process_peak_bytes * self.margin_share), self.margin_bytes)

    def __str__(self) -> str:
        """Such as "49 steps on AMD EPYC, bfloat16, policy lean, 2 threads"."""
        threads = " or ".join(map(str, self.threads))
        hosts = " and ".join(self.hosts)
        return f"{self.held_out} steps on {hosts}, {self.dtype}, policy {self.policy}, {threads} threads"


@dataclass(frozen=True)
class Accuracy:
    """How far predictions are off, by kind of record: the content of accuracy.json, and which engines are in force."""

    kinds: Tuple[Kind, ...]
    versions: Dict[str, str] = field(default_factory=dict)  # engine -> its `engine_version`; one missing is as recorded

    def covering(self, job: Job) -> Tuple[Optional[Kind], str]:
        """The kind of records that a job is one of; None, and why, where there is none."""
        for one in self.kinds:
            if (one.dtype, one.policy) == (job.unet.dtype, job.policy):
                version = self.versions.get(job.engine)
                if version and version not in one.versions:
                    return None, version
                if job.unet.network not in one.networks:
                    return None, job.unet.network
                return (one, "") if job.threads in one.threads else (None, f"{job.threads} threads")
        return None, f"{job.unet.dtype} under policy {job.policy}"

    def widest(self, process_peak_bytes: int) -> int:
        """As `Kind.upper_bound`, by the widest margin of any kind."""
        wide = math.ceil(process_peak_bytes * (1 + WIDE_SHARE))
        return max((one.upper_bound(process_peak_bytes) for one in self.kinds), default=wide)


def load_accuracy(path: Union[str, Path] = SHIPPED, versions: Optional[Mapping[str, str]] = None) -> Accuracy:
    """The shipped digest; `versions` are those of the engines, where known. Raises ValueError for a damaged file."""
    try:
        return dataclasses.replace(typed(read_json(path), Accuracy), versions=dict(versions or {}))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"accuracy {path} must be complete JSON, got {reason(error)}; restore it, or make it from the records"
        ) from None


# --- Measured steps beside their predictions ---


@dataclass(frozen=True)
class Measured:
    """One measured training step."""

    job: Job
    step_s: float = math.nan
    process_peak_bytes: int = 0
    allocator_peak_bytes: Optional[int] = None  # None where it was not recorded
    failure: str = ""  # what went wrong instead; nothing was measured then
    host: str = ""  # the CPU's name
    isa: Tuple[str, ...] = ()  # its instruction sets
    version: str = ""  # of the engine, as of `engine_version`
    date: str = ""

    @property
    def held_out(self) -> bool:
        """Whether it is larger than anything that constants may be fitted to."""
        return math.prod(self.job.shape) > FITTED_VOXELS


@dataclass(frozen=True)
class Row:
    """A measured step beside what was predicted of it."""

    measured: Measured
    process_peak_bytes: int  # predicted
    covered: bool  # whether a kind of records covers it; else its upper bound is wide
    errors: Dict[str, Optional[float]]
    """Of FIGURES and "upper_bound": signed shares of what was measured, None where that was not recorded. The upper
    bound's is how far it lies above the measured peak; negative is a broken promise."""


class Spread(NamedTuple):
    """How large some errors are: the median of their sizes, the largest one and the mean with their signs."""

    count: int
    median: float
    worst: float
    mean: float


def spread(rows: Iterable[Row], figure: str) -> Spread:
    """Of a figure's errors over `rows`, where there are any; all NaN of none."""
    known = [row.errors[figure] for row in rows if row.errors[figure] is not None]
    if not known:
        return Spread(0, math.nan, math.nan, math.nan)
    return Spread(len(known), statistics.median(map(abs, known)), max(known, key=abs), statistics.fmean(known))


# --- Kinds of steps, made of rows ---


def digest(rows: Iterable[Row]) -> Accuracy:
    """What the records of each kind say: errors over those that no constant was fitted to, and the margin of the upper
    bound from all of them. Kinds with fewer than LEAST_RECORDS are left out: nothing covers such jobs."""
    return Accuracy(tuple(_kind(key, some) for key, some in sorted(_covered(rows).items())))


def accuracy_json(accuracy: Accuracy) -> bytes:
    return (json.dumps({"kinds": dataclasses.asdict(accuracy)["kinds"]}, indent=1) + "\n").encode()


def margin_share(rows: Sequence[Row]) -> float:
    """What share of a predicted peak has to be added, to a tenth of a per cent: so much that no peak of these rows lies
    above both that and MARGIN_BYTES, and that SHARE of all such steps lie below with CONFIDENCE. That is the one-sided
    tolerance limit of a normal distribution (NIST/SEMATECH Handbook, 7.2.6.3) around the median; its spread is that of
    the rows above the median, as a peak that is predicted too high harms no bound."""
    needed = [row.measured.process_peak_bytes / row.process_peak_bytes - 1 for row in rows]
    beyond = [row.measured.process_peak_bytes > row.process_peak_bytes + MARGIN_BYTES for row in rows]
    median, quantile = statistics.median(needed), statistics.NormalDist().inv_cdf
    deviation = math.sqrt(statistics.fmean((one - median) ** 2 for one in needed if one >= median))
    share, sure = quantile(SHARE), quantile(CONFIDENCE)
    a, b = 1 - sure**2 / (2 * (len(rows) - 1)), share**2 - sure**2 / len(rows)
    limit = median + (share + math.sqrt(share**2 - a * b)) / a * deviation
    return math.ceil(1000 * max(limit, 0.0, *(one for one, is_beyond in zip(needed, beyond) if is_beyond))) / 1000


def left_out_in_turn(rows: Iterable[Row]) -> Tuple[int, int]:
    """Of the rows of covered kinds, how many lie above the bound that the others of their kind make; and all."""
    above = count = 0
    for some in _covered(rows).values():
        for place, row in enumerate(some):
            share = margin_share(some[:place] + some[place + 1 :])
            margin = max(row.process_peak_bytes * share, MARGIN_BYTES)
            above += row.measured.process_peak_bytes > row.process_peak_bytes + margin
        count += len(some)
    return above, count


Key = Tuple[str, str]  # (dtype, policy)


def _covered(rows: Iterable[Row]) -> Dict[Key, List[Row]]:
    """The rows of each kind that has enough of them to say how far the next one is off."""
    found: Dict[Key, List[Row]] = {}
    for row in rows:
        job = row.measured.job
        found.setdefault((job.unet.dtype, job.policy), []).append(row)
    return {
        key: some
        for key, some in found.items()
        if len(some) >= LEAST_RECORDS and any(row.measured.held_out for row in some)
    }


def _kind(key: Key, rows: Sequence[Row]) -> Kind:
    held_out = [row for row in rows if row.measured.held_out]
    return Kind(
        *key,
        versions=tuple(sorted({row.measured.version for row in rows})),
        hosts=tuple(sorted({row.measured.host for row in rows})),
        threads=tuple(sorted({row.measured.job.threads for row in rows})),
        networks=tuple(sorted({row.measured.job.unet.network for row in rows})),
        records=len(rows),
        held_out=len(held_out),
        **{figure: _bound(spread(held_out, figure)) for figure in FIGURES},
        margin_share=margin_share(rows),
        margin_bytes=MARGIN_BYTES,
    )


def _bound(errors: Spread) -> Optional[Bound]:
    return Bound(round(errors.median, 4), round(abs(errors.worst), 4)) if errors.count else None
