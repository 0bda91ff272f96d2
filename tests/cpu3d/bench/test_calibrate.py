"""`calibrate`: what it puts together, and once for real on tiny networks."""

import json

import pytest

from cpu3d.__main__ import main
from cpu3d.bench import calibrate
from cpu3d.bench.calibrate import Event, fit_costs
from memory_estimator.calibration import load_constants, shipped_constants
from memory_estimator.host import read_host
from memory_estimator.job import Job
from memory_estimator.step.timing import CONVOLUTIONS
from memory_estimator.step.training_step import training_step
from models.config import UNetConfig


def network(rows, ops=10, between_s=1e-4):
    """Rows of (group, features, costs): operations that take exactly what the costs of their features say."""
    found = [
        {"group": group, "features": counted, "seconds": sum(costs[name] * n for name, n in counted.items())}
        for group, counted, costs in rows
    ]
    return {"rows": found, "ops": ops, "step_s": sum(row["seconds"] for row in found) + ops * between_s}


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
    shipped = shipped_constants(read_host().isa).for_threads(3)
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


def test_the_costs_that_the_times_were_made_with_are_found_again():
    conv, norm, pool = {"work": 2e-12, "kernel": 3e-10}, {"cached": 1e-11, "traffic": 4e-11}, {"traffic": 5e-11}
    rows = [("conv", {"work": 1e10, "kernel": 1e4}, conv), ("conv", {"work": 1e9, "kernel": 1e7}, conv)]
    rows += [("norm", {"traffic": 1e8}, norm), ("norm", {"cached": 1e7}, norm), ("pool", {"traffic": 1e8}, pool)]
    found = fit_costs([network(rows, between_s=2e-5)])
    assert found["conv"] == pytest.approx(conv)
    assert found["norm"] == pytest.approx(norm)
    assert found["pool"] == pytest.approx({"traffic": 5e-11, "cached": 5e-11})  # small maps cost as much
    assert found["every_op"]["seconds"] == pytest.approx(2e-5)


# --- Which operation of the step a profiled event belongs to ---

PROGRAM = training_step(Job(UNetConfig(depth=2, filters=8, policy="speed"), (32, 32, 32), engine="stock", threads=2))

CONVS = [op for op in PROGRAM.ops if op.kind in CONVOLUTIONS]


def test_operations_are_matched_by_order_and_type_and_the_rest_is_loss():
    norms = [op for op in PROGRAM.ops if op.kind == "norm"]
    kinds = ["Conv3DBackpropFilterV2" if op.kind.endswith("filter_gradient") else "Conv3D" for op in CONVS]
    events = [
        *(Event(f"{kind}_3", f"_MklNative{kind}", float(number)) for number, kind in enumerate(kinds)),
        *(Event(f"act{i}/FusedBatchNormV3", "_MklNativeFusedBatchNormEx", 1.0 + i) for i in range(len(norms))),
        Event("Softplus", "Softplus", 20.0),
        Event("Adam/mul_3", "Mul", 30.0),
        Event("unet3d/encoder0_conv1/Conv3D/Cast", "Cast", 1.0),
        Event("Sum_2", "Sum", 2.0),
        Event("a", "MaxPool3D", 1.0),
        Event("b", "MaxPool3D", 1.0),
    ]
    found = calibrate.rows(PROGRAM, events, 2**25)
    assert [row["seconds"] for row in found[: len(CONVS)]] == list(range(len(CONVS)))
    assert [row["group"] for row in found[:2]] == ["first_conv", "conv"]
    seconds = lambda group: [row["seconds"] for row in found if row["group"] == group]
    assert seconds("norm") == [1.0 + i for i in range(len(norms))]
    assert (seconds("loss"), seconds("update")) == ([22.0], [31.0])
    (pool,) = [row for row in found if row["group"] == "pool"]  # two for one: the group as a whole
    assert pool["seconds"] == 2.0
    assert pool["features"] == {"cached": sum(op.traffic_bytes for op in PROGRAM.ops if op.kind == "pool")}
    with pytest.raises(RuntimeError, match=rf"must run the {len(CONVS)} convolutions .* got {len(CONVS) - 1}"):
        calibrate.rows(PROGRAM, events[1:], 2**25)
