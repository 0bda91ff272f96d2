"""An estimate for several hosts: its options, and its answer as JSON content and as tables."""

import argparse
import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple

from memory_estimator.estimate import Estimate
from memory_estimator.scaling.model import ASSUMED, Point, Scaling, pooled, predicted_errors, read_scaling
from memory_estimator.schema import given, option
from memory_estimator.step.timing import op_seconds
from memory_estimator.step.training_step import training_step
from memory_estimator.table import Table
from memory_estimator.units import count_of, format_bytes, format_seconds, parse_rate
from models.layer_plan import layer_plan

PUBLISHED = Path(__file__).resolve().parents[2] / "records" / "scaling.jsonl"
"""The record that comes with the project; it may not be there."""

HOSTS = (1, 2, 4, 8, 16, 32, 64)
GROUP = "several hosts, data parallel"
HOSTS_HELP = (
    f"time on so many hosts (without a number: {' '.join(map(str, HOSTS))}); --batch is then of one worker, --threads "
    "its cores, --host-memory of one host"
)

SECTIONS = {
    "work": ("volume_s", "gradient_bytes", "forward_s", "in_parts"),
    "hosts": ("workers_per_host", "network_bytes_per_s", "latency_s"),
    "training": ("cases", "epochs", "validation_cases"),
}
"""Of `Scaling`, in JSON: one worker's work, what the workers run on, and how much there is to do."""

NOT_COUNTED = "start-up, checkpoints, restarts, other traffic, slow storage; whether a larger batch learns as much"


@dataclass(frozen=True)
class ScalingOptions:
    """--hosts and what belongs to it."""

    hosts: Optional[Tuple[int, ...]] = option(None, HOSTS_HELP, "N", at_least=1, empty=True)
    workers_per_host: int = option(1, "processes of a host, as one a socket", "W", at_least=1)
    link: str = option("25Gbit/s", "of a host's link, as it is sold", "RATE")
    step_s: Optional[float] = option(
        None, "a measured step of one worker, of --batch volumes (default: estimated)", "S", above=0, below=math.inf
    )
    epochs: int = option(1, "of --cases each", "E", at_least=1)
    validation_cases: int = option(0, "predicted after every epoch", "N", at_least=0)
    global_batch: Optional[int] = option(
        None, "of all, where that stays (default: --batch for each of the most workers)", "G", at_least=1
    )
    record: Optional[Path] = option(
        None, f"of `bench scaling` (default: records/{PUBLISHED.name}, if it is there)", "FILE"
    )

    @property
    def numbers(self) -> Tuple[int, ...]:
        """Of hosts, each once."""
        return tuple(dict.fromkeys(self.hosts or HOSTS))

    @property
    def most_workers(self) -> int:
        """Of all the numbers of hosts that are asked for."""
        return max(self.numbers) * self.workers_per_host


def check_options(args: argparse.Namespace) -> None:
    """Raise ValueError for options that need --hosts, or that exclude it, and where a described host has no cores. This
    host's would say nothing: seconds, and scratch memory, go by a worker's threads."""
    found = given(ScalingOptions, args)
    if "hosts" not in found:
        if found:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in found)
            raise ValueError(f"--hosts must be given with {names}, got none; add --hosts")
        return
    if hasattr(args, "plan") or hasattr(args, "gpu_memory"):
        raise ValueError("--hosts must stand without --plan and --gpu-memory, got one of them; ask one at a time")
    described = ["--host-memory"] if hasattr(args, "host_memory") else []
    described += ["--workers-per-host"] if "workers_per_host" in found and "step_s" not in found else []
    if described and not hasattr(args, "threads"):
        raise ValueError(f"--threads must be given with {described[0]}, got none; add a worker's cores on that host")


def several_hosts(options: ScalingOptions, one: Estimate) -> Tuple[Dict[str, Any], List[Table]]:
    """The answer as JSON content and as tables, from the estimate of `one` worker. Raises ValueError for a rate or a
    record that cannot be read."""
    job = one.job
    path = options.record or (PUBLISHED if PUBLISHED.is_file() else None)
    records = read_scaling(path) if path else ()
    costs = pooled(records) if records else ASSUMED
    volume_s = (options.step_s or one.step_s) / job.batch
    # Of a training step, what predicts: all up to the first gradient, the loss among it.
    program = training_step(job)
    times = op_seconds(program, one.constants, job)
    first = next(index for index, op in enumerate(program.ops) if "gradient" in op.kind)
    growing = Scaling(
        volume_s,
        gradient_bytes=4 * sum(op.trainable for op in layer_plan(job.unet, job.shape)),
        costs=dataclasses.replace(costs, origin=f"{costs.origin} ({path.name})" if path else costs.origin),
        forward_s=volume_s * (sum(times[:first]) / sum(times)),
        in_parts=job.parts > 1,
        workers_per_host=options.workers_per_host,
        network_bytes_per_s=parse_rate(options.link),
        cases=job.cases,
        epochs=options.epochs,
        validation_cases=options.validation_cases,
        batch_per_worker=job.batch,
    )
    fixed = dataclasses.replace(growing, batch=options.global_batch or job.batch * options.most_workers)
    errors, basis = predicted_errors(records), vars(growing)
    worst = f"{max(errors, key=abs):+.1%} of a step, workers on one host" if errors else "not measured"
    worst += "; of its own record, which flatters" if len(records) == 1 else ""
    rests = [(name, basis[name]) for name in SECTIONS["work"] + SECTIONS["hosts"]] + list(vars(growing.costs).items())
    rests = [(name.replace("_", " "), value if isinstance(value, str) else f"{value:.3g}") for name, value in rests]
    rests.append(("worst error", worst))
    content: Dict[str, Any] = {
        "job": job.to_json(),
        "gradient_bytes": growing.gradient_bytes,
        "costs": dataclasses.asdict(growing.costs),
        "notes": [f"{what}: {much}" for what, much in rests],
        "errors": {"shares": errors, "in_sample": len(records) == 1},
    }
    for section, names in SECTIONS.items():
        content[section] = {name: basis[name] for name in names}
    workers = f"{count_of(growing.workers_per_host, 'worker')} a host, {format_bytes(growing.gradient_bytes)} exchanged"
    same = f"The batch stays {fixed.batch}: the same training; {workers}"
    grows = f"The batch grows, {growing.batch_per_worker} a worker: fewer, larger steps; {workers}"
    tables = []
    for name, scaling, title in (("fixed", fixed, same), ("growing", growing, grows)):
        rows, table = _times(scaling, options, title)
        content[name] = {"batch": scaling.batch or None, "rows": rows}
        tables.append(table)
    return content, [*tables, Table(("", ""), rests, "What it rests on", f"Not counted: {NOT_COUNTED}")]


def _times(scaling: Scaling, options: ScalingOptions, title: str) -> Tuple[List[Dict[str, Any]], Table]:
    """A row for each number of hosts, or why there is none; the table leaves out what is unknown in every line."""
    cells: Dict[str, Callable[[Point], str]] = {
        "s a step": lambda point: f"{point.step_s:.3g}",
        "exchange": lambda point: f"{point.network_share:.0%}",
        "cases/s": lambda point: f"{point.cases_per_s:.3g}",
        "efficiency": lambda point: f"{point.efficiency:.0%}",
    }
    if scaling.cases:
        cells["an epoch"] = lambda point: "-" if point.epoch_s is None else format_seconds(point.epoch_s)
        cells["in all"] = lambda point: "-" if point.total_s is None else format_seconds(point.total_s)
    rows, lines, problems = [], [], []
    for hosts in options.numbers:
        try:
            point = scaling.point(hosts)
        except ValueError as error:
            problem = str(error).partition(";")[0]
            rows.append({"hosts": hosts, "problem": problem})
            lines.append([str(hosts), *("-" for _ in cells)])
            problems.append(f"{count_of(hosts, 'host')}: {problem}")
        else:
            rows.append(vars(point))
            lines.append([str(hosts), *(cell(point) for cell in cells.values())])
    return rows, Table(["hosts", *cells], lines, title, "\n".join(problems), names=0)
