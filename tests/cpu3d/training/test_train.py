"""A run as a whole: it learns, it is cut and goes on, it refuses to become another."""

import argparse
import dataclasses
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from cpu3d.__main__ import main
from cpu3d.config import RunConfig, save_config
from cpu3d.data.records import array_path, remake
from cpu3d.data.region import round_up
from cpu3d.data.resolution import network_grid
from cpu3d.data.store import Store, open_store
from cpu3d.data.stores.prepare import prepare
from cpu3d.errors import DivergedError, DoesNotFitError, InputError, Interrupted, WorkerLostError
from cpu3d.host.gpu import Gpu
from cpu3d.inference.predictor import load_predictor
from cpu3d.resolve import resolve
from cpu3d.training import fit as fit_module
from cpu3d.training import validation as validation_module
from cpu3d.training.checkpoint_history import checkpoints, newest, write_next
from cpu3d.training.fit import Fit
from cpu3d.training.learner import Outcome
from cpu3d.training.plan_lines import plan_lines
from cpu3d.training.run_log import append_event, forget_after, read_events
from cpu3d.training.stop_signals import noted_signals
from cpu3d.training.train import train
from cpu3d.training_options import add_training_options, with_settings
from cpu3d.util.lock import locked
from memory_estimator.calibration import find_constants
from memory_estimator.host import read_host
from models.config import UNetConfig
from tests.cpu3d.distributed.threads import together
from tests.cpu3d.runs import SMALL, assert_cut_and_continued_is_uninterrupted, start, weights

ROOT = Path(__file__).resolve().parents[3]


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
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [
        "best.npz",
        *(f"step-{step:08d}.npz" for step in (16, 20, 24)),
    ]
    assert any((tmp_path / "tensorboard").iterdir())


def test_a_run_cut_after_any_step_ends_with_the_uninterrupted_one_s_weights(phantom_store, tmp_path, monkeypatch):
    assert_cut_and_continued_is_uninterrupted(phantom_store, tmp_path, monkeypatch, steps=12)


def budgeted(store, folder, monkeypatch, step_s, **settings):
    """A run whose length is open, and whose steps seem to take `step_s` seconds, the first one ten times as long."""
    fit, now, taken = start(store, folder, **settings), [0.0], []
    step = fit.learner.step

    def timed(*given):
        now[0] += step_s * (1 if taken else 10)
        taken.append(1)
        return step(*given)

    monkeypatch.setattr(fit.learner, "step", timed)
    monkeypatch.setattr(fit_module, "time", SimpleNamespace(perf_counter=lambda: now[0], monotonic=time.monotonic))
    return fit


def test_a_budget_of_minutes_becomes_the_steps_of_a_whole_run_and_leaves_no_trace(phantom_store, tmp_path, monkeypatch):
    fit = budgeted(phantom_store, tmp_path / "budget", monkeypatch, step_s=10.0, budget_minutes=190 / 60)
    assert fit.has_open_length
    assert fit.fit_budget() == pytest.approx(10)
    assert fit.steps == fit.config.steps == 7  # of 12: timing them took 120 of the 190 s
    fit.run()
    whole = start(phantom_store, tmp_path / "whole", steps=7)
    whole.run()
    for name, array in weights(tmp_path / "whole").items():
        np.testing.assert_array_equal(weights(tmp_path / "budget")[name], array, err_msg=name)
    rates, expected = (
        [event["learning_rate"] for event in read_events(tmp_path / name) if event["event"] == "step"]
        for name in ("budget", "whole")
    )
    assert rates == expected


@pytest.mark.parametrize(
    ("minutes", "settings", "steps"),
    [
        (1e6, {}, 12),
        (1e-6, {}, 4),
        (1e-6, {"validate_every": 2}, 8),
        (1e-6, {"validations": 3}, 1),
    ],
)
def test_a_budget_cuts_nothing_that_fits_and_nothing_before_the_first_validation(
    phantom_store, tmp_path, monkeypatch, minutes, settings, steps
):
    fit = budgeted(phantom_store, tmp_path, monkeypatch, step_s=10.0, budget_minutes=minutes, **settings)
    fit.fit_budget()
    assert fit.steps == steps


def test_a_budget_is_cut_alike_on_all_workers_by_the_chief_s_time(phantom_store, tmp_path, monkeypatch):
    config = resolve(phantom_store, tmp_path, read_host(), {**SMALL, "batch": 2, "budget_minutes": 7 / 60}, None)
    now = threading.local()
    monkeypatch.setattr(fit_module, "time", SimpleNamespace(perf_counter=lambda: vars(now).setdefault("s", 0.0)))

    def cut(exchange):
        fit = Fit(phantom_store, tmp_path, config, exchange, here=(0, 1))

        def timed(parts, *given):
            now.s += 1.0 + exchange.rank
            return Outcome(np.zeros(2), np.zeros((2, 3)), np.zeros(2))

        fit.learner.step = timed
        fit.fit_budget()
        return fit.steps

    assert together(2, cut) == [4, 4]  # 7 s less 3 s of timing at 1 s a step; the other worker would have taken 2


def test_a_run_cut_to_a_budget_keeps_its_steps_until_it_is_given_another_length(phantom_store, tmp_path):
    def again(recipe=None, **settings):
        config = resolve(phantom_store, tmp_path, read_host(), settings, recipe)
        return config.budget_minutes, config.steps

    first = resolve(phantom_store, tmp_path, read_host(), {"budget_minutes": 4.0, "depth": 3}, "demo")
    save_config(dataclasses.replace(first, steps=7), tmp_path)
    assert again() == again(budget_minutes=4.0) == again("demo", budget_minutes=4.0, depth=3) == (4.0, 7)
    assert again(steps=9) == (0.0, 9)
    assert again(epochs=8) == (0.0, 0)
    assert again(budget_minutes=8.0) == (8.0, 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"budget_minutes": -1.0}, "budget_minutes must be a number from 0 on, got -1.0"),
        ({"budget_minutes": math.nan}, "budget_minutes must be a number from 0 on, got nan"),
        ({"budget_minutes": math.inf}, "budget_minutes must be a number from 0 on, got inf"),
        ({"budget_minutes": 4.0, "steps": 9}, "--budget-minutes must come without --steps, got --steps 9"),
    ],
)
def test_a_budget_that_is_none_is_refused(phantom_store, tmp_path, settings, message):
    with pytest.raises(InputError, match=message):
        resolve(phantom_store, tmp_path, read_host(), settings, None)


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
    fit = start(phantom_store, tmp_path, epochs=20, patience=2)
    monkeypatch.setattr(validation_module, "_score", lambda target, logits: (1.0, _Counts()))
    fit.run()
    assert read_events(tmp_path)[-1]["reason"] == "early stop"
    assert fit.step == 3 * fit.steps_per_epoch
    assert fit.longer == "--patience"


class _Counts:
    def numpy(self):
        return np.ones((1, 3, 3))


def test_a_loss_that_is_not_finite_stops_with_the_case_and_the_last_good_step(phantom_store, tmp_path, monkeypatch):
    fit = start(phantom_store, tmp_path)
    nothing = Outcome(np.array([np.nan]), np.ones((1, 3), "f4"), np.zeros(1))
    monkeypatch.setattr(fit.learner, "step", lambda *_: nothing)
    with pytest.raises(DivergedError, match="loss and gradients must be finite, got nan at step 1 on BRATS_"):
        fit.run()


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
        ({"regions": ["WT", "WT"]}, "regions must be among WT, TC, ET, each once, got WT, WT"),
        ({"batch": 4, "micro_batch": 3}, "micro_batch must divide the batch of 4, got 3; give one of 1, 2, 4"),
        ({"batch": 9}, "batch must be at most the 4 training cases, got 9"),
        ({"depth": 12}, "depth must be between 2 and 8, got 12"),
        ({"rotation_deg": 90.0}, "augment rotation_deg must be in"),
    ],
)
def test_settings_that_do_not_suit_are_refused_before_anything_is_written(phantom_store, tmp_path, settings, message):
    with pytest.raises(InputError, match=message):
        resolve(phantom_store, tmp_path / "run", read_host(), settings, None)
    assert not (tmp_path / "run").exists()


def test_a_damaged_checkpoint_is_set_aside_for_the_one_before_and_none_that_is_whole_is_refused(
    phantom_store, tmp_path
):
    start(phantom_store, tmp_path, epochs=1, save_minutes=0.0, keep=2).run()
    expected = weights(tmp_path)
    path = newest(tmp_path).path
    path.write_bytes(path.read_bytes()[:-100])
    again = start(phantom_store, tmp_path, epochs=1, keep=2)
    assert again.step == 3
    assert "step-00000004.npz must be whole" in plan_lines(again)[0]
    assert path.with_suffix(".damaged").exists()
    again.run()
    for name, array in weights(tmp_path).items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)
    for path in checkpoints(tmp_path):
        path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"step-00000004\.npz must be whole.*\n.*step-00000003\.npz must be whole"):
        start(phantom_store, tmp_path, epochs=1)


@pytest.mark.parametrize("name", ["log.jsonl", "checkpoints/best.npz", "checkpoints/step-00000120.npz"])
def test_a_log_or_checkpoint_of_another_program_is_refused_and_left_as_it_is(phantom_store, tmp_path, capsys, name):
    mine = tmp_path / "run" / name
    mine.parent.mkdir(parents=True)
    mine.write_text("mine\n")
    assert main(["train", "--store", str(phantom_store.folder), "--run", str(tmp_path / "run"), "--force"]) == 2
    assert f"must hold a config.json beside {name}, found none" in capsys.readouterr().err
    assert mine.read_text() == "mine\n"


@pytest.mark.parametrize("recipe", [None, "demo", "paper-flair"])
def test_the_same_command_continues_whatever_dtype_the_host_chose(phantom_store, tmp_path, recipe):
    fast = dataclasses.replace(read_host(), isa=("avx512_bf16",))
    config = resolve(phantom_store, tmp_path, fast, {}, recipe)
    assert config.unet.dtype == "bfloat16"
    save_config(config, tmp_path)
    slow = dataclasses.replace(fast, isa=())
    assert resolve(phantom_store, tmp_path, slow, {}, recipe) == config
    with pytest.raises(InputError, match=r"unet\.dtype must stay as the run was started, got 'float32' for 'bfloat16'"):
        resolve(phantom_store, tmp_path, fast, {"dtype": "float32"}, recipe)


CARDS = tuple(Gpu(index, "made up", 2**34, free, (8, 0)) for index, free in enumerate((2**33, 2**34)))


@pytest.mark.parametrize("recipe", [None, "demo", "paper-flair", "gpu-patch"])
def test_the_same_command_continues_on_the_device_that_was_picked(phantom_store, tmp_path, monkeypatch, recipe):
    monkeypatch.setattr("cpu3d.host.gpu.cuda_is_installed", lambda: True)
    settings = {"mode": "patch", "depth": 3}
    config = resolve(phantom_store, tmp_path, read_host(), settings, recipe, CARDS)
    # Of two cards the one with more memory free, but for the recipe that names one.
    assert config.device == ("gpu:0" if recipe == "gpu-patch" else "gpu:1")
    save_config(config, tmp_path)
    assert resolve(phantom_store, tmp_path, read_host(), settings, recipe, CARDS) == config
    moved = resolve(phantom_store, tmp_path, read_host(), {**settings, "device": "cpu"}, recipe, CARDS)
    assert moved == dataclasses.replace(config, device="cpu")
    save_config(moved, tmp_path)
    assert resolve(phantom_store, tmp_path, read_host(), settings, recipe, CARDS) == moved


def test_at_a_lower_resolution_the_network_sees_no_more_than_the_extent_takes(phantom_store, tmp_path):
    extent, seen = phantom_store.manifest.largest_box, {}
    for resolution in (0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9):
        config = resolve(phantom_store, tmp_path, read_host(), {**SMALL, "resolution": resolution}, None)
        seen[resolution] = config.grid
        assert config.grid == tuple(-(-math.ceil(n * resolution - 1e-9) // 4) * 4 for n in extent)
    # What is rounded up to the divisor first and then shrunk is more.
    assert any(seen[one] != network_grid(round_up(extent, 4), one, 4) for one in seen)


def test_a_store_with_the_same_names_and_other_volumes_is_another_split(phantom_store, tmp_path):
    save_config(resolve(phantom_store, tmp_path, read_host(), SMALL, None), tmp_path)
    cases = phantom_store.manifest.cases
    other = (dataclasses.replace(cases[0], image_voxels_sha256="0" * 64), *cases[1:])
    changed = Store(phantom_store.folder, remake(phantom_store.manifest, cases=other))
    with pytest.raises(InputError, match="split_hash must stay as the run was started"):
        resolve(changed, tmp_path, read_host(), {}, None)


def test_an_update_that_overflows_never_replaces_the_last_good_checkpoint(phantom_store, tmp_path, monkeypatch):
    fit = start(phantom_store, tmp_path, save_minutes=0.0)
    step, taken = Fit._train_step, []

    def overflow_in_the_third(self, *given):
        stop = step(self, *given)
        taken.append(1)
        if len(taken) == 3:
            self.learner.model.weights[0].assign(self.learner.model.weights[0] * np.inf)
        return stop

    monkeypatch.setattr(Fit, "_train_step", overflow_in_the_third)
    with pytest.raises(DivergedError, match=r"weights must be finite, got others after step 3; .*still holds step 2"):
        fit.run()
    assert newest(tmp_path).state["step"] == 2


def test_a_run_killed_before_its_first_checkpoint_starts_its_log_anew(phantom_store, tmp_path):
    append_event(tmp_path, {"event": "step", "step": 1})
    start(phantom_store, tmp_path)
    assert read_events(tmp_path) == []


@pytest.mark.parametrize(("name", "value"), [("step", "2"), ("best", [0.5]), ("trained_s", None)])
def test_a_checkpoint_whose_state_is_of_another_kind_is_refused_by_name(phantom_store, tmp_path, name, value):
    fit = start(phantom_store, tmp_path)
    state = {"step": 2, "best": None, "stale_validations": 0, "trained_s": 1.0}
    write_next(tmp_path, 2, fit.learner.arrays(), {**state, name: value}, keep=1)
    with pytest.raises(InputError, match=rf"step-00000002\.npz must hold a run's state, got state.{name} must be"):
        start(phantom_store, tmp_path)
    write_next(tmp_path, 2, fit.learner.arrays(), state, keep=1)
    assert start(phantom_store, tmp_path).step == 2


def test_how_files_are_read_is_planned_logged_free_to_change_and_gives_the_same_weights(phantom_store, tmp_path):
    read = {}
    for mode in ("mmap", "pread"):
        fit = start(phantom_store, tmp_path / mode, epochs=1, read_mode=mode)
        assert [line for line in plan_lines(fit) if line.startswith(f"reads: {mode} (as asked)")]
        fit.log_start(read_host(), "test", {}, {})
        fit.run()
        events = {event["event"]: event for event in read_events(tmp_path / mode)}
        assert events["start"]["read_mode"] == mode
        assert events["end"]["zero_copy_ratio"] == (mode == "mmap")
        assert events["end"]["bytes_read"] > 0
        read[mode] = weights(tmp_path / mode)
    for name, array in read["mmap"].items():
        np.testing.assert_array_equal(array, read["pread"][name], err_msg=name)
    assert start(phantom_store, tmp_path / "mmap", epochs=2, read_mode="pread").step == 4


def test_a_file_that_is_damaged_during_a_run_ends_it_with_its_name(phantom_store, tmp_path):
    shutil.copytree(phantom_store.folder, tmp_path / "store")
    store = open_store(tmp_path / "store")
    fit = start(store, tmp_path / "run", read_mode="pread")
    label = array_path(store.folder, store.cases("train")[0], "y")
    label.write_bytes(label.read_bytes()[:-1])
    with pytest.raises(InputError, match=f"store file {label} must be"):
        fit.run()


def test_a_finished_run_is_left_as_it_is(phantom_store, tmp_path):
    train(phantom_store.folder, tmp_path, settings={**SMALL, "epochs": 1})
    log, last = (tmp_path / "log.jsonl").read_bytes(), newest(tmp_path).path.read_bytes()
    train(phantom_store.folder, tmp_path)
    assert (tmp_path / "log.jsonl").read_bytes() == log
    assert newest(tmp_path).path.read_bytes() == last


def test_a_run_of_steps_goes_on_by_epochs_where_these_are_asked_for(phantom_store, tmp_path, capsys):
    def go(**settings):
        config = train(phantom_store.folder, tmp_path, settings={**small, **settings})
        taken = [event for event in read_events(tmp_path) if event["event"] == "step"]
        return config.epochs, config.steps, len(taken), capsys.readouterr().err

    small = {**{key: value for key, value in SMALL.items() if key != "epochs"}, "depth": 2}
    assert go(steps=2)[1:3] == (2, 2)
    assert "nothing to do after step 2; a larger --steps goes on" in go()[3]
    assert go(epochs=1)[:3] == (1, 0, 4)
    assert "nothing to do after step 4; a larger --epochs goes on" in go()[3]


def test_a_length_is_given_once(capsys):
    parser = argparse.ArgumentParser()
    add_training_options(parser)
    for pair in (["--epochs", "2", "--steps", "9"], ["--validate-every", "2", "--validations", "3"]):
        with pytest.raises(SystemExit):
            parser.parse_args(pair)
        assert "not allowed with" in capsys.readouterr().err
    assert with_settings(RunConfig(validations=3), {"validate_every": 2}).validations == 0


def test_two_trainings_in_one_folder_are_refused(phantom_store, tmp_path):
    with locked(tmp_path, "run"), pytest.raises(InputError, match=r"must be written by one .* at a time"):
        train(phantom_store.folder, tmp_path, settings={**SMALL, "epochs": 1})


VARIANTS = [
    {"batch": 2, "residual": True, "up": "upsampling"},
    {"norm": "batch", "batch": 4, "micro_batch": 2, "extent": "full", "deep_supervision": True, "dtype": "bfloat16"},
    {"network": "cicek2016", "channels": ["T2w", "FLAIR"], "optimizer": "sgd", "rotation_deg": 10.0, "scaling": 0.1},
]


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_every_kind_of_network_trains_and_predicts(phantom_store, tmp_path, settings):
    start(phantom_store, tmp_path, epochs=1, **settings).run()
    predictor = load_predictor(tmp_path)
    record = phantom_store.cases("test")[0]
    answers = predictor.probabilities(np.asarray(phantom_store.image(record.case_id)), record)
    assert answers.shape == (*record.shape, 3)
    assert np.isfinite(answers).all()
    assert answers.min() >= 0
    assert answers.max() <= 1


def hungry(store, folder, free_bytes, monkeypatch, *, epochs=1, **options):
    """Train on a host that has this much free."""
    host = dataclasses.replace(read_host(), available_bytes=free_bytes, cgroup_limit_bytes=None)
    monkeypatch.setattr("cpu3d.training.train.read_host", lambda: host)
    settings = {**SMALL, "epochs": epochs, "batch": 2, "extent": "full"}
    return train(store.folder, folder, settings=settings, **options)


def test_a_run_that_may_not_fit_is_refused_with_what_would_before_anything_is_written(
    phantom_store, tmp_path, monkeypatch, capsys
):
    with pytest.raises(
        DoesNotFitError, match=r"memory must hold this training, up to .*iB, got 200 MiB free; .*--force"
    ):
        hungry(phantom_store, tmp_path / "run", 200 * 2**20, monkeypatch)
    assert not (tmp_path / "run").exists()
    assert "plan: allocator peak" in capsys.readouterr().err


def test_a_forced_run_trains_and_logs_what_was_predicted(phantom_store, tmp_path, monkeypatch):
    hungry(phantom_store, tmp_path, 200 * 2**20, monkeypatch, force=True)
    first, *_, last = read_events(tmp_path)
    predicted = first["predicted"]
    assert 0 < predicted["allocator_peak_bytes"] < predicted["process_peak_bytes"] < predicted["upper_bound_bytes"]
    assert predicted["step_s"] > 0
    assert last["reason"] == "finished"


def test_a_run_that_no_longer_fits_keeps_its_settings_and_one_that_is_over_needs_no_memory(
    phantom_store, tmp_path, monkeypatch, capsys
):
    hungry(phantom_store, tmp_path, 200 * 2**20, monkeypatch, force=True)
    kept = {
        path: path.read_bytes()
        for path in tmp_path.rglob("*.*")
        if path.suffix in (".json", ".jsonl", ".npz") and path.parent.name != "heartbeats"
    }
    hungry(phantom_store, tmp_path, 200 * 2**20, monkeypatch)
    assert "nothing to do after step" in capsys.readouterr().err
    with pytest.raises(DoesNotFitError, match="as a run in another folder") as caught:
        hungry(phantom_store, tmp_path, 200 * 2**20, monkeypatch, epochs=2)
    assert "what fits: --" not in str(caught.value)
    assert {path: path.read_bytes() for path in kept} == kept


def test_a_damaged_calibration_is_told_in_a_sentence_and_keeps_nobody_from_training_by_force(
    phantom_store, tmp_path, monkeypatch, capsys
):
    own = tmp_path / "calibration.json"
    own.write_text('{"schema": 999}')
    find = lambda threads, host: find_constants(threads, host, own)
    monkeypatch.setattr("cpu3d.memory_plan.find_constants", find)
    arguments = ["train", "--store", str(phantom_store.folder), "--run", str(tmp_path / "run"), "--epochs", "1"]
    arguments += ["--filters", "4", "--depth", "3", "--dtype", "float32"]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert f"error: calibration {own} must have schema 1, got 999" in error
    assert error.rstrip().endswith("or --force")
    assert not (tmp_path / "run").exists()
    assert main([*arguments, "--force"]) == 0
    assert "plan: none, calibration" in capsys.readouterr().err
    assert read_events(tmp_path / "run")[0]["predicted"] == {}


def test_a_run_that_does_not_fit_ends_with_code_3(phantom_store, tmp_path, monkeypatch, capsys):
    host = dataclasses.replace(read_host(), available_bytes=10 * 2**20)
    monkeypatch.setattr("cpu3d.training.train.read_host", lambda: host)
    assert main(["train", "--store", str(phantom_store.folder), "--run", str(tmp_path / "run")]) == 3
    assert "10 MiB free" in capsys.readouterr().err


@pytest.mark.slow
def test_one_real_case_is_learnt_in_120_steps(real_cases, tmp_path):
    prepare(real_cases / "brats-gli-real", tmp_path / "store", fractions=(1, 0, 0), workers=1)
    train(tmp_path / "store", tmp_path / "run", settings={"epochs": 120, "no_augment": True})
    assert main(["evaluate", "--run", str(tmp_path / "run"), "--split", "train"]) == 0
    scores = json.loads((tmp_path / "run" / "evaluation" / "train" / "scores.json").read_text())
    dice = {name: row["dice"]["mean"] for name, row in scores["summary"].items()}
    assert dice["WT"] >= 0.95
    assert dice["TC"] >= 0.90
    assert dice["ET"] >= 0.80


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_the_same_command_continues(phantom_store, tmp_path, number):
    command = [sys.executable, "-m", "cpu3d", "train", "--store", str(phantom_store.folder), "--run", str(tmp_path)]
    options = ["--filters", "4", "--depth", "3", "--epochs", "200", "--dtype", "float32"]
    options += ["--policy", UNetConfig().policy]
    process = subprocess.Popen([*command, *options], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while len(read_events(tmp_path)) < 4 and time.monotonic() < deadline:
        time.sleep(0.2)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number, errors
    assert "saved after step" in errors
    state = newest(tmp_path).state
    assert read_events(tmp_path)[-1] == {**read_events(tmp_path)[-1], "reason": "interrupted", "step": state["step"]}
    again = subprocess.run([*command, "--epochs", str(state["step"] // 4 + 1)], cwd=ROOT, env=os.environ, check=False)
    assert again.returncode == 0
    assert json.loads((tmp_path / "config.json").read_text())["epochs"] == state["step"] // 4 + 1


def test_a_second_sigterm_changes_nothing_and_a_second_ctrl_c_ends_at_once():
    with noted_signals() as stop:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        assert signal.SIGTERM in stop
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_validations_are_as_many_as_asked_for_and_evenly_spread(phantom_store, tmp_path):
    fit = start(phantom_store, tmp_path, steps=10, validations=3)
    due = []
    for fit.step in range(1, 11):
        if fit._validation_is_due():
            due.append(fit.step)
    assert due == [4, 7, 10]


def test_a_finished_run_whose_last_line_was_lost_gets_it_when_it_is_called_again(phantom_store, tmp_path):
    settings = {**SMALL, "steps": 2}
    train(phantom_store.folder, tmp_path, settings=settings)
    events = read_events(tmp_path)
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events[:-1]))
    for _ in range(2):
        train(phantom_store.folder, tmp_path, settings=settings)
        again = read_events(tmp_path)
        assert [event["event"] for event in again] == [event["event"] for event in events]
        assert again[-1]["seconds"] == events[-1]["seconds"]
        assert again[-1]["reason"] == "finished"


def test_a_signal_during_a_validation_breaks_it_off_and_the_next_start_makes_up_for_it(
    phantom_store, tmp_path, monkeypatch
):
    options = {"steps": 4, "save_minutes": 100}
    start(phantom_store, tmp_path / "whole", **options).run()
    fit = start(phantom_store, tmp_path / "cut", **options)
    score = validation_module._score

    def asked_to_stop(target, logits):
        os.kill(os.getpid(), signal.SIGTERM)
        return score(target, logits)

    monkeypatch.setattr(validation_module, "_score", asked_to_stop)
    with pytest.raises(Interrupted, match="saved after step 4") as stopped:
        fit.run()
    assert stopped.value.exit_code == 143
    monkeypatch.setattr(validation_module, "_score", score)
    again = start(phantom_store, tmp_path / "cut", **options)
    assert not again.is_over
    again.run()
    validations = [
        [(event["step"], event["loss"]) for event in read_events(tmp_path / run) if event["event"] == "validation"]
        for run in ("whole", "cut")
    ]
    assert validations[0] == validations[1]
    assert len(validations[0]) == 1


def test_a_worker_that_is_lost_during_a_validation_costs_no_step(phantom_store, tmp_path, monkeypatch):
    fit = start(phantom_store, tmp_path, steps=4, save_minutes=100)

    def lost(*given):
        raise WorkerLostError("worker 1 must answer worker 0")

    monkeypatch.setattr(fit_module, "validate", lost)
    with pytest.raises(WorkerLostError, match="worker 1 must answer worker 0; saved after step 4"):
        fit.run()
    assert newest(tmp_path).state["owes_validation"]


def test_a_log_that_cannot_be_written_is_told_with_what_is_whole(phantom_store, tmp_path, monkeypatch):
    fit = start(phantom_store, tmp_path, save_minutes=0.0)

    def full(run, event):
        if event["step"] == 2:
            raise OSError(28, "No space left on device")
        append_event(run, event)

    monkeypatch.setattr(fit_module, "append_event", full)
    with pytest.raises(OSError, match=r"step 2 could not be logged in .*log\.jsonl: .*step-00000001\.npz is whole"):
        fit.run()


def test_a_validation_that_is_owed_is_logged_once(tmp_path):
    for event, step in (("step", 1), ("validation", 1), ("step", 2), ("validation", 2), ("step", 3)):
        append_event(tmp_path, {"event": event, "step": step, **({"mean_dice": 0.5} if event == "validation" else {})})
    forget_after(tmp_path, 2, owes_validation=True)
    assert [(event["event"], event["step"]) for event in read_events(tmp_path)] == [
        ("step", 1),
        ("validation", 1),
        ("step", 2),
    ]
