"""The command line: what it prints, what it exits with, what it costs."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from memory_estimator.__main__ import main
from memory_estimator.common.units import format_bytes, format_seconds
from memory_estimator.host import read_host
from memory_estimator.job import Job
from memory_estimator.training import ExtraMemory, Schedule
from models.config import POLICIES, UNetConfig
from tests.cpu3d.host.hosts import XEON
from tests.memory_estimator.test_job import write_plan
from tests.test_imports import run_python

SMALL = "--shape 64 64 64 --filters 8 --depth 4 --threads 2 --host-memory 64GiB"


def answer(arguments, capsys, code=0):
    assert main([*arguments.split(), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_a_job_that_does_not_fit_exits_with_3_and_says_what_would(capsys):
    large = SMALL.replace("64GiB", "850MiB --calibration avx2")
    large += " --engine itex --batch 8 --micro-batch 4 --norm batch --from-store --spacing 1 1 2"
    content = answer(large, capsys, code=3)
    assert content["fits"] is False
    assert content["upper_bound_bytes"] > 850 * 2**20
    advice = "\n".join(content["advice"])
    assert "fits with --micro-batch" in advice
    for change, bound in re.findall("fits with (--.+): up to (.+), .+ a volume", advice)[:2]:
        assert format_bytes(answer(f"{large} {change}", capsys)["upper_bound_bytes"]) == bound
    assert main(large.split()) == 3
    printed = capsys.readouterr().out
    for row in (
        "does not fit: needs up to .*, 850 MiB given",
        "strides 2,2,1 2,2,2 2,2,2: 64 x 64 x 64 voxels",
        "policy lean: no policy fits 850 MiB given",
        "a case's files +2 MiB",
        "note: the errors were measured",
        "note: batch norm's statistics are of 4 of",
        f"process peak of a step +{format_bytes(content['process_peak_bytes'])}",
        f"upper bound +{format_bytes(content['upper_bound_bytes'])}",
        f"volume +{format_seconds(content['volume_s'])}",
    ):
        assert re.search(row, printed)


def test_what_is_assumed_of_more_threads_than_were_measured_is_said(capsys):
    ask = "--shape 64 64 64 --calibration amx --threads "
    one, few, many = (answer(f"{ask}{threads}", capsys) for threads in (1, 2, 56))
    assert one["notes"] == few["notes"] == []
    assert any(re.search("56 threads .*busy (37|100)%", note) for note in many["notes"])
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
        assert {*entry} == {"policy", "batch", "filters", "extent"}
        for more in range(2):
            batch = entry["batch"]["job"]["batch"] + more
            words = f"--policy {entry['policy']} --batch {batch} --micro-batch {batch}"
            # A host that holds both: where a job does not fit, advice takes seconds.
            alone = answer(f"{ask} 64GiB {words}", capsys)
            assert (alone["upper_bound_bytes"] > 3 * 2**30) == bool(more), words


def test_the_fastest_policy_that_fits_is_picked_and_said(capsys):
    speed, lean = (answer(f"{SMALL} --policy {policy}", capsys) for policy in POLICIES)
    assert answer(SMALL, capsys)["policy"]["name"] == "speed"
    ask = SMALL.replace("64GiB", f"{speed['upper_bound_bytes'] - 1}B")
    content = answer(f"{ask} --policy auto", capsys)
    assert content["upper_bound_bytes"] == lean["upper_bound_bytes"]
    choice = content["policy"]
    assert (choice["name"], choice["picked"]) == ("lean", True)
    size = format_bytes(speed["upper_bound_bytes"])
    assert choice["reason"] == f"speed would take up to {size} of {size} given"
    assert lean["policy"]["reason"] == "given"


@pytest.mark.parametrize(
    ("options", "shape"),
    [("--strides 2,2,1 2,2,2", [240, 240, 156]), ("--depth 2 --strides 2,2,1", [240, 240, 155])],
)
def test_a_shape_is_padded_to_what_the_network_halves_and_the_grid_is_named(options, shape, capsys):
    ask = f"--shape 240 240 155 --threads 2 --host-memory 64GiB {options}"
    content = answer(ask, capsys)
    assert content["job"]["shape"] == shape
    named = f"240 x 240 x 155 voxels are padded to {' x '.join(map(str, shape))}"
    assert any(named in note for note in content["notes"]) == (shape[2] != 155)


def test_a_recipe_is_a_job_and_options_win_over_it(capsys):
    ask = "--recipe paper-2020 --threads 2 --host-memory 6TiB"
    singly = answer(ask, capsys)
    at_once = answer(f"{ask} --micro-batch 16", capsys)
    assert (singly["job"]["batch"], singly["job"]["micro_batch"]) == (16, 1)
    assert at_once["job"] == {**singly["job"], "micro_batch": 16}
    assert singly["process_peak_bytes"] < at_once["process_peak_bytes"] / 8
    assert singly["epoch_s"] == pytest.approx(484 // 16 * singly["step_s"])


# --- Runs ---

JOB = Job(UNetConfig(filters=8, depth=4, dtype="bfloat16", policy="lean"), (64, 64, 64), cases=8)


def of_run(folder, capsys, options="--host-memory 64GiB", code=0):
    return answer(f"--run {folder} --threads 2 {options}", capsys, code)


def test_a_run_of_several_workers_is_estimated_as_one_of_them(tmp_path, capsys, monkeypatch):
    job = dataclasses.replace(JOB, batch=4)
    schedule = Schedule(steps=12, validations=3, held_out=3, decided=2)

    def of_workers(workers, *more):
        return of_run(write_plan(tmp_path, job, workers, schedule=schedule), capsys, *more)

    alone = of_workers(1)
    shared = of_workers(2)
    (gradients,) = (
        line["bytes"] for line in alone["components"] if line["name"] == "gradient sums"
    )
    # Each computes one of four volumes at a time as before, and has four copies of the gradients
    # for their exchange.
    assert shared["upper_bound_bytes"] == alone["upper_bound_bytes"] + 4 * gradients
    assert shared["step_s"] == pytest.approx(alone["step_s"] / 2)
    assert shared["epoch_s"] == pytest.approx(2 * shared["step_s"])
    assert (shared["workers"], shared["host_memory_bytes"]) == (2, 64 * 2**30)
    assert of_workers(2, "--batch 8 --host-memory 64GiB")["workers"] == 1
    # One has two of three cases of a validation; the chief alone decides what is done after it.
    for part, share in (("steps_s", 1 / 2), ("validation_s", 2 / 3), ("postprocessing_s", 1)):
        assert shared["run"][part] == pytest.approx(share * alone["run"][part])
    # Both share the host's 56 cores, of two threads each, and its memory.
    monkeypatch.setattr("memory_estimator.planned_host.read_host", lambda: XEON.host)
    on_all_cores = answer(f"--run {tmp_path} --host-memory 64GiB", capsys)
    assert on_all_cores["job"]["threads"] == 28
    memory = f"--host-memory {2 * shared['upper_bound_bytes'] - 2}B"
    of_workers(2, memory, 3)
    of_workers(1, memory)


def test_a_run_is_estimated_whole(tmp_path, capsys):
    schedule = Schedule(
        steps=12,
        coarse_steps=10,
        coarse_shape=(32, 32, 32),
        extra=ExtraMemory(copies=1, judged_shape=(128, 128, 128)),
        validations=3,
        held_out=2,
        decided=2,
        flips=8,
        scored_voxels=10**6,
        windows=3,
        coarse_windows=2,
    )
    content = of_run(write_plan(tmp_path, JOB, 1, schedule=schedule), capsys)
    alone = of_run(tmp_path, capsys, "--cases 8 --host-memory 64GiB")  # not the run's own
    assert "run" not in alone
    run = content["run"]
    full_s = content["step_s"]
    coarse_s = run["coarse"]["step_s"]
    assert content["policy"]["reason"] == "given"  # the run's
    assert coarse_s < full_s / 4
    steps_s = 10 * coarse_s + 2 * full_s
    windows_s = 10 * 2 * coarse_s + 2 * 3 * full_s
    # A window is a third of a step: of six cases, and then of each of two cases eight times.
    parts = [steps_s, 6 / 3 * windows_s / 12, 2 * (8 * full_s + 0.5)]
    names = ("steps_s", "validation_s", "postprocessing_s", "all_s")
    assert [run[name] for name in names] == pytest.approx([*parts, sum(parts)])
    extra = {part["name"]: part["bytes"] for part in content["extra"]}
    assert extra["left by coarse steps"] == run["coarse"]["allocator_peak_bytes"]
    more = sum(extra.values())
    assert content["upper_bound_bytes"] == alone["upper_bound_bytes"] + more
    # What post-processing takes is held after the steps, what coarse ones leave in part at most.
    held = content["process_peak_bytes"] + extra["variables, once more"]
    assert held <= run["process_peak_bytes"] < held + extra["left by coarse steps"]


@pytest.mark.parametrize("more", ["", "--policy auto"])
def test_coarse_steps_that_do_not_fit_are_no_fit(tmp_path, more, capsys):
    """They need more memory than the full ones here."""
    heavy = ExtraMemory(judged_shape=(512, 512, 512))
    schedule = Schedule(steps=12, coarse_steps=10, coarse_shape=(32, 32, 32), coarse_extra=heavy)
    folder = write_plan(tmp_path, JOB, 1, schedule=schedule)
    ample = of_run(folder, capsys)
    bound = ample["run"]["coarse"]["upper_bound_bytes"]
    assert ample["upper_bound_bytes"] == bound
    ask = f"{more} --host-memory {bound - 1}B"
    short = of_run(folder, capsys, ask, 3)
    assert short["upper_bound_bytes"] >= bound
    assert ("no policy fits" in short["policy"]["reason"]) == bool(more)
    for change in re.findall("fits with (--[^:]+)", "\n".join(short["advice"])):
        of_run(folder, capsys, f"{ask} {change}")


def test_advice_on_a_run_has_the_grids_that_it_could_have(tmp_path, capsys):
    grids = [("--patch 16 16 16", (16, 16, 16)), ("--patch 32 32 32", (32, 32, 32))]
    folder = write_plan(tmp_path, JOB, 1, schedule=Schedule(), smaller_grids=grids)
    bound = of_run(folder, capsys)["upper_bound_bytes"]
    advice = str(of_run(folder, capsys, f"--host-memory {bound - 1}B", 3)["advice"])
    assert "--patch 32 32 32" in advice
    assert "--shape" not in advice
    assert "no smaller setting" in str(
        of_run(folder, capsys, "--depth 3 --host-memory 16MiB", 3)["advice"]
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "--shape 64 64 64 --cases 3 --batch 16",
            "--batch must be at most the 3 training cases, got 16",
        ),
        (f"--shape 64 64 {'9' * 400}", "shape must fit into 32 bits, got 999"),
        ("--shape 64 64 64 --calibration nowhere.json", "nowhere.json"),
        ("--run nowhere", "must hold a plan.json"),
        ("--store there --shape 64 64 64", "--shape must come without --store"),
        ("--run there --spacing 1 1 5", "--spacing must come without --run"),
        ("--shape 9 9 9 --spacing 1 1 101", "--spacing must be at most 100, got 101"),
        ("--shape 9 9 9 --spacing 1 0 1", "--spacing must be at least 0.01, got 0"),
    ],
)
def test_bad_input_exits_with_2_and_says_what_to_do(arguments, message, capsys):
    assert main(arguments.split()) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("--shape 1000000000 1000000000 1000000000 --depth 2", 3),
        ("--shape 64 64 64 --batch 2147483647 --micro-batch 2147483647", 3),
        ("--shape 64 64 64 --plan --host-memory 900000000000000000PiB", 0),
        ("--shape 64 64 64 --batch 2147483648", 2),
    ],
)
def test_the_largest_sizes_are_answered_or_refused(arguments, code, capsys):
    assert main(arguments.split()) == code
    assert capsys.readouterr().err.count("\n") == (code == 2)


def test_without_native_operations_layers_are_counted(monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("CPU3D_INSTRUCTION_SET", raising=False)
    ask = "--shape 64 64 64 --threads 2"
    monkeypatch.setattr("models.native.build.BUILT", tmp_path)
    here = answer(ask, capsys)
    assert here["constants"]["instructions"] == ""
    assert any("TensorFlow's layers" in note and "built" in note for note in here["notes"])
    # A host that is described is set up as it should be.
    described = answer(f"{ask} --host-memory 64GiB", capsys)
    best = dataclasses.replace(read_host(), is_here=False).instructions
    assert described["constants"]["instructions"] == (best or "avx2")
    assert any("native operations" in note for note in described["notes"])


def test_an_interrupt_ends_with_130(monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr("memory_estimator.planned_host.read_host", interrupt)
    assert main(SMALL.split()) == 130


# --- Processes ---

COST = """
import json, re, sys, time
sys.modules.update(dict.fromkeys(("scipy", "tensorflow", "blosc2", "matplotlib")))
from memory_estimator.__main__ import main
code = main(sys.argv[1:])
peak = 1024 * int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1])
imported = sorted({"numpy", "cpu3d"} & set(sys.modules))
print(json.dumps([code, peak, imported, time.process_time()]), file=sys.stderr)
"""


def cost(words):
    """The exit code, peak bytes, imported packages and CPU seconds of an estimate, for which some
    packages cannot be imported."""
    return json.loads(run_python(COST, *words.split()).stderr.splitlines()[-1])


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="reads VmHWM")
def test_an_answer_takes_little_time_150_mib_and_no_tensorflow_at_any_size():
    """The limit is of CPU time, some twenty times what a host of 2025 takes: no host's speed
    reaches it, while an answer that grows with the volume passes it by far."""
    large = "--recipe paper-2020 --shape 1024 1024 1024 --batch 64 --threads 80"
    code, peak_bytes, imported, cpu_s = cost(large)
    assert code in (0, 3)
    assert imported == []
    assert peak_bytes < 150 * 2**20
    assert cpu_s < 10


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="reads VmHWM")
def test_a_store_needs_no_package_but_those_that_are_named(phantom_store):
    code, _, imported, _ = cost(f"--store {phantom_store.folder} --host-memory 64GiB")
    assert (code, imported) == (0, ["cpu3d", "numpy"])
