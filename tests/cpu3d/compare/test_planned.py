import json
import os
import time

import pytest

from cpu3d.compare.planned import Evaluation, PlannedRun, is_evaluated, is_trained, unlike_options
from cpu3d.errors import InputError

OPTIONS = ("--steps", "4", "--seed", "0")


@pytest.mark.parametrize(
    ("end", "done"),
    [
        ({"reason": "finished", "step": 4}, True),
        ({"reason": "finished", "step": 3}, False),
        ({"reason": "interrupted", "step": 4}, False),
        ({"reason": "early stop", "step": 2}, True),
        ("none", False),
    ],
)
def test_a_run_is_trained_when_its_last_step_is_done(make_run, end, done):
    assert is_trained(PlannedRun("a", 0, make_run("a", scored=False, end=end), OPTIONS)) is done


def test_an_end_before_more_steps_is_none(make_run):
    folder = make_run("a", scored=False)
    with (folder / "log.jsonl").open("a") as file:
        file.write(json.dumps({"event": "start", "step": 4}) + "\n")
    assert not is_trained(PlannedRun("a", 0, folder, OPTIONS))


@pytest.mark.parametrize("steps", ["3", "5"])
def test_a_run_of_more_or_fewer_steps_is_another_one(make_run, steps):
    run = PlannedRun("a", 0, make_run("a", scored=False), ("--steps", steps, "--seed", "0"))
    with pytest.raises(InputError, match=f"got steps 4 for {steps}; move it away"):
        is_trained(run)


@pytest.mark.parametrize(
    ("settings", "options", "unlike"),
    [
        ({"learning_rate": 0.5}, (), ["learning_rate"]),
        ({"optimizer": "sgd", "warmup_steps": 2}, ("--warmup-steps", "2"), ["optimizer"]),
        ({"mode": "patch", "grid": (8, 8, 8)}, ("--mode", "patch", "--patch", "8", "8", "8"), []),
        ({"mode": "patch", "grid": (8, 8, 8)}, ("--mode", "patch", "--patch", "8", "8", "4"), ["grid"]),
        ({"save_minutes": 1.0, "read_mode": "ram", "store": "/elsewhere"}, (), []),
        ({}, ("--filters", "3", "--no-flip"), ["unet.filters", "augment.flip"]),
        ({}, ("--dtype", "bfloat16", "--device", "cpu"), ["unet.dtype"]),
        ({}, ("--dtype", "auto"), []),
        ({}, ("--recipe", "demo"), ["learning_rate", "warmup_steps", "validate_every", "augment.gain"]),
    ],
)
def test_options_are_held_against_what_a_run_is(make_run, settings, options, unlike):
    run = PlannedRun("a", 0, make_run("a", scored=False, **settings), (*OPTIONS, *options))
    named = [problem.split(" got ")[1].split()[0] for problem in unlike_options(run)]
    assert set(unlike) <= set(named)
    assert bool(unlike) == bool(named)


def test_a_run_that_is_not_there_is_unlike_nothing(tmp_path):
    run = PlannedRun("a", 0, tmp_path / "none", OPTIONS)
    assert unlike_options(run) == []
    assert not is_trained(run)


def test_younger_weights_and_other_tolerances_are_scored_again(make_run, tmp_path):
    folder = make_run("a")
    assert is_evaluated(folder, Evaluation())
    assert not is_evaluated(folder, Evaluation(tolerance_mm=2))
    assert not is_evaluated(folder, Evaluation("val"))
    assert not is_evaluated(folder, Evaluation(), tmp_path), "none are there"
    later = time.time() + 60
    os.utime(folder / "checkpoints" / "best.npz", (later, later))
    assert not is_evaluated(folder, Evaluation())


def test_scores_of_another_way_to_predict_do_not_count(make_run):
    """A whole-volume run scored by hand with a window is scored again as it was trained."""
    folder = make_run("a")
    path = folder / "evaluation" / "scores.json"
    path.write_text(path.read_text().replace('"flips": false', '"flips": true'))
    assert not is_evaluated(folder, Evaluation())
