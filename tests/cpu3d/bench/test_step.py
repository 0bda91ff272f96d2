"""The trainer's own step is measured: beside peers, beside predictions and under every policy."""

import dataclasses
import json
import sys

import pytest

from cpu3d.__main__ import main
from cpu3d.bench import harness, memory
from cpu3d.bench.harness import ProcessFailedError
from cpu3d.bench.memory import compare_policies, draw_policies, policies_table
from cpu3d.bench.step import step_table
from cpu3d.bench.validate import read_measured
from cpu3d.errors import InputError
from cpu3d.util.records import read_records
from memory_estimator.host import read_host
from memory_estimator.job import RECIPES, Job
from models.config import POLICIES, UNetConfig

MIB = 2**20
TINY = ["--shape", "16", "16", "16", "--filters", "4", "--depth", "3", "--steps", "2", "--dtype", "float32"]
PEER = f'{sys.executable} -c "print(\'{{\\"step_s\\": 1000, \\"peer\\": \\"slow one\\"}}\')"'


def test_a_step_is_measured_beside_a_peer_and_recorded(tmp_path, capsys):
    record = tmp_path / "step.jsonl"
    more = ["--batch", "2", "--policy", "lean", "--json", "--record", str(record), "--peer", PEER]
    assert main(["bench", "step", *TINY, *more]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["batch"], result["micro_batch"], result["unet"]["policy"]) == (2, 1, "lean")
    assert result["volume_s"] == pytest.approx(result["step_s"] / 2)
    assert result["matmul_peak_share"] == pytest.approx(result["gflops"] / result["matmul_gflops"])
    (peer,) = result["peers"]
    assert (peer["peer"], peer["step_s"]) == ("slow one", 1000)
    assert peer["ratio"] == peer["ratio_max"] == pytest.approx(1000 / result["rounds"][0])
    (kept,) = read_records(record, "step")
    assert [row[1:3] for row in step_table(kept).rows][1] == ("1000.00", "-")


@pytest.fixture
def requests(monkeypatch):
    """What would have been measured."""
    found = []

    def measure(work, request):
        found.append(request)
        raise InputError("nothing is measured")

    monkeypatch.setattr(harness, "in_fresh_process", measure)
    return found


@pytest.mark.policy_left_open
def test_the_job_is_that_of_the_options_the_recipe_or_the_run(requests, tmp_path):
    job = Job(UNetConfig(filters=4, depth=3), (32, 32, 32), optimizer="sgd", engine="stock")
    config = {"device": "cpu", "mode": "whole", "resolution": 1, "coarse_steps": 0, "read_mode": "auto"}
    plan = {"schema": 1, "job": dataclasses.asdict(job), "config": config}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    recipe = ["--recipe", "paper-2020", "--batch", "1", "--threads", "2", "--steps", "3"]
    own = ["--batch", "4", "--micro-batch", "2", "--policy", "balanced", "--dtype", "auto"]
    run = ["--run", str(tmp_path), "--engine", "itex", "--dtype", "bfloat16"]
    for arguments in (recipe, own, run, run[:2], []):
        assert main(["bench", "memory", *arguments]) == 2
    paper, second, third, fourth, default = requests
    assert (paper["shape"], paper["steps"], paper["threads"]) == ([240, 240, 144], 3, 2)
    assert paper["unet"] == dataclasses.asdict(RECIPES["paper-2020"].job.unet)
    assert (second["unet"]["policy"], second["batch"], second["micro_batch"]) == ("balanced", 4, 2)
    assert (third["engine"], third["unet"]["dtype"]) == ("itex", "bfloat16")
    assert (fourth["shape"], fourth["optimizer"], fourth["engine"]) == ([32, 32, 32], "sgd", "stock")
    assert (default["shape"], default["engine"], default["unet"]["policy"]) == ([128, 128, 128], None, "speed")
    assert default["unet"]["dtype"] == second["unet"]["dtype"] == read_host().best_dtype


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("step --shape 16 16 17 --depth 3", "input_shape (16, 16, 17) must be divisible by 4"),
        ("step --batch 4 --micro-batch 3", "micro_batch must divide the batch of 4, got 3"),
        ("step --peer no-such-program", "begins with an installed program, got 'no-such-program'"),
        ("memory --policies --record /proc/none/r.jsonl", "folder /proc/none must be a folder to write to"),
        ("memory --policies --policy lean", "policy must be left out with --policies"),
        ("memory --policies --peer echo", "peer 'echo' must end with a line of JSON, exited with 0"),
        ("memory --peer echo", "peer and rounds must come with --policies"),
    ],
)
def test_bad_settings_are_refused_before_ours_are_measured(arguments, message, requests, capsys):
    assert main(["bench", *arguments.split()]) == 2
    assert message in capsys.readouterr().err
    assert not requests


def test_a_step_is_recorded_beside_its_prediction_where_there_is_one(monkeypatch, tmp_path, capsys):
    facts = {"threads": {"TF_NUM_INTRAOP_THREADS": "2"}, "host": read_host().summary(), "engine_name": "ITEX"}
    figures = {"allocator_peak_bytes": None, "process_peak_bytes": 2**30, "step_s": 1.0}
    monkeypatch.setattr(harness, "in_fresh_process", lambda work, request: {**request, **facts, **figures})
    record = tmp_path / "r" / "memory.jsonl"
    command = ["bench", "memory", *TINY, "--record", str(record)]
    assert main(command) == 0
    (one,) = read_measured(record)
    assert (one.job.shape, one.process_peak_bytes) == ((16, 16, 16), 2**30)
    assert "predicted" in capsys.readouterr().out
    facts["engine_name"] = "TensorFlow 2.15.1, no oneDNN"
    assert main(command) == 0
    assert "no prediction: engine must use oneDNN" in capsys.readouterr().err
    assert [bool(one["predicted"]) for one in read_records(record, "memory")] == [True, False]


def test_policies_are_compared_within_rounds_and_the_dead_are_rows(monkeypatch):
    unit = 16**3 * 8 * 2
    answers = {
        "speed": [(2, 30, 1024), (4, 31, 2048)],
        "balanced": [(3, 20, 600), (4, 20, 600)],
        "lean": [(4, 10, 500), ProcessFailedError("dead", -9, "")],
        "python /x/peer.py": [{"step_s": 8, "peer": "torch"}, {"step_s": 4, "peer": "torch"}],
        "python /x/peer.py --fast": [{"step_s": 8, "peer": "torch", "process_peak_bytes": 5}, {"step_s": 4}],
    }

    def ours(work, request):
        answer = answers[request["unet"]["policy"]].pop(0)
        if isinstance(answer, Exception):
            raise answer
        seconds, units, process = answer
        about = {"engine_name": "TensorFlow", "threads": {}, "host": {"cpu": "made up", "cores": 2}, "versions": {}}
        peaks = {"allocator_peak_bytes": units * unit, "process_peak_bytes": process * MIB}
        return {**about, "step_s": seconds, **peaks, "live_bytes": [unit, units * unit]}

    predicted = {"allocator_peak_bytes": 40 * unit, "process_peak_bytes": 900 * MIB, "step_s": 2.5}
    monkeypatch.setattr(harness, "in_fresh_process", ours)
    monkeypatch.setattr(harness, "run_peer", lambda command: answers[command].pop(0))
    monkeypatch.setattr(memory, "predict", lambda result, constants: {**predicted, "policy": result["unet"]["policy"]})
    unet = vars(UNetConfig(filters=8, depth=3, dtype="bfloat16"))
    request = {"shape": [16, 16, 16], "batch": 4, "micro_batch": 1, "unet": unet}
    result = compare_policies(request, list(answers)[3:], 2)
    rows = {row["name"]: row for row in result["rows"]}
    assert list(rows) == [*POLICIES, "torch", "torch --fast"]
    # Relative to speed: 3/2, 4/4; 4/2; 8/2, 4/4.
    assert [rows[name]["ratio"] for name in ("speed", "balanced", "lean", "torch")] == [1, 1.25, 2, 2.5]
    assert (rows["torch"]["units"], rows["torch --fast"]["process_peak_bytes"]) == (None, 5)
    assert [rows[policy]["predicted"]["policy"] for policy in POLICIES] == list(POLICIES)
    table = policies_table(result)
    assert ["speed", "0.00", "31.0", "2.00", "3.00 (2.00 to 4.00)", "1.00"] in table.rows
    assert ["lean", "-", "-", "-", "died", "-"] in table.rows
    assert "lean: killed" in table.caption
    assert draw_policies(result, [result]).startswith(b"\x89PNG")
