"""`bench validate` continues where it was cut and keeps its failures; the page has the newest
record of each job."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from cpu3d.__main__ import main
from cpu3d.bench import estimator_errors as bench
from cpu3d.bench.estimator_errors import read_measured
from cpu3d.bench.harness import ProcessFailedError
from cpu3d.bench.tables import tables
from cpu3d.util.records import append_record
from memory_estimator.host import read_host
from memory_estimator.measured import configurations, request_for

RECORDS = Path(__file__).parents[3] / "records"
MIB = 2**20
PEAKS = {"allocator_peak_bytes": 2 * MIB, "process_peak_bytes": 3 * MIB}
PREDICTED = {**PEAKS, "upper_bound_bytes": 4 * MIB, "step_s": 1.5, "kind": None}


@pytest.fixture
def validate(monkeypatch, tmp_path):
    """`bench validate` without its measurements, of which every third fails: call it with options;
    what was asked."""

    def measure(work, request):
        run.asked.append(request)
        if len(run.asked) % 3 == 0:
            raise ProcessFailedError(
                "it must end with a line of JSON, exited with -9 saying: nothing"
            )
        threads = {"TF_NUM_INTRAOP_THREADS": str(request["threads"])}
        about = {"engine_name": "none", "threads": threads, "host": read_host().summary()}
        return {**request, **PEAKS, **about, "step_s": 1.0}

    def run(*options):
        return main(["bench", "validate", "--record", str(run.record), *options])

    run.asked, run.record = [], tmp_path / "new" / "memory.jsonl"
    monkeypatch.setattr(bench, "in_fresh_process", measure)
    monkeypatch.setattr(bench, "estimate", lambda job, constants: SimpleNamespace(**PREDICTED))
    monkeypatch.setattr(
        bench, "find_constants", lambda *_: SimpleNamespace(name="some", origin="assumed")
    )
    monkeypatch.setattr(bench, "installed", lambda engine: True)
    return run


def test_a_cut_campaign_continues_and_measures_nothing_twice(validate, monkeypatch, capsys):
    assert validate("--first", "2") == 0
    with monkeypatch.context() as patch:
        patch.setattr(
            bench, "in_fresh_process", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        assert validate("--first", "7") == 130
    for _ in range(2):
        assert validate("--first", "7") == 0
        assert len(validate.asked) == 7
    kept = read_measured(validate.record)
    assert [measured.job for measured in kept] == list(configurations(read_host().usable_cores)[:7])
    assert [bool(measured.failure) for measured in kept] == [
        False,
        False,
        True,
        False,
        False,
        True,
        False,
    ]
    assert " all " in capsys.readouterr().out


def test_what_does_not_fit_or_has_no_engine_is_left_out_and_not_recorded(
    validate, monkeypatch, capsys
):
    monkeypatch.setattr(bench, "installed", lambda engine: engine == "stock")
    assert validate("--first", "4") == 0
    assert {request["engine"] for request in validate.asked} == {"stock"}
    assert validate("--engine", "itex") == 2
    assert "engine must be installed, got itex" in capsys.readouterr().err
    huge = SimpleNamespace(**{**PREDICTED, "upper_bound_bytes": 2**60})
    monkeypatch.setattr(bench, "estimate", lambda job, constants: huge)
    assert validate("--first", "5") == 0
    assert len(validate.asked) == 4
    assert "left out" in capsys.readouterr().err
    monkeypatch.setattr(bench, "installed", lambda engine: False)
    assert validate("--first", "5") == 2
    assert "engine must be installed, got none" in capsys.readouterr().err


def test_a_record_of_another_host_or_a_damaged_one_is_refused(validate, capsys):
    assert validate("--first", "1") == 0
    line = json.loads(validate.record.read_text())
    other = json.dumps({**line, "host": {**line["host"], "cpu": "another CPU"}})
    for content, message in ((other, "must be of this host"), ("{", ":1 must be")):
        validate.record.write_text(content + "\n")
        assert validate("--first", "2") == 2
        assert message in capsys.readouterr().err
    assert len(validate.asked) == 1


# --- The page of results ---


def first(kind):
    return json.loads((RECORDS / f"{kind}.jsonl").read_text().splitlines()[0])


def test_the_newest_record_of_every_job_has_its_rows(tmp_path, capsys):
    policies = first("policies")
    for batch, seconds in ((1, 7.0), (2, 8.0), (1, 9.0)):
        row = {
            **policies["rows"][0],
            "name": "plain Keras",
            "kind": "peer",
            "step_s": seconds,
            "predicted": None,
        }
        append_record(
            tmp_path / "policies.jsonl", "policies", {**policies, "batch": batch, "rows": [row]}
        )
    command = ["bench", "tables", "--records", str(tmp_path)]
    assert main(command) == 0
    page = capsys.readouterr().out
    lines = page.splitlines()
    assert [line.split(" | ")[4] for line in lines if line.startswith("| plain Keras")] == [
        "9.00 |",
        "8.00 |",
    ]
    headings = [line for line in lines if line.startswith("## ")]
    assert headings == ["## Memory policies"]
    assert main([*command, "--out", str(tmp_path / "r.md")]) == 0
    assert (tmp_path / "r.md").read_text() == page


def test_predictions_are_those_of_now_and_not_the_recorded_ones(tmp_path):
    record = first("policies")
    rows = [
        {**row, "predicted": {**row["predicted"], "step_s": 777}}
        for row in record["rows"]
        if row["predicted"]
    ]
    append_record(tmp_path / "policies.jsonl", "policies", {**record, "rows": rows})
    shown = [line.split(" | ") for line in tables(tmp_path) if line.startswith("| ")][1:]
    assert [line[0][2:] for line in shown] == ["speed", "predicted", "lean", "predicted"]
    assert shown[2][1] == f"{rows[-1]['allocator_peak_bytes'] / 2**30:.2f}"
    assert not any("777" in cell for line in shown for cell in line)


def test_the_page_of_validation_has_each_measured_configuration(tmp_path):
    jobs = configurations(2)[:3]
    for job in jobs:
        about = {
            "engine_name": "none",
            "threads": {"TF_NUM_INTRAOP_THREADS": "2"},
            "host": read_host().summary(),
        }
        record = {**request_for(job), **PEAKS, **about, "step_s": 1.0}
        append_record(tmp_path / "memory" / "one.jsonl", "memory", record)
    assert (
        main(["bench", "tables", "--records", str(tmp_path), "--page", str(tmp_path / "v.md")]) == 0
    )
    details = (tmp_path / "v.md").read_text().split("| configuration |")[1].splitlines()
    assert len([line for line in details if line.startswith("| ")]) == len(jobs)
