"""The command line: what it prints, what it exits with, what it costs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cpu3d.config import RunConfig, save_config
from memory_estimator.__main__ import main
from models.config import UNetConfig

ROOT = Path(__file__).resolve().parents[2]
SMALL = "--shape 64 64 64 --filters 8 --depth 4 --threads 2 --host-memory 64GiB"


def answer(arguments, capsys, code=0):
    assert main([*arguments.split(), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_json_has_every_figure_and_nothing_else_is_printed(capsys):
    content = answer(SMALL, capsys)
    for key in ("allocator_peak_bytes", "process_peak_bytes", "upper_bound_bytes", "step_s", "components"):
        assert content[key]
    assert content["fits"] is True
    assert content["advice"] == []
    assert content["host_memory_bytes"] == 64 * 2**30
    assert sum(line["bytes"] for line in content["components"]) == content["process_peak_bytes"]


def test_the_bill_names_causes_peaks_errors_and_the_verdict(capsys):
    assert main([*SMALL.split(), "--cases", "8"]) == 0
    out = capsys.readouterr().out
    for word in (
        "64 x 64 x 64 x 4", "weights", "optimizer slots", "activations, level 0", "allocator overhead",
        "runtime baseline", "allocator peak", "process peak", "upper bound", "worst", "8 cases",
        "largest tensors", "fits: needs up to", "to spare",
    ):  # fmt: skip
        assert word in out


def test_a_job_that_does_not_fit_exits_with_3_and_says_what_would(capsys):
    large = SMALL.replace("64GiB", "900MiB") + " --batch 8 --dtype float32"
    content = answer(large, capsys, code=3)
    assert content["fits"] is False
    assert content["upper_bound_bytes"] > 900 * 2**20
    assert any(line.startswith("fits with --batch") for line in content["advice"])
    assert main(large.split()) == 3
    assert "does not fit: needs up to" in capsys.readouterr().out


def test_without_a_size_the_memory_is_what_this_host_has_free(capsys):
    assert main(SMALL.replace("--host-memory 64GiB", "").split()) == 0
    assert "free on this host" in capsys.readouterr().out


def test_the_plan_is_a_table_and_json(capsys):
    assert main([*SMALL.split(), "--plan"]) == 0
    out = capsys.readouterr().out
    assert "The largest that fits 64.00 GiB" in out
    assert "What would save what" in out
    content = answer(f"{SMALL} --plan", capsys)
    (speed,) = content["plan"]
    assert speed["policy"] == "speed"
    assert speed["batch"]["batch"] > 8
    assert speed["batch"]["upper_bound_bytes"] <= 64 * 2**30
    assert speed["filters"]["filters"] % 8 == 0
    assert all(side % 8 == 0 for side in speed["extent"]["shape"])
    assert content["savings"]


def test_a_gpu_gets_the_largest_patch_and_the_assumptions(capsys):
    patch = answer("--shape 240 240 160 --threads 2 --gpu-memory 16GiB --host-memory 1TiB", capsys)["gpu"]
    assert all(side % 16 == 0 for side in patch["patch"])
    assert max(patch["patch"]) - min(patch["patch"]) <= 16
    assert patch["peak_bytes"] <= 16 * 2**30
    assert "not verified" in patch["assumptions"]
    assert answer("--shape 240 240 160 --threads 2 --gpu-memory 1GiB --host-memory 1TiB", capsys)["gpu"] is None


def test_a_recipe_is_a_job_and_options_win_over_it(capsys):
    content = answer("--recipe paper-2020 --threads 2 --host-memory 6TiB", capsys)
    job = content["job"]
    assert (job["shape"], job["batch"], job["unet"]["filters"], job["unet"]["depth"]) == ([240, 240, 144], 16, 32, 4)
    assert (job["unet"]["dtype"], job["unet"]["channels"], job["unet"]["norm"]) == ("float32", 1, "batch")
    assert content["epoch_s"] > content["step_s"]
    less = answer("--recipe paper-2020 --threads 2 --host-memory 6TiB --batch 1", capsys)
    assert less["process_peak_bytes"] < content["process_peak_bytes"] / 8


def test_a_run_folder_is_a_job_fed_from_its_store(tmp_path, capsys):
    save_config(RunConfig(grid=(64, 64, 64), unet=UNetConfig(filters=8, depth=4, dtype="bfloat16")), tmp_path)
    content = answer(f"--run {tmp_path} --threads 2 --host-memory 64GiB", capsys)
    assert content["job"]["from_store"] is True
    assert "input pipeline, next batch" in {line["name"] for line in content["components"]}


def test_the_picture_is_a_png(tmp_path, capsys):
    assert main([*SMALL.split(), "--picture", str(tmp_path / "sizes.png")]) == 0
    assert (tmp_path / "sizes.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--shape 240 240 155", "pad to (240, 240, 160) or crop to (240, 240, 144)"),
        ("--shape 0 64 64", "input_shape must be three positive numbers"),
        ("--shape 64 64 -64", "input_shape must be three positive numbers"),
        ("--shape 64 64 64 --batch 0", "batch must be at least 1, got 0"),
        ("--shape 64 64 64 --filters -8", "filters must be at least 1, got -8"),
        ("--shape 64 64 64 --channels 0", "channels must be at least 1, got 0"),
        ("--shape 64 64 64 --classes 0", "outputs must be at least 1, got 0"),
        ("--shape 64 64 64 --depth 9", "depth must be between 2 and 8, got 9"),
        ("--shape 64 64 64 --threads 0", "threads must be at least 1, got 0"),
        ("--shape 64 64 64 --cases -1", "cases must be at least 0, got -1"),
        ("--shape 64 64 64 --micro-batch 2", "comes with the memory policies"),
        ("--shape 64 64 64 --policy lean", "the trainer has no other yet"),
        ("--shape 64 64 64 --host-memory 64G", "memory must be in one of B, KiB"),
        ("--shape 64 64 64 --host-memory lots", "memory must be a number with its unit"),
        ("--shape 64 64 64 --host-memory 0GiB", "memory must be positive"),
        ("--shape 64 64 64 --gpu-memory 16", "memory must be a number with its unit"),
        ("--shape 64 64 64 --calibration nowhere.json", "nowhere.json"),
        ("--shape 64 64 64 --picture nowhere/at/all.png", "picture nowhere/at/all.png must be a file to write"),
        ("--run nowhere", "must hold a config.json"),
        ("--batch 2", "shape must be given, got none"),
    ],
)
def test_bad_input_exits_with_2_and_says_what_to_do(arguments, message, capsys):
    assert main(arguments.split()) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""


def test_a_calibration_of_another_schema_is_refused_by_its_name(tmp_path, capsys):
    (tmp_path / "host.json").write_text('{"schema": 999}')
    assert main([*SMALL.split(), "--calibration", str(tmp_path / "host.json")]) == 2
    assert "schema" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", ["", "--shape 64 64", "--shape a b c", "--policy fast --shape 64 64 64"])
def test_what_argparse_refuses_exits_with_2_too(arguments, capsys):
    try:
        code = main(arguments.split())
    except SystemExit as stop:
        code = stop.code
    assert code == 2


COST = """
import json, re, sys, time
begin = time.perf_counter()
from memory_estimator.__main__ import main
code = main(sys.argv[1:])
seconds = time.perf_counter() - begin
peak = 1024 * int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1])
print(json.dumps([code, seconds, peak, sorted({"tensorflow", "numpy", "cpu3d"} & set(sys.modules))]), file=sys.stderr)
"""


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="reads VmHWM")
@pytest.mark.parametrize(
    "arguments",
    [
        "--shape 240 240 160",
        "--recipe paper-2020 --shape 1024 1024 1024 --batch 64 --threads 80 --json",
    ],
)
def test_an_answer_takes_half_a_second_150_mib_and_no_tensorflow_at_any_size(arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    best = None
    for _ in range(3):  # the best of three: the time is the program's, not that of what else runs on this host
        command = [sys.executable, "-c", COST, *arguments.split()]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        code, seconds, peak_bytes, imported = json.loads(done.stderr.splitlines()[-1])
        best = seconds if best is None else min(best, seconds)
    assert code in (0, 3)
    assert imported == []
    assert peak_bytes < 150 * 2**20
    assert best < 0.5


def test_a_reader_that_goes_away_is_no_traceback():
    command = f"{sys.executable} -m memory_estimator {SMALL} --plan | true"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, shell=True, env=environment, capture_output=True, text=True, check=False)
    assert done.stderr == ""
