"""A run as a whole: it learns, it is cut and goes on, it refuses to become another."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from cpu3d import fit as fit_module
from cpu3d.checkpoint import load_checkpoint
from cpu3d.config import RunConfig, load_config, save_config
from cpu3d.errors import InputError
from cpu3d.fit import Fit
from cpu3d.host.topology import read_host
from cpu3d.run_log import read_events
from cpu3d.train import resolve

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"filters": 4, "depth": 3, "dtype": "float32", "epochs": 3, "warmup_steps": 2, "learning_rate": 0.01}


def start(store, folder, **settings):
    config = resolve(store, folder, read_host(), {**SMALL, **settings}, None)
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    save_config(config, folder)
    return Fit(store, folder, config)


def weights(folder, name="last"):
    return load_checkpoint(folder / "checkpoints" / f"{name}.npz")[0]


def test_a_run_learns_and_leaves_what_the_readme_says(phantom_store, tmp_path):
    fit = start(phantom_store, tmp_path, epochs=6, ema=0.9)
    fit.run()
    events = read_events(tmp_path)
    losses = [event["loss"] for event in events if event["event"] == "step"]
    assert len(losses) == 24
    assert np.mean(losses[-4:]) < 0.92 * np.mean(losses[:4])
    validations = [event for event in events if event["event"] == "validation"]
    assert len(validations) == 6
    assert events[-1]["event"] == "end"
    assert events[-1]["reason"] == "finished"
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["best.npz", "last.npz"]
    assert any((tmp_path / "tensorboard").iterdir())


def test_a_run_cut_after_any_step_ends_with_the_uninterrupted_one_s_weights(phantom_store, tmp_path, monkeypatch):
    options = {"ema": 0.9, "save_minutes": 0.0}
    start(phantom_store, tmp_path / "whole", **options).run()
    expected = weights(tmp_path / "whole")

    cut = start(phantom_store, tmp_path / "cut", **options)
    step, taken = Fit._train_step, []

    def die_in_the_sixth(self, batches):
        if len(taken) == 5:
            raise MemoryError
        taken.append(1)
        return step(self, batches)

    monkeypatch.setattr(Fit, "_train_step", die_in_the_sixth)
    with pytest.raises(MemoryError):
        cut.run()
    monkeypatch.undo()
    again = start(phantom_store, tmp_path / "cut", **options)
    assert again.step == 5
    again.run()
    for name, array in weights(tmp_path / "cut").items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)
    steps = [event["step"] for event in read_events(tmp_path / "cut") if event["event"] == "step"]
    assert steps == list(range(1, 13))


def test_an_incompatible_setting_is_refused_with_both_values(phantom_store, tmp_path):
    save_config(resolve(phantom_store, tmp_path, read_host(), SMALL, None), tmp_path)
    with pytest.raises(InputError, match=r"unet\.filters must stay as the run was started, got 8 for 4"):
        resolve(phantom_store, tmp_path, read_host(), {"filters": 8}, None)
    assert resolve(phantom_store, tmp_path, read_host(), {"epochs": 9}, None).epochs == 9


def test_a_run_continues_without_its_options_repeated(phantom_store, tmp_path):
    config = resolve(phantom_store, tmp_path, read_host(), SMALL, None)
    save_config(config, tmp_path)
    assert resolve(phantom_store, tmp_path, read_host(), {}, None) == config


def test_early_stopping_ends_after_patience_validations_without_gain(phantom_store, tmp_path, monkeypatch):
    monkeypatch.setattr(fit_module, "hard_dice_counts", lambda target, logits: np.ones((1, 3, 3)))
    fit = start(phantom_store, tmp_path, epochs=20, patience=2)
    monkeypatch.setattr(fit_module, "_score", lambda target, logits: (1.0, _Counts()))
    fit.run()
    assert read_events(tmp_path)[-1]["reason"] == "early stop"
    assert fit.step == 3 * fit.steps_per_epoch


class _Counts:
    def numpy(self):
        return np.ones((1, 3, 3))


def test_a_loss_that_is_not_finite_stops_with_the_case_and_the_last_good_step(phantom_store, tmp_path, monkeypatch):
    fit = start(phantom_store, tmp_path)
    monkeypatch.setattr(fit.learner, "step", lambda *_: (float("nan"), np.ones((1, 3), "f4").view(_Array)))
    with pytest.raises(InputError, match="loss must be finite, got nan at step 1 on BRATS_"):
        fit.run()


class _Array(np.ndarray):
    def numpy(self):
        return np.asarray(self)


def test_ema_weights_are_what_best_holds_and_training_goes_on_from_its_own(phantom_store, tmp_path):
    start(phantom_store, tmp_path, ema=0.9).run()
    last, best = weights(tmp_path), weights(tmp_path, "best")
    assert set(best) == {name for name in last if name.startswith("model/")}
    assert any(not np.array_equal(best[name], last[name]) for name in best)


def test_the_paper_s_recipe_is_one_channel_and_one_region(phantom_store, tmp_path):
    config = resolve(phantom_store, tmp_path, read_host(), {}, "paper-flair")
    assert (config.unet.channels, config.unet.outputs, config.extent, config.unet.norm) == (1, 1, "full", "batch")
    assert config.grid == (48, 48, 48)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"channels": ["PET"]}, "channels must be among"),
        ({"batch": 9}, "batch must be at most the 4 training cases, got 9"),
        ({"depth": 12}, "depth must be between 2 and 8, got 12"),
        ({"rotation_deg": 90.0}, "augment rotation_deg must be in"),
    ],
)
def test_settings_that_do_not_suit_are_refused_before_anything_is_written(phantom_store, tmp_path, settings, message):
    with pytest.raises(InputError, match=message):
        resolve(phantom_store, tmp_path / "run", read_host(), settings, None)
    assert not (tmp_path / "run").exists()


def test_a_damaged_checkpoint_is_refused_and_left_alone(phantom_store, tmp_path):
    start(phantom_store, tmp_path, epochs=1).run()
    path = tmp_path / "checkpoints" / "last.npz"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"last\.npz must be whole"):
        start(phantom_store, tmp_path, epochs=1)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_the_same_command_continues(phantom_store, tmp_path, number):
    command = [sys.executable, "-m", "cpu3d", "train", "--store", str(phantom_store.folder), "--run", str(tmp_path)]
    options = ["--filters", "4", "--depth", "3", "--epochs", "200", "--dtype", "float32"]
    process = subprocess.Popen([*command, *options], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while len(read_events(tmp_path)) < 4 and time.monotonic() < deadline:
        time.sleep(0.2)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "saved after step" in errors
    state = load_checkpoint(tmp_path / "checkpoints" / "last.npz")[1]
    assert read_events(tmp_path)[-1] == {**read_events(tmp_path)[-1], "reason": "interrupted", "step": state["step"]}
    again = subprocess.run([*command, "--epochs", str(state["step"] // 4 + 1)], cwd=ROOT, env=os.environ, check=False)
    assert again.returncode == 0
    assert json.loads((tmp_path / "config.json").read_text())["epochs"] == state["step"] // 4 + 1
    assert load_config(tmp_path) == load_config(tmp_path)
    assert isinstance(load_config(tmp_path), RunConfig)
