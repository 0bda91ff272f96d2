"""Several workers train as one: processes of their own, a core each, on the store of phantoms."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from cpu3d.training.checkpoint import newest
from cpu3d.training.run_log import read_events
from cpu3d.util.child import family

ROOT = Path(__file__).resolve().parents[3]

OPTIONS = ("--filters", 4, "--depth", 2, "--dtype", "float32", "--policy", "speed", "--learning-rate", 0.002)

ONE_CORE = (
    "import os, sys; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); sys.path.insert(0, sys.argv.pop(1)); "
)
MAIN = "from cpu3d.__main__ import main; sys.exit(main(sys.argv[1:]))"


def alone_on_one_core(*words):
    """`cpu3d words`, with as many threads as each of two workers has: with others sums differ in their last bits."""
    command = [sys.executable, "-c", ONE_CORE + MAIN, str(ROOT), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def launched(*words):
    command = [sys.executable, "-m", "cpu3d", "launch", *map(str, words)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def train(store, run, *more):
    return ("train", "--store", store.folder, "--run", run, *OPTIONS, *more)


def listening_while(launch, run):
    """Addresses at which a launch and its workers listen once they train."""
    while not any(event["event"] == "step" for event in read_events(run)) and launch.poll() is None:
        time.sleep(0.02)
    ours = family(launch.pid)
    assert len(ours) >= 3
    return [one.laddr for one in psutil.net_connections("inet") if one.status == "LISTEN" and one.pid in ours]


def weights(run):
    return newest(run).arrays


needs_two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores, a worker each")


@needs_two_cores
def test_two_workers_at_half_a_batch_each_are_one_worker_at_the_whole_batch(phantom_store, tmp_path):
    words = ("--steps", 4, "--batch", 2)
    two = launched("--workers", 2, *train(phantom_store, tmp_path / "two", *words))
    listening = listening_while(two, tmp_path / "two")
    said, _ = two.communicate(timeout=300)
    assert two.returncode == 0, said
    assert listening == [], "nobody else is to reach the workers of one host"
    one = alone_on_one_core(*train(phantom_store, tmp_path / "one", *words))
    assert one.returncode == 0, one.stderr
    expected = weights(tmp_path / "one")
    for name, array in weights(tmp_path / "two").items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)
    of_one, of_two = (
        [event for event in read_events(tmp_path / run) if event["event"] in ("step", "validation")]
        for run in ("one", "two")
    )
    for a, b in zip(of_one, of_two):
        assert (a["event"], a["step"], a.get("case_id")) == (b["event"], b["step"], b.get("case_id"))
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-6)
        assert b["dice"] == pytest.approx(a["dice"], rel=1e-6)
    assert len(of_two) == len(of_one) == 6
    assert len(read_events(tmp_path / "two")) == len(read_events(tmp_path / "one")), "the chief alone writes"
    assert json.loads((tmp_path / "two" / "config.json").read_text())["batch"] == 2
