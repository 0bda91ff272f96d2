"""A table of hosts, one line each, and what their workers get."""

import dataclasses

import pytest

from cpu3d.errors import InputError
from cpu3d.host.thread_plan import KMP_AFFINITY, default_workers, possible_workers, share_of, thread_plan, thread_plans
from cpu3d.host.topology import EXAMPLE_HOSTS, Cpu, Node, cpu_ranges, restricted, topology_of
from memory_estimator.host import Host

ZEN = Host("Zen", 1, 2, 2, 1, 24 * 2**30, 20 * 2**30, None, 0, None, ("avx2", "avx512_bf16"))
XEON = Host("Xeon", 2, 56, 112, 2, 1536 * 2**30, 1500 * 2**30, None, 0, None, ("avx2",))
CONTAINER = dataclasses.replace(XEON, cpu_quota=7.0)
PINCH = dataclasses.replace(ZEN, cpu_quota=0.5)


@pytest.mark.parametrize(
    ("host", "threads", "affinity"),
    [
        (ZEN, 2, None),
        (XEON, 56, KMP_AFFINITY),
        (CONTAINER, 7, None),
        (PINCH, 1, None),
    ],
)
def test_plan_by_host(host, threads, affinity):
    plan = thread_plan(host)
    assert (plan.intra_op, plan.inter_op, plan.omp_threads) == (threads, 1, threads)
    assert plan.environment.get("KMP_AFFINITY") == affinity
    assert plan.environment["TF_NUM_INTRAOP_THREADS"] == plan.environment["OMP_NUM_THREADS"] == str(threads)
    assert plan.environment["TF_NUM_INTEROP_THREADS"] == "1"
    assert plan.environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert plan.environment["TF_ENABLE_ONEDNN_OPTS"] == plan.environment["TF_USE_LEGACY_KERAS"] == "1"


def spelled(topology, workers):
    """Each worker as "CPUs | memory nodes | threads"."""
    return [
        f"{cpu_ranges(plan.cpus)} | {plan.memory_policy} {cpu_ranges(plan.memory_nodes)} | {plan.intra_op}"
        for plan in thread_plans(topology, workers)
    ]


@pytest.mark.parametrize(
    ("name", "workers", "plans"),
    [
        ("small-1x2", 1, ["0-1 |   | 2"]),
        ("small-1x2", 2, ["0 |   | 1", "1 |   | 1"]),
        ("xeon-2x28", 1, ["0-111 | interleaved 0-1 | 56"]),
        ("xeon-2x28", 2, ["0-27,56-83 | preferred 0 | 28", "28-55,84-111 | preferred 1 | 28"]),
        (
            "xeon-2x28",
            4,
            [
                "0-13,56-69 | preferred 0 | 14",
                "14-27,70-83 | preferred 0 | 14",
                "28-41,84-97 | preferred 1 | 14",
                "42-55,98-111 | preferred 1 | 14",
            ],
        ),
        (
            "paper-4x20",
            4,
            [
                "0-19,80-99 | preferred 0 | 20",
                "20-39,100-119 | preferred 1 | 20",
                "40-59,120-139 | preferred 2 | 20",
                "60-79,140-159 | preferred 3 | 20",
            ],
        ),
        ("paper-4x20", 2, ["0-39,80-119 | interleaved 0-1 | 40", "40-79,120-159 | interleaved 2-3 | 40"]),
        ("amx-2x60-snc4", 2, ["0-59,120-179 | interleaved 0-3 | 60", "60-119,180-239 | interleaved 4-7 | 60"]),
        (
            "amx-2x60-snc4",
            4,
            [
                "0-29,120-149 | interleaved 0-1 | 30",
                "30-59,150-179 | interleaved 2-3 | 30",
                "60-89,180-209 | interleaved 4-5 | 30",
                "90-119,210-239 | interleaved 6-7 | 30",
            ],
        ),
        ("container-7-of-64", 1, [" |   | 7"]),
        ("container-7-of-64", 3, [" |   | 2"] * 3),
        ("container-cpuset-7-of-64", 1, ["0-6 |   | 7"]),
        ("container-cpuset-7-of-64", 2, ["0-2 |   | 3", "3-6 |   | 4"]),
    ],
)
def test_workers_by_host(name, workers, plans):
    assert spelled(topology_of(name), workers) == plans


def test_workers_that_divide_neither_nodes_nor_their_number_stay_in_their_socket():
    """Six on two sockets of four nodes: three a socket, 20 cores each, over the node that two of them share."""
    plans = thread_plans(topology_of("amx-2x60-snc4"), 6)
    assert [plan.intra_op for plan in plans] == [20] * 6
    assert [plan.memory_nodes for plan in plans] == [(0, 1), (1, 2), (2, 3), (4, 5), (5, 6), (6, 7)]


@pytest.mark.parametrize(
    ("name", "workers"),
    [("small-1x2", 1), ("xeon-2x28", 2), ("paper-4x20", 4), ("amx-2x60-snc4", 2), ("amx-2x60-snc2", 2),
     ("container-7-of-64", 1), ("container-cpuset-7-of-64", 1)],
)  # fmt: skip
def test_by_default_there_is_one_worker_a_socket(name, workers):
    assert default_workers(topology_of(name)) == workers


def masked(name, cpus):
    """An example host as a process sees it that is held to some CPUs."""
    return restricted(topology_of(name), cpus=cpus)


def under_quota(topology, quota):
    return dataclasses.replace(topology, host=dataclasses.replace(topology.host, cpu_quota=quota))


def with_more_nodes(name, *nodes):
    """An example host that has memory without CPUs too, as on the chip (HBM) or behind a bus (CXL)."""
    topology = topology_of(name)
    return dataclasses.replace(topology, nodes=(*topology.nodes, *nodes))


BOTH_SOCKETS = ["0-27,56-83 | preferred 0 | 28", "28-55,84-111 | preferred 1 | 28"]


@pytest.mark.parametrize(
    ("topology", "plans"),
    [
        pytest.param(under_quota(topology_of("xeon-2x28"), 112.0), BOTH_SOCKETS, id="a quota of all CPUs"),
        pytest.param(under_quota(topology_of("xeon-2x28"), 400.0), BOTH_SOCKETS, id="a quota of more"),
        pytest.param(under_quota(topology_of("xeon-2x28"), 111.0), [" |   | 56"], id="a quota of less"),
        pytest.param(
            under_quota(masked("xeon-2x28", {*range(14), *range(56, 70)}), 28.0),
            ["0-13,56-69 | preferred 0 | 14"],
            id="a cpuset and a quota of all of it",
        ),
        pytest.param(
            masked("xeon-2x28", set(range(20, 36))),
            ["20-27 | preferred 0 | 8", "28-35 | preferred 1 | 8"],
            id="a cpuset over two sockets",
        ),
        pytest.param(
            masked("xeon-2x28", set(range(112)) - {3, 59}),
            ["0-2,4-27,56-58,60-83 | preferred 0 | 27", "28-55,84-111 | preferred 1 | 28"],
            id="a core that is offline",
        ),
        pytest.param(
            masked("xeon-2x28", set(range(56))),
            ["0-27 | preferred 0 | 28", "28-55 | preferred 1 | 28"],
            id="one hyper-thread of each core",
        ),
        pytest.param(masked("xeon-2x28", {0, 1, 57}), ["0-1,57 | preferred 0 | 2"], id="one hyper-thread of one core"),
        pytest.param(
            with_more_nodes("xeon-2x28", Node(2, 64 * 2**30, 60 * 2**30), Node(3, 64 * 2**30, 60 * 2**30)),
            BOTH_SOCKETS,
            id="nodes of memory alone",
        ),
        pytest.param(
            with_more_nodes("small-1x2", Node(1, 512 * 2**30, 500 * 2**30)),
            ["0-1 | preferred 0 | 2"],
            id="memory behind a bus",
        ),
    ],
)
def test_default_workers_of_hosts_that_are_cut_or_odd(topology, plans):
    assert spelled(topology, default_workers(topology)) == plans


def test_a_lopsided_mask_gets_one_worker_by_default():
    """One core of socket 0 and six of socket 1: a worker each would wait for the first at every step."""
    assert default_workers(masked("xeon-2x28", {0, *range(28, 34)})) == 1
    assert default_workers(masked("xeon-2x28", {0, 1, 2, *range(28, 34)})) == 2


@pytest.mark.parametrize(
    ("cpus", "plans"),
    [
        ({0, 1, 2, 15, 16}, ["0-2 | preferred 0 | 3", "15-16 | preferred 1 | 2"]),
        ({0, 1, 2, 15}, ["0-1 | preferred 0 | 2", "2,15 | interleaved 0-1 | 2"]),
        ({0, 1, 2, 3, 4, 15}, ["0-2 | preferred 0 | 3", "3-4,15 | interleaved 0-1 | 3"]),
    ],
)
def test_whole_nodes_are_given_unless_one_is_too_small(cpus, plans):
    """Nodes of three cores and two, of three and one, and of five and one, in one socket."""
    assert spelled(masked("amx-2x60-snc4", cpus), 2) == plans


def test_cpus_that_are_numbered_from_socket_to_socket_in_turns_stay_together():
    topology = topology_of("xeon-2x28")
    cpus = tuple(Cpu(number, number % 56, number % 2, number % 2) for number in range(112))
    first, second = thread_plans(dataclasses.replace(topology, cpus=cpus), 2)
    assert first.cpus == tuple(range(0, 112, 2))
    assert second.memory_nodes == (1,)
    quarter = thread_plans(dataclasses.replace(topology, cpus=cpus), 4)[1]
    assert quarter.cpus == (*range(28, 56, 2), *range(84, 112, 2))


def test_a_worker_on_a_part_of_one_node_keeps_that_node():
    """The host has another node, so memory could come from there; its threads need no places of their own."""
    (plan,) = thread_plans(masked("xeon-2x28", set(range(7))), 1)
    assert (plan.cpus, plan.memory_nodes) == ((0, 1, 2, 3, 4, 5, 6), (0,))
    assert "KMP_AFFINITY" not in plan.environment


def test_a_node_without_memory_is_not_asked_for_any():
    topology = topology_of("xeon-2x28")
    nodes = (topology.nodes[0], dataclasses.replace(topology.nodes[1], memory_bytes=0, free_bytes=0))
    first, second = thread_plans(dataclasses.replace(topology, nodes=nodes), 2)
    assert (first.memory_nodes, second.memory_nodes, second.memory_policy) == ((0,), (), "")


@pytest.mark.parametrize(
    ("name", "workers", "message"),
    [
        ("small-1x2", 3, "workers must have whole sockets or equal parts of them, and a core each, got 3 on 2 cores on "
                         "1 socket; use 1 or 2"),
        ("xeon-2x28", 3, "got 3 on 56 cores on 2 sockets; use 1, 2, 4 or 6"),
        ("paper-4x20", 3, "got 3 on 80 cores on 4 sockets; use 1, 2, 4 or 8"),
        ("xeon-2x28", 0, "got 0 on"),
        ("xeon-2x28", -2, "got -2 on"),
        ("xeon-2x28", 57, "use 50, 52, 54 or 56"),
        ("container-7-of-64", 8, "whole CPU's worth of time each, got 8 on 7 cores' worth of quota; use 4, 5, 6 or 7"),
        ("container-cpuset-7-of-64", 8, "use 4, 5, 6 or 7"),
    ],
)  # fmt: skip
def test_workers_that_do_not_come_out_even_are_refused_with_those_that_do(name, workers, message):
    with pytest.raises(InputError, match=message):
        thread_plans(topology_of(name), workers)


def test_a_socket_with_fewer_cores_than_workers_is_refused():
    with pytest.raises(InputError, match="got 4 on 7 cores on 2 sockets; use 1 or 2"):
        thread_plans(masked("xeon-2x28", {0, *range(28, 34)}), 4)


@pytest.mark.parametrize("name", EXAMPLE_HOSTS)
def test_no_core_has_two_workers_and_none_is_left_over(name):
    topology = topology_of(name)
    core_of = {cpu.number: cpu.core for cpu in topology.cpus}
    possible = possible_workers(topology)
    assert possible[0] == 1
    for workers in possible:
        plans = thread_plans(topology, workers)
        assert len(plans) == workers
        threads = [plan.intra_op for plan in plans]
        if topology.host.cpu_quota is not None:
            assert workers <= sum(threads) <= topology.host.cpu_quota
            continue
        assert sorted(cpu for plan in plans for cpu in plan.cpus) == sorted(core_of)
        for plan in plans:
            assert plan.intra_op == len({core_of[cpu] for cpu in plan.cpus}) == plan.omp_threads
        assert sum(threads) == topology.host.cores
        assert max(threads) - min(threads) <= 1


@pytest.mark.parametrize("name", EXAMPLE_HOSTS)
def test_one_worker_has_the_plan_of_a_process_that_has_the_host_to_itself(name):
    topology = topology_of(name)
    (plan,) = thread_plans(topology, 1)
    assert plan.environment == thread_plan(topology.host).environment


@pytest.mark.parametrize("name", EXAMPLE_HOSTS)
def test_the_share_of_a_worker_has_its_threads_and_its_part_of_what_is_free(name):
    topology = topology_of(name)
    for workers in possible_workers(topology):
        share = share_of(topology.host, workers)
        assert thread_plan(share).intra_op == min(plan.intra_op for plan in thread_plans(topology, workers))
        assert share.free_bytes == topology.host.free_bytes // workers
        assert share.memory_bytes == topology.host.memory_bytes
    assert share_of(topology.host, 1) is topology.host


def test_what_a_cgroup_has_used_already_is_nobody_s_share():
    host = dataclasses.replace(ZEN, cgroup_limit_bytes=16 * 2**30, cgroup_used_bytes=6 * 2**30)
    assert share_of(host, 2).free_bytes == 5 * 2**30
    full = dataclasses.replace(host, cgroup_used_bytes=17 * 2**30)
    assert share_of(full, 2).free_bytes == 0


def test_a_worker_on_cpus_of_its_own_shares_the_memory_alone():
    share = share_of(XEON, 2, cpus_apart=True)
    assert (share.cores, share.numa_nodes, share.free_bytes) == (56, 2, 750 * 2**30)
