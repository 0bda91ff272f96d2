"""The trainer's own step is measured: its time beside peers and on every engine."""

import json
import sys

import pytest

from cpu3d.__main__ import main
from cpu3d.bench import harness
from cpu3d.bench.engines import engines_table
from cpu3d.bench.harness import ProcessFailedError
from cpu3d.bench.step import step_table
from cpu3d.util.records import read_records

TINY = ["--shape", "16", "16", "16", "--filters", "4", "--depth", "3", "--steps", "2", "--dtype", "float32"]
PEER = f'{sys.executable} -c "print(\'{{\\"step_s\\": 1000, \\"peer\\": \\"slow one\\"}}\')"'


def test_a_step_is_measured_beside_a_peer_and_recorded(tmp_path, capsys):
    record = tmp_path / "step.jsonl"
    more = ["--batch", "2", "--policy", "lean", "--json", "--record", str(record), "--peer", PEER]
    assert main(["bench", "step", *TINY, *more]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["batch"], result["micro_batch"], result["unet"]["policy"]) == (2, 1, "lean")
    assert result["volume_s"] == pytest.approx(result["step_s"] / 2)
    assert 0 < result["step_s_min"] <= result["step_s"] <= result["step_s_max"]
    assert result["matmul_peak_share"] == pytest.approx(result["gflops"] / result["matmul_gflops"])
    assert result["process_peak_bytes"] > 100e6
    assert result["versions"]["tensorflow"]
    assert result["host"]["cores"] >= 1
    (peer,) = result["peers"]
    assert (peer["peer"], peer["step_s"]) == ("slow one", 1000)
    assert peer["ratio"] == peer["ratio_max"] == pytest.approx(1000 / result["rounds"][0])
    (kept,) = read_records(record, "step")
    assert kept["step_s"] == result["step_s"]
    assert [row[1:3] for row in step_table(kept).rows][1] == ("1000.00", "-")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["step", "--shape", "16", "16", "17", "--depth", "3"], "input_shape (16, 16, 17) must be divisible by 4"),
        (["step", "--batch", "4", "--micro-batch", "3"], "micro_batch must divide the batch of 4, got 3"),
        (["step", "--rounds", "0"], "rounds must be at least 1, got 0"),
        (["step", "--peer", "no-such-program"], "begins with an installed program, got 'no-such-program'"),
        (["engines", "--dtype", "float32"], "engine and dtype must be left out"),
    ],
)
def test_bad_settings_are_refused_before_anything_runs(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(harness, "in_fresh_process", lambda work, request: pytest.fail("something was measured"))
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_every_engine_is_measured_and_one_that_cannot_is_a_row(monkeypatch, capsys):
    def measured(work, request):
        engine, dtype = request["engine"], request["unet"]["dtype"]
        if (engine, dtype) == ("stock", "bfloat16"):
            raise ProcessFailedError("it cannot")
        seconds = {"stock-no-onednn": 20.0, "stock": 2.0, "itex": 1.0}[engine]
        return {**request, "step_s": seconds, "process_peak_bytes": 2**30, "host": {"cores": 2}}

    monkeypatch.setattr(harness, "in_fresh_process", measured)
    assert main(["bench", "engines", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    found = {(row["engine"], row["unet"]["dtype"]): row["speedup"] for row in result["rows"]}
    assert found[("itex", "bfloat16")] == 20
    assert found[("stock-no-onednn", "float32")] == 1
    assert found[("stock", "bfloat16")] is None
    assert ["stock, oneDNN", "bfloat16", "cannot", "-", "-"] in engines_table(result).rows
    assert {row["steps"] for row in result["rows"]} == {3}
