"""A host, what its workers would be given, and what is in force in a process: lines and tables to print."""

import os
from typing import List, Sequence

from cpu3d.host.memory import memory_policy
from cpu3d.host.thread_plan import THREADS, ThreadPlan
from cpu3d.host.topology import Topology, cpu_ranges
from cpu3d.util.records import count
from memory_estimator.host import Host
from memory_estimator.table import Table
from memory_estimator.units import format_bytes


def describe(host: Host, plan: ThreadPlan, engine: str) -> List[str]:
    """Lines on a process that is set up, before its work starts; `engine` as `host.apply.engine_name` tells it.

    What is in force, asked of the environment and of the kernel, for a user's own setting wins over the plan's. A
    number of threads that does so is warned of: clusters set OMP_NUM_THREADS=1 for everybody, and many cores idle.
    """
    tuning = {name: os.environ.get(name, value) for name, value in plan.tuning.items()}
    lines = [
        *host_lines(host),
        f"engine: {engine}",
        f"threads: {', '.join(f'{name}={value}' for name, value in tuning.items())}",
    ]
    places = []
    if plan.cpus and len(plan.cpus) < host.logical_cpus:
        held = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
        cpus = f"CPUs {cpu_ranges(plan.cpus)}"
        places.append(cpus if held == set(plan.cpus) else f"not held to {cpus}, the system does not allow it")
    policy = memory_policy()
    if policy and policy.mode != "default":
        places.append(f"memory {policy.mode} on NUMA nodes {cpu_ranges(policy.nodes)}")
    elif plan.memory_nodes:
        nodes = f"NUMA nodes {cpu_ranges(plan.memory_nodes)}"
        places.append(f"memory not {plan.memory_policy} on {nodes}, the system does not allow it")
    lines += [f"places: {', '.join(places)}"] * bool(places)
    for name in THREADS:
        if name in tuning and tuning[name] != plan.tuning[name]:
            rule = f"must be {plan.tuning[name]} to use this host as planned, got {tuning[name]} from your environment"
            lines.append(f"warning: {name} {rule}; `unset {name}`, unless you want it so")
    return lines


def host_lines(host: Host) -> List[str]:
    """Two lines on what a host has."""
    quota = "" if host.cpu_quota is None else f", quota {host.cpu_quota:g} CPUs"
    limit = "" if host.cgroup_limit_bytes is None else f", limit {format_bytes(host.cgroup_limit_bytes)}"
    bfloat16 = "fast bfloat16" if host.fast_bfloat16 else "no fast bfloat16"
    return [
        f"host: {host.cpu_model}, {count(host.cores, 'core')} on {count(host.sockets, 'socket')} and "
        f"{count(host.numa_nodes, 'NUMA node')}, {count(host.logical_cpus, 'CPU')}{quota}, {bfloat16}",
        f"memory: {format_bytes(host.memory_bytes)}{limit}, {format_bytes(host.free_bytes)} free",
    ]


def describe_plans(topology: Topology, plans: Sequence[ThreadPlan]) -> Table:
    """One line a worker: where it runs, where its memory comes from, its threads. Below, what goes for all of them."""
    core_of = {cpu.number: cpu.core for cpu in topology.cpus}
    share = format_bytes(topology.host.free_bytes // len(plans))
    kernel = "the one node" if len(topology.nodes) == 1 else "where the kernel takes it"
    order = {"preferred": "node {} first, then others", "interleaved": "nodes {} in turns", "": kernel}
    rows = []
    for index, plan in enumerate(plans):
        cpus = cpu_ranges(plan.cpus) if plan.cpus else f"any of {cpu_ranges(core_of)}"
        memory = order[plan.memory_policy].format(cpu_ranges(plan.memory_nodes))
        cores = str(len({core_of[cpu] for cpu in plan.cpus})) if plan.cpus else "not bound"
        rows.append((str(index), cpus, memory, cores, share, str(plan.intra_op)))
    by_worker = ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS")
    alike = [f"{name}={value}" for name, value in plans[0].tuning.items() if name not in by_worker]
    caption = "\n".join([*alike, f"{' and '.join(by_worker)}: the threads above"])
    columns = ("worker", "CPUs", "memory from", "cores", "free for it", "threads")
    return Table(columns, rows, title=f"What it would set for {count(plans, 'worker')}", caption=caption, names=3)


def overridden(plans: Sequence[ThreadPlan]) -> List[str]:
    """Variables that the user has set himself to something else, which wins, such as "OMP_NUM_THREADS=3"."""
    return [
        f"{name}={os.environ[name]}"
        for name in plans[0].environment
        if os.environ.get(name) not in (None, *(plan.environment[name] for plan in plans if name in plan.environment))
    ]
