"""The page of a run: complete, self-contained, and made from whatever is there."""

import dataclasses
import html
import json
import re
import shutil

import pytest

from cpu3d.data.files.arrays import file_sha256
from cpu3d.errors import InputError
from cpu3d.inference.evaluate import evaluate_split
from cpu3d.inference.postprocessing.evidence import Means
from cpu3d.inference.postprocessing.rules import PostProcessing, Rule
from cpu3d.inference.postprocessing.run_rules import FILE, PostprocessingRules
from cpu3d.inference.scores_file import scores_path
from cpu3d.plan import PLAN_SCHEMA
from cpu3d.report import report
from cpu3d.report.report import write_report
from cpu3d.run.config_json import load_config, save_config
from cpu3d.run.log import read_events
from cpu3d.util.atomic import write_json
from tests.cpu3d.runs import run_command, shown_cases

PICTURE = re.compile('<img src="data:image/png;base64,[^"]+" alt="([^"]+)"')


def read(path):
    """The markup of a page without its style, and its text."""
    markup = re.sub(r"<style.*?</style>", "", path.read_text(), flags=re.DOTALL)
    return markup, " ".join(html.unescape(re.sub(r"<[^>]+>", " ", markup)).split())


def text_of(run):
    """The text of a run's page."""
    return read(write_report(run))[1]


@pytest.fixture
def evaluated(tiny_store, tiny_run, fake_predictor):
    best = tiny_run / "checkpoints/best.npz"
    best.parent.mkdir()
    best.write_bytes(b"weights")
    fake_predictor.weights_sha256 = file_sha256(best)
    fake_predictor.shift = 1
    return evaluate_split(fake_predictor, tiny_store, "test", tiny_run)


END = {"event": "end", "step": 40, "reason": "finished", "seconds": 90.0}


def relog(run, *events, start=None, **settings):
    """The page of a run with other settings, what its start logs, and more events."""
    save_config(dataclasses.replace(load_config(run), **settings), run)
    first, *others = read_events(run)
    events = [{**first, **(start or {})}, *others, *events]
    (run / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return text_of(run)


def test_a_whole_run_gives_one_page_that_needs_no_network(tiny_run, evaluated):
    first = evaluated["cases"][1]
    first["mean_dice"] -= 0.1
    first["regions"]["ET"].update(empty="truth", hd95_mm=3.146, truth_ml=1.04, prediction_ml=2)
    write_json(scores_path(tiny_run, "test"), evaluated)
    relog(tiny_run, store="moved")
    page, text = read(tiny_run / "report.html")
    for part in (
        evaluated["split_hash"],
        "ITEX 2.15.0.0",
        "0 2025-03-01T10:00:00+00:00 made up 2 - -",
        "2.15.1",
        "3.00 GiB",
        "augment.flip true",
        "channels FLAIR, T1gd",
        "a step sees whole volumes of - voxels coarse steps none",
        "ET* 0.000 3.15 1.000",
        "1.0 \u2192 2.0 e WT",
        "train a, b, c val d test e, f",
    ):
        assert part in text, part
    assert f"{evaluated['summary']['TC']['dice']['mean']:.3f}" in text
    shown = shown_cases(tiny_run / "report.html")
    assert [(case["name"], case["note"]) for case in shown] == [
        ("e", "best"),
        ("f", "median and worst"),
    ]
    dice = {case["case_id"]: case["regions"]["WT"]["dice"] for case in evaluated["cases"]}
    for case in shown:
        assert case["truth"]
        assert len(case["predictions"]) == 1
        assert f"Dice WT {dice[case['name']]:.3f}, TC " in case["scores"]
    assert "waiting for data 1.0%" in text  # 0.02 of 2 s
    assert "9.1%" in text  # 2 x (3 + 1) s beside 40 x 2 s
    for part in ("Loss", "Dice", "Time", "Learning rate", "Memory"):
        assert any(part in title for title in PICTURE.findall(page)), part
    assert "NOT untouched" not in text
    assert "upper bound of the plan" not in text
    whole = (tiny_run / "report.html").read_text()
    assert not re.search(r"url\(|@import|https?://", whole)


def test_post_processing_is_shown_before_and_after_or_why_it_is_off(tiny_run, without_pictures):
    assert "Post-processing is off: not decided" in text_of(tiny_run)
    (tiny_run / "checkpoints").mkdir()
    best = tiny_run / "checkpoints/best.npz"
    best.write_bytes(b"weights")
    before = {"WT": Means(0.164, 7, 0.925), "ET": Means(1, 0, 1)}
    after = {"WT": Means(0.9, 0, 0.93), "ET": Means(1, 0, 1)}
    hashes = (file_sha256(best),), load_config(tiny_run).split_hash
    chosen = PostProcessing({"WT": Rule(share=0.01)})
    decision = PostprocessingRules(chosen, before, after, {"WT": 3, "ET": 1}, *hashes, 3)
    write_json(tiny_run / FILE, {"schema": 1, **dataclasses.asdict(decision)})
    text = text_of(tiny_run)
    cells = "0.164 \u2192 0.900 7.00 \u2192 0.00 0.925 \u2192 0.930 3"
    assert f"WT below 1 % of the largest part {cells}" in text
    assert "ET none 1.000 \u2192 1.000 0.00 \u2192 0.00 1.000 \u2192 1.000 1 " in text
    best.write_bytes(b"others")
    assert "Post-processing is off: not decided for these weights" in text_of(tiny_run)


def test_predictions_are_beside_what_was_measured(tiny_run, without_pictures):
    """Each step takes 2 s, of which it waits 0.02 s."""
    predicted = {
        "upper_bound_bytes": 5 * 2**30,
        "run_allocator_peak_bytes": 2.2 * 2**30,
        "run_process_peak_bytes": 6 * 2**30,
        "step_s": 2.178,
        "coarse": {"step_s": 0.99},
    }
    end = {**END, "allocator_peak_bytes": 2 * 2**30, "peak_rss_bytes": 5 * 2**30}
    again = {"event": "start", "step": 40, "predicted": {"step_s": 1}}
    text = relog(tiny_run, end, again, start={"predicted": predicted}, coarse_steps=20)
    for pattern in (
        r"allocator on cpu 2\.00 GiB without native [^%]*2\.20 GiB \+10\.0%",
        r"peak memory of the process 5\.00 GiB [^%]*6\.00 GiB \+20\.0%",
        r"upper bound of the plan 5\.00 GiB of the process 5\.00 GiB \+0\.0%",
        r"time per coarse step 1\.98 s [^%]*0\.99 s -50\.0%",
        r"time per step 1\.98 s [^%]*2\.18 s \+10\.0%",
    ):
        assert re.search(pattern, text)


def test_the_first_volume_which_starts_what_computes_is_no_volume_as_any_other(
    tiny_run, evaluated, without_pictures
):
    for case, seconds in zip(evaluated["cases"], (9.0, 2.0)):
        case.update(predict_s=seconds, score_s=2 * seconds)
    write_json(scores_path(tiny_run, "test"), evaluated)
    text = text_of(tiny_run)
    assert "prediction 2 s" in text
    assert "scoring 11 s" in text
    del evaluated["cases"][1]
    write_json(scores_path(tiny_run, "test"), evaluated)
    assert "prediction 9 s" in text_of(tiny_run)
    assert shown_cases(tiny_run / "report.html")[0]["note"] == ""


def test_the_page_says_what_steps_saw_and_where_and_why(tiny_run, without_pictures):
    reasons = {"policy": "policy lean: speed does not fit"}
    write_json(tiny_run / "plan.json", {"schema": PLAN_SCHEMA, "reasons": reasons})
    start = {"grids": "16 x 16 x 16", "parameters": 12345}
    coarse = {"coarse_steps": 5, "coarse_grid": (16, 16, 16)}
    text = relog(tiny_run, start=start, spacing_mm=(1.0, 1.0, 2.0), whole_every=4, **coarse)
    for part in (
        "plan policy lean: speed does not fit",
        "12,345 weights",
        "engine ITEX 2.15.0.0",
        "a step sees crops around the labels, in 1 step of 4 whole volumes of 16 x 16 x 16 voxels "
        "of 1 x 1 x 2 mm",
        "coarse steps the first 5, on 8 x 8 x 8: X, Y and Z halved",
        "volumes a step 1, 1 at a time",
        "optimizer muon, rate 0.02 at its peak, cosine decay",
    ):
        assert part in text
    patch = {"mode": "patch", "grid": (8, 8, 16), "samples_per_case": 4}
    patch["target_spacing_mm"] = (1.0, 1.0, 1.0)
    end = {**END, "allocator_peak_bytes": 2**32}
    text = relog(tiny_run, end, start={"device": "gpu:2"}, **patch, fold="1/2", device="gpu:1")
    for part in (
        "patches a step 1, 1",
        "device gpu:2",
        "a patch of 8 x 8 x 16 voxels of 1 x 1 x 1 mm",
        "fold 1/2",
        "allocator on gpu:1 4.00 GiB",
        "val c, d test",
    ):
        assert part in text


def test_a_run_that_was_restarted_has_not_ended_yet_and_shows_each_start(
    tiny_run, without_pictures
):
    end = {**END, "reason": "interrupted", "seconds": 3700.0, "peak_rss_bytes": 5 * 2**30}
    text = relog(tiny_run, end)
    assert "interrupted after step 40" in text
    assert "61.7 min" in text
    host = {"cpu": "another"}
    again = {
        "event": "start",
        "step": 40,
        "host": host,
        "policy": "lean",
        "micro_batch": 2,
        "workers": 2,
        "versions": {"tensorflow": "2.21.0"},
    }
    text = relog(tiny_run, again)
    for part in (
        "not ended yet",
        "5.00 GiB",
        "40 another",
        "policy lean",
        "2 at a time, of 2 w",
        "w 2.21.0",
    ):
        assert part in text
    diverged = {"event": "diverged", "step": 40, "reason": "weights must be finite, got NaN"}
    assert "diverged after step 40: weights must be finite, got NaN" in relog(tiny_run, diverged)


def test_the_dice_of_a_validation_is_drawn_over_the_seconds_of_all_steps_before_it(
    tiny_run, without_pictures, monkeypatch
):
    drawn = {}

    def chart(lines, *, x_label, **options):
        options["dense"] = lines[0].is_dense
        drawn[options["title"], x_label] = (list(lines[0].x), list(lines[0].y), options)
        return b"PNG"

    monkeypatch.setattr("cpu3d.report.runs.chart", chart)
    relog(tiny_run, {"event": "step", "step": 40, "voxels": 5_000_000}, coarse_steps=5)
    dice = "Mean Dice of the held-out cases"
    axes = {"y_label": "", "title": dice, "y_range": (0, 1), "switch": None, "dense": False}
    assert drawn[dice, "seconds of steps"] == ([20 * 2.0, 40 * 2.0], [0.7, 0.7], axes)
    assert drawn[dice, "voxels seen, millions"][0][-1] == 5
    steps, sizes, axes = drawn["Memory of the process, GiB", "step"]
    assert (steps[-1], sizes[0]) == (40, 3)
    assert list(axes.values())[2:] == [(0, None), 5, True]
    assert drawn["Dice of WT", "step"][2]["y_range"] == (0, 1)


def test_what_is_missing_is_named_and_everything_else_is_there(
    tiny_store, tiny_run, evaluated, without_pictures
):
    (tiny_run / "evaluation/predictions/e.nii.gz").write_bytes(b"not a volume")
    write_report(tiny_run)
    assert len(shown_cases(tiny_run / "report.html")) == 1
    shutil.rmtree(tiny_store.folder)
    assert "The store cannot be read" in text_of(tiny_run)
    shutil.rmtree(tiny_run / "evaluation")
    relog(tiny_run, store="<script>1</script>")
    (tiny_run / "log.jsonl").unlink()
    page, text = read(write_report(tiny_run))
    for part in ("no curves", "<script>1</script>", "No scores yet"):
        assert part in text, "a name from outside is text"
    assert not re.search("<img|<script|Versions", page)


def test_a_page_says_how_the_network_was_applied_and_warns_of_scores_of_seen_cases(
    tiny_store, tiny_run, fake_predictor, evaluated, without_pictures
):
    window = {"window": [8, 8, 16], "one_pass": False, "overlap": 0.5, "flips": True}
    other = {"inference": window, "split_hash": "other"}
    write_json(scores_path(tiny_run), {**evaluated, **other})
    evaluate_split(fake_predictor, tiny_store, "train", tiny_run)
    text = text_of(tiny_run)
    assert "inference window of 8 x 8 x 16, 50 % overlap, mean of" in text
    assert "scores are of another split, other" in text
    scores_path(tiny_run).unlink()
    text = text_of(tiny_run)
    assert "inference in one pass" in text
    assert "These are NOT untouched cases" in text


def test_a_page_stays_where_another_cannot_be_written(
    tiny_run, tmp_path, evaluated, without_pictures, capsys
):
    page = tmp_path / "new" / "page.html"
    assert run_command(report, "--run", tiny_run, "--out", page) == 0
    assert str(page) in capsys.readouterr().out
    before = page.read_bytes()
    with pytest.raises(InputError, match="must be a file, found a folder"):
        write_report(tiny_run, tmp_path)
    assert page.read_bytes() == before
    (tiny_run / "evaluation/scores.json").write_text('{"schema": 99}')
    assert "test cases cannot be read" in text_of(tiny_run)
