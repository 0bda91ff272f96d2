"""`calibrate`: what it puts together, and once for real on tiny networks."""

import argparse
import json

import pytest

from cpu3d.bench import calibrate
from cpu3d.errors import InputError
from memory_estimator.calibration import load_constants
from memory_estimator.host import read_host
from models.config import UNetConfig


def result(engine, size, ops, seconds=1e-3):
    rows = [
        {"group": "conv", "features": {"work": 1e9}, "seconds": seconds},
        {"group": "norm", "features": {"traffic": 1e8}, "seconds": 2e-3},
    ]
    return {
        "engine": engine,
        "engine_name": f"TensorFlow 0.0, {engine}",
        "networks": [{"rows": rows, "ops": 10, "step_s": seconds + 3e-3, "others": 0.0}],
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


def tiny(dtype):
    return [
        {"unet": UNetConfig(depth=2, filters=filters, dtype=dtype).__dict__, "shape": (16, 16, 16), "steps": steps}
        for filters, steps in ((4, 0), (8, 2))
    ]


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
    assert 200e6 < constants.baseline_bytes[engine] < 2e9
    content = json.loads(out.read_text())
    assert content["seconds"] < 120
    assert "tensorflow" in content["versions"]
    assert "calibration.json written after" in " ".join(capsys.readouterr().out.split())


def test_a_folder_that_cannot_be_written_to_is_refused_before_anything_runs(tmp_path):
    (tmp_path / "file").write_text("")
    args = argparse.Namespace(engine="auto", all=False, out=tmp_path / "file" / "c.json", name="")
    with pytest.raises(InputError, match="must be a folder to write to"):
        calibrate.run(args)
