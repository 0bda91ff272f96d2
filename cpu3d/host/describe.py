"""What to say of a process that is set up, before its work starts: its host, engine, threads, CPUs and memory nodes."""

import os
from typing import List

from cpu3d.data.words import count
from cpu3d.host.memory_policy import memory_policy
from cpu3d.host.thread_plan import THREADS, ThreadPlan
from cpu3d.host.topology import cpu_ranges
from memory_estimator.host import Host
from memory_estimator.units import format_bytes


def describe(host: Host, plan: ThreadPlan, engine: str) -> List[str]:
    """Lines to print; `engine` as `host.apply.engine_name` tells it.

    What is in force, asked of the environment and of the kernel, for a user's own setting wins over the plan's. A
    number of threads that does so is warned of: clusters set OMP_NUM_THREADS=1 for everybody, and many cores idle.
    """
    quota = "" if host.cpu_quota is None else f", quota {host.cpu_quota:g} CPUs"
    limit = "" if host.cgroup_limit_bytes is None else f", limit {format_bytes(host.cgroup_limit_bytes)}"
    bfloat16 = "fast bfloat16" if host.fast_bfloat16 else "no fast bfloat16"
    tuning = {name: os.environ.get(name, value) for name, value in plan.tuning.items()}
    places = _places(host, plan)
    return [
        f"host: {host.cpu_model}, {count(host.cores, 'core')} on {count(host.sockets, 'socket')} and "
        f"{count(host.numa_nodes, 'NUMA node')}, {count(host.logical_cpus, 'CPU')}{quota}, {bfloat16}",
        f"memory: {format_bytes(host.memory_bytes)}{limit}, {format_bytes(host.free_bytes)} free",
        f"engine: {engine}",
        f"threads: {', '.join(f'{name}={value}' for name, value in tuning.items())}",
        *([f"places: {', '.join(places)}"] if places else []),
        *(
            f"warning: {name} must be {plan.tuning[name]} to use this host as planned, got {tuning[name]} from your "
            f"environment; `unset {name}`, unless you want it so"
            for name in THREADS
            if name in tuning and tuning[name] != plan.tuning[name]
        ),
    ]


# --- Private helpers ---


def _places(host: Host, plan: ThreadPlan) -> List[str]:
    """What is in force of the plan's CPUs and memory nodes, asked of the kernel; nothing where all is one's own."""
    told = []
    if plan.cpus and len(plan.cpus) < host.logical_cpus:
        held = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
        if held != set(plan.cpus):
            told.append(f"not held to CPUs {cpu_ranges(plan.cpus)}, the system does not allow it")
        else:
            told.append(f"CPUs {cpu_ranges(plan.cpus)}")
    found = memory_policy()
    if found and found.mode != "default":
        told.append(f"memory {found.mode} on NUMA nodes {cpu_ranges(found.nodes)}")
    elif plan.memory_nodes:
        told.append(
            f"memory not {plan.memory_policy} on NUMA nodes {cpu_ranges(plan.memory_nodes)}, the system does "
            "not allow it"
        )
    return told
