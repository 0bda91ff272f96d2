"""`calibrate`: once for real on a tiny network, and on made-up measurements."""

import dataclasses
import json

import numpy as np
import pytest

from cpu3d.__main__ import main
from cpu3d.bench import calibrate
from cpu3d.bench.calibrate import keep_calibration
from cpu3d.bench.harness import in_fresh_process
from cpu3d.bench.step_costs import measure, request_for
from cpu3d.util.atomic import write_json
from memory_estimator.__main__ import main as estimator
from memory_estimator.calibration import find_constants, host_file, load_constants
from memory_estimator.common.files import read_json
from memory_estimator.estimate import estimate
from memory_estimator.host import read_host
from memory_estimator.job import Job
from models.config import UNetConfig
from tests.cpu3d.host.hosts import BFLOAT16

HOST = read_host()
SHIPPED = find_constants(HOST)
LARGE = Job(UNetConfig(filters=24, dtype="float32"), (128, 112, 96), engine="stock", threads=2)


def record(filters, dtype="float32", times=1.0, more_bytes=0):
    """The record of a step that took `times` the predicted seconds, of a process with more than the
    predicted bytes."""
    unet = UNetConfig(filters=filters, dtype=dtype)
    job = Job(unet, (96, 96, 96), engine="stock", threads=2)
    predicted = estimate(job, SHIPPED)
    return {
        **request_for(job),
        "engine_name": "TensorFlow 2",
        "threads": {"TF_NUM_INTRAOP_THREADS": 2},
        "step_s": times * predicted.step_s,
        "process_peak_bytes": predicted.process_peak_bytes + more_bytes,
    }


@pytest.fixture
def answers(needs_native, monkeypatch):
    """The answers of the measuring processes, in turn, on a host that computes as is predicted."""
    answers = []
    monkeypatch.setattr(calibrate, "computes_as_predicted", lambda: True)
    monkeypatch.setattr(calibrate, "in_fresh_process", lambda *_: answers.pop(0))
    return answers


def test_a_host_is_measured_and_its_file_is_found_again(answers, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(calibrate, "NETWORKS", ({"filters": 4, "depth": 2},))
    tiny = Job(UNetConfig(depth=2, filters=4, dtype="float32"), (16, 16, 16))
    request = request_for(tiny, engine="stock", threads=None, steps=1)
    answers += 2 * [in_fresh_process(measure, request)]
    monkeypatch.setattr(calibrate, "DTYPES", ("float32",))
    out = tmp_path / "new" / "other.json"
    assert main(["calibrate", "--engine", "stock", "--out", str(out)]) == 0
    assert find_constants(HOST).basis(LARGE, HOST).startswith("assumed from ")
    assert main(["calibrate", "--engine", "stock"]) == 0
    kept = find_constants(HOST)
    assert kept == load_constants(out)
    assert kept.baseline_bytes["itex"] == SHIPPED.baseline_bytes["itex"]
    capsys.readouterr()
    assert estimator(["--shape", "64", "64", "64", "--calibration", str(out), "--json"]) == 0
    basis = json.loads(capsys.readouterr().out)["constants"]["basis"]
    assert f"to steps on {HOST.cpu_model} on " in basis


def test_seconds_are_scaled_in_each_dtype_and_the_baseline_is_moved(answers, monkeypatch):
    monkeypatch.setattr(calibrate.psutil, "cpu_percent", lambda _: 0.0)
    answers += [record(16, times=2.0, more_bytes=10**7), record(8, times=3.0, more_bytes=2 * 10**7)]
    answers += [record(16, "bfloat16", 0.5, 3 * 10**7), record(8, "bfloat16", 0.5, 3 * 10**7)]
    assert main(["calibrate"]) == 0
    constants = find_constants(HOST)
    for dtype, times in (("float32", 2.5), ("bfloat16", 0.5)):  # of two the median is the mean
        before, after = (estimate(LARGE.with_unet(dtype=dtype), c) for c in (SHIPPED, constants))
        assert after.step_s == pytest.approx(times * before.step_s)
        assert after.process_peak_bytes - before.process_peak_bytes == 22_500_000


def test_on_a_busy_host_a_warning_is_printed(answers, monkeypatch, capsys):
    busy = iter([40.0])  # and then quiet
    monkeypatch.setattr(calibrate.psutil, "cpu_percent", lambda _: next(busy, 0.0))
    monkeypatch.setattr(calibrate, "ENGINES", ("stock", "itex", "none"))
    monkeypatch.setattr(calibrate, "installed", lambda engine: engine != "none")
    answers += 2 * [record(16, dtype) for dtype in 2 * ("float32", "bfloat16")]
    assert main(["calibrate", "--all"]) == 0
    assert not answers
    assert "40%" in capsys.readouterr().err


# --- What a calibration changes ---


OTHER = dataclasses.replace(HOST, isa=BFLOAT16, is_here=False)
JOB = Job(UNetConfig(depth=2, filters=8, dtype="float32"), (64, 64, 64), engine="stock", threads=3)
WIDE = dataclasses.replace(JOB, shape=(240, 240, 160))


def predicted_s(job=JOB):
    return estimate(job, find_constants(OTHER)).step_s


def keep(job, step_s):
    """Keep a calibration by a single job."""
    peak_bytes = estimate(job, find_constants(OTHER)).process_peak_bytes
    path = host_file(OTHER)
    path.parent.mkdir(parents=True, exist_ok=True)
    keep_calibration(path, [(job, step_s, peak_bytes)], OTHER)


def test_all_predictions_of_a_dtype_are_scaled_to_what_a_step_took_within_limits():
    jobs = [JOB, WIDE, JOB.with_unet(dtype="bfloat16")]
    before = np.array([predicted_s(job) for job in jobs])
    for scale, kept in ((20, 8), (0.01, 1 / 8), (1.5, 1.5)):
        keep(JOB, scale * before[0])  # against what was predicted without any calibration
        assert [predicted_s(job) for job in jobs] == pytest.approx([kept, kept, 1] * before)
    basis = find_constants(OTHER).basis(dataclasses.replace(JOB, threads=6), OTHER)
    assert basis.endswith("from 3 threads to 6 by assumption")


@pytest.mark.parametrize("name", ["schema", "shipped"])
def test_what_is_of_another_version_or_of_other_constants_is_not_used(name):
    before = predicted_s()
    keep(JOB, 3 * before)
    path = host_file(OTHER)
    write_json(path, {**read_json(path), name: "another"})
    assert predicted_s() == before


def test_the_best_native_operations_alone_are_measured(monkeypatch, tmp_path, capsys):
    with monkeypatch.context() as patch:
        patch.setenv("CPU3D_INSTRUCTION_SET", "avx2")
        assert main(["calibrate"]) == 2
    monkeypatch.setattr("models.native.build.BUILT", tmp_path)
    assert main(["calibrate"]) == 2  # none is there
    assert capsys.readouterr().err.count("native operations must be built") == 2
