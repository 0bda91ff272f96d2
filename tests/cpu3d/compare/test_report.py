"""The page of a comparison and its tables, of runs and of records."""

import dataclasses
import json
import re

import pytest

from cpu3d.compare.command import Options
from cpu3d.compare.plan import Kept
from cpu3d.compare.report import (
    comparisons_markdown,
    costs_table,
    differences_table,
    page_sections,
    publish,
    search_table,
    settings_table,
)
from cpu3d.compare.statistics import compare, read_run
from memory_estimator.table import Bold

PATCH = {"mode": "patch", "grid": (8, 8, 8), "patches_per_case": 8}
DIFFERENCE = {"mean": -0.2, "interval": [-0.3, -0.1], "seeds": 3, "cases": 16, "better": 0, "worse": 16, "equal": 0}
COSTS = {"steps": 400, "voxels": 9.8e7, "train_s": 70.0, "step_s": 0.15, "train_peak_bytes": 2**30}
ABOUT = {
    "title": "made up", "date": "2026-01-01", "host": {"cpu": "made up", "cores": 2}, "budget": "10 epochs each",
    "data": {"name": "phantoms", "split": {"train": 40, "val": 8, "test": 16}, "shape": [80, 106, 70]},
    "seeds": [0, 1, 2], "evaluation": {"split": "test", "tolerance_mm": 1.0}, "options": {"whole": "--mode whole"},
}  # fmt: skip


@pytest.fixture
def comparison(make_run):
    """Whole volumes with two seeds, patches that are off by one voxel and, more so, by two."""
    runs = [("whole", seed, make_run("whole", seed)) for seed in (0, 1)]
    runs += [("patch", seed, make_run("patch", seed, shift=1 + seed, **PATCH)) for seed in (0, 1)]
    return compare([read_run(*run, "test") for run in runs])


def test_what_is_gone_has_no_part_on_the_page(comparison, tmp_path):
    def headings(found):
        return [heading for heading, _, _ in page_sections(found, {**ABOUT, **found.to_json()}, tmp_path)]

    assert len(headings(comparison)) == 6
    runs = {name: [dataclasses.replace(run, curve=()) for run in own] for name, own in comparison.runs.items()}
    without = headings(dataclasses.replace(comparison, runs=runs))
    assert without[1:-2] == ["Scores and differences", "Costs"]


def test_settings_that_differ_are_shown(comparison):
    differing = {row[0]: row[1:] for row in settings_table(comparison).rows}
    assert differing["mode"] == ("whole", "patch")
    assert differing["patches_per_case"] == ("-", "8"), "a whole volume has none"
    assert not {"seed", "unet.seed", "store", "learning_rate"} & set(differing)


def test_the_page_holds_all_of_it_and_needs_nothing_else(comparison, tiny_store, tmp_path, capsys):
    kept = Kept({"evaluation": {"split": "val", "tolerance_mm": 1}}, [0, 1], [])
    publish(comparison, kept, tiny_store, tmp_path, Options(out=tmp_path, title="A & B"), budget="6 epochs each")
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<h1>A &amp; B</h1>" in html
    assert "NOT untouched" in html
    assert html.count('<img src="data:image/png;base64,') == 4 + 2, "strips, curves"
    assert "<td>runs/patch-seed1</td>" in html, "a page names no folder of the machine"
    assert not re.search(r"<script|url\(|@import|https?://", html)
    assert len(html) < 2e6
    assert json.loads((tmp_path / "compare.json").read_text())["results"]["baseline"] == "whole"


# --- Of records ---


def record(**difference):
    metrics = ("dice", "hd95_mm", "surface_dice")
    scores = {"ET": {metric: {"mean": 0.7, "sd": 0.01} for metric in metrics}}
    return {
        **ABOUT, "cases": 16, "regions": ["ET"], "baseline": "whole",
        "variants": {name: {"scores": scores, "costs": COSTS} for name in ("whole", "patch")},
        "differences": {"patch": {"ET": {metric: {**DIFFERENCE, **difference} for metric in metrics}}},
        "reading": ["As records from before had it."],
    }  # fmt: skip


@pytest.mark.parametrize(("bound", "counts"), [({"seed_bound": 0.1}, True), ({"seed_bound": 0.3}, False), ({}, False)])
def test_only_what_seeds_alone_do_not_make_is_bold(bound, counts):
    row = differences_table(record(**bound)).rows[0]
    assert row[:4] == ("ET", "patch", "Dice", "-0.200 (-0.300 to -0.100)")
    assert isinstance(row[3], Bold) == counts
    assert row[4:] == (f"{bound['seed_bound']:.3f}" if bound else "-", "0 / 16 / 0")
    assert ("**-0.200 (-0.300 to -0.100)**" in "\n".join(comparisons_markdown([record(**bound)]))) == counts


def test_costs_that_no_run_knows_have_no_row():
    on_card = record()
    on_card["variants"]["patch"] = {"costs": {**COSTS, "card_peak_bytes": 2**30}}
    for one, card in ((record(), None), (on_card, ("-", "1.00 GiB"))):
        found = {row[0]: row[1:] for row in costs_table(one).rows}
        assert (found["steps"], found["peak memory, training"]) == (("400", "400"), ("1.00 GiB", "1.00 GiB"))
        assert found.get("card's memory, training") == card


def test_the_search_names_every_trial_its_winner_and_whether_a_better_one_may_lie_beyond():
    arms = {
        "r1-b1": {"rate": 2, "steps": 60, "trials": [{"rate": 2, "dice": 0.3}, {"rate": 4, "dice": None}]},
        "r1-b4": {"rate": 1, "steps": 15, "trials": []},
    }
    table = search_table({name: {"diverged": [4], **arm} for name, arm in arms.items()})
    assert [tuple(row) for row in table.rows] == [
        ("r1-b1", "2", "60", "0.3000", "diverged", "yes", "4"),
        ("r1-b4", "1", "15", "", "", "no", "4"),
    ]
    assert isinstance(table.rows[0][3], Bold)


def test_a_study_recorded_before_arms_were_variants_is_shown_as_a_comparison():
    """Arms of one region and two cases, the second case 0.1 below the first; the smaller resolution is 0.05 below."""

    def run(seed, dice):
        costs = {"step_s": 1.0, "train_s": 70.0, "peak_bytes": 2**30, "predict_s": 0.1}
        return {"seed": seed, "dice": {"WT": [dice, dice - 0.1]}, "hd95_mm": {"WT": [2.0, 4.0]}, **costs}

    arms = [
        {
            "resolution": resolution, "batch": 1, "steps": 40, "search_steps": 10, "start_rate": 0.002, "rate": 0.002,
            "trials": [{"rate": 0.002, "dice": 0.5}], "runs": [run(seed, dice) for seed in (0, 1)],
        }
        for resolution, dice in ((0.5, 0.75), (1.0, 0.8))
    ]  # fmt: skip
    about = {
        "data": "phantoms", "shape": [8, 8, 8], "cases": {"train": 4, "test": 2}, "epochs": 10, "seeds": [0, 1],
        "split": "test", "tolerance_mm": 1.0, "settings": {"filters": 8}, "host": {"cpu": "made up", "cores": 2},
    }  # fmt: skip
    lines = comparisons_markdown([{"title": "old", "date": "2026-01-01", "about": about, "arms": arms}])
    assert "| WT | r1-b1 | 0.750 ± 0.000 | 3.00 ± 0.00 |" in lines
    assert "| WT | r0.5-b1 | Dice | **-0.050 (-0.050 to -0.050)** | 0.000 | 0 / 2 / 0 |" in lines
    assert "| r0.5-b1 | 0.002 | 10 | **0.5000** | no | - |" in lines
    assert "- `all`: `--filters 8`" in lines
