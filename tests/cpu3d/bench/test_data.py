"""`bench data` on tiny files: every row with its lines and targets, the record, the page; all ways load the same."""

import json
import os

import numpy as np
import pytest

from cpu3d.__main__ import main
from cpu3d.bench import data
from cpu3d.bench.data import (
    COLD,
    SMOKE,
    WARM,
    amount,
    draw,
    line_of,
    page_lines,
    target_of,
    targets_table,
    time_in_turn,
)
from cpu3d.bench.harness import ProcessFailedError
from cpu3d.errors import InputError
from cpu3d.util.records import read_records


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("bench")


@pytest.fixture
def in_this_process(monkeypatch):
    """Workers are called instead of started; what goes in and comes out passes through JSON all the same."""
    call = lambda work, request: json.loads(json.dumps(work(json.loads(json.dumps(request)))))
    monkeypatch.setattr(data, "in_fresh_process", call)


def test_every_row_is_measured_in_every_way(folder, in_this_process):
    found = {name: row(folder, SMOKE, 1) for name, row in data.ROWS.items()}
    counts = {
        name: [len([line for line in row["lines"] if line["state"] == state]) for state in (WARM, COLD)]
        for name, row in found.items()
    }
    assert counts == {"s4": [11, 11], "s0": [9, 8], "many": [3, 0]}
    assert [len(row["targets"]) for row in found.values()] == [2, 3, 3]
    assert all(line["min"] >= 0 for row in found.values() for line in row["lines"])
    slow, store = (
        next(line["values"][0] for line in found["s4"]["lines"] if (line["name"], line["state"]) == (name, WARM))
        for name in (".nii.gz float32", "store, int16 .npy")
    )
    assert found["s4"]["targets"][0]["value"] == pytest.approx(slow / store)
    assert found["many"]["title"] == "A store of 12 entries"


@pytest.fixture
def loaded(monkeypatch):
    """What every way of a worker loads at a position, in place of its seconds."""
    monkeypatch.setattr(
        data, "time_in_turn", lambda ways, _: {name: np.asarray(load(1)) for name, (_, load, _) in ways.items()}
    )


def test_every_way_loads_the_same_case(folder, loaded):
    found = data.load_case({"paths": data.one_case(folder, SMOKE), "state": WARM, "rounds": 1})
    case = found["store, int16 .npy"]
    assert case.shape == (*SMOKE.case, 4)
    assert case.std() > 1
    for name, other in found.items():
        if "float16" not in name:  # z-scores
            np.testing.assert_array_equal(other, case, err_msg=name)


def test_every_way_loads_the_same_patch(folder, loaded):
    request = {"folders": data.cts(folder, SMOKE), "patch": SMOKE.patch, "patches": 1, "state": WARM, "rounds": 1}
    found = data.load_patch(request)
    patch = found["store, mmap"]
    assert patch.std() > 1
    for name, other in found.items():
        np.testing.assert_array_equal(other.squeeze(), patch.squeeze(), err_msg=name)


def test_files_are_made_once_and_other_files_are_left_alone(folder, tmp_path):
    store = data.one_case(folder, SMOKE)["npy"]
    before = os.stat(store).st_mtime_ns
    assert os.stat(data.one_case(folder, SMOKE)["npy"]).st_mtime_ns == before
    (tmp_path / "case").mkdir()
    (tmp_path / "case" / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match="must be made by bench data, got other files"):
        data.one_case(tmp_path, SMOKE)
    assert (tmp_path / "case" / "thesis.txt").read_text() == "mine"


def test_ways_take_turns_and_a_first_round_is_not_counted():
    calls = []
    ways = {name: (lambda _: [], lambda k, name=name: calls.append((name, k)) or np.zeros(1), 2) for name in "ab"}
    found = time_in_turn(ways, {"rounds": 1, "state": WARM})
    assert calls == 2 * [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert [line["n"] for line in found["lines"]] == [1, 1]


def made_up(row):
    lines = [line_of("a way", WARM, (2.0, 4.0)), line_of("the store", WARM, (0.5, 1.0), note="so")]
    targets = [target_of("way against store", 4.0, ">=", 10)]
    return {"row": row, "title": f"Title of {row}", "lines": lines, "targets": targets, "notes": ["a note"]}


def test_rows_are_printed_recorded_and_drawn_and_one_that_fails_takes_no_other_along(tmp_path, capsys, monkeypatch):
    def s0(*_):
        raise ProcessFailedError("bench data must end with a line of JSON, exited with -9")

    monkeypatch.setattr(data, "ROWS", {"s4": lambda *_: made_up("s4"), "s0": s0, "many": lambda *_: made_up("many")})
    record, drawn = tmp_path / "r" / "data.jsonl", tmp_path / "p" / "data.png"
    more = ["--record", str(record), "--picture", str(drawn), "--workdir", str(tmp_path / "work"), "--smoke"]
    assert main(["bench", "data", *more]) == 1
    printed = capsys.readouterr()
    assert "s4: Title of s4" in printed.out
    assert "error: row s0: bench data must end with a line of JSON" in printed.err
    first, second = read_records(record, "data")
    assert first["row"] == "s4"
    assert {"median": 3.0, "min": 2.0, "max": 4.0, "n": 2}.items() <= first["lines"][0].items()
    assert drawn.read_bytes() == draw([first, second])
    assert "a note" in page_lines([first])
    assert "| a way | warm | 3 s | 2 s to 4 s |  |" in page_lines([first, {**first, "row": "unknown"}])
    assert list(targets_table([first]).rows[0]) == ["a case", "way against store", "4 x (**missed**)", "at least 10 x"]


def test_a_target_is_met_at_its_bound_and_figures_are_readable():
    assert [target_of("t", 2.0, rule, 2.0)["met"] for rule in (">=", "<=")] == [True, True]
    assert [target_of("t", 2.0, rule, bound)["met"] for rule, bound in ((">=", 3), ("<=", 1))] == [False, False]
    assert [amount(value, "s") for value in (1.5, 0.0123, 4.2e-5)] == ["1.5 s", "12.3 ms", "42 us"]
