"""A host in detail: which CPU is on which core, socket and NUMA node, and the memory of each node.

topology = read_topology()                this host, as this process may use it
topology = topology_of("paper-4x20")      one of EXAMPLE_HOSTS, so that a laptop can say what a server would do

Most of the project needs its sum alone, the estimator's `Host`; whoever lays workers on a host needs this.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, Iterable, List, Tuple, Union

from cpu3d.errors import InputError
from memory_estimator.common.units import GIB
from memory_estimator.host import Cpu, Host, Node, cpu_places, meminfo, node_memory, online, read_host
from memory_estimator.step.onednn import Kernels, highest_isa


@dataclass(frozen=True)
class Topology:
    """A host as one process sees it, before it is divided among workers."""

    host: Host
    """In sum: its counts are those of `cpus`."""
    cpus: Tuple[Cpu, ...]
    """Those that this process may run on."""
    nodes: Tuple[Node, ...]
    """Those whose memory it may use, some of them without CPUs perhaps."""
    machine_cpus: int
    """CPUs of the machine, whether this process may use them or not."""
    swap_bytes: int = 0

    @property
    def cores(self) -> Tuple[Tuple[Cpu, ...], ...]:
        """Each core's CPUs, in the order of sockets, then nodes, then CPUs: neighbours stand together."""
        found: Dict[int, List[Cpu]] = {}
        for cpu in sorted(self.cpus, key=lambda cpu: (cpu.socket, cpu.node, cpu.number)):
            found.setdefault(cpu.core, []).append(cpu)
        return tuple(map(tuple, found.values()))


def read_topology(root: Union[str, Path] = "/") -> Topology:
    """The host whose /proc and /sys lie under `root`; outside Linux all cores are on one socket and one node."""
    host, root = read_host(root), Path(root)
    if not (root / "proc/meminfo").is_file():
        cpus = tuple(Cpu(number, number % host.cores, 0, 0) for number in range(host.logical_cpus))
        return Topology(host, cpus, (Node(0, host.memory_bytes, host.available_bytes),), host.logical_cpus)
    swap_bytes = meminfo(root).get("SwapTotal", 0)
    return Topology(host, tuple(cpu_places(root)), tuple(node_memory(root)), len(online(root)), swap_bytes)


def cpu_ranges(numbers: Iterable[int]) -> str:
    """CPUs in Linux's own spelling: [0, 1, 2, 5] is "0-2,5"."""
    parts: List[List[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)


# --- Example hosts ---


def _made_up(
    model: str, isa: Tuple[str, ...], memory_gib: int, sockets: int, cores: int, threads: int = 1, nodes: int = 1
) -> Topology:
    """A host of `sockets` alike, of so many `cores` and NUMA `nodes` each, and so many hyper-`threads` a core.

    CPUs are numbered as by Linux: every core of every socket, then their second threads. Nodes count on over sockets.
    3 % of the memory is the system's own.
    """
    all_cores, all_nodes, memory_bytes = sockets * cores, sockets * nodes, memory_gib * GIB
    cpus = tuple(
        Cpu(thread * all_cores + core, core, core // cores, core * all_nodes // all_cores)
        for thread in range(threads)
        for core in range(all_cores)
    )
    free = int(0.97 * memory_bytes)
    kernels = Kernels(highest_isa(isa), cores=cores)
    host = Host(model, sockets, all_cores, len(cpus), all_nodes, memory_bytes, free, None, 0, None, isa, kernels)
    each = tuple(Node(node, memory_bytes // all_nodes, free // all_nodes) for node in range(all_nodes))
    return Topology(host, cpus, each, machine_cpus=len(cpus))


_VNNI = ("avx", "avx2", "fma", "avx512f", "avx512_vnni")
_BFLOAT16 = (*_VNNI, "avx_vnni", "avx512_bf16")
_AMX = (*_BFLOAT16, "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8")
_XEON_28 = _made_up("Xeon, 28 cores", _VNNI, 1536, sockets=2, cores=28, threads=2)
_CLOUD = _made_up("64 cores of a cloud", _VNNI[:3], 256, sockets=1, cores=64)
_CONTAINER = dataclasses.replace(_CLOUD.host, cpu_quota=7.0, cgroup_limit_bytes=32 * GIB)

EXAMPLE_HOSTS: Dict[str, Topology] = {
    "small-1x2": _made_up("2 cores with AVX512_BF16", _BFLOAT16, 24, sockets=1, cores=2),
    "xeon-2x28": dataclasses.replace(_XEON_28, swap_bytes=8 * GIB),
    "paper-4x20": _made_up("Xeon, 20 cores", _VNNI[:-1], 1536, sockets=4, cores=20, threads=2),
    "amx-2x60-snc4": _made_up("Xeon, 60 cores with AMX", _AMX, 2048, sockets=2, cores=60, threads=2, nodes=4),
    "container-7-of-64": dataclasses.replace(_CLOUD, host=_CONTAINER),
}
"""The paper's, one whose sockets are cut into NUMA nodes (SNC), a container with 7 CPUs' worth of time on 64 cores."""


def topology_of(name: str) -> Topology:
    """An example by its name. Raises InputError for any other."""
    if name not in EXAMPLE_HOSTS:
        raise InputError(f"host must be one of {', '.join(EXAMPLE_HOSTS)}, got {name}; choose one of them")
    return EXAMPLE_HOSTS[name]
