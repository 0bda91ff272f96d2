"""A table of hosts, one line each, and what their workers get."""

import dataclasses

import pytest

from cpu3d.errors import InputError
from cpu3d.host.thread_plan import (
    KMP_AFFINITY,
    THREADS,
    default_workers,
    possible_workers,
    share_of,
    thread_plan,
    thread_plans,
)
from cpu3d.host.topology import EXAMPLE_HOSTS, Node, cpu_ranges, topology_of
from memory_estimator.host import Cpu, Host

ZEN = Host("Zen", 1, 2, 2, 1, 24 * 2**30, 20 * 2**30, None, 0, None, ("avx2", "avx512_bf16"))
XEON = Host("Xeon", 2, 56, 112, 2, 1536 * 2**30, 1500 * 2**30, None, 0, None, ("avx2",))
CONTAINER = dataclasses.replace(XEON, cpu_quota=7.0)
PINCH = dataclasses.replace(ZEN, cpu_quota=0.5)


@pytest.mark.parametrize(
    ("host", "threads", "affinity"), [(ZEN, 2, None), (XEON, 56, KMP_AFFINITY), (CONTAINER, 7, None), (PINCH, 1, None)]
)
def test_a_thread_a_core_bound_to_it_on_several_nodes(host, threads, affinity):
    plan = thread_plan(host)
    assert (plan.intra_op, plan.environment.get("KMP_AFFINITY")) == (threads, affinity)
    assert [plan.environment[name] for name in THREADS] == [str(threads), "1", str(threads)]


def under_quota(topology, quota):
    return dataclasses.replace(topology, host=dataclasses.replace(topology.host, cpu_quota=quota))


def masked(name, *cpus):
    """An example host as a process sees it that is held to some CPUs."""
    topology = topology_of(name)
    kept = tuple(cpu for cpu in topology.cpus if cpu.number in cpus)
    numbers, cores, sockets, nodes = (len(set(column)) for column in zip(*kept))
    counts = {"logical_cpus": numbers, "cores": cores, "sockets": sockets, "numa_nodes": nodes}
    return dataclasses.replace(topology, cpus=kept, host=dataclasses.replace(topology.host, **counts))


XEON_28, SNC4 = topology_of("xeon-2x28"), topology_of("amx-2x60-snc4")
BUS = Node(1, 512 * 2**30, 500 * 2**30)
"""Memory behind a bus (CXL), without CPUs."""

BOTH_SOCKETS = ["0-27,56-83 | preferred 0 | 28", "28-55,84-111 | preferred 1 | 28"]


@pytest.mark.parametrize(
    ("topology", "workers", "plans"),
    [
        pytest.param(topology_of("small-1x2"), 1, ["0-1 |   | 2"], id="one node"),
        pytest.param(topology_of("small-1x2"), 2, ["0 |   | 1", "1 |   | 1"], id="a core each"),
        pytest.param(XEON_28, 1, ["0-111 | interleaved 0-1 | 56"], id="two nodes in turns"),
        pytest.param(XEON_28, 2, BOTH_SOCKETS, id="a socket each"),
        pytest.param(XEON_28, 4, ["0-13,56-69 | preferred 0 | 14", "14-27,70-83 | preferred 0 | 14",
            "28-41,84-97 | preferred 1 | 14", "42-55,98-111 | preferred 1 | 14"], id="half a socket each"),
        pytest.param(topology_of("container-7-of-64"), 3, [" |   | 2"] * 3, id="a quota"),
        pytest.param(masked("xeon-2x28", *range(7)), 2, ["0-2 | preferred 0 | 3", "3-6 | preferred 0 | 4"],
            id="a cpuset"),
        pytest.param(under_quota(XEON_28, 111.0), 1, [" |   | 56"], id="a quota of less than all"),
        pytest.param(masked("xeon-2x28", *range(20, 36)), 2, ["20-27 | preferred 0 | 8", "28-35 | preferred 1 | 8"],
            id="a cpuset over two sockets"),
        pytest.param(dataclasses.replace(topology_of("small-1x2"), nodes=(*topology_of("small-1x2").nodes, BUS)), 1,
            ["0-1 | preferred 0 | 2"], id="memory behind a bus"),
        pytest.param(dataclasses.replace(XEON_28, nodes=(XEON_28.nodes[0], Node(1, 0, 0))), 2,
            [BOTH_SOCKETS[0], "28-55,84-111 |   | 28"], id="a node without memory"),
        pytest.param(masked("amx-2x60-snc4", 0, 1, 2, 15), 2, ["0-1 | preferred 0 | 2", "2,15 | interleaved 0-1 | 2"],
            id="a node that is too small"),
        pytest.param(dataclasses.replace(XEON_28, cpus=tuple(Cpu(n, n % 56, n % 2, n % 2) for n in range(112))), 2,
            [f"{','.join(map(str, range(i, 112, 2)))} | preferred {i} | 28" for i in (0, 1)], id="numbered in turns"),
    ],
)  # fmt: skip
def test_each_worker_has_cores_and_memory_of_its_own(topology, workers, plans):
    """Each as "CPUs | memory nodes | threads"."""
    assert [
        f"{cpu_ranges(plan.cpus)} | {plan.memory_policy} {cpu_ranges(plan.memory_nodes)} | {plan.intra_op}"
        for plan in thread_plans(topology, workers)
    ] == plans


@pytest.mark.parametrize(
    ("topology", "workers"),
    [
        *((topology_of(name), host_workers) for name, host_workers in zip(EXAMPLE_HOSTS, (1, 2, 4, 2, 1))),
        (masked("xeon-2x28", 0, *range(28, 34)), 1),  # a worker each would wait for the first at every step
        (masked("xeon-2x28", 0, 1, 2, *range(28, 34)), 2),
    ],
)
def test_by_default_there_is_one_worker_a_socket_unless_sockets_are_lopsided(topology, workers):
    assert default_workers(topology) == workers


@pytest.mark.parametrize(
    ("topology", "workers", "message"),
    [
        (topology_of("small-1x2"), 3, "workers must have whole sockets or equal parts of them, and a core each, got 3 "
                                      "on 2 cores on 1 socket; use 1 or 2"),
        (XEON_28, 3, "got 3 on 56 cores on 2 sockets; use 1, 2, 4 or 6"),
        (XEON_28, 0, "got 0 on"),
        (topology_of("container-7-of-64"), 8, "got 8 on 7 cores' worth of quota; use 4, 5, 6 or 7"),
        (masked("xeon-2x28", 0, *range(28, 34)), 4, "got 4 on 7 cores on 2 sockets; use 1 or 2"),
    ],
)  # fmt: skip
def test_workers_that_do_not_come_out_even_are_refused_with_those_that_do(topology, workers, message):
    with pytest.raises(InputError, match=message):
        thread_plans(topology, workers)


@pytest.mark.parametrize("name", EXAMPLE_HOSTS)
def test_no_core_has_two_workers_none_is_left_over_and_shares_are_those_of_the_plans(name):
    topology = topology_of(name)
    host, core_of = topology.host, {cpu.number: cpu.core for cpu in topology.cpus}
    assert thread_plans(topology, 1)[0].environment == thread_plan(host).environment
    for workers in possible_workers(topology):
        plans = thread_plans(topology, workers)
        threads = [plan.intra_op for plan in plans]
        share = share_of(host, workers)
        assert thread_plan(share).intra_op == min(threads)
        assert (share.free_bytes, share.memory_bytes) == (host.free_bytes // workers, host.memory_bytes)
        if host.cpu_quota is not None:
            assert workers <= sum(threads) <= host.cpu_quota
            continue
        assert sorted(cpu for plan in plans for cpu in plan.cpus) == sorted(core_of)
        assert all(plan.intra_op == len({core_of[cpu] for cpu in plan.cpus}) for plan in plans)
        assert sum(threads) == host.cores
        assert max(threads) - min(threads) <= 1


def test_what_a_cgroup_has_used_already_is_nobody_s_share():
    host = dataclasses.replace(ZEN, cgroup_limit_bytes=16 * 2**30, cgroup_used_bytes=6 * 2**30)
    assert share_of(host, 2).free_bytes == 5 * 2**30
    assert share_of(dataclasses.replace(host, cgroup_used_bytes=17 * 2**30), 2).free_bytes == 0
