"""The plan of a launch and the workers it starts, with a stand-in for the training."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from cpu3d.distributed import launch
from cpu3d.distributed.cluster import read_cluster
from cpu3d.distributed.launch import Options, place_workers
from cpu3d.errors import InputError
from cpu3d.util.lock import locked
from tests.cpu3d.distributed.test_cluster import srun, tf_config
from tests.cpu3d.host.hosts import XEON
from tests.cpu3d.runs import run_command

# --- The plan ---


SLURM = srun("n[1-2]", "1(x2)", 1, SLURM_JOB_ID="1")


def plan_of(environ=None, sockets=2, **options):
    return place_workers(Options(**options), environ or {}, sockets)


TF = tf_config({"worker": ["a:1", "b:1"]}, index=1)


@pytest.mark.parametrize(
    ("options", "environ", "addresses", "ranks", "origin"),
    [
        # options, environment -> addresses, ranks that start here, where it is from
        (
            {"workers": 3, "port": 5000},
            {},
            ["127.0.0.1:5000", "127.0.0.1:5001", "127.0.0.1:5002"],
            (0, 1, 2),
            "this one",
        ),
        (
            {"hosts": "a,b", "host_index": 1},
            SLURM,
            ["a:29500", "a:29501", "b:29500", "b:29501"],
            (2, 3),
            "--hosts",
        ),
        (
            {"hosts": "a, b", "host_index": 0, "workers": 1, "port": 6000},
            {},
            ["a:6000", "b:6000"],
            (0,),
            "--hosts",
        ),
        ({}, {**TF, **SLURM}, ["a:1", "b:1"], (1,), "TF_CONFIG"),
        # each task of srun starts the workers of its host
        ({}, SLURM, ["n1:15016", "n1:15017", "n2:15016", "n2:15017"], (2, 3), "Slurm"),
    ],
)
def test_the_workers_and_those_that_start_here(options, environ, addresses, ranks, origin):
    plan = plan_of(environ, **options)
    assert list(plan.cluster.addresses) == addresses
    assert (tuple(plan.ranks), plan.origin) == (ranks, origin)
    assert plan.cluster.rank == ranks[0]
    for rank in ranks:
        variables = plan.environ_of(rank, {**TF, "HOME": "/"})
        assert read_cluster({"TF_CONFIG": variables.pop("TF_CONFIG")}) == plan.cluster.of_rank(rank)
        assert variables == {"HOME": "/"}


def test_one_worker_is_alone_and_workers_of_this_host_have_ports_of_their_own():
    alone = plan_of(workers=1)
    assert alone.environ_of(0, {"HOME": "/", **TF}) == {"HOME": "/"}
    assert alone.words == "1 worker on 1 host (this one), 1 here"
    assert len(set(plan_of(sockets=4).cluster.addresses)) == 4
    assert plan_of(hosts="a,b", host_index=0).words == "4 workers on 2 hosts (--hosts), 2 here"


def test_what_does_not_agree_is_refused():
    with pytest.raises(InputError, match=r"--host-index must be below 2.*, got 2"):
        plan_of(hosts="a,b", host_index=2)
    with pytest.raises(InputError, match="--workers must be 1 with TF_CONFIG"):
        plan_of(TF, workers=2)


# --- The launch ---

STAND_IN = """
import os, sys
from cpu3d.distributed.cluster import read_cluster
assert os.environ["PYTHONSAFEPATH"]  # whatever the caller's folder holds
cluster = read_cluster(os.environ)
print(f"worker {cluster.rank} of {cluster.workers}", *sys.argv[1:], os.environ["PYTHONSAFEPATH"])
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """The stand-in on a made-up host, without a cluster around the tests."""
    for name in ("SLURM_STEP_NODELIST", "TF_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    monkeypatch.setattr(launch, "PROGRAM", (sys.executable, str(script)))
    monkeypatch.setattr(launch, "read_topology", lambda: XEON)


def train(folder, *more):
    return ("train", "--store", "store", "--run", Path(folder) / "run", *more)


def test_workers_train_and_leave_their_words(program, tmp_path, capsys):
    words = train(tmp_path, "--batch", 2, "--filters", 8)
    for _ in range(2):
        assert run_command(launch, "--workers", 2, *words) == 0
    for rank in (0, 1):
        *_, line = (tmp_path / "run" / "logs" / f"worker-{rank}.log").read_text().splitlines()
        assert line == f"worker {rank} of 2 {' '.join(map(str, words))} 1"
    printed = " ".join(capsys.readouterr().err.split())
    assert re.search("2 workers on 1 host.* logs: .*worker-1.log", printed)
    assert printed.count("worker 0") == 2  # the chief's words are shown, once each
    assert "worker 1" not in printed
    assert "finished after " in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "launch .*must be followed by `train`.*, got nothing"),
        (("--host-index", 1, *train("a")), "--host-index must come with --hosts, got 1"),
        (("--dry-run", "--workers", 999, *train("a")), "workers must divide .* got 999 on"),
        (train("a", "--json"), "must start a training, got .*--json"),
        (train("a", "--dry-run"), "must start a training, got .*--dry-run"),
        (train("a", "--folds", 3), "must train one run, got --folds 3"),
    ],
)
def test_what_cannot_be_launched_is_refused(program, words, message):
    with pytest.raises(InputError, match=message):
        run_command(launch, *words)


def test_a_run_that_another_job_holds_is_refused(program, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    with locked(run, "run"), pytest.raises(InputError, match="one process at a time"):
        run_command(launch, *train(tmp_path))
    assert not [*run.rglob("*.log")]


def test_options_of_train_are_read_before_anything_starts(program, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run_command(launch, "--workers", 2, *train(tmp_path, "--norm", "none-such"))
    assert "argument --norm" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_dry_run_prints_the_plan_and_commands_and_starts_nothing(program, tmp_path, capsys):
    assert run_command(launch, "--dry-run", *train(tmp_path, "--batch", 4)) == 0
    out = capsys.readouterr().out
    assert "2 workers on 1 host" in out
    assert "plan of worker 0: CPUs 0-27,56-83, " in out
    for rank in (0, 1):
        (line,) = re.findall(f"^worker {rank}: (.*)", out, re.MULTILINE)
        place, *words = shlex.split(line)
        assert read_cluster(dict([place.split("=", 1)])).rank == rank
        assert words == [*launch.PROGRAM, *map(str, train(tmp_path, "--batch", 4))]
    assert not (tmp_path / "run").exists()
