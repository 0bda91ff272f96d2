"""Hosts read from folders that look like their /proc and /sys."""

import dataclasses

import pytest

from cpu3d.errors import InputError
from cpu3d.host.topology import EXAMPLE_HOSTS, Node, cpu_ranges, read_topology, topology_of
from memory_estimator.host import Cpu

GIB = 2**30


def write_tree(root, topology):
    """A host's /proc and /sys, as Linux would have them."""

    def write(path, text):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(f"{text}\n")

    host, numbers = topology.host, [cpu.number for cpu in topology.cpus]
    flags = f"model name\t: {host.cpu_model}\nflags\t\t: fpu {' '.join(host.isa)}"
    write("proc/cpuinfo", "\n\n".join(f"processor\t: {number}\n{flags}" for number in range(topology.machine_cpus)))
    write(
        "proc/meminfo",
        f"MemTotal: {host.memory_bytes // 1024} kB\nMemAvailable: {host.available_bytes // 1024} kB\n"
        f"SwapTotal: {topology.swap_bytes // 1024} kB",
    )
    write("proc/self/status", f"Name:\tpython\nCpus_allowed_list:\t{cpu_ranges(numbers)}")
    write("proc/self/cgroup", "0::/")
    write("sys/devices/system/cpu/online", f"0-{topology.machine_cpus - 1}")
    if host.cpu_quota:
        write("sys/fs/cgroup/cpu.max", f"{host.cpu_quota * 100000:.0f} 100000")
    if host.cgroup_limit_bytes:
        write("sys/fs/cgroup/memory.max", host.cgroup_limit_bytes)
        write("sys/fs/cgroup/memory.current", host.cgroup_used_bytes)
    for cpu in topology.cpus:
        place = f"sys/devices/system/cpu/cpu{cpu.number}/topology"
        siblings = [other.number for other in topology.cpus if other.core == cpu.core]
        write(f"{place}/thread_siblings_list", ",".join(map(str, siblings)))
        write(f"{place}/physical_package_id", cpu.socket)
    for node in topology.nodes:
        place = f"sys/devices/system/node/node{node.number}"
        write(f"{place}/cpulist", cpu_ranges(cpu.number for cpu in topology.cpus if cpu.node == node.number))
        sizes = {
            "MemTotal": node.memory_bytes,
            "MemFree": node.free_bytes - 3 * GIB,
            "Active(file)": GIB,
            "Inactive(file)": 2 * GIB,
            "Active(anon)": 5 * GIB,
        }
        lines = [f"Node {node.number} {name}:   {size // 1024} kB" for name, size in sizes.items()]
        write(f"{place}/meminfo", "\n".join([*lines, f"Node {node.number} HugePages_Total:     0"]))


def whole_kib(topology):
    """As /proc tells of memory: in KiB."""
    down = lambda size: size // 1024 * 1024
    host = dataclasses.replace(topology.host, available_bytes=down(topology.host.available_bytes))
    nodes = tuple(node._replace(free_bytes=down(node.free_bytes)) for node in topology.nodes)
    return dataclasses.replace(topology, host=host, nodes=nodes)


BUS = Node(1, 512 * GIB, 500 * GIB)
"""Memory behind a bus (CXL), without CPUs."""

WITH_BUS = dataclasses.replace(topology_of("small-1x2"), nodes=(*topology_of("small-1x2").nodes, BUS))


@pytest.mark.parametrize("topology", [*EXAMPLE_HOSTS.values(), WITH_BUS])
def test_a_host_is_read_as_it_was_written(topology, tmp_path):
    topology = whole_kib(topology)
    write_tree(tmp_path, topology)
    assert read_topology(tmp_path) == topology


def test_a_mask_of_cpus_and_of_nodes_leaves_only_those(tmp_path):
    write_tree(tmp_path, topology_of("xeon-2x28"))
    (tmp_path / "proc/self/status").write_text("Cpus_allowed_list: 27-29,84\nMems_allowed_list: 1\n")
    topology = read_topology(tmp_path)
    places = [(cpu.number, cpu.socket, cpu.node) for cpu in topology.cpus]
    assert places == [(27, 0, 0), (28, 1, 1), (29, 1, 1), (84, 1, 1)]
    assert [len(core) for core in topology.cores] == [1, 2, 1]
    assert [node.number for node in topology.nodes] == [1]
    assert topology.machine_cpus == 112


def test_a_host_that_tells_of_no_nodes_has_one(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("processor: 0\n\nprocessor: 1\n")
    (tmp_path / "proc/meminfo").write_text("MemTotal: 16 kB\nMemAvailable: 8 kB\n")
    topology = read_topology(tmp_path)
    assert topology.nodes == (Node(0, 16384, 8192),)
    assert topology.cpus == (Cpu(0, 0, 0, 0), Cpu(1, 1, 0, 0))
    assert (topology.machine_cpus, topology.swap_bytes) == (2, 0)


def test_outside_linux_there_is_one_socket(tmp_path):
    topology = read_topology(tmp_path)
    assert len(topology.nodes) == topology.host.sockets == 1


def test_a_name_that_is_no_host_is_refused_with_the_choice():
    with pytest.raises(InputError, match=r"host must be one of small-1x2, .*, got nowhere"):
        topology_of("nowhere")


@pytest.mark.parametrize(("numbers", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 5], "0-2,5"), ([7, 6, 1], "1,6-7")])
def test_cpus_are_written_as_linux_does(numbers, text):
    assert cpu_ranges(numbers) == text
