"""What a host has, and what its workers would be given, as tables to print."""

import os
from typing import List, Sequence

from rich.table import Table

from cpu3d.host.thread_plan import ThreadPlan
from cpu3d.host.topology import Topology, cpu_ranges
from memory_estimator.units import format_bytes

IN_TABLE = ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS")
"""Variables that the table has as a column: they may differ from worker to worker."""


def describe_host(topology: Topology) -> Table:
    """What there is, one thing a line."""
    host = topology.host
    table = Table(title="What this host has", show_header=False, title_justify="left")
    threads = host.logical_cpus / host.cores
    rows = [
        ("CPU", host.cpu_model),
        ("sockets", str(host.sockets)),
        ("cores", f"{host.cores}, {threads:g} {'hyper-threads' if threads > 1 else 'thread'} each"),
        ("CPUs", f"{host.logical_cpus} of the machine's {topology.machine_cpus}: {_cpus(topology)}"),
        ("CPU quota", "none" if host.cpu_quota is None else f"{host.cpu_quota:g} CPUs' worth of time"),
        ("instructions", " ".join(host.isa) or "not told"),
        ("memory", f"{format_bytes(host.memory_bytes)}, {format_bytes(host.available_bytes)} of it available"),
        ("memory limit", _limit(topology)),
        *((f"NUMA node {node.number}", _node(topology, node.number)) for node in topology.nodes),
        ("swap", format_bytes(topology.swap_bytes) if topology.swap_bytes else "none"),
        ("huge pages", topology.huge_pages or "not told"),
    ]
    for row in rows:
        table.add_row(*row)
    return table


def describe_plans(topology: Topology, plans: Sequence[ThreadPlan]) -> Table:
    """One line a worker: where it runs, where its memory comes from, its threads. Below, what goes for all of them."""
    count = len(plans)
    table = Table(
        title=f"What it would set for {count} worker{'s' * (count > 1)}",
        title_justify="left",
        caption="\n".join(below_table(plans)),
        caption_justify="left",
    )
    table.add_column("worker", justify="right")
    table.add_column("cores", justify="right")
    table.add_column("CPUs", overflow="fold")
    table.add_column("memory from", overflow="fold")
    table.add_column("free for it", justify="right")
    table.add_column("threads", justify="right")
    core_of = {cpu.number: cpu.core for cpu in topology.cpus}
    share_bytes = topology.host.free_bytes // count
    for index, plan in enumerate(plans):
        cores = str(len({core_of[cpu] for cpu in plan.cpus})) if plan.cpus else "not bound"
        cpus = cpu_ranges(plan.cpus) if plan.cpus else f"any of {cpu_ranges(core_of)}"
        table.add_row(str(index), cores, cpus, _memory(topology, plan), format_bytes(share_bytes), str(plan.intra_op))
    return table


def below_table(plans: Sequence[ThreadPlan]) -> List[str]:
    """NAME=value for every tuning variable that workers get alike, those of the table in words, and uneven shares."""
    lines = [f"{name}={value}" for name, value in plans[0].tuning.items() if name not in IN_TABLE]
    lines.append(f"{' and '.join(IN_TABLE)}: the threads above")
    threads = [plan.intra_op for plan in plans]
    if min(threads) < max(threads):
        lines.append(f"uneven: {min(threads)} to {max(threads)} threads each; at every step all wait for the slowest")
    return lines


def overridden(plans: Sequence[ThreadPlan]) -> List[str]:
    """Variables that the user has set himself to something else, which wins, such as "OMP_NUM_THREADS=3"."""
    return [
        f"{name}={os.environ[name]}"
        for name in plans[0].environment
        if os.environ.get(name) not in (None, *(plan.environment[name] for plan in plans if name in plan.environment))
    ]


# --- Private helpers ---


def _cpus(topology: Topology) -> str:
    return cpu_ranges(cpu.number for cpu in topology.cpus)


def _limit(topology: Topology) -> str:
    host = topology.host
    if host.cgroup_limit_bytes is None:
        return "none"
    return f"{format_bytes(host.cgroup_limit_bytes)} (cgroup), {format_bytes(host.cgroup_used_bytes)} of it used"


def _node(topology: Topology, number: int) -> str:
    node = next(node for node in topology.nodes if node.number == number)
    cpus = [cpu for cpu in topology.cpus if cpu.node == number]
    where = f"CPUs {cpu_ranges(cpu.number for cpu in cpus)}" if cpus else "no CPUs"
    sockets = f", socket {cpu_ranges({cpu.socket for cpu in cpus})}" if cpus else ""
    return f"{format_bytes(node.memory_bytes)}, {format_bytes(node.free_bytes)} free; {where}{sockets}"


def _memory(topology: Topology, plan: ThreadPlan) -> str:
    nodes = cpu_ranges(plan.memory_nodes)
    if plan.memory_policy == "preferred":
        return f"node {nodes} first, then others"
    if plan.memory_policy == "interleaved":
        return f"nodes {nodes} in turns"
    return "the one node" if len(topology.nodes) == 1 else "where the kernel takes it"
