"""Measure the built-in list of configurations that the estimator is judged by, one fresh process each.

    ./run.sh bench validate --record records/memory.jsonl
    ./run.sh bench validate --record records/memory.jsonl --engine stock --first 3
    ./run.sh bench validate --record records/memory.jsonl --again-disturbed

Some 600 training steps, in under an hour on two quiet cores with AVX512_BF16. Cut off, it continues: what the record
holds is not measured again, failures included (remove a line to try again). The newest line of a configuration counts.
One record file a host. `bench tables` makes docs/validation.md of it.

The configurations are far apart in everything that memory and time depend on: a fraction of all combinations, chosen by
machine so that nearly every two settings meet somewhere and each fits a host with 24 GB of memory.
"""

import argparse
import dataclasses
import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from rich.console import Console

from cpu3d.bench.harness import ProcessFailedError
from cpu3d.bench.memory import measure_memory
from cpu3d.errors import InputError
from cpu3d.host.apply import installed
from cpu3d.host.thread_plan import thread_plan
from cpu3d.util.atomic import writable_folder
from cpu3d.util.progress import bar
from cpu3d.util.records import append_record
from memory_estimator.calibration import HostConstants, find_constants
from memory_estimator.estimate import Accuracy, estimate
from memory_estimator.host import Host, read_host
from memory_estimator.job import ENGINES, Job
from memory_estimator.schema import add_options, check, from_args, option
from memory_estimator.table import Table
from memory_estimator.units import GIB, format_bytes
from memory_estimator.validation import (
    DISTURBED_SPREAD,
    Measured,
    Row,
    Spread,
    Target,
    compare,
    read_measured,
    spreads,
    targets,
)
from models.config import POLICIES, UNetConfig

STEPS = 3
"""Timed, after two more: enough for a median."""

HELD_OUT = """
128x128x128 f8  d5 b1 c4 k3 bfloat16 itex  instance adam
128x128x128 f8  d5 b1 c4 k3 float32  stock instance adam
128x128x128 f16 d5 b1 c4 k3 bfloat16 itex  instance adam
128x128x128 f16 d5 b1 c4 k3 bfloat16 itex  instance sgd  residual
128x128x128 f16 d5 b1 c4 k3 bfloat16 stock instance adam
144x176x128 f16 d5 b1 c4 k3 bfloat16 itex  batch    adam
144x144x144 f8  d4 b3 c1 k1 bfloat16 itex  none     adam deep
240x240x160 f8  d5 b1 c4 k3 bfloat16 itex  instance adam
160x192x128 f16 d5 b1 c4 k3 bfloat16 itex  instance adam
128x128x128 f16 d5 b1 c4 k3 float32  itex  instance adam
128x128x128 f16 d5 b1 c4 k3 float32  stock instance adam
128x128x128 f16 d5 b2 c4 k3 bfloat16 itex  instance adam
176x208x144 f8  d5 b1 c1 k1 float32  stock none     sgd  residual
240x240x160 f8  d5 b1 c4 k3 bfloat16 stock instance adam
176x208x144 f8  d3 b3 c1 k1 bfloat16 itex  batch    sgd  upsampling
144x144x144 f24 d3 b1 c1 k1 bfloat16 itex  instance adam upsampling
128x128x160 f24 d4 b1 c1 k1 bfloat16 itex  instance sgd  upsampling
240x240x144 f8  d3 b1 c4 k3 float32  stock none     sgd  residual
144x144x144 f16 d5 b1 c1 k1 float32  stock none     sgd  residual
128x128x160 f24 d5 b1 c1 k1 bfloat16 itex  none     sgd  residual
160x192x128 f8  d4 b2 c1 k1 float32  stock batch    sgd  residual
128x128x128 f32 d3 b1 c1 k1 bfloat16 itex  none     sgd  upsampling
144x176x128 f8  d3 b4 c4 k1 bfloat16 stock none     sgd  deep
192x192x128 f8  d3 b2 c1 k3 float32  stock none     sgd  upsampling
192x192x128 f16 d5 b1 c1 k1 bfloat16 stock batch    adam deep
240x240x144 f8  d4 b1 c1 k1 float32  itex  batch    adam
144x176x128 f16 d5 b1 c4 k3 float32  itex  instance adam
176x208x144 f16 d4 b1 c1 k1 bfloat16 stock none     adam upsampling
160x192x128 f8  d5 b3 c1 k1 bfloat16 stock none     adam deep
128x128x160 f16 d3 b3 c4 k1 bfloat16 itex  batch    sgd
128x128x160 f24 d3 b1 c4 k3 bfloat16 stock instance sgd  residual
160x192x128 f8  d5 b4 c4 k1 bfloat16 itex  none     adam upsampling
128x128x128 f8  d4 b4 c4 k3 float32  stock instance sgd  residual
144x176x128 f8  d3 b3 c4 k3 float32  stock instance sgd  deep
240x240x144 f16 d3 b1 c1 k3 bfloat16 itex  instance adam deep
144x176x128 f24 d4 b1 c1 k3 bfloat16 itex  none     adam
144x144x144 f8  d4 b1 c4 k3 bfloat16 stock batch    sgd  cicek2016
144x176x128 f8  d3 b3 c4 k3 float32  itex  instance sgd  residual
192x192x128 f8  d3 b4 c4 k3 bfloat16 itex  none     adam residual
192x192x128 f8  d3 b1 c4 k1 bfloat16 itex  instance sgd  cicek2016
128x128x128 f32 d4 b1 c1 k3 bfloat16 itex  none     sgd  deep
144x176x128 f16 d3 b2 c4 k1 bfloat16 stock none     adam upsampling
128x128x160 f8  d3 b4 c1 k1 float32  itex  batch    adam residual
128x128x128 f32 d4 b1 c4 k3 bfloat16 itex  batch    adam deep
240x240x160 f8  d4 b1 c4 k1 float32  stock none     adam deep
240x240x160 f8  d4 b1 c4 k3 float32  stock instance adam
128x128x128 f32 d4 b1 c1 k3 bfloat16 itex  batch    adam residual
176x208x144 f8  d3 b4 c1 k3 bfloat16 itex  none     sgd
176x208x144 f8  d3 b2 c4 k1 float32  itex  instance sgd  deep
160x192x128 f24 d3 b1 c4 k3 bfloat16 itex  none     adam deep
128x128x160 f24 d4 b1 c1 k3 bfloat16 stock batch    adam deep
128x128x128 f24 d3 b1 c1 k3 float32  stock batch    sgd  upsampling
192x192x128 f8  d4 b3 c1 k3 bfloat16 stock none     adam
144x144x144 f16 d4 b2 c1 k3 bfloat16 stock instance adam
144x144x144 f24 d3 b1 c1 k3 bfloat16 stock instance adam residual
128x128x160 f8  d3 b1 c1 k1 float32  itex  none     adam cicek2016
128x128x128 f8  d5 b2 c1 k1 bfloat16 itex  none     adam cicek2016
128x128x128 f24 d3 b2 c1 k3 bfloat16 itex  batch    adam upsampling
128x128x128 f32 d5 b1 c4 k3 bfloat16 itex  instance adam
128x128x160 f32 d3 b1 c1 k3 bfloat16 itex  batch    sgd  upsampling
144x144x144 f8  d3 b4 c1 k1 float32  itex  none     sgd  upsampling
128x128x128 f16 d4 b3 c4 k1 bfloat16 stock none     adam deep
128x128x160 f16 d3 b2 c1 k3 float32  stock batch    adam upsampling
128x128x128 f32 d3 b1 c1 k1 bfloat16 stock instance sgd
144x144x144 f32 d3 b1 c1 k1 bfloat16 itex  instance sgd
240x240x160 f16 d5 b1 c4 k3 bfloat16 itex  instance adam
128x128x128 f32 d3 b1 c1 k1 float32  itex  none     adam upsampling
128x128x128 f16 d5 b1 c4 k3 bfloat16 itex  instance adam balanced
128x128x128 f16 d5 b1 c4 k3 bfloat16 itex  instance adam lean
128x128x128 f16 d5 b1 c4 k3 bfloat16 stock instance adam lean
128x128x128 f16 d5 b1 c4 k3 float32  itex  instance adam balanced
128x128x128 f16 d5 b1 c4 k3 float32  itex  instance adam lean
128x128x128 f16 d5 b1 c4 k3 float32  stock instance adam lean
128x128x128 f16 d5 b2/1 c4 k3 bfloat16 itex  instance adam
128x128x128 f16 d5 b4/1 c4 k3 bfloat16 itex  instance adam lean
128x128x128 f16 d5 b4/2 c4 k3 bfloat16 itex  batch    adam balanced
128x128x128 f16 d5 b1 c4 k3 bfloat16 itex  instance sgd  residual lean
144x176x128 f16 d5 b1 c4 k3 bfloat16 itex  batch    adam lean
160x192x128 f16 d5 b1 c4 k3 bfloat16 itex  instance adam balanced
144x144x144 f24 d3 b1 c1 k1 bfloat16 itex  instance adam upsampling lean
128x128x160 f24 d4 b1 c1 k1 bfloat16 itex  instance sgd  upsampling balanced
128x128x160 f24 d5 b1 c1 k1 bfloat16 itex  none     sgd  residual balanced
144x144x144 f16 d5 b1 c1 k1 float32  stock none     sgd  residual lean
144x176x128 f8  d3 b4 c4 k1 bfloat16 stock none     sgd  balanced
192x192x128 f8  d3 b1 c4 k1 bfloat16 itex  instance sgd  cicek2016 lean
144x144x144 f8  d4 b1 c4 k3 bfloat16 stock batch    sgd  cicek2016 balanced
128x128x128 f32 d4 b1 c1 k3 bfloat16 itex  none     sgd  deep lean
240x240x144 f16 d3 b1 c1 k3 bfloat16 itex  instance adam deep balanced
128x128x128 f24 d3 b2 c1 k3 bfloat16 itex  batch    adam upsampling lean
240x240x144 f8  d4 b1 c1 k1 float32  itex  batch    adam lean
176x208x144 f16 d4 b1 c1 k1 bfloat16 stock none     adam upsampling lean
160x192x128 f8  d4 b2/1 c1 k1 float32  stock batch    sgd  residual balanced
240x240x160 f8  d5 b1 c4 k3 bfloat16 itex  instance adam lean
240x240x160 f16 d5 b1 c4 k3 bfloat16 itex  instance adam balanced
240x240x160 f16 d5 b1 c4 k3 bfloat16 itex  instance adam lean
128x128x128 f32 d5 b1 c4 k3 bfloat16 itex  instance adam lean
"""
"""128^3 voxels and above: no constant may be fitted to these. Columns: shape, filters, depth, batch, channels, outputs
(k), dtype, engine, norm, optimizer, what else differs from the default network, policy. b4 computes a batch of 4 at
once, b4/1 one at a time."""

FITTED = """
64x64x64    f16 d5 b1 c4 k3 bfloat16 itex  instance adam
64x64x64    f16 d5 b1 c4 k3 float32  itex  instance adam
64x64x64    f16 d5 b1 c4 k3 bfloat16 stock instance adam
64x64x64    f16 d5 b1 c4 k3 float32  stock instance adam
80x96x64    f32 d4 b1 c1 k1 bfloat16 itex  none     sgd  upsampling
80x96x64    f32 d4 b1 c1 k1 float32  stock batch    sgd  residual
96x96x96    f16 d5 b1 c4 k3 bfloat16 itex  instance adam
96x96x96    f16 d5 b1 c4 k3 float32  itex  instance adam
96x96x96    f16 d5 b1 c4 k3 bfloat16 stock instance adam
96x96x96    f16 d5 b1 c4 k3 float32  stock instance adam
96x96x96    f8  d3 b2 c1 k3 bfloat16 itex  batch    sgd  cicek2016
96x96x96    f32 d4 b1 c1 k1 bfloat16 itex  none     adam deep
96x96x96    f8  d3 b4 c4 k1 float32  stock none     adam residual
96x96x96    f16 d5 b1 c4 k3 bfloat16 itex  instance adam balanced
96x96x96    f16 d5 b1 c4 k3 bfloat16 itex  instance adam lean
96x96x96    f16 d5 b1 c4 k3 float32  stock instance adam lean
"""
"""96^3 voxels and below, the same columns: what constants may be fitted to."""

VARIANTS = {
    "": {},
    "cicek2016": {"network": "cicek2016"},
    "residual": {"residual": True},
    "upsampling": {"up": "upsampling"},
    "deep": {"deep_supervision": True},
}


INTRODUCTION = """\
# The estimator against measured steps

Made by `./run.sh bench tables`: what was measured comes from records/memory.jsonl (`./run.sh bench validate`), what is
predicted from the code as it stands, so a change of the estimator shows here. Each configuration ran in a fresh
process; the peaks are TensorFlow's and the kernel's own counts, the time is the median of the steps from the third on.
Errors are signed, as shares of what was measured: +2 % is predicted too high.

Constants of the host and the margin of the upper bound are fitted to volumes of at most 96^3 voxels; errors are of
larger ones. The rules (what each operation keeps, which tensors share memory, the scratch of a kernel, how the
allocator grows) are not held out: they were found with runs of up to 128^3 voxels in view. For other configurations,
expect errors nearer to the worst.
"""

READING = """\
A configuration reads: shape, f(ilters), d(epth), b(atch), c(hannels), k outputs, dtype, engine, norm, optimizer, and
any variant. Disturbed is a measurement whose steps lie further apart than a tenth of their median.
"""


@dataclass(frozen=True)
class Options:
    """What `bench validate` measures."""

    record: Path = option(help=".jsonl file, continued if there", metavar="FILE")
    engine: Optional[str] = option(None, help="only this one (default: all installed)", choices=ENGINES)
    first: Optional[int] = option(None, help="only the first N of the list", at_least=1, metavar="N")
    again_disturbed: bool = option(
        False, help=f"measure again whose steps lie further apart than {100 * DISTURBED_SPREAD:.0f} %% of their median"
    )

    def __post_init__(self):
        check(self, InputError)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, Options)


def run(args: argparse.Namespace) -> int:
    options = from_args(Options, args)
    writable_folder(options.record.parent, "folder")
    host, console = read_host(), Console(stderr=True)
    threads = thread_plan(host).intra_op
    before = _read(options.record, host)
    engines = _engines(options.engine, console)
    wanted = [job for job in configurations(threads) if job.engine in engines][: options.first]
    done = {one.job for one in before if not (options.again_disturbed and one.disturbed)}
    todo = [job for job in wanted if job not in done]
    constants = _constants(threads)
    with bar("validate", total=len(todo)) as advance:
        for job in todo:
            needed, free = estimate(job, constants).upper_bound_bytes, read_host().free_bytes
            if needed > free:
                outcome = f"left out, needs {needed / GIB:.1f} GiB where {free / GIB:.1f} GiB are free"
            else:
                record = measured_record(job, host)
                append_record(options.record, "memory", record)
                outcome = _outcome(record)
            console.print(f"{describe(job)}: {outcome}", highlight=False, soft_wrap=True)
            advance()
    predict = functools.lru_cache(maxsize=None)(_constants)
    held_out = [one for one in _read(options.record, host) if one.held_out]
    rows = compare(held_out, lambda one: estimate(one.job, predict(one.job.threads)))
    cells = [
        (name, f"{spread.median:.1%}", f"{spread.worst:+.1%}", f"{spread.mean:+.1%}")
        for name, spread in spreads(rows).items()
    ]
    title = f"{len(rows)} held-out configurations, predicted against measured"
    # The page is made with the shipped constants alone, and may say otherwise where this host has its own.
    caption = f"constants: {constants.name}, {constants.origin}"
    Console().print(Table(("", "median", "worst", "mean"), cells, title, caption).rich())
    return 0


def measured_record(job: Job, host: Host) -> Dict[str, Any]:
    """What the record keeps of one configuration: the measurement, or what the process died of.

    Raises InputError where no process was started, which says nothing of the job.
    """
    request = request_for(job)
    try:
        result, _ = measure_memory(request, job.threads)
    except ProcessFailedError as error:
        environment = {**thread_plan(host).environment, "TF_NUM_INTRAOP_THREADS": str(job.threads)}
        return {**request, "error": str(error), "threads": environment, "host": host.summary()}
    return {name: value for name, value in result.items() if name not in ("moments", "rounds", "peers")}


def request_for(job: Job) -> Dict[str, Any]:
    """What `bench.measure` is to do to measure a job."""
    return {
        "shape": list(job.shape),
        "batch": job.batch,
        "micro_batch": job.micro,
        "unet": dataclasses.asdict(job.unet),
        "optimizer": job.optimizer,
        "steps": STEPS,
        "engine": job.engine,
        "matmul": [],
    }


def configurations(threads: int) -> Tuple[Job, ...]:
    """Every job to measure on a host with so many threads, in order; the held-out ones first."""
    return tuple(_job(line, threads) for table in (HELD_OUT, FITTED) for line in table.split("\n") if line)


def describe(job: Job) -> str:
    """A job as a line of the tables above, in words: "128x128x128 f16 d5 b1 c4 k3 bfloat16 itex instance adam"."""
    unet = job.unet
    words: List[str] = ["x".join(map(str, job.shape)), f"f{unet.filters}", f"d{unet.depth}"]
    words.append(f"b{job.batch}" if job.parts == 1 else f"b{job.batch}/{job.micro}")
    words += [f"c{unet.channels}", f"k{unet.outputs}", unet.dtype, job.engine, unet.norm, job.optimizer]
    words += [
        name for name, more in VARIANTS.items() if more and all(getattr(unet, key) == of for key, of in more.items())
    ]
    words += [unet.policy] if unet.policy != "speed" else []
    return " ".join(words)


# --- docs/validation.md ---


def page(measured: Sequence[Measured], rows: Sequence[Row], accuracy: Accuracy) -> List[str]:
    """The lines of the page. `rows` are what `compare` makes of `measured`; failures are in `measured` alone.

    `accuracy` is what the rows' upper bounds were made with.
    """
    held_out = [row for row in rows if row.measured.held_out]
    fitted = [row for row in rows if not row.measured.held_out]
    hosts = sorted({f"{one.host}, {one.job.threads} threads" for one in measured})
    dates = sorted({one.date for one in measured})
    origin = [f"Measured on {'; '.join(hosts)}, {' to '.join(dict.fromkeys((*dates[:1], *dates[-1:])))}.", ""]
    margin = f"{_percent(accuracy.margin_share)} of the peak and {format_bytes(accuracy.margin_bytes)}"
    lines = [
        *INTRODUCTION.splitlines(),
        "",
        *(origin if dates else []),
        f"## Errors of the {len(held_out)} larger configurations",
        "",
        f"Median size and worst error; the upper bound adds {margin}, and is told by how far it is above the peak.",
        "",
        *summary_table(held_out),
        "",
        "## Demanded and found",
        "",
        *_target_table(targets(held_out)).markdown(),
        "",
    ]
    again = [one for one in measured if one.earlier]
    if again:
        timed = [(describe(one.job), ", then ".join(map(_timed, (*one.earlier, one)))) for one in again]
        lines += ["## Disturbed, and measured again", ""]
        lines += [*Table(("configuration", "s a step (spread), in turn"), timed).markdown(), ""]
    lines += ["## More than 96^3 voxels", "", *READING.splitlines(), "", *_detail_table(held_out).markdown(), ""]
    lines += ["## 96^3 voxels and less", "", *_detail_table(fitted).markdown()]
    failures = [f"- {describe(one.job)}: {one.failure}" for one in measured if one.failure]
    return [*lines, "", "## Not measured", "", *failures] if failures else lines


def summary_table(rows: Sequence[Row]) -> List[str]:
    """Median (of the absolute errors) and worst error of every figure, for all rows and by engine and dtype."""

    def group_of(row: Row) -> str:
        return f"{row.measured.job.engine}, {row.measured.job.unet.dtype}"

    cells = []
    for group in ("all", *sorted(set(map(group_of, rows)))):
        some = [row for row in rows if group in ("all", group_of(row))]
        found, least = spreads(some), min((row.slack for row in some), default=math.nan)
        allocator, process, step = (
            _spread(found[name]) for name in ("allocator peak", "process peak", "seconds a step")
        )
        bound = f"{_signed(found['upper bound'].mean)} ({_signed(least)})"
        cells.append((group, str(len(some)), allocator, process, bound, step))
    columns = ("engine, dtype", "runs", "allocator peak", "process peak", "upper bound, mean (least)", "seconds a step")
    return Table(columns, cells).markdown()


# --- Private helpers ---


def _target_table(judged: Sequence[Target]) -> Table:
    rows = []
    for one in judged:
        demanded, found = (
            "-" if math.isnan(value) else _percent(value) if one.is_share else f"{value:.0f}"
            for value in (one.demanded, one.found)
        )
        rows.append((one.name, demanded, found, "met" if one.met else "**not met**"))
    return Table(("figure", "demanded, at most", "found", ""), rows)


def _detail_table(rows: Sequence[Row]) -> Table:
    """A line for every row: settings, then each figure as measured and the error of what is predicted."""
    cells = []
    for row in rows:
        one = row.measured
        cells.append(
            (
                describe(one.job),
                "-" if one.allocator_peak_bytes is None else f"{one.allocator_peak_bytes / GIB:.3f}",
                _signed(row.allocator_error),
                f"{one.process_peak_bytes / GIB:.3f}",
                _signed(row.process_error),
                _signed(row.slack),
                f"{one.step_s:.2f}",
                f"{_percent(one.step_spread, 0)}{', disturbed' if one.disturbed else ''}",
                _signed(row.step_error),
                ", ".join(row.misses),
            )
        )
    peaks = ("allocator, GiB", "error", "process, GiB", "error", "bound above")
    return Table(("configuration", *peaks, "s a step", "spread", "error", "misses"), cells)


def _job(line: str, threads: int) -> Job:
    shape, filters, depth, batch, channels, outputs, dtype, engine, norm, optimizer, *more = line.split()
    unet = UNetConfig(
        channels=int(channels[1:]),
        outputs=int(outputs[1:]),
        filters=int(filters[1:]),
        depth=int(depth[1:]),
        norm=norm,
        dtype=dtype,
        policy=next((word for word in more if word in POLICIES), "speed"),
        **VARIANTS[next((word for word in more if word in VARIANTS), "")],
    )
    grid = tuple(int(side) for side in shape.split("x"))
    whole, _, micro = batch[1:].partition("/")
    # Canonical, as `memory_estimator.validation` has what was measured of the list.
    return Job(unet, grid, int(whole), int(micro or whole), optimizer, engine, threads=threads).canonical


def _engines(asked: Any, console: Console) -> List[str]:
    """Those to measure on; what is not installed is left out, and named, unless it was asked for."""
    if asked and not installed(asked):
        raise InputError(f"engine must be installed, got {asked}; run `./run.sh setup` or leave the option out")
    missing = [engine for engine in ENGINES if not installed(engine)]
    if missing and not asked:
        console.print(f"left out, as it is not installed: {', '.join(missing)}", highlight=False)
    return [asked] if asked else [engine for engine in ENGINES if engine not in missing]


def _read(path: Path, host: Host) -> Sequence[Measured]:
    """What the record holds, nothing where there is none yet. Raises InputError where it is another host's."""
    try:
        measured = read_measured(path) if path.exists() else ()
    except ValueError as error:
        raise InputError(str(error)) from None
    others = sorted({one.host for one in measured if (one.host, one.isa) != (host.cpu_model, tuple(host.isa))})
    if others:
        raise InputError(
            f"record {path} must be of this host, {host.cpu_model}, got {', '.join(others)}; give each host a file"
        )
    return measured


def _constants(threads: int) -> HostConstants:
    try:
        return find_constants(threads)
    except ValueError as error:
        raise InputError(str(error)) from None


def _outcome(record: Dict[str, Any]) -> str:
    if "error" in record:
        return record["error"]
    return f"{record['process_peak_bytes'] / GIB:.2f} GiB, {record['step_s']:.2f} s"


def _timed(one: Measured) -> str:
    return "failed" if one.failure else f"{one.step_s:.2f} ({_percent(one.step_spread, 0)})"


def _percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


def _signed(share: Optional[float]) -> str:
    return "-" if share is None or math.isnan(share) else f"{100 * share:+.1f} %"


def _spread(spread: Spread) -> str:
    return "-" if not spread.count else f"{100 * spread.median:.1f} %, worst {_signed(spread.worst)}"
