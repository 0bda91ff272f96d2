"""The trainer's own step is measured: beside peers, beside predictions and under every policy."""

import dataclasses
import json
import shlex
import sys

import pytest

from cpu3d.__main__ import main
from cpu3d.bench import harness, step_costs
from cpu3d.bench.harness import ProcessFailedError
from cpu3d.bench.step_costs import (
    compare_policies,
    job_of_record,
    measure,
    most_in_each_span,
    request_for,
    step_table,
)
from cpu3d.errors import InputError
from memory_estimator.calibration import shipped_constants
from memory_estimator.estimate import estimate
from memory_estimator.host import read_host
from memory_estimator.job import RECIPES, Job
from models.config import POLICIES, UNetConfig
from records.files import read_records
from records.tables import draw_policies
from tests.memory_estimator.test_job import write_plan

MIB = 2**20
TINY = [
    "--shape",
    "32",
    "32",
    "32",
    "--filters",
    "8",
    "--depth",
    "2",
    "--steps",
    "2",
    "--dtype",
    "float32",
]
ANSWER = {"step_s": 1000, "peer": "slow one", "peak_rss_bytes": 2**30}
PEER = shlex.join([sys.executable, "-c", f"print('words'); print('{json.dumps(ANSWER)}')"])


def test_a_step_is_measured_beside_a_peer_and_recorded(tmp_path, capsys):
    record = tmp_path / "new" / "step.jsonl"
    more = ["--batch", "2", "--policy", "lean", "--json", "--record", str(record), "--peer", PEER]
    assert main(["bench", "step", *TINY, *more]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["batch"], result["micro_batch"]) == (2, 1)
    ours, peer = result["rows"]
    assert (ours["name"], peer["name"].split(" -c")[0]) == ("lean", "slow one")
    assert (peer["step_s"], peer["process_peak_bytes"]) == (1000, 2**30)
    assert 0 < ours["allocator_peak_bytes"] < ours["process_peak_bytes"]
    assert 0 < ours["predicted"]["process_peak_bytes"] < ours["predicted"]["upper_bound_bytes"]
    assert len(ours["live_bytes"]) == 300
    assert max(ours["live_bytes"]) <= ours["allocator_peak_bytes"]
    (kept,) = read_records(record, "policies")
    assert [row[1:] for row in step_table(kept).rows][2] == ["-", "1.00", "-", "1000.00"]


@pytest.mark.parametrize(
    "more",
    [
        "--norm none --optimizer sgd --batch 2 --channels 6 --classes 1",
        "--freeze encoder --loss dice-cross-entropy",
    ],
)
def test_small_steps_take_the_memory_that_is_predicted(more, capsys):
    if not read_host().instructions:
        pytest.skip("needs native operations: layers are predicted roughly")
    step = "--filters 7 --depth 5 --policy lean --shape 48 48 48 --dtype float32 --json"
    assert main(["bench", "step", *step.split(), *more.split()]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    # The most of five steps: each began with another layout, and one took 16 % more than another.
    predicted = row["predicted"]["allocator_peak_bytes"]
    assert row["allocator_peak_bytes"] == pytest.approx(predicted, rel=0.02)


@pytest.mark.slow  # a process of its own: stock TensorFlow takes no order that is not given
def test_gradients_do_not_outlive_their_update_under_stock_tensorflow():
    job = Job(
        UNetConfig(filters=64, depth=3, dtype="float32"), (16, 16, 16), engine="stock", threads=2
    )
    measured = harness.in_fresh_process(measure, request_for(job, steps=1))
    predicted = estimate(job, shipped_constants("avx2"))
    # 1.16 times that where the gradients were read once more at the end.
    assert measured["allocator_peak_bytes"] == pytest.approx(
        predicted.allocator_peak_bytes, rel=0.05
    )


@pytest.fixture
def requests(monkeypatch):
    """The requests that would have been measured."""
    asked = []

    def refused(work, request):
        asked.append(request)
        raise InputError("nothing is measured")

    monkeypatch.setattr(harness, "in_fresh_process", refused)
    return asked


def test_the_job_is_that_of_the_options_the_recipe_or_the_run(requests, tmp_path):
    job = Job(UNetConfig(filters=4, depth=3), (32, 32, 32), optimizer="sgd", engine="stock")
    write_plan(tmp_path, job, workers=1)
    recipe = ["--recipe", "paper-2020", "--batch", "1", "--threads", "2", "--steps", "3"]
    own = ["--batch", "4", "--micro-batch", "2", "--policy", "lean", "--dtype", "auto"]
    run = ["--run", str(tmp_path), "--engine", "itex", "--dtype", "bfloat16"]
    for arguments in (recipe, own, run, run[:2], []):
        assert main(["bench", "step", *arguments]) == 2
    paper, second, third, fourth, default = requests
    assert (paper["shape"], paper["steps"], paper["threads"]) == ([240, 240, 144], 3, 2)
    assert paper["unet"] == RECIPES["paper-2020"].job.unet.to_json()
    assert (second["unet"]["policy"], second["batch"], second["micro_batch"]) == ("lean", 4, 2)
    assert (third["engine"], third["unet"]["dtype"]) == ("itex", "bfloat16")
    assert (fourth["shape"], fourth["optimizer"], fourth["engine"]) == (
        [32, 32, 32],
        "sgd",
        "stock",
    )
    assert (default["shape"], default["engine"], default["unet"]["policy"]) == (
        [128, 128, 128],
        None,
        "speed",
    )
    assert default["unet"]["dtype"] == second["unet"]["dtype"] == read_host().best_dtype


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--batch 4 --micro-batch 3", "--micro-batch must divide the batch of 4, got 3"),
        ("--peer no-such-program", "peer 'no-such-program' must end with a line of JSON"),
        (
            f"--peer '{sys.executable} -c print(3)'",
            "must end with a line of JSON, got exit code 0: 3",
        ),
        (f"--peer '{sys.executable} -c print({{}})'", "must print JSON with step_s"),
        ("""--peer 'python "x'""", "No closing quotation"),
        (
            "--policies --record /proc/none/r.jsonl",
            "folder /proc/none must be a folder to write to",
        ),
        ("--policies --policy lean", "--policies must be without --policy, got lean"),
    ],
)
def test_bad_settings_are_refused_before_ours_are_measured(arguments, message, requests, capsys):
    assert main(["bench", "step", *shlex.split(arguments)]) == 2
    assert message in capsys.readouterr().err
    assert not requests


def test_a_shape_is_padded_and_the_grid_that_is_measured_is_named(requests, capsys):
    main(["bench", "step", "--shape", "16", "16", "17", "--depth", "3"])
    assert "16 x 16 x 20" in capsys.readouterr().err


FACTS = {
    "threads": {"TF_NUM_INTRAOP_THREADS": "2"},
    "versions": {},
    "engine_name": "TensorFlow 2.15.1, oneDNN",
}


@pytest.fixture
def answers(monkeypatch):
    """Way -> answers of its rounds, an exception by raising it."""
    scripted = {}

    def answer(name):
        result = scripted[name].pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    def ours(work, request):
        seconds, allocator, process = answer(request["unet"]["policy"])
        peaks = {"allocator_peak_bytes": allocator * MIB, "process_peak_bytes": process * MIB}
        live = {"live_bytes": [MIB, allocator * MIB]} if request["live"] else {}
        return {"step_s": seconds, **peaks, **FACTS, "host": read_host().summary(), **live}

    monkeypatch.setattr(harness, "in_fresh_process", ours)
    monkeypatch.setattr(step_costs, "run_peer", answer)
    return scripted


JOB = Job(UNetConfig(filters=8, depth=3), (16, 16, 16), batch=4, micro_batch=1)


def test_policies_are_compared_in_turn_and_the_dead_are_rows(answers):
    answers.update(
        {
            "speed": [(2, 30, 1024), (4, 31, 2048)],
            "lean": [(4, 10, 500), ProcessFailedError("got SIGKILL"), None],
            "python /x/peer.py": [{"step_s": 8, "peer": "torch"}, {"step_s": 4, "peer": "torch"}],
            "python /x/peer.py --fast": [
                {"step_s": 8, "peer": "torch", "process_peak_bytes": 5},
                {"step_s": 4},
            ],
        }
    )
    result = compare_policies(
        request_for(JOB), POLICIES, [name for name in answers if name.startswith("python")], 2
    )
    rows = {row["name"]: {**row, "predicted": None} for row in result["rows"]}
    assert list(rows) == [*POLICIES, "torch", "torch --fast"]
    assert [row["step_s"] for row in rows.values()] == [3, 4, 6, 6]
    assert [rows["speed"][peak] for peak in ("allocator_peak_bytes", "process_peak_bytes")] == [
        31 * MIB,
        2048 * MIB,
    ]
    assert rows["torch --fast"]["process_peak_bytes"] == 5
    assert job_of_record({**result, "engine": "stock"}) == dataclasses.replace(
        JOB, micro_batch=0, engine="stock", threads=2
    )
    table = step_table({**result, "rows": list(rows.values())})
    assert ["speed", "0.03", "2.00", "-", "3.00"] in table.rows
    assert "lean died: got SIGKILL" in table.caption
    assert draw_policies([result, {**result, "rows": []}]).startswith(b"\x89PNG")
    with pytest.raises(InputError, match="must have live_bytes"):
        draw_policies([{**result, "rows": result["rows"][2:]}])
    answers.update(speed=[ProcessFailedError("got SIGKILL")])
    with pytest.raises(ProcessFailedError, match="SIGKILL"):
        compare_policies(request_for(JOB), ["speed"], [], 1)


def test_the_bytes_live_over_a_step_are_the_most_in_each_of_its_spans():
    """A step of 3 s: 10 bytes, at 1 s for an instant 30, then 20; each span begins with what was
    held before it."""
    requests = [(0.0, 10), (1.0, 30), (1.001, 20), (3.0, 20)]
    assert most_in_each_span(requests, 300) == [10] * 100 + [30] + [20] * 199
