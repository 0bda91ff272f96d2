"""Measure the configurations that the estimator is judged by on this host, one fresh process each.

    ./run.sh bench validate --record my-host.jsonl
    ./run.sh bench validate --record my-host.jsonl --engine itex --first 12

They are those of the published records, in records/memory; each fits a host with 24 GB of memory. Some 600 training
steps, in about an hour on two quiet cores with AVX512_BF16. Cut off, it continues: what the record holds is not
measured again, failures included (remove a line to try again). One record file a host.

Put into records/memory, a file is one of the published records: `bench tables --accuracy` then has the errors and the
upper bounds of jobs like these on hosts like this one.

`bench tables` makes two things of the records: the digest that the estimator ships, how far predictions are off, kind
by kind, with the upper bounds' margins; and the validation page, every measured configuration beside its prediction.
"""

import dataclasses
import functools
import json
import math
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from cpu3d.bench.harness import Output, ProcessFailedError, gib, in_fresh_process, valid
from cpu3d.bench.step import has_known_engine, job_of_record, measure, request_for
from cpu3d.errors import InputError, how_to_install
from cpu3d.host.apply import installed
from cpu3d.host.thread_plan import thread_plan
from cpu3d.util.atomic import writable_folder
from cpu3d.util.progress import bar
from cpu3d.util.records import append_record
from memory_estimator.calibration import find_constants, shipped_constants
from memory_estimator.common.files import read_records
from memory_estimator.common.schema import option
from memory_estimator.common.table import Table
from memory_estimator.common.units import format_bytes
from memory_estimator.estimate import Accuracy, Bound, Estimate, Kind, estimate, family_of
from memory_estimator.host import Host, read_host
from memory_estimator.job import ENGINES, Job, engine_version
from memory_estimator.step.onednn import USUAL, Kernels, highest_isa
from models.config import POLICIES

PUBLISHED = Path(__file__).resolve().parents[2] / "records" / "memory"
"""The folder of published records, a file a host; it may not be there."""

VALIDATION = "memory"  # in the folder of records that of `bench validate`, a file a host

VALIDATION_HEAD = """\
# The estimator against measured steps

Made by `./run.sh bench tables --records records --page FILE` from records/memory (`bench validate`) and the code as it
stands. Errors are shares of what was measured: +2% is predicted too high. Of more than one run the
median size and the worst stand there; of the upper bound how far above the process's peak, the mean and the least; it
is wide where too few records of a kind say how far the next is off. What of the figures is fitted to some of these
records stands in [estimator.md](estimator.md): the rules were found with runs of up to 128^3 voxels in view, the margin
of an upper bound is that of all records of its kind. Disturbed is a measurement whose steps lie further apart than a
tenth of their median.
"""

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

STEPS = 3  # timed, after two more: enough for a median


@dataclass(frozen=True)
class Options:
    """What `bench validate` measures."""

    record: Path = option(help=".jsonl file, continued if there", metavar="FILE")
    engine: Optional[str] = option(None, help="only this one (default: all installed)", choices=ENGINES)
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
    wanted = [job for job in configurations(threads) if job.engine in engines][: options.first]
    todo = [job for job in wanted if job not in done]
    constants = find_constants(host)
    with bar("validate", total=len(todo)) as advance:
        for job in todo:
            needed, free = estimate(job, constants).upper_bound_bytes, read_host().free_bytes
            outcome = f"left out, needs {format_bytes(needed)} where {format_bytes(free)} are free"
            if needed <= free:
                record = measured_record(job, host)
                append_record(options.record, "memory", record)
                outcome = record.get("error", "measured")
            print(f"{job.describe()}: {outcome}", file=sys.stderr)
            advance()
    held_out = [one for one in _of_this_host(options.record, host) if one.held_out]
    # By what was known before: measuring adds to that. The page is made with the shipped constants alone.
    rows = compare(held_out, lambda one: estimate(one.job, constants))
    Output().publish("memory", {}, summary_table(rows))
    return 0


def measured_record(job: Job, host: Host) -> Dict[str, Any]:
    """What the record keeps of one configuration: the measurement, or what the process died of.

    Raises InputError where no process was started, which says nothing of the job.
    """
    request = request_for(job, steps=STEPS)
    try:
        return in_fresh_process(measure, request)
    except ProcessFailedError as error:
        environment = {**thread_plan(host).environment, "TF_NUM_INTRAOP_THREADS": str(job.threads)}
        return {**request, "error": str(error), "threads": environment, "host": host.summary()}


def configurations(threads: int) -> Tuple[Job, ...]:
    """Every job of the published records, as on a host with so many threads; what one policy that saves memory was
    measured with, under the others that do as well."""
    jobs = [dataclasses.replace(one.job, threads=threads) for one in read_measured(PUBLISHED)]
    others = [job.with_unet(policy=policy) for job in jobs if job.policy != "speed" for policy in POLICIES[1:]]
    return tuple(dict.fromkeys([*jobs, *others]))


# --- What was measured, beside what is predicted ---


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
    they were disturbed. Raises InputError for a missing file, and for a line that is damaged or of another schema."""

    def measured_from(record: Mapping[str, Any]) -> Optional[Measured]:
        if not has_known_engine(record):
            return None
        job, host = job_of_record(record), record["host"]
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
    read = [one for file in files for one in valid(read_records, file, "memory", measured_from)]
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


# --- Tables and the page ---


def summary_table(rows: Sequence[Row]) -> Table:
    """Median (of the absolute errors) and worst error of every figure, for all rows and by host, engine and dtype."""
    groups: Dict[Tuple[str, ...], List[Row]] = {("all", ""): list(rows)}
    for row in sorted(rows, key=lambda row: (row.measured.host, row.measured.job.engine, row.measured.job.unet.dtype)):
        job, kernels = row.measured.job, row.isa
        groups.setdefault((row.measured.host, f"{kernels}, {job.engine}, {job.unet.dtype}"), []).append(row)
    cells = []
    for group, some in groups.items():
        found, least = spreads(some), min((row.slack for row in some), default=math.nan)
        allocator, process, step = (
            f"{one.median:.1%}, worst {signed(one.worst)}" if one.count else "-"
            for one in (found[name] for name in ("allocator peak", "process peak", "seconds a step"))
        )
        wide = "" if all(row.covered for row in some) else ", wide" if not any(row.covered for row in some) else ""
        bound = f"{signed(found['upper bound'].mean)} ({signed(least)}){wide}"
        cells.append((*group, str(len(some)), allocator, process, bound, step))
    columns = ("host", "kernels, engine, dtype", "runs", "allocator peak", "process peak", "upper bound, mean (least)")
    return Table((*columns, "seconds a step"), cells, names=2)


def signed(share: Optional[float]) -> str:
    """For reading, such as "+6.3%"; "-" for what is not known."""
    return "-" if share is None or math.isnan(share) else f"{share:+.1%}"


def validation(folder: Path) -> Tuple[Sequence[Measured], List[Row]]:
    """The measured steps, and each beside what the estimator as it stands predicts."""
    measured = read_measured(folder / VALIDATION)
    return measured, compare(measured, predicted)


def accuracy_json(folder: Path) -> bytes:
    """The content of the estimator's accuracy.json, from the records."""
    unbounded = Accuracy(())  # the margins are what is worked out here
    rows = compare(read_measured(folder / VALIDATION), lambda one: predicted(one, unbounded))
    return (json.dumps({"kinds": asdict(digest(rows))["kinds"]}, indent=1) + "\n").encode()


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
