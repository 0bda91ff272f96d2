"""The page of a comparison and its tables, of runs and of records."""

import json
import re

from cpu3d.compare.command import Options
from cpu3d.compare.plan import Kept
from cpu3d.compare.report import comparisons_markdown, publish, settings_table
from cpu3d.compare.statistics import compare, read_run

PATCH = {"mode": "patch", "grid": (8, 8, 8), "patches_per_case": 8}


def test_the_page_holds_all_of_it_and_needs_nothing_else(make_run, tiny_store, tmp_path):
    runs = [("whole", seed, make_run("whole", seed)) for seed in (0, 1)]
    runs += [("patch", seed, make_run("patch", seed, shift=1 + seed, **PATCH)) for seed in (0, 1)]
    comparison = compare([read_run(*run, "test") for run in runs])
    differing = {row[0]: row[1:] for row in settings_table(comparison).rows}
    assert differing["mode"] == ("whole", "patch")
    assert differing["patches_per_case"] == ("-", "8"), "a whole volume has none"
    assert not {"seed", "unet.seed", "store", "learning_rate"} & set(differing)
    kept = Kept({"evaluation": {"split": "val", "tolerance_mm": 1}}, [0, 1], [])
    publish(comparison, kept, tiny_store, tmp_path, Options(out=tmp_path, title="A & B"), budget="6 epochs each")
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<h1>A &amp; B</h1>" in html
    assert "NOT untouched" in html
    assert html.count('<img src="data:image/png;base64,') == 4 + 2, "strips, curves"
    assert "<td>runs/patch-seed1</td>" in html, "a page names no folder of the machine"
    assert not re.search(r"url\(|@import|https?://", html)
    shown = json.loads(re.search(r'<script type="application/json"[^>]*>(.*?)</script>', html).group(1))
    assert [case["note"] for case in shown] == ["best", "median and worst"]
    for case in shown:
        assert [one["name"] for one in case["predictions"]] == ["whole, seed 0", "patch, seed 0"]
        assert re.fullmatch(r"mean Dice: whole \d\.\d{3}, patch \d\.\d{3}", case["scores"])
    assert json.loads((tmp_path / "compare.json").read_text())["results"]["baseline"] == "whole"


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
