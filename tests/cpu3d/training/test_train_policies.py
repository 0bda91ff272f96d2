"""Runs under every memory policy and in micro-batches: the same training, and who picks how it is computed."""

import dataclasses
import json
import os
import signal
import time

import nibabel
import numpy as np
import pytest

from cpu3d.__main__ import main
from cpu3d.config import load_config, save_config
from cpu3d.errors import DivergedError, DoesNotFitError, InputError
from cpu3d.resolve import resolve
from cpu3d.training.checkpoint import load_checkpoint, newest
from cpu3d.training.feeds import Parts
from cpu3d.training.plan_lines import plan_lines
from cpu3d.training.train import train
from memory_estimator.estimate import estimate
from memory_estimator.host import read_host
from tests.cpu3d.runs import SMALL, assert_cut_and_continued_is_uninterrupted, start, weights

# --- Policies ---


@pytest.mark.parametrize(("policy", "batch", "steps"), [("balanced", 1, 12), ("lean", 2, 6)])
def test_under_a_leaner_policy_a_run_trains_goes_on_to_the_bit_is_scored_and_predicts(
    phantom_store, tmp_path, monkeypatch, policy, batch, steps
):
    """At batch 2 in two micro-batches."""
    assert_cut_and_continued_is_uninterrupted(phantom_store, tmp_path, monkeypatch, steps, policy=policy, batch=batch)
    run = tmp_path / "cut"
    assert load_config(run).unet.policy == policy
    assert main(["evaluate", "--run", str(run)]) == 0
    scores = json.loads((run / "evaluation" / "scores.json").read_text())
    assert len(scores["cases"]) == 1
    assert set(scores["summary"]) == {"WT", "TC", "ET"}
    image = phantom_store.folder.parent / "raw" / "imagesTr" / "BRATS_001.nii.gz"
    assert main(["predict", "--run", str(run), "--image", str(image), "--out", str(tmp_path / "out")]) == 0
    assert nibabel.load(tmp_path / "out" / image.name).shape == nibabel.load(image).shape[:3]


def with_policies_priced(free_bytes, monkeypatch):
    """A host with this much free, where speed takes 4 GiB, balanced 2 in a tenth more time, lean 1 in a fifth more."""
    taken = {"speed": (4 * 2**30, 1.0), "balanced": (2 * 2**30, 1.1), "lean": (2**30, 1.2)}

    def made(job, *more, **others):
        upper_bound_bytes, step_s = taken[job.policy]
        return dataclasses.replace(estimate(job, *more, **others), upper_bound_bytes=upper_bound_bytes, step_s=step_s)

    monkeypatch.setattr("cpu3d.memory_plan.estimate", made)
    host = dataclasses.replace(read_host(), available_bytes=free_bytes, cgroup_limit_bytes=None)
    monkeypatch.setattr("cpu3d.training.train.read_host", lambda: host)


@pytest.mark.policy_left_open
def test_the_policy_is_picked_by_what_is_free_then_said_stored_and_kept(phantom_store, tmp_path, monkeypatch, capsys):
    def go(free_gib, **settings):
        with_policies_priced(free_gib * 2**30, monkeypatch)
        config = train(phantom_store.folder, tmp_path, settings={**SMALL, **settings})
        assert load_config(tmp_path) == config
        return config.unet.policy, capsys.readouterr().err

    policy, said = go(3, epochs=1)
    assert policy == "balanced"
    assert "plan: policy balanced: speed would take up to 4.00 GiB of 3.00 GiB free" in said
    policy, said = go(5, epochs=2)  # the same training goes on, whatever is free by now
    assert policy == "balanced"
    assert "plan: policy" not in said
    assert "to the bit" not in said
    policy, said = go(5, epochs=3, policy="auto")
    assert policy == "speed"
    assert "plan: policy speed: the fastest, and fits 5.00 GiB free" in said
    assert "note: this run was under policy balanced before, so it goes on alike but not to the bit" in said


def test_a_policy_that_is_asked_for_is_held_against_memory_before_anything_is_written(
    phantom_store, tmp_path, monkeypatch
):
    with_policies_priced(3 * 2**30, monkeypatch)
    with pytest.raises(DoesNotFitError, match=r"what fits: --policy balanced: up to 2\.00 GiB"):
        train(phantom_store.folder, tmp_path / "run", settings={**SMALL, "policy": "speed"})
    assert not (tmp_path / "run").exists()


@pytest.mark.policy_left_open
def test_a_run_is_computed_as_it_was_before_unless_a_setting_says_otherwise(phantom_store, tmp_path):
    def resolved(recipe=None, **settings):
        return resolve(phantom_store, tmp_path, read_host(), {**SMALL, "batch": 4, **settings}, recipe)

    def way(*args, **settings):
        config = resolved(*args, **settings)
        return config.unet.policy, config.micro

    assert way() == way(policy="auto") == ("speed", 1)
    save_config(resolved("brats-regions", policy="lean", micro_batch=2), tmp_path)
    assert way() == way("brats-regions") == ("lean", 2)
    assert way("brats-regions", policy="balanced", micro_batch=4) == ("balanced", 4)
    for recipe in ("brats-regions", None):
        with pytest.raises(InputError, match=r"^batch must stay as the run was started, got 3 for 4"):
            resolved(recipe, batch=3)


def test_a_run_with_batch_norm_is_computed_in_its_micro_batches_to_the_end(phantom_store, tmp_path):
    def resolved(**settings):
        return resolve(phantom_store, tmp_path, read_host(), {**SMALL, "norm": "batch", "batch": 4, **settings}, None)

    save_config(resolved(micro_batch=2), tmp_path)
    assert resolved(policy="lean").micro == 2
    with pytest.raises(InputError, match=r"^micro_batch must stay as the run was started, got 1 for 2; "):
        resolved(micro_batch=1)
    with pytest.raises(InputError, match=r"^batch must stay as the run was started, got 3 for 4; [^\n]*$"):
        resolved(batch=3)


# --- Micro-batches ---


def on_the_second_part(fit, monkeypatch, act):
    """Let `act` change what comes of the second micro-batch of the second step, at batch 2 in two parts."""
    compute, computed = fit.learner._accumulate, []

    def accumulate(image, target):
        computed.append(1)
        answer = compute(image, target)
        return act(answer) if len(computed) == 4 else answer

    monkeypatch.setattr(fit.learner, "_accumulate", accumulate)


def test_a_part_s_loss_that_is_not_finite_names_its_case_and_leaves_the_weights(phantom_store, tmp_path, monkeypatch):
    fit = start(phantom_store, tmp_path, batch=2, save_minutes=0.0)
    on_the_second_part(fit, monkeypatch, lambda answer: (answer[0] * np.nan, answer[1]))
    culprit = fit.feeds.case_ids(1)[1]
    with pytest.raises(
        DivergedError, match=rf"loss and gradients must be finite, got nan at step 2 on {culprit}; .*still holds step 1"
    ):
        fit.run()
    for name, array in fit.learner.arrays().items():
        if name != "optimizer/001":  # the learning rate
            np.testing.assert_array_equal(array, weights(tmp_path)[name], err_msg=name)


def test_an_interrupt_between_two_parts_ends_after_the_whole_step(phantom_store, tmp_path, monkeypatch):
    fit = start(phantom_store, tmp_path, batch=2)
    on_the_second_part(fit, monkeypatch, lambda answer: os.kill(os.getpid(), signal.SIGINT) or answer)
    with pytest.raises(KeyboardInterrupt, match="saved after step 2"):
        fit.run()
    arrays, state = load_checkpoint(newest(tmp_path).path)
    assert (state["step"], arrays["updates"]) == (2, 2)


def test_micro_batches_are_the_batch_s_volumes_in_its_order(phantom_store, tmp_path):
    whole = start(phantom_store, tmp_path / "whole", batch=4, micro_batch=4).feeds.training(1, 2)
    parts = start(phantom_store, tmp_path / "parts", batch=4, micro_batch=2).feeds.training(1, 2)
    ((image, target),) = whole
    images, targets = zip(*parts)
    assert len(images) == 2
    np.testing.assert_array_equal(np.concatenate(images), image)
    np.testing.assert_array_equal(np.concatenate(targets), target)


def test_the_plan_says_how_a_batch_is_computed_and_what_that_is_to_batch_norm(phantom_store, tmp_path):
    plan = "\n".join(plan_lines(start(phantom_store, tmp_path, batch=4, policy="balanced")))
    assert "steps at batch 4, 1 at a time" in plan
    assert "instance norm, float32, policy balanced, " in plan
    assert "batch norm" not in plan
    whole = "\n".join(plan_lines(start(phantom_store, tmp_path / "whole", batch=4, norm="batch")))
    assert "at a time" not in whole
    parts = "\n".join(plan_lines(start(phantom_store, tmp_path / "parts", batch=4, norm="batch", micro_batch=2)))
    assert "note: batch norm's statistics are of 2 of a batch's 4 volumes at a time, so training differs" in parts


def test_the_seconds_spent_waiting_for_micro_batches_are_counted():
    def given():
        for number in range(3):
            time.sleep(0.02)
            yield number

    parts, begin = Parts(given()), time.perf_counter()
    assert list(parts) == [0, 1, 2]
    assert 0.06 <= parts.waited_s < time.perf_counter() - begin
