"""`calibrate`: once for real on tiny networks, and its fit of made-up seconds."""

import dataclasses

import pytest

from cpu3d.__main__ import main
from cpu3d.bench import calibrate
from cpu3d.bench.calibrate import Timing, fitted, straight_line
from memory_estimator.calibration import find_constants, load_constants, scaled, shipped_constants
from memory_estimator.host import INSTRUCTION_SETS, read_host
from memory_estimator.job import Job
from memory_estimator.step.timing import step_seconds
from memory_estimator.step.training_step import training_step
from models.config import UNetConfig


def test_a_calibration_is_measured_and_found_again(monkeypatch, tmp_path):
    tiny = {"unet": vars(UNetConfig(depth=2, filters=4, policy="speed", dtype="float32")), "shape": (16, 16, 16)}
    monkeypatch.setattr(calibrate, "networks", lambda dtype: [tiny] * 3)
    monkeypatch.setattr(calibrate, "DTYPES", ("float32",))
    monkeypatch.setattr(calibrate, "BUDGET_S", 0)
    measure, results, out, host = calibrate.in_fresh_process, [], tmp_path / "other.json", read_host()
    monkeypatch.setattr(calibrate, "in_fresh_process", lambda *given: results[0])
    results.append(measure(calibrate.measure, {"engine": "stock", "networks": [tiny] * 3, "budget_s": 0}))
    assert results[0]["left_out"] == 1
    assert main(["calibrate", "--engine", "stock", "--out", str(out)]) == 0
    assert find_constants(host).basis("float32", host).startswith("assumed from ")
    assert main(["calibrate", "--engine", "stock"]) == 0
    found = find_constants(host)
    for constants in (load_constants(out), found):
        assert constants.baseline_bytes["stock"] > 0
        assert constants.origins["baseline_bytes"].startswith("measured")
    assert found.basis("float32", host).startswith("measured here on ")


SHIPPED = shipped_constants("avx512_bf16")
HOST = dataclasses.replace(read_host(), cpu_model="Some CPU", isa=INSTRUCTION_SETS["avx512_bf16"])


def seconds(job, constants):
    return step_seconds(training_step(job), constants, job)


def jobs_of(dtype):
    """The networks that `calibrate` times, on the threads that shipped constants are of."""
    networks = calibrate.networks(dtype)[1:]
    return [Job(UNetConfig(**one["unet"]), one["shape"], engine="stock", threads=SHIPPED.threads) for one in networks]


@pytest.mark.parametrize(
    "slower", [{"work": 2, "traffic": 2, "overhead": 2}, {"work": 3, "traffic": 0.5, "overhead": 1}]
)
def test_work_and_traffic_are_told_apart_by_whole_steps(slower):
    truth = dataclasses.replace(SHIPPED, costs={"float32": scaled(SHIPPED.costs["float32"], slower)})
    timings = [Timing(job, step_s=seconds(job, truth)) for job in jobs_of("float32")]
    found = fitted(timings, HOST)
    for shape, filters in (((128, 128, 128), 16), ((240, 240, 160), 16), ((96, 96, 96), 40)):
        job = Job(UNetConfig(filters=filters), shape, engine="stock", threads=2)
        assert seconds(job, found) == pytest.approx(seconds(job, truth), rel=0.05)
    assert (found.name, found.origin) == ("Some CPU", "measured")
    # What was not timed has the same factors.
    in_bfloat16 = Job(UNetConfig(dtype="bfloat16"), (96, 96, 96), engine="stock", threads=2)
    ratio = seconds(in_bfloat16, found) / seconds(in_bfloat16, SHIPPED)
    assert min(slower.values()) * 0.9 <= ratio <= max(slower.values()) * 1.1


def test_memory_lies_on_the_line_through_what_was_measured():
    # 10 operations take 400, 20 take 700: each takes 30, and none take 100.
    assert straight_line([(10, 400), (20, 700)], 5) == (100, 30)
    assert straight_line([(10, 400)], 5) == (350, 5)
