"""All folds by one command: each case scored once, and what a cut leaves undone."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest

from cpu3d.__main__ import main
from cpu3d.data.stores.prepare import prepare
from cpu3d.errors import DivergedError, DoesNotFitError, InputError, Interrupted
from cpu3d.experiments import folds
from cpu3d.experiments.folds import train_folds
from cpu3d.experiments.runner import RunFailedError
from cpu3d.inference.postprocessing import run_rules
from cpu3d.inference.runs import seen_notes
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
    steps_of,
    written_weights,
)

WEIGHTS = {"train": 2, "val": 3}


@pytest.fixture(scope="module")
def uncut(phantom_store, tmp_path_factory):
    """Folds that were trained without a cut. Read only."""
    folder = tmp_path_factory.mktemp("uncut")
    with pytest.MonkeyPatch.context() as patch:
        carried_out_here(patch)
        train_folds(phantom_store.folder, folder, 2, settings=SETTINGS)
    return folder


@pytest.fixture
def without_pictures(monkeypatch):
    """Pages without drawn pictures, which take most of their time: the page of
    `test_each_case_is_scored_once_by_the_fold_that_held_it_out` has them."""
    for name in ("runs.chart", "pictures.strips"):
        monkeypatch.setattr(f"cpu3d.report.{name}", lambda *data, **options: b"no picture")


@pytest.fixture
def whole_folds(uncut, without_pictures, tmp_path):
    """The same, to change."""
    return Path(shutil.copytree(uncut, tmp_path / "whole"))


def held_out(folder, fold):
    scores = read_scores(scores_path(folder / f"fold-{fold}", "val"))
    return [case["case_id"] for case in scores["cases"]]


ALL = ["train fold-1", "evaluate fold-1", "train fold-2", "evaluate fold-2"]


def test_each_case_is_scored_once_by_the_fold_that_held_it_out(
    commands, phantom_store, tmp_path, capsys
):
    folder = tmp_path / "folds"
    commands.pages = True
    train_folds(phantom_store.folder, folder, 2, settings=SETTINGS)
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
    assert commands.loaded == [("fold-1", "last"), ("fold-2", "last")]
    for case_id in known:
        assert (folder / "evaluation" / "val" / "predictions" / f"{case_id}.nii.gz").is_file()
    page = (folder / "report.html").read_text(encoding="utf-8")
    for words in ("last weights", "Mean Dice of the held-out cases", "Post-processing", "1/2"):
        assert words in page
    assert len(shown_cases(folder / "report.html")) == 3
    out = capsys.readouterr().out
    assert "predicted" in out[: out.index("1.000")], "the plan is before the results"
    decided = json.loads((folder / "postprocessing.json").read_text())
    assert decided["cases"] == 5
    assert decided["chosen"]["rules"]["WT"], "the islands of all folds together"
    commands.pages = False
    train_folds(phantom_store.folder, folder, 2)
    assert commands.seen() == [], "all is done"


def test_folds_together_are_scored_on_test_cases_alone(whole_folds, tmp_path, capsys):
    words = ["evaluate", "--run", str(whole_folds), "--split", "val", "--out", str(tmp_path)]
    assert main(words) == 2
    assert "--split must be test for folds together, got val" in capsys.readouterr().err


@pytest.mark.parametrize("cut_at", [0, 3])  # in the first training, in the last scoring
def test_the_same_command_continues_where_it_was_cut_and_ends_with_the_same_bits(
    commands, phantom_store, tmp_path, uncut, cut_at
):
    folder = tmp_path / "cut"
    commands.cut_at = cut_at
    with pytest.raises(Interrupted) as caught:
        train_folds(phantom_store.folder, folder, 2, settings=SETTINGS)
    assert caught.value.exit_code == 130
    assert commands.seen() == ALL[: cut_at + 1]
    status = set_status(folder)
    assert (status.state, status.is_fine) == ("interrupted", False)
    assert "2/2" in status.detail
    assert main(["status", "--run", str(folder), "--json"]) == 1
    commands.cut_at = -1
    train_folds(phantom_store.folder, folder, 2)
    assert commands.seen() == ALL[cut_at:], "what was done is not done again"
    for name in ("fold-1", "fold-2"):
        assert_same_run(folder / name, uncut / name, keep=3)
    first, second = (read_scores(scores_path(each, "val"))["summary"] for each in (folder, uncut))
    assert first == second
    done = set_status(folder)
    assert (done.state, done.is_fine) == ("finished", True)
    assert [fold.state for fold in done.runs] == ["scored", "scored"]


@pytest.mark.parametrize(
    ("part", "count", "settings", "problem"),
    [
        ("", 2, {"filters": 8}, r"fold 1/2: .* got --filters 8 for 4"),
        ("", 2, {"fold": "1/2"}, "without --fold, got 1/2"),
        ("", 2, {"epochs": 1}, "fold 1/2: steps must be at least 4, .*got 2;"),
        ("", 3, {}, r"--folds must stay 2.*got 3"),
        ("fold-1", 2, {}, "must be a folder of folds, got one run"),
    ],
)
def test_other_folds_than_were_begun_are_refused_by_name(
    commands, phantom_store, whole_folds, part, count, settings, problem
):
    kept = (whole_folds / "folds.json").read_bytes()
    with pytest.raises(InputError, match=problem):
        train_folds(phantom_store.folder, whole_folds / part, count, settings=settings)
    assert commands.seen() == []
    assert (whole_folds / "folds.json").read_bytes() == kept


def test_folds_that_another_process_has_locked_are_refused(commands, phantom_store, whole_folds):
    with (
        locked(whole_folds, "folder of folds"),
        pytest.raises(InputError, match="one process at a time"),
    ):
        train_folds(phantom_store.folder, whole_folds, 2)


def test_a_greater_length_extends_all_folds_and_their_scores_are_made_again(
    commands, phantom_store, whole_folds
):
    train_folds(phantom_store.folder, whole_folds, 2, settings={"epochs": 3})
    assert commands.seen() == ALL
    for name in ("fold-1", "fold-2"):
        steps = [event["step"] for event in steps_of(whole_folds / name)]
        assert steps == list(range(1, len(steps) + 1))
        assert load_config(whole_folds / name).epochs == 3


def test_the_page_has_what_the_folds_have_in_common_once_and_what_differs_by_fold(whole_folds):
    for part, engine in ((1, "stock 2.15"), (2, "itex 2.15")):
        run = whole_folds / f"fold-{part}"
        append_event(run, {"event": "start", "step": 0, "engine": engine, "device": "cpu"})
    page = write_folds_report(whole_folds).read_text(encoding="utf-8")
    assert "stock 2.15 (1/2); itex 2.15 (2/2)" in page
    assert "cpu (1/2" not in page
    assert "Settings that differ" not in page
    save_config(dataclasses.replace(load_config(run), epochs=1), run)
    page = re.sub(r">\s+<", "><", write_folds_report(whole_folds).read_text(encoding="utf-8"))
    assert "<td>epochs</td><td>2</td><td>1</td>" in page


def test_a_dry_run_has_the_plan_and_how_all_patients_come_into_the_folds(
    phantom_store, tmp_path, capsys
):
    words = ["train", "--store", str(phantom_store.folder), "--run", str(tmp_path / "folds")]
    words += ["--folds", "2", "--dry-run"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert re.search(r"1 test case .*untouched.*--split 1 0 0", said)
    assert "for all 2 folds" in said
    assert main([*words, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 2
    assert not (tmp_path / "folds").exists()


def test_folds_under_a_budget_of_minutes_are_trained_once(commands, phantom_store, tmp_path):
    settings = {**SETTINGS, "epochs": 50, "budget_minutes": 1e-6}
    train_folds(phantom_store.folder, tmp_path / "folds", 2, settings=settings)
    assert commands.seen() == ALL
    train_folds(phantom_store.folder, tmp_path / "folds", 2)
    assert commands.seen() == []


def test_what_does_not_fit_or_suit_is_refused_before_anything_is_written(
    commands, phantom_store, tmp_path, monkeypatch
):
    folder = tmp_path / "folds"
    with pytest.raises(InputError, match="at most as many"):
        train_folds(phantom_store.folder, folder, 6, settings=SETTINGS)
    small = dataclasses.replace(HOST, available_bytes=10 * 2**20)
    monkeypatch.setattr(folds, "read_host", lambda: small)
    with pytest.raises(DoesNotFitError, match="got 10 MiB free"):
        train_folds(phantom_store.folder, folder, 2, settings=SETTINGS)
    assert not folder.exists()
    assert commands.seen() == []


@pytest.mark.usefixtures("without_pictures")
def test_all_folds_start_from_the_same_weights_and_need_them_only_once(
    commands, phantom_store, tmp_path
):
    own = make_plan(phantom_store, tmp_path / "nowhere", HOST, SETTINGS).config
    elsewhere = dataclasses.replace(own, store="/nowhere", split_hash="0" * 12)
    source = written_weights(elsewhere, tmp_path / "source")
    folder = tmp_path / "folds"
    train_folds(phantom_store.folder, folder, 2, settings={**SETTINGS, "init": str(source)})
    records = [load_config(folder / f"fold-{number}").init_record for number in (1, 2)]
    assert records[0] == records[1]
    assert records[0].file == str(source / "checkpoints" / "best.npz")
    shutil.rmtree(source)
    train_folds(phantom_store.folder, folder, 2, settings={"epochs": 3})
    written_weights(elsewhere, source, seed=1)
    shutil.rmtree(folder / "fold-2")
    with pytest.raises(InputError, match="SHA-256"):
        train_folds(phantom_store.folder, folder, 2, settings={"epochs": 3})
    assert not (folder / "fold-2").exists()


@pytest.mark.usefixtures("without_pictures")
def test_a_fold_that_diverges_is_named_and_the_others_go_on(
    commands, phantom_store, tmp_path, capsys
):
    folder = tmp_path / "folds"
    train(
        phantom_store.folder,
        folder / "fold-1",
        settings={**SETTINGS, "epochs": 1, "fold": "1/2"},
    )
    commands.pages = True
    commands.diverges = "fold-1"
    with pytest.raises(RunFailedError, match="fold 1/2 without: train diverged") as caught:
        train_folds(phantom_store.folder, folder, 2, settings=SETTINGS)
    assert caught.value.exit_code == DivergedError.exit_code
    assert commands.seen() == ["train fold-1", "train fold-2", "evaluate fold-2"]
    assert "Fold 1/2 is missing" in (folder / "report.html").read_text(encoding="utf-8")
    status = set_status(folder)
    assert (status.state, [fold.state for fold in status.runs]) == (
        "diverged",
        ["diverged", "scored"],
    )
    image = ["--image", str(tmp_path), "--out", str(tmp_path / "out")]
    assert main(["predict", "--run", str(folder), *image]) == 2
    assert "1/2 without" in capsys.readouterr().err
    commands.diverges = ""
    with pytest.raises(RunFailedError):
        train_folds(phantom_store.folder, folder, 2)
    assert commands.seen() == [], "it would end so again"
    train_folds(phantom_store.folder, folder, 2, settings={"learning_rate": 0.005})
    assert commands.seen() == ["train fold-1", "evaluate fold-1"]


def test_folds_that_were_trained_elsewhere_are_only_scored(commands, phantom_store, tmp_path):
    folder = tmp_path / "folds"
    train(phantom_store.folder, tmp_path / "1", settings={**SETTINGS, "fold": "1/2"})
    run_rules.choose_rules(tmp_path / "1")
    folder.mkdir()
    (tmp_path / "1").rename(folder / "fold-1")
    with pytest.raises(InputError, match=r"fold 2/2 beside fold 1: .* got --seed 1 for 0;|--seed"):
        train_folds(phantom_store.folder, folder, 2, settings={**SETTINGS, "seed": 1})
    commands.cut_at = 1
    with pytest.raises(Interrupted):
        train_folds(phantom_store.folder, folder, 2, settings=SETTINGS)
    assert commands.seen() == ["evaluate fold-1", "train fold-2"]


def test_a_fold_whose_last_weights_are_lost_is_trained_on(
    commands, phantom_store, whole_folds, tmp_path, capsys
):
    """And not scored, nor does it predict, with those of an earlier step."""
    saved = checkpoints(whole_folds / "fold-2")
    saved[0].write_bytes(b"PK")
    image = ["--image", str(tmp_path), "--out", str(tmp_path / "out")]
    assert main(["predict", "--run", str(whole_folds), *image]) == 2
    assert "got 2/2 without" in capsys.readouterr().err
    train_folds(phantom_store.folder, whole_folds, 2)
    assert commands.seen() == ["train fold-2", "evaluate fold-2"]
    assert checkpoints(whole_folds / "fold-2") == saved


@pytest.mark.parametrize("scored", [True, False])
def test_a_fold_that_was_killed_before_its_own_rules_were_decided_gets_them(
    commands, phantom_store, whole_folds, scored
):
    run = whole_folds / "fold-2"
    kept = (run / run_rules.FILE).read_bytes()
    (run / run_rules.FILE).unlink()
    if not scored:
        shutil.rmtree(run / "evaluation")
    train_folds(phantom_store.folder, whole_folds, 2)
    assert commands.seen() == ["train fold-2", "evaluate fold-2"][: 1 if scored else 2]
    assert (run / run_rules.FILE).read_bytes() == kept
    train_folds(phantom_store.folder, whole_folds, 2)
    assert commands.seen() == []


def _without_label_map(run):
    next((run / "evaluation" / "val" / "predictions").iterdir()).unlink()


def _of_another_fold(run):
    path = scores_path(run, "val")
    path.write_text(path.read_text().replace('"fold": "1/2"', '"fold": "2/2"'))


def _half_written(run):
    scores_path(run, "val").write_text('{"schema": 1, "cases": [')


@pytest.mark.parametrize("damage", [_without_label_map, _of_another_fold, _half_written])
def test_a_fold_whose_scores_are_not_whole_is_scored_again(
    commands, phantom_store, whole_folds, damage
):
    summary = read_scores(scores_path(whole_folds, "val"))["summary"]
    damage(whole_folds / "fold-1")
    status = set_status(whole_folds)
    assert [fold.state for fold in status.runs] == ["finished", "scored"]
    assert (status.state, status.is_fine) == ("unknown", False)
    page = write_folds_report(whole_folds).read_text(encoding="utf-8")
    assert "Fold 1/2 is missing" in page
    train_folds(phantom_store.folder, whole_folds, 2)
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
    page = write_folds_report(whole_folds).read_text(encoding="utf-8")
    assert "Untouched cases" in page
    scores["runs"][0]["weights_sha256"] = "of earlier ones"
    for damaged in (json.dumps(scores), "{"):
        path.write_text(damaged)
        page = write_folds_report(whole_folds).read_text(encoding="utf-8")
        assert "The scores of the test cases" in page
        assert "Untouched cases" not in page


@pytest.mark.usefixtures("without_pictures")
def test_folds_of_all_patients_are_not_evaluated_but_their_scores_are_named(
    commands, phantom_store, tmp_path, capsys
):
    store = tmp_path / "store"
    folder = tmp_path / "folds"
    prepare(phantom_store.folder.parent / "raw", store, fractions=(1, 0, 0), workers=1)
    train_folds(store, folder, 2, settings=SETTINGS)
    commands.loaded.clear()
    assert main(["evaluate", "--run", str(folder)]) == 2
    assert 'split "test" of store' in capsys.readouterr().err
    assert commands.loaded == [], "no network was asked"
    assert "evaluate" not in set_status(folder).advice


def test_a_case_that_networks_were_trained_on_is_noted_and_no_other(whole_folds, phantom_store):
    configs = [load_config(whole_folds / name) for name in ("fold-1", "fold-2")]
    known = held_out(whole_folds, 1)[0]
    untouched = phantom_store.manifest.split["test"][0]
    (note,) = seen_notes([known, untouched, "new"], configs)
    assert f" {known}:" in note
    assert untouched not in note


def test_commands_of_one_run_name_the_folds_instead(phantom_store, whole_folds, capsys):
    store = str(phantom_store.folder)
    assert main(["train", "--run", str(whole_folds), "--store", store]) == 2
    rule = r"got a folder of folds with 2 runs; name one of them, such as \S+fold-1"
    assert re.search(rule, capsys.readouterr().err)


def test_workers_of_folds_are_refused(phantom_store, whole_folds, tmp_path, capsys, monkeypatch):
    store = str(phantom_store.folder)
    launched = ["launch", "train", "--run", str(whole_folds), "--store", store, "--folds", "2"]
    assert main(launched) == 2
    assert "launch train --fold I/2" in capsys.readouterr().err
    cluster = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
    with pytest.raises(InputError, match="got one of 2 workers"):
        train_folds(phantom_store.folder, tmp_path / "folds", 2)
