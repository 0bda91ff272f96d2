import re
from html.parser import HTMLParser

import pytest

from cpu3d.compare.comparison import compare
from cpu3d.compare.error_maps import most_different
from cpu3d.compare.gather import read_run
from cpu3d.compare.page import settings, write_page
from cpu3d.compare.runner import Evaluation

PATCH = {"mode": "patch", "grid": (8, 8, 8), "patches_per_case": 8}


@pytest.fixture
def comparison(make_run):
    """Whole volumes with two seeds, patches that are off by one voxel and, more so, by two."""
    runs = [("whole", seed, make_run("whole", seed)) for seed in (0, 1)]
    runs += [("patch", seed, make_run("patch", seed, shift=1 + seed, **PATCH)) for seed in (0, 1)]
    return compare([read_run(*run, "test") for run in runs])


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
    page = page_of(comparison, tiny_store, tmp_path)
    words = Words(page)
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
    assert "patch scores lower than whole" in words.text
    assert "A & B" in words.text
    assert len(words.images) == 4 + 3 + 2 + 2 + 2, "strips, intervals, curves, costs, maps of both cases"
    assert all(image["src"].startswith("data:image/png;base64,") and image["alt"] for image in words.images)
    assert not re.search(r"<script|url\(|@import|https?://", page)
    assert len(page) < 1.5e6


def test_settings_that_differ_are_set_apart_from_those_in_common(comparison):
    common, differing = settings(comparison)
    assert dict(differing)["mode"] == ["whole", "patch"]
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


@pytest.mark.parametrize("gone", ["store", "predictions"])
def test_without_store_or_predictions_there_are_no_maps(comparison, tiny_store, tmp_path, gone):
    if gone == "predictions":
        for path in (tmp_path / "runs").rglob("*.nii.gz"):
            path.unlink()
    words = Words(page_of(comparison, None if gone == "store" else tiny_store, tmp_path))
    assert "Cases that differ most" not in words.text


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


def test_a_single_variant_has_nothing_to_be_compared_to(comparison, tiny_store, tmp_path):
    alone = compare(comparison.runs["whole"])
    words = Words(page_of(alone, tiny_store, tmp_path))
    assert "nothing to compare it to" in words.text
    assert "Differences to" not in words.text


def test_cases_that_are_not_untouched_are_warned_of(comparison, tiny_store, tmp_path):
    words = Words(page_of(comparison, tiny_store, tmp_path, evaluation=Evaluation("val")))
    assert "NOT untouched" in words.text
