"""The campaign continues where it was cut, keeps its failures, and its page follows the code."""

import dataclasses
import json
import sys
import time
from types import SimpleNamespace

import pytest

from cpu3d.__main__ import main
from cpu3d.bench import step, tables, validate
from cpu3d.bench.validation_page import page
from cpu3d.errors import InputError
from cpu3d.host.memory import resident
from memory_estimator.host import read_host
from memory_estimator.job import Job
from memory_estimator.validation import Measured, compare, read_measured
from models.config import UNetConfig

GIB = 2**30
SAID = SimpleNamespace(
    allocator_peak_bytes=2 * GIB, process_peak_bytes=3 * GIB, upper_bound_bytes=4 * GIB, step_s=1.5, timeline=None
)


@pytest.fixture
def measured(monkeypatch):
    """The campaign without its measurements; what was asked for, in order. Every third one fails."""
    asked = []

    def fake(request):
        asked.append(request)
        if len(asked) % 3 == 0:
            raise InputError("the measured step must end with a line of JSON, exited with -9 saying: nothing")
        result = {
            **request,
            "engine_name": "none",
            "step_s": 1.0,
            "process_peak_bytes": 3 * GIB,
            "allocator_peak_bytes": 2 * GIB,
            "moments": [["step", 0, 1]],
            "threads": {"TF_NUM_INTRAOP_THREADS": str(read_host().usable_cores)},
            "host": {"cpu": "some CPU", "cores": 2, "isa": []},
        }
        return result, []

    monkeypatch.setattr(validate, "measure_memory", fake)
    monkeypatch.setattr(validate, "estimate", lambda job, constants: SAID)
    monkeypatch.setattr(validate, "find_constants", lambda threads: None)
    return asked


def test_a_cut_campaign_continues_and_measures_nothing_twice(measured, tmp_path, monkeypatch, capsys):
    record = tmp_path / "new" / "memory.jsonl"
    assert main(["bench", "validate", "--record", str(record), "--first", "2"]) == 0
    assert len(measured) == 2

    one_more = validate.measure_memory
    monkeypatch.setattr(validate, "measure_memory", lambda request: (_ for _ in ()).throw(KeyboardInterrupt))
    assert main(["bench", "validate", "--record", str(record), "--first", "7"]) == 130
    monkeypatch.setattr(validate, "measure_memory", one_more)

    assert main(["bench", "validate", "--record", str(record), "--first", "7"]) == 0
    assert len(measured) == 7
    assert main(["bench", "validate", "--record", str(record), "--first", "7"]) == 0
    assert len(measured) == 7
    kept = read_measured(record)
    assert [one.job for one in kept] == list(validate.configurations(read_host().usable_cores)[:7])
    assert [bool(one.failure) for one in kept] == [False, False, True, False, False, True, False]
    assert "moments" not in record.read_text()
    assert "5 held-out configurations" in capsys.readouterr().out


def test_what_does_not_fit_is_left_out_and_not_recorded(measured, tmp_path, monkeypatch, capsys):
    huge = SimpleNamespace(**{**vars(SAID), "upper_bound_bytes": 2**60})
    monkeypatch.setattr(validate, "estimate", lambda job, constants: huge)
    record = tmp_path / "memory.jsonl"
    assert main(["bench", "validate", "--record", str(record), "--first", "2"]) == 0
    assert measured == []
    assert not record.exists()
    assert "left out" in capsys.readouterr().err


def test_only_one_engine_on_request(measured, tmp_path):
    record = tmp_path / "memory.jsonl"
    assert main(["bench", "validate", "--record", str(record), "--engine", "stock", "--first", "4"]) == 0
    assert {request["engine"] for request in measured} == {"stock"}


def test_a_damaged_record_is_refused_before_anything_is_measured(measured, tmp_path, capsys):
    record = tmp_path / "memory.jsonl"
    record.write_text("{\n")
    assert main(["bench", "validate", "--record", str(record)]) == 2
    assert ":1 must be a measured step" in capsys.readouterr().err
    assert measured == []


def test_the_page_shows_every_row_its_misses_and_what_failed():
    base = Measured(Job(), 1.0, 3 * GIB, 2 * GIB, host="some CPU", date="2026-11-20")
    missed = dataclasses.replace(base, process_peak_bytes=4 * GIB + 1, job=Job(batch=2))
    uncounted = dataclasses.replace(base, allocator_peak_bytes=None, job=Job(UNetConfig(residual=True)))
    small = dataclasses.replace(base, job=Job(shape=(64, 64, 64)))
    failed = Measured(Job(batch=3), failure="exited with -9", host="some CPU", date="2026-11-21")
    measured = [base, missed, uncounted, small, failed]
    text = "\n".join(page(measured, compare(measured, lambda one: SAID)))
    assert "## Errors of the 3 larger configurations" in text
    assert "Configurations with one: 3 of 3." in text  # all predicted times are half too long
    assert "| 128x128x128 f16 d5 b1 c4 k3 float32 itex instance adam | 2.000 | 2.000 | +0.0 % | 3.000 | 3.000 |" in text
    assert "| -25.0 % | -0.0 % | 1.00 | 1.50 | +50.0 % | process, upper bound, time |" in text
    assert "f16 d5 b1 c4 k3 float32 itex instance adam residual | - | 2.000 | - |" in text
    assert text.index("64x64x64") > text.index("## 96^3 voxels and less")
    assert "- 128x128x128 f16 d5 b3 c4 k3 float32 itex instance adam: exited with -9" in text
    assert "2026-11-20 to 2026-11-21" in text


def test_the_page_is_written_from_the_records(measured, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tables, "estimate", lambda job, constants: SAID)
    monkeypatch.setattr(tables, "shipped_constants", lambda isa: None)
    monkeypatch.setattr(tables, "step_table", lambda record: ["step"])
    monkeypatch.setattr(tables, "engine_table", lambda record: ["engines"])
    for kind in ("step", "engines"):
        (tmp_path / f"{kind}.jsonl").write_text(json.dumps({"schema": 1, "kind": kind}) + "\n")
    main(["bench", "validate", "--record", str(tmp_path / "memory.jsonl"), "--first", "2"])
    assert main(["bench", "tables", "--records", str(tmp_path), "--page", str(tmp_path / "validation.md")]) == 0
    assert "## Errors of the 2 larger configurations" in (tmp_path / "validation.md").read_text()
    assert "| all | 2 |" in capsys.readouterr().out


def test_an_interrupt_leaves_no_measuring_process_behind():
    seen = []

    def look(pid):
        seen.append(pid)
        if len(seen) > 2:
            raise KeyboardInterrupt

    begin = time.time()
    with pytest.raises(KeyboardInterrupt):
        step.last_json_line([sys.executable, "-c", "import time; time.sleep(60)"], "a sleeper", look=look)
    assert time.time() - begin < 30
    assert resident(seen[0]) is None
