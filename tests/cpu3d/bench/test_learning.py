"""`bench learning`: a small run from phantoms to its record, and the table and picture of a record."""

import dataclasses

from cpu3d.__main__ import main
from cpu3d.bench import learning
from cpu3d.bench.learning import learning_table, points_of
from cpu3d.bench.tables import tables
from cpu3d.errors import DivergedError
from cpu3d.processes import RunFailedError
from cpu3d.run.config import load_config
from cpu3d.util.records import append_record, read_records

SMALL = ["--shape", "32", "40", "32", "--cases", "2", "1", "--steps", "2", "--seeds", "0"]
NETWORK = ["--filters", "2", "--depth", "2", "--dtype", "float32", "--optimizer", "sgd"]


def test_a_run_on_phantoms_is_recorded(tmp_path, capsys, monkeypatch):
    """In this process: what becomes of those that `call` starts is tested with comparisons."""

    def here(command, *more, **about):
        return main([*command, *(["--workers", "1"] if command[0] in ("phantom", "prepare") else [])])

    monkeypatch.setattr(learning, "call", here)
    file, workdir = tmp_path / "learning.jsonl", tmp_path / "work"
    line = ["bench", "learning", "--workdir", str(workdir), "--task", "small", "--record", str(file)]
    assert main([*line, *SMALL, "--", *NETWORK]) == 0
    (record,) = read_records(file, "learning")
    about = (record["task"], record["options"], record["shape"], record["cases"])
    assert about == ("small", NETWORK, [32, 40, 32], [2, 1])
    (curve,) = record["curves"]
    first, last = curve["points"]
    assert (first["step"], last["step"], set(last["dice"])) == (1, 2, {"WT", "TC", "ET"})
    assert 0 < first["full_steps"] < last["full_steps"] - 0.9, "the last step is in full"
    assert set(curve["lesions"]) == {"WT", "TC", "ET"}
    assert 0 < first["seconds"] < last["seconds"]
    assert not list(workdir.glob("run-*"))
    assert "--filters 2" in capsys.readouterr().out

    def diverged(command, *more, **about):
        if command[0] == "train":
            raise RunFailedError("train must succeed, got code 4", DivergedError.exit_code, "train diverged")
        return here(command)

    monkeypatch.setattr(learning, "call", diverged)
    assert main([*line, *SMALL, "--", *NETWORK]) == DivergedError.exit_code
    assert "error: train must succeed" in capsys.readouterr().err
    assert len(read_records(file, "learning")) == 1


def test_a_point_has_the_full_steps_and_the_seconds_of_training_until_then(tiny_run):
    config = dataclasses.replace(load_config(tiny_run), coarse_grid=(8, 8, 8), coarse_steps=1)
    held = {"event": "validation", "step": 2, "seconds": 50.0, "dice": {"WT": 0.5, "ET": 1.0}}
    steps = [{"event": "step", "step": step, "step_s": 2.0} for step in (1, 2)]
    events = [{"event": "start", "step": 0}, *steps, held, {"event": "end", "step": 2, "seconds": 99}]
    # One step of 8^3 voxels and one of 16^3.
    wanted = {"step": 2, "full_steps": 1.125, "seconds": 4.0, "dice": {"WT": 0.5}}
    assert points_of(events, config, ["WT"]) == [wanted]


def point(step, *dice):
    return {"step": step, "full_steps": step / 4, "seconds": step / 2, "dice": dict(zip(("WT", "ET"), dice))}


def test_records_become_a_table_and_a_picture(tmp_path):
    curves = [[point(8, 0.5, 0.1), point(16, 0.8, 0.6)], [point(8, 0.7, 0.3), point(16, 0.4, 0.4)]]
    curves = [{"seed": seed, "points": points, "lesions": {}} for seed, points in enumerate(curves)]
    about = {"shape": [40, 48, 36], "cases": [8, 4], "steps": 16, "host": {"cpu": "made up", "cores": 2}}
    record = {"task": "small", "name": "before", "curves": curves, **about}
    (row,) = learning_table([record]).rows
    assert row == ("small", "before", "4.0", "8.0", "0.550", "0.400 to 0.700")
    for name, own in (("before", []), ("after", []), ("after", curves[:1])):
        append_record(tmp_path / "learning.jsonl", "learning", {**record, "name": name, "curves": own or curves})
    rows = [line for line in tables(tmp_path) if line.startswith("| small ")]
    assert [row.split(" | ")[1] for row in rows] == ["before", "after"]
    assert "0.700 to 0.700" in rows[1], "the newest of a name"
    command = ["bench", "tables", "--records", str(tmp_path), "--learning", str(tmp_path / "curves.png")]
    assert main(command) == 0
    assert (tmp_path / "curves.png").stat().st_size > 5000
