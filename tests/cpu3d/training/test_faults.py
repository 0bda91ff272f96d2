"""What happens to a run that a full disk, a signal, a bad number, too little memory or a damaged file stops.

Each ends with its own code, says why and what is left, and the same command goes on to the same bits. Kills are the
matter of `bench faults`.
"""

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cpu3d.__main__ import main
from cpu3d.bench.faults import run_differences
from cpu3d.data.records import array_path
from cpu3d.data.sampling import sample_at
from cpu3d.data.store import open_store
from cpu3d.data.stores.conversion import Settings
from cpu3d.data.stores.phantom import write_phantom
from cpu3d.data.stores.prepare import prepare
from cpu3d.inference.predictor import load_predictor
from cpu3d.settings import RunConfig
from cpu3d.training.checkpoint import checkpoints, newest
from cpu3d.training.fit import Fit
from cpu3d.training.run_log import read_events

ROOT = Path(__file__).resolve().parents[3]

STEPS, KEEP = 8, 3

OPTIONS = [
    *("--filters", "8", "--depth", "2", "--dtype", "float32", "--policy", "speed", "--batch", "2", "--ema", "0.9"),
    *("--steps", str(STEPS), "--validations", "2", "--save-minutes", "0", "--keep", str(KEEP), "--warmup-steps", "2"),
]


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
    assert run_differences(whole, run, KEEP) == []


# --- Disk ---


def test_a_write_that_fails_leaves_the_checkpoints_and_says_so(phantom_store, whole, tmp_path, monkeypatch, capsys):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = checkpoints(whole)[0].stat().st_size

    def no_file_may_be_large(fit):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, before[1]))

    before_step(monkeypatch, 5, no_file_may_be_large)
    try:
        code = main(command(phantom_store, tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert_failed_while_saving(code, capsys.readouterr().err, tmp_path, 5)
    assert_continues_to_the_bit(phantom_store, tmp_path, whole)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small disk")
def test_a_full_disk_leaves_the_checkpoints_and_says_so(phantom_store, whole, tmp_path, capsys):
    size = checkpoints(whole)[0].stat().st_size
    with small_disk(tmp_path / "disk", 3 * size) as (disk, enlarge):
        code = main(command(phantom_store, disk / "run"))
        # Best weights and two checkpoints are there; what is left is less than a third.
        assert_failed_while_saving(code, capsys.readouterr().err, disk / "run", 3)
        enlarge(20 * size)
        assert_continues_to_the_bit(phantom_store, disk / "run", whole)


def assert_failed_while_saving(code, errors, run, step):
    assert code == 1
    assert f"step-{step:08d}.npz" in errors, "which file"
    assert f"step-{step - 1:08d}.npz" in errors, "what stays"
    assert "whole" in errors
    assert newest(run).state["step"] == step - 1
    assert [path for path in (run / "checkpoints").iterdir() if path.suffix == ".partial"] == []


@contextlib.contextmanager
def small_disk(folder, size):
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("may not mount a small disk here")
    try:
        enlarge = lambda size: subprocess.run(
            ["mount", "-o", f"remount,size={size}", str(folder)], capture_output=True, check=True
        )
        yield folder, enlarge
    finally:
        subprocess.run(["umount", "-l", str(folder)], capture_output=True, check=True)


# --- Signals ---


@pytest.mark.parametrize("step", [STEPS // 2, STEPS], ids=["before a validation", "the last step"])
def test_sigterm_saves_and_ends_with_code_143(phantom_store, whole, tmp_path, monkeypatch, capsys, step):
    before_step(monkeypatch, step, lambda fit: signal.raise_signal(signal.SIGTERM))
    assert main([*command(phantom_store, tmp_path), "--save-minutes", "60"]) == 143
    assert f"saved after step {step}; the same command continues" in capsys.readouterr().err
    assert newest(tmp_path).state["step"] == step
    assert read_events(tmp_path)[-1]["reason"] == "interrupted"
    assert_continues_to_the_bit(phantom_store, tmp_path, whole)


# --- Numbers ---


def test_a_case_that_gives_nan_is_named_and_the_last_good_weights_load(tmp_path, capsys):
    write_phantom(tmp_path / "raw", cases=4, shape=(24, 24, 24), seed=5, workers=1)
    prepare(tmp_path / "raw", tmp_path / "store", fractions=(1, 0, 0), workers=1, settings=Settings(scores=True))
    store, run = open_store(tmp_path / "store"), tmp_path / "run"
    cases = store.cases("train")
    in_second_step = cases[sample_at(3, cases=len(cases), seed=RunConfig.seed).index]
    path = array_path(store.folder, in_second_step, "x")
    voxels = np.load(path, mmap_mode="r+", allow_pickle=False)
    voxels[tuple(n // 2 for n in voxels.shape)] = np.nan
    voxels.flush()
    capsys.readouterr()

    assert main(command(store, run)) == 4
    errors = capsys.readouterr().err
    assert f"got nan at step 2 on {in_second_step.case_id}; " in errors, "the case alone, not all of its batch"
    assert "step-00000001.npz" in errors
    assert newest(run).state["step"] == 1
    for weights in ("last", "best"):
        model = load_predictor(run, weights)
        record = store.cases("train")[sample_at(0, cases=len(cases), seed=RunConfig.seed).index]
        assert np.isfinite(model.probabilities(np.asarray(store.image(record.case_id)), record)).all()


# --- Memory ---

LITTLE_ADDRESS_SPACE = """
import resource, sys, time
from cpu3d.training import fit
from cpu3d.__main__ import main
from cpu3d.host.memory import resident
step = fit.Fit._train_step
def wrapped(self, *arguments):
    if self.step == 2:
        size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + 48 * 2**20, resource.RLIM_INFINITY))
        for _ in range(200):
            if self._guard.stop:
                break
            time.sleep(0.05)
    return step(self, *arguments)
fit.Fit._train_step = wrapped
sys.exit(main(sys.argv[1:]))
"""

LEAK = """
import os, sys, time
folder = sys.argv.pop(1)
with open(os.path.join(folder, "cgroup.procs"), "w") as file:
    file.write(str(os.getpid()))
from cpu3d.training import fit
from cpu3d.__main__ import main
step, leaked = fit.Fit._train_step, []
def wrapped(self, *arguments):
    while self.step == 2 and not self._guard.stop:
        leaked.append(bytearray(os.urandom(2**20) * 8))
        time.sleep(0.02)
    return step(self, *arguments)
fit.Fit._train_step = wrapped
sys.exit(main(sys.argv[1:]))
"""


def test_a_process_without_address_space_saves_and_ends_with_code_5(phantom_store, whole, tmp_path):
    words = [sys.executable, "-c", LITTLE_ADDRESS_SPACE, *command(phantom_store, tmp_path)]
    assert_ran_out_of_memory(words, tmp_path)
    assert_continues_to_the_bit(phantom_store, tmp_path, whole)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to limit a control group")
def test_a_leak_in_a_container_saves_and_ends_with_code_5_before_the_kernel_kills(phantom_store, whole, tmp_path):
    with control_group(f"cpu3d-test-{os.getpid()}", 2 * 2**30) as folder:
        words = [sys.executable, "-c", LEAK, str(folder), *command(phantom_store, tmp_path)]
        assert_ran_out_of_memory(words, tmp_path)
    assert_continues_to_the_bit(phantom_store, tmp_path, whole)


def assert_ran_out_of_memory(words, run):
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 5, done.stderr
    assert "stopped and saved after step 3" in done.stderr
    assert "memory" in done.stderr
    assert newest(run).state["step"] == 3
    assert read_events(run)[-1]["reason"] == "memory"


@contextlib.contextmanager
def control_group(name, limit):
    """A memory group of either version."""
    old, new = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    folder = (old if old.is_dir() else new) / name
    try:
        folder.mkdir()
        (folder / ("memory.limit_in_bytes" if old.is_dir() else "memory.max")).write_text(str(limit))
    except OSError as error:
        pytest.skip(f"may not make a control group here: {error}")
    try:
        yield folder
    finally:
        folder.rmdir()


# --- Damaged files ---


@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_a_damaged_newest_checkpoint_is_passed_over_with_a_warning(phantom_store, whole, tmp_path, capsys, damage):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    path = checkpoints(run)[0]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content[: len(content) // 3] if damage == "cut" else content)
    capsys.readouterr()
    assert_continues_to_the_bit(phantom_store, run, whole)
    errors = capsys.readouterr().err
    assert f"warning: checkpoint {path} must be whole" in errors
    assert f"going on from step-{STEPS - 1:08d}.npz" in errors
