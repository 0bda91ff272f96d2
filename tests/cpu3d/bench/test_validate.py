"""The campaign continues where it was cut, keeps its failures, and its page follows the code."""

import dataclasses
import itertools
import json
import math
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from cpu3d.__main__ import main
from cpu3d.bench import harness, validate
from cpu3d.bench.harness import ProcessFailedError
from cpu3d.bench.validate import _job, configurations, describe, page
from cpu3d.errors import InputError
from cpu3d.host.memory import resident
from memory_estimator.estimate import Accuracy, Bound
from memory_estimator.host import read_host
from memory_estimator.job import Job
from memory_estimator.validation import Measured, compare, read_measured
from models.config import POLICIES, UNetConfig
from models.layer_plan import layer_plan

GIB = 2**30
SAID = SimpleNamespace(
    allocator_peak_bytes=2 * GIB, process_peak_bytes=3 * GIB, upper_bound_bytes=4 * GIB, step_s=1.5, timeline=None
)


@pytest.fixture
def measured(monkeypatch):
    """The campaign without its measurements; what was asked for, in order. Every third one fails."""
    asked = []

    def fake(request, threads):
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
            "threads": {"TF_NUM_INTRAOP_THREADS": str(threads)},
            "host": read_host().summary(),
        }
        return result, []

    monkeypatch.setattr(validate, "measure_memory", fake)
    monkeypatch.setattr(validate, "estimate", lambda job, constants: SAID)
    monkeypatch.setattr(validate, "find_constants", lambda threads: SimpleNamespace(name="some", origin="assumed"))
    monkeypatch.setattr(validate, "installed", lambda engine: True)
    return asked


def test_a_cut_campaign_continues_and_measures_nothing_twice(measured, tmp_path, monkeypatch, capsys):
    record = tmp_path / "new" / "memory.jsonl"
    assert main(["bench", "validate", "--record", str(record), "--first", "2"]) == 0
    assert len(measured) == 2

    one_more = validate.measure_memory
    monkeypatch.setattr(validate, "measure_memory", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
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


def test_an_engine_that_is_not_installed_is_left_out_and_not_recorded(measured, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(validate, "installed", lambda engine: engine == "stock")
    record = tmp_path / "memory.jsonl"
    assert main(["bench", "validate", "--record", str(record), "--first", "4"]) == 0
    assert {request["engine"] for request in measured} == {"stock"}
    assert "left out, as it is not installed: itex" in capsys.readouterr().err
    assert main(["bench", "validate", "--record", str(record), "--engine", "itex"]) == 2
    assert "engine must be installed, got itex" in capsys.readouterr().err


def test_what_was_refused_before_a_process_started_is_no_failure_of_the_job(measured, tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise InputError("something must be otherwise, got this; do that")

    monkeypatch.setattr(validate, "measure_memory", refuse)
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
    assert ":1 must be JSON of schema 1" in capsys.readouterr().err
    assert measured == []


def test_threads_are_those_of_the_plan_whatever_the_environment_says(measured, tmp_path, monkeypatch):
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", "1")
    record = tmp_path / "memory.jsonl"
    for _ in range(2):
        assert main(["bench", "validate", "--record", str(record), "--first", "1"]) == 0
    assert len(measured) == 1
    assert read_measured(record)[0].job.threads == read_host().usable_cores


ACCURACY = Accuracy("r.jsonl", 3, Bound(0, 0), Bound(0, 0), Bound(0, 0), 0.045, 64 * 2**20)


def test_the_page_shows_every_row_its_misses_and_what_failed():
    unet = UNetConfig(policy="speed")
    base = Measured(Job(unet), 1.0, 3 * GIB, 2 * GIB, host="some CPU", date="2026-11-20")
    missed = dataclasses.replace(base, process_peak_bytes=4 * GIB + 1, job=Job(unet, batch=2), step_spread=0.123)
    residual = Job(dataclasses.replace(unet, residual=True))
    uncounted = dataclasses.replace(base, allocator_peak_bytes=None, job=residual)
    earlier = (dataclasses.replace(base, step_s=9.0),)
    small = dataclasses.replace(base, job=Job(unet, (64, 64, 64)), earlier=earlier)
    failed = Measured(Job(unet, batch=3), failure="exited with -9", host="some CPU", date="2026-11-21")
    measured = [base, missed, uncounted, small, failed]
    text = "\n".join(page(measured, compare(measured, lambda one: SAID), ACCURACY))
    assert "## Errors of the 3 larger configurations" in text
    assert "| 128x128x128 f16 d5 b1 c4 k3 float32 itex instance adam | 2.000 | +0.0 % | 3.000 | +0.0 % | +33." in text
    assert "| 4.000 | -25.0 % | -0.0 % | 1.00 | 12 %, disturbed | +50.0 % | process, upper bound, time |" in text
    assert "f16 d5 b1 c4 k3 float32 itex instance adam residual | - | - |" in text
    assert text.rindex("| 64x64x64") > text.index("## 96^3 voxels and less")
    assert "- 128x128x128 f16 d5 b3/1 c4 k3 float32 itex instance adam: exited with -9" in text
    assert "2026-11-20 to 2026-11-21" in text
    assert "| 64x64x64 f16 d5 b1 c4 k3 float32 itex instance adam | 9.00 (0 %), then 1.00 (0 %) |" in text


def test_the_page_says_what_is_demanded_beside_what_was_found():
    base = Measured(Job(), 1.5, 3 * GIB, 2 * GIB, host="some CPU", date="2026-11-20")
    over = dataclasses.replace(base, process_peak_bytes=4 * GIB + 1, job=Job(batch=2))
    text = " ".join(page([base, over], compare([base, over], lambda one: SAID), ACCURACY))
    assert "| allocator peak, median error | 1.0 % | 0.0 % | met |" in text
    assert "| process peak, worst error | 5.0 % | 25.0 % | **not met** |" in text
    assert "| peaks above their upper bound | 0 | 1 | **not met** |" in text
    assert "adds 4.5 % of the peak and 64 MiB" in text


def test_a_page_of_nothing_has_no_numbers():
    text = "\n".join(page([], [], ACCURACY))
    assert "| all | 0 | - | - | - (-) | - |" in text
    assert "nan" not in text


JOBS = configurations(threads=2)
LARGE = [job for job in JOBS if math.prod(job.shape) >= 128**3]


def test_the_list_can_be_built_and_what_is_not_held_out_is_small():
    assert len(JOBS) == len(set(JOBS))
    assert len(LARGE) >= 66
    assert all(math.prod(job.shape) <= 96**3 for job in JOBS if job not in LARGE)
    for job in JOBS:
        layer_plan(job.unet, job.shape)
        assert describe(_job(describe(job), threads=2)) == describe(job)
    assert describe(JOBS[1]) == "128x128x128 f8 d5 b1 c4 k3 float32 stock instance adam"
    assert describe(_job("64x64x64 f8 d3 b4/2 c1 k1 float32 itex none sgd deep lean", 2)).endswith("sgd deep lean")


def test_nearly_every_two_settings_meet_in_some_held_out_configuration():
    words = [describe(job).split() for job in LARGE]
    factors = [*range(10), "policy"]
    of = {(row, column): row_words[column] for row, row_words in enumerate(words) for column in range(10)}
    of.update({(row, "policy"): job.policy for row, job in enumerate(LARGE)})
    assert {job.policy for job in LARGE} == set(POLICIES)
    for one, other in itertools.combinations(factors, 2):
        if 3 in (one, other):  # a batch in parts comes with few of the others
            continue
        met = {(of[row, one], of[row, other]) for row in range(len(LARGE))}
        values = [len({of[row, factor] for row in range(len(LARGE))}) for factor in (one, other)]
        assert len(met) >= 0.55 * values[0] * values[1], (one, other)


SLEEPER = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell does for what it starts with &
from cpu3d.bench.harness import last_json_line
child = "import os, time; print(os.getpid(), file=open({path!r}, 'w'), flush=True); time.sleep(60)"
try:
    last_json_line([sys.executable, "-c", child], "a sleeper")
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_the_background_ends_it_and_the_process_that_measures(tmp_path, number):
    told = tmp_path / "pid"
    process = subprocess.Popen([sys.executable, "-c", SLEEPER.format(path=str(told))], cwd=harness.ROOT)
    deadline = time.time() + 120
    while not (told.exists() and told.read_text().strip()) and time.time() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(timeout=55) == 130
    assert resident(int(told.read_text())) is None
