"""What an estimate for several hosts looks like: tables, what limits them, what they rest on; and as JSON."""

import dataclasses
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from memory_estimator.report import count_of, describe, new_console, new_table
from memory_estimator.scaling.model import Point, Scaling, limits, rates
from memory_estimator.scaling.options import ScaleRequest
from memory_estimator.units import format_bytes, format_seconds

Row = Tuple[int, Optional[Point], str]
"""Hosts, what they come to, or why nothing."""


def rows_of(scaling: Scaling, hosts: Sequence[int]) -> List[Row]:
    """One a number of hosts; what cannot be has no point but a reason."""
    found: List[Row] = []
    for number in hosts:
        try:
            found.append((number, scaling.point(number), ""))
        except ValueError as error:
            found.append((number, None, str(error).partition(";")[0]))
    return found


def print_scaling(request: ScaleRequest) -> None:
    """The whole answer."""
    console = new_console()
    say = lambda text: console.print(text, highlight=False, markup=False, soft_wrap=True)  # noqa: E731
    say(describe(request.job))
    per_host = request.growing.hosts.workers_per_host
    training = request.growing.training
    say(
        f"{count_of(per_host, 'worker')} a host, {format_bytes(request.growing.work.gradient_bytes)} of gradients; "
        + (
            f"{training.cases:,} cases, {count_of(training.epochs, 'epoch')}"
            if training.cases
            else "hours: add --cases"
        )
        + (f", {training.validation_cases} to validate after each" if training.validation_cases else "")
    )
    say("")
    fixed = f"The batch stays {request.fixed.batch}, learning rate {request.learning_rate:g}: the same training"
    growing = f"The batch grows, {request.growing.batch_per_worker} a worker: fewer, larger steps"
    for title, scaling in ((fixed, request.fixed), (growing, request.growing)):
        console.print(_times(title, rows_of(scaling, request.hosts), scaling))
        say(limit_line(scaling))
        say("")
    console.print(_learning_rates(request))
    say("")
    for line in claim_lines(request):
        say(line)
    for note in request.notes:
        say(note)
    say(error_line(request))
    say(
        "not counted: start-up, checkpoints, restarts, other traffic, oversubscribed switches; whether a larger batch "
        "learns as much an epoch"
    )


def to_json(request: ScaleRequest) -> Dict[str, Any]:
    """The figures and what they rest on, as JSON content."""
    content: Dict[str, Any] = {
        "job": {**dataclasses.asdict(request.job), "policy": request.job.policy, "micro_batch": request.job.micro},
        "gradient_bytes": request.growing.work.gradient_bytes,
        "work": dataclasses.asdict(request.growing.work),
        "training": dataclasses.asdict(request.growing.training),
        "costs": dataclasses.asdict(request.growing.costs),
        "learning_rate": request.learning_rate,
        "notes": [*request.notes, error_line(request)],
        "errors": {"shares": list(request.errors), "in_sample": request.is_in_sample},
    }
    hosts = request.growing.hosts
    content["hosts"] = {
        **dataclasses.asdict(hosts),
        **{
            name: None if getattr(hosts, name) == float("inf") else getattr(hosts, name)
            for name in ("storage_bytes_per_s", "shared_bytes_per_s")
        },
    }
    for name, scaling in (("fixed", request.fixed), ("growing", request.growing)):
        content[name] = {
            "batch": scaling.batch or None,
            "rows": [
                {**point.to_json(), "learning_rates": _rates(point, scaling, request.learning_rate)}
                if point
                else {"hosts": number, "problem": why}
                for number, point, why in rows_of(scaling, request.hosts)
            ],
            "limits": {f"{share:g}": number for share, number in limits(scaling).items()},
        }
        if request.claim:
            ends = zip(("one", "many", "speedup"), request.claim.reached(scaling))
            content[name]["reached"] = {end: point and point.to_json() for end, point in ends}
    if request.claim:
        content["claim"] = {**dataclasses.asdict(request.claim), "speedup": request.claim.speedup}
    return content


def limit_line(scaling: Scaling) -> str:
    """Where the network becomes the limit, in a sentence."""
    if not scaling.most_hosts:
        return "there are fewer volumes than a host has workers"
    tenth, half = limits(scaling).values()
    most = count_of(scaling.most_hosts, "host")
    if tenth is None:
        return f"up to {most} the exchange takes less than a tenth of a step"
    half_too = (
        f", and more than half from {count_of(half, 'host')} on" if half else f", and less than half up to {most}"
    )
    return f"the exchange takes more than a tenth of a step from {count_of(tenth, 'host')} on{half_too}"


def claim_lines(request: ScaleRequest) -> List[str]:
    """The published hours beside ours; nothing where none were given."""
    claim = request.claim
    if not claim:
        return []
    alone = request.growing.point(1)
    here = "" if alone.total_s is None else f"; here one host takes {_hours(alone.total_s)}"
    lines = [
        f"published: {claim.one_h:g} h on one, {claim.many_h:g} h on several, {claim.speedup:.3g} times as fast{here}"
    ]
    for name, scaling in (("batch fixed", request.fixed), ("batch growing", request.growing)):
        first = scaling.first(lambda point: True)
        if first is None or first.total_s is None:
            why = "an epoch has less than one batch" if first else "it has fewer volumes than a host has workers"
            lines.append(f"  {name}: cannot be compared, {why}")
            continue
        one, many, speedup = claim.reached(scaling)
        lines.append(
            f"  {name}: {claim.one_h:g} h {_on(one, scaling)}; {claim.many_h:g} h {_on(many, scaling)}; "
            f"{claim.speedup:.3g} times as fast as one {_on(speedup, scaling)}"
        )
    return lines


def error_line(request: ScaleRequest) -> str:
    """How far predictions are off, and how far that was looked at."""
    if not request.errors:
        return "error: not measured; `bench scaling` measures several workers on one host"
    worst = max(request.errors, key=abs)
    whose = "its own record, which flatters" if request.is_in_sample else "steps that no constant is from"
    return (
        f"error: worst {worst:+.1%} over {count_of(len(request.errors), 'measured step')} of workers on one host "
        f"({whose}); more hosts, and any network, are by rule and not verified"
    )


# --- Private helpers ---


def _times(title: str, rows: Sequence[Row], scaling: Scaling) -> Any:
    """Narrow enough for 80 columns: what is the same in every line, or unknown in every one, is left out."""
    table = new_table(title)
    table.caption_justify, table.collapse_padding = "left", True
    training, per_host = scaling.training, scaling.hosts.workers_per_host
    cells: Dict[str, Callable[[Point], str]] = {
        "s a step": lambda point: f"{point.step_s:.3g}",
        "exchange": lambda point: f"{point.network_share:.0%}",
        "cases/s": lambda point: f"{point.cases_per_s:.3g}",
        "efficiency": lambda point: f"{point.efficiency:.0%}",
    }
    if training.cases and training.epochs > 1:
        cells["an epoch"] = lambda point: "-" if point.epoch_s is None else format_seconds(point.epoch_s)
    if training.cases:
        cells["in all"] = lambda point: "-" if point.total_s is None else _hours(point.total_s)
    for name in ("hosts", *(("workers",) if per_host > 1 else ()), *cells):
        table.add_column(name, justify="right", no_wrap=True)
    for number, point, why in rows:
        first = (str(number), str(number * per_host))[: 1 + (per_host > 1)]
        if point:
            table.add_row(*first, *(cell(point) for cell in cells.values()))
        else:
            table.add_row(*first, *("-" for _ in cells))
            table.caption = f"{table.caption or ''}\n{count_of(number, 'host')}: {why}".strip()
    return table


def _learning_rates(request: ScaleRequest) -> Any:
    """Of the batch that grows."""
    table = new_table("Learning rates as the batch grows")
    for name in ("hosts", "batch", "sqrt", "linear"):
        table.add_column(name, justify="right", no_wrap=True)
    for number in request.hosts:
        point = request.growing.point(number)
        found = _rates(point, request.growing, request.learning_rate).values()
        table.add_row(str(number), str(point.batch), *(f"{rate:.2g}" for rate in found))
    return table


def _rates(point: Point, scaling: Scaling, learning_rate: float) -> Dict[str, float]:
    """Of a fixed batch the rate stays."""
    return rates(learning_rate, point.batch, scaling.batch or scaling.batch_per_worker)


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:,.3g} h" if seconds < 3.6e6 else f"{seconds / 3600:,.0f} h"


def _on(point: Optional[Point], scaling: Scaling) -> str:
    if point:
        return f"on {count_of(point.hosts, 'host')} ({point.efficiency:.0%})"
    return f"on none up to {count_of(scaling.most_hosts, 'host')}{', as the batch ends' if scaling.batch else ''}"
