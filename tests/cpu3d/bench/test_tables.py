"""The page of results: the newest record of each job, and nothing of what was not recorded."""

import json
from pathlib import Path

from cpu3d.__main__ import main
from cpu3d.bench.tables import HEAD, tables
from cpu3d.util.records import append_record

RECORDS = Path(__file__).parents[3] / "records"


def first(kind):
    return json.loads((RECORDS / f"{kind}.jsonl").read_text().splitlines()[0])


def test_the_newest_record_of_every_job_has_its_rows(tmp_path):
    policies, windows = first("policies"), first("windows")
    for batch, seconds in ((1, 7.0), (2, 8.0), (1, 9.0)):
        row = {**policies["rows"][0], "step_s": seconds, "step_s_min": seconds, "step_s_max": seconds}
        append_record(tmp_path / "policies.jsonl", "policies", {**policies, "batch": batch, "rows": [row]})
    old = {name: value for name, value in windows.items() if name != "device"}  # from before there was a choice
    for record in (old, {**windows, "rounds": 7}, {**windows, "device": "gpu:0"}):
        append_record(tmp_path / "windows.jsonl", "windows", record)
    lines = tables(tmp_path)
    assert [line.split(" | ")[4] for line in lines if line.startswith("| plain Keras")] == ["9.00", "8.00"]
    titles = [line for line in lines if "rounds in turn" in line]
    assert ["7 rounds" in title for title in titles] == [True, False]
    assert [line for line in lines if line.startswith("## ")] == [
        "## Memory policies",
        "## One pass against a sliding window",
    ]


def test_predictions_are_those_of_now_and_not_the_recorded_ones(tmp_path):
    record = first("policies")
    rows = [{**row, "predicted": {**row["predicted"], "step_s": 777}} for row in record["rows"] if row["predicted"]]
    append_record(tmp_path / "policies.jsonl", "policies", {**record, "rows": rows})
    predicted = [line for line in tables(tmp_path) if line.startswith("| predicted |")]
    assert len(predicted) == len(rows)
    assert not any("777" in line for line in predicted)


def test_the_page_is_written_or_printed(tmp_path, capsys):
    (tmp_path / "step.jsonl").write_bytes((RECORDS / "step.jsonl").read_bytes())
    command = ["bench", "tables", "--records", str(tmp_path)]
    assert tables(tmp_path / "none") == HEAD.splitlines()
    assert main(command) == 0
    assert main([*command, "--out", str(tmp_path / "r.md")]) == 0
    assert (tmp_path / "r.md").read_text() == capsys.readouterr().out
