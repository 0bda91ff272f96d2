"""Several workers train as one: processes of their own, a thread each, on the store of phantoms."""

import itertools
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from cpu3d.run.checkpoint import newest
from cpu3d.run.log import read_events
from cpu3d.util.child import ROOT

OPTIONS = """--filters 2 --depth 2 --dtype float32 --policy speed --curriculum off --batch 2
    --learning-rate 0.002 --validations 1"""
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"), "1")


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores, a worker each")
def test_two_workers_at_half_a_batch_each_are_one_worker_at_the_whole_batch(
    phantom_store, tmp_path
):
    """To the bit, where the one has as many threads as each of the two: with others sums differ in
    their last bits."""
    folders = (tmp_path / "one", tmp_path / "two")
    for folder, begin in zip(folders, ("train", "launch --workers 2 train")):
        places = ("--store", str(phantom_store.folder), "--run", str(folder))
        words = [*begin.split(), *places, *OPTIONS.split(), "--steps", "3"]
        command = [sys.executable, "-m", "cpu3d", *words]
        subprocess.run(command, cwd=ROOT, env={**os.environ, **ONE_THREAD}, check=True)
    logs = sorted(folders[1].glob("logs/*"))
    decided = [path.read_text().count("post-processing, ") for path in logs]
    assert decided == [1, 0], "the chief alone decides"
    of_one, of_two = (newest(folder).arrays for folder in folders)
    np.testing.assert_equal(dict(of_two), dict(of_one))
    for a, b in itertools.zip_longest(*map(read_events, folders)):  # the chief alone writes
        for key in ("event", "step", "case_id"):
            assert a.get(key) == b.get(key)
        for key in ("loss", "dice"):
            assert b.get(key) == pytest.approx(a.get(key), rel=1e-6)


# Slurm itself would hold a job that queues again for two minutes.
JOBS = """
is_queued() { squeue --noheader --job="$job" --format=%T | grep "$1"; }
for run in whole stopped; do
  to="--output=$RUNS/$run.out"
  job=$(sbatch --parsable "$to" examples/slurm.sbatch "$STORE" "$RUNS/$run" $OPTIONS)
  if [ $run = stopped ]; then
    until grep "step 4:" "$RUNS/stopped.out"; do sleep 0.2; done
    scancel --signal=TERM "$job"
    until is_queued PENDING; do sleep 1; done
    scontrol update job="$job" StartTime=now
  fi
  until grep "launch: .* finished after" "$RUNS/$run.out"; do sleep 1; done
done
"""


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("slurmctld"), reason="Slurm, as root")
def test_a_job_of_slurm_that_is_stopped_continues_to_the_bit(phantom_store, tmp_path):
    places = {"STORE": str(phantom_store.folder), "RUNS": str(tmp_path)}
    environ = {**os.environ, **ONE_THREAD, **places, "OPTIONS": f"{OPTIONS} --steps 20"}
    environ.pop("SLURM_CONF", None)
    slurm = str(ROOT / "tests/cpu3d/distributed/slurm.sh")
    command = [slurm, str(tmp_path), "bash", "-c", JOBS]
    subprocess.run(command, cwd=ROOT, env=environ, check=True, timeout=900)
    whole, stopped = (newest(tmp_path / run).arrays for run in ("whole", "stopped"))
    np.testing.assert_equal(dict(stopped), dict(whole))
    assert (tmp_path / "stopped.out").read_text().count("run: continued after step") == 1
