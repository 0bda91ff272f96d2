"""What a launch would start, printed: the workers, their places on a host, the commands with what each is told."""

import shlex
from typing import Mapping, Sequence, Tuple

from rich.console import Console
from rich.table import Table

from cpu3d.distributed.plan import HOROVOD, Plan, environ_of
from cpu3d.host.describe import describe_plans, overridden
from cpu3d.host.thread_plan import ThreadPlan, thread_plans
from cpu3d.host.topology import Topology, cpu_ranges


def show(plan: Plan, topology: Topology, commands: Mapping[int, Tuple[str, ...]]) -> None:
    """Print it on stdout. Workers on other hosts are shown as if those were like this one.

    `commands` are by the rank of the worker, or the one that starts all of them. Raises InputError for more workers on
    a host than it has places for.
    """
    console = Console()
    places = {count: thread_plans(topology, count) for count in sorted(_sharing(plan))}
    _line(console, f"{plan.words}; a dry run, nothing is started")
    console.print(_workers(plan, topology, places))
    for of_one_host in places.values():
        console.print(describe_plans(topology, of_one_host))
    if len(plan.hosts) > 1:
        _line(console, "All hosts are taken to be like this one.")
    for setting in overridden([place for of_one_host in places.values() for place in of_one_host]):
        _line(console, f"note: {setting} is set here, and wins")
    if len(plan.hosts) == 1 and plan.cluster.workers > 1:
        shared = not plan.ports_here and plan.engine != HOROVOD
        _line(console, "They share memory, no port is opened." if shared else "Their ports are chosen at the start.")
    if plan.note:
        _line(console, f"note: {plan.note}")
    for rank, command in commands.items():
        given = [f"{name}={shlex.quote(value)}" for name, value in environ_of(plan, rank, {}).items()]
        whom = "all workers" if plan.engine == HOROVOD else f"worker {rank}"
        _line(console, f"\n{whom}:\n{' '.join([*given, shlex.join(command)])}")


# --- Private helpers ---


def _sharing(plan: Plan) -> Tuple[int, ...]:
    """How many workers share a host's CPUs, of all hosts."""
    return (1,) if plan.apart else tuple(set(plan.hosts.values()))


def _workers(plan: Plan, topology: Topology, places: Mapping[int, Sequence[ThreadPlan]]) -> Table:
    """By rank: the address, which of its host's workers it is, and on which of its sockets."""
    socket_of = {cpu.number: cpu.socket for cpu in topology.cpus}
    table = Table(title="Workers", title_justify="left")
    table.add_column("rank", justify="right")
    table.add_column("address", overflow="fold")
    table.add_column("worker of its host", justify="right")
    table.add_column("socket", justify="right")
    some = len(plan.ranks) < plan.cluster.workers
    if some:
        table.add_column("starts here")
    for rank, address in enumerate(plan.cluster.addresses):
        seen = plan.cluster.of_rank(rank)
        place = None if plan.apart else places[len(seen.local_ranks)][seen.local_index]
        sockets = cpu_ranges({socket_of[cpu] for cpu in place.cpus}) if place and place.cpus else "any"
        here = ["yes" if rank in plan.ranks else "no"] if some else []
        table.add_row(str(rank), address, str(seen.local_index), sockets, *here)
    return table


def _line(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)
