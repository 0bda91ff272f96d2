"""Hosts read from folders like their /proc and /sys, and a table of what their workers get."""

import dataclasses

import pytest

from cpu3d.errors import InputError
from cpu3d.host.thread_plan import (
    KMP_AFFINITY,
    THREADS,
    cpu_ranges,
    default_workers,
    host_share,
    possible_workers,
    read_topology,
    thread_plan,
    thread_plans,
)
from memory_estimator.host import Host, Node
from tests.cpu3d.host.hosts import (
    BFLOAT16,
    HOSTS,
    PAPER,
    QUOTA,
    SMALL,
    SNC4,
    WITH_BUS,
    masked,
    write_tree,
)
from tests.cpu3d.host.hosts import XEON as XEON_28

ZEN = Host("Zen", 1, 2, 2, 1, 24 * 2**30, 20 * 2**30, None, 0, None, BFLOAT16)
XEON = Host("Xeon", 2, 56, 112, 2, 1536 * 2**30, 1500 * 2**30, None, 0, None, ("avx2",))
CONTAINER = dataclasses.replace(XEON, cpu_quota=7.0)
PINCH = dataclasses.replace(ZEN, cpu_quota=0.5)


@pytest.mark.parametrize(
    ("host", "threads", "affinity"),
    [(ZEN, 2, None), (XEON, 56, KMP_AFFINITY), (CONTAINER, 7, None), (PINCH, 1, None)],
)
def test_a_thread_a_core_bound_to_it_on_several_nodes(host, threads, affinity):
    plan = thread_plan(host)
    assert (plan.intra_op, plan.environment.get("KMP_AFFINITY")) == (threads, affinity)
    assert [plan.environment[name] for name in THREADS] == [str(threads), "1", str(threads)]


HALF_SOCKETS = [
    "0-13,56-69 | preferred 0 | 14",
    "14-27,70-83 | preferred 0 | 14",
    "28-41,84-97 | preferred 1 | 14",
    "42-55,98-111 | preferred 1 | 14",
]
BOTH_SOCKETS = ["0-27,56-83 | preferred 0 | 28", "28-55,84-111 | preferred 1 | 28"]


@pytest.mark.parametrize(
    ("topology", "workers", "plans"),
    [
        pytest.param(SMALL, 1, ["0-1 |   | 2"], id="one node"),
        pytest.param(SMALL, 2, ["0 |   | 1", "1 |   | 1"], id="a core each"),
        pytest.param(XEON_28, 1, ["0-111 | interleaved 0-1 | 56"], id="two nodes in turns"),
        pytest.param(XEON_28, 2, BOTH_SOCKETS, id="a socket each"),
        pytest.param(XEON_28, 4, HALF_SOCKETS, id="half a socket each"),
        pytest.param(QUOTA, 3, [" |   | 2"] * 3, id="a quota"),
        pytest.param(masked(XEON_28, *range(20, 36)), 2,
            ["20-27 | preferred 0 | 8", "28-35 | preferred 1 | 8"], id="a cpuset over two sockets"),
        pytest.param(WITH_BUS, 1, ["0-1 | preferred 0 | 2"], id="memory behind a bus"),
        pytest.param(dataclasses.replace(XEON_28, nodes=(XEON_28.nodes[0], Node(1, 0, 0))), 2,
            [BOTH_SOCKETS[0], "28-55,84-111 |   | 28"], id="a node without memory"),
        pytest.param(masked(SNC4, 0, 1, 2, 15), 2,
            ["0-1 | preferred 0 | 2", "2,15 | interleaved 0-1 | 2"], id="a node that is too small"),
    ],
)  # fmt: skip
def test_each_worker_has_cores_and_memory_of_its_own(topology, workers, plans):
    """Plans are written as "CPUs | memory nodes | threads"."""
    written = []
    for plan in thread_plans(topology, workers):
        memory = f"{plan.memory_policy} {cpu_ranges(plan.memory_nodes)}"
        written.append(f"{cpu_ranges(plan.cpus)} | {memory} | {plan.intra_op}")
    assert written == plans


@pytest.mark.parametrize(
    ("topology", "workers"),
    [
        *zip((SMALL, XEON_28, PAPER, SNC4, QUOTA), (1, 2, 4, 2, 1)),
        (
            masked(XEON_28, 0, *range(28, 34)),
            1,
        ),  # a worker each would wait for the first at every step
        (masked(XEON_28, 0, 1, 2, *range(28, 34)), 2),
    ],
)
def test_by_default_there_is_one_worker_a_socket_unless_sockets_are_lopsided(topology, workers):
    assert default_workers(topology) == workers


@pytest.mark.parametrize(
    ("topology", "workers", "message"),
    [
        (SMALL, 3, "workers must divide .* got 3 on 2 cores on 1 socket.* 1 or 2$"),
        (XEON_28, 3, "got 3 on 56 cores on 2 sockets.* 1 or 2 or 4 or 6"),
        (QUOTA, 8, "got 8 on 7 cores on 1 socket.* 4 or 5 or 6 or 7"),
        (masked(XEON_28, 0, *range(28, 34)), 4, "got 4 on 7 cores on 2 sockets.* 1 or 2$"),
    ],
)  # fmt: skip
def test_workers_that_do_not_come_out_even_are_refused_with_those_that_do(
    topology, workers, message
):
    with pytest.raises(InputError, match=message):
        thread_plans(topology, workers)


@pytest.mark.parametrize("topology", HOSTS)
def test_no_core_has_two_workers_none_is_left_over_and_shares_are_those_of_the_plans(topology):
    host = topology.host
    core_of = {cpu.number: cpu.core for cpu in topology.cpus}
    assert thread_plans(topology, 1)[0].environment == thread_plan(host).environment
    for workers in possible_workers(topology):
        plans = thread_plans(topology, workers)
        threads = [plan.intra_op for plan in plans]
        share = host_share(host, workers)
        assert thread_plan(share).intra_op == min(threads)
        assert (share.free_bytes, share.memory_bytes) == (
            host.free_bytes // workers,
            host.memory_bytes,
        )
        if host.cpu_quota is not None:
            assert workers <= sum(threads) <= host.cpu_quota
            continue
        assert sorted(cpu for plan in plans for cpu in plan.cpus) == sorted(core_of)
        assert all(plan.intra_op == len({core_of[cpu] for cpu in plan.cpus}) for plan in plans)
        assert sum(threads) == host.cores
        assert max(threads) - min(threads) <= 1


# --- The host ---


@pytest.mark.parametrize("topology", [*HOSTS, WITH_BUS])
def test_a_host_is_read_as_it_was_written(topology, tmp_path):
    down = lambda size: size // 1024 * 1024  # as /proc has memory: in KiB
    host = dataclasses.replace(topology.host, available_bytes=down(topology.host.available_bytes))
    nodes = tuple(node._replace(free_bytes=down(node.free_bytes)) for node in topology.nodes)
    topology = dataclasses.replace(topology, host=host, nodes=nodes)
    write_tree(tmp_path, topology)
    assert read_topology(tmp_path) == topology


def test_a_mask_of_cpus_and_of_nodes_leaves_only_those(tmp_path):
    write_tree(tmp_path, XEON_28)
    (tmp_path / "proc/self/status").write_text(
        "Cpus_allowed_list: 27-29,84\nMems_allowed_list: 1\n"
    )
    topology = read_topology(tmp_path)
    places = [(cpu.number, cpu.socket, cpu.node) for cpu in topology.cpus]
    assert places == [(27, 0, 0), (28, 1, 1), (29, 1, 1), (84, 1, 1)]
    assert [len(core) for core in topology.cores] == [1, 2, 1]
    assert [node.number for node in topology.nodes] == [1]


def test_outside_linux_there_is_one_socket(tmp_path):
    topology = read_topology(tmp_path)
    assert len(topology.nodes) == topology.host.sockets == 1
