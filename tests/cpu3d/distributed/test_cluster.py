"""Who trains together by TF_CONFIG and lists of hosts, and which of them this process is."""

import json
import sys

import pytest

from cpu3d.distributed import cluster as module
from cpu3d.distributed.cluster import (
    ALONE,
    Cluster,
    free_ports,
    from_hosts,
    is_this_host,
    own_index,
    read_cluster,
    read_slurm,
)
from cpu3d.errors import InputError


def tf_config(tasks, kind="worker", index=0, **more):
    content = {"cluster": tasks, "task": {"type": kind, "index": index}, **more}
    return {"TF_CONFIG": json.dumps(content)}


@pytest.mark.parametrize("environ", [{}, {"TF_CONFIG": '{"cluster": {}}'}])
def test_without_a_cluster_in_the_environment_a_process_is_alone_and_the_chief(environ):
    alone = read_cluster(environ)
    assert alone == ALONE
    assert (alone.workers, alone.is_chief) == (1, True)
    assert (alone.local_ranks, alone.local_index) == ((0,), 0)


def test_tf_config_names_the_workers_and_a_chief_comes_first():
    workers = ["a:1", "b:1"]
    assert read_cluster(tf_config({"worker": workers}, index="1")) == Cluster(("a:1", "b:1"), 1)
    cluster = read_cluster(tf_config({"chief": ["c:1"], "worker": workers}, environment="cloud"))
    assert cluster == Cluster(("c:1", "a:1", "b:1"), 1)
    assert read_cluster({"TF_CONFIG": cluster.as_tf_config()}) == cluster
    assert [cluster.of_rank(rank).is_chief for rank in (0, 1)] == [True, False]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere TensorFlow sums, on one host too")
def test_workers_of_one_host_share_memory():
    assert Cluster(("A:1", "a:2")).shares_memory
    assert not Cluster(("a:1", "a:2", "b:1")).shares_memory


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"TF_CONFIG": "{'cluster'"}, "be JSON"),
        (tf_config({"worker": "a:1"}), "be JSON of a cluster and a task"),
        (tf_config({"worker": ["a:1"], "ps": ["b:1"]}), "one chief, .* got tasks ps, worker"),
        (tf_config({"chief": ["a:1", "b:1"]}, "chief"), "at most one chief"),
        (tf_config({"worker": ["a:1"]}, index=1), "worker 1 of 1"),
        (tf_config({"worker": ["a:1", "a:1"]}), "got a:1 twice"),
        (tf_config({"worker": ["a:65536"]}), "must be host:port"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "one task of srun, got 2; .* launch train"),
    ],
)
def test_a_cluster_that_is_not_whole_is_refused(environ, message):
    with pytest.raises(InputError, match=message):
        read_cluster(environ)


def test_ranks_are_dealt_host_by_host_and_ports_worker_by_worker():
    cluster = from_hosts(("A", "fe80::2", "[fe80::3]"), 2, (5000, 5001), 2)
    hosts = ("a", "[fe80::2]", "[fe80::3]")
    assert cluster.addresses == tuple(f"{host}:{port}" for host in hosts for port in (5000, 5001))
    assert (cluster.local_ranks, cluster.local_index) == ((2, 3), 0)
    assert cluster.hosts[::2] == ("a", "fe80::2", "fe80::3")


# --- Hosts ---


@pytest.fixture
def _on_n2(monkeypatch):
    """This host is n2, by two names."""
    monkeypatch.setattr(module, "is_this_host", lambda host: "n2" in host)


@pytest.mark.usefixtures("_on_n2")
@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        (("n1", "n3"), "once, got none of n1, n3"),
        (("n2", "also-n2"), "got n2 and also-n2"),
    ],
)
def test_a_list_that_does_not_tell_this_host_is_refused(hosts, message):
    assert own_index(("n1", "[fd00::3]", "n2")) == 2
    with pytest.raises(InputError, match=message):
        own_index(hosts)


def test_this_machine_has_addresses_and_free_ports():
    assert is_this_host("127.0.0.1")
    assert not any(map(is_this_host, ("a..b", "192.0.2.1")))
    ports = free_ports(3)
    assert len(set(ports)) == 3
    assert all(20000 <= port < 32768 for port in ports)


# --- Slurm ---


def srun(nodes, tasks, host, **more):
    names = ("SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID")
    return {"SLURM_JOB_ID": "1234567", **dict(zip(names, (nodes, tasks, str(host)))), **more}


def test_one_task_a_host_is_the_host_and_ports_are_by_the_job_s_number():
    step = read_slurm(srun("n[1-3]", "1(x3)", 2))
    assert step == (("n1", "n2", "n3"), 2, 15000 + 567 * 16)
    assert read_slurm(srun("a", "1", 0, SLURM_JOB_ID="999")) == (("a",), 0, 15000 + 999 * 16)
    assert read_slurm({"SLURM_NODEID": "0"}) is None, "a batch script is no task"


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (srun("n[1-2]", "2(x2)", 1), "one task on each .* got 2.x2. tasks on 2 hosts"),
        (srun("n[1-", "1(x2)", 0), "that scontrol lists, got "),
        (srun("a", "1", 0, SLURM_JOB_ID="12.3"), "must have whole numbers, .* got .*12.3"),
    ],
)
def test_a_step_that_is_not_whole_is_refused(environ, message):
    with pytest.raises(InputError, match=message):
        read_slurm(environ)
