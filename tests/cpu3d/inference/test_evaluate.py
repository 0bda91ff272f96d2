"""Scoring a split: what is written, what is refused, and what stays when it is cut off."""

import dataclasses
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest

from cpu3d.data.manifest import remake
from cpu3d.data.nifti import read_volume
from cpu3d.data.store import open_store, write_store
from cpu3d.errors import DoesNotFitError, InputError
from cpu3d.inference import evaluate
from cpu3d.inference.evaluate import evaluate_split
from cpu3d.inference.forecast import Forecast
from cpu3d.inference.postprocessing.rules import PostProcessing, Rule
from cpu3d.inference.runs import Inference
from cpu3d.inference.scores import METRICS
from cpu3d.inference.scores_file import read_scores, scores_path, scores_table, summarise
from cpu3d.run.config_json import load_config
from tests.cpu3d.conftest import LABELS, make_store
from tests.cpu3d.data.made_datasets import content_of
from tests.cpu3d.runs import run_command, with_free


@pytest.fixture
def trained(monkeypatch, fake_predictor):
    """Let every run have the fake predictor; the list collects what it was called with."""
    calls = []

    def load(runs, weights, inference):
        calls.extend((run, weights, inference) for run in runs)
        fake_predictor.config = load_config(runs[0])
        return [fake_predictor] * len(runs)

    monkeypatch.setattr(evaluate, "trained_predictors", load)
    return calls


def read(run, split="test"):
    return json.loads(scores_path(run, split).read_text())


def test_a_right_answer_scores_one_on_the_source_s_grid(
    tiny_store, tiny_run, fake_predictor, tmp_path
):
    how = {"weights": "last", "tolerance_mm": 2.0}
    scores = evaluate_split(fake_predictor, tiny_store, "test", tiny_run, **how)
    for case_id in ("e", "f"):
        prediction, geometry = read_volume(tiny_run / f"evaluation/predictions/{case_id}.nii.gz")
        source, expected = read_volume(tmp_path / f"source/{case_id}_label.nii.gz")
        np.testing.assert_array_equal(prediction, source)
        assert geometry == expected
    assert read(tiny_run) == scores == {"schema": 1, **read_scores(scores_path(tiny_run))}
    expected = {
        **how,
        "mean_dice": 1,
        "split": "test",
        "untouched": True,
        "split_hash": tiny_store.manifest.split_hash,
        "label_codes": {str(code): name for code, name in LABELS.items()},
    }
    assert expected.items() <= scores.items()


def test_a_shifted_answer_scores_what_was_worked_out_by_hand(tiny_store, tiny_run, fake_predictor):
    fake_predictor.shift = 1
    rules = PostProcessing({"TC": Rule(region_mm3=54)})  # all of it, 27 voxels
    how = {"tolerance_mm": 0.5, "postprocessing": rules}
    scores = evaluate_split(fake_predictor, tiny_store, "test", tiny_run, **how)
    # ET is one voxel, one voxel of 1 mm along X off; TC is a cube of 3, so 18 of 27 voxels stay,
    # and WT one of 5.
    for case in scores["cases"]:
        tumour, core = case["regions"]["ET"], case["regions"]["TC"]
        assert (tumour["dice"], tumour["surface_dice"], tumour["hd95_mm"]) == (0, 0, 1)
        assert core["dice"] == pytest.approx(18 / 27)
        assert core["truth_ml"] == pytest.approx(27 * 2e-3)
        assert case["mean_dice"] == pytest.approx((4 / 5 + 18 / 27 + 0) / 3)


def test_voxels_that_are_not_annotated_count_in_no_score_and_are_predicted(
    tmp_path, tiny_run, fake_predictor
):
    """Every second slice is; the answer in the others is of the label before they were taken."""
    store = make_store(tmp_path / "sparse", tmp_path / "sparse source", ignore=9)
    fake_predictor.shift = 1
    fake_predictor.labels = {**LABELS, 9: "ignore"}
    scores = evaluate_split(fake_predictor, store, "test", tiny_run, evidence=True)
    for case in scores["cases"]:
        core = case["regions"]["TC"]
        slices = core["truth_voxels"] / 9  # a cube of 3, of which 1 or 2 slices are annotated
        assert slices in (1, 2)
        assert core["dice"] == pytest.approx(6 / 9)
        kept = case["evidence"]["components"]["TC"]
        assert kept["voxels"] == (27,)
        assert kept["lesions"]["predicted_voxels"] == (9,) * int(slices)
        path = tiny_run / f"evaluation/predictions/{case['case_id']}.nii.gz"
        assert np.count_nonzero(np.isin(read_volume(path)[0], (2, 3, 9))) == 27


def test_the_summary_is_worked_out_by_hand():
    def case(dice, hd95_mm):
        return {
            "regions": {"WT": {**dict.fromkeys(METRICS, dice), "hd95_mm": hd95_mm, "empty": ""}}
        }

    cases = [case(0.5, 3.0), case(1.0, 0.0), case(0.9, 6.0)]
    cases[1]["regions"]["WT"]["empty"] = "both"
    summary = summarise(cases)["WT"]
    assert summary["empty"] == {"both": 1, "truth": 0, "prediction": 0}
    expected = {"mean": 0.8, "median": 0.9, "std": (0.14 / 3) ** 0.5, "min": 0.5, "max": 1}
    assert summary["dice"] == pytest.approx(expected)
    assert summary["hd95_mm"]["median"] == 3.0
    scores = {"name": "x", "split": "val", "untouched": False, "tolerance_mm": 0.5}
    scores["summary"] = {"WT": summary}
    table = scores_table({**scores, "cases": cases})
    rows = [("WT", "Dice", "0.800 ± 0.216", "0.900"), ("", "HD95, mm", "3.00 ± 2.45", "3.00")]
    assert table.rows[:2] == rows
    assert table.title == '3 NOT untouched cases of x, split "val"'
    assert table.caption == (
        "HD95 in mm; surface Dice at 0.5 mm; lesion-wise Dice by the rule of BraTS 2023"
    )
    assert scores_table({**scores, "cases": cases[:1]}).rows[0][2] == "0.800"


@pytest.mark.usefixtures("needs_native", "trained")
def test_what_does_not_fit_is_refused_before_the_first_case(tiny_run, monkeypatch):
    monkeypatch.setattr("cpu3d.inference.forecast.read_host", lambda: with_free(2**20))
    with pytest.raises(DoesNotFitError, match="case e must leave"):
        run_command(evaluate, "--run", tiny_run)
    assert not scores_path(tiny_run, "test").exists()


def test_cases_that_do_not_fit_are_answered_in_windows_and_the_largest_is_told(
    tiny_store, tiny_run, fake_predictor, capsys
):
    slid = []
    answer = fake_predictor.probabilities

    def answered(*case, in_windows):
        slid.append(in_windows)
        return answer(*case)

    def forecast(record):
        is_last = record.case_id == "f"
        return Forecast((8, 8, 8), is_last, 2**20 * (1 + is_last), 1.0, 2**30)

    fake_predictor.probabilities = answered
    scores = evaluate_split(
        fake_predictor, tiny_store, "test", tiny_run, forecaster=SimpleNamespace(forecast=forecast)
    )
    assert "at most, f: 8 x 8 x 8 voxels, in windows, 2 MiB of" in capsys.readouterr().err
    assert [case.get("in_windows", False) for case in scores["cases"]] == slid == [False, True]
    assert "evidence" not in scores["cases"][0]


def test_scores_of_seen_cases_are_marked_and_replace_no_others(tiny_run, trained, capsys):
    assert run_command(evaluate, "--run", tiny_run, "--tolerance", 3) == 0
    test, (out, err) = read(tiny_run), capsys.readouterr()
    assert "worst by mean Dice: e 1.000, f 1.000" in out
    assert "Dice 1.000 ± 0.000 1.000 HD95, mm 0.00 ± 0.00 0.00" in " ".join(out.split())
    assert "NOT untouched" not in err
    assert test["tolerance_mm"] == 3
    assert trained == [(tiny_run, "best", Inference())]
    words = ("--tolerance", 0, "--json")
    assert run_command(evaluate, "--run", tiny_run, "--split", "train", *words) == 0
    out, err = capsys.readouterr()
    assert "was trained on" in err
    assert json.loads(out) == read(tiny_run, "train")
    assert not read(tiny_run, "train")["untouched"]
    assert run_command(evaluate, "--run", tiny_run, "--split", "val", "--weights", "last") == 0
    assert "was chosen by its scores on" in capsys.readouterr().err
    assert read(tiny_run) == test
    assert read(tiny_run, "val")["tolerance_mm"] == 1
    assert (tiny_run / "evaluation/train/predictions/a.nii.gz").is_file()


E = "evaluation/predictions/e.nii.gz"


def test_an_evaluation_that_fails_leaves_the_earlier_one(tiny_store, tiny_run, fake_predictor):
    evaluate_split(fake_predictor, tiny_store, "test", tiny_run)
    before = content_of(tiny_run)
    fake_predictor.sure = np.nan
    with pytest.raises(InputError, match="case e must be finite"):
        evaluate_split(fake_predictor, tiny_store, "test", tiny_run)
    assert content_of(tiny_run) == before
    fake_predictor.sure, fake_predictor.shift = 0.9, 1
    evaluate_split(fake_predictor, tiny_store, "test", tiny_run)
    assert content_of(tiny_run)[E] != before[E]


@pytest.mark.parametrize("name", ["predictions/mine.nii.gz", "scores.json"])
def test_files_of_others_are_never_replaced(tiny_run, tmp_path, trained, name):
    mine = tmp_path / "out/evaluation" / name
    mine.parent.mkdir(parents=True)
    mine.write_text('{"schema": 3}')
    with pytest.raises(InputError, match="to be replaced, got no scores"):
        run_command(evaluate, "--run", tiny_run, "--out", tmp_path / "out")
    assert mine.read_text() == '{"schema": 3}'
    assert trained == []


def test_a_store_that_cannot_be_scored_is_refused_with_every_reason(
    tiny_store, tiny_run, fake_predictor
):
    def problems(**changes):
        write_store(tiny_store.folder, remake(tiny_store.manifest, **changes))
        with pytest.raises(InputError) as caught:
            evaluate_split(fake_predictor, open_store(tiny_store.folder), "test", tiny_run)
        return "".join(caught.value.problems)

    bare = []
    for case in tiny_store.manifest.cases:
        files = {"x": case.files["x"]}
        bare.append(dataclasses.replace(case, label_voxels={}, files=files))
    assert re.findall("case (.) must have a label", problems(cases=bare)) == ["e", "f"]
    split = {"train": tuple("abcdef"), "val": (), "test": ()}
    assert "choose --split train" in problems(split=split)
    fake_predictor.channels = ("T2w",)
    assert "must have the run's channels and labels" in problems()
    assert not scores_path(tiny_run).exists()


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda scores: scores["cases"][0]["regions"]["WT"].pop("hd95_mm"), "no hd95_mm"),
        (lambda scores: scores["summary"].pop("ET"), "cases of other regions"),
        (lambda scores: scores.update(cases=[]), "no cases"),
        (lambda scores: scores.pop("inference"), "a run without inference"),
        (lambda scores: scores.update(schema=99), "schema 99"),
    ],
)
def test_damaged_scores_are_refused(tiny_store, tiny_run, fake_predictor, spoil, problem):
    path = scores_path(tiny_run)
    with pytest.raises(InputError, match=r"scores\.json.* none"):
        read_scores(path)
    scores = evaluate_split(fake_predictor, tiny_store, "test", tiny_run)
    spoil(scores)
    path.write_text(json.dumps(scores))
    with pytest.raises(InputError, match=f"must be complete JSON of schema 1, got .*{problem}"):
        read_scores(path)


def test_several_runs_are_scored_together_on_test_into_a_folder_of_their_own(
    fold_runs, tiny_store, trained, tmp_path
):
    first, last, out = *fold_runs("1/3", "3/3"), tmp_path / "both"
    for words, problem in (
        ((), "--out must name a folder"),
        (("--out", out, "--split", "train"), "--split must be test for folds"),
    ):
        with pytest.raises(InputError, match=problem):
            run_command(evaluate, "--run", first, last, *words)
    assert trained == []
    assert run_command(evaluate, "--run", first, last, "--out", out) == 0
    scores = read(out)
    assert [case["case_id"] for case in scores["cases"]] == ["e", "f"]
    named = [(run["run"], run["fold"]) for run in scores["runs"]]
    assert named == [(str(first), "1/3"), (str(last), "3/3")]
    assert not (first / "evaluation").exists()
    with pytest.raises(InputError, match=f"got scores of {first} and {last}; choose another --out"):
        run_command(evaluate, "--run", first, "--out", out)
    words = ("--store", tiny_store.folder.rename(tmp_path / "moved"))
    assert run_command(evaluate, "--run", last, first, "--out", out, *words) == 0


def test_cases_unlike_the_trainings_are_named_once(fold_runs, trained, tmp_path, capsys):
    runs = fold_runs("1/2", "2/2", spacing_mm=(1.0, 1.0, 9.0))
    assert run_command(evaluate, "--run", *runs, "--out", tmp_path / "out") == 0
    assert "note: e and f: voxels of 1 x 1 x 2 mm" in capsys.readouterr().err
    for split, weights, is_seen in (("train", "last", 1), ("val", "last", 0), ("val", "best", 1)):
        run_command(evaluate, "--run", *runs[:1], "--split", split, "--weights", weights)
        assert ("NOT untouched" in capsys.readouterr().err) == is_seen
