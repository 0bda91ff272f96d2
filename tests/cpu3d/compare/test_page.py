import dataclasses
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from cpu3d.compare import error_maps, page, pictures
from cpu3d.compare.comparison import compare
from cpu3d.compare.error_maps import most_different
from cpu3d.compare.gather import read_run
from cpu3d.compare.page import reading, settings, write_page
from cpu3d.compare.planned import Evaluation

PATCH = {"mode": "patch", "grid": (8, 8, 8), "patches_per_case": 8}


@pytest.fixture
def comparison(make_run):
    """Whole volumes with two seeds, patches that are off by one voxel and, more so, by two."""
    runs = [("whole", seed, make_run("whole", seed)) for seed in (0, 1)]
    runs += [("patch", seed, make_run("patch", seed, shift=1 + seed, **PATCH)) for seed in (0, 1)]
    return compare([read_run(*run, "test") for run in runs])


@pytest.fixture
def no_pictures(monkeypatch):
    """For what is not about them: they take most of the time."""
    drawn = b"\x89PNG"
    for name in ("forest", "case_strips", "dice_against"):
        monkeypatch.setattr(pictures, name, lambda *args: drawn)
    has_curves = lambda comparison: any(run.curve for runs in comparison.runs.values() for run in runs)
    monkeypatch.setattr(
        pictures, "learning_curves", lambda comparison, *args: drawn if has_curves(comparison) else None
    )
    monkeypatch.setattr(error_maps, "draw", lambda *args: drawn)


def page_of(comparison, store, tmp_path, **more):
    path = write_page(
        tmp_path / "report.html", comparison, store, more.pop("evaluation", Evaluation()),
        title="A & B", budget="6 epochs each",
    )  # fmt: skip
    return path.read_text(encoding="utf-8")


class Words(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.images, self.text = [], ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        if tag == "img":
            self.images.append(dict(attributes))

    def handle_data(self, data):
        self.text += data


def test_the_page_holds_all_of_it_and_needs_nothing_else(comparison, tiny_store, tmp_path):
    html = page_of(comparison, tiny_store, tmp_path)
    words = Words(html)
    for heading in (
        "The reading",
        "What was compared",
        "Scores",
        "Differences to whole",
        "Learning",
        "Costs",
        "Limits",
    ):
        assert heading in words.text
    assert "patch against whole, undecided" in words.text, "of two seeds, off by one voxel and by two"
    assert "2 seeds and 2 cases: so few" in words.text.split("What was compared")[0], "right where it is read"
    assert "Of the patches of patch, 33% are drawn around labelled voxels" in words.text.split("Limits")[1]
    assert "2.7 times narrower" in words.text
    assert "\u00b1 is the standard deviation of the seeds\u2019 means." in words.text
    assert "with validation and, in read mode ram" in words.text
    assert "A & B" in words.text
    assert len(words.images) == 4 + 3 + 2 + 2 + 2, "strips, intervals, curves, costs, maps of both cases"
    assert all(image["src"].startswith("data:image/png;base64,") and image["alt"] for image in words.images)
    assert not re.search(r"<script|url\(|@import|https?://", html)
    assert len(html) < 1.5e6


def test_settings_that_differ_are_set_apart_from_those_in_common(comparison):
    common, differing = settings(comparison)
    assert dict(differing)["mode"] == ["whole", "patch"]
    assert dict(differing)["patches_per_case"] == ["-", "8"], "a whole volume has none"
    assert dict(differing)["foreground"][0] == "-"
    assert "learning_rate" in dict(common)
    assert not {"seed", "unet.seed", "store"} & {name for name, _ in (*common, *differing)}


def test_the_maps_are_of_the_cases_that_differ_most(comparison):
    truth = {"e": {0: 0.9, 1: 0.9}, "f": {0: 0.1, 1: 0.3}}
    for run in comparison.runs["whole"]:
        run.scores["mean"]["dice"].update(e=1.0, f=1.0)
    for run in comparison.runs["patch"]:
        run.scores["mean"]["dice"].update({case: of_seed[run.seed] for case, of_seed in truth.items()})
    assert [case for case, _ in most_different(comparison, "patch")] == ["f", "e"]
    for run in comparison.runs["patch"]:
        run.scores["mean"]["dice"].update(e=1.0)
    assert [case for case, _ in most_different(comparison, "patch")] == ["f"], "what does not differ is not shown"


@pytest.mark.usefixtures("no_pictures")
def test_the_step_of_the_best_weights_and_the_validations_are_told(comparison, tiny_store, tmp_path):
    """Validations at steps 2 and 4 are equal, so the first one's weights are kept."""
    words = Words(page_of(comparison, tiny_store, tmp_path))
    assert "whole: 2, 2 of 4 steps, 2 validations a run" in words.text
    assert "best at step" in words.text


def test_maps_of_runs_that_learnt_wt_alone_tell_no_cores_apart(comparison, tiny_store, monkeypatch):
    drawn = []
    monkeypatch.setattr(error_maps, "draw", lambda image, *labels_and_more: drawn.append(labels_and_more[:3]) or b"")
    assert len(error_maps.error_maps(comparison, tiny_store)) == 2
    assert {code for labels in drawn for label in labels for code in np.unique(label)} == {0, 1, 2, 3}
    for run in (run for runs in comparison.runs.values() for run in runs):
        object.__setattr__(run, "config", dataclasses.replace(run.config, regions=("WT",)))
    drawn.clear()
    assert len(error_maps.error_maps(comparison, tiny_store)) == 2
    assert {code for labels in drawn for label in labels for code in np.unique(label)} == {0, 1}


@pytest.mark.usefixtures("no_pictures")
def test_a_card_s_memory_has_its_own_row_and_no_ratio(comparison, tiny_store, tmp_path):
    for run in comparison.runs["patch"]:
        object.__setattr__(run, "config", dataclasses.replace(run.config, device="gpu:0"))
        object.__setattr__(run.costs, "card_peak_bytes", 2**30)
    words = Words(page_of(comparison, tiny_store, tmp_path))
    assert "patch was trained on gpu:0 and whole on cpu" in words.text
    assert " x the " not in words.text
    assert "card's memory, training-1.00 GiB" in words.text, "the baseline has none"
    assert "Dice against peak memory" not in [image["alt"] for image in words.images]


def test_failures_are_read_where_the_result_is(comparison):
    failed = dataclasses.replace(comparison, failed=("patch, seed 2, is left out: train diverged.",))
    assert "patch, seed 2, is left out: train diverged." in reading(failed)
    assert page.reading(dataclasses.replace(failed, runs={"whole": failed.runs["whole"]})) == list(failed.failed)


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("gone", ["store", "predictions"])
def test_without_store_or_predictions_there_are_no_maps(comparison, tiny_store, tmp_path, gone):
    if gone == "predictions":
        for path in (tmp_path / "runs").rglob("*.nii.gz"):
            path.unlink()
    words = Words(page_of(comparison, None if gone == "store" else tiny_store, tmp_path))
    assert "Cases that differ most" not in words.text


@pytest.mark.usefixtures("no_pictures")
def test_one_seed_one_case_and_unknown_memory_still_give_a_page(make_run, tiny_store, tmp_path):
    runs = [read_run(name, 0, make_run(name, shift=shift, end="none", **more), "test")
            for name, shift, more in (("whole", 0, {}), ("patch", 1, PATCH))]  # fmt: skip
    for run in runs:
        object.__setattr__(run.costs, "train_peak_bytes", None)
        object.__setattr__(run.costs, "predict_peak_bytes", None)
        object.__setattr__(run, "curve", ())
        for metrics in run.scores.values():
            for values in metrics.values():
                del values["f"]
    words = Words(page_of(compare(runs), tiny_store, tmp_path))
    assert "one case of one seed has no interval" in words.text
    assert "One seed and one case" in words.text
    assert "Learning" not in words.text
    assert "peak memory" not in words.text.split("Cases that differ most")[0].split("Costs")[1].replace("Dice", "")


@pytest.mark.usefixtures("no_pictures")
def test_a_single_variant_has_nothing_to_be_compared_to(comparison, tiny_store, tmp_path):
    alone = compare(comparison.runs["whole"])
    words = Words(page_of(alone, tiny_store, tmp_path))
    assert "nothing to compare it to" in words.text
    assert "Differences to" not in words.text


@pytest.mark.usefixtures("no_pictures")
def test_cases_that_are_not_untouched_are_warned_of(comparison, tiny_store, tmp_path):
    words = Words(page_of(comparison, tiny_store, tmp_path, evaluation=Evaluation("val")))
    assert "NOT untouched" in words.text
