"""A host in detail: which CPU is on which core, socket and NUMA node, and the memory of each node.

topology = read_topology()                this host, as this process may use it
topology = topology_of("paper-4x20")      one of EXAMPLE_HOSTS, so that a laptop can say what a server would do
topology = topology_of("host.json")       what `doctor --json` has written there

The estimator's `Host` is the sum of it, which most of the project needs; who lays workers on a host needs this.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple, Union

from cpu3d.errors import InputError
from memory_estimator.files import read_json, typed
from memory_estimator.host import (
    Cpu,
    Host,
    Node,
    cpu_places,
    huge_pages,
    meminfo,
    node_memory,
    online_cpus,
    read_host,
)
from memory_estimator.table import Table
from memory_estimator.units import GIB, format_bytes

SCHEMA = 1
"""Version of the JSON."""


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
    huge_pages: str = ""
    """Transparent huge pages: "always", "madvise" or "never"; "" where the kernel does not say."""

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
        nodes = (Node(0, host.memory_bytes, host.available_bytes),)
        return Topology(host, cpus, nodes, machine_cpus=host.logical_cpus)
    return Topology(
        host=host,
        cpus=tuple(cpu_places(root)),
        nodes=tuple(node_memory(root)),
        machine_cpus=online_cpus(root),
        swap_bytes=meminfo(root).get("SwapTotal", 0),
        huge_pages=huge_pages(root),
    )


def restricted(
    topology: Topology,
    cpus: Optional[Sequence[int]] = None,
    quota: Optional[float] = None,
    memory_bytes: Optional[int] = None,
) -> Topology:
    """A container on a host: some of its CPUs alone (a cpuset), a `quota` of CPU time, a limit of memory."""
    kept = tuple(cpu for cpu in topology.cpus if cpus is None or cpu.number in cpus)
    host = dataclasses.replace(topology.host, **_sums(kept), cgroup_limit_bytes=memory_bytes, cpu_quota=quota)
    return dataclasses.replace(topology, host=host, cpus=kept)


# --- As JSON ---


@dataclass(frozen=True)
class _Saved:
    """The JSON of a host: a CPU is [number, core, socket, node], a node is [number, memory, free] in bytes."""

    schema: int
    host: Host
    cpus: Tuple[Tuple[int, int, int, int], ...]
    nodes: Tuple[Tuple[int, int, int], ...]
    machine_cpus: int
    swap_bytes: int
    huge_pages: str


def to_json(topology: Topology) -> Dict[str, Any]:
    """JSON content that `from_json` reads."""
    return {
        "schema": SCHEMA,
        **{field.name: getattr(topology, field.name) for field in dataclasses.fields(topology)},
        "host": {**dataclasses.asdict(topology.host), "isa": list(topology.host.isa)},
        "cpus": [list(cpu) for cpu in topology.cpus],
        "nodes": [list(node) for node in topology.nodes],
    }


def from_json(content: Any, source: str) -> Topology:
    """The host that `to_json` has described. Raises InputError, naming `source`, for anything else."""
    rule, todo = "must be what `doctor --json` writes, got something else", "write it anew with this version's doctor"
    if isinstance(content, dict) and "schema" in content:
        rule = f"must have schema {SCHEMA}, got {content['schema']!r}"
        if content["schema"] == SCHEMA:
            try:
                saved = typed(content, _Saved, "host")
            except ValueError as error:
                raise InputError(f"host {source}: {error}; {todo}") from None
            counts = _sums(Cpu(*cpu) for cpu in saved.cpus)
            if saved.cpus and saved.nodes and all(getattr(saved.host, name) == n for name, n in counts.items()):
                cpus, nodes = tuple(Cpu(*cpu) for cpu in saved.cpus), tuple(Node(*node) for node in saved.nodes)
                return Topology(saved.host, cpus, nodes, saved.machine_cpus, saved.swap_bytes, saved.huge_pages)
            rule = f"must have CPUs and NUMA nodes, and counts that are theirs, {counts}"
    raise InputError(f"host {source} {rule}; {todo}")


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


def _sums(cpus: Iterable[Cpu]) -> Dict[str, int]:
    """The counts of `Host` that follow from the CPUs."""
    cpus = tuple(cpus)
    return {
        "sockets": len({cpu.socket for cpu in cpus}),
        "cores": len({cpu.core for cpu in cpus}),
        "logical_cpus": len(cpus),
        "numa_nodes": len({cpu.node for cpu in cpus}),
    }


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
    host = Host(model, sockets, all_cores, len(cpus), all_nodes, memory_bytes, free, None, 0, None, isa)
    each = tuple(Node(node, memory_bytes // all_nodes, free // all_nodes) for node in range(all_nodes))
    return Topology(host, cpus, each, machine_cpus=len(cpus), huge_pages="madvise")


_AVX2 = ("avx", "avx2", "fma")
_VNNI = (*_AVX2, "avx512f", "avx512_vnni")
_BFLOAT16 = (*_VNNI, "avx_vnni", "avx512_bf16")
_AMX = (*_BFLOAT16, "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8")
_CLOUD = _made_up("64 cores of a cloud", _AVX2, 256, sockets=1, cores=64)
_XEON_28 = _made_up("Xeon, 28 cores", _VNNI, 1536, sockets=2, cores=28, threads=2)

EXAMPLE_HOSTS: Dict[str, Topology] = {
    "small-1x2": _made_up("2 cores with AVX512_BF16", _BFLOAT16, 24, sockets=1, cores=2),
    "xeon-2x28": dataclasses.replace(_XEON_28, swap_bytes=8 * GIB),
    "paper-4x20": _made_up("Xeon, 20 cores", _VNNI[:-1], 1536, sockets=4, cores=20, threads=2),
    "amx-2x60-snc4": _made_up("Xeon, 60 cores with AMX", _AMX, 2048, sockets=2, cores=60, threads=2, nodes=4),
    "amx-2x60-snc2": _made_up("Xeon, 60 cores with AMX", _AMX, 2048, sockets=2, cores=60, threads=2, nodes=2),
    "container-7-of-64": restricted(_CLOUD, quota=7.0, memory_bytes=32 * GIB),
    "container-cpuset-7-of-64": restricted(_CLOUD, cpus=range(7), memory_bytes=32 * GIB),
}
"""The paper's, two whose sockets are cut into NUMA nodes (SNC), and two containers on a machine of 64 cores: one with 7
CPUs' worth of time, one with 7 cores to itself."""


def topology_of(name_or_file: str) -> Topology:
    """An example by its name, else what `doctor --json` wrote to a file. Raises InputError where it is neither."""
    if name_or_file in EXAMPLE_HOSTS:
        return EXAMPLE_HOSTS[name_or_file]
    path = Path(name_or_file)
    if not path.is_file():
        names = ", ".join(EXAMPLE_HOSTS)
        raise InputError(f"host must be a file of `doctor --json` or one of {names}, got {path}; choose one of them")
    try:
        content = read_json(path)
    except ValueError as error:
        raise InputError(f"host {path} must be JSON, got {error}; write it anew with `doctor --json`") from None
    return from_json(content.get("topology") if isinstance(content, dict) else None, str(path))


def hosts_table() -> Table:
    """The examples, for `--on-host list`."""
    rows = []
    for name, host in ((name, topology.host) for name, topology in EXAMPLE_HOSTS.items()):
        counts = map(str, (host.sockets, host.numa_nodes, host.usable_cores))
        rows.append((name, host.cpu_model, *counts, format_bytes(host.cgroup_limit_bytes or host.memory_bytes)))
    columns = ("name", "CPU", "sockets", "NUMA nodes", "cores", "memory")
    return Table(columns, rows, title="Hosts to plan for with --on-host", names=2)
