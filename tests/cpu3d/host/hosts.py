"""Made-up hosts of several sockets, and their /proc and /sys."""

import dataclasses
import functools

from cpu3d.host.thread_plan import Topology, cpu_ranges
from memory_estimator.host import Cpu, Host

GIB = 2**30


def made_up(model, isa, memory_gib, sockets, cores, threads=1, nodes=1):
    """A host of `sockets` alike, of so many `cores` and NUMA `nodes` each, and so many
    hyper-`threads` a core.

    CPUs are numbered as by Linux: every core of every socket, then their second threads. 3 % of the
    memory is in use."""
    all_cores = sockets * cores
    all_nodes = sockets * nodes
    memory_bytes = memory_gib * GIB
    cpus = tuple(
        Cpu(thread * all_cores + core, core, core // cores, core * all_nodes // all_cores)
        for thread in range(threads)
        for core in range(all_cores)
    )
    free = int(0.97 * memory_bytes)
    host = Host(
        model, sockets, all_cores, len(cpus), all_nodes, memory_bytes, free, None, 0, None, isa
    )
    return Topology(host, cpus)


VNNI = ("avx", "avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni")
BFLOAT16 = (*VNNI, "avx_vnni", "avx512_bf16")
AMX = (*BFLOAT16, "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8")
SMALL = made_up("2 cores with AVX512_BF16", BFLOAT16, 24, sockets=1, cores=2)
XEON = made_up("Xeon, 28 cores", VNNI, 1536, sockets=2, cores=28, threads=2)
PAPER = made_up("Xeon, 20 cores", VNNI[:-1], 1536, sockets=4, cores=20, threads=2)
SNC4 = made_up("Xeon, 60 cores with AMX", AMX, 2048, sockets=2, cores=60, threads=2, nodes=4)
CLOUD = made_up("64 cores of a cloud", VNNI[:3], 256, sockets=1, cores=64)
_LIMITS = {"cpu_quota": 7.0, "cgroup_limit_bytes": 32 * GIB, "cgroup_used_bytes": 4 * GIB}
QUOTA = dataclasses.replace(CLOUD, host=dataclasses.replace(CLOUD.host, **_LIMITS))
HOSTS = (SMALL, XEON, PAPER, SNC4, QUOTA)


def masked(topology, *cpus):
    """A host as a process sees it that is held to some CPUs."""
    kept = tuple(cpu for cpu in topology.cpus if cpu.number in cpus)
    numbers, cores, sockets, nodes = (len(set(column)) for column in zip(*kept))
    counts = {"logical_cpus": numbers, "cores": cores, "sockets": sockets, "numa_nodes": nodes}
    return dataclasses.replace(
        topology, cpus=kept, host=dataclasses.replace(topology.host, **counts)
    )


def write_line(root, path, text):
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(f"{text}\n")


def write_tree(root, topology):
    """A host's /proc and /sys, as Linux would have them."""
    write = functools.partial(write_line, root)
    host = topology.host
    numbers = [cpu.number for cpu in topology.cpus]
    flags = f"model name\t: {host.cpu_model}\nflags\t\t: fpu {' '.join(host.isa)}"
    write(
        "proc/cpuinfo",
        "\n\n".join(f"processor\t: {number}\n{flags}" for number in range(max(numbers) + 1)),
    )
    write(
        "proc/meminfo",
        f"MemTotal: {host.memory_bytes // 1024} kB\n"
        f"MemAvailable: {host.available_bytes // 1024} kB",
    )
    write("proc/self/status", f"Name:\tpython\nCpus_allowed_list:\t{cpu_ranges(numbers)}")
    write("proc/self/cgroup", "0::/")
    write("sys/devices/system/cpu/online", cpu_ranges(numbers))
    if host.cpu_quota:
        write("sys/fs/cgroup/cpu.max", f"{host.cpu_quota * 100000:.0f} 100000")
    if host.cgroup_limit_bytes:
        write("sys/fs/cgroup/memory.max", host.cgroup_limit_bytes)
        write("sys/fs/cgroup/memory.current", host.cgroup_used_bytes)
    for cpu in topology.cpus:
        folder = f"sys/devices/system/cpu/cpu{cpu.number}/topology"
        siblings = [other.number for other in topology.cpus if other.core == cpu.core]
        write(f"{folder}/thread_siblings_list", ",".join(map(str, siblings)))
        write(f"{folder}/physical_package_id", cpu.socket)
    for node in range(host.numa_nodes):
        folder = f"sys/devices/system/node/node{node}"
        numbers = [cpu.number for cpu in topology.cpus if cpu.node == node]
        write(f"{folder}/cpulist", cpu_ranges(numbers))
        sizes = {
            "MemTotal": host.memory_bytes // host.numa_nodes,
            "MemFree": host.available_bytes // host.numa_nodes - 3 * GIB,
            "Active(file)": GIB,
            "Inactive(file)": 2 * GIB,
            "Active(anon)": 5 * GIB,
        }
        lines = [f"Node {node} {name}:   {size // 1024} kB" for name, size in sizes.items()]
        write(f"{folder}/meminfo", "\n".join([*lines, f"Node {node} HugePages_Total:     0"]))
