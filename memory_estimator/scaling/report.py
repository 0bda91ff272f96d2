"""An estimate for several hosts: its options, its tables and JSON, and its picture of the time over the hosts."""

import argparse
import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

from memory_estimator.calibration import HostConstants
from memory_estimator.estimate import Estimate
from memory_estimator.figure import PALETTE, new_figure, plain, png
from memory_estimator.job import Job
from memory_estimator.scaling.model import (
    ASSUMED,
    PUBLISHED,
    Point,
    Scaling,
    case_bytes,
    gradient_bytes,
    pooled,
    predicted_errors,
    read_scaling,
)
from memory_estimator.schema import given, option
from memory_estimator.step.timing import op_seconds
from memory_estimator.step.training_step import training_step
from memory_estimator.table import Table, new_console
from memory_estimator.units import count_of, format_bytes, format_seconds, parse_duration, parse_rate

HOSTS = (1, 2, 4, 8, 16, 32, 64)
GROUP = "several hosts, data parallel"
HOSTS_HELP = (
    f"time on so many hosts (without a number: {' '.join(map(str, HOSTS))}); --batch is then of one worker, --threads "
    "its cores, --host-memory of one host"
)
POSITIVE = {"above": 0, "below": math.inf}

WORK = ("volume_s", "gradient_bytes", "forward_s", "case_bytes", "in_parts")
HOST = ("workers_per_host", "network_bytes_per_s", "latency_s", "storage_bytes_per_s", "shared_bytes_per_s")
"""Of `Scaling`: one worker's work, and what the workers run on."""

NOT_COUNTED = "start-up, checkpoints, restarts, other traffic; whether a larger batch learns as much an epoch"


@dataclass(frozen=True)
class ScalingOptions:
    """--hosts and what belongs to it."""

    hosts: Optional[Tuple[int, ...]] = option(None, help=HOSTS_HELP, metavar="N", at_least=1, empty=True)
    workers_per_host: int = option(1, help="processes of a host, as one a socket", metavar="W", at_least=1)
    link: str = option("25Gbit/s", help="of a host's link, as it is sold", metavar="RATE")
    latency: str = option("50us", help="of a message between two hosts", metavar="TIME")
    step_s: Optional[float] = option(
        None, help="a measured step of one worker, of --batch volumes (default: estimated)", metavar="S", **POSITIVE
    )
    epochs: int = option(1, help="of --cases each", metavar="E", at_least=1)
    validation_cases: int = option(0, help="predicted after every epoch", metavar="N", at_least=0)
    global_batch: Optional[int] = option(
        None, help="of all, where that stays (default: --batch for each of the most workers)", metavar="G", at_least=1
    )
    learning_rate: float = option(2e-3, help="that suits one worker's batch", metavar="R", **POSITIVE)
    storage: str = option("", help="what each host reads, such as 2GB/s (default: enough)", metavar="RATE")
    shared_storage: str = option("", help="what all hosts together read (default: enough)", metavar="RATE")
    record: Optional[Path] = option(
        None, help=f"of `bench scaling` (default: records/{PUBLISHED.name}, if it is there)", metavar="FILE"
    )
    against: Optional[Tuple[float, float]] = option(
        None, help="published hours on one host and on several, to be compared with", metavar=("ONE", "MANY")
    )
    picture: Optional[Path] = option(None, help="draw the time over the hosts as a PNG", metavar="FILE")

    @property
    def numbers(self) -> Tuple[int, ...]:
        """Of hosts, each once."""
        return tuple(dict.fromkeys(self.hosts or HOSTS))

    @property
    def most_workers(self) -> int:
        """Of all the numbers of hosts that are asked for."""
        return max(self.numbers) * self.workers_per_host


@dataclass(frozen=True)
class ScaleRequest:
    """All that an estimate for several hosts is made of."""

    job: Job
    options: ScalingOptions
    tables: Dict[str, Scaling]
    """"fixed" is strong scaling, "growing" is weak scaling."""
    errors: Tuple[float, ...]
    """Of predicted steps of several workers on one host; () where nothing was measured."""
    is_in_sample: bool
    """Whether these errors are of the very record that the constants are from."""

    @property
    def basis(self) -> Iterator[Tuple[str, str]]:
        """What the figures rest on, by name, and how far predictions of measured steps were off."""
        growing = vars(self.tables["growing"])
        for name, value in (*((name, growing[name]) for name in WORK + HOST), *vars(growing["costs"]).items()):
            yield name.replace("_", " "), value if isinstance(value, str) else f"{value:.3g}"
        worst = f"{max(self.errors, key=abs):+.1%} of a step, workers on one host" if self.errors else "not measured"
        yield "worst error", f"{worst}; of its own record, which flatters" if self.is_in_sample else worst

    def reached(self, scaling: Scaling) -> Dict[str, Optional[Point]]:
        """The fewest hosts that take no longer than the published hours on one host, on several, and that are as many
        times faster than one; None where none are. Empty where nothing was published."""
        if not self.options.against:
            return {}
        one_h, many_h = self.options.against
        alone = scaling.first(lambda point: True)
        if alone is None or alone.total_s is None:
            return dict.fromkeys(("one", "many", "speedup"))
        seconds = {"one": 3600 * one_h, "many": 3600 * many_h, "speedup": alone.total_s / (one_h / many_h)}
        return {
            name: scaling.first(lambda point, limit=limit: point.total_s is not None and point.total_s <= limit)
            for name, limit in seconds.items()
        }


def check_options(args: argparse.Namespace) -> None:
    """Raise ValueError for options that need --hosts, or that exclude it, and where a described host has no cores.

    This host's would say nothing: seconds, and scratch memory, go by a worker's threads.
    """
    found = given(ScalingOptions, args)
    if "hosts" not in found:
        if found:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in found)
            raise ValueError(f"--hosts must be given with {names}, got none; add --hosts")
        return
    if hasattr(args, "plan") or hasattr(args, "gpu_memory"):
        raise ValueError("--hosts must stand without --plan and --gpu-memory, got one of them; ask one at a time")
    if not hasattr(args, "threads"):
        described = ["--host-memory"] if hasattr(args, "host_memory") else []
        described += ["--workers-per-host"] if "workers_per_host" in found and "step_s" not in found else []
        if described:
            raise ValueError(
                f"--threads must be given with {described[0]}, got none; add a worker's cores on that host"
            )


def request_from(options: ScalingOptions, asked: Estimate, constants: HostConstants) -> ScaleRequest:
    """Put it together; `asked` is the estimate of one worker. Raises ValueError for what cannot be."""
    job = asked.job
    if options.against:
        if not 0 < options.against[1] <= options.against[0] < math.inf:
            raise ValueError(
                f"--against must be hours, the more on one host, got {options.against}; write it like 90 4"
            )
        if not job.cases:
            raise ValueError("--cases must be given with --against, got none; add --cases N and --epochs E")
    path = options.record or (PUBLISHED if PUBLISHED.is_file() else None)
    records = read_scaling(path) if path else ()
    volume_s = (options.step_s or asked.step_s) / job.batch
    growing = Scaling(
        volume_s,
        gradient_bytes(job),
        pooled(records, path.name) if records else ASSUMED,
        forward_s=volume_s * _forward_share(job, constants),
        case_bytes=case_bytes(job),
        in_parts=job.parts > 1,
        workers_per_host=options.workers_per_host,
        network_bytes_per_s=parse_rate(options.link),
        latency_s=parse_duration(options.latency),
        storage_bytes_per_s=parse_rate(options.storage) if options.storage else math.inf,
        shared_bytes_per_s=parse_rate(options.shared_storage) if options.shared_storage else math.inf,
        cases=job.cases,
        epochs=options.epochs,
        validation_cases=options.validation_cases,
        batch_per_worker=job.batch,
    )
    fixed = dataclasses.replace(growing, batch=options.global_batch or job.batch * options.most_workers)
    errors = tuple(predicted_errors(records))
    return ScaleRequest(job, options, {"fixed": fixed, "growing": growing}, errors, len(records) == 1)


def print_scaling(request: ScaleRequest) -> None:
    """The whole answer: two tables of times, published hours beside them, and what they rest on."""
    console, options, (fixed, growing) = new_console(), request.options, request.tables.values()
    console.print(request.job.describe())
    extent = f"{growing.cases:,} cases, {count_of(growing.epochs, 'epoch')}" if growing.cases else "add --cases"
    workers = f"{count_of(growing.workers_per_host, 'worker')} a host"
    console.print(f"{workers}, {format_bytes(growing.gradient_bytes)} of gradients; {extent}")
    same = f"The batch stays {fixed.batch}, learning rate {options.learning_rate:g}: the same training"
    grows = f"The batch grows, {growing.batch_per_worker} a worker: fewer, larger steps"
    for title, scaling in ((same, fixed), (grows, growing)):
        console.print(_times(title, scaling, options).rich())
    if options.against:
        one_h, many_h = options.against
        ends = (f"{one_h:g} h", f"{many_h:g} h", f"{one_h / many_h:.3g} times as fast as one")
        columns = (
            [f"{point.hosts} ({point.efficiency:.0%})" if point else "-" for point in request.reached(scaling).values()]
            for scaling in (fixed, growing)
        )
        rows = list(zip(ends, *columns))
        console.print(Table(("published", "batch stays", "batch grows"), rows, "Hosts that reach it").rich())
    console.print(Table(("", ""), list(request.basis), "What it rests on", f"Not counted: {NOT_COUNTED}").rich())


def to_json(request: ScaleRequest) -> Dict[str, Any]:
    """The figures and what they rest on, as JSON content."""
    growing, options = request.tables["growing"], request.options

    def parts(names: Sequence[str]) -> Dict[str, Any]:
        found = {name: getattr(growing, name) for name in names}
        return {name: None if value == math.inf else value for name, value in found.items()}

    content: Dict[str, Any] = {
        "job": request.job.to_json(),
        "gradient_bytes": growing.gradient_bytes,
        "work": parts(WORK),
        "training": parts(("cases", "epochs", "validation_cases")),
        "costs": dataclasses.asdict(growing.costs),
        "learning_rate": options.learning_rate,
        "notes": [f"{what}: {much}" for what, much in request.basis],
        "errors": {"shares": list(request.errors), "in_sample": request.is_in_sample},
        "hosts": parts(HOST),
    }
    for name, scaling in request.tables.items():
        rows = [
            {**point.to_json(), "learning_rates": scaling.rates(options.learning_rate, point)}
            if point
            else {"hosts": number, "problem": why}
            for number, point, why in _points(scaling, options.numbers)
        ]
        limits = {f"{share:g}": number for share, number in scaling.limits().items()}
        content[name] = {"batch": scaling.batch or None, "rows": rows, "limits": limits}
        if options.against:
            reached = request.reached(scaling).items()
            content[name]["reached"] = {end: point and point.to_json() for end, point in reached}
            one_h, many_h = options.against
            content["claim"] = {"one_h": one_h, "many_h": many_h, "speedup": one_h / many_h}
    return content


def draw_scaling(request: ScaleRequest) -> bytes:
    """Hours in all, or without cases the milliseconds of a volume, over hosts; both axes logarithmic. PNG.

    The dashed line is what one worker alone would take, divided by all workers. A fixed batch that cannot be dealt to
    some number of hosts has no point there.
    """
    figure = new_figure(9.6, 3.9)
    every = figure.subplots(1, 2, sharey=True)
    for axes, scaling in zip(every, request.tables.values()):
        _panel(axes, scaling, request)
        axes.legend(frameon=False, fontsize=8)
    every[0].set_ylabel("hours in all" if request.job.cases else "milliseconds a volume")
    cases = f", {request.job.cases:,} cases x {request.options.epochs}" if request.job.cases else ""
    title = f"{' x '.join(map(str, request.job.shape))}, {request.job.unet.filters} filters, {request.job.unet.dtype}"
    title = f"Predicted time on several hosts: {title}{cases}"
    figure.suptitle(title, fontsize=10.5, fontweight="bold", x=0.01, ha="left")
    figure.tight_layout(pad=0.6, w_pad=1.6, rect=(0, 0, 1, 0.98))
    return png(figure)


# --- Private helpers ---


def _forward_share(job: Job, constants: HostConstants) -> float:
    """Of a training step, what predicts: all up to the first gradient, the loss among it."""
    program = training_step(job)
    times = op_seconds(program, constants, job)
    first = next(index for index, op in enumerate(program.ops) if "gradient" in op.kind)
    return sum(times[:first]) / sum(times)


def _points(scaling: Scaling, hosts: Sequence[int]) -> List[Tuple[int, Optional[Point], str]]:
    """(hosts, what they come to, or why nothing) for each number of hosts."""
    found = []
    for number in hosts:
        try:
            found.append((number, scaling.point(number), ""))
        except ValueError as error:
            found.append((number, None, str(error).partition(";")[0]))
    return found


def _times(title: str, scaling: Scaling, options: ScalingOptions) -> Table:
    """Narrow enough for 80 columns: what is the same in every line, or unknown in every one, is left out."""
    reasons = []
    cells: Dict[str, Callable[[Point], str]] = {
        "s a step": lambda point: f"{point.step_s:.3g}",
        "exchange": lambda point: f"{point.network_share:.0%}",
        "cases/s": lambda point: f"{point.cases_per_s:.3g}",
        "efficiency": lambda point: f"{point.efficiency:.0%}",
    }
    if scaling.cases and scaling.epochs > 1:
        cells["an epoch"] = lambda point: "-" if point.epoch_s is None else format_seconds(point.epoch_s)
    if scaling.cases:
        cells["in all"] = lambda point: "-" if point.total_s is None else _hours(point.total_s)
    if not scaling.batch:
        for rule in ("sqrt", "linear"):
            cells[f"{rule} rate"] = lambda point, rule=rule: f"{scaling.rates(options.learning_rate, point)[rule]:.2g}"
    rows = []
    for number, point, why in _points(scaling, options.numbers):
        rows.append([str(number), *(cell(point) if point else "-" for cell in cells.values())])
        if why:
            reasons.append(f"{count_of(number, 'host')}: {why}")
    tenth, half = scaling.limits().values()
    limit = f"exchange above a tenth of a step from {tenth or '-'} hosts on, above half from {half or '-'}"
    return Table(["hosts", *cells], rows, title, "\n".join([*reasons, limit]), names=0)


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:,.3g} h" if seconds < 3.6e6 else f"{seconds / 3600:,.0f} h"


def _panel(axes: Any, scaling: Scaling, request: ScaleRequest) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    grows = f"the batch grows, {scaling.batch_per_worker} a worker"
    plain(axes, f"the batch stays {scaling.batch}" if scaling.batch else grows)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")

    def value(point: Point) -> Optional[float]:
        if not scaling.cases:
            return 1000 / point.cases_per_s
        return None if point.total_s is None else point.total_s / 3600

    numbers = sorted(request.options.numbers)
    points = [(number, value(point)) for number, point, _ in _points(scaling, numbers) if point and value(point)]
    first = scaling.first(lambda point: True)
    if points:
        # Of one worker that shares its host with none: what all others are held against.
        ideal = (value(first) or 0) * first.efficiency * first.hosts
        if ideal:
            axes.plot(*zip(*((n, ideal / n) for n, _ in points)), "--", color="#777777", linewidth=1.2, label="ideal")
        axes.plot(*zip(*points), "o-", color=PALETTE[0], linewidth=1.6, markersize=4.5, label="predicted")
    for hours in request.options.against or ():
        axes.axhline(hours, color="#333333", linewidth=0.9, linestyle="-.", label="published hours")
    axes.set_xticks(numbers, [str(number) for number in numbers])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.minorticks_off()
    axes.set_xlabel("hosts")
