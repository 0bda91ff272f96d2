"""Several workers train as one: processes of their own, a thread each, on the store of phantoms."""

import os
import re
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
    options = (
        "--filters 2 --depth 2 --dtype float32 --policy speed --curriculum off --steps 3 --batch 2"
    )
    options += " --learning-rate 0.002 --validations 1"
    environ = {**os.environ, **dict.fromkeys(("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"), "1")}
    for run, begin in (("two", ("launch", "--workers", "2")), ("one", ())):
        words = [
            "train",
            "--store",
            str(phantom_store.folder),
            "--run",
            str(tmp_path / run),
            *options.split(),
        ]
        command = [sys.executable, "-m", "cpu3d", *begin, *words]
        done = subprocess.run(
            command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
        printed = done.stderr + "".join(
            path.read_text() for path in (tmp_path / run).glob("**/*.log")
        )
        assert not re.search(
            r"^(20\d\d-|[IWEF]\d{4} |INFO|WARNING)|XLA|ITEX_|oneDNN custom", printed, re.MULTILINE
        )
    for rank, lines in ((0, 1), (1, 0)):
        log = tmp_path / "two" / "logs" / f"worker-{rank}.log"
        assert log.read_text().count("post-processing, ") == lines, "the chief alone decides"
    two, alone = (newest(tmp_path / run).arrays for run in ("two", "one"))
    for name, array in two.items():
        np.testing.assert_array_equal(array, alone[name], err_msg=name)
    of_two, of_one = (read_events(tmp_path / run) for run in ("two", "one"))
    assert [event["event"] for event in of_two] == [event["event"] for event in of_one], (
        "the chief alone writes"
    )
    for a, b in zip(of_one, of_two):
        assert (a["step"], a.get("case_id")) == (b["step"], b.get("case_id"))
        if "dice" in a:
            assert (b["loss"], b["dice"]) == (
                pytest.approx(a["loss"], rel=1e-6),
                pytest.approx(a["dice"], rel=1e-6),
            )
