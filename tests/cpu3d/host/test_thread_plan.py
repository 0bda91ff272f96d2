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
from memory_estimator.host import Host
from tests.cpu3d.host.hosts import (
    BFLOAT16,
    HOSTS,
    PAPER,
    QUOTA,
    SMALL,
    SNC4,
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


@pytest.mark.parametrize(
    ("topology", "workers", "plans"),
    [
        (SMALL, 2, ["0 1", "1 1"]),
        (XEON_28, 1, ["0-111 56"]),
        (XEON_28, 2, ["0-27,56-83 28", "28-55,84-111 28"]),
        (XEON_28, 4, ["0-13,56-69 14", "14-27,70-83 14", "28-41,84-97 14", "42-55,98-111 14"]),
        (QUOTA, 3, [" 2", " 2", " 2"]),
        (masked(XEON_28, *range(20, 36)), 2, ["20-27 8", "28-35 8"]),
    ],
)
def test_each_worker_has_cores_of_its_own(topology, workers, plans):
    """Plans are written as "CPUs threads"."""
    made = thread_plans(topology, workers)
    assert [f"{cpu_ranges(plan.cpus)} {plan.intra_op}" for plan in made] == plans


LOPSIDED = masked(XEON_28, 0, *range(28, 34))  # a worker each would wait at every step


@pytest.mark.parametrize(
    ("topology", "workers"),
    [
        *zip((SMALL, XEON_28, PAPER, SNC4, QUOTA, LOPSIDED), (1, 2, 4, 2, 1, 1)),
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
        (LOPSIDED, 4, "got 4 on 7 cores on 2 sockets.* 1 or 2$"),
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


@pytest.mark.parametrize("topology", HOSTS)
def test_a_host_is_read_as_it_was_written(topology, tmp_path):
    in_kib = topology.host.available_bytes // 1024  # as /proc has memory
    host = dataclasses.replace(topology.host, available_bytes=in_kib * 1024)
    write_tree(tmp_path, topology)
    assert read_topology(tmp_path) == dataclasses.replace(topology, host=host)


def test_a_mask_of_cpus_leaves_only_those(tmp_path):
    write_tree(tmp_path, XEON_28)
    (tmp_path / "proc/self/status").write_text("Cpus_allowed_list: 27-29,84\n")
    cores = read_topology(tmp_path).cores
    assert [[cpu.number for cpu in core] for core in cores] == [[27], [28, 84], [29]]


def test_outside_linux_there_is_one_socket(tmp_path):
    assert read_topology(tmp_path).host.sockets == 1
