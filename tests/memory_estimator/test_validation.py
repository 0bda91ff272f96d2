"""Errors of predictions, worked out by hand, and the margin that is made of them."""

import json
import math
from types import SimpleNamespace

import pytest

from memory_estimator.job import Job
from memory_estimator.validation import (
    RESERVE_SHARE,
    Measured,
    compare,
    digest,
    job_from,
    read_measured,
    spread,
    targets,
)
from models.config import UNetConfig

MIB, GIB = 2**20, 2**30


def row(allocator=10 * GIB, process=10 * GIB, upper=11 * GIB, step_s=1.0, shape=(128, 128, 128), **measured):
    one = Measured(
        Job(shape=shape),
        **{"step_s": 1.0, "process_peak_bytes": 10 * GIB, "allocator_peak_bytes": 10 * GIB, **measured},
    )
    said = SimpleNamespace(
        allocator_peak_bytes=allocator, process_peak_bytes=process, upper_bound_bytes=upper, step_s=step_s
    )
    (only,) = compare([one], lambda one: said)
    return only


def test_errors_are_signed_shares_of_what_was_measured():
    off = row(allocator=9 * GIB, process=11 * GIB, upper=12 * GIB, step_s=1.5)
    assert off.allocator_error == pytest.approx(-0.1)
    assert off.process_error == pytest.approx(0.1)
    assert off.slack == pytest.approx(0.2)
    assert off.step_error == pytest.approx(0.5)
    assert off.misses == ("allocator", "process", "time")
    assert row().misses == ()


def test_a_spread_has_the_median_of_sizes_and_the_worst_with_its_sign():
    found = spread([0.1, -0.3, None, 0.2])
    assert (found.count, found.median, found.worst) == (3, pytest.approx(0.2), -0.3)
    assert found.mean == pytest.approx(0.0)
    assert spread([]).count == 0
    assert math.isnan(spread([]).median)


RECORD = {
    "schema": 1,
    "kind": "memory",
    "date": "2026-11-20",
    "shape": [64, 64, 64],
    "batch": 2,
    "unet": {"filters": 8, "dtype": "bfloat16"},
    "optimizer": "sgd",
    "policy": "speed",
    "engine": "auto",
    "engine_name": "TensorFlow 2.15.1, oneDNN, ITEX 2.15.0.0",
    "threads": {"TF_NUM_INTRAOP_THREADS": "7"},
    "host": {"cpu": "some CPU", "isa": ["avx"]},
    "step_s": 0.5,
    "process_peak_bytes": 1000,
    "allocator_peak_bytes": 500,
}


def test_a_record_is_read_as_the_job_that_really_ran(tmp_path):
    path = tmp_path / "memory.jsonl"
    failed = {**RECORD, "batch": 3, "error": "exited with -9", "step_s": None}
    step = {"schema": 1, "kind": "step"}
    path.write_text("".join(json.dumps(record) + "\n" for record in (step, RECORD, failed)))
    one, other = read_measured(path)
    unet = UNetConfig(filters=8, dtype="bfloat16", policy="speed")
    assert one.job == Job(unet, (64, 64, 64), 2, 2, "sgd", "itex", threads=7)
    assert (one.step_s, one.process_peak_bytes, one.allocator_peak_bytes) == (0.5, 1000, 500)
    assert (one.host, one.isa, one.date) == ("some CPU", ("avx",), "2026-11-20")
    assert not one.held_out
    assert other.failure == "exited with -9"
    assert job_from({**RECORD, "engine_name": "TensorFlow 2.15.1, oneDNN"}).engine == "stock"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r":2 must be JSON of schema 1"),
        ("[]", r":2 must be JSON of schema 1"),
        (json.dumps({**RECORD, "schema": 2}), r":2 must be JSON of schema 1 .*schema 2"),
        (json.dumps({**RECORD, "step_s": 1, "unet": {"filters": -1}}), r":2 must be JSON"),
        (json.dumps({name: value for name, value in RECORD.items() if name != "threads"}), r":2 must be .*threads"),
    ],
)
def test_a_damaged_or_foreign_record_is_refused_with_its_line(tmp_path, line, message):
    path = tmp_path / "memory.jsonl"
    path.write_text(json.dumps(RECORD) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=message):
        read_measured(path)


def steps(shortest, longest, **more):
    """A record of steps that took so long, half a second in the middle."""
    return {**RECORD, "step_s_min": shortest, "step_s_max": longest, **more}


def test_the_newest_of_several_measurements_counts_and_one_of_far_apart_steps_was_disturbed(tmp_path):
    path = tmp_path / "memory.jsonl"
    other_job, other_host = {**RECORD, "batch": 3}, {**RECORD, "host": {"cpu": "another", "isa": []}}
    lines = [steps(0.495, 0.54), other_job, other_host, steps(0.495, 0.56, process_peak_bytes=7)]
    path.write_text("".join(json.dumps(record) + "\n" for record in lines[:3]))
    assert not read_measured(path)[0].disturbed  # less than a tenth
    path.write_text("".join(json.dumps(record) + "\n" for record in lines))
    first, second, third = read_measured(path)
    assert (first.process_peak_bytes, first.job.batch, first.disturbed) == (7, 2, True)
    assert (second.job.batch, third.host) == (3, "another")


def test_targets_are_judged_by_medians_worst_errors_and_bounds():
    rows = [row(step_s=1.0 + 0.01 * error, upper=int(10.4 * GIB)) for error in (-30, 3, 2)]
    rows[0] = row(allocator=int(9.6 * GIB), process=int(10.5 * GIB) - 2**20, upper=10 * GIB - 1, step_s=0.7)
    found = {one.name: one for one in targets(rows)}
    assert found["allocator peak, median error"].found == 0
    assert found["allocator peak, worst error"].found == pytest.approx(0.04)
    assert found["process peak, worst error"].found == pytest.approx(0.05, abs=1e-3)
    assert found["peaks above their upper bound"].found == 1
    assert found["upper bound above the peak, mean"].found == pytest.approx(0.08 / 3)
    assert found["seconds a step, median error"].found == pytest.approx(0.03)
    assert found["seconds a step, worst error"].found == pytest.approx(0.3)
    assert {name for name, one in found.items() if not one.met} == {
        *("allocator peak, worst error", "peaks above their upper bound", "seconds a step, worst error")
    }


GB = 10**9
PEAKS = ("process_peak_bytes", "allocator_peak_bytes")


def pair(predicted, measured, side=128, step_error=0.1):
    return row(predicted, predicted, 0, 1 + step_error, (side,) * 3, **dict.fromkeys(PEAKS, measured))


FITTED = pair(100 * GB, 100 * GB, side=96)


def test_errors_are_those_of_the_steps_held_out():
    rows = [
        pair(101 * GB, 100 * GB),
        pair(98 * GB, 100 * GB),
        pair(97 * GB, 100 * GB),
        pair(50 * GB, 100 * GB, side=64),
    ]
    found = digest(rows, "r.jsonl")
    assert (found.record, found.configurations) == ("r.jsonl", 3)
    assert (found.process_peak.median, found.process_peak.worst) == (0.02, 0.03)
    assert (found.step_s.median, found.step_s.worst) == (0.1, 0.1)


@pytest.mark.parametrize("errors", [(-0.031, 0.02), (0.05, 0.04), (-0.0001, 0), (-0.005,)])
def test_the_margin_covers_every_fitted_shape_with_the_reserve_to_spare(errors):
    rows = [pair(int(100 * GB * (1 + error)), 100 * GB, side=96) for error in errors]
    found = digest([*rows, pair(GB, GB)], "r")
    for one in rows:
        spared = found.upper_bound(one.process_peak_bytes) - one.measured.process_peak_bytes
        assert spared >= (RESERVE_SHARE - 1e-4) * one.process_peak_bytes
    assert found.margin_share <= max(0, -min(errors)) + RESERVE_SHARE + 0.0075
