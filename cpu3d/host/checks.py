"""What a host lacks, or has set otherwise than training wants it: each point with what was found and what to do. Pure.

for check in host_checks(topology, plans):
    print(check.name, check.state, check.found, check.advice)
"""

from dataclasses import dataclass
from typing import Iterator, List, Optional, Sequence

from cpu3d.host.thread_plan import LOPSIDED, ThreadPlan
from cpu3d.host.topology import Topology
from memory_estimator.units import GIB, format_bytes

STATES = ("ok", "note", "warn", "fail", "skipped")
"""A note is worth knowing and leaves nothing to set; a warning says what to do."""

FEW_BYTES = 8 * GIB
"""Free for a worker: less than a whole brain in the reference network takes without a tighter policy."""


@dataclass(frozen=True)
class Check:
    """One point."""

    name: str
    state: str
    """One of STATES."""
    found: str
    advice: str = ""
    """What to do; "" where there is nothing."""


def host_checks(topology: Topology, plans: Sequence[ThreadPlan]) -> List[Check]:
    """The points that follow from what a host has and from the plans of its workers."""
    return [
        _instructions(topology),
        _cpu_quota(topology),
        _cpu_mask(topology, plans),
        _hyper_threads(topology),
        *_workers(plans),
        _free_memory(topology, len(plans)),
        _memory_limit(topology),
        *_nodes(topology),
        _swap(topology),
        _huge_pages(topology),
    ]


def process_checks(topology: Topology, address_limit: Optional[int], memory_high: Optional[int]) -> List[Check]:
    """Those of limits, in bytes, that this process has beside its host's own; None for one that is not set."""
    return [_addresses(address_limit), _memory_high(topology, memory_high)]


def software_checks(tensorflow: Optional[str], itex: Optional[str], overridden: Sequence[str]) -> Iterator[Check]:
    """Those of this installation: versions, None for what is not installed, and variables that the user has set."""
    if tensorflow is None:
        yield Check("TensorFlow", "fail", "not installed", "run `./run.sh setup`")
        return
    yield Check("TensorFlow", "ok", tensorflow)
    if itex is None:
        advice = "`./run.sh setup` has it for Python 3.9 to 3.11 on Linux x86-64: steps are faster with it"
        yield Check("ITEX", "warn", "not installed", advice)
    else:
        yield Check("ITEX", "ok", itex)
    if overridden:
        names = " ".join(setting.partition("=")[0] for setting in overridden)
        advice = f"`unset {names}` to have the plan's own"
        yield Check("environment", "warn", f"your own settings win: {', '.join(overridden)}", advice)


# --- Private helpers ---


def _instructions(topology: Topology) -> Check:
    isa = topology.host.isa
    if topology.host.fast_bfloat16:
        unit = "AMX" if "amx_bf16" in isa else "AVX512_BF16"
        return Check("bfloat16 instructions", "ok", f"{unit}: training computes in bfloat16")
    widest = "AVX-512" if "avx512f" in isa else "AVX2" if "avx2" in isa else "no AVX2"
    found = f"none ({widest}): training computes in float32; AVX512_BF16 or AMX would halve its time and its memory"
    return Check("bfloat16 instructions", "note", found)


def _cpu_quota(topology: Topology) -> Check:
    host = topology.host
    if host.cpu_quota is None:
        return Check("CPU quota", "ok", "none")
    found = f"{host.cpu_quota:g} of {host.logical_cpus} CPUs' worth of time: {host.usable_cores} threads, not bound"
    return Check("CPU quota", "warn", found, "ask for whole CPUs (a cpuset) instead: threads then keep their caches")


def _cpu_mask(topology: Topology, plans: Sequence[ThreadPlan]) -> Check:
    host = topology.host
    found = f"{host.logical_cpus} of the machine's {topology.machine_cpus} CPUs"
    sizes = _sizes(topology, "socket")
    if len(sizes) > 1 and max(sizes) > LOPSIDED * min(sizes):
        found += f", {' and '.join(map(str, sizes))} of them on a socket"
        return Check("CPU mask", "warn", found, "ask for the same number on every socket, or for one socket")
    return Check("CPU mask", "ok", found)


def _hyper_threads(topology: Topology) -> Check:
    host = topology.host
    if host.logical_cpus == host.cores:
        return Check("hyper-threads", "ok", "one CPU a core: each computes")
    return Check("hyper-threads", "ok", "one of a core computes, the other is left to the threads that read data")


def _workers(plans: Sequence[ThreadPlan]) -> Iterator[Check]:
    threads = [plan.intra_op for plan in plans]
    if min(threads) < max(threads):
        found = f"{min(threads)} to {max(threads)} threads each: at every step all wait for the slowest"
        yield Check("workers", "warn", found, "choose a number that divides the cores of a socket")


def _free_memory(topology: Topology, workers: int) -> Check:
    free = topology.host.free_bytes // workers
    found = f"{format_bytes(free)} for each of {workers} workers" if workers > 1 else format_bytes(free)
    if free < FEW_BYTES:
        advice = "end other programs, or see what fits: python -m memory_estimator --plan"
        return Check("free memory", "warn", found, f"{advice}{', or fewer workers' if workers > 1 else ''}")
    return Check("free memory", "ok", found)


def _memory_limit(topology: Topology) -> Check:
    host = topology.host
    if host.cgroup_limit_bytes is None:
        return Check("memory limit", "ok", "none")
    found = f"{format_bytes(host.cgroup_limit_bytes)} of the machine's {format_bytes(host.memory_bytes)} (cgroup)"
    return Check("memory limit", "warn", found, "raise it if the machine is yours: above it a run is killed")


def _addresses(limit: Optional[int]) -> Check:
    if limit is None:
        return Check("ulimit -v", "ok", "unlimited")
    found = f"{format_bytes(limit)} of addresses, mapped stores and libraries among them"
    return Check("ulimit -v", "warn", found, "`ulimit -v unlimited`: at the limit TensorFlow ends the process")


def _memory_high(topology: Topology, high: Optional[int]) -> Check:
    if high is None or high >= (topology.host.cgroup_limit_bytes or topology.host.memory_bytes):
        return Check("memory.high", "ok", "none")
    found = f"{format_bytes(high)} (cgroup): above it the kernel slows a run down, to a standstill at worst"
    return Check("memory.high", "warn", found, "raise it to the memory limit, or keep the memory plan below it")


def _nodes(topology: Topology) -> Iterator[Check]:
    """Where the memory is; nothing to tell on a host of one node."""
    used = {cpu.node for cpu in topology.cpus}
    with_memory = {node.number: node.memory_bytes for node in topology.nodes if node.memory_bytes}
    if len(used | set(with_memory)) == 1:
        return
    without = sorted(used - set(with_memory))
    here = [size for number, size in with_memory.items() if number in used]
    if without:
        found = f"none on {_named(without)}, whose CPUs take it all from far"
        yield Check("memory of nodes", "warn", found, "put memory modules on every socket, or lift the memory mask")
    elif max(here) > 2 * min(here):
        found = f"{format_bytes(min(here))} to {format_bytes(max(here))} a node"
        yield Check("memory of nodes", "warn", found, "put the same on every socket: the smallest limits a near share")
    else:
        yield Check("memory of nodes", "ok", f"on all {len(here)} that have CPUs, {format_bytes(min(here))} each")


def _swap(topology: Topology) -> Check:
    if topology.swap_bytes:
        found = f"{format_bytes(topology.swap_bytes)}: a step that needs it takes many times as long"
        return Check("swap", "warn", found, "`swapoff -a`, or go by the memory plan, which does not count on it")
    return Check("swap", "ok", "none")


def _huge_pages(topology: Topology) -> Check:
    found = topology.huge_pages or "not told"
    return Check("huge pages", "ok", f"{found}; a step takes as long with any setting")


def _sizes(topology: Topology, place: str) -> List[int]:
    """CPUs on each socket or node."""
    places = [getattr(cpu, place) for cpu in topology.cpus]
    return [places.count(one) for one in sorted(set(places))]


def _named(nodes: Sequence[int]) -> str:
    return f"node{'s' * (len(nodes) > 1)} {', '.join(map(str, nodes))}"
