"""The trainer's own step is measured beside its prediction."""

import json
import sys

import pytest

from cpu3d.__main__ import main
from cpu3d.bench import step_costs
from cpu3d.bench.harness import ProcessFailedError, in_fresh_process, run_command
from cpu3d.bench.step_costs import (
    StepOptions,
    measure,
    request_for,
    requested,
    row_of,
    step_table,
    with_predictions,
)
from cpu3d.errors import InputError
from memory_estimator.calibration import shipped_constants
from memory_estimator.estimate import estimate
from memory_estimator.host import read_host
from memory_estimator.job import RECIPES, Job
from models.config import UNetConfig
from records.files import read_records
from tests.memory_estimator.test_job import write_plan

STEP = "--dtype float32 --policy lean --json "


def bench(options, *more):
    return main(["bench", "step", *options.split(), *more])


def test_a_step_is_measured_and_recorded(tmp_path, capsys):
    record = tmp_path / "new" / "step.jsonl"
    tiny = "--shape 32 32 32 --filters 8 --depth 2 --steps 2 --batch 2 --threads 3"
    assert bench(STEP + tiny, "--record", str(record)) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["batch"], result["micro_batch"]) == (2, 1)
    assert result["threads"]["TF_NUM_INTRAOP_THREADS"] == "3"
    (row,) = result["rows"]
    assert 0 < row["allocator_peak_bytes"] < row["process_peak_bytes"]
    assert 0 < row["predicted"]["process_peak_bytes"] < row["predicted"]["upper_bound_bytes"]
    (kept,) = read_records(record, "policies")
    assert [cells[0] for cells in step_table(kept).rows] == ["lean", "predicted"]
    several = [
        {"step_s": n, "allocator_peak_bytes": n * 2**30, "process_peak_bytes": 2**31}
        for n in (1, 9, 2)
    ]
    peer = {**row_of("Keras", "peer", several), "error": "killed"}
    table = step_table(with_predictions({**kept, "rows": [peer]}, shipped_constants("avx2")))
    assert table.rows == [["Keras", "9.00", "2.00", "-", "2.00"]]
    assert "killed" in table.caption
    step = "32 x 32 x 32 x 4, 8 filters, batch 2 (1 at a time), float32, instance norm, "
    assert table.title.startswith(step)


def test_the_step_of_a_store_is_that_of_the_run_that_is_planned_on_it(phantom_store):
    chosen = {"store": phantom_store.folder, "filters": 4, "depth": 3, "threads": 1}
    request = requested(chosen, StepOptions())
    assert request["shape"] == [24, 36, 32]  # the largest brain, in steps of 4
    with pytest.raises(InputError, match="--channels must come without --store"):
        requested({**chosen, "channels": 4}, StepOptions())


@pytest.mark.usefixtures("needs_native")  # layers are predicted roughly
@pytest.mark.parametrize(
    "more",
    [
        "--norm none --optimizer sgd --batch 2 --channels 6 --classes 1",
        "--freeze encoder",
    ],
)
def test_small_steps_take_the_memory_that_is_predicted(more, capsys):
    assert bench(STEP + "--filters 7 --depth 5 --shape 48 48 48 " + more) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    # The most of five steps: each began with another layout, and one took 16 % more than another.
    predicted = row["predicted"]["allocator_peak_bytes"]
    assert row["allocator_peak_bytes"] == pytest.approx(predicted, rel=0.02)


def test_the_result_is_the_last_line_of_json_of_a_process_that_succeeds():
    def ended(code):
        script = "print('{}\\n{\"a\": 1}\\n{an end'); exit(%d)"
        return run_command([sys.executable, "-c", script % code], "it")

    assert ended(0) == {"a": 1}
    with pytest.raises(ProcessFailedError, match=r"^it must end .*, got exit code 3: {an end"):
        ended(3)


@pytest.mark.slow  # a process of its own: stock TensorFlow takes no order that is not given
def test_gradients_do_not_outlive_their_update_under_stock_tensorflow():
    unet = UNetConfig(filters=64, depth=3, dtype="float32")
    job = Job(unet, (16, 16, 16), engine="stock", threads=2)
    measured = in_fresh_process(measure, request_for(job, steps=1))
    predicted = estimate(job, shipped_constants("avx2")).allocator_peak_bytes
    # 1.16 times that where the gradients were read once more at the end.
    assert measured["allocator_peak_bytes"] == pytest.approx(predicted, rel=0.05)


@pytest.fixture
def requests(monkeypatch):
    """The requests that would have been measured."""
    asked = []

    def refused(work, request):
        asked.append(request)
        raise InputError("nothing is measured")

    monkeypatch.setattr(step_costs, "in_fresh_process", refused)
    return asked


RUN = Job(UNetConfig(filters=4, depth=3), (32, 32, 32), optimizer="sgd", engine="stock")
PAPER = RECIPES["paper-2020"].job.unet


@pytest.mark.parametrize(
    ("options", "unet", "expected"),
    [
        (
            "--recipe paper-2020 --batch 1 --threads 2 --steps 3",
            PAPER.to_json(),
            {"shape": [240, 240, 144], "steps": 3, "threads": 2},
        ),
        (
            "--batch 4 --micro-batch 2 --policy lean --dtype auto",
            {"policy": "lean", "dtype": read_host().best_dtype},
            {"batch": 4, "micro_batch": 2},
        ),
        ("--run {} --engine itex --dtype bfloat16", {"dtype": "bfloat16"}, {"engine": "itex"}),
        (
            "--run {}",
            RUN.unet.to_json(),
            {"shape": [32, 32, 32], "optimizer": "sgd", "engine": "stock"},
        ),
        ("--shape 16 16 17 --depth 3 --engine auto", {}, {"shape": [16, 16, 20], "engine": None}),
    ],
)
def test_the_job_is_that_of_the_options_the_recipe_or_the_run(
    options, unet, expected, requests, tmp_path
):
    write_plan(tmp_path, RUN, workers=1)
    assert bench(options.format(tmp_path)) == 2
    (request,) = requests
    assert request["unet"].items() >= unet.items()
    assert request.items() >= expected.items()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--batch 4 --micro-batch 3", "--micro-batch must divide the batch of 4, got 3"),
        ("--record /proc/none/r.jsonl", "folder /proc/none must be a folder to write to"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_measured(options, message, requests, capsys):
    assert bench(options) == 2
    assert message in capsys.readouterr().err
    assert not requests
