"""Hosts read from folders that look like their /proc and /sys, and from JSON."""

import dataclasses
import json

import pytest

from cpu3d.errors import InputError
from cpu3d.host.topology import (
    EXAMPLE_HOSTS,
    Cpu,
    Node,
    cpu_ranges,
    from_json,
    read_topology,
    to_json,
    topology_of,
)

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
    write("sys/kernel/mm/transparent_hugepage/enabled", f"always [{topology.huge_pages}] never")
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


@pytest.mark.parametrize("name", EXAMPLE_HOSTS)
def test_a_host_is_read_as_it_was_written(name, tmp_path):
    topology = whole_kib(topology_of(name))
    write_tree(tmp_path, topology)
    assert read_topology(tmp_path) == topology


def test_the_places_of_cpus_are_those_of_linux():
    """Socket 0 of two with 28 cores has CPUs 0-27 and, as their second threads, 56-83."""
    topology = topology_of("xeon-2x28")
    assert topology.cpus[0] == Cpu(0, 0, 0, 0)
    assert topology.cpus[84] == Cpu(84, 28, 1, 1)
    assert topology.cores[28] == (Cpu(28, 28, 1, 1), Cpu(84, 28, 1, 1))
    assert {cpu.node for cpu in topology_of("amx-2x60-snc4").cpus if cpu.socket == 1} == {4, 5, 6, 7}


def test_a_mask_of_cpus_and_of_nodes_leaves_only_those(tmp_path):
    write_tree(tmp_path, topology_of("xeon-2x28"))
    (tmp_path / "proc/self/status").write_text("Cpus_allowed_list: 27-29,84\nMems_allowed_list: 1\n")
    topology = read_topology(tmp_path)
    assert [(cpu.number, cpu.socket, cpu.node) for cpu in topology.cpus] == [
        (27, 0, 0),
        (28, 1, 1),
        (29, 1, 1),
        (84, 1, 1),
    ]
    assert [len(core) for core in topology.cores] == [1, 2, 1]
    assert [node.number for node in topology.nodes] == [1]
    assert topology.machine_cpus == 112


def test_cpus_that_are_offline_are_not_there(tmp_path):
    """Linux keeps them in the mask and in /proc/cpuinfo's numbers, and takes them off all that /sys lists."""
    topology = topology_of("small-1x2")
    write_tree(tmp_path, topology)
    (tmp_path / "sys/devices/system/cpu/online").write_text("1\n")
    (tmp_path / "sys/devices/system/node/node0/cpulist").write_text("1\n")
    found = read_topology(tmp_path)
    assert found.cpus == (Cpu(1, 0, 0, 0),)
    assert (found.machine_cpus, found.host.cores) == (1, 1)


def test_a_node_without_cpus_is_told_with_its_memory(tmp_path):
    topology = whole_kib(topology_of("small-1x2"))
    topology = dataclasses.replace(topology, nodes=(*topology.nodes, Node(1, 512 * GIB, 500 * GIB)))
    write_tree(tmp_path, topology)
    assert read_topology(tmp_path) == topology
    assert topology.host.numa_nodes == 1


def test_a_host_that_tells_of_no_nodes_has_one(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("processor: 0\n\nprocessor: 1\n")
    (tmp_path / "proc/meminfo").write_text("MemTotal: 16 kB\nMemAvailable: 8 kB\n")
    topology = read_topology(tmp_path)
    assert topology.nodes == (Node(0, 16384, 8192),)
    assert topology.cpus == (Cpu(0, 0, 0, 0), Cpu(1, 1, 0, 0))
    assert (topology.machine_cpus, topology.swap_bytes, topology.huge_pages) == (2, 0, "")


def test_outside_linux_there_is_one_socket_and_this_host_adds_up(tmp_path):
    topology = read_topology(tmp_path)
    assert len(topology.nodes) == topology.host.sockets == 1
    here = read_topology()
    assert len(here.cores) == here.host.cores
    assert sum(node.memory_bytes for node in here.nodes) <= 1.05 * here.host.memory_bytes


@pytest.mark.parametrize("name", EXAMPLE_HOSTS)
def test_json_brings_a_host_back(name, tmp_path):
    topology = topology_of(name)
    path = tmp_path / "host.json"
    path.write_text(json.dumps({"topology": to_json(topology), "plans": []}))
    assert topology_of(str(path)) == topology


SMALL = to_json(topology_of("small-1x2"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "must be what `doctor --json` writes"),
        ({**SMALL, "schema": 2}, "must have schema 1, got 2; write it with this version's doctor"),
        ({"schema": 1}, "cpus, host"),
        ({**SMALL, "host": {**SMALL["host"], "cores": 3}}, "must have CPUs.*counts that are theirs.*'cores': 2"),
        ({**SMALL, "host": {**SMALL["host"], "cpu_quota": True}}, "host.host.cpu_quota must be .*float.*, got True"),
        ({**SMALL, "cpus": [[0, 0, 0]]}, r"host.cpus\[0\] must be .*, got \[0, 0, 0\]"),
        ({**SMALL, "cpus": []}, "must have CPUs and NUMA nodes"),
        ({**SMALL, "nodes": []}, "must have CPUs and NUMA nodes"),
        ({**SMALL, "swap_bytes": 1.5}, "host.swap_bytes must be int, got 1.5"),
    ],
)
def test_a_damaged_description_is_refused_with_what_is_wrong(content, message):
    with pytest.raises(InputError, match=message) as raised:
        from_json(content, "host.json")
    assert str(raised.value).startswith("host host.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "host must be a file of `doctor --json` or one of small-1x2, .*, got .*nowhere"),
     ("{", "must be JSON, got"), ("[1]", "must be what `doctor --json` writes")],
)  # fmt: skip
def test_a_name_that_is_no_host_is_refused_with_the_choice(text, message, tmp_path):
    path = tmp_path / "nowhere"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=message):
        topology_of(str(path))


@pytest.mark.parametrize(("numbers", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 5], "0-2,5"), ([7, 6, 1], "1,6-7")])
def test_cpus_are_written_as_linux_does(numbers, text):
    assert cpu_ranges(numbers) == text
