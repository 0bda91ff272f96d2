import dataclasses
import re

import numpy as np
import pytest

from cpu3d.compare import pictures
from cpu3d.compare.pictures import label_key, most_different
from cpu3d.compare.report import (
    comparisons_markdown,
    costs_table,
    differences_table,
    page_sections,
    settings_tables,
    summary_markdown,
    write_page,
)
from cpu3d.compare.run import Evaluation, read_run
from cpu3d.compare.statistics import compare
from cpu3d.config import RunConfig
from memory_estimator.table import Bold

PATCH = {"mode": "patch", "grid": (8, 8, 8), "patches_per_case": 8}

REGIONS = {"WT": (1, 2, 3), "TC": (2, 3), "ET": (3,)}


@pytest.fixture
def comparison(make_run):
    """Whole volumes with two seeds, patches that are off by one voxel and, more so, by two."""
    runs = [("whole", seed, make_run("whole", seed)) for seed in (0, 1)]
    runs += [("patch", seed, make_run("patch", seed, shift=1 + seed, **PATCH)) for seed in (0, 1)]
    return compare([read_run(*run, "test") for run in runs])


@pytest.fixture
def drawn(monkeypatch):
    """The labels of each error map, which is not drawn."""
    found = []
    monkeypatch.setattr(pictures, "draw", lambda image, labels, *more: found.append(labels) or b"PNG")
    return found


def test_the_page_holds_all_of_it_and_needs_nothing_else(comparison, tiny_store, tmp_path):
    path = tmp_path / "report.html"
    sections = page_sections(comparison, tiny_store, Evaluation(), budget="6 epochs each", out=tmp_path)
    write_page(path, "A & B", sections, split="val", tiles=[("whole", "1.000", "mean Dice")])
    html = path.read_text(encoding="utf-8")
    assert "<h1>A &amp; B</h1>" in html
    assert "NOT untouched" in html
    headings = re.findall("<h2>(.*?)</h2>", html)
    assert headings[1:6] == ["Scores", "Differences", "Learning", "Costs", "Cases that differ most"]
    assert html.count('<img src="data:image/png;base64,') == 4 + 3 + 2 + 2, "strips, intervals, curves, maps"
    assert "<td>runs/patch-seed1</td>" in html, "a page says nothing of the machine"
    assert not re.search(r"<script|url\(|@import|https?://", html)
    assert len(html) < 1.5e6


def test_what_is_gone_has_no_part(comparison, tiny_store, tmp_path, drawn):
    for path in tmp_path.rglob("*.nii.gz"):
        path.unlink()
    for run in (run for runs in comparison.runs.values() for run in runs):
        object.__setattr__(run, "curve", ())
    for store in (tiny_store, None):
        sections = page_sections(comparison, store, Evaluation(), budget="6 epochs each", out=tmp_path)
        headings = [section.heading for section in sections]
        assert headings[1:-1] == ["Scores", "Differences", "Costs"]
    alone = page_sections(compare(comparison.runs["whole"]), None, Evaluation(), budget="6 epochs each", out=tmp_path)
    assert [section.heading for section in alone][1:-1] == ["Scores", "Costs"]


def test_settings_that_differ_are_set_apart_from_those_in_common(comparison):
    differing, common = ({row[0]: row[1:] for row in table.rows} for table in settings_tables(comparison))
    assert differing["mode"] == ("whole", "patch")
    assert differing["patches_per_case"] == ("-", "8"), "a whole volume has none"
    assert "learning_rate" in common
    assert not {"seed", "unet.seed", "store"} & {*common, *differing}


def test_the_maps_are_of_the_cases_that_differ_most(comparison):
    of_patch = {"e": {0: 0.9, 1: 0.9}, "f": {0: 0.1, 1: 0.3}}
    for run in comparison.runs["whole"]:
        run.scores["mean"]["dice"].update(e=1.0, f=1.0)
    for run in comparison.runs["patch"]:
        run.scores["mean"]["dice"].update({case: of_seed[run.seed] for case, of_seed in of_patch.items()})
    assert [case for case, _ in most_different(comparison, "patch")] == ["f", "e"]
    for run in comparison.runs["patch"]:
        run.scores["mean"]["dice"].update(e=1.0)
    assert [case for case, _ in most_different(comparison, "patch")] == ["f"], "what does not differ is not shown"


def test_maps_of_runs_that_learnt_wt_alone_tell_no_cores_apart(comparison, tiny_store, drawn):
    assert len(pictures.error_maps(comparison, tiny_store)) == 2
    assert {code for labels in drawn for label in labels for code in np.unique(label)} == {0, 1, 2, 3}
    for run in (run for runs in comparison.runs.values() for run in runs):
        object.__setattr__(run, "config", dataclasses.replace(run.config, regions=("WT",)))
    drawn.clear()
    assert len(pictures.error_maps(comparison, tiny_store)) == 2
    assert {code for labels in drawn for label in labels for code in np.unique(label)} == {0, 1}


def test_the_key_is_of_the_regions_that_were_learnt():
    names = {0: "background", 1: "edema", 2: "core", 3: "rim"}
    wt, every = (
        label_key(RunConfig(regions=regions, region_codes=REGIONS, label_names=names)) for regions in (("WT",), ())
    )
    assert [name for name, _ in wt] == ["WT (edema, core, rim)"]
    assert [name for name, _ in every] == ["edema", "core", "rim"]
    assert len({colour for _, colour in every}) == 3


# --- Of records ---

DIFFERENCE = {"mean": -0.2, "interval": [-0.3, -0.1], "seeds": 3, "cases": 16, "better": 0, "worse": 16, "equal": 0}

COSTS = {
    "steps": 400,
    "voxels": 9.8e7,
    "train_s": 70.0,
    "step_s": 0.15,
    "case_train_s": 0.15,
    "train_peak_bytes": 2**30,
}


def record(**difference):
    metrics = ("dice", "hd95_mm", "surface_dice")
    scores = {"ET": {metric: {"mean": 0.7, "sd": 0.01} for metric in metrics}}
    return {
        "title": "made up",
        "date": "2026-01-01",
        "host": {"cpu": "made up", "cores": 2},
        "data": {"name": "phantoms", "split": {"train": 40, "val": 8, "test": 16}, "shape": [80, 106, 70]},
        "budget": "10 epochs each",
        "seeds": [0, 1, 2],
        "evaluation": {"split": "test", "tolerance_mm": 1.0},
        "options": {"whole": "--mode whole", "patch": "--mode patch"},
        "cases": 16,
        "regions": ["ET"],
        "baseline": "whole",
        "variants": {name: {"scores": scores, "costs": COSTS} for name in ("whole", "patch")},
        "differences": {"patch": {"ET": {metric: {**DIFFERENCE, **difference} for metric in metrics}}},
        "reading": ["As records from before had it."],
    }


@pytest.mark.parametrize(("bound", "counts"), [({"seed_bound": 0.1}, True), ({"seed_bound": 0.3}, False), ({}, False)])
def test_only_what_seeds_alone_do_not_make_is_bold(bound, counts):
    row = differences_table(record(**bound)).rows[0]
    assert row[:4] == ("ET", "patch", "Dice", "-0.200 (-0.300 to -0.100)")
    assert isinstance(row[3], Bold) == counts
    assert row[4:] == (f"{bound['seed_bound']:.3f}" if bound else "-", "0 / 16 / 0")
    bold = "**-0.200 (-0.300 to -0.100)**" in "\n".join(comparisons_markdown([record(**bound)]))
    assert bold == counts
    assert any("whole 0.700 ± 0.010 | 0.700 ± 0.010 |" in line for line in summary_markdown([record(**bound)]))


def test_costs_that_no_run_knows_have_no_row():
    found = {row[0]: row[1:] for row in costs_table(record()).rows}
    assert found["steps"] == ("400", "400")
    assert found["peak memory, training"] == ("1.00 GiB", "1.00 GiB")
    assert "card's memory, training" not in found
    on_card = record()
    on_card["variants"]["patch"] = {"costs": {**COSTS, "card_peak_bytes": 2**30}}
    assert {row[0]: row[1:] for row in costs_table(on_card).rows}["card's memory, training"] == ("-", "1.00 GiB")
