"""A host in detail, and how many threads, which CPUs and which switches suit its workers: pure
functions of it.

topology = read_topology()                                   # this host, as this process may use it
plans = thread_plans(topology, default_workers(topology))    # one worker a socket
plan = thread_plan(host)                                     # one process has the host to itself

`host.apply` carries a plan out; `describe` shows the part of it that is in force. Most of the
project needs a host's sum alone, the estimator's `Host`; to place workers on a host takes its
`Topology`."""

import dataclasses
import itertools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, Sequence, Tuple, Union

from cpu3d.errors import InputError
from cpu3d.util.records import count
from memory_estimator.common.units import format_bytes
from memory_estimator.host import Cpu, Host, read_host, usable_cpus

Cores = Sequence[Tuple[Cpu, ...]]  # the CPUs of each core, in the order of sockets and nodes

LOPSIDED = 2
"""Sockets of which one has more than this many times the cores of another, as a mask of CPUs may
leave them, get no worker each: the small one would hold up the large one at every step."""

THREADS = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS")
# where Intel's OpenMP holds its threads on a host of several nodes
KMP_AFFINITY = "granularity=fine,compact,1,0"

SWITCHES = {  # set by every process
    # From the launcher of ITEX 2.15 and its practice guide (0 or 1 for convolutional networks):
    # after an operation Intel's OpenMP spins this many ms before it sleeps. A step alone takes as
    # long with 0, 1 or 200 (records/log.md); that the data threads fare better with 1 than with 200
    # is assumed.
    "KMP_BLOCKTIME": "1",
    # TensorFlow itself turns oneDNN on only for CPUs with certain instructions; without it, 16x
    # (records/log.md).
    "TF_ENABLE_ONEDNN_OPTS": "1",
    # TensorFlow 2.16 and later: tf.keras is Keras 2 (tf_keras). Not for TensorFlow 2.15, see
    # host.apply.
    "TF_USE_LEGACY_KERAS": "1",
    # 3 is fatal only: at 2, every start without a GPU prints three harmless "Unable to register
    # cuDNN factory". A real error reaches Python as an exception at any level.
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "ITEX_CPP_MIN_LOG_LEVEL": "2",
    # CUDA counts cards from the fastest on, their driver by the slot they are in: gpu:0 is to be
    # one card for both.
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
}


@dataclass(frozen=True)
class Topology:
    """A host as one process sees it, before it is divided among workers."""

    host: Host  # in sum: its counts are those of `cpus`
    cpus: Tuple[Cpu, ...]  # those that this process may run on

    @property
    def cores(self) -> Cores:
        """The CPUs of each core, in the order of sockets, then nodes, then cores: neighbours are
        together."""
        cpus = sorted(self.cpus, key=lambda cpu: (cpu.socket, cpu.node, cpu.core, cpu.number))
        return [tuple(core) for _, core in itertools.groupby(cpus, lambda cpu: cpu.core)]


def read_topology(root: Union[str, Path] = "/") -> Topology:
    """The host whose /proc and /sys are under `root`; outside Linux all cores are on one socket and
    one node."""
    root = Path(root)
    host = read_host(root)
    if not (root / "proc/meminfo").is_file():
        cpus = tuple(Cpu(number, number % host.cores, 0, 0) for number in range(host.logical_cpus))
        return Topology(host, cpus)
    return Topology(host, tuple(usable_cpus(root)))


@dataclass(frozen=True)
class ThreadPlan:
    """The settings of a training process, to be made before TensorFlow is imported."""

    intra_op: int
    """Threads inside one operation, TensorFlow's or those of the OpenMP pool that ITEX runs oneDNN
    on."""
    environment: Mapping[str, str]
    """Every variable to set, those of THREADS among them. A variable the user has set himself
    wins."""
    cpus: Tuple[int, ...] = ()
    """CPUs that the process is held to, both hyper-threads of each core; () leaves it where it
    is."""

    @property
    def tuning(self) -> Dict[str, str]:
        """The variables that differ by host: how many threads, where they stay and how long they
        wait."""
        return {
            name: value
            for name, value in self.environment.items()
            if name in THREADS or name.startswith("KMP_")
        }


def thread_plan(host: Host) -> ThreadPlan:
    """The plan for one process that has `host` to itself, without CPUs and nodes.

    One thread a physical core: oneDNN's kernels fill a core's vector units, so a second
    hyper-thread only halves its cache. One operation at a time: as fast as two and a memory peak 7
    % lower, because parallel gradient operations delay each other's frees (measured on 2 cores,
    128^3, bfloat16)."""
    return _plan(host.usable_cores, binds=host.numa_nodes > 1 and host.cpu_quota is None)


def thread_plans(topology: Topology, workers: int) -> Tuple[ThreadPlan, ...]:
    """The plan of each worker on a host, by its index there.

    Workers get whole sockets, else equal parts of one, and never a part of a core. A worker is held
    to its cores with both hyper-threads: one computes, the other is for the threads that read and
    augment. Its memory comes from the node of the thread that touches a page first, as by the
    kernel. Under a quota nothing is bound, as every container of the host would be bound to the
    same first CPUs.

    Raises InputError, with the nearest numbers that are possible, if cores cannot be divided so.
    """
    host = topology.host
    possible = possible_workers(topology)
    if workers not in possible:
        nearest = sorted(sorted(possible, key=lambda number: abs(number - workers))[:4])
        rule = "workers must divide the number of sockets, or be a multiple of it with a core each"
        have = f"{count(host.usable_cores, 'core')} on {count(host.sockets, 'socket')}"
        raise InputError(f"{rule}, got {workers} on {have}; use {' or '.join(map(str, nearest))}")
    if host.cpu_quota is not None:
        return (_plan(host.usable_cores // workers, binds=False),) * workers
    plans = []
    for share in _shares(topology.cores, workers):
        plan = _plan(len(share), binds=host.numa_nodes > 1)
        cpus = tuple(sorted(cpu.number for core in share for cpu in core))
        plans.append(dataclasses.replace(plan, cpus=cpus))
    return tuple(plans)


def default_workers(topology: Topology) -> int:
    """A worker for each socket; one in all under a quota, or if sockets are lopsided, as a CPU mask
    may leave them."""
    sizes = [len(socket) for socket in _sockets(topology.cores)]
    if topology.host.cpu_quota is not None or max(sizes) > LOPSIDED * min(sizes):
        return 1
    return len(sizes)


def possible_workers(topology: Topology) -> List[int]:
    """The numbers of workers that `thread_plans` has plans for."""
    numbers = range(1, topology.host.usable_cores + 1)
    if topology.host.cpu_quota is not None:
        return list(numbers)
    return [number for number in numbers if _shares(topology.cores, number)]


def host_share(host: Host, workers: int) -> Host:
    """The part of a host that one of its workers has: cores, quota and free memory divided.

    `memory_bytes` stays the machine's: TensorFlow's pool grows by it in every process alike. If
    workers share the cores unevenly it is the smallest part."""
    if workers == 1:
        return host
    limit = host.cgroup_limit_bytes
    if limit:
        limit = host.cgroup_used_bytes + (limit - host.cgroup_used_bytes) // workers
    quota = host.cpu_quota
    if quota:
        quota /= workers
    return dataclasses.replace(
        host,
        sockets=max(1, host.sockets // workers),
        cores=max(1, host.cores // workers),
        logical_cpus=max(1, host.logical_cpus // workers),
        numa_nodes=max(1, host.numa_nodes // workers),
        available_bytes=host.available_bytes // workers,
        cgroup_limit_bytes=limit,
        cpu_quota=quota,
    )


# --- Lines to print ---


def host_lines(host: Host) -> List[str]:
    """Two lines on a host."""
    cores = f"{count(host.cores, 'core')} on {count(host.sockets, 'socket')}"
    cpus = count(host.logical_cpus, "CPU")
    if host.cpu_quota is not None:
        cpus += f", quota {host.cpu_quota:g} CPUs"
    dtype = "fast bfloat16" if host.fast_bfloat16 else "no fast bfloat16"
    memory = format_bytes(host.memory_bytes)
    if host.cgroup_limit_bytes is not None:
        memory += f", limit {format_bytes(host.cgroup_limit_bytes)}"
    nodes = count(host.numa_nodes, "NUMA node")
    return [
        f"host: {host.cpu_model}, {cores} and {nodes}, {cpus}, {dtype}",
        f"memory: {memory}, {format_bytes(host.free_bytes)} free",
    ]


def describe(host: Host, plan: ThreadPlan, engine: str) -> List[str]:
    """Lines on a process that is set up, before its work starts; `engine` as of
    `host.apply.engine_name`.

    The lines are of what is in force, by the environment and the kernel, as a user's own setting
    wins over the plan's. A number of threads that does so is warned of: clusters set
    OMP_NUM_THREADS=1 for all users, and many cores idle."""
    tuning = {name: os.environ.get(name, value) for name, value in plan.tuning.items()}
    threads = ", ".join(f"{name}={value}" for name, value in tuning.items())
    lines = [*host_lines(host), f"engine: {engine}", f"threads: {threads}"]
    if hasattr(os, "sched_getaffinity"):
        cpus = os.sched_getaffinity(0)
        if len(cpus) < host.logical_cpus:
            lines.append(f"CPUs: {cpu_ranges(cpus)}")
    for name in THREADS:
        if tuning.get(name) != plan.tuning.get(name):
            rule = f"{name} must be {plan.tuning[name]} to use this host as planned"
            got = f"{tuning[name]} from your environment"
            lines.append(f"warning: {rule}, got {got}; `unset {name}`, unless you chose it")
    return lines


def plan_lines(plans: Sequence[ThreadPlan]) -> List[str]:
    """A line for each worker: its CPUs and its variables."""
    lines = []
    for index, plan in enumerate(plans):
        cpus = f"CPUs {cpu_ranges(plan.cpus)}" if plan.cpus else "CPUs not bound"
        tuning = ", ".join(f"{name}={value}" for name, value in plan.tuning.items())
        lines.append(f"plan of worker {index}: {cpus}, {tuning}")
    return lines


def cpu_ranges(numbers: Iterable[int]) -> str:
    """CPUs in Linux's own spelling: [0, 1, 2, 5] is "0-2,5"."""
    parts: List[List[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)


# --- Private helpers ---


def _plan(threads: int, *, binds: bool) -> ThreadPlan:
    """A plan of so many threads; `binds` if each of them should stay on a core of its own.

    That is assumed to pay, from the same guide, on several nodes alone: memory stays near the
    thread that touched it. Intel's OpenMP keeps its threads within the CPUs that the process is
    held to. Python's threads stay free: the one that enters an operation, and is bound as the
    first, is of TensorFlow's pool."""
    environment = {
        "TF_NUM_INTRAOP_THREADS": str(threads),
        "TF_NUM_INTEROP_THREADS": "1",
        "OMP_NUM_THREADS": str(threads),
        **SWITCHES,
    }
    if binds:
        environment["KMP_AFFINITY"] = KMP_AFFINITY
    return ThreadPlan(threads, environment)


def _shares(cores: Cores, workers: int) -> List[Cores]:
    """The cores of each worker, whole sockets or parts of one with a core more or less; [] if they
    cannot be divided.

    Cores are in the order of nodes, so that parts of a socket are whole nodes if the numbers allow.
    """
    sockets = _sockets(cores)
    if len(sockets) % workers == 0:
        return [[core for socket in part for core in socket] for part in _cut(sockets, workers)]
    inside = workers // len(sockets)
    if workers % len(sockets) or any(len(socket) < inside for socket in sockets):
        return []
    return [share for socket in sockets for share in _cut(socket, inside)]


def _sockets(cores: Cores) -> List[Cores]:
    """Cores by their socket, in order."""
    return [list(socket) for _, socket in itertools.groupby(cores, lambda core: core[0].socket)]


def _cut(things: Sequence[Any], count: int) -> List[Sequence[Any]]:
    """Parts of neighbours, as many in each or one more."""
    ends = [len(things) * part // count for part in range(count + 1)]
    return [things[begin:end] for begin, end in zip(ends, ends[1:])]
