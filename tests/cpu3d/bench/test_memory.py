"""`bench memory` measures the trainer's own step from outside, and says it as `bench step` does."""

import dataclasses
import json
from pathlib import Path

import pytest

from cpu3d.__main__ import main
from cpu3d.bench import memory
from cpu3d.bench.record import read_records
from cpu3d.config import RunConfig, save_config
from cpu3d.errors import InputError
from memory_estimator.host import read_host
from memory_estimator.recipes import JOBS
from memory_estimator.validation import read_measured
from models.config import UNetConfig

MIB = 2**20
TINY = ["--shape", "32", "32", "32", "--filters", "8", "--depth", "3", "--steps", "2", "--dtype", "float32"]

KEYS_OF_BENCH_STEP = {
    *("shape", "batch", "unet", "optimizer", "steps", "engine", "engine_name", "step_s", "step_s_min", "step_s_max"),
    *("first_step_s", "steps_timed", "volume_s", "gflops", "matmul_gflops", "matmul_peak_share", "parameters"),
    *("allocator_peak_bytes", "process_peak_bytes", "threads", "host", "versions", "rounds", "peers"),
}
"""As records/step.jsonl has them."""


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """One run with everything it can write; its result and its folder."""
    folder = tmp_path_factory.mktemp("memory")
    files = ["--record", "r/memory.jsonl", "--trace", "t.mprof", "--picture", "p.png", "--timeline", "l.png"]
    files = [name if name.startswith("--") else str(folder / name) for name in files]
    with pytest.MonkeyPatch.context() as patch:
        printed = []
        patch.setattr("builtins.print", lambda text, **_: printed.append(text))
        assert main(["bench", "memory", *TINY, "--json", *files]) == 0
    return json.loads(printed[-1]), folder


def test_it_has_the_keys_of_bench_step(measured):
    result, _ = measured
    assert set(result) >= KEYS_OF_BENCH_STEP
    with Path(__file__).parents[3].joinpath("records", "step.jsonl").open() as file:
        assert set(json.loads(file.readline())) - set(result) == {"schema", "kind", "date"}


def test_the_peak_divides_into_anonymous_memory_and_file_pages(measured):
    result, _ = measured
    peak, anonymous, files = (result[f"{kind}_peak_bytes"] for kind in ("process", "anonymous", "file"))
    assert anonymous > 50 * MIB
    assert files > 50 * MIB
    # The parts are looked at 50 times a second, and on a busy machine more rarely: they may miss the top of the peak.
    assert 0.8 * peak < anonymous + files < peak + 16 * MIB
    # The kernel counts a process's pages to within some 64 a thread.
    assert result["baseline_bytes"] < result["resident_bytes"] <= peak + MIB


def test_a_prediction_stands_beside_it_with_its_signed_errors(measured):
    result, _ = measured
    for name in ("allocator_peak_bytes", "process_peak_bytes", "step_s"):
        assert result["errors"][name] == pytest.approx(result["predicted"][name] / result[name] - 1)
    assert result["errors"]["upper_bound_bytes"] == pytest.approx(
        result["predicted"]["upper_bound_bytes"] / result["process_peak_bytes"] - 1
    )


def test_trace_pictures_and_record_are_written(measured):
    result, folder = measured
    lines = (folder / "t.mprof").read_text().splitlines()
    assert sum(line.startswith("FUNC step ") for line in lines) == 4  # two to warm up, two timed, not the profiled one
    highest = max(float(line.split()[1]) for line in lines if line.startswith("MEM "))
    assert 0.8 * result["process_peak_bytes"] < highest * MIB < result["process_peak_bytes"] + 16 * MIB
    for name in ("p.png", "l.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    (kept,) = read_records(folder / "r" / "memory.jsonl", "memory")
    assert kept["process_peak_bytes"] == result["process_peak_bytes"]
    (one,) = read_measured(folder / "r" / "memory.jsonl")
    assert one.job.shape == (32, 32, 32)


def test_the_live_curve_reaches_the_allocators_own_peak():
    request = {
        "shape": [32, 32, 32],
        "batch": 1,
        "micro_batch": 1,
        "unet": {"filters": 8, "depth": 3, "policy": "speed"},
        "optimizer": "sgd",
        "steps": 1,
        "engine": "auto",
        "matmul": [],
        "profile": True,
    }
    result, seen = memory.measure_memory(request)
    live = [size for _, _, size in result["allocations"]]
    assert max(live) == result["allocator_peak_bytes"]
    times = [time for time, _, _ in result["allocations"]]
    assert times == sorted(times)
    assert times[0] == 0
    assert seen[-1].time_s <= max(end for _, _, end in result["moments"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "16", "16", "17", "--depth", "3"], "input_shape (16, 16, 17) must be divisible by 4"),
        (["--batch", "0"], "batch must be at least 1, got 0"),
        (["--steps", "0"], "steps must be at least 1, got 0"),
        (["--run", "nowhere"], "run nowhere must hold a config.json"),
        (["--threads", "0"], "threads must be at least 1, got 0"),
        (["--batch", "4", "--micro-batch", "3"], "micro_batch must divide the batch of 4, got 3; give one of 1, 2, 4"),
        (["--trace", "/proc/none/t"], "folder /proc/none must be a folder to write to"),
    ],
)
def test_bad_settings_are_refused_before_anything_runs(arguments, message, capsys):
    assert main(["bench", "memory", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.fixture
def asked(monkeypatch):
    """What would have been measured, as (request, threads)."""
    found = []

    def measure_memory(*request):
        found.append(request)
        raise InputError("nothing is measured")

    monkeypatch.setattr(memory, "measure_memory", measure_memory)
    return found


def test_a_recipe_is_measured_as_the_estimator_takes_it(asked):
    assert main(["bench", "memory", "--recipe", "paper-2020", "--batch", "1", "--threads", "2", "--steps", "3"]) == 2
    ((request, threads),) = asked
    job = dataclasses.replace(JOBS["paper-2020"], batch=1)
    assert (request["shape"], request["batch"], request["unet"]) == ([240, 240, 144], 1, dataclasses.asdict(job.unet))
    assert (request["optimizer"], request["steps"], threads) == ("adam", 3, 2)


@pytest.mark.policy_left_open
def test_policy_and_micro_batch_are_those_asked_for_and_speed_and_the_trainer_s_rule_without(asked):
    main(["bench", "memory", "--batch", "4"])
    main(["bench", "memory", "--batch", "4", "--micro-batch", "2", "--policy", "balanced"])
    found = [(request["unet"]["policy"], request["batch"], request["micro_batch"]) for request, _ in asked]
    assert found == [("speed", 4, 1), ("balanced", 4, 2)]


def test_a_run_is_measured_as_it_is_configured(asked, tmp_path):
    config = RunConfig(grid=(32, 32, 32), unet=UNetConfig(filters=4, depth=3), optimizer="sgd", engine="stock")
    save_config(config, tmp_path)
    main(["bench", "memory", "--run", str(tmp_path)])
    main(["bench", "memory", "--run", str(tmp_path), "--engine", "stock-no-onednn", "--dtype", "bfloat16"])
    (first, threads), (second, _) = asked
    assert (first["shape"], first["optimizer"], first["engine"], threads) == ([32, 32, 32], "sgd", "stock", None)
    assert (second["engine"], second["unet"]["dtype"]) == ("stock-no-onednn", "bfloat16")


def test_without_a_job_it_is_the_default_network_on_a_cube_in_the_dtype_that_is_fast(asked):
    main(["bench", "memory"])
    main(["bench", "memory", "--dtype", "auto"])
    (first, _), (second, _) = asked
    assert first == second
    assert (first["shape"], first["engine"]) == ([128, 128, 128], "auto")
    assert first["unet"]["dtype"] == read_host().best_dtype


def test_an_engine_that_the_estimator_does_not_know_has_no_prediction(capsys):
    assert memory.predict({"engine_name": "TensorFlow 2.15.1, no oneDNN"}) is None
    assert "no prediction: engine must use oneDNN" in capsys.readouterr().err
    assert memory.against({}, None) == {"predicted": None, "errors": None}
