"""The loop of a run: its order, its ends, and how it continues. With a learner in NumPy, as no
network matters here."""

import dataclasses
import math
import os
import signal
import time
from types import SimpleNamespace

import numpy as np
import pytest

from cpu3d.data.manifest import remake
from cpu3d.data.store import Store
from cpu3d.errors import DivergedError, Interrupted, WorkerLostError, WorkersDifferError
from cpu3d.run.checkpoint import load_checkpoint, newest, weights_file
from cpu3d.run.log import append_event, read_events
from cpu3d.training import fit as fit_module
from cpu3d.training.watchdog import StopRequest
from tests.cpu3d import runs
from tests.cpu3d.runs import (
    NumpyLearner,
    assert_cut_and_continued_is_uninterrupted,
    assert_same_run,
    assert_same_weights,
    save_after_each_step,
    steps_of,
    weights,
    with_absent_region,
)
from tests.cpu3d.runs import start_without_network as start


def validations_of(folder):
    return [event for event in read_events(folder) if event["event"] == "validation"]


def rates_of(folder):
    return [step["learning_rate"] for step in steps_of(folder)]


def scores_are(monkeypatch, *dice, then=lambda: None):
    """Have each validation score so, times what `then` returns."""

    def validate(*arguments):
        times = then() or 1
        return SimpleNamespace(dice=times * np.array(dice), loss=1.0), StopRequest.NONE

    monkeypatch.setattr(fit_module, "validate", validate)


def test_a_run_leaves_a_log_its_last_checkpoints_and_the_best_weights(phantom_store, tmp_path):
    fit = start(phantom_store, tmp_path, steps=10, validations=4)
    fit.run()
    assert rates_of(tmp_path) == [fit.config.rate_at(step, 10) for step in range(10)]
    assert steps_of(tmp_path)[7]["epoch"] == 1, "of four steps each"
    validated = [(event["step"], event["epoch"]) for event in validations_of(tmp_path)]
    assert validated == [(3, 0), (5, 1), (8, 2), (10, 2)], "evenly spread"
    assert read_events(tmp_path)[-1]["reason"] == "finished"
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["best.npz", *(f"step-000000{step}.npz" for step in ("05", "08", "10"))]


@pytest.mark.parametrize(
    "how",
    [
        {"batch": 2, "micro_batch": 2, "seed": 1},
        {"batch": 2, "micro_batch": 1},
        {"batch": 2, "micro_batch": 2, "curriculum": "all", "depth": 3},
        {"mode": "patch", "patch": (16, 16, 16)},
    ],
)
def test_steps_count_the_voxels_of_their_grids(phantom_store, tmp_path, how):
    how["epochs"] = 10 if "curriculum" in how else 1
    fit = start(phantom_store, tmp_path, **how)
    voxels = []
    for step in range(fit.steps):
        images = [image for image, _ in fit.data.training(step, step + 1)]
        seen = sum(map(np.size, images)) / 4
        voxels.append(seen / math.prod(fit.config.unet.average))
    plain = start(phantom_store, tmp_path / "plain", augment="off", **how)
    batches = plain.data.training(step, step + 1)
    *_, (image, _) = batches
    assert np.any(image != images[-1])
    assert batches.waited_s() > batches.waited_s() == 0
    assert fit.data.mean_voxels == np.mean(voxels)
    fit.run()
    assert [step["voxels"] for step in steps_of(tmp_path)] == voxels


# --- A budget of minutes ---


def budgeted(store, folder, monkeypatch):
    """A run of 190 s whose steps seem to take 10 s for the mean of their voxels, the
    first one ten times as long."""
    fit = start(store, folder, budget_minutes=190 / 60)
    taken_s = []
    step = fit.learner.step

    def timed(*arguments):
        of_mean = fit.data.voxels(fit.step + len(taken_s)) / fit.data.mean_voxels
        taken_s.append((10 if taken_s else 100) * of_mean)
        return step(*arguments)

    monkeypatch.setattr(fit.learner, "step", timed)
    clock = SimpleNamespace(perf_counter=lambda: sum(taken_s), monotonic=time.monotonic)
    monkeypatch.setattr(fit_module, "time", clock)
    return fit


def test_a_budget_of_minutes_becomes_the_steps_of_a_whole_run_and_leaves_no_trace(
    phantom_store, tmp_path, monkeypatch
):
    fit = budgeted(phantom_store, tmp_path / "budget", monkeypatch)
    assert fit.config.has_open_length
    assert fit.fit_budget() == pytest.approx([10])
    assert fit.steps == fit.config.steps == 6  # of 12: timing them took 125 of the 190 s
    fit.run()
    start(phantom_store, tmp_path / "whole", steps=6).run()
    assert_same_weights(tmp_path / "budget", tmp_path / "whole")
    assert rates_of(tmp_path / "budget") == rates_of(tmp_path / "whole")


def test_a_budget_does_not_count_the_validations_of_earlier_attempts(
    phantom_store, tmp_path, monkeypatch
):
    taken_s = []
    # 20 s besides the validation.
    clock = SimpleNamespace(
        perf_counter=lambda: sum(taken_s), monotonic=lambda: 1.02 * sum(taken_s)
    )
    with monkeypatch.context() as patch:
        patch.setattr(fit_module, "time", clock)
        scores_are(patch, 1, 1, 1, then=lambda: taken_s.append(1000))
        start(phantom_store, tmp_path, epochs=1).run()
    assert newest(tmp_path).state["trained_s"] == read_events(tmp_path)[-1]["seconds"] == 1020
    fit = budgeted(phantom_store, tmp_path, monkeypatch)
    fit.fit_budget()
    # 20 and 109 of the 190 s are gone; of the 8 steps that are left 6 fit.
    assert (fit.step, fit.steps) == (4, 10)
    fit.run()
    assert newest(tmp_path).state["trained_s"] > 1020, "of both attempts"


# --- Validations ---


def test_a_region_that_no_validation_case_has_is_not_in_the_mean_dice(
    phantom_store, tmp_path, monkeypatch
):
    scores_are(monkeypatch, 0.25, 0.5, 0.75, 1.0)
    start(with_absent_region(phantom_store), tmp_path, steps=3, validations=1).run()
    assert [event["mean_dice"] for event in validations_of(tmp_path)] == [0.5]
    assert newest(tmp_path).state["best"] == 0.5


def test_a_worker_that_is_lost_during_a_validation_costs_no_step(
    phantom_store, tmp_path, monkeypatch
):
    def lost():
        raise WorkerLostError("worker 1 must answer worker 0")

    scores_are(monkeypatch, then=lost)
    with pytest.raises(WorkerLostError, match=r"worker 1 must answer worker 0.* after step 4"):
        start(phantom_store, tmp_path, steps=4).run()
    assert newest(tmp_path).state["owes_validation"]


def test_steps_of_workers_that_differ_are_not_saved(phantom_store, tmp_path, monkeypatch):
    def differ():
        raise WorkersDifferError

    scores_are(monkeypatch, then=differ)
    with pytest.raises(WorkersDifferError):
        start(phantom_store, tmp_path, steps=4).run()
    assert newest(tmp_path) is None


# --- What diverges ---


def change_third_step(fit, monkeypatch, change):
    """Have `change` replace the outcome of the third step, and each step be saved."""
    step = fit.learner.step

    def changed(*arguments):
        outcome = step(*arguments)
        return change(outcome) if fit.step == 2 else outcome

    monkeypatch.setattr(fit.learner, "step", changed)
    save_after_each_step(monkeypatch)


def test_an_update_that_overflows_is_not_saved_and_ends_the_run(
    phantom_store, tmp_path, monkeypatch
):
    fit = start(phantom_store, tmp_path)

    def overflow(outcome):
        fit.learner._arrays["model/000"][0] = np.inf
        return outcome

    change_third_step(fit, monkeypatch, overflow)
    rule = r"weights must be finite, got 0.* to inf in model/000 after step 3"
    with pytest.raises(DivergedError, match=rf"{rule}.*--learning-rate 0\.005"):
        fit.run()
    assert newest(tmp_path).state["step"] == 2


def test_the_last_stop_of_several_that_workers_ask_for_counts(phantom_store, tmp_path, monkeypatch):
    fit = start(phantom_store, tmp_path)
    asked = np.array([0.0, 15.0, 2.0])
    dice = np.arange(6).reshape(2, 3)
    change_third_step(
        fit, monkeypatch, lambda made: dataclasses.replace(made, notes=asked, dice=dice)
    )
    with pytest.raises(Interrupted, match="after step 3") as stopped:
        fit.run()
    assert stopped.value.exit_code == 143
    assert [*steps_of(tmp_path)[2]["dice"].values()] == [1.5, 2.5, 3.5]


@pytest.mark.parametrize("loss", [11.0, np.nan])
def test_a_loss_that_diverges_ends_the_run_and_names_its_case(
    phantom_store, tmp_path, monkeypatch, loss
):
    fit = start(phantom_store, tmp_path, steps=6, validations=1, batch=4, micro_batch=2)

    def diverge(outcome):
        return dataclasses.replace(outcome, losses=np.array([outcome.losses[0], 2 * loss]))

    change_third_step(fit, monkeypatch, diverge)
    cases = ", ".join(fit.data.case_ids(2)[2:])
    with pytest.raises(
        DivergedError, match=rf"^loss must be .* at most 10, got .* at step 3 on {cases};"
    ):
        fit.run()
    seen = " ".join(step["case_id"] for step in steps_of(tmp_path)).split()
    of_epoch = phantom_store.manifest.split["train"]
    assert sorted(seen) == sorted(2 * of_epoch), "each step is an epoch"
    assert newest(tmp_path).state["step"] == 2
    assert read_events(tmp_path)[-1]["event"] == "diverged"


# --- The curriculum ---

HALF = {"curriculum": "half", "steps": 16, "validations": 2}
"""13 steps at half the resolution, then 3 in full; a validation in each."""


def test_the_first_steps_see_half_the_resolution_and_all_validations_the_full_grid(
    phantom_store, tmp_path
):
    fit = start(phantom_store, tmp_path, extent="full", **HALF)
    coarse = math.prod(fit.config.coarse_seen_grid)
    full = math.prod(fit.config.grid)
    assert coarse < full / 4
    of_coarse = fit.learner
    fit.run()
    assert not of_coarse.arrays(), "the variables of coarse steps are given back"
    assert [event["voxels"] for event in steps_of(tmp_path)] == 13 * [coarse] + 3 * [full]
    assert not newest(tmp_path).state["best_is_coarse"]


def test_the_first_validation_in_full_is_the_best_however_good_those_before_it(
    phantom_store, tmp_path, monkeypatch
):
    before = iter(range(16))  # scores fall from 7 to 1, and again
    scores_are(monkeypatch, 1, 1, 1, then=lambda: 7 - next(before) % 7)
    start(phantom_store, tmp_path, **{**HALF, "validations": 16}).run()
    best = [event["step"] for event in validations_of(tmp_path) if event["best"]]
    assert best == [1, 14, 15], "that after the last coarse step, the 13th, is of coarse weights"
    assert load_checkpoint(weights_file(tmp_path, "best"))[1]["step"] == 15


class WithoutMemoryInFull(NumpyLearner):
    """There is memory for the coarse network alone."""

    def __init__(self, config):
        super().__init__(config)
        if not config.is_coarse:
            raise MemoryError


def test_memory_that_runs_out_in_full_costs_no_coarse_step(phantom_store, tmp_path):
    with pytest.raises(MemoryError):
        runs.start(phantom_store, tmp_path, learner=WithoutMemoryInFull, **HALF).run()
    assert newest(tmp_path).state["step"] == 13


def test_a_validation_that_a_signal_breaks_off_is_made_up_for_on_its_grid(
    phantom_store, tmp_path, monkeypatch
):
    options = {**HALF, "validations": 16}
    start(phantom_store, tmp_path / "whole", **options).run()
    fit = start(phantom_store, tmp_path / "cut", **options)
    logits = NumpyLearner.logits

    def asked_to_stop(learner, image):
        if fit.step == 13:
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGTERM)
        return logits(learner, image)

    with monkeypatch.context() as patch:
        patch.setattr(NumpyLearner, "logits", asked_to_stop)
        with pytest.raises(Interrupted, match="saved after step 13") as stopped:
            fit.run()
    assert stopped.value.exit_code == 143
    whole_s = sum(event["seconds"] for event in validations_of(tmp_path / "cut"))
    assert fit.progress.validated_s > whole_s + 0.2
    again = start(phantom_store, tmp_path / "cut", **options)
    assert again.learner.config.grid == again.config.coarse_grid
    again.run()
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


@pytest.mark.parametrize(
    ("done", "settings"),
    [
        (5, {"steps": 6, "batch": 2, "micro_batch": 1}),
        (12, HALF),
        (13, HALF),
        (13, {**HALF, "mode": "patch", "patch": (16, 16, 16)}),
    ],
)
def test_a_run_cut_after_any_step_ends_with_the_same_weights(
    phantom_store, tmp_path, monkeypatch, done, settings
):
    assert_cut_and_continued_is_uninterrupted(
        phantom_store, tmp_path, monkeypatch, done=done, learner=NumpyLearner, **settings
    )


# --- Files that are lost ---


def test_a_damaged_checkpoint_is_set_aside_for_the_one_before(phantom_store, tmp_path, monkeypatch):
    save_after_each_step(monkeypatch)
    start(phantom_store, tmp_path / "whole", epochs=1).run()
    start(phantom_store, tmp_path / "cut", epochs=1).run()
    path = newest(tmp_path / "cut").path
    path.write_bytes(path.read_bytes()[:-100])
    again = start(phantom_store, tmp_path / "cut", epochs=1)
    assert again.step == 3
    assert "step-00000004.npz must be whole" in again.warnings[0]
    assert path.with_suffix(".damaged").exists()
    again.run()
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[content.index(b"\x93NUMPY", len(content) // 2) + 130] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(("done", "lose"), [(4, flip_a_bit), (12, os.remove)])
def test_lost_best_weights_are_replaced_by_those_of_the_last_checkpoint(
    phantom_store, tmp_path, done, lose
):
    """At once, after a validation of them, in a run that goes on and in one that is over."""
    options = {"steps": 12, "validations": 3}
    fit = start(phantom_store, tmp_path, **options)
    fit.steps = done  # as if it was cut there, or is over
    fit.run()
    lose(weights_file(tmp_path, "best"))
    again = start(phantom_store, tmp_path, **options)
    (warning,) = again.warnings
    assert "best.npz must" in warning
    assert not again.is_over
    again.steps = done  # to see what is done before the next step
    again.run()
    assert again.is_over
    arrays, state = load_checkpoint(weights_file(tmp_path, "best"))
    assert (state["step"], state["best"]) == (done, validations_of(tmp_path)[-1]["mean_dice"])
    np.testing.assert_array_equal(arrays["model/000"], weights(tmp_path)["model/000"])
    steps = [event["step"] for event in validations_of(tmp_path)]
    assert steps == sorted(set(steps))


def test_without_validation_the_last_weights_are_the_best_again(phantom_store, tmp_path):
    split = phantom_store.manifest.split
    split = {"train": (*split["train"], *split["val"]), "val": (), "test": split["test"]}
    store = Store(phantom_store.folder, remake(phantom_store.manifest, split=split))
    start(store, tmp_path, steps=3).run()
    weights_file(tmp_path, "best").unlink()
    again = start(store, tmp_path, steps=3)
    assert (again.is_over, len(again.warnings)) == (True, 1)
    best = weights(tmp_path, "best")
    np.testing.assert_array_equal(best["model/000"], weights(tmp_path)["model/000"])


def test_a_run_killed_before_its_first_checkpoint_starts_its_log_anew(phantom_store, tmp_path):
    append_event(tmp_path, {"event": "step", "step": 1})
    start(phantom_store, tmp_path)
    assert read_events(tmp_path) == []
