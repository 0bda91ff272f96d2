"""Faults that stop a run: a full disk, a signal, too little memory, a bad number. Each ends with
its code, names the reason and what is kept, and the same command continues to the same bits. The
last test cuts trainings at random."""

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
from cpu3d.training.watchdog import Watchdog
from cpu3d.util.child import PROGRAM, ROOT, start
from tests.cpu3d.runs import NumpyLearner, assert_same_run

NO_LIMIT = resource.RLIM_INFINITY
KEEP = 3
OPTIONS = "--steps 8 --validations 1 --save-minutes 0"
OPTIONS = f"{OPTIONS} --batch 2 --filters 4 --depth 2 --dtype float32 --policy speed".split()


class HeavyLearner(NumpyLearner):
    """A learner with so many weights that a small disk has no room for them."""

    def __init__(self, config, exchange=None):
        super().__init__(config)
        self._arrays["model/001"] = np.random.default_rng(0).random(50_000)


def command(store, run, *more):
    return ["train", "--store", str(store.folder), "--run", str(run), *OPTIONS, *more]


@pytest.fixture(scope="module")
def whole(phantom_store, tmp_path_factory):
    """A run without a fault; this run and those of the test compile no network."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cpu3d.training.fit.Learner", HeavyLearner)
        folder = tmp_path_factory.mktemp("whole") / "run"
        assert main(command(phantom_store, folder)) == 0
        yield folder


def limit_files(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, NO_LIMIT))


LOW = "memory must keep 64 MiB free"  # the watchdog's; test_watchdog tests when
# exit code -> fault, before which step, --save-minutes, message, last step kept
FAULTS = {
    1: (lambda patch: limit_files(100_000), 5, "0", "whole checkpoint, that of step 4", 4),
    5: (lambda patch: patch.setattr(Watchdog, "why", LOW), 3, "60", f"{LOW}; stopped and saved", 3),
    143: (lambda patch: signal.raise_signal(signal.SIGTERM), 3, "60", "saved after step 3", 3),
}


@pytest.mark.parametrize("code", FAULTS)
def test_a_fault_ends_with_its_code_and_the_run_continues(
    phantom_store, whole, tmp_path, monkeypatch, capsys, code
):
    fault, before, save_minutes, message, kept = FAULTS[code]
    step = HeavyLearner.step

    def faulty_step(self, micro_batches, *rest):
        if self.arrays()["updates"] == before - 1:
            fault(patch)
        return step(self, micro_batches, *rest)

    try:
        with monkeypatch.context() as patch:
            patch.setattr(HeavyLearner, "step", faulty_step)
            assert main(command(phantom_store, tmp_path, "--save-minutes", save_minutes)) == code
    finally:
        limit_files(NO_LIMIT)
    assert message in capsys.readouterr().err
    assert newest(tmp_path).state["step"] == kept
    assert not list((tmp_path / "checkpoints").glob("*.partial"))
    assert main(command(phantom_store, tmp_path)) == 0
    assert_same_run(tmp_path, whole, KEEP)


# --- Random moments ---

CUTS = 2 * (signal.SIGKILL, signal.SIGTERM, "disk", signal.SIGKILL, "disk", signal.SIGTERM)
CUT_OPTIONS = "--steps 160 --validations 16 --save-minutes 0.001 --depth 3 --norm batch"
CUT_OPTIONS = f"{CUT_OPTIONS} --curriculum half".split()
"""Steps of milliseconds, the first 140 coarse, and so many validations and saves that a random
moment may be in one."""


def cut(process, how, rng):
    """Cut a command: one of its workers at random, or its process if it has none; the disk for all
    of them."""
    workers = [
        child for child in process.children(recursive=True) if "TF_CONFIG" in child.environ()
    ] or [process]
    if how == "disk":
        for worker in workers:
            worker.rlimit(psutil.RLIMIT_FSIZE, (1000, NO_LIMIT))
    elif how == signal.SIGKILL:
        workers[rng.integers(len(workers))].send_signal(how)
    else:
        process.send_signal(how)


def train(words, run, how=None, rng=None, delay_s=0.0):
    """Run a command, cut `delay_s` after its training has begun. (exit code, seconds of
    training)."""
    earlier = read_events(run)
    begin = None
    with (run.parent / "output.txt").open("a") as output:
        child = start([*PROGRAM, *words], output, cwd=ROOT)
    while child.poll() is None:
        if not begin and any(
            event["event"] == "start" and event not in earlier for event in read_events(run)
        ):
            begin = time.monotonic()
        if how and begin and time.monotonic() - begin >= delay_s:
            with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                cut(psutil.Process(child.pid), how, rng)
            how = None
        time.sleep(0.001)
    return child.returncode, time.monotonic() - (begin or time.monotonic())


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_that_is_cut_at_random_moments_ends_with_the_same_bits(
    phantom_store, tmp_path, workers
):
    launch = ["launch", "--workers", str(workers)] * (workers > 1)
    uncut = tmp_path / "uncut"
    run = tmp_path / "run"
    code, seconds = train([*launch, *command(phantom_store, uncut, *CUT_OPTIONS)], uncut)
    assert code == 0
    words = [*launch, *command(phantom_store, run, *CUT_OPTIONS)]
    rng = np.random.default_rng(workers)
    for how in CUTS:
        assert train(words, run, how, rng, rng.random() * seconds / len(CUTS))[0] != 0, "it was cut"
        for path in (run / "checkpoints").glob(
            "*.npz"
        ):  # a file that is being written has another name
            load_checkpoint(path)
        events = read_events(run)
        checkpoint = newest(run)
        steps, saves = (
            [event["step"] for event in events if event["event"] == kind]
            for kind in ("step", "checkpoint")
        )
        assert (checkpoint.state["step"] if checkpoint else 0) >= max(saves, default=0)
        assert steps == list(range(1, len(steps) + 1))
    assert train(words, run)[0] == 0
    assert_same_run(run, uncut, KEEP)
