"""The digest of measured steps: errors of those held out, and a bound that none of them breaks."""

import json
from pathlib import Path

import pytest

from memory_estimator.accuracy import SHIPPED, load_accuracy
from memory_estimator.digest import digest, main, to_json
from memory_estimator.job import Job
from memory_estimator.validation import Measured, Row

RECORD = Path(__file__).resolve().parents[2] / "records" / "memory.jsonl"
GB = 10**9


def row(predicted, measured, side=128, step_error=0.1):
    one = Measured(
        Job(shape=(side, side, side)), step_s=1.0, process_peak_bytes=measured, allocator_peak_bytes=measured
    )
    return Row(one, predicted, predicted, 0, 1 + step_error)


def test_errors_are_those_of_the_steps_held_out():
    rows = [row(101 * GB, 100 * GB), row(98 * GB, 100 * GB), row(97 * GB, 100 * GB), row(50 * GB, 100 * GB, side=64)]
    found = digest(rows, "r.jsonl")
    assert (found.record, found.configurations) == ("r.jsonl", 3)
    assert (found.process_peak.median, found.process_peak.worst) == (0.02, 0.03)
    assert (found.step_s.median, found.step_s.worst) == (0.1, 0.1)


@pytest.mark.parametrize("errors", [(-0.031, 0.02), (0.05, 0.04), (-0.0001, 0), (-0.005,)])
def test_the_margin_covers_every_row_with_one_per_cent_to_spare(errors):
    rows = [row(int(100 * GB * (1 + error)), 100 * GB) for error in errors]
    found = digest(rows, "r")
    for one in rows:
        assert (
            found.upper_bound(one.process_peak_bytes)
            >= one.measured.process_peak_bytes + 0.0099 * one.process_peak_bytes
        )
    assert found.margin_share <= max(0, -min(errors)) + 0.0175


def test_steps_that_constants_were_fitted_to_widen_the_margin_but_tell_no_error():
    found = digest([row(100 * GB, 100 * GB), row(90 * GB, 100 * GB, side=96)], "r")
    assert found.process_peak.worst == 0
    assert found.margin_share > 0.1


def test_without_a_step_held_out_there_is_no_digest():
    with pytest.raises(ValueError, match=r"record r must hold steps larger"):
        digest([row(GB, GB, side=96)], "r")


def test_what_is_written_is_read_back_equal(tmp_path):
    found = digest([row(101 * GB, 100 * GB)], "r")
    path = tmp_path / "accuracy.json"
    path.write_text(json.dumps(to_json(found)))
    assert load_accuracy(path) == found


def test_a_missing_record_is_bad_input(tmp_path, capsys):
    assert main([str(tmp_path / "none.jsonl")]) == 2
    assert "none.jsonl must exist" in capsys.readouterr().err


@pytest.mark.skipif(not RECORD.is_file(), reason="nothing is measured yet")
def test_the_shipped_digest_is_that_of_the_record_and_the_code_as_they_stand(capsys):
    assert main([str(RECORD)]) == 0
    now, shipped = json.loads(capsys.readouterr().out), json.loads(SHIPPED.read_text())
    for name in ("allocator_peak", "process_peak", "step_s", "margin", "configurations"):
        assert now[name] == shipped[name]
