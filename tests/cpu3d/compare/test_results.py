"""The page of a comparison and its tables, of runs and of records."""

import json
import re

from cpu3d.compare.command import Options
from cpu3d.compare.experiment import Kept
from cpu3d.compare.results import costs_table, publish, settings_table
from cpu3d.compare.run import PlannedRun
from cpu3d.compare.statistics import comparison_of, read_result
from tests.cpu3d.runs import shown_cases

PATCH = {"mode": "patch", "grid": (8, 8, 8), "patches_per_case": 8}


def test_the_page_holds_all_of_it_and_needs_nothing_else(make_run, tiny_store, tmp_path):
    runs = [("whole", seed, make_run("whole", seed, learning_rate=0.13)) for seed in (0, 1)]
    runs += [
        ("patch", seed, make_run("patch", seed, shift=1 + seed, learning_rate=0.25, **PATCH))
        for seed in (0, 1)
    ]
    comparison = comparison_of(
        [read_result(PlannedRun(*run, ()), "test", tiny_store) for run in runs], "whole"
    )
    differing = {row[0]: row[1:] for row in settings_table(comparison).rows}
    assert differing["mode"] == ("whole", "patch")
    assert differing["patches_per_case"] == ("-", "8"), "a whole volume has none"
    assert differing["learning_rate"] == ("0.13", "0.25")
    assert not {"seed", "unet.seed", "store"} & set(differing)
    assert costs_table(comparison.to_json()).rows[0][1:] == ("0.13", "0.25")
    options = Options(out=tmp_path, title="A & B", split="val")
    publish(comparison, Kept({}, [0, 1], []), tiny_store, tmp_path, options, budget="6 epochs each")
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<h1>A &amp; B</h1>" in html
    assert "NOT untouched" in html
    for title in (
        "every case, WT",
        "every case, TC",
        "every case, ET",
        "over voxels",
        "over seconds",
    ):
        assert re.search(f'<img src="data:image/png;base64,[^"]+" alt="[^"]*{title}', html), title
    assert "<td>0.25</td><td>runs/patch-seed1</td>" in re.sub(r">\s+<", "><", html)
    assert "<td>runs/patch-seed1</td>" in html, "a page names no folder of the machine"
    assert not re.search(r"url\(|@import|https?://", html)
    shown = shown_cases(tmp_path / "report.html")
    assert [case["note"] for case in shown] == ["best", "median and worst"]
    for case in shown:
        assert [prediction["name"] for prediction in case["predictions"]] == [
            "whole, seed 0",
            "patch, seed 0",
        ]
        assert re.fullmatch(r"mean Dice: whole \d\.\d{3}, patch \d\.\d{3}", case["scores"])
    assert json.loads((tmp_path / "compare.json").read_text())["results"]["baseline"] == "whole"
