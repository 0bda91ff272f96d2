"""`calibrate`: what it puts together, and once for real on tiny networks."""

import json

import pytest

from cpu3d.__main__ import main
from cpu3d.bench import calibrate
from memory_estimator.calibration import load_constants, shipped_constants
from memory_estimator.host import read_host
from models.config import UNetConfig
from tests.memory_estimator.test_fitting import network


def result(dtype, size=600, ops=50, work=1e-12):
    rows = [("conv", {"work": 1e9}, {"work": work}), ("norm", {"traffic": 1e8}, {"traffic": 2e-11})]
    about = {"dtype": dtype, "engine": "itex", "engine_name": "TensorFlow 0.0, itex", "threads": 3}
    return {**about, "cache_bytes": 2**25, "networks": [network(rows)], "runtime": {"bytes": size, "ops": ops}}


def test_each_dtype_is_fitted_by_itself_and_what_was_not_timed_is_the_shipped_constants():
    results = [result("bfloat16", 700, 100), result("float32", work=4e-12)]
    found = calibrate.put_together(results, read_host(), 0.0, "a host")
    assert found.speeds("itex", "bfloat16")["conv"]["work"] == pytest.approx(1e-12)
    assert found.speeds("itex", "float32")["conv"]["work"] == pytest.approx(4e-12)
    assert (found.baseline_bytes, found.op_bytes) == ({"itex": 500}, {"itex": 2})
    assert (found.name, found.threads, found.cpu) == ("a host", 3, read_host().cpu_model)
    shipped = shipped_constants(read_host().kernels).for_threads(3)
    assert found.costs["itex"]["bfloat16"]["join"] == shipped.costs["itex"]["bfloat16"]["join"]
    assert "join (itex, bfloat16)" in found.origins["costs"]
    assert "disturbed" not in found.origins["costs"]
    busy = calibrate.put_together([result("bfloat16")], read_host(), 0.5)
    assert "disturbed by other processes on 0.5 CPUs" in busy.origins["costs"]


def test_a_calibration_is_measured_written_and_found_again(monkeypatch, tmp_path):
    unets = [UNetConfig(depth=2, filters=filters, policy="speed").__dict__ for filters in (4, 8, 4)]
    tiny = lambda dtype: [{"unet": {**unet, "dtype": dtype}, "shape": (16, 16, 16)} for unet in unets]
    monkeypatch.setattr(calibrate, "networks", tiny)
    monkeypatch.setattr(calibrate, "BUDGET_S", 0)
    out = tmp_path / "calibration.json"
    assert main(["calibrate", "--out", str(out), "--name", "here"]) == 0
    constants = load_constants(out)
    (engine,) = constants.costs
    for costs in constants.costs[engine].values():
        assert {"first_conv", "conv", "conv_filter_gradient", "norm", "loss", "update", "every_op"} <= set(costs)
        assert sum(costs["conv"].values()) > 0
    assert constants.baseline_bytes[engine] > 0
    content = json.loads(out.read_text())
    assert content["networks_left_out"] == len(constants.costs[engine])  # one each: the first that is timed always is
