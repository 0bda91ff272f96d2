"""Hosts read from folders like their /proc and /sys, and a table of what their workers get."""

import dataclasses

import pytest

from cpu3d.errors import InputError
from cpu3d.host.thread_plan import (
    KMP_AFFINITY,
    THREADS,
    Topology,
    cpu_ranges,
    default_workers,
    host_share,
    possible_workers,
    read_topology,
    thread_plan,
    thread_plans,
)
from memory_estimator.host import Cpu
from tests.cpu3d.host.hosts import HOSTS, PAPER, QUOTA, SMALL, XEON, masked, write_tree


@pytest.mark.parametrize(
    ("topology", "quota", "threads", "affinity"),
    [
        (SMALL, None, 2, None),
        (XEON, None, 56, KMP_AFFINITY),
        (XEON, 7.0, 7, None),
        (SMALL, 0.5, 1, None),
    ],
)
def test_a_thread_a_core_bound_to_it_on_several_nodes(topology, quota, threads, affinity):
    plan = thread_plan(dataclasses.replace(topology.host, cpu_quota=quota))
    assert (plan.intra_op, plan.environment.get("KMP_AFFINITY")) == (threads, affinity)
    assert [plan.environment[name] for name in THREADS] == [str(threads), "1", str(threads)]


IN_TURN = Topology(XEON.host, tuple(Cpu(n, n, 0, n % 2) for n in range(4)))  # of two nodes


@pytest.mark.parametrize(
    ("topology", "workers", "plans"),
    [
        (XEON, 4, ["0-13,56-69 14", "14-27,70-83 14", "28-41,84-97 14", "42-55,98-111 14"]),
        (QUOTA, 3, [" 2", " 2", " 2"]),
        (masked(XEON, *range(20, 36)), 2, ["20-27 8", "28-35 8"]),
        (IN_TURN, 2, ["0,2 2", "1,3 2"]),
    ],
)
def test_each_worker_has_cores_of_its_own(topology, workers, plans):
    """Plans are written as "CPUs threads"."""
    made = thread_plans(topology, workers)
    assert [f"{cpu_ranges(plan.cpus)} {plan.intra_op}" for plan in made] == plans


LOPSIDED = masked(XEON, 0, *range(28, 31))  # a worker each would wait at every step


@pytest.mark.parametrize(
    ("topology", "workers"),
    [
        *((PAPER, 4), (QUOTA, 1), (LOPSIDED, 1)),
        (masked(XEON, 0, 1, 2, *range(28, 34)), 2),
    ],
)
def test_by_default_there_is_one_worker_a_socket_unless_sockets_are_lopsided(topology, workers):
    assert default_workers(topology) == workers


@pytest.mark.parametrize(
    ("topology", "workers", "message"),
    [
        (XEON, 3, "workers must divide .* got 3 on 56 cores on 2 sockets.* 1 or 2 or 4 or 6"),
        (LOPSIDED, 4, "got 4 on 4 cores on 2 sockets.* 1 or 2$"),
    ],
)
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
        assert share.free_bytes == host.free_bytes // workers
        assert share.memory_bytes == host.memory_bytes
        if host.cpu_quota is not None:
            assert workers <= sum(threads) <= host.cpu_quota
            continue
        assert sorted(cpu for plan in plans for cpu in plan.cpus) == sorted(core_of)
        assert all(plan.intra_op == len({core_of[cpu] for cpu in plan.cpus}) for plan in plans)
        assert max(threads) - min(threads) <= 1
    assert workers == host.usable_cores


# --- The host ---


@pytest.mark.parametrize("topology", HOSTS)
def test_a_host_is_read_as_it_was_written(topology, tmp_path):
    in_kib = topology.host.available_bytes // 1024  # as /proc has memory
    host = dataclasses.replace(topology.host, available_bytes=in_kib * 1024)
    write_tree(tmp_path, topology)
    assert read_topology(tmp_path) == dataclasses.replace(topology, host=host)
