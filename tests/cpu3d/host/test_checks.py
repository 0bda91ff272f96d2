"""What is said of hosts: a warning where there is something to do, and no other."""

import dataclasses

import pytest

from cpu3d.host.checks import STATES, host_checks, process_checks, software_checks
from cpu3d.host.example_hosts import EXAMPLE_HOSTS, topology_of
from cpu3d.host.thread_plan import default_workers, thread_plans
from cpu3d.host.topology import Node

GIB = 2**30


def checks_of(topology, workers=None):
    plans = thread_plans(topology, workers or default_workers(topology))
    return {check.name: check for check in host_checks(topology, plans)}


def warnings_of(topology, workers=None):
    return {name for name, check in checks_of(topology, workers).items() if check.state not in ("ok", "note")}


def with_host(name, **changes):
    topology = topology_of(name)
    return dataclasses.replace(topology, host=dataclasses.replace(topology.host, **changes))


@pytest.mark.parametrize(
    ("name", "warned"),
    [
        ("small-1x2", set()),
        ("xeon-2x28", {"swap"}),
        ("paper-4x20", set()),
        ("amx-2x60-snc4", set()),
        ("container-7-of-64", {"CPU quota", "memory limit"}),
        ("container-cpuset-7-of-64", {"memory limit"}),
    ],
)
def test_hosts_are_warned_of_what_they_lack(name, warned):
    assert warnings_of(topology_of(name)) == warned


@pytest.mark.parametrize("name", EXAMPLE_HOSTS)
def test_every_warning_says_what_to_do(name):
    for check in checks_of(topology_of(name)).values():
        assert check.state in STATES
        assert check.found
        assert bool(check.advice) == (check.state == "warn")


def test_what_no_setting_can_change_is_a_note():
    check = checks_of(topology_of("paper-4x20"))["bfloat16 instructions"]
    assert (check.state, check.advice) == ("note", "")
    assert check.found.startswith("none (AVX-512): training computes in float32")


@pytest.mark.parametrize(
    ("addresses", "high", "states"),
    [(None, None, ["ok", "ok"]), (64 * GIB, 16 * GIB, ["warn", "warn"]), (None, 32 * GIB, ["ok", "ok"])],
)
def test_limits_of_the_process_are_warned_of(addresses, high, states):
    """A size from which the kernel slows down is none where the limit of memory is reached before."""
    found = process_checks(topology_of("container-7-of-64"), addresses, high)
    assert [check.name for check in found] == ["ulimit -v", "memory.high"]
    assert [check.state for check in found] == states


def test_few_free_bytes_are_those_of_a_worker():
    host = with_host("small-1x2", available_bytes=12 * GIB)
    assert checks_of(host)["free memory"].state == "ok"
    check = checks_of(host, workers=2)["free memory"]
    assert (check.state, check.found) == ("warn", "6.00 GiB for each of 2 workers")


def test_uneven_workers_are_told():
    check = checks_of(topology_of("container-cpuset-7-of-64"), workers=2)["workers"]
    assert (check.state, check.found) == ("warn", "3 to 4 threads each: at every step all wait for the slowest")


@pytest.mark.parametrize(
    ("second", "state", "found"),
    [
        (0, "warn", "none on node 1, whose CPUs take it all from far"),
        (100 * GIB, "warn", "100.00 GiB to 768.00 GiB a node"),
        (768 * GIB, "ok", "on all 2 that have CPUs, 768.00 GiB each"),
    ],
)
def test_memory_that_is_not_on_every_node_is_told(second, state, found):
    topology = topology_of("xeon-2x28")
    nodes = (topology.nodes[0], Node(1, second, second))
    check = checks_of(dataclasses.replace(topology, nodes=nodes))["memory of nodes"]
    assert (check.state, check.found) == (state, found)


def test_a_lopsided_mask_is_told():
    topology = topology_of("xeon-2x28")
    kept = tuple(cpu for cpu in topology.cpus if cpu.number in {0, 28, 29, 30})
    host = dataclasses.replace(topology.host, cores=4, logical_cpus=4)
    check = checks_of(dataclasses.replace(topology, host=host, cpus=kept))["CPU mask"]
    assert (check.state, check.found) == ("warn", "4 of the machine's 112 CPUs, 1 and 3 of them on a socket")


@pytest.mark.parametrize(
    ("tensorflow", "itex", "own", "states"),
    [
        ("2.15.1", "2.15.0.0", [], ["ok", "ok"]),
        ("2.21.0", None, [], ["ok", "warn"]),
        (None, None, ["OMP_NUM_THREADS=3"], ["fail"]),
        ("2.15.1", "2.15.0.0", ["OMP_NUM_THREADS=3"], ["ok", "ok", "warn"]),
    ],
)
def test_the_installation_is_looked_at(tensorflow, itex, own, states):
    found = list(software_checks(tensorflow, itex, own))
    assert [check.state for check in found] == states
    if states[2:]:
        assert "OMP_NUM_THREADS=3" in found[-1].found
        assert "`unset OMP_NUM_THREADS`" in found[-1].advice
