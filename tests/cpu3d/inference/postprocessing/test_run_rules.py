"""The post-processing of a run: decided once, kept, applied, and decided again where it must be."""

import dataclasses
import json
import re

import numpy as np
import pytest

from cpu3d.data.manifest import remake
from cpu3d.data.nifti import read_volume
from cpu3d.data.store import open_store, write_store
from cpu3d.errors import InputError
from cpu3d.inference import evaluate, predict
from cpu3d.inference.postprocessing import run_rules as postprocessing
from cpu3d.inference.postprocessing.evidence import Means
from cpu3d.inference.postprocessing.rules import Rule
from cpu3d.inference.postprocessing.run_rules import (
    FILE,
    LACKS_STORE,
    OPEN,
    choose_rules,
    choose_rules_after_training,
    postprocessing_of,
    read_rules,
    why_without_rules,
)
from cpu3d.inference.scores_file import scores_path
from cpu3d.run.config_json import load_config, save_config
from cpu3d.run.heartbeat import read_heartbeats
from cpu3d.training.heartbeat_writer import HeartbeatWriter
from cpu3d.util.lock import locked
from tests.cpu3d.conftest import LABELS, LPS_2MM, make_store
from tests.cpu3d.runs import run_command


@pytest.fixture
def predictor(fake_predictor, monkeypatch):
    """The fake predictor with a false part of 2 voxels of WT, far from the tumour."""
    fake_predictor.labels = {**LABELS, 9: "ignore"}
    answer = fake_predictor.probabilities
    fake_predictor.error = None

    def with_island(*case):
        if fake_predictor.error:
            raise fake_predictor.error
        answers = answer(*case)
        place = 2 if answers[15:].any() else 26
        answers[place : place + 2, 5, 5, 0] = 0.9
        return answers

    monkeypatch.setattr(fake_predictor, "probabilities", with_island)
    for command in (evaluate, postprocessing, predict):
        monkeypatch.setattr(
            command, "trained_predictors", lambda runs, *_: [fake_predictor] * len(runs)
        )
    return fake_predictor


def write_weights(run, content=b"weights"):
    (run / "checkpoints").mkdir(exist_ok=True)
    (run / "checkpoints/best.npz").write_bytes(content)


@pytest.fixture
def run(tiny_run, tmp_path, predictor):
    """A trained run with two validation cases, whose network answers right but for an island. Every
    second slice is annotated: two or three of a tumour's five, in which there may be no ET."""
    split = {"train": ("a", "d"), "val": ("b", "c"), "test": ("e", "f")}
    geometry = dataclasses.replace(LPS_2MM, shape=(30, 10, 8))
    folders = (tmp_path / "long", tmp_path / "long source")
    store = make_store(*folders, split=split, geometry=geometry, ignore=9)
    of_store = {"store": str(store.folder), "split_hash": store.manifest.split_hash}
    save_config(dataclasses.replace(load_config(tiny_run), **of_store), tiny_run)
    write_weights(tiny_run)
    predictor.config = load_config(tiny_run)
    return tiny_run


def applied(run, weights="best"):
    return postprocessing_of(run, load_config(run), weights)


def after_training(run, store_folder):
    with HeartbeatWriter(run, say=print) as heartbeat:
        choose_rules_after_training(run, store_folder, heartbeat)


def test_a_run_decides_once_and_again_when_its_weights_are_others(run, predictor):
    assert "not decided" in applied(run).off
    rules = choose_rules(run)
    # A tumour of 125 voxels and an island of 2, which is 1.6 % of it.
    assert rules.chosen.rules == {"WT": Rule(share=0.03, stays_from=0.95)}
    assert rules.cases == 2
    assert rules.cases_with == {"WT": 2, "TC": 2, "ET": 1}
    assert rules.before["WT"] == Means(0.5, 1, pytest.approx((100 / 102 + 150 / 152) / 2))
    assert rules.after["WT"] == Means(1, 0, 1)
    predictor.error = AssertionError("no network is asked again")
    assert choose_rules(run) == rules == read_rules(run)
    assert applied(run) == rules.chosen
    assert "best weights" in applied(run, "last").off
    config = load_config(run)
    assert why_without_rules(run, config) == ""
    write_weights(run, b"others")
    assert "not decided for these weights" in applied(run).off
    assert why_without_rules(run, config) == OPEN
    predictor.error = None
    assert choose_rules(run).chosen == rules.chosen == applied(run)
    save_config(dataclasses.replace(config, split_hash="another"), run)
    assert "not decided for these weights" in applied(run).off
    assert why_without_rules(run, load_config(run)) == LACKS_STORE


@pytest.mark.parametrize(
    ("folder", "command"),
    [(".", choose_rules), ("evaluation", lambda run: run_command(evaluate, "--run", run))],
)
def test_one_process_at_a_time_decides_or_scores(run, folder, command):
    (run / folder).mkdir(exist_ok=True)
    with locked(run / folder, "run"), pytest.raises(InputError, match="one process at a time"):
        command(run)
    command(run)


@pytest.mark.parametrize(
    ("spoil", "got"),
    [
        (lambda content: content.pop("chosen"), "chosen"),
        (lambda content: content["before"].pop("ET"), "same regions"),
    ],
)
def test_damaged_rules_are_refused(run, spoil, got):
    choose_rules(run)
    content = json.loads((run / FILE).read_text())
    spoil(content)
    (run / FILE).write_text(json.dumps(content))
    with pytest.raises(InputError, match=rf"{FILE} must be .* got .*{got}.*`train`"):
        applied(run)


def test_where_no_region_is_in_two_cases_no_network_is_asked(run, predictor, capsys):
    store = open_store(load_config(run).store)
    cases = list(store.manifest.cases)
    cases[2] = dataclasses.replace(cases[2], label_voxels={}, files={"x": cases[2].files["x"]})
    write_store(store.folder, remake(store.manifest, cases=cases))
    predictor.error = AssertionError("asked")
    after_training(run, store.folder)
    assert "no region is in 2" in capsys.readouterr().err
    rules = choose_rules(run)
    assert (rules.cases, rules.cases_with) == (1, {"WT": 1, "TC": 1, "ET": 0})


def test_after_a_training_a_failure_is_printed_and_ctrl_c_leaves_the_run_as_it_was(
    run, predictor, monkeypatch, capsys
):
    store = load_config(run).store
    before = {path.name for path in run.iterdir()}
    for error, word in ((OSError("disk full"), "disk full"), (MemoryError(), "MemoryError")):
        monkeypatch.setattr(predictor, "error", error)
        after_training(run, store)
        assert re.search(rf"post-processing, \S+ m?s: off.*{word}", capsys.readouterr().err)
        failed = read_heartbeats(run)[0]
        assert failed.exit_code == 0, "the run is whole"
        assert word in failed.reason
    monkeypatch.setattr(predictor, "error", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt, match="the same command"):
        after_training(run, store)
    assert {path.name for path in run.iterdir()} - before == {"heartbeats"}
    last = read_heartbeats(run)[0]
    assert last.exit_code == 130
    assert "same command" in last.reason


def test_scores_are_of_what_is_left_and_raw_ones_of_the_answer(run):
    def scores(*words):
        assert run_command(evaluate, "--run", run, *words) == 0
        return json.loads(scores_path(run).read_text())

    assert scores()["summary"]["WT"]["false_positives"]["mean"] == 1  # nothing is decided yet
    choose_rules(run)
    decided, raw = scores(), scores("--raw")
    assert (decided["summary"]["WT"]["false_positives"]["mean"], decided["mean_dice"]) == (0, 1)
    assert raw["summary"]["WT"]["lesion_dice"]["mean"] == 0.5
    assert {case["postprocessing"] for case in decided["cases"]} == {applied(run).words}
    assert "--raw" in raw["cases"][0]["postprocessing"]


def test_predictions_lack_what_is_removed_and_probabilities_keep_it(run, tmp_path, capsys):
    def predicted(*words):
        words = ("--image", tmp_path / "long source/e.nii.gz", "--out", tmp_path / "out", *words)
        assert run_command(predict, "--run", run, *words) == 0
        return json.loads((tmp_path / "out/e.json").read_text())

    choose_rules(run)
    content, printed = predicted("--probabilities"), capsys.readouterr().out
    assert content["volumes_ml"]["WT"] == pytest.approx(0.25)
    assert applied(run).words == content["postprocessing"]
    assert applied(run).words in " ".join(printed.split())
    probability = read_volume(tmp_path / "out" / content["probabilities"]["WT"])[0]
    assert np.count_nonzero(probability >= 0.5) == 127
    assert predicted("--raw", "--overwrite")["volumes_ml"]["WT"] == pytest.approx(0.254)
