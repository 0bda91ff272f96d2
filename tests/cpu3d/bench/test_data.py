"""`bench data` on tiny files: every row with its lines, the record, the page; all ways load the same."""

import json
import os

import numpy as np
import pytest

from cpu3d.__main__ import main
from cpu3d.bench import data
from cpu3d.bench.data import COLD, WARM, amount, page_lines, time_in_turn
from cpu3d.util.records import read_records


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    for name, size in {"CASE": (32, 40, 28), "CT": (40, 36, 30), "PATCH": (16, 16, 16), "PATCHES": 2}.items():
        monkeypatch.setattr(data, name, size)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("bench")


@pytest.fixture
def in_this_process(monkeypatch):
    """Workers are called instead of started; what goes in and comes out passes through JSON all the same."""
    call = lambda work, request: json.loads(json.dumps(work(json.loads(json.dumps(request)))))
    monkeypatch.setattr(data, "in_fresh_process", call)


def test_every_row_is_measured_recorded_and_a_section_of_the_page(folder, in_this_process, tmp_path, capsys):
    record = tmp_path / "data.jsonl"
    command = ["bench", "data", "--workdir", str(folder), "--record", str(record), "--rounds", "1"]
    assert main(command) == 0
    found = {row["row"]: row for row in read_records(record, "data")}
    states = {name: [line["state"] for line in row["lines"]] for name, row in found.items()}
    assert states == {"s4": 6 * [WARM] + 5 * [COLD], "s0": 7 * [WARM] + 6 * [COLD]}
    assert "s0: One patch of 16x16x16 from a CT of 40x36x30" in capsys.readouterr().out


@pytest.mark.parametrize(("row", "names"), [("s4", 6), ("s0", 7)])
def test_every_way_loads_the_same(folder, monkeypatch, row, names):
    taken = lambda ways, _: {"lines": [(name, np.asarray(load(1))) for name, (_, load, _) in ways.items()]}
    monkeypatch.setattr(data, "time_in_turn", taken)
    monkeypatch.setattr(data, "in_fresh_process", lambda work, request: work(request))
    lines = data.beside_nibabel(row, folder, 1)["lines"]
    loaded = dict(lines[:names])
    first = loaded["store, mmap"]
    assert first.std() > 1
    assert first.shape == ((32, 40, 28, 4) if row == "s4" else (16, 16, 16, 1))
    for name, other in lines:
        if "float16" not in name:  # z-scores
            np.testing.assert_array_equal(other, first, err_msg=name)


def test_files_are_made_once_and_other_files_are_left_alone(folder, tmp_path, capsys):
    image = data.made(folder / "s4-32x40x28", "s4", (32, 40, 28)) / "image.nii"
    before = os.stat(image).st_mtime_ns
    assert os.stat(data.made(folder / "s4-32x40x28", "s4", (32, 40, 28)) / "image.nii").st_mtime_ns == before
    mine = tmp_path / "s4-32x40x28"
    mine.mkdir()
    (mine / "thesis.txt").write_text("mine")
    assert main(["bench", "data", "--workdir", str(tmp_path)]) == 2
    assert "must be made by bench data, got other files" in capsys.readouterr().err
    assert (mine / "thesis.txt").read_text() == "mine"


def test_ways_take_turns_and_a_first_round_is_not_counted(tmp_path):
    calls = []
    (tmp_path / "file").touch()
    load = lambda name: lambda position: calls.append((name, position)) or np.zeros(1)
    ways = {name: (tmp_path / "file", load(name), 2) for name in "ab"}
    found = time_in_turn(ways, {"rounds": 1, "state": WARM})
    assert calls == 2 * [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert [line["n"] for line in found["lines"]] == [1, 1]


def test_an_older_record_keeps_its_targets_and_notes_and_figures_are_readable():
    line = {"name": "a way", "state": WARM, "unit": "s", "median": 3, "min": 2, "max": 4, "note": ""}
    target = {"name": "a target", "value": 4, "rule": ">=", "bound": 10, "unit": "x", "met": False}
    row = {"row": "ladder", "title": "a title", "lines": [line], "targets": [target], "notes": ["a note"]}
    row.update(date="2026-11-20", host={"cores": 2, "cpu": "made up"}, file_system="ext4", rounds=5, case="phantom")
    lines = page_lines([row, {**row, "row": "unknown"}])
    assert "| S1's ladder | a target | 4 x (**missed**) | at least 10 x |" in lines
    assert "| a way | warm | 3 s | 2 s to 4 s |  |" in lines
    assert "a note" in lines
    assert [amount(value, "s") for value in (1.5, 0.0123, 4.2e-5)] == ["1.5 s", "12.3 ms", "42 us"]
