import pytest

from cpu3d.distributed.cluster import (
    expand_counts,
    expand_hosts,
    in_slurm,
    read_slurm,
)
from cpu3d.errors import InputError


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("login", "login"),
        ("a,b", "a b"),
        ("node[01-03,7],login", "node01 node02 node03 node7 login"),
        ("node[8-11]", "node8 node9 node10 node11"),
        ("node[098-101]", "node098 node099 node100 node101"),
        ("r[1-2]n[1-2]", "r1n1 r1n2 r2n1 r2n2"),
        ("r[1-2]n[1-2]-ib,x", "r1n1-ib r1n2-ib r2n1-ib r2n2-ib x"),
        ("n[1,3].cluster.org", "n1.cluster.org n3.cluster.org"),
        (" n1 ", "n1"),
    ],
)
def test_host_lists_are_expanded(text, hosts):
    assert expand_hosts(text) == tuple(hosts.split())


@pytest.mark.parametrize(
    "text", ["", "a,", "n[1-", "n[]", "n[1-a]", "n[3-1]", "n]1[", "a b", "n[0-99999999]", "n[0-9999]m[0-9999]"]
)
def test_other_host_lists_are_refused(text):
    with pytest.raises(InputError, match="host list must be like"):
        expand_hosts(text)


def test_counts_are_expanded():
    assert expand_counts("2(x3),1") == (2, 2, 2, 1)
    assert expand_counts("4") == (4,)
    for text in ("", "2(x", "two", "2,,1"):
        with pytest.raises(InputError, match="SLURM_STEP_TASKS_PER_NODE"):
            expand_counts(text)


def step(nodes, tasks, rank, **more):
    count = sum(expand_counts(tasks))
    return {
        "SLURM_JOB_ID": "1234567",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_TASKS_PER_NODE": tasks,
        "SLURM_STEP_NUM_TASKS": str(count),
        "SLURM_PROCID": str(rank),
        **more,
    }


def test_one_task_a_host_is_the_host():
    task = read_slurm(step("n[1-3]", "1(x3)", 2, SLURM_LOCALID="0", SLURM_NODEID="2"))
    assert (task.hosts, task.tasks, task.rank, task.host_index) == (("n1", "n2", "n3"), (1, 1, 1), 2, 2)
    assert not task.is_worker


@pytest.mark.parametrize(("rank", "host", "local"), [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 2, 0), (4, 2, 1)])
def test_several_tasks_a_host_are_workers(rank, host, local):
    task = read_slurm(step("n[1-3]", "2,1,2", rank, SLURM_LOCALID=str(local), SLURM_NODEID=str(host)))
    assert task.is_worker
    assert task.host_index == host


def test_ports_are_those_reserved_or_by_the_jobs_number():
    assert read_slurm(step("a", "1", 0, SLURM_STEP_RESV_PORTS="12003-12004,12007")).ports == (12003, 12004, 12007)
    ports = read_slurm(step("a", "1", 0)).ports
    assert ports[0] == 15000 + 567 * 16
    assert ports == tuple(range(ports[0], ports[0] + 16))
    last = read_slurm(step("a", "1", 0, SLURM_JOB_ID="999")).ports[-1]
    assert last < 32768, "from there on Linux takes ports for connections"


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        (step("n[1-3]", "1(x2)", 0), "tasks on each of its hosts"),
        (step("a,b", "1(x2)", 0, SLURM_STEP_NUM_TASKS="3"), "tasks on each of its hosts"),
        (step("a,b", "1(x2)", 2), "got SLURM_PROCID 2"),
        (step("a,b", "1(x2)", "x"), "SLURM_PROCID must be a whole number"),
        (step("a,b", "2(x2)", 1, SLURM_NODEID="1", SLURM_LOCALID="0"), "numbered host by host"),
        ({"SLURM_PROCID": "0"}, "host list must be"),
        (step("a", "1", 0, SLURM_JOB_ID="12_3"), "SLURM_JOB_ID must be a whole number"),
    ],
)
def test_a_step_that_is_not_whole_is_refused(environ, said):
    with pytest.raises(InputError, match=said):
        read_slurm(environ)


def test_a_batch_script_is_no_task():
    script = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}
    assert not in_slurm(script)
    assert in_slurm(step("n[1-2]", "1(x2)", 0))
