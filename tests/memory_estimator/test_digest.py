"""The digest of measured steps: errors of those held out, and a margin that these had no say in."""

import json

import pytest

from memory_estimator.accuracy import load_accuracy
from memory_estimator.digest import MARGIN_BYTES, RESERVE_SHARE, digest, main, to_json
from memory_estimator.job import Job
from memory_estimator.validation import Measured, Row

GB = 10**9


def row(predicted, measured, side=128, step_error=0.1):
    one = Measured(
        Job(shape=(side, side, side)), step_s=1.0, process_peak_bytes=measured, allocator_peak_bytes=measured
    )
    return Row(one, predicted, predicted, 0, 1 + step_error)


FITTED = row(100 * GB, 100 * GB, side=96)


def test_errors_are_those_of_the_steps_held_out():
    rows = [row(101 * GB, 100 * GB), row(98 * GB, 100 * GB), row(97 * GB, 100 * GB), row(50 * GB, 100 * GB, side=64)]
    found = digest(rows, "r.jsonl")
    assert (found.record, found.configurations) == ("r.jsonl", 3)
    assert (found.process_peak.median, found.process_peak.worst) == (0.02, 0.03)
    assert (found.step_s.median, found.step_s.worst) == (0.1, 0.1)


@pytest.mark.parametrize("errors", [(-0.031, 0.02), (0.05, 0.04), (-0.0001, 0), (-0.005,)])
def test_the_margin_covers_every_fitted_shape_with_the_reserve_to_spare(errors):
    rows = [row(int(100 * GB * (1 + error)), 100 * GB, side=96) for error in errors]
    found = digest([*rows, row(GB, GB)], "r")
    for one in rows:
        spared = found.upper_bound(one.process_peak_bytes) - one.measured.process_peak_bytes
        assert spared >= (RESERVE_SHARE - 1e-4) * one.process_peak_bytes
    assert found.margin_share <= max(0, -min(errors)) + RESERVE_SHARE + 0.0075


def test_what_the_fixed_part_covers_widens_nothing():
    assert digest([row(GB - MARGIN_BYTES, GB, side=64), row(GB, GB)], "r").margin_share == RESERVE_SHARE


def test_held_out_steps_have_no_say_in_the_margin_that_they_judge():
    assert digest([FITTED, row(50 * GB, 100 * GB)], "r").margin_share == RESERVE_SHARE


def test_fitted_shapes_tell_no_error():
    found = digest([row(100 * GB, 100 * GB), row(90 * GB, 100 * GB, side=96)], "r")
    assert found.process_peak.worst == 0
    assert found.margin_share > 0.1


@pytest.mark.parametrize(("side", "what"), [(96, "above"), (128, "of at most")])
def test_without_a_step_held_out_or_one_fitted_to_there_is_no_digest(side, what):
    with pytest.raises(ValueError, match=f"record r must hold steps on volumes {what} 884736 voxels"):
        digest([row(GB, GB, side=side)], "r")


def test_what_is_written_is_read_back_equal(tmp_path):
    found = digest([row(101 * GB, 100 * GB), FITTED], "r")
    path = tmp_path / "accuracy.json"
    path.write_text(json.dumps(to_json(found)))
    assert load_accuracy(path) == found


def test_a_missing_record_is_bad_input(tmp_path, capsys):
    assert main([str(tmp_path / "none.jsonl")]) == 2
    assert "none.jsonl must exist" in capsys.readouterr().err


def test_the_digest_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    monkeypatch.setattr("memory_estimator.digest.read_measured", lambda path: ())
    monkeypatch.setattr("memory_estimator.digest.compare", lambda measured, predict: [FITTED, row(GB, GB)])
    out = tmp_path / "accuracy.json"
    out.write_text("old")
    assert main(["r.jsonl", "--out", str(out)]) == 0
    assert load_accuracy(out).configurations == 1
    assert [path.name for path in tmp_path.iterdir()] == ["accuracy.json"]
