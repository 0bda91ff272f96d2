"""`bench learning`: a small run from phantoms to its record, and what is made of a record."""

import pytest

from cpu3d.__main__ import main
from cpu3d.bench.learning import draw_learning, learning_table, points_of
from cpu3d.bench.tables import tables
from cpu3d.compare.run import step_voxels
from cpu3d.settings import load_config
from cpu3d.util.records import append_record, read_records

SMALL = ["--shape", "32", "40", "32", "--cases", "2", "1", "--steps", "2", "--every", "1", "--seeds", "0"]
NETWORK = ["--filters", "4", "--depth", "3", "--dtype", "float32"]


def point(step, wt, et):
    return {"step": step, "voxels": step * 2_000_000, "seconds": step / 2, "dice": {"WT": wt, "ET": et}}


@pytest.fixture
def record():
    """Two seeds; the second one diverged after the first validation."""
    whole, cut = [point(8, 0.5, 0.1), point(16, 0.8, 0.6)], [point(8, 0.7, 0.3)]
    curves = [{"seed": 0, "points": whole, "error": None}, {"seed": 4, "points": cut, "error": "train diverged"}]
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
    assert 0 < first["voxels"] == last["voxels"] / 2
    assert 0 < first["seconds"] < last["seconds"]
    assert not list(workdir.glob("run-*"))
    assert "small, --filters 4" in capsys.readouterr().out
    assert main([*line, *SMALL, "--every", "3"]) == main([*line, "--task", "nothing"]) == 2
    assert "--every must divide" in capsys.readouterr().err


def test_seconds_are_of_training_and_of_what_it_looked_for(tiny_run):
    step, config = {"event": "step", "step_s": 2.0}, load_config(tiny_run)
    held = {"event": "validation", "step": 2, "seconds": 50.0, "dice": {"WT": 0.5, "ET": 1.0}}
    events = [{"event": "start"}, {"event": "rates", "seconds": 3.0}, step, step, held, {"event": "end", "seconds": 99}]
    wanted = {"step": 2, "voxels": 2 * step_voxels(config), "seconds": 7.0, "dice": {"WT": 0.5}}
    assert points_of(events, config, ["WT"]) == [wanted]


def test_a_record_becomes_a_table_and_a_picture(record, tmp_path):
    table = learning_table(record)
    assert table.rows[0] == ["8", "16.0", "4.0", "0.600", "0.200", "0.400 (0.300 to 0.500)"]
    assert table.rows[1][-1] == "0.700 (0.700 to 0.700)", "of the seed that came so far"
    assert "Seed 4: train diverged" in table.caption
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
