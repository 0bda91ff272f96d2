"""Several workers train as one: processes of their own, a thread each, on the store of phantoms."""

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest

from cpu3d.run.checkpoint import newest
from cpu3d.run.log import read_events
from cpu3d.util.child import ROOT


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores, a worker each")
def test_two_workers_at_half_a_batch_each_are_one_worker_at_the_whole_batch(
    phantom_store, tmp_path
):
    """To the bit, where the one has as many threads as each of the two: with others sums differ in
    their last bits."""
    options = "--filters 2 --depth 2 --dtype float32 --policy speed --curriculum off --steps 3"
    options += " --batch 2 --learning-rate 0.002 --validations 1"
    environ = {**os.environ, **dict.fromkeys(("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"), "1")}
    folders = (tmp_path / "one", tmp_path / "two")
    for folder, begin in zip(folders, ("train", "launch --workers 2 train")):
        places = ("--store", str(phantom_store.folder), "--run", str(folder))
        command = [sys.executable, "-m", "cpu3d", *begin.split(), *places, *options.split()]
        subprocess.run(command, cwd=ROOT, env=environ, check=True)
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
