"""The end of a run that a full disk, a signal, a bad number, too little memory or a damaged file stops.

Each ends with its own code, names the reason and what is left, and the same command continues to the same bits. The
last test cuts real trainings, of one worker and of two, at random moments.
"""

import contextlib
import resource
import signal
import time

import nibabel
import numpy as np
import psutil
import pytest

from cpu3d.__main__ import main
from cpu3d.data.records import array_path
from cpu3d.data.sampling import sample_at
from cpu3d.data.store import open_store
from cpu3d.data.stores.phantom import write_phantom
from cpu3d.data.stores.prepare import prepare
from cpu3d.run.checkpoint import checkpoints, load_checkpoint, newest
from cpu3d.run.log import read_events
from cpu3d.settings import RunConfig
from cpu3d.training.fit import Fit
from cpu3d.util.child import PROGRAM, ROOT, start
from tests.cpu3d.runs import NumpyLearner, assert_same_run

STEPS, KEEP = 8, 3

OPTIONS = [
    *("--filters", "4", "--depth", "2", "--dtype", "float32", "--policy", "speed", "--batch", "2", "--ema", "0.9"),
    *("--steps", str(STEPS), "--validations", "1", "--save-minutes", "0", "--keep", str(KEEP), "--warmup-steps", "2"),
]


class HeavyLearner(NumpyLearner):
    """With weights enough that a small disk has no room for them."""

    def __init__(self, config, exchange=None):
        super().__init__(config)
        self._arrays["model/001"] = np.random.default_rng(0).random(50_000)

    def weights(self):
        return {name: array for name, array in self.arrays().items() if name.startswith("model/")}


@pytest.fixture(scope="module", autouse=True)
def heavy_learner():
    """No network is compiled in this process: none of these faults is one of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cpu3d.training.fit.Learner", HeavyLearner)
        yield


def command(store, run):
    return ["train", "--store", str(store.folder), "--run", str(run), *OPTIONS]


@pytest.fixture(scope="module")
def whole(phantom_store, tmp_path_factory):
    """The run that nothing happens to."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert main(command(phantom_store, folder)) == 0
    return folder


def before_step(monkeypatch, number, do):
    """Have `do(fit)` called before that step, counted from 1, the first time it comes."""
    step, done = Fit._train_step, []

    def wrapped(self, *arguments):
        if self.step == number - 1 and not done:
            done.append(1)
            do(self)
        return step(self, *arguments)

    monkeypatch.setattr(Fit, "_train_step", wrapped)


def assert_continues_to_the_bit(store, run, whole):
    assert main(command(store, run)) == 0
    assert_same_run(run, whole, KEEP)


# --- Disk ---


def test_a_write_that_fails_leaves_the_checkpoints_and_says_so(phantom_store, whole, tmp_path, monkeypatch, capsys):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = checkpoints(whole)[0].stat().st_size

    before_step(monkeypatch, 5, lambda fit: resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, before[1])))
    try:
        assert main(command(phantom_store, tmp_path)) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    errors = capsys.readouterr().err
    assert "step-00000005.npz" in errors, "which file"
    assert "step-00000004.npz is whole" in errors, "what stays"
    assert newest(tmp_path).state["step"] == 4
    assert [path for path in (tmp_path / "checkpoints").iterdir() if path.suffix == ".partial"] == []
    assert_continues_to_the_bit(phantom_store, tmp_path, whole)


# --- Signals and memory ---


def run_low(fit):
    """The act of its guard; test_watchdog has when that is."""
    fit._guard.now.stop = "memory must keep 64 MiB free"


@pytest.mark.parametrize(
    ("do", "code", "words", "reason"),
    [
        (lambda fit: signal.raise_signal(signal.SIGTERM), 143, "saved after step 3; the same command", "interrupted"),
        (run_low, 5, "memory must keep 64 MiB free", "memory"),
    ],
)
def test_a_signal_and_memory_that_runs_out_save_and_end_with_their_codes(
    phantom_store, whole, tmp_path, monkeypatch, capsys, do, code, words, reason
):
    before_step(monkeypatch, 3, do)
    assert main([*command(phantom_store, tmp_path), "--save-minutes", "60"]) == code
    errors = capsys.readouterr().err
    assert words in errors
    assert "saved after step 3" in errors
    assert newest(tmp_path).state["step"] == 3
    assert read_events(tmp_path)[-1]["reason"] == reason
    assert_continues_to_the_bit(phantom_store, tmp_path, whole)


# --- Numbers ---


def test_a_case_that_gives_nan_is_named_and_the_last_good_weights_stay(tmp_path, capsys):
    write_phantom(tmp_path / "raw", cases=4, shape=(24, 24, 24), seed=5, workers=1)
    for path in (tmp_path / "raw" / "imagesTr").iterdir():  # of halves, so that the store has float16, which holds NaN
        image = nibabel.load(path)
        nibabel.save(nibabel.Nifti1Image(np.asarray(image.dataobj) * np.float32(0.5), image.affine), path)
    prepare(tmp_path / "raw", tmp_path / "store", fractions=(1, 0, 0), workers=1)
    store, run = open_store(tmp_path / "store"), tmp_path / "run"
    cases = store.cases("train")
    in_second_step = cases[sample_at(3, cases=len(cases), seed=RunConfig.seed).index]
    path = array_path(store.folder, in_second_step, "x")
    voxels = np.load(path, mmap_mode="r+", allow_pickle=False)
    voxels[tuple(n // 2 for n in voxels.shape)] = np.nan
    voxels.flush()
    assert main(command(store, run)) == 4
    errors = capsys.readouterr().err
    assert f"got nan at step 2 on {in_second_step.case_id}; " in errors, "the case alone, not all of its batch"
    assert "step-00000001.npz" in errors
    assert newest(run).state["step"] == 1
    assert all(np.isfinite(array).all() for array in newest(run).arrays.values())


# --- Random moments ---

CUTS = 2 * (signal.SIGKILL, signal.SIGTERM, "disk", signal.SIGKILL, "disk", signal.SIGTERM)

CUT_OPTIONS = (
    f"--steps 160 --validations 16 --batch 2 --save-minutes 0.001 --keep {KEEP} --ema 0.9 "
    "--filters 4 --depth 3 --norm batch --dtype float32 --policy speed --curriculum half"
).split()
"""Steps of milliseconds, the first 140 of them coarse, and validations and saves often enough that a random moment is
as likely one as the other."""


def cut(process, how, rng):
    """Cut a command: one of its workers at random, or its process where it has none; the disk for all of them."""
    processes = [process, *process.children(recursive=True)]
    workers = [each for each in processes if "TF_CONFIG" in each.environ()] or [process]
    if how == "disk":
        for worker in workers:
            worker.rlimit(psutil.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    else:
        (workers[rng.integers(len(workers))] if how == signal.SIGKILL else process).send_signal(how)


def train(words, run, how=None, rng=None, delay_s=0.0):
    """Run a command, cut `delay_s` after its training has begun. (exit code, seconds of training)."""
    earlier, begin = read_events(run), None
    with (run.parent / "output.txt").open("a") as output:
        child = start([*PROGRAM, *words], output, cwd=ROOT)
    while child.poll() is None:
        if not begin and any(event["event"] == "start" and event not in earlier for event in read_events(run)):
            begin = time.monotonic()
        if how and begin and time.monotonic() - begin >= delay_s:
            with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                cut(psutil.Process(child.pid), how, rng)
            how = None
        time.sleep(0.001)
    return child.returncode, time.monotonic() - (begin or time.monotonic())


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_that_is_cut_at_random_moments_ends_with_the_same_bits(phantom_store, tmp_path, workers):
    launch = ["launch", "--workers", str(workers)] if workers > 1 else []
    whole, run = tmp_path / "whole", tmp_path / "run"

    def command_of(folder):
        return [*launch, "train", "--store", str(phantom_store.folder), "--run", str(folder), *CUT_OPTIONS]

    code, seconds = train(command_of(whole), whole)
    assert code == 0
    rng, codes = np.random.default_rng(workers), []
    for how in CUTS:
        codes.append(train(command_of(run), run, how, rng, rng.random() * seconds / len(CUTS))[0])
        for path in (run / "checkpoints").glob("*.npz"):  # what is being written has another name
            load_checkpoint(path)
        events, checkpoint = read_events(run), newest(run)
        steps, saves = ([each["step"] for each in events if each["event"] == kind] for kind in ("step", "checkpoint"))
        assert (checkpoint.state["step"] if checkpoint else 0) >= max(saves, default=0)
        assert steps == list(range(1, len(steps) + 1))
    assert 0 not in codes, "each was cut"
    assert train(command_of(run), run)[0] == 0
    assert_same_run(run, whole, KEEP)
