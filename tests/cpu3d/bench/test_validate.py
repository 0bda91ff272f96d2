"""The campaign continues where it was cut, keeps its failures, and its page follows the code."""

import dataclasses
import json
from types import SimpleNamespace

import pytest

from cpu3d.__main__ import main
from cpu3d.bench import memory
from cpu3d.bench.harness import ProcessFailedError
from cpu3d.bench.memory import configurations, describe
from cpu3d.bench.tables import page
from cpu3d.errors import InputError
from memory_estimator.estimate import Accuracy, Bound
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
            raise ProcessFailedError("the measured step must end with a line of JSON, exited with -9 saying: nothing")
        result = {
            **request,
            "engine_name": "none",
            "step_s": 1.0,
            "process_peak_bytes": 3 * GIB,
            "allocator_peak_bytes": 2 * GIB,
            "moments": [["step", 0, 1]],
            "threads": {"TF_NUM_INTRAOP_THREADS": str(request["threads"])},
            "host": read_host().summary(),
        }
        return result, []

    monkeypatch.setattr(memory, "measure_memory", fake)
    monkeypatch.setattr(memory, "estimate", lambda job, constants: SAID)
    monkeypatch.setattr(memory, "find_constants", lambda threads: SimpleNamespace(name="some", origin="assumed"))
    monkeypatch.setattr(memory, "installed", lambda engine: True)
    return asked


def test_a_cut_campaign_continues_and_measures_nothing_twice(measured, tmp_path, monkeypatch, capsys):
    record = tmp_path / "new" / "memory.jsonl"
    assert main(["bench", "validate", "--record", str(record), "--first", "2"]) == 0
    assert len(measured) == 2

    one_more = memory.measure_memory
    monkeypatch.setattr(memory, "measure_memory", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert main(["bench", "validate", "--record", str(record), "--first", "7"]) == 130
    monkeypatch.setattr(memory, "measure_memory", one_more)

    assert main(["bench", "validate", "--record", str(record), "--first", "7"]) == 0
    assert len(measured) == 7
    assert main(["bench", "validate", "--record", str(record), "--first", "7"]) == 0
    assert len(measured) == 7
    kept = read_measured(record)
    assert [one.job for one in kept] == list(configurations(read_host().usable_cores)[:7])
    assert [bool(one.failure) for one in kept] == [False, False, True, False, False, True, False]
    assert "moments" not in record.read_text()
    assert "5 held-out configurations" in capsys.readouterr().out


def test_what_does_not_fit_is_left_out_and_not_recorded(measured, tmp_path, monkeypatch, capsys):
    huge = SimpleNamespace(**{**vars(SAID), "upper_bound_bytes": 2**60})
    monkeypatch.setattr(memory, "estimate", lambda job, constants: huge)
    record = tmp_path / "memory.jsonl"
    assert main(["bench", "validate", "--record", str(record), "--first", "2"]) == 0
    assert measured == []
    assert not record.exists()
    assert "left out" in capsys.readouterr().err


def test_an_engine_that_is_not_installed_is_left_out(measured, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(memory, "installed", lambda engine: engine == "stock")
    record = tmp_path / "memory.jsonl"
    assert main(["bench", "validate", "--record", str(record), "--first", "4"]) == 0
    assert {request["engine"] for request in measured} == {"stock"}
    assert main(["bench", "validate", "--record", str(record), "--engine", "itex"]) == 2
    assert "engine must be installed, got itex" in capsys.readouterr().err


def test_what_was_refused_before_a_process_started_is_no_failure_of_the_job(measured, tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise InputError("something must be otherwise, got this; do that")

    monkeypatch.setattr(memory, "measure_memory", refuse)
    record = tmp_path / "memory.jsonl"
    assert main(["bench", "validate", "--record", str(record), "--first", "1"]) == 2
    assert not record.exists()
    assert "something must be otherwise" in capsys.readouterr().err


def test_only_what_was_disturbed_is_measured_again_and_only_on_request(measured, tmp_path, capsys):
    record = tmp_path / "memory.jsonl"
    again = ["bench", "validate", "--record", str(record), "--first", "2"]
    assert main(again) == 0
    first, second = (json.loads(line) for line in record.read_text().splitlines())
    lines = [{**first, "step_s_min": 0.9, "step_s_max": 1.01}, {**second, "step_s_min": 0.96, "step_s_max": 1.05}]
    record.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(again) == 0
    assert len(measured) == 2
    assert main([*again, "--again-disturbed"]) == 0
    assert [request["unet"] for request in measured[2:]] == [first["unet"]]
    assert len(record.read_text().splitlines()) == 3


def test_a_record_of_another_host_is_refused(measured, tmp_path, capsys):
    record = tmp_path / "memory.jsonl"
    assert main(["bench", "validate", "--record", str(record), "--first", "1"]) == 0
    line = json.loads(record.read_text())
    record.write_text(json.dumps({**line, "host": {**line["host"], "cpu": "another CPU"}}) + "\n")
    assert main(["bench", "validate", "--record", str(record), "--first", "2"]) == 2
    assert "must be of this host" in capsys.readouterr().err
    assert len(measured) == 1


def test_none_or_a_damaged_record_is_refused_before_anything_is_measured(measured, tmp_path, capsys):
    record = tmp_path / "memory.jsonl"
    assert main(["bench", "validate", "--record", str(record), "--first", "0"]) == 2
    assert "first must be at least 1, got 0" in capsys.readouterr().err
    record.write_text("{\n")
    assert main(["bench", "validate", "--record", str(record)]) == 2
    assert ":1 must be a measured step" in capsys.readouterr().err
    assert measured == []


ACCURACY = Accuracy("r.jsonl", 3, Bound(0, 0), Bound(0, 0), Bound(0, 0), 0.045, 64 * 2**20)


def test_the_page_shows_every_row_its_misses_and_what_failed():
    unet = UNetConfig(policy="speed")
    base = Measured(Job(unet), 1.0, 3 * GIB, 2 * GIB, host="some CPU", date="2026-11-20")
    missed = dataclasses.replace(base, process_peak_bytes=4 * GIB + 1, job=Job(unet, batch=2), step_spread=0.123)
    residual = Job(dataclasses.replace(unet, residual=True))
    uncounted = dataclasses.replace(base, allocator_peak_bytes=None, job=residual)
    small = dataclasses.replace(base, job=Job(unet, (64, 64, 64)))
    failed = Measured(Job(unet, batch=3), failure="exited with -9", host="some CPU", date="2026-11-21")
    measured = [base, missed, uncounted, small, failed]
    text = "\n".join(page(measured, compare(measured, lambda one: SAID), ACCURACY))
    assert "## Errors of the 3 larger configurations" in text
    assert "| 128x128x128 f16 d5 b1 c4 k3 float32 itex instance adam | 2.000 | +0.0 % | 3.000 | +0.0 % | +33." in text
    assert "| 4.000 | -25.0 % | -0.0 % | 1.00 | 12 %, disturbed | +50.0 % | process, upper bound, time |" in text
    assert "f16 d5 b1 c4 k3 float32 itex instance adam residual | - | - |" in text
    assert text.rindex("| 64x64x64") > text.index("## 96^3 voxels and less")
    assert "- 128x128x128 f16 d5 b3/1 c4 k3 float32 itex instance adam: exited with -9" in text
    assert "some CPU, 1 threads, 2026-11-20" in text


def test_the_configurations_are_those_of_the_published_record_on_this_host_s_threads():
    jobs = configurations(threads=7)
    assert len(jobs) == len(set(jobs)) >= 76
    assert {job.threads for job in jobs} == {7}
    assert "128x128x128 f16 d5 b1 c4 k3 bfloat16 itex instance adam lean" in map(describe, jobs)
    unet = UNetConfig(norm="none", up="upsampling", residual=True, deep_supervision=True, policy="lean")
    words = "64x64x64 f16 d5 b4/2 c4 k3 float32 itex none adam residual upsampling deep lean"
    assert describe(Job(unet, (64, 64, 64), batch=4, micro_batch=2)) == words
