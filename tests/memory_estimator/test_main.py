"""The command line: what it prints, what it exits with, what it costs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cpu3d.distributed import all_reduce
from memory_estimator import scaling
from memory_estimator.__main__ import main
from memory_estimator.common.units import format_bytes
from memory_estimator.job import Job
from memory_estimator.training import ExtraMemory, Schedule
from models.config import POLICIES, UNetConfig
from tests.memory_estimator.test_job import write_plan

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
SMALL = "--shape 64 64 64 --filters 8 --depth 4 --threads 2 --host-memory 64GiB"


def answer(arguments, capsys, code=0):
    assert main([*arguments.split(), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_a_job_that_does_not_fit_exits_with_3_and_says_what_would(capsys):
    large = (
        SMALL.replace("64GiB", "1200MiB")
        + " --batch 8 --micro-batch 8 --dtype float32 --policy speed"
    )
    content = answer(large, capsys, code=3)
    assert content["fits"] is False
    assert content["upper_bound_bytes"] > 1200 * 2**20
    offered = [
        re.fullmatch(r"fits with (--.+): up to (.+), .+ a volume", line)
        for line in content["advice"]
    ]
    assert "--micro-batch" in {option[1].split()[0] for option in offered}
    for option in offered[:2]:
        taken = answer(f"{large} {option[1]}", capsys)
        assert taken["fits"]
        assert format_bytes(taken["upper_bound_bytes"]) == option[2]
    assert main(large.split()) == 3
    assert "does not fit: needs up to" in capsys.readouterr().out


def test_what_is_assumed_of_more_threads_than_were_measured_is_said(capsys):
    ask = "--shape 64 64 64 --calibration amx --threads "
    few, many = (answer(f"{ask}{threads}", capsys) for threads in (2, 56))
    assert not any("threads" in note for note in few["notes"])
    assert any("56 threads" in note and "%" in note for note in many["notes"])
    assert few["step_s"] / 28 < many["step_s"] < few["step_s"]


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ("--shape 64 64 64 --calibration avx2", "float32"),
        ("--shape 64 64 64 --calibration amx", "bfloat16"),
        ("--recipe brats-regions --calibration avx2", "bfloat16"),
    ],
)
def test_the_dtype_is_the_one_that_train_takes_or_the_recipe_s(options, dtype, capsys):
    content = answer(f"--threads 2 --host-memory 64GiB {options}", capsys)
    assert content["job"]["unet"]["dtype"] == dtype


def test_the_plan_has_the_largest_of_each_kind_for_every_policy(capsys):
    ask = "--shape 64 64 64 --filters 16 --dtype bfloat16 --threads 2 --host-memory"
    content = answer(f"{ask} 3GiB --plan", capsys)
    assert [entry["policy"] for entry in content["plan"]] == list(POLICIES)
    for entry in content["plan"]:
        jobs = {kind: entry[kind]["job"] for kind in ("batch", "filters", "extent")}
        for more in range(2):
            for words in (
                "--batch {0} --micro-batch {0}".format(jobs["batch"]["batch"] + more),
                f"--filters {jobs['filters']['unet']['filters'] + 8 * more}",
                f"--shape {' '.join([str(jobs['extent']['shape'][0] + 16 * more)] * 3)}",
            ):
                # A host that holds both: where a job does not fit, advice takes seconds.
                alone = answer(f"{ask} 64GiB --policy {entry['policy']} {words}", capsys)
                assert (alone["upper_bound_bytes"] > 3 * 2**30) == bool(more), words


def test_the_fastest_policy_that_fits_is_picked_and_said(capsys):
    bounds = {
        policy: answer(f"{SMALL} --policy {policy}", capsys)["upper_bound_bytes"]
        for policy in POLICIES
    }
    assert answer(SMALL, capsys)["policy"]["name"] == "speed"
    ask = SMALL.replace("64GiB", f"{bounds['speed'] - 1}B")
    content = answer(f"{ask} --policy auto", capsys)
    choice = content["policy"]
    assert (choice["name"], choice["picked"]) == ("lean", True)
    assert f"speed would take up to {format_bytes(bounds['speed'])}" in choice["reason"]
    assert content["upper_bound_bytes"] == bounds["lean"]
    assert answer(f"{ask} --policy lean", capsys)["policy"]["reason"] == "given"


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ("", (240, 240, 160)),
        ("--strides 2,2,1 2,2,2", (240, 240, 156)),
        ("--depth 2 --strides 2,2,1", None),
    ],
)
def test_a_shape_is_padded_to_what_the_network_halves_and_the_grid_is_named(options, shape, capsys):
    ask = f"--shape 240 240 155 --threads 2 --host-memory 64GiB {options}"
    content = answer(ask, capsys)
    assert content["job"]["shape"] == list(shape or (240, 240, 155))
    grids = [re.findall(r"\d+ x \d+ x \d+", note) for note in content["notes"] if "padded" in note]
    named = [["240 x 240 x 155", " x ".join(map(str, shape))]] if shape else []
    assert grids == named


def test_a_recipe_is_a_job_and_options_win_over_it(capsys):
    content = answer("--recipe paper-2020 --threads 2 --host-memory 6TiB", capsys)
    job = content["job"]
    assert (job["shape"], job["batch"], job["micro_batch"], job["unet"]["filters"]) == (
        [240, 240, 144],
        16,
        1,
        32,
    )
    assert content["epoch_s"] > content["step_s"]
    at_once = answer("--recipe paper-2020 --threads 2 --host-memory 6TiB --micro-batch 16", capsys)
    assert at_once["job"]["micro_batch"] == 16
    assert content["process_peak_bytes"] < at_once["process_peak_bytes"] / 8


def test_a_run_of_several_workers_is_estimated_as_one_of_them(tmp_path, capsys):
    unet = UNetConfig(filters=8, depth=4, dtype="bfloat16")
    job = Job(unet, (64, 64, 64), batch=4, micro_batch=1, cases=8)

    def of_workers(workers, options="", code=0):
        write_plan(tmp_path, job, workers)
        return answer(f"--run {tmp_path} --threads 2 --host-memory 8GiB {options}", capsys, code)

    alone = of_workers(1)
    shared = of_workers(2)
    gradients = next(
        line["bytes"] for line in alone["components"] if line["name"] == "gradient sums"
    )
    # Each computes one of four volumes at a time as before, and has four copies of the gradients
    # for their exchange.
    assert shared["upper_bound_bytes"] == alone["upper_bound_bytes"] + 4 * gradients
    assert shared["step_s"] == pytest.approx(alone["step_s"] / 2)
    assert shared["epoch_s"] == pytest.approx(2 * shared["step_s"])
    assert (shared["workers"], shared["fits"]) == (2, True)
    # Both share the host's memory.
    memory = f"--host-memory {2 * shared['upper_bound_bytes'] - 2}B"
    assert not of_workers(2, memory, code=3)["fits"]
    assert of_workers(1, memory)["fits"]


def test_a_run_is_estimated_whole(tmp_path, capsys):
    unet = UNetConfig(filters=8, depth=4, dtype="bfloat16")
    job = Job(unet, (64, 64, 64), cases=8)
    schedule = Schedule(
        steps=12,
        coarse_steps=10,
        coarse_shape=(32, 32, 32),
        extra=ExtraMemory(copies=1),
        validations=3,
        held_out=2,
        decided=2,
        flips=8,
        scored_voxels=10**6,
    )
    ask = f"--run {write_plan(tmp_path, job, 1, schedule=schedule)} --threads 2 --host-memory 8GiB"
    content = answer(ask, capsys)
    run = content["run"]
    full_s = content["step_s"]
    coarse_s = run["coarse"]["step_s"]
    assert content["policy"]["reason"] == "given"  # the run's
    assert coarse_s < full_s / 4
    assert run["steps_s"] == pytest.approx(10 * coarse_s + 2 * full_s)
    # A pass is a third of a step: six of them, and then for each of two cases eight.
    assert run["validation_s"] == pytest.approx(6 / 3 * (10 * coarse_s + 2 * full_s) / 12)
    assert run["postprocessing_s"] == pytest.approx(2 * (8 / 3 * full_s + 0.5))
    parts = ("steps_s", "validation_s", "postprocessing_s")
    assert run["all_s"] == pytest.approx(sum(run[part] for part in parts))
    write_plan(tmp_path, job, 1, schedule=Schedule())
    alone = answer(ask, capsys)
    assert "run" not in alone
    extra = {part["name"]: part["bytes"] for part in content["extra"]}
    assert extra["left by coarse steps"] == run["coarse"]["allocator_peak_bytes"]
    more = extra["left by coarse steps"] + extra["variables, once more"]
    assert content["upper_bound_bytes"] == alone["upper_bound_bytes"] + more


@pytest.fixture
def heavy_coarse_run(tmp_path):
    """The options for a run whose coarse steps need more memory than its full ones."""
    job = Job(UNetConfig(filters=8, depth=4, dtype="bfloat16"), (64, 64, 64), cases=8)
    heavy = ExtraMemory(judged_shape=(512, 512, 512))
    schedule = Schedule(steps=12, coarse_steps=10, coarse_shape=(32, 32, 32), coarse_extra=heavy)
    return f"--run {write_plan(tmp_path, job, 1, schedule=schedule)} --threads 2"


@pytest.mark.parametrize("more", ["", "--policy auto"])
def test_coarse_steps_that_do_not_fit_are_no_fit(heavy_coarse_run, more, capsys):
    ample = answer(f"{heavy_coarse_run} --host-memory 64GiB", capsys)
    bound = ample["run"]["coarse"]["upper_bound_bytes"]
    assert ample["upper_bound_bytes"] == bound
    ask = f"{heavy_coarse_run} {more} --host-memory {bound - 1}B"
    short = answer(ask, capsys, code=3)
    assert short["upper_bound_bytes"] >= bound
    for line in short.get("advice", ()):
        change = re.match("fits with (--[^:]+)", line)
        assert not change or answer(f"{ask} {change[1]}", capsys)["fits"]
    if "policy" in short and short["policy"]["picked"]:
        assert "no policy fits" in short["policy"]["reason"]


@pytest.mark.parametrize("more", ["--batch 2", "--strides 2,2,1 2,2,2 2,2,2"])
def test_options_that_change_the_steps_of_a_run_leave_a_step_alone(heavy_coarse_run, more, capsys):
    content = answer(f"{heavy_coarse_run} {more} --host-memory 64GiB", capsys)
    assert "run" not in content
    assert any(more.split()[0] in note for note in content["notes"])


def test_advice_on_a_run_has_the_grids_that_it_could_have(tmp_path, capsys):
    job = Job(UNetConfig(filters=8, depth=4, dtype="bfloat16", policy="lean"), (64, 64, 64))
    grids = [("--patch 16 16 16", (16, 16, 16)), ("--patch 32 32 32", (32, 32, 32))]
    ask = f"--run {write_plan(tmp_path, job, 1, smaller_grids=grids)} --threads 2"
    bound = answer(f"{ask} --host-memory 64GiB", capsys)["upper_bound_bytes"]
    advice = answer(f"{ask} --host-memory {bound - 1}B", capsys, code=3)["advice"]
    assert any("--patch 32 32 32" in line for line in advice)
    assert not any("--shape" in line for line in advice)
    other = f"{ask} --depth 3 --host-memory 16MiB"
    assert not any("--patch" in line for line in answer(other, capsys, code=3)["advice"])


def test_workers_share_steps_and_validations_but_not_what_the_chief_does(tmp_path, capsys):
    job = Job(UNetConfig(filters=8, depth=4, dtype="bfloat16"), (64, 64, 64), batch=2, cases=8)
    schedule = Schedule(steps=12, validations=3, held_out=3, decided=2)

    def of_workers(workers):
        folder = write_plan(tmp_path, job, workers, schedule=schedule)
        return answer(f"--run {folder} --threads 2 --host-memory 64GiB", capsys)["run"]

    alone = of_workers(1)
    shared = of_workers(2)
    assert shared["steps_s"] == pytest.approx(alone["steps_s"] / 2)
    assert shared["validation_s"] == pytest.approx(alone["validation_s"] * 2 / 3)
    assert shared["postprocessing_s"] == pytest.approx(alone["postprocessing_s"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "--shape 64 64 64 --cases 3 --batch 16",
            "--batch must be at most the 3 training cases, got 16",
        ),
        ("--shape 64 64 64 --host-memory 64G", "memory must be in one of B, KiB"),
        (f"--shape 64 64 {'9' * 400}", "shape must fit into 32 bits, got 999"),
        ("--shape 64 64 64 --calibration nowhere.json", "nowhere.json"),
        ("--run nowhere", "must hold a plan.json"),
        ("--batch 2", "--shape must be given, got none"),
        ("--run there --hosts 2", "--hosts must come without --store and --run"),
        ("--run there --spacing 1 1 5", "--spacing must come without --run"),
    ],
)
def test_bad_input_exits_with_2_and_says_what_to_do(arguments, message, capsys):
    assert main(arguments.split()) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""


ABSURD = [
    ("--shape 1000000000 1000000000 1000000000 --depth 2", 3),
    ("--shape 16 16 2147483632 --policy speed", 3),
    ("--shape 64 64 64 --batch 2147483647 --micro-batch 2147483647", 3),
    ("--shape 64 64 64 --plan --host-memory 900000000000000000PiB", 0),
    ("--shape 64 64 64 --hosts 2147483647 --host-memory 900MiB --threads 2", 3),
    ("--shape 64 64 64 --batch 2147483648", 2),
    ("--shape 0 64 64", 2),
]


@pytest.mark.parametrize(("arguments", "code"), ABSURD)
def test_the_largest_sizes_are_answered_or_refused(arguments, code, capsys):
    assert main(arguments.split()) == code
    assert capsys.readouterr().err.count("\n") == (code == 2)


def test_without_native_operations_layers_are_counted(monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("CPU3D_INSTRUCTION_SET", raising=False)
    ask = "--shape 64 64 64 --threads 2"
    native = answer(f"{ask} --calibration avx2", capsys)
    monkeypatch.setattr("models.native.build.BUILT", tmp_path)
    here = answer(ask, capsys)
    assert here["constants"]["instructions"] == ""
    assert here["upper_bound_bytes"] > native["upper_bound_bytes"]
    assert any("TensorFlow's layers" in note and "built" in note for note in here["notes"])
    # A host that is described is set up as it should be.
    described = answer(f"{ask} --host-memory 64GiB", capsys)
    assert described["constants"]["instructions"]
    assert any("native operations" in note for note in described["notes"])


COST = """
import json, re, sys, time
from memory_estimator.__main__ import main
code = main(sys.argv[1:])
peak = 1024 * int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1])
imported = sorted({"tensorflow", "numpy", "cpu3d"} & set(sys.modules))
print(json.dumps([code, peak, imported, time.process_time()]), file=sys.stderr)
"""


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="reads VmHWM")
def test_an_answer_takes_little_time_150_mib_and_no_tensorflow_at_any_size():
    """The limit is of CPU time, some twenty times what a host of 2025 takes: no host's speed
    reaches it, while an answer that grows with the volume passes it by far."""
    large = "--recipe paper-2020 --shape 1024 1024 1024 --batch 64 --threads 80"
    command = [sys.executable, "-c", COST, *large.split()]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    code, peak_bytes, imported, cpu_s = json.loads(done.stderr.splitlines()[-1])
    assert code in (0, 3)
    assert imported == []
    assert peak_bytes < 150 * 2**20
    assert cpu_s < 10


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_ends_with_1_and_one_line():
    command = [sys.executable, "-m", "memory_estimator", *SMALL.split()]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, env=ENVIRONMENT, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1
    assert re.fullmatch("error: .*No space left on device; free space .*\n", done.stderr)


# --- Several hosts ---

SUM = "--shape 32 32 32 --filters 8 --depth 3 --threads 2 --calibration avx512_bf16"


def test_hosts_add_the_sum_of_their_gradients_and_share_an_epoch(capsys):
    ask = f"{SUM} --batch 2 --cases 101 --host-memory 64GiB"
    alone = answer(ask, capsys)
    content = answer(f"{ask} --hosts 1 2 51 --link 8", capsys)
    single, two, many = content["hosts"]
    assert [row["batch"] for row in content["hosts"]] == [2, 4, 102]
    assert (single["step_s"], single["sum_s"]) == (pytest.approx(alone["step_s"]), 0)
    assert single["epoch_s"] == pytest.approx(50 * alone["step_s"])  # whole batches
    assert many["epoch_s"] is None  # not one batch
    # A piece: two rounds of half of it, through 1 GB/s.
    per_byte = 1.956e-9 + 1e-9
    by_hand = 2 * (two["gradient_bytes"] / 2 * per_byte + 142.56e-6) + 0.8547e-3
    assert two["sum_s"] == pytest.approx(by_hand)
    assert two["step_s"] == pytest.approx(alone["step_s"] + two["sum_s"])


def test_a_worker_of_several_hosts_holds_copies_of_its_gradients(capsys):
    ask = f"{SUM} --host-memory 64GiB"
    # One of several adds its gradients up, as one does that has two micro-batches.
    in_parts = answer(f"{ask} --batch 2 --micro-batch 1", capsys)
    several = answer(f"{ask} --hosts 2", capsys)
    copies = several["upper_bound_bytes"] - in_parts["upper_bound_bytes"]
    assert copies == pytest.approx(4 * several["hosts"][0]["gradient_bytes"], rel=0.01)


def test_the_pieces_of_a_sum_are_those_of_the_trainer():
    assert 4 * all_reduce.PIECE == scaling.RING_BYTES  # of float32
