"""`bench data` on tiny files: every row with its lines, the record; all ways load the same."""

import json
import os

import numpy as np
import pytest

from cpu3d.__main__ import main
from cpu3d.bench import data
from cpu3d.bench.data import COLD, WARM
from cpu3d.util.records import read_records


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    for name, size in {"CASE": (32, 40, 28), "CT": (40, 36, 30), "PATCH": (16, 16, 16), "PATCHES": 2}.items():
        monkeypatch.setattr(data, name, size)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("bench")


def test_every_row_is_measured_and_recorded(folder, monkeypatch, tmp_path, capsys):
    # Workers are called instead of started; what goes in and comes out passes through JSON all the same.
    call = lambda work, request: json.loads(json.dumps(work(json.loads(json.dumps(request)))))
    monkeypatch.setattr(data, "in_fresh_process", call)
    record = tmp_path / "data.jsonl"
    command = ["bench", "data", "--workdir", str(folder), "--record", str(record), "--rounds", "1"]
    assert main(command) == 0
    found = {row["row"]: row for row in read_records(record, "data")}
    states = {name: [line["state"] for line in row["lines"]] for name, row in found.items()}
    assert {line["n"] for row in found.values() for line in row["lines"]} == {1}  # a first round is not counted
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
