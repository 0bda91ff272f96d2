import json
import sys

import pytest

from cpu3d.distributed.cluster import (
    ALONE,
    Cluster,
    from_hosts,
    host_and_port,
    join_address,
    read_cluster,
    share_of_host,
)
from cpu3d.errors import InputError


def tf_config(tasks, kind="worker", index=0, **more):
    return {"TF_CONFIG": json.dumps({"cluster": tasks, "task": {"type": kind, "index": index}, **more})}


def horovod(rank, size, local, here):
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    return {f"HOROVOD_{name}": str(value) for name, value in zip(names, (rank, size, local, here))}


def test_without_variables_a_process_is_alone():
    for environ in ({}, {"TF_CONFIG": ""}, {"TF_CONFIG": "{}"}, {"TF_CONFIG": '{"cluster": {}}'}, horovod(0, 1, 0, 1)):
        assert read_cluster(environ) == ALONE
    assert (ALONE.workers, ALONE.rank, ALONE.is_chief) == (1, 0, True)
    assert (ALONE.local_ranks, ALONE.local_index) == ((0,), 0)


@pytest.mark.parametrize(
    ("tasks", "kind", "index", "addresses", "rank"),
    [
        ({"worker": ["a:1", "b:1"]}, "worker", 1, ("a:1", "b:1"), 1),
        ({"worker": ["a:1"]}, "worker", "0", ("a:1",), 0),
        ({"chief": ["c:1"], "worker": ["a:1", "b:1"]}, "chief", 0, ("c:1", "a:1", "b:1"), 0),
        ({"chief": ["c:1"], "worker": ["a:1", "b:1"]}, "worker", 0, ("c:1", "a:1", "b:1"), 1),
        ({"worker": ["[fe80::1]:29500", "[fe80::2]:29500"]}, "worker", 0, ("[fe80::1]:29500", "[fe80::2]:29500"), 0),
    ],
)
def test_tf_config_names_the_workers_and_a_chief_comes_first(tasks, kind, index, addresses, rank):
    cluster = read_cluster(tf_config(tasks, kind, index, environment="cloud"))
    assert (cluster.addresses, cluster.rank, cluster.is_chief) == (addresses, rank, rank == 0)
    assert read_cluster({"TF_CONFIG": cluster.as_tf_config()}) == cluster


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere TensorFlow sums, on one host too")
@pytest.mark.parametrize(
    ("addresses", "engine"),
    [(["127.0.0.1:1", "127.0.0.1:2"], "memory"), (["A:1", "a:2"], "memory"), (["a:1", "a:2", "b:1"], "tensorflow")],
)
def test_workers_of_one_host_share_memory(addresses, engine):
    assert read_cluster(tf_config({"worker": addresses})).engine == engine


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"TF_CONFIG": "{'cluster'"}, "be JSON"),
        ({"TF_CONFIG": "[1]"}, "JSON object"),
        ({"TF_CONFIG": '{"cluster": ["a:1"]}'}, "objects named cluster and task"),
        (tf_config({"worker": ["a:1"], "ps": ["b:1"]}), "chief and workers only, as all train alike, got ps"),
        (tf_config({"worker": ["a:1"]}, "evaluator"), "task type 'evaluator'"),
        (tf_config({"worker": ["a:1"]}, "ps"), "task type 'ps'"),
        (tf_config({"worker": ["a:1"]}, index=1), "index below its 1 worker addresses, got 1"),
        (tf_config({"worker": ["a:1"]}, index=-1), "got -1"),
        (tf_config({"worker": ["a:1"]}, index=None), "got None"),
        (tf_config({"worker": ["a:1"]}, "chief"), "index below its 0 chief addresses"),
        (tf_config({"worker": ["a:1", "a:1"]}), "got a:1 twice"),
        (tf_config({"worker": "a:1"}), "hold lists"),
        (tf_config({"worker": ["a"]}), "must be host:port"),
        (tf_config({"worker": ["a:0"]}), "must be host:port"),
        (tf_config({"worker": ["a:65536"]}), "must be host:port"),
        (tf_config({"worker": ["fe80::1:29500"]}), "must be host:port"),
        (tf_config({"worker": [1]}), "must be host:port"),
        (tf_config({"chief": ["a:1", "b:1"]}, "chief"), "name one chief"),
        (horovod(2, 2, 0, 1), "must be of one job"),
        ({"HOROVOD_RANK": "0"}, "HOROVOD_SIZE must be a whole number"),
    ],
)
def test_a_cluster_that_is_not_whole_is_refused(environ, said):
    with pytest.raises(InputError, match=said.replace("[", r"\[")):
        read_cluster(environ)


def test_all_bad_addresses_are_told_at_once():
    with pytest.raises(InputError) as caught:
        Cluster(("a", "b:1", "c:x"), 3)
    assert len(caught.value.problems) == 3


def test_workers_of_a_host_are_told_by_its_name():
    cluster = Cluster(("A:1", "b:1", "a:2", "[::1]:1", "[::1]:2"), 2)
    assert (cluster.local_ranks, cluster.local_index) == ((0, 2), 1)
    assert cluster.of_rank(4).local_ranks == (3, 4)
    assert cluster.of_rank(1).local_ranks == (1,)


@pytest.mark.parametrize(
    ("variables", "local_ranks", "index"),
    [((0, 2, 0, 2), (0, 1), 0), ((3, 4, 1, 2), (2, 3), 1), ((2, 3, 0, 1), (2,), 0)],
)
def test_horovods_own_variables_count_the_workers_of_a_host(variables, local_ranks, index):
    cluster = read_cluster({**horovod(*variables), "HOROVOD_HOSTNAME": "n1"})
    assert (cluster.rank, cluster.workers) == variables[:2]
    assert (cluster.local_ranks, cluster.local_index) == (local_ranks, index)
    assert cluster.engine == cluster.of_rank(0).engine == "horovod"


def test_tf_config_goes_before_horovod():
    assert read_cluster({**tf_config({"worker": ["a:1"]}), **horovod(1, 2, 0, 1)}).addresses == ("a:1",)


def test_ranks_are_dealt_host_by_host_and_ports_worker_by_worker():
    cluster = from_hosts(("A", "fe80::2", "[fe80::3]"), (2, 1, 1), (5000, 5001), 2)
    assert cluster.addresses == ("a:5000", "a:5001", "[fe80::2]:5000", "[fe80::3]:5000")
    assert cluster.local_ranks == (2,)
    with pytest.raises(InputError, match="got a twice"):
        from_hosts(("a", "A"), (1, 1), (5000,))


def test_an_address_is_taken_apart_and_put_together():
    for host, port in (("a-b.c", 1), ("10.0.0.1", 65535), ("fe80::1", 80)):
        assert host_and_port(join_address(host, port)) == (host, port)


def test_cpus_are_shared_by_the_workers_of_a_host_unless_slurm_has_bound_each():
    cluster = Cluster(("a:1", "a:2", "b:1"), 1)
    assert share_of_host(cluster, {}) == (1, 2)
    assert share_of_host(cluster, {"SLURM_CPU_BIND_LIST": "0xF"}) == (1, 2), "one task of its host"
    assert share_of_host(cluster, {"SLURM_CPU_BIND_LIST": "0x3,0xC"}) == (0, 1)
