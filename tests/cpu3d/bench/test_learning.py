"""`bench learning`: a small run from phantoms to its record, and what is made of a record."""

import dataclasses

import pytest

from cpu3d.__main__ import main
from cpu3d.bench.learning import draw_learning, learning_table, points_of
from cpu3d.bench.tables import tables
from cpu3d.settings import load_config
from cpu3d.util.records import append_record, read_records

SMALL = ["--shape", "32", "40", "32", "--cases", "2", "1", "--steps", "2", "--every", "1", "--seeds", "0"]
NETWORK = ["--filters", "4", "--depth", "3", "--dtype", "float32"]


def point(step, wt, et):
    return {"step": step, "full_steps": step / 4, "seconds": step / 2, "dice": {"WT": wt, "ET": et}}


@pytest.fixture
def record():
    """Two seeds; the second one was stopped after the first validation."""
    whole, cut = [point(8, 0.5, 0.1), point(16, 0.8, 0.6)], [point(8, 0.7, 0.3)]
    lesions = {name: {"lesion_dice": 0.5, "lesion_sensitivity": 1.0, "false_positives": 2.0} for name in ("WT", "ET")}
    curves = [{"seed": seed, "points": points, "lesions": lesions} for seed, points in ((0, whole), (4, cut))]
    about = {"shape": [40, 48, 36], "cases": [8, 4], "steps": 16, "host": {"cpu": "made up", "cores": 2}}
    return {"task": "small", "name": "--batch 2", "curves": curves, **about}


def test_a_run_on_phantoms_is_recorded(tmp_path, capsys):
    file, workdir = tmp_path / "learning.jsonl", tmp_path / "work"
    line = ["bench", "learning", "--workdir", str(workdir), "--task", "small", "--record", str(file)]
    assert main([*line, *SMALL, "--", *NETWORK]) == 0
    (found,) = read_records(file, "learning")
    assert (found["task"], found["options"], found["shape"], found["cases"]) == ("small", NETWORK, [32, 40, 32], [2, 1])
    (curve,) = found["curves"]
    first, last = curve["points"]
    assert (first["step"], last["step"], set(last["dice"])) == (1, 2, {"WT", "TC", "ET"})
    assert 0 < first["full_steps"] < last["full_steps"] - 0.9, "the last step is in full"
    assert set(curve["lesions"]) == {"WT", "TC", "ET"}
    assert 0 < first["seconds"] < last["seconds"]
    assert not list(workdir.glob("run-*"))
    assert "small, --filters 4" in capsys.readouterr().out
    assert main([*line, *SMALL, "--every", "3"]) == main([*line, "--task", "nothing"]) == 2
    assert "--every must divide" in capsys.readouterr().err


def test_a_point_has_the_full_steps_and_the_seconds_of_training_until_then(tiny_run):
    config = dataclasses.replace(load_config(tiny_run), coarse_grid=(8, 8, 8), coarse_steps=1)
    step, start = {"event": "step", "step_s": 2.0}, {"event": "start"}
    held = {"event": "validation", "step": 2, "seconds": 50.0, "dice": {"WT": 0.5, "ET": 1.0}}
    events = [start, step, step, held, {"event": "end", "seconds": 99}]
    # One step of 8^3 voxels and one of 16^3.
    wanted = {"step": 2, "full_steps": 1.125, "seconds": 4.0, "dice": {"WT": 0.5}}
    assert points_of(events, config, ["WT"]) == [wanted]


def test_a_record_becomes_a_table_and_a_picture(record, tmp_path):
    table = learning_table(record)
    assert table.rows[0] == ["8", "2.0", "4.0", "0.600", "0.200", "0.400 (0.300 to 0.500)"]
    assert table.rows[1][-1] == "0.700 (0.700 to 0.700)", "of the seed that came so far"
    assert "WT 0.500" in table.caption
    assert draw_learning([record, {**record, "task": "plain"}])[:4] == b"\x89PNG"
    for name in ("before", "after"):
        append_record(tmp_path / "learning.jsonl", "learning", {**record, "name": name})
    append_record(tmp_path / "learning.jsonl", "learning", {**record, "name": "after", "cases": [9, 4]})
    titles = [line for line in tables(tmp_path) if line.startswith("small, ")]
    assert [title.split(":")[0] for title in titles] == ["small, before", "small, after"]
    assert "9 cases" in titles[1]
    command = ["bench", "tables", "--records", str(tmp_path), "--learning", str(tmp_path / "curves.png")]
    assert main(command) == 0
    assert (tmp_path / "curves.png").stat().st_size > 5000
