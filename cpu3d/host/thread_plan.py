"""How many threads, which CPUs and which switches suit the workers on a host: the decision, as pure functions.

plans = thread_plans(topology, default_workers(topology))    # one a socket
plan = thread_plan(host)                                     # for one process that has the host to itself

`host.apply` carries a plan out.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Sequence, Tuple

from cpu3d.errors import InputError
from cpu3d.host.topology import Cpu, Topology
from memory_estimator.host import Host

Cores = Sequence[Tuple[Cpu, ...]]
"""The CPUs of each core, in the order of sockets and nodes."""

LOPSIDED = 2
"""Sockets of which one has more than this many times the cores of another, as a mask of CPUs may leave them, get no
worker each: the small one would hold up the large one at every step."""

THREADS = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS")
"""Of a plan's variables, the numbers of threads."""

KMP_AFFINITY = "granularity=fine,compact,1,0"
"""Where the threads of Intel's OpenMP stay on a host of several nodes."""


@dataclass(frozen=True)
class ThreadPlan:
    """What one training process on one host should set before TensorFlow is imported."""

    intra_op: int
    """Threads inside one operation."""
    inter_op: int
    """Operations at a time."""
    omp_threads: int
    """Threads of the OpenMP pool that ITEX runs oneDNN on; the same cores as `intra_op`, never both at once."""
    environment: Mapping[str, str]
    """Every variable to set, these three among them. A variable the user has set himself wins."""
    cpus: Tuple[int, ...] = ()
    """CPUs that the process is held to, both hyper-threads of each core; () leaves it where it is."""
    memory_nodes: Tuple[int, ...] = ()
    """NUMA nodes that its memory comes from: one is preferred, several take turns page by page; () is the kernel's own
    way, which is the node of whoever touches a page first."""

    @property
    def tuning(self) -> Dict[str, str]:
        """Of `environment`, what differs by host: how many threads, where they stay and how long they wait."""
        return {name: value for name, value in self.environment.items() if name in THREADS or name.startswith("KMP_")}

    @property
    def memory_policy(self) -> str:
        """ "" for the kernel's own, "preferred" or "interleaved"."""
        if not self.memory_nodes:
            return ""
        return "preferred" if len(self.memory_nodes) == 1 else "interleaved"


def thread_plan(host: Host) -> ThreadPlan:
    """The plan for one process that has `host` to itself, without CPUs and nodes.

    One thread a physical core: oneDNN's kernels fill a core's vector units, so a second hyper-thread only
    halves its cache. One operation at a time: as fast as two and a memory peak 7 % lower, because parallel
    gradient operations delay each other's frees (measured on 2 cores, 128^3, bfloat16).
    """
    return _plan(host.usable_cores, binds=host.numa_nodes > 1 and host.cpu_quota is None)


def thread_plans(topology: Topology, workers: int) -> Tuple[ThreadPlan, ...]:
    """The plan of each worker on a host, by its index there.

    Workers get whole sockets where they are as many or fewer, else parts of one, whole NUMA nodes where they come out
    even, and never a part of a core. A worker is held to its cores with both hyper-threads: one computes, the other is
    for the threads that read and augment, which else would take turns with those that compute.

    What a worker touches should lie near: on one node it is taken from there first, and from others rather than be
    killed; over several nodes pages take turns, because one thread often touches first what all of them use. Under a
    quota nothing is bound, as every container of the host would be bound to the same first CPUs.

    Raises InputError, with the numbers that do, for workers of whom one would have to share a core, or a socket with
    less than a whole other one: they wait for the slowest at every step.
    """
    host, possible = topology.host, possible_workers(topology)
    if workers not in possible:
        *first, last = sorted(sorted(possible, key=lambda number: abs(number - workers))[:4])
        have = f"{host.cores} cores on {host.sockets} socket{'s' * (host.sockets > 1)}"
        rule = "have whole sockets or equal parts of them, and a core each"
        if host.cpu_quota is not None:
            have, rule = f"{host.usable_cores} cores' worth of quota", "have a whole CPU's worth of time each"
        use = f"{', '.join(map(str, first))} or {last}" if first else last
        raise InputError(f"workers must {rule}, got {workers} on {have}; use {use}")
    if host.cpu_quota is not None:
        return (_plan(host.usable_cores // workers, binds=False),) * workers
    with_memory = {node.number for node in topology.nodes if node.memory_bytes} if len(topology.nodes) > 1 else set()
    plans = []
    for share in _shares(topology.cores, workers):
        plan = _plan(len(share), binds=host.numa_nodes > 1)
        cpus = tuple(sorted(cpu.number for core in share for cpu in core))
        nodes = {cpu.node for core in share for cpu in core} & with_memory
        plans.append(dataclasses.replace(plan, cpus=cpus, memory_nodes=tuple(sorted(nodes))))
    return tuple(plans)


def default_workers(topology: Topology) -> int:
    """One a socket; one in all under a quota, or where sockets are lopsided, as a CPU mask may leave them."""
    sizes = [len(socket) for socket in _sockets(topology.cores)]
    return 1 if topology.host.cpu_quota is not None or max(sizes) > LOPSIDED * min(sizes) else len(sizes)


def possible_workers(topology: Topology) -> List[int]:
    """The numbers of workers that `thread_plans` has plans for."""
    cores = topology.cores
    if topology.host.cpu_quota is not None:
        return list(range(1, topology.host.usable_cores + 1))
    return [workers for workers in range(1, len(cores) + 1) if _shares(cores, workers)]


def share_of(host: Host, workers: int, *, cpus_apart: bool = False) -> Host:
    """The part of a host that one of its workers has: cores, quota and free memory divided.

    With `cpus_apart` the host is what a worker sees that is held to CPUs of its own, as by Slurm: those stay as they
    are. `memory_bytes` stays the machine's: TensorFlow's pool grows by it in every process alike. Where workers share
    the cores unevenly it is the smallest part.
    """
    if workers == 1:
        return host
    used, limit = host.cgroup_used_bytes, host.cgroup_limit_bytes
    part = dataclasses.replace(
        host,
        available_bytes=host.available_bytes // workers,
        cgroup_limit_bytes=limit and used + (limit - used) // workers,
    )
    if cpus_apart:
        return part
    counts = {
        name: max(1, getattr(host, name) // workers) for name in ("sockets", "cores", "logical_cpus", "numa_nodes")
    }
    return dataclasses.replace(part, **counts, cpu_quota=host.cpu_quota and host.cpu_quota / workers)


# --- Private helpers ---


def _plan(threads: int, *, binds: bool) -> ThreadPlan:
    """A plan of so many threads; `binds` where each of them should stay on a core of its own."""
    environment = {
        "TF_NUM_INTRAOP_THREADS": str(threads),
        "TF_NUM_INTEROP_THREADS": "1",
        "OMP_NUM_THREADS": str(threads),
        # From the launcher of ITEX 2.15 and its practice guide (0 or 1 for convolutional networks): after an operation
        # Intel's OpenMP spins this many ms before it sleeps. A step alone takes as long with 0, 1 or 200
        # (docs/log.md); that the data threads fare better with 1 than with 200 is assumed.
        "KMP_BLOCKTIME": "1",
        # TensorFlow itself turns oneDNN on only for CPUs with certain instructions; without it, 16x (records).
        "TF_ENABLE_ONEDNN_OPTS": "1",
        # TensorFlow 2.16 and later: tf.keras is Keras 2 (tf_keras). Not for TensorFlow 2.15, see host.apply.
        "TF_USE_LEGACY_KERAS": "1",
        # 3 is fatal only: at 2, every start without a GPU prints three harmless "Unable to register cuDNN factory".
        # A real error reaches Python as an exception whatever this says.
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "ITEX_CPP_MIN_LOG_LEVEL": "2",
        # CUDA counts cards from the fastest on, their driver by the slot they are in: gpu:0 is to be one card for both.
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    if binds:
        # Assumed, from the same guide: each thread stays on its core, so that memory it touched first stays near.
        # Not on one node, where nothing is far and a bound thread cannot make way for a data thread. Intel's OpenMP
        # lays them within the CPUs that the process is held to, one a core before a second on any. Python's threads
        # stay free: it is a thread of TensorFlow's pool that enters an operation and is bound as the first.
        environment["KMP_AFFINITY"] = KMP_AFFINITY
    return ThreadPlan(intra_op=threads, inter_op=1, omp_threads=threads, environment=environment)


def _shares(cores: Cores, workers: int) -> List[Cores]:
    """The cores of each worker, whole sockets or parts of one with a core more or less; [] where they cannot be dealt.

    Cores are in the order of nodes, so that parts of a socket are whole nodes where they come out even.
    """
    sockets = _sockets(cores)
    if len(sockets) % workers == 0:
        return [[core for socket in part for core in socket] for part in _cut(sockets, workers)]
    inside = workers // len(sockets)
    if workers % len(sockets) or any(len(socket) < inside for socket in sockets):
        return []
    return [share for socket in sockets for share in _cut(socket, inside)]


def _sockets(cores: Cores) -> List[List[Tuple[Cpu, ...]]]:
    """Cores by their socket, in order."""
    found: Dict[int, List[Tuple[Cpu, ...]]] = {}
    for core in cores:
        found.setdefault(core[0].socket, []).append(core)
    return list(found.values())


def _cut(things: Sequence[Any], count: int) -> List[Sequence[Any]]:
    """Neighbours, as many in each part or one more."""
    ends = [len(things) * part // count for part in range(count + 1)]
    return [things[begin:end] for begin, end in zip(ends, ends[1:])]
