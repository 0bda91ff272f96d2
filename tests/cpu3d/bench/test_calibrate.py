"""`calibrate`, once for real on tiny networks."""

from cpu3d.__main__ import main
from cpu3d.bench import calibrate
from cpu3d.host.observe import read_runs
from memory_estimator.calibration import find_constants, host_file, load_constants
from memory_estimator.host import read_host
from models.config import UNetConfig


def test_a_calibration_is_measured_and_found_again(monkeypatch, tmp_path):
    unets = [UNetConfig(depth=2, filters=filters, policy="speed").__dict__ for filters in (4, 8, 4)]
    tiny = lambda dtype: [{"unet": {**unet, "dtype": dtype}, "shape": (16, 16, 16)} for unet in unets]
    monkeypatch.setattr(calibrate, "networks", tiny)
    monkeypatch.setattr(calibrate, "BUDGET_S", 0)
    out = tmp_path / "other.json"
    assert main(["calibrate", "--out", str(out)]) == 0
    host, threads = read_host(), load_constants(out).threads
    assert find_constants(threads, host).of("stock", "float32").basis(host).startswith("assumed from ")
    assert main(["calibrate", "--engine", "stock"]) == 0
    found = find_constants(threads, host).of("stock", "float32")
    for constants in (load_constants(out), found):
        (engine,) = constants.costs
        for costs in constants.costs[engine].values():
            assert {"first_conv", "conv", "conv_filter_gradient", "norm", "loss", "update", "every_op"} <= set(costs)
        assert constants.baseline_bytes[engine] > 0
        assert constants.origins["baseline_bytes"].startswith("measured")
    assert found.basis(host).startswith("measured here on ")
    runs = read_runs(host_file(host, "stock", threads))
    assert sorted((run.step_s is None, run.runtime_bytes is None) for run in runs)[0] == (False, True)
