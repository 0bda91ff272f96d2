"""With a stand-in for the training: it leaves a log of steps and ends as a file beside the run says."""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from cpu3d.distributed import earlier, launch, plan
from cpu3d.distributed.supervise import WorkerFailedError
from cpu3d.errors import InputError
from cpu3d.host.topology import EXAMPLE_HOSTS
from cpu3d.training.guard.heartbeat import Heartbeat, process_start, this_place, write_heartbeat
from cpu3d.util.child import ROOT

STAND_IN = """
import json, os, signal, sys, time
from pathlib import Path
from cpu3d.distributed.cluster import read_cluster
from cpu3d.training.run_log import append_event
cluster = read_cluster(os.environ)
run = Path(sys.argv[sys.argv.index("--run") + 1])
ends = json.loads((run.parent / "ends").read_text()) if (run.parent / "ends").exists() else {}
print(f"worker {cluster.rank} of {cluster.workers}", " ".join(sys.argv[1:]), flush=True)
if cluster.is_chief:
    append_event(run, {"event": "start", "step": 0, "steps": 2})
    for step in (1, 2):
        append_event(run, {"event": "step", "step": step})
if "waits" in ends:
    told = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: told.append(number))
    (run.parent / f"waits-{cluster.rank}").write_text(str(os.getpid()))
    end = time.monotonic() + 120
    while not told and time.monotonic() < end:
        time.sleep(0.01)
    sys.exit(128 + told[0])
sys.exit(ends.get(str(cluster.rank), 0))
"""


@pytest.fixture
def alone(monkeypatch):
    """No cluster around the tests."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "HOROVOD_", "TF_CONFIG")):
            monkeypatch.delenv(name)


@pytest.fixture
def program(tmp_path, monkeypatch, alone):
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    monkeypatch.setattr(plan, "PROGRAM", (sys.executable, str(script)))
    monkeypatch.setattr(launch, "read_topology", lambda: EXAMPLE_HOSTS["xeon-2x28"])
    return script


def launched(*words):
    parser = argparse.ArgumentParser()
    launch.add_arguments(parser)
    return launch.run(parser.parse_args([str(word) for word in words]))


def train(folder, *more):
    return ("train", "--store", folder / "store", "--run", folder / "run", *more)


def test_workers_train_and_leave_their_words(program, tmp_path, capsys):
    assert launched("--workers", 2, *train(tmp_path, "--batch", 2, "--filters", 8)) == 0
    for rank in (0, 1):
        _, said = (tmp_path / "run" / "logs" / f"worker-{rank}.log").read_text().splitlines()
        assert said.startswith(f"worker {rank} of 2 train --store {tmp_path / 'store'} ")
        assert said.endswith("--batch 2 --filters 8")
    told = " ".join(capsys.readouterr().err.split())
    assert "launch: 2 workers on 1 host (this one); logs: " in told
    assert "worker 0 of 2 train" in told, "the chief's words are shown"
    assert "worker 1 of 2 train" not in told
    assert "---" not in told, "the header is for the log"
    assert "launch: 2 workers on 1 host (this one): ended well, 2 steps, to step 2, " in told
    assert told.endswith(f"logs in {tmp_path / 'run' / 'logs'}")


def test_one_worker_is_alone(program, tmp_path):
    launched("--workers", 1, *train(tmp_path))
    assert "worker 0 of 1" in (tmp_path / "run" / "logs" / "worker-0.log").read_text()


def test_under_tf_config_a_launch_is_that_worker(program, tmp_path, monkeypatch, capsys):
    content = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(content))
    (port,) = launch.free_ports(1)
    content["cluster"]["worker"][1] = f"b:{port}"
    monkeypatch.setenv("TF_CONFIG", json.dumps(content))
    launched(*train(tmp_path, "--batch", 2))
    assert os.listdir(tmp_path / "run" / "logs") == ["worker-1.log"]
    assert "worker 1 of 2" in (tmp_path / "run" / "logs" / "worker-1.log").read_text()
    assert "worker 1 of 2" not in capsys.readouterr().err, "it is not the chief"


def test_the_exit_code_is_the_failing_workers(program, tmp_path):
    (tmp_path / "ends").write_text('{"0": 6, "1": 4}')
    with pytest.raises(WorkerFailedError, match=r"worker 1 on .* got exit code 4 \(it diverged\)") as caught:
        launched("--workers", 2, *train(tmp_path, "--batch", 2))
    assert caught.value.exit_code == 4


@pytest.mark.parametrize("options", [("--batch", 3), ()])
def test_a_batch_that_cannot_be_shared_is_refused_once_and_before_anything_starts(program, tmp_path, options):
    with pytest.raises(InputError, match=r"--batch must be a multiple of the 2 workers, got (1|3); take --batch (2|4)"):
        launched("--workers", 2, *train(tmp_path, *options))
    assert not (tmp_path / "run").exists()


def test_only_the_chiefs_host_knows_the_batch_of_a_run_that_goes_on(program, tmp_path):
    hosts = ("--hosts", "a,b", "--workers", 1, "--dry-run")
    assert launched(*hosts, "--host-index", 1, *train(tmp_path)) == 0
    for options in (("--host-index", 0), ("--host-index", 1, "train", "--batch", 3)):
        with pytest.raises(InputError, match="--batch must be a multiple"):
            launched(*hosts, *options[:2], *train(tmp_path, *options[3:]))


def test_workers_of_an_earlier_launch_are_waited_for(program, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(earlier, "MOST_S", 0.3)
    (tmp_path / "run").mkdir()
    saves = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        start = process_start(saves.pid)
        of_day = {"started": 0.0, "beat": 0.0, "phase_since": 0.0}
        place = {"process_start": start, "place": this_place(), "host_name": "here"}
        beat = Heartbeat(rank=0, workers=1, pid=saves.pid, phase="saving", step=1, steps=9, **of_day, **place)
        write_heartbeat(tmp_path / "run", beat)
        with pytest.raises(InputError, match=rf"no other workers, got worker 0 \(process {saves.pid}\)"):
            launched("--workers", 1, *train(tmp_path))
        monkeypatch.setattr(earlier, "MOST_S", 30)
        threading.Timer(0.3, saves.stdin.close).start()
        assert launched("--workers", 1, *train(tmp_path)) == 0, "also while nobody has collected it"
    finally:
        saves.kill()
        saves.wait()
    assert "waiting for worker 0" in capsys.readouterr().err


def test_a_batch_for_each_worker_can_always_be_shared(program, tmp_path):
    assert launched("--workers", 4, "--dry-run", *train(tmp_path, "--batch-per-worker", 1)) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "launch must be followed by its options and then by train and its own, got nothing"),
        (("--workers", 2, "predict"), "got predict"),
        (("--on-host", "paper-4x20", "train"), "--on-host must come with --dry-run"),
        (("--dry-run", "--on-host", "nowhere", "train", "--store", "s", "--run", "r"), "got nowhere"),
        (("--dry-run", "--on-host", "small-1x2", "--workers", 3, "train", "--store", "s", "--run", "r", "--batch", "3"),
         "workers must have .* got 3 on 2 cores"),
    ],
)  # fmt: skip
def test_what_cannot_be_launched_is_refused(alone, words, said):
    with pytest.raises(InputError, match=said):
        launched(*words)


def test_options_of_train_are_read_before_anything_starts(program, tmp_path, capsys):
    with pytest.raises(SystemExit):
        launched("--workers", 2, *train(tmp_path, "--norm", "none-such"))
    assert "argument --norm" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("name", "workers"), [("small-1x2", 1), ("xeon-2x28", 2), ("paper-4x20", 4),
                                               ("amx-2x60-snc4", 2), ("container-7-of-64", 1)])  # fmt: skip
@pytest.mark.parametrize("columns", [80, 120])
def test_a_dry_run_plans_for_a_host_that_is_not_here(alone, monkeypatch, capsys, name, workers, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(launch, "read_topology", lambda: pytest.fail("this host was read"))
    assert launched("--dry-run", "--on-host", name, *train(ROOT / "none-such", "--batch", 4)) == 0
    told = capsys.readouterr().out
    assert f"{workers} worker" in told.splitlines()[0]
    topology = EXAMPLE_HOSTS[name]
    assert f"{topology.host.usable_cores // workers} " in told
    assert told.count("-m cpu3d train") == workers
    assert told.count("TF_CONFIG=") == (workers if workers > 1 else 0)
    for line in told.splitlines():
        assert len(line) <= columns or "cpu3d train" in line
    assert not (ROOT / "none-such").exists()


def test_a_dry_run_shows_where_each_worker_is(alone, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    launched("--dry-run", "--on-host", "paper-4x20", "--hosts", "a,b", *train(ROOT / "none-such", "--batch", 8))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("8 workers on 2 hosts (--hosts), 4 of them here")
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.count("│") == 6]
    assert rows[:8] == [
        [str(rank), f"{'ab'[rank // 4]}:{29500 + rank % 4}", str(rank % 4), str(rank % 4), "yes" if rank < 4 else "no"]
        for rank in range(8)
    ]
    assert "All hosts are taken to be like this one." in lines
    assert sum("cpu3d train" in line for line in lines) == 4, "those of this host"


def test_the_example_hosts_are_told(alone, capsys):
    assert launched("--dry-run", "--on-host", "list") == 0
    assert "paper-4x20" in capsys.readouterr().out


def test_horovod_is_started_by_its_own_launcher(alone, program, tmp_path, capsys, monkeypatch):
    words = ("--engine", "horovod", "--workers", 2, *train(tmp_path, "--batch", 2))
    launched("--dry-run", *words)
    told = capsys.readouterr().out
    assert "-m cpu3d.distributed.horovodrun --gloo -np 2 -H localhost:2 --output-filename" in told
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="horovod must be installed"):
        launched(*words)


MAIN = """
import sys
from cpu3d.__main__ import main
from cpu3d.distributed import earlier, launch, plan
from cpu3d.training.guard.heartbeat import Heartbeat, process_start, this_place, write_heartbeat
from cpu3d.host.topology import EXAMPLE_HOSTS
plan.PROGRAM, launch.read_topology = tuple(sys.argv[1:3]), lambda: EXAMPLE_HOSTS["xeon-2x28"]
sys.exit(main(sys.argv[3:]))
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_launch_that_is_told_to_end_waits_for_its_workers_and_ends_as_they_do(program, tmp_path, number, code):
    (tmp_path / "ends").write_text('{"waits": 1}')
    words = [str(word) for word in ("launch", "--workers", 2, *train(tmp_path, "--batch", 2))]
    command = [sys.executable, "-c", MAIN, *plan.PROGRAM, *words]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 120
    while not all((tmp_path / f"waits-{rank}").exists() for rank in (0, 1)):
        assert time.monotonic() < end
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(number)
    _, told = process.communicate(timeout=120)
    assert process.returncode == code
    assert "interrupted: all workers have ended; the same command continues" in told
