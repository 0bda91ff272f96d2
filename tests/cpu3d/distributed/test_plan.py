import json
import sys

import pytest

from cpu3d.distributed.cluster import from_tf_config
from cpu3d.distributed.plan import HOROVOD, Asked, ThisHost, environ_of, horovod_command, make_plan
from cpu3d.errors import InputError

FREE = (41001, 42002, 43003, 44004)


def host(sockets=2, index=0):
    return ThisHost(lambda: sockets, lambda hosts: index, lambda count: FREE[:count])


def slurm(nodes, tasks, rank, **more):
    return {
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_TASKS_PER_NODE": tasks,
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": str({"1(x2)": 2, "2(x2)": 4, "1": 1, "2": 2}[tasks]),
        "SLURM_JOB_ID": "1",
        **more,
    }


TF = {"TF_CONFIG": json.dumps({"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}})}
N1 = ["n1:15016", "n1:15017"]
N2 = ["n2:15016", "n2:15017"]

PLANS = [
    # asked, environment, this host -> addresses, ranks that start here, where it is from
    (Asked(), {}, host(4), [f"127.0.0.1:{port}" for port in FREE], (0, 1, 2, 3), "this one"),
    (Asked(workers=1), {}, host(4), ["127.0.0.1:41001"], (0,), "this one"),
    (Asked(workers=2, port=5000), {}, host(), ["127.0.0.1:5000", "127.0.0.1:5001"], (0, 1), "this one"),
    (Asked(hosts=("a", "b")), {}, host(1, 1), ["a:29500", "b:29500"], (1,), "--hosts"),
    (Asked(hosts=("a", "b")), {}, host(2, 1), ["a:29500", "a:29501", "b:29500", "b:29501"], (2, 3), "--hosts"),
    (
        Asked(hosts=("a", "b"), host_index=0, workers=1, port=6000),
        {},
        host(2, 1),
        ["a:6000", "b:6000"],
        (0,),
        "--hosts",
    ),
    (Asked(hosts=("a",)), {}, host(2), ["a:41001", "a:42002"], (0, 1), "--hosts"),
    (
        Asked(hosts=("fd00::1", "fd00::2"), workers=1),
        {},
        host(),
        ["[fd00::1]:29500", "[fd00::2]:29500"],
        (0,),
        "--hosts",
    ),
    (Asked(), TF, host(4), ["a:1", "b:1"], (1,), "TF_CONFIG"),
    (Asked(workers=1), TF, host(4), ["a:1", "b:1"], (1,), "TF_CONFIG"),
    (Asked(hosts=("c", "d"), workers=1), TF, host(), ["c:29500", "d:29500"], (0,), "--hosts"),
    (Asked(), {**TF, **slurm("n[1-2]", "1(x2)", 0)}, host(), ["a:1", "b:1"], (1,), "TF_CONFIG"),
    # each task of srun starts the workers of its host
    (Asked(), slurm("n[1-2]", "1(x2)", 1), host(2), N1 + N2, (2, 3), "Slurm"),
    (Asked(workers=1), slurm("n[1-2]", "1(x2)", 1), host(2), [N1[0], N2[0]], (1,), "Slurm"),
    (Asked(), slurm("n1", "1", 0), host(2), N1, (0, 1), "Slurm"),
    # each task of srun is a worker
    (Asked(), slurm("n[1-2]", "2(x2)", 2), host(2), N1 + N2, (2,), "Slurm"),
    (Asked(workers=1, port=7000), slurm("n1", "2", 1), host(2), ["n1:7000", "n1:7001"], (1,), "Slurm"),
    (Asked(), slurm("n1", "2", 1, SLURM_STEP_RESV_PORTS="9000-9001"), host(), ["n1:9000", "n1:9001"], (1,), "Slurm"),
    (Asked(), slurm("n1", "2", 1, SLURM_STEP_RESV_PORTS="9000"), host(), ["n1:9000", "n1:9001"], (1,), "Slurm"),
]


@pytest.mark.parametrize(("asked", "environ", "this_host", "addresses", "ranks", "found"), PLANS)
def test_the_workers_and_those_that_start_here(asked, environ, this_host, addresses, ranks, found):
    plan = make_plan(asked, environ, this_host)
    assert list(plan.cluster.addresses) == addresses
    assert (plan.ranks, plan.found) == (ranks, found)
    assert plan.cluster.rank == ranks[0]


@pytest.mark.parametrize(("rank", "nodes"), [(0, "n[1-2]"), (1, "n[1-2]")])
def test_all_launches_of_a_run_agree(rank, nodes):
    """The launches know nothing of each other: what they plan has to fit together."""
    plan = make_plan(Asked(), slurm(nodes, "1(x2)", rank), host(2))
    assert plan.ranks == (2 * rank, 2 * rank + 1)
    told = [from_tf_config(environ_of(plan, one, {})["TF_CONFIG"]) for one in plan.ranks]
    assert [cluster.rank for cluster in told] == list(plan.ranks)
    assert {cluster.addresses for cluster in told} == {tuple(N1 + N2)}
    assert [cluster.local_index for cluster in told] == [0, 1]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Asked(workers=0), "--workers must be at least 1"),
        (lambda: Asked(port=80), "--port must be in 1024 to 65535, got 80"),
        (lambda: Asked(host_index=0), "--host-index must be in --hosts"),
        (lambda: Asked(hosts=("a", "b"), host_index=2), "got 2"),
        (lambda: make_plan(Asked(workers=2), TF, host()), "--workers must be left out with TF_CONFIG"),
        (lambda: make_plan(Asked(workers=2), slurm("n1", "2", 0), host()), "--workers must be left out with Slurm"),
        (lambda: make_plan(Asked(engine=HOROVOD), TF, host()), "launched once for all hosts, got it with TF_CONFIG"),
        (lambda: make_plan(Asked(engine=HOROVOD), slurm("n1", "1", 0), host()), "got it with a task of srun"),
        (lambda: make_plan(Asked(hosts=("a", "a")), {}, host()), "got a twice"),
    ],
)
def test_what_does_not_agree_is_refused(make, said):
    with pytest.raises(InputError, match=said):
        make()


def test_all_bad_options_are_told_at_once():
    with pytest.raises(InputError) as caught:
        Asked(workers=0, port=1, host_index=1)
    assert len(caught.value.problems) == 3


def test_a_worker_is_told_its_own_cluster_and_no_other():
    before = {"HOME": "/root", "HOROVOD_RANK": "3", "HOROVOD_CYCLE_TIME": "1", **TF}
    alone = environ_of(make_plan(Asked(workers=1), {}, host()), 0, before)
    assert alone == {"HOME": "/root", "HOROVOD_CYCLE_TIME": "1"}
    plan = make_plan(Asked(workers=2), {}, host())
    told = environ_of(plan, 1, before)
    assert from_tf_config(told.pop("TF_CONFIG")) == plan.cluster.of_rank(1)
    assert told == alone


def test_ports_of_this_host_alone_have_to_be_free_here():
    assert make_plan(Asked(hosts=("a", "b"), workers=2), {}, host(2, 1)).ports_here == (29500, 29501)
    assert make_plan(Asked(workers=1), {}, host()).ports_here == ()
    assert make_plan(Asked(engine=HOROVOD), {}, host()).ports_here == ()


@pytest.mark.parametrize(
    ("asked", "places"),
    [(Asked(engine=HOROVOD), "localhost:2"), (Asked(hosts=("a", "b"), engine=HOROVOD, workers=3), "a:3,b:3")],
)
def test_horovods_launcher_starts_all_workers(asked, places):
    plan = make_plan(asked, {}, host(2, 1))
    count = str(plan.cluster.workers)
    command = horovod_command(plan, ("python", "train"), "logs")
    assert command == (
        *(sys.executable, "-m", "cpu3d.distributed.horovodrun", "--gloo", "-np", count, "-H", places),
        *("--output-filename", "logs", "python", "train"),
    )
    assert plan.ranks == tuple(range(plan.cluster.workers))
    assert "TF_CONFIG" not in environ_of(plan, 0, TF)


def test_workers_with_cpus_of_their_own_share_with_nobody():
    bound = {"SLURM_CPU_BIND_LIST": "0x3,0xC"}
    assert make_plan(Asked(), {**slurm("n1", "2", 1), **bound}, host()).sharing_here == 1
    assert make_plan(Asked(), slurm("n1", "2", 1), host()).sharing_here == 2
    assert make_plan(Asked(), {**slurm("n1", "1", 0), **bound}, host(3)).sharing_here == 3


def test_a_batch_script_that_leaves_hosts_idle_is_told_so():
    script = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_PROCID": "0", "SLURM_JOB_ID": "1"}
    plan = make_plan(Asked(workers=1), script, host())
    assert plan.found == "this one"
    assert plan.note == "the job has 2 other hosts, which srun ./run.sh launch ... would use"
    assert make_plan(Asked(workers=1), {}, host()).note == ""


def test_a_plan_in_words():
    assert make_plan(Asked(workers=1), {}, host()).words == "1 worker on 1 host (this one)"
    there = make_plan(Asked(hosts=("a", "b")), {}, host(2))
    assert there.words == "4 workers on 2 hosts (--hosts), 2 of them here"
