"""Errors of predictions, worked out by hand, and the margin that is made of them."""

import json
import math
from types import SimpleNamespace

import pytest

from memory_estimator.job import Job
from memory_estimator.validation import RESERVE_SHARE, Measured, compare, digest, main, read_measured, spread, targets
from models.config import UNetConfig

GIB = 2**30
PEAKS = ("process_peak_bytes", "allocator_peak_bytes")


def row(allocator=10 * GIB, process=10 * GIB, upper=11 * GIB, step_s=1.0, side=128, measured=10 * GIB):
    one = Measured(Job(shape=(side,) * 3), step_s=1.0, **dict.fromkeys(PEAKS, measured))
    predicted = {**dict(zip(PEAKS, (process, allocator))), "upper_bound_bytes": upper, "step_s": step_s}
    (only,) = compare([one], lambda one: SimpleNamespace(**predicted))
    return only


def test_errors_are_signed_shares_of_what_was_measured():
    off = row(allocator=9 * GIB, process=11 * GIB, upper=12 * GIB, step_s=1.5)
    found = (off.allocator_error, off.process_error, off.slack, off.step_error)
    assert found == pytest.approx((-0.1, 0.1, 0.2, 0.5))
    assert off.misses == ("allocator", "process", "time")
    assert row().misses == ()
    both = spread([0.1, -0.3, None, 0.2])
    assert both == (3, pytest.approx(0.2), -0.3, pytest.approx(0.0))  # the median of sizes, the worst with its sign
    assert math.isnan(spread([]).median)


RECORD = {
    "schema": 1, "kind": "memory", "date": "2026-11-20", "shape": [64, 64, 64], "batch": 2,
    "unet": {"filters": 8, "dtype": "bfloat16"}, "optimizer": "sgd", "policy": "speed", "engine": "auto",
    "engine_name": "TensorFlow 2.15.1, oneDNN, ITEX 2.15.0.0", "threads": {"TF_NUM_INTRAOP_THREADS": "7"},
    "host": {"cpu": "some CPU", "isa": ["avx"]}, "step_s": 0.5, "process_peak_bytes": 1000,
    "allocator_peak_bytes": 500,
}  # fmt: skip


def steps(shortest, longest, **more):
    """A record of steps that took so long, half a second in the middle."""
    return {**RECORD, "step_s_min": shortest, "step_s_max": longest, **more}


@pytest.fixture
def read(tmp_path):
    def measured(*records):
        path = tmp_path / "memory.jsonl"
        path.write_text("".join(f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in records))
        return read_measured(path)

    return measured


def test_a_record_is_read_as_the_job_that_really_ran(read):
    unknown = {**RECORD, "engine_name": "TensorFlow 2.15.1, no oneDNN"}
    failed = {**RECORD, "batch": 3, "error": "exited with -9", "step_s": None}
    one, other = read({"schema": 1, "kind": "step"}, RECORD, unknown, failed)
    unet = UNetConfig(filters=8, dtype="bfloat16", policy="speed")
    assert one.job == Job(unet, (64, 64, 64), 2, 2, "sgd", "itex", threads=7)
    assert (one.step_s, one.process_peak_bytes, one.allocator_peak_bytes) == (0.5, 1000, 500)
    assert (one.host, one.isa, one.date, one.held_out) == ("some CPU", ("avx",), "2026-11-20", False)
    assert other.failure == "exited with -9"
    assert compare([other], None) == []
    (stock,) = read({**RECORD, "engine_name": "TensorFlow 2.15.1, oneDNN"})
    assert stock.job.engine == "stock"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r":2 must be JSON of schema 1"),
        ("[]", r":2 must be JSON of schema 1"),
        ({**RECORD, "schema": 2}, r":2 must be JSON of schema 1 .*schema 2"),
        ({**RECORD, "step_s": 1, "unet": {"filters": -1}}, r":2 must be JSON"),
        ({name: value for name, value in RECORD.items() if name != "threads"}, r":2 must be .*threads"),
    ],
)
def test_a_damaged_or_foreign_record_is_refused_with_its_line(read, line, message):
    with pytest.raises(ValueError, match=message):
        read(RECORD, line)


def test_the_newest_of_several_measurements_counts_and_one_of_far_apart_steps_was_disturbed(read):
    lines = [steps(0.495, 0.54), {**RECORD, "batch": 3}, {**RECORD, "host": {"cpu": "another", "isa": []}}]
    assert not read(*lines)[0].disturbed  # less than a tenth
    first, second, third = read(*lines, steps(0.495, 0.56, process_peak_bytes=7))
    assert (first.process_peak_bytes, first.job.batch, first.disturbed) == (7, 2, True)
    assert (second.job.batch, third.host) == (3, "another")


def test_targets_are_judged_by_medians_worst_errors_and_bounds():
    rows = [row(step_s=1.0 + 0.01 * error, upper=int(10.4 * GIB)) for error in (3, 2)]
    rows.append(row(allocator=int(9.6 * GIB), process=int(10.5 * GIB) - 2**20, upper=10 * GIB - 1, step_s=0.7))
    found = {one.name: one.found for one in targets(rows)}
    assert found == {
        "allocator peak, median error": 0,
        "allocator peak, worst error": pytest.approx(0.04),
        "process peak, median error": 0,
        "process peak, worst error": pytest.approx(0.05, abs=1e-3),
        "peaks above their upper bound": 1,
        "upper bound above the peak, mean": pytest.approx(0.08 / 3),
        "seconds a step, median error": pytest.approx(0.03),
        "seconds a step, worst error": pytest.approx(0.3),
    }
    assert [one.name.partition(",")[0] for one in targets(rows) if not one.met] == [
        *("allocator peak", "peaks above their upper bound", "seconds a step")
    ]


def test_errors_are_those_of_the_steps_held_out():
    held_out = [row(process=int(share * GIB), step_s=1.1) for share in (10.1, 9.8, 9.7)]
    found = digest([*held_out, row(process=5 * GIB, side=64)], "r.jsonl")
    assert (found.record, found.configurations) == ("r.jsonl", 3)
    assert (found.process_peak.median, found.process_peak.worst) == (0.02, 0.03)
    assert (found.step_s.median, found.step_s.worst) == (0.1, 0.1)
    with pytest.raises(ValueError, match="must hold steps on volumes of at most 884736 voxels"):
        digest(held_out, "r.jsonl")


@pytest.mark.parametrize("errors", [(-0.031, 0.02), (0.05, 0.04), (-0.0001, 0), (-0.005,)])
def test_the_margin_covers_every_fitted_shape_with_the_reserve_to_spare(errors):
    rows = [row(process=int(10 * GIB * (1 + error)), side=96) for error in errors]
    found = digest([*rows, row()], "r")
    for one in rows:
        spared = found.upper_bound(one.process_peak_bytes) - one.measured.process_peak_bytes
        assert spared >= (RESERVE_SHARE - 1e-4) * one.process_peak_bytes
    assert found.margin_share <= max(0, -min(errors)) + RESERVE_SHARE + 0.0075


def test_the_digest_of_a_file_is_printed_and_a_missing_file_is_bad_input(tmp_path, capsys):
    path = tmp_path / "memory.jsonl"
    large = {**RECORD, "shape": [128, 128, 128], "process_peak_bytes": 2 * GIB}
    path.write_text("".join(json.dumps(one) + "\n" for one in ({**RECORD, "process_peak_bytes": GIB}, large)))
    assert main([str(path)]) == 0
    assert json.loads(capsys.readouterr().out)["configurations"] == 1
    assert main([str(tmp_path / "none")]) == main([]) == 2
