"""All folds by one command: each case scored once, and what a cut leaves undone."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest

from cpu3d.__main__ import main
from cpu3d.errors import DivergedError, DoesNotFitError, InputError, Interrupted
from cpu3d.experiments import folds
from cpu3d.experiments.folds import train_folds
from cpu3d.experiments.runner import RunFailedError
from cpu3d.inference.postprocessing import run_rules
from cpu3d.inference.scores_file import read_scores, scores_path
from cpu3d.plan import make_plan
from cpu3d.report.folds import write_folds_report
from cpu3d.report.status import set_status
from cpu3d.run.checkpoint import checkpoints
from cpu3d.run.config_json import load_config, save_config
from cpu3d.run.log import append_event
from cpu3d.training.train import train
from cpu3d.util.lock import locked
from tests.cpu3d.experiments.conftest import SETTINGS, carried_out_here
from tests.cpu3d.runs import (
    HOST,
    assert_same_run,
    shown_cases,
    written_weights,
)

pytestmark = pytest.mark.usefixtures("without_pictures")


@pytest.fixture
def train_all(phantom_store):
    """train_all(folder): train and score two folds of the phantoms."""

    def call(folder, count=2, **settings):
        train_folds(phantom_store.folder, folder, count, settings=settings)

    return call


@pytest.fixture(scope="module")
def uncut(phantom_store, tmp_path_factory):
    """Folds that were trained without a cut. Read only."""
    folder = tmp_path_factory.mktemp("uncut")
    with pytest.MonkeyPatch.context() as patch:
        carried_out_here(patch)
        patch.setattr(folds, "write_folds_report", lambda folder: None)
        train_folds(phantom_store.folder, folder, 2, settings=SETTINGS)
    return folder


@pytest.fixture
def whole_folds(uncut, tmp_path):
    """The same, to change."""
    return Path(shutil.copytree(uncut, tmp_path / "whole"))


def page_of(folder):
    return write_folds_report(folder).read_text()


def held_out(folder, fold):
    scores = read_scores(scores_path(folder / f"fold-{fold}", "val"))
    return [case["case_id"] for case in scores["cases"]]


ALL = ["train fold-1", "evaluate fold-1", "train fold-2", "evaluate fold-2"]


def test_each_case_is_scored_once_by_the_fold_that_held_it_out(
    commands, train_all, phantom_store, tmp_path, capsys
):
    folder = tmp_path / "folds"
    train_all(folder, **SETTINGS)
    assert commands.seen() == ALL
    split = phantom_store.manifest.split
    scores = read_scores(scores_path(folder, "val"))
    known = sorted(split["train"] + split["val"])
    assert [case["case_id"] for case in scores["cases"]] == known
    assert sorted(held_out(folder, 1) + held_out(folder, 2)) == known, "test cases are untouched"
    assert [run["held_out"] for run in scores["runs"]] == [held_out(folder, 1), held_out(folder, 2)]
    # The network of fold 1 is right but for the island, that of fold 2 is a voxel off.
    for case in scores["cases"]:
        assert (case["regions"]["ET"]["dice"] == 1) is (case["case_id"] in held_out(folder, 1))
        assert case["regions"]["WT"]["false_positives"] == 1
    weights = ("best", "last")  # those that decide rules, and those that are scored
    assert commands.loaded == [(name, each) for name in ("fold-1", "fold-2") for each in weights]
    predictions = (folder / "evaluation/val/predictions").iterdir()
    assert sorted(path.name for path in predictions) == [f"{name}.nii.gz" for name in known]
    page = (folder / "report.html").read_text()
    # islands are removed by the rules of the other fold
    for words in (
        "last weights",
        "Mean Dice of the held-out cases",
        "1.00 \u2192 0.00",
        "1/2",
        "The folds together: removes parts of WT",
        "Every case",
    ):
        assert words in page
    assert len(shown_cases(folder / "report.html")) == 3
    out = capsys.readouterr().out
    assert "predicted" in out[: out.index("1.000")], "the plan is before the results"
    decided = json.loads((folder / "postprocessing.json").read_text())
    assert decided["cases"] == 5
    assert decided["chosen"]["rules"]["WT"], "the islands of all folds together"
    train_all(folder)
    assert commands.seen() == [], "all is done"
    assert " scored   " in capsys.readouterr().out


@pytest.mark.parametrize("cut_at", [0, 3])  # in the first training, in the last scoring
def test_the_same_command_continues_where_it_was_cut_and_ends_with_the_same_bits(
    commands, train_all, tmp_path, uncut, cut_at
):
    folder = tmp_path / "cut"
    commands.cut_at = cut_at
    with pytest.raises(Interrupted) as caught:
        train_all(folder, **SETTINGS)
    assert caught.value.exit_code == 130
    assert commands.seen() == ALL[: cut_at + 1]
    status = set_status(folder)
    assert status.state == "interrupted"
    assert "2/2" in status.detail
    assert main(["status", "--run", str(folder), "--json"]) == 1
    with pytest.raises(InputError, match=r"steps must be at least 4, .*got 2;"):
        train_all(folder, epochs=1)
    commands.cut_at = -1
    train_all(folder)
    assert commands.seen() == ALL[cut_at:], "what was done is not done again"
    for name in ("fold-1", "fold-2"):
        assert_same_run(folder / name, uncut / name)
    (folder / "fold-1/postprocessing.json").unlink()  # the folds decide together
    done = set_status(folder)
    assert (done.state, [fold.state for fold in done.runs]) == ("finished", ["scored"] * 2)
    assert re.search(r"report\.html has .*`predict --run", done.advice)
    assert done.seconds_left is None


@pytest.mark.parametrize(
    ("part", "settings", "problem"),
    [
        ("", {"filters": 8}, r"fold 1/2: .* got --filters 8 for 4"),
        ("", {"fold": "1/2"}, "without --fold, got 1/2"),
        ("", {"count": 3}, r"--folds must stay 2.*got 3"),
        ("fold-1", {}, "must be a folder of folds, got one run"),
    ],
)
def test_other_folds_than_were_begun_are_refused_by_name(
    train_all, whole_folds, part, settings, problem
):
    kept = (whole_folds / "folds.json").read_bytes()
    with pytest.raises(InputError, match=problem):
        train_all(whole_folds / part, **settings)
    assert (whole_folds / "folds.json").read_bytes() == kept


def test_folds_that_another_process_has_locked_are_refused(train_all, whole_folds):
    with (
        locked(whole_folds, "folder of folds"),
        pytest.raises(InputError, match="one process at a time"),
    ):
        train_all(whole_folds)


def test_a_greater_length_extends_all_folds_and_their_scores_are_made_again(
    commands, train_all, whole_folds
):
    train_all(whole_folds, epochs=3)
    assert commands.seen() == ALL
    for name in ("fold-1", "fold-2"):
        assert load_config(whole_folds / name).epochs == 3


def test_the_page_has_what_the_folds_have_in_common_once_and_what_differs_by_fold(whole_folds):
    for part, engine in ((1, "stock 2.15"), (2, "itex 2.15")):
        run = whole_folds / f"fold-{part}"
        append_event(run, {"event": "start", "step": 0, "engine": engine, "device": "cpu"})
    page = page_of(whole_folds)
    assert "stock 2.15 (1/2); itex 2.15 (2/2)" in page
    assert "cpu (1/2" not in page
    assert "Settings that differ" not in page
    save_config(dataclasses.replace(load_config(run), epochs=1), run)
    assert "Settings that differ" in page_of(whole_folds)
    shutil.rmtree(run)
    page = re.sub("<[^>]+>|\\s", " ", page_of(whole_folds))
    assert "Fold 2/2 is missing here (it has not begun)" in page
    assert re.search(r"2/2 +waiting", page)


def test_a_dry_run_has_the_plan_and_how_all_patients_come_into_the_folds(
    phantom_store, tmp_path, capsys
):
    words = ["train", "--store", str(phantom_store.folder), "--run", str(tmp_path / "folds")]
    words += ["--folds", "2", "--dry-run"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert re.search(r"1 test case .*untouched.*--split 1 0 0", said)
    assert "for all 2 folds" in said
    assert re.search("2/2 +to train +3 +2 +300 ", said)
    assert main([*words, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 2
    assert not (tmp_path / "folds").exists()


def test_folds_under_a_budget_of_minutes_are_trained_once(commands, train_all, tmp_path):
    train_all(tmp_path, **{**SETTINGS, "epochs": 50, "budget_minutes": 1e-6})
    assert commands.seen() == ALL
    train_all(tmp_path)
    assert commands.seen() == []


def test_what_does_not_fit_or_suit_is_refused_before_anything_is_written(
    commands, train_all, tmp_path, monkeypatch
):
    folder = tmp_path / "folds"
    with pytest.raises(InputError, match="at most as many"):
        train_all(folder, 6, **SETTINGS)
    small = dataclasses.replace(HOST, available_bytes=10 * 2**20)
    monkeypatch.setattr(folds, "read_host", lambda: small)
    with pytest.raises(DoesNotFitError, match="got 10 MiB free"):
        train_all(folder, **SETTINGS)
    assert not folder.exists()


def test_all_folds_start_from_the_same_weights_and_need_them_only_once(
    commands, train_all, phantom_store, tmp_path
):
    own = make_plan(phantom_store, tmp_path / "nowhere", HOST, SETTINGS).config
    elsewhere = dataclasses.replace(own, store="/nowhere", split_hash="0" * 12)
    source = written_weights(elsewhere, tmp_path / "source")
    folder = tmp_path / "folds"
    train_all(folder, **SETTINGS, init=str(source))
    records = [load_config(folder / f"fold-{number}").init_record for number in (1, 2)]
    assert records[0] == records[1]
    assert ">frozen<" in page_of(folder)
    assert records[0].file == str(source / "checkpoints" / "best.npz")
    shutil.rmtree(source)
    train_all(folder, epochs=3)
    written_weights(elsewhere, source, seed=1)
    shutil.rmtree(folder / "fold-2")
    with pytest.raises(InputError, match="SHA-256"):
        train_all(folder)
    assert not (folder / "fold-2").exists()


def test_a_fold_that_diverges_is_named_and_the_others_go_on(
    commands, train_all, phantom_store, tmp_path
):
    folder = tmp_path / "folds"
    settings = {**SETTINGS, "epochs": 1, "fold": "1/2"}
    train(phantom_store.folder, folder / "fold-1", settings=settings)
    commands.diverges = "fold-1"
    with pytest.raises(RunFailedError, match="fold 1/2 without: train diverged") as caught:
        train_all(folder, **SETTINGS)
    assert caught.value.exit_code == DivergedError.exit_code
    assert commands.seen() == ["train fold-1", "train fold-2", "evaluate fold-2"]
    status = set_status(folder)
    assert status.state == "diverged"
    assert [fold.state for fold in status.runs] == ["diverged", "scored"]
    commands.diverges = ""
    with pytest.raises(RunFailedError):
        train_all(folder)
    assert commands.seen() == [], "it would end so again"
    train_all(folder, learning_rate=0.005)
    assert commands.seen() == ["train fold-1", "evaluate fold-1"]


def test_folds_that_were_trained_elsewhere_are_only_scored(
    commands, train_all, phantom_store, tmp_path
):
    folder = tmp_path / "folds"
    train(phantom_store.folder, folder / "fold-2", settings={**SETTINGS, "fold": "2/2"})
    run_rules.choose_rules(folder / "fold-2")
    with pytest.raises(InputError, match=r"fold 2/2 beside fold 1: .* --filters 4 for"):
        train_all(folder)
    train_all(folder, **SETTINGS)
    assert commands.seen() == ["train fold-1", "evaluate fold-1", "evaluate fold-2"]


def test_a_fold_whose_last_weights_are_lost_is_trained_on(
    commands, train_all, whole_folds, tmp_path, capsys
):
    """And not scored, nor does it predict, with those of an earlier step."""
    saved = checkpoints(whole_folds / "fold-2")
    saved[0].write_bytes(b"PK")
    image = ["--image", str(tmp_path), "--out", str(tmp_path / "out")]
    assert main(["predict", "--run", str(whole_folds), *image]) == 2
    assert "got 2/2 without" in capsys.readouterr().err
    train_all(whole_folds)
    assert commands.seen() == ["train fold-2", "evaluate fold-2"]
    assert checkpoints(whole_folds / "fold-2") == saved


@pytest.mark.parametrize("damage", ["no label map", "of another fold", "half-written"])
def test_a_fold_whose_scores_are_not_whole_is_scored_again(
    commands, train_all, whole_folds, damage
):
    summary = read_scores(scores_path(whole_folds, "val"))["summary"]
    path = scores_path(whole_folds / "fold-1", "val")
    if damage == "no label map":
        next((path.parent / "predictions").iterdir()).unlink()
    elif damage == "of another fold":
        path.write_text(path.read_text().replace('"fold": "1/2"', '"fold": "2/2"'))
    else:
        path.write_text('{"schema": 1, "cases": [')
    status = set_status(whole_folds)
    assert [fold.state for fold in status.runs] == ["finished", "scored"]
    assert status.state == "unknown"
    assert "Fold 1/2 is missing" in page_of(whole_folds)
    train_all(whole_folds)
    assert commands.seen() == ["evaluate fold-1"]
    assert read_scores(scores_path(whole_folds, "val"))["summary"] == summary
    assert set_status(whole_folds).is_fine


def test_the_folds_together_predict_and_are_scored_on_untouched_cases(commands, whole_folds):
    assert main(["evaluate", "--run", str(whole_folds)]) == 0
    assert commands.loaded == [("fold-1", "last"), ("fold-2", "last")]
    path = scores_path(whole_folds)
    scores = read_scores(path)
    assert (scores["untouched"], len(scores["runs"])) == (True, 2)
    assert "removes parts of WT" in scores["cases"][0]["postprocessing"]
    assert scores["cases"][0]["regions"]["WT"]["false_positives"] == 0
    assert "Untouched cases" in page_of(whole_folds)
    scores["runs"][0]["weights_sha256"] = "of earlier ones"
    for damaged in (json.dumps(scores), "{"):
        path.write_text(damaged)
        page = page_of(whole_folds)
        assert "The scores of the test cases" in page
        assert "Untouched cases" not in page


def test_what_trains_one_run_takes_no_folds(phantom_store, uncut, capsys):
    assert main(["train", "--run", str(uncut), "--store", str(phantom_store.folder)]) == 2
    assert re.search(
        r"got a folder of folds with 2 runs; .* such as \S+fold-1", capsys.readouterr().err
    )


def test_one_of_several_workers_trains_no_folds(train_all, tmp_path, monkeypatch):
    cluster = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
    with pytest.raises(InputError, match="got one of 2 workers"):
        train_all(tmp_path)
