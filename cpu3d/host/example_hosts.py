"""Hosts by name or by file, so that a laptop can say what a terabyte server would do.

topology_of("paper-4x20")     one of EXAMPLE_HOSTS
topology_of("host.json")      what `doctor --json` has written there
"""

import dataclasses
from pathlib import Path
from typing import Dict, Optional, Tuple

from rich.table import Table

from cpu3d.errors import InputError
from cpu3d.host.topology import Cpu, Node, Topology, from_json
from memory_estimator.files import read_json
from memory_estimator.host import Host
from memory_estimator.units import GIB, format_bytes

AVX2 = ("avx", "avx2", "fma")
AVX512 = (*AVX2, "avx512f")
VNNI = (*AVX512, "avx512_vnni")
BFLOAT16 = (*VNNI, "avx_vnni", "avx512_bf16")
AMX = (*BFLOAT16, "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8")

FREE = 0.97
"""Of an example's memory: the rest is the system's own."""


def made_up(
    model: str,
    isa: Tuple[str, ...],
    memory_bytes: int,
    *,
    sockets: int,
    cores: int,
    threads: int = 1,
    nodes: int = 1,
    swap_bytes: int = 0,
) -> Topology:
    """A host of `sockets` alike, of so many `cores` and NUMA `nodes` each, and so many hyper-`threads` a core.

    CPUs are numbered as by Linux: every core of every socket, then their second threads. Nodes count on over sockets.
    """
    all_cores, all_nodes = sockets * cores, sockets * nodes
    cpus = tuple(
        Cpu(thread * all_cores + core, core, core // cores, core * all_nodes // all_cores)
        for thread in range(threads)
        for core in range(all_cores)
    )
    free = int(FREE * memory_bytes)
    host = Host(
        *(model, sockets, all_cores, len(cpus), all_nodes, memory_bytes, free),
        cgroup_limit_bytes=None,
        cgroup_used_bytes=0,
        cpu_quota=None,
        isa=isa,
    )
    each = tuple(Node(node, memory_bytes // all_nodes, free // all_nodes) for node in range(all_nodes))
    return Topology(host, cpus, each, machine_cpus=len(cpus), swap_bytes=swap_bytes, huge_pages="madvise")


def restricted(
    topology: Topology, cpus: Optional[int] = None, quota: Optional[float] = None, memory_bytes: Optional[int] = None
) -> Topology:
    """A container on a host: its first `cpus` alone (a cpuset), a `quota` of CPU time, a limit of memory."""
    kept = topology.cpus[:cpus]
    host = dataclasses.replace(
        topology.host,
        sockets=len({cpu.socket for cpu in kept}),
        cores=len({cpu.core for cpu in kept}),
        logical_cpus=len(kept),
        numa_nodes=len({cpu.node for cpu in kept}),
        cgroup_limit_bytes=memory_bytes,
        cpu_quota=quota,
    )
    return dataclasses.replace(topology, host=host, cpus=kept)


_CLOUD = made_up("64 cores of a cloud", AVX2, 256 * GIB, sockets=1, cores=64)

EXAMPLE_HOSTS: Dict[str, Tuple[str, Topology]] = {
    "small-1x2": (
        "two cores, as of a small cloud machine",
        made_up("2 cores with AVX512_BF16", BFLOAT16, 24 * GIB, sockets=1, cores=2),
    ),
    "xeon-2x28": (
        "two sockets of 28 cores, two hyper-threads each",
        made_up("Xeon, 28 cores", VNNI, 1536 * GIB, sockets=2, cores=28, threads=2, swap_bytes=8 * GIB),
    ),
    "paper-4x20": (
        "four sockets of 20 cores and 1.5 TiB, as the paper's",
        made_up("Xeon, 20 cores", AVX512, 1536 * GIB, sockets=4, cores=20, threads=2),
    ),
    "amx-2x60-snc4": (
        "two sockets of 60 cores with AMX, each cut into four NUMA nodes",
        made_up("Xeon, 60 cores with AMX", AMX, 2048 * GIB, sockets=2, cores=60, threads=2, nodes=4),
    ),
    "amx-2x60-snc2": (
        "the same cut into two NUMA nodes each",
        made_up("Xeon, 60 cores with AMX", AMX, 2048 * GIB, sockets=2, cores=60, threads=2, nodes=2),
    ),
    "container-7-of-64": (
        "a container with 7 CPUs' worth of time (quota) and 32 GiB on a machine of 64 cores",
        restricted(_CLOUD, quota=7.0, memory_bytes=32 * GIB),
    ),
    "container-cpuset-7-of-64": (
        "a container that has 7 of the 64 cores to itself (cpuset), and 32 GiB",
        restricted(_CLOUD, cpus=7, memory_bytes=32 * GIB),
    ),
}
"""Name -> (in words, the host)."""


def topology_of(name_or_file: str) -> Topology:
    """An example by its name, else what `doctor --json` wrote to a file. Raises InputError where it is neither."""
    if name_or_file in EXAMPLE_HOSTS:
        return EXAMPLE_HOSTS[name_or_file][1]
    path = Path(name_or_file)
    if not path.is_file():
        raise InputError(
            f"host must be a file of `doctor --json` or one of {', '.join(EXAMPLE_HOSTS)}, got {name_or_file}; "
            "choose one of them"
        )
    try:
        content = read_json(path)
    except ValueError as error:
        raise InputError(f"host {path} must be JSON, got {error}; write it anew with `doctor --json`") from None
    return from_json(content.get("topology") if isinstance(content, dict) else None, str(path))


def hosts_table() -> Table:
    """The examples, for `--on-host list`."""
    table = Table(title="Hosts to plan for with --on-host", title_justify="left")
    for column in ("name", "what it is", "cores", "memory"):
        table.add_column(column, justify="right" if column in ("cores", "memory") else "left", overflow="fold")
    for name, (words, topology) in EXAMPLE_HOSTS.items():
        limit = topology.host.cgroup_limit_bytes or topology.host.memory_bytes
        table.add_row(name, words, str(topology.host.usable_cores), format_bytes(limit))
    return table
