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
from cpu3d.run.log import last_event
from cpu3d.training.watchdog import Watchdog
from cpu3d.util.child import PROGRAM, ROOT, start
from tests.cpu3d.runs import NumpyLearner, assert_same_run, save_after_each_step, steps_of

NO_LIMIT = resource.RLIM_INFINITY
OPTIONS = "--steps 8 --validations 1 --batch 2 --filters 4 --depth 2 --dtype float32 --policy speed"


class HeavyLearner(NumpyLearner):
    """A learner with so many weights that a small disk has no room for them."""

    def __init__(self, config, exchange=None):
        super().__init__(config)
        self._arrays["model/001"] = np.random.default_rng(0).random(50_000)


def command(store, run, *more):
    return ["train", "--store", str(store.folder), "--run", str(run), *OPTIONS.split(), *more]


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
# exit code -> fault before the third step, message, last step kept, reason in the log
FAULTS = {
    1: (lambda patch: limit_files(100_000), "last checkpoint is step-00000002.npz", 2, None),
    5: (lambda patch: patch.setattr(Watchdog, "why", LOW), f"{LOW}; stopped", 3, "memory"),
    143: (
        lambda patch: signal.raise_signal(signal.SIGTERM),
        "saved after step 3",
        3,
        "interrupted",
    ),
}


@pytest.mark.parametrize("code", FAULTS)
def test_a_fault_ends_with_its_code_and_the_run_continues(
    phantom_store, whole, tmp_path, monkeypatch, capsys, code
):
    fault, message, kept, reason = FAULTS[code]
    step = HeavyLearner.step

    def faulty_step(self, micro_batches, *rest):
        if self.arrays()["updates"] == 2:
            fault(patch)
        return step(self, micro_batches, *rest)

    try:
        with monkeypatch.context() as patch:
            patch.setattr(HeavyLearner, "step", faulty_step)
            if code == 1:
                save_after_each_step(patch)
            assert main(command(phantom_store, tmp_path)) == code
    finally:
        limit_files(NO_LIMIT)
    assert message in capsys.readouterr().err
    assert newest(tmp_path).state["step"] == kept
    assert last_event(tmp_path).get("reason") == reason
    assert not list((tmp_path / "checkpoints").glob("*.partial"))
    assert main(command(phantom_store, tmp_path)) == 0
    assert_same_run(tmp_path, whole)


# --- Random moments ---

CUTS = 2 * (signal.SIGKILL, signal.SIGTERM, "disk", signal.SIGKILL, "disk", signal.SIGTERM)
CUT_OPTIONS = "--steps 160 --validations 80 --depth 3 --norm batch --curriculum half"
"""Steps of milliseconds, the first 133 coarse, and so many validations and saves that a random
moment may be in one."""


def cut(process, how, rng):
    """Cut a command: one of its workers at random, or its process if it has none; the disk for all
    of them."""
    workers = [each for each in process.children(recursive=True) if "TF_CONFIG" in each.environ()]
    workers = workers or [process]
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
    earlier = last_event(run, "start")
    begin = None
    with (run.parent / "output.txt").open("a") as output:
        child = start([*PROGRAM, *words], output, cwd=ROOT)
    while child.poll() is None:
        if not begin and last_event(run, "start") != earlier:
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
    code, seconds = train([*launch, *command(phantom_store, uncut, *CUT_OPTIONS.split())], uncut)
    assert code == 0
    words = [*launch, *command(phantom_store, run, *CUT_OPTIONS.split())]
    rng = np.random.default_rng(workers)
    for how in CUTS:
        assert train(words, run, how, rng, rng.random() * seconds / len(CUTS))[0] != 0, "it was cut"
        for path in (run / "checkpoints").glob("*.npz"):  # whole ones alone are named so
            load_checkpoint(path)
        saved = last_event(run, "checkpoint")
        assert not saved or newest(run).state["step"] >= saved["step"]
        steps = [event["step"] for event in steps_of(run)]
        assert steps == list(range(1, len(steps) + 1))
    assert train(words, run)[0] == 0
    assert_same_run(run, uncut)
