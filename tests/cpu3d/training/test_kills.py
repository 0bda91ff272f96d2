"""A training that is cut at random moments, again and again, ends with the bits of one that is not.

It is cut by SIGKILL, by SIGTERM, and by a disk that lets nobody write any more. In all it is the same command that
continues, and after each cut every checkpoint is whole and none that was logged is missing.
"""

import contextlib
import resource
import signal
import time

import numpy as np
import psutil
import pytest

from cpu3d.__main__ import main
from cpu3d.run.checkpoint import load_checkpoint, newest
from cpu3d.run.log import read_events
from cpu3d.util.child import PROGRAM, ROOT, start
from tests.cpu3d.runs import assert_same_run

KEEP, CUTS = 3, 2 * (signal.SIGKILL, signal.SIGTERM, "disk", signal.SIGKILL, "disk", signal.SIGTERM)

OPTIONS = (
    f"--steps 160 --validations 16 --batch 2 --save-minutes 0.001 --keep {KEEP} --ema 0.9 "
    "--filters 4 --depth 3 --norm batch --dtype float32 --policy speed --curriculum half"
).split()
"""Steps of milliseconds, the first 140 of them coarse, and validations and saves often enough that a random moment is
as likely one as the other."""


def cut(process, how, rng):
    """Cut a command: one of its workers at random, or its process where it has none; the disk for all of them."""
    them = [process, *process.children(recursive=True)]
    workers = [one for one in them if "TF_CONFIG" in one.environ()] or them[:1]
    for one in (
        workers if how == "disk" else [workers[rng.integers(len(workers))] if how == signal.SIGKILL else process]
    ):
        if how == "disk":
            one.rlimit(psutil.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        else:
            one.send_signal(how)


def train(command, run, how=None, rng=None, delay_s=0.0):
    """Do the command, cut `delay_s` after its training has begun. (exit code, seconds of training)."""
    earlier, begin = read_events(run), None
    with (run.parent / "output.txt").open("a") as output:
        child = start([*PROGRAM, *command], output, cwd=ROOT)
    while child.poll() is None:
        if not begin and any(one["event"] == "start" and one not in earlier for one in read_events(run)):
            begin = time.monotonic()
        if how and begin and time.monotonic() - begin >= delay_s:
            with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                cut(psutil.Process(child.pid), how, rng)
            how = None
        time.sleep(0.001)
    return child.returncode, time.monotonic() - (begin or time.monotonic())


def assert_nothing_is_lost(run):
    for path in (run / "checkpoints").glob("*.npz"):  # what is being written has another name
        load_checkpoint(path)
    events, found = read_events(run), newest(run)
    steps, saves = ([one["step"] for one in events if one["event"] == kind] for kind in ("step", "checkpoint"))
    assert (found.state["step"] if found else 0) >= max(saves, default=0)
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_that_is_cut_at_random_moments_ends_with_the_same_bits(tmp_path, workers):
    main(["phantom", "--out", str(tmp_path / "raw"), "--cases", "8", "--shape", "32", "40", "32"])
    main(["prepare", "--dataset", str(tmp_path / "raw"), "--store", str(tmp_path / "store")])
    launch = ["launch", "--workers", str(workers)] if workers > 1 else []
    whole, run = tmp_path / "whole", tmp_path / "run"

    def command(folder):
        return [*launch, "train", "--store", str(tmp_path / "store"), "--run", str(folder), *OPTIONS]

    code, seconds = train(command(whole), whole)
    assert code == 0
    rng, codes = np.random.default_rng(workers), []
    for how in CUTS:
        codes.append(train(command(run), run, how, rng, rng.random() * seconds / len(CUTS))[0])
        assert_nothing_is_lost(run)
    assert 0 not in codes, "each was cut"
    assert train(command(run), run)[0] == 0
    assert_same_run(run, whole, KEEP)
