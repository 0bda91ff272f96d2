"""Who trains together by TF_CONFIG and lists of hosts, and which of them this process is."""

import json
import sys

import pytest

from cpu3d.distributed import cluster as module
from cpu3d.distributed.cluster import (
    ALONE,
    free_ports,
    from_hosts,
    host_and_port,
    is_this_host,
    own_index,
    read_cluster,
    read_slurm,
    without_cluster,
)
from cpu3d.errors import InputError


def tf_config(tasks, kind="worker", index=0, **more):
    return {
        "TF_CONFIG": json.dumps({"cluster": tasks, "task": {"type": kind, "index": index}, **more})
    }


@pytest.mark.parametrize("environ", [{}, {"TF_CONFIG": ""}, {"TF_CONFIG": '{"cluster": {}}'}])
def test_without_a_cluster_in_the_environment_a_process_is_alone(environ):
    assert read_cluster(environ) == ALONE


def test_a_process_alone_is_the_chief():
    assert (ALONE.workers, ALONE.rank, ALONE.is_chief) == (1, 0, True)
    assert (ALONE.local_ranks, ALONE.local_index) == ((0,), 0)
    assert without_cluster({**tf_config({"worker": ["a:1"]}), "HOME": "/"}) == {"HOME": "/"}


@pytest.mark.parametrize(
    ("tasks", "kind", "index", "addresses", "rank"),
    [
        ({"worker": ["a:1", "b:1"]}, "worker", 1, ("a:1", "b:1"), 1),
        ({"worker": ["a:1"]}, "worker", "0", ("a:1",), 0),
        ({"chief": ["c:1"], "worker": ["a:1", "b:1"]}, "worker", 0, ("c:1", "a:1", "b:1"), 1),
    ],
)
def test_tf_config_names_the_workers_and_a_chief_comes_first(tasks, kind, index, addresses, rank):
    cluster = read_cluster(tf_config(tasks, kind, index, environment="cloud"))
    assert (cluster.addresses, cluster.rank, cluster.is_chief) == (addresses, rank, rank == 0)
    assert read_cluster({"TF_CONFIG": cluster.as_tf_config()}) == cluster


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere TensorFlow sums, on one host too")
@pytest.mark.parametrize(
    ("workers", "shared"),
    [
        (["127.0.0.1:1", "127.0.0.1:2"], True),
        (["A:1", "a:2"], True),
        (["a:1", "a:2", "b:1"], False),
    ],
)
def test_workers_of_one_host_share_memory(workers, shared):
    assert read_cluster(tf_config({"worker": workers})).shares_memory is shared


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"TF_CONFIG": "{'cluster'"}, "be JSON"),
        (tf_config({"worker": "a:1"}), "be JSON of a cluster and a task"),
        (
            tf_config({"worker": ["a:1"], "ps": ["b:1"]}),
            "at most one chief, and one of them as task, got tasks ps, worker",
        ),
        (tf_config({"chief": ["a:1", "b:1"]}, "chief"), "at most one chief"),
        (tf_config({"worker": ["a:1"]}, index=1), "worker 1 of 1"),
        (tf_config({"worker": ["a:1", "a:1"]}), "got a:1 twice"),
        (tf_config({"worker": ["a:65536"]}), "must be host:port"),
    ],
)
def test_a_cluster_that_is_not_whole_is_refused(environ, message):
    with pytest.raises(InputError, match=message.replace("[", r"\[")):
        read_cluster(environ)


def test_ranks_are_dealt_host_by_host_and_ports_worker_by_worker():
    cluster = from_hosts(("A", "fe80::2", "[fe80::3]"), 2, (5000, 5001), 2)
    hosts = ("a", "[fe80::2]", "[fe80::3]")
    assert cluster.addresses == tuple(f"{host}:{port}" for host in hosts for port in (5000, 5001))
    assert cluster.local_ranks == (2, 3)
    assert [host_and_port(address)[0] for address in cluster.addresses[::2]] == [
        "a",
        "fe80::2",
        "fe80::3",
    ]
    with pytest.raises(InputError, match="got a:5000 twice"):
        from_hosts(("a", "A"), 1, (5000,))


# --- Hosts ---


@pytest.mark.parametrize(
    ("hosts", "here"), [(("n1", "n2"), 1), (("n2", "n3"), 0), (("n1", "[fd00::3]", "n2"), 2)]
)
def test_this_host_is_the_one_that_a_socket_can_be_bound_to(monkeypatch, hosts, here):
    monkeypatch.setattr(module, "is_this_host", lambda host: host == "n2")
    assert own_index(hosts) == here


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        (("n1", "n3"), "once, got none of n1, n3"),
        (("n2", "also-n2"), "got n2 and also-n2"),
        (("localhost", "n2"), "must be names that the other hosts can reach, got localhost"),
    ],
)
def test_a_list_that_does_not_tell_is_refused(monkeypatch, hosts, message):
    monkeypatch.setattr(module, "is_this_host", lambda host: "n2" in host)
    with pytest.raises(InputError, match=message):
        own_index(hosts)


def test_this_machine_has_addresses_and_free_ports():
    assert [is_this_host(host) for host in ("127.0.0.1", "a..b", "192.0.2.1")] == [
        True,
        False,
        False,
    ]
    ports = free_ports(3)
    assert len(set(ports)) == 3
    assert all(20000 <= port < 32768 for port in ports)


# --- Slurm ---


def srun(nodes, tasks, rank, **more):
    names = ("SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_PROCID")
    return {"SLURM_JOB_ID": "1234567", **dict(zip(names, (nodes, tasks, str(rank)))), **more}


def test_one_task_a_host_is_the_host_and_ports_are_by_the_job_s_number():
    assert read_slurm(srun("n[1-3]", "1(x3)", 2, SLURM_NODEID="2")) == (
        ("n1", "n2", "n3"),
        2,
        15000 + 567 * 16,
    )
    assert read_slurm(srun("a", "1", 0, SLURM_JOB_ID="999")) == (("a",), 0, 15000 + 999 * 16)
    script = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_PROCID": "0"}
    assert read_slurm(script) is None, "a batch script is no task"


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            srun("n[1-2]", "2(x2)", 3),
            "one task on each of its hosts, in order, got SLURM_PROCID 3 of 2.x2. tasks",
        ),
        (srun("a,b", "1(x2)", -1), "got SLURM_PROCID -1"),
        (srun("n[1-", "1(x2)", 0), "that scontrol lists, got "),
        (srun("a,b", "1(x2)", 1, SLURM_NODEID="0"), "in order"),
        (srun("a", "1", 0, SLURM_JOB_ID="12.3"), "must have whole numbers, .* got .*12.3"),
    ],
)
def test_a_step_that_is_not_whole_is_refused(environ, message):
    with pytest.raises(InputError, match=message):
        read_slurm(environ)
