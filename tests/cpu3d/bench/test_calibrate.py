"""`calibrate`: what it puts together, and once for real on tiny networks."""

import argparse
import dataclasses
import json

import pytest

from cpu3d.bench import calibrate
from cpu3d.errors import InputError
from memory_estimator.calibration import load_constants, shipped_constants
from memory_estimator.estimate import estimate
from memory_estimator.host import read_host
from memory_estimator.job import Job
from models.config import UNetConfig


def result(engine, size=600, ops=50, seconds=1e-3, others=0.0):
    rows = [
        {"group": "conv", "features": {"work": 1e9}, "seconds": seconds},
        {"group": "norm", "features": {"traffic": 1e8}, "seconds": 2e-3},
    ]
    return {
        "engine": engine,
        "engine_name": f"TensorFlow 0.0, {engine}",
        "networks": [{"rows": rows, "ops": 10, "step_s": seconds + 3e-3, "others": others}],
        "left_out": [],
        "check": {
            "unet": {"depth": 2, "filters": 8},
            "shape": [16, 16, 16],
            "allocator_peak_bytes": 10**7,
            "process_peak_bytes": 10**9,
        },
        "runtime": {"bytes": size, "ops": ops},
        "threads": 3,
        "versions": {},
        "environment": {},
    }


def test_each_engine_and_dtype_is_fitted_by_itself():
    results = [("bfloat16", result("itex", 700, 100)), ("float32", result("itex", 600, 50, seconds=4e-3))]
    found = calibrate.put_together(results, read_host(), "a host")
    assert found.speeds("itex", "bfloat16")["conv"]["work"] == pytest.approx(1e-12)
    assert found.speeds("itex", "float32")["conv"]["work"] == pytest.approx(4e-12)
    assert found.baseline_bytes == {"itex": 500}
    assert found.op_bytes == {"itex": 2}
    assert (found.name, found.threads, found.cpu) == ("a host", 3, read_host().cpu_model)
    assert found.origins["costs"].startswith("measured")
    assert found.origins["saturating_threads"].startswith("assumed")


def test_what_was_not_timed_is_taken_from_the_shipped_constants_and_named():
    found = calibrate.put_together([("bfloat16", result("itex"))], read_host())
    shipped = shipped_constants(read_host().isa).for_threads(3)
    assert found.costs["itex"]["bfloat16"]["join"] == shipped.costs["itex"]["bfloat16"]["join"]
    assert "join (itex, bfloat16)" in found.origins["costs"]
    assert "norm (itex" not in found.origins["costs"]


def test_every_engine_that_was_measured_is_named_once():
    results = [(dtype, result(engine)) for engine in ("itex", "stock") for dtype in ("bfloat16", "float32")]
    assert calibrate.put_together(results, read_host()).record.endswith("TensorFlow 0.0, itex; TensorFlow 0.0, stock")


def test_the_check_holds_measured_peaks_against_the_rules():
    results = [("float32", result("stock"))]
    constants = calibrate.put_together(results, read_host())
    found = calibrate.check(constants, *results[0])
    job = Job(UNetConfig(depth=2, filters=8), (16, 16, 16), engine="stock", threads=3)
    said = estimate(job, constants)
    assert found["job"] == "16x16x16 f8 d2 b1 c4 k3 float32 stock instance adam"
    assert found["allocator_peak_bytes"] == {"measured": 10**7, "predicted": said.allocator_peak_bytes}
    assert found["process_peak_bytes"] == {"measured": 10**9, "predicted": said.process_peak_bytes}


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """A calibration that measures nothing: call it with what other processes kept busy; the file it writes."""
    out, budgets = tmp_path / "calibration.json", []
    host = dataclasses.replace(read_host(), isa=("avx512_bf16",))
    monkeypatch.setattr(calibrate, "read_host", lambda: host)

    def run(others, engine="stock", everything=False):
        def measure(engine, dtype, host, budget_s):
            budgets.append(budget_s)
            return result(engine, others=others)

        monkeypatch.setattr(calibrate, "_measure", measure)
        monkeypatch.setattr(calibrate, "installed", lambda engine: True)
        args = argparse.Namespace(engine=engine, all=everything, out=out, name=f"{others}")
        assert calibrate.run(args) == 0
        return load_constants(out)

    run.budgets, run.out = budgets, out
    return run


def test_a_disturbed_calibration_says_so_and_never_replaces_a_quiet_one(fake, capsys):
    assert "disturbed by other processes on 0.5 CPUs" in fake(0.5).origins["costs"]
    assert fake(0.7).name == "0.7"
    assert fake(0.01).name == "0.01"
    assert fake(0.5).name == "0.01"
    assert "left as it was" in capsys.readouterr().out
    assert "disturbed" not in fake(0.02).origins["costs"]
    assert fake(0.5, everything=True).name == "0.5"  # the quiet one knows less


def test_each_engine_has_a_minute_and_each_dtype_its_share(fake):
    fake(0.0)
    assert fake.budgets == [pytest.approx(30, abs=1), pytest.approx(60, abs=1)]
    fake(0.0, everything=True)
    assert fake.budgets[2:] == [pytest.approx(120 / left, abs=1) for left in (4, 3, 2, 1)]
    assert json.loads(fake.out.read_text())["budget_s"] == 120


def tiny(dtype):
    unets = [UNetConfig(depth=2, filters=filters, dtype=dtype, policy="speed") for filters in (4, 8)]
    return [{"unet": unet.__dict__, "shape": (16, 16, 16), "steps": steps} for unet, steps in zip(unets, (0, 2))]


def test_a_calibration_is_measured_written_and_found_again(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(calibrate, "_networks", tiny)
    out = tmp_path / "calibration.json"
    args = argparse.Namespace(engine="auto", all=False, out=out, name="here")
    assert calibrate.run(args) == 0
    constants = load_constants(out)
    (engine,) = constants.costs
    for costs in constants.costs[engine].values():
        assert {"first_conv", "conv", "conv_filter_gradient", "norm", "loss", "update", "every_op"} <= set(costs)
        assert sum(costs["conv"].values()) > 0
    assert constants.baseline_bytes[engine] > 0
    content = json.loads(out.read_text())
    # How far they are apart hangs on the CPU's kernels: that is what the check is there to show.
    for line in content["check"]:
        for peak in ("allocator_peak_bytes", "process_peak_bytes"):
            assert min(line[peak]["predicted"], line[peak]["measured"]) > 0
    assert "tensorflow" in content["versions"]
    assert "calibration.json written after" in " ".join(capsys.readouterr().out.split())


def test_a_folder_that_cannot_be_written_to_is_refused_before_anything_runs(tmp_path):
    (tmp_path / "file").write_text("")
    args = argparse.Namespace(engine="auto", all=False, out=tmp_path / "file" / "c.json", name="")
    with pytest.raises(InputError, match="must be a folder to write to"):
        calibrate.run(args)
