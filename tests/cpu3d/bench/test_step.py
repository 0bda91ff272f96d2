"""The benchmark measures the trainer's own step and says so in a record."""

import argparse
import json
import sys

import pytest

from cpu3d.__main__ import main
from cpu3d.bench import engines, step
from cpu3d.bench.record import append_record, read_records
from cpu3d.errors import InputError

TINY = ["--shape", "16", "16", "16", "--filters", "4", "--depth", "3", "--steps", "2", "--dtype", "float32"]
PEER = f'{sys.executable} -c "print(\'{{\\"step_s\\": 1000, \\"peer\\": \\"slow one\\"}}\')"'


def test_a_step_is_measured_beside_a_peer_and_recorded(tmp_path, capsys):
    record = tmp_path / "step.jsonl"
    more = ["--batch", "2", "--policy", "lean", "--json", "--record", str(record), "--rounds", "2", "--peer", PEER]
    code = main(["bench", "step", *TINY, *more])
    result = json.loads(capsys.readouterr().out)
    assert code == 0
    assert (result["batch"], result["micro_batch"], result["unet"]["policy"]) == (2, 1, "lean")
    assert result["volume_s"] == pytest.approx(result["step_s"] / 2)
    assert 0 < result["step_s_min"] <= result["step_s"] <= result["step_s_max"]
    assert result["gflops"] > 0
    assert result["matmul_peak_share"] == pytest.approx(result["gflops"] / result["matmul_gflops"])
    assert result["process_peak_bytes"] > 100e6
    assert result["versions"]["tensorflow"]
    assert result["host"]["cores"] >= 1
    assert len(result["rounds"]) == 2
    (peer,) = result["peers"]
    assert peer["peer"] == "slow one"
    assert peer["ratio"] == pytest.approx(sum(1000 / s for s in result["rounds"]) / 2)
    (kept,) = read_records(record, "step")
    assert kept["step_s"] == result["step_s"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "16", "16", "17", "--depth", "3"], "input_shape (16, 16, 17) must be divisible by 4"),
        (["--batch", "0"], "batch must be at least 1, got 0"),
        (["--batch", "4", "--micro-batch", "3"], "micro_batch must divide the batch of 4, got 3; give one of 1, 2, 4"),
        (["--micro-batch", "-1"], "micro_batch must divide the batch of 1, got -1; give one of 1"),
        (["--rounds", "0"], "rounds must be at least 1, got 0"),
        (["--filters", "-1"], "filters must be at least 1, got -1"),
    ],
)
def test_bad_settings_are_refused_before_anything_runs(arguments, message, capsys):
    assert main(["bench", "step", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_it_measures_what_is_asked_for_and_a_policy_is_never_picked(capsys):
    parser = argparse.ArgumentParser()
    step.add_arguments(parser)
    request = step.step_request(parser.parse_args(["--batch", "4"]), dtype="float32", engine="stock")
    assert (request["unet"]["policy"], request["batch"], request["micro_batch"]) == ("speed", 4, 1)
    with pytest.raises(SystemExit):
        parser.parse_args(["--policy", "auto"])
    assert "invalid choice: 'auto'" in capsys.readouterr().err


def test_a_peer_that_prints_nothing_useful_is_named(tmp_path, capsys):
    assert main(["bench", "step", *TINY, "--peer", f"{sys.executable} -c 'raise SystemExit(3)'"]) == 2
    assert "must end with a line of JSON, exited with 3" in capsys.readouterr().err


def test_a_picture_of_the_engines_is_a_png():
    rows = [
        {
            "engine": engine,
            "shape": [8, 8, 8],
            "unet": {"dtype": "float32", "filters": 4},
            "host": {"cores": 2},
            "step_s": seconds,
            "speedup": 20 / seconds if seconds else None,
        }
        for engine, seconds in (("stock-no-onednn", 20.0), ("stock", None), ("itex", 1.0))
    ]
    assert engines.picture(rows).startswith(b"\x89PNG")


@pytest.mark.parametrize(("line", "message"), [("{", "be JSON"), ('{"schema": 7, "kind": "step"}', "got 7")])
def test_a_damaged_or_foreign_record_is_refused_with_its_line(tmp_path, line, message):
    path = tmp_path / "r.jsonl"
    append_record(path, "step", {"step_s": 1})
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(InputError, match=f":2 must .*{message}"):
        read_records(path, "step")
