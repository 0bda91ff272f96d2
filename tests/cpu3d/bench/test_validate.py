"""`bench validate` continues where it was cut and keeps its failures."""

import json
from types import SimpleNamespace

import pytest

from cpu3d.__main__ import main
from cpu3d.bench import validate as bench
from cpu3d.bench.harness import ProcessFailedError
from cpu3d.bench.validate import configurations
from memory_estimator.host import read_host
from memory_estimator.validation import read_measured

GIB = 2**30
PREDICTED = SimpleNamespace(
    allocator_peak_bytes=2 * GIB, process_peak_bytes=3 * GIB, upper_bound_bytes=4 * GIB, step_s=1.5
)


@pytest.fixture
def validate(monkeypatch, tmp_path):
    """`bench validate` without its measurements, of which every third fails: call it with options; what was asked."""

    def measure(work, request):
        run.asked.append(request)
        if len(run.asked) % 3 == 0:
            raise ProcessFailedError("it must end with a line of JSON, exited with -9 saying: nothing")
        found = {"engine_name": "none", "step_s": 1.0, "process_peak_bytes": 3 * GIB, "allocator_peak_bytes": 2 * GIB}
        threads = {"TF_NUM_INTRAOP_THREADS": str(request["threads"])}
        return {**request, **found, "threads": threads, "host": read_host().summary()}

    def run(*options):
        return main(["bench", "validate", "--record", str(run.record), *options])

    run.asked, run.record = [], tmp_path / "new" / "memory.jsonl"
    monkeypatch.setattr(bench, "in_fresh_process", measure)
    monkeypatch.setattr(bench, "estimate", lambda job, constants: PREDICTED)
    monkeypatch.setattr(bench, "find_constants", lambda threads: SimpleNamespace(name="some", origin="assumed"))
    monkeypatch.setattr(bench, "installed", lambda engine: True)
    return run


def test_a_cut_campaign_continues_and_measures_nothing_twice(validate, monkeypatch, capsys):
    assert validate("--first", "2") == 0
    one_more = bench.in_fresh_process
    monkeypatch.setattr(bench, "in_fresh_process", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert validate("--first", "7") == 130
    monkeypatch.setattr(bench, "in_fresh_process", one_more)
    for _ in range(2):
        assert validate("--first", "7") == 0
        assert len(validate.asked) == 7
    kept = read_measured(validate.record)
    assert [one.job for one in kept] == list(configurations(read_host().usable_cores)[:7])
    assert [bool(one.failure) for one in kept] == [False, False, True, False, False, True, False]
    assert " all " in capsys.readouterr().out


def test_what_does_not_fit_or_has_no_engine_is_left_out_and_not_recorded(validate, monkeypatch, capsys):
    monkeypatch.setattr(bench, "installed", lambda engine: engine == "stock")
    assert validate("--first", "4") == 0
    assert {request["engine"] for request in validate.asked} == {"stock"}
    assert validate("--engine", "itex") == 2
    assert "engine must be installed, got itex" in capsys.readouterr().err
    huge = SimpleNamespace(**{**vars(PREDICTED), "upper_bound_bytes": 2**60})
    monkeypatch.setattr(bench, "estimate", lambda job, constants: huge)
    assert validate("--first", "5") == 0
    assert len(validate.asked) == 4
    assert "left out" in capsys.readouterr().err


def test_a_record_of_another_host_or_a_damaged_one_is_refused(validate, capsys):
    assert validate("--first", "1") == 0
    line = json.loads(validate.record.read_text())
    for content, message in (
        (json.dumps({**line, "host": {**line["host"], "cpu": "another CPU"}}), "must be of this host"),
        ("{", ":1 must be"),
    ):
        validate.record.write_text(content + "\n")
        assert validate("--first", "2") == 2
        assert message in capsys.readouterr().err
    assert len(validate.asked) == 1
