"""Errors of predictions, worked out by hand, and the margin that is made of them."""

import json
import math
from types import SimpleNamespace

import pytest

from cpu3d.__main__ import main
from cpu3d.bench.validate import (
    LEAST_RECORDS,
    Measured,
    compare,
    covers,
    digest,
    left_out_in_turn,
    margin_share,
    read_measured,
    spread,
    targets,
)
from cpu3d.errors import InputError
from memory_estimator.estimate import Accuracy, load_accuracy
from memory_estimator.job import Job
from memory_estimator.step.onednn import Kernels
from models.config import UNetConfig

GIB = 2**30
PEAKS = ("process_peak_bytes", "allocator_peak_bytes")


def row(
    allocator=10 * GIB, process=10 * GIB, upper=11 * GIB, step_s=1.0, side=128, measured=10 * GIB, took_s=1.0, **about
):
    job = Job(shape=(side,) * 3, threads=about.pop("threads", 1))
    one = Measured(job, step_s=took_s, **dict.fromkeys(PEAKS, measured), **about)
    made = {**dict(zip(PEAKS, (process, allocator))), "upper_bound_bytes": upper, "step_s": step_s}
    made.update(kind=True, constants=SimpleNamespace(kernels=Kernels()))
    (only,) = compare([one], lambda one: SimpleNamespace(**made))
    return only


def test_errors_are_signed_shares_of_what_was_measured():
    off = row(allocator=9 * GIB, process=11 * GIB, upper=12 * GIB, step_s=1.5)
    assert tuple(off.errors.values()) == pytest.approx((-0.1, 0.1, 0.2, 0.5))
    assert off.misses == ("allocator peak", "process peak", "seconds a step")
    assert row().misses == ()
    both = spread([0.1, -0.3, None, 0.2])
    assert both == (3, pytest.approx(0.2), -0.3, pytest.approx(0.0))  # the median of sizes, the worst with its sign
    assert math.isnan(spread([]).median)


RECORD = {
    "schema": 2, "kind": "memory", "date": "2026-11-20", "shape": [64, 64, 64], "batch": 2,
    "micro_batch": 2,
    "unet": {"filters": 8, "dtype": "bfloat16", "policy": "speed"}, "optimizer": "sgd", "engine": "auto",
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
    failed = {**RECORD, "batch": 4, "error": "exited with -9", "step_s": None}
    one, other = read({"schema": 2, "kind": "step"}, RECORD, unknown, failed)
    unet = UNetConfig(filters=8, dtype="bfloat16", policy="speed")
    assert one.job == Job(unet, (64, 64, 64), 2, 2, "sgd", "itex", threads=7)
    assert (one.step_s, one.process_peak_bytes, one.allocator_peak_bytes) == (0.5, 1000, 500)
    assert (one.host, one.isa, one.date, one.held_out) == ("some CPU", ("avx",), "2026-11-20", False)
    assert other.failure == "exited with -9"
    assert compare([other], None) == []
    (stock,) = read({**RECORD, "engine_name": "TensorFlow 2.15.1, oneDNN", "versions": {"tensorflow": "2.15.1"}})
    assert (stock.job.engine, stock.version) == ("stock", "TensorFlow 2.15.1")
    (untimed,) = read({name: value for name, value in RECORD.items() if name != "step_s"})
    assert math.isnan(untimed.step_s)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r":2 must be JSON of schema 2"),
        ("[]", r":2 must be JSON of schema 2"),
        ({**RECORD, "schema": 1}, r":2 must be JSON of schema 2 .*schema 1"),
        ({**RECORD, "unet": {"policy": "leanest"}}, r":2 must be JSON of schema 2 .*leanest"),
        ({**RECORD, "step_s": 1, "unet": {"filters": -1}}, r":2 must be JSON"),
        ({name: value for name, value in RECORD.items() if name != "threads"}, r":2 must be .*threads"),
    ],
)
def test_a_damaged_or_foreign_record_is_refused_with_its_line(read, line, message):
    with pytest.raises(InputError, match=message):
        read(RECORD, line)


def test_the_newest_of_several_measurements_counts_and_one_of_far_apart_steps_was_disturbed(read):
    lines = [steps(0.495, 0.54), {**RECORD, "batch": 4}, {**RECORD, "host": {"cpu": "another", "isa": []}}]
    assert not read(*lines)[0].disturbed  # less than a tenth
    first, second, third = read(*lines, steps(0.495, 0.56, process_peak_bytes=7))
    assert (first.process_peak_bytes, first.job.batch, first.disturbed) == (7, 2, True)
    assert (second.job.batch, third.host) == (4, "another")


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
        *("allocator peak", "seconds a step", "peaks above their upper bound")
    ]
    assert row(took_s=math.nan).errors["seconds a step"] is None
    assert all(one.met for one in targets([row(took_s=math.nan, upper=10.5 * GIB)]))


def rows_of(errors, **about):
    """Steps whose peak is off by these shares."""
    return [row(process=int(10 * GIB * (1 + error)), **about) for error in errors]


ERRORS = (-0.031, 0.02, 0.01, 0.0, -0.01, 0.003, -0.002, 0.015, -0.004)


@pytest.mark.parametrize("errors", [ERRORS, (0.05, 0.04) * 6, (-0.0001, 0) * 5, (-0.005,) * 9])
def test_a_margin_lies_above_every_record_and_by_their_spread_above_the_next(errors):
    rows = rows_of(errors)
    share = margin_share(rows)
    assert share >= max(0, 1 / (1 + min(errors)) - 1)
    assert margin_share(rows_of([3 * error for error in errors])) >= share
    assert margin_share(rows_of([*errors, -0.1])) > 0.1


def test_errors_and_margins_are_those_of_a_kind_and_few_records_are_none():
    rows = [*rows_of(ERRORS, version="1"), *rows_of((0.0,) * 9, version="2", host="b", threads=4)]
    few = rows_of((0.3,) * (LEAST_RECORDS - 1), version="3")
    first, second = digest([*rows, *few]).kinds
    assert (first.version, first.records, first.held_out, first.threads) == ("1", 9, 9, (1,))
    assert (first.process_peak.median, first.process_peak.worst) == (0.01, 0.031)
    assert (second.hosts, second.threads, second.process_peak.worst) == (("b",), (4,), 0.0)
    assert first.margin_share > second.margin_share == 0
    assert not covers(few)
    assert left_out_in_turn([*rows, *few]) == (1, 18)  # the first of ERRORS
    assert left_out_in_turn(rows_of((*(0.0,) * 9, -0.2))) == (1, 10)


def test_the_errors_are_of_steps_that_no_constant_was_fitted_to():
    (kind,) = digest([*rows_of((0.01,) * 9), *rows_of((0.2,), side=64)]).kinds
    assert (kind.records, kind.held_out, kind.process_peak.worst) == (10, 9, 0.01)
    assert digest(rows_of((0.0,) * 9, side=64)) == Accuracy(())


def test_the_accuracy_of_a_folder_of_records_is_written_and_a_missing_folder_is_bad_input(tmp_path):
    large, folder = {**RECORD, "shape": [128, 128, 128], "batch": 1, "micro_batch": 1}, tmp_path / "memory"
    folder.mkdir()
    for name, cpu in (("one", "some CPU"), ("other", "another")):
        lines = [{**large, "host": {**RECORD["host"], "cpu": cpu}, "unet": {"filters": n}} for n in range(8, 12)]
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in lines))
    out = tmp_path / "accuracy.json"
    assert main(["bench", "tables", "--records", str(tmp_path), "--accuracy", str(out)]) == 0
    (kind,) = load_accuracy(out).kinds
    assert (kind.records, kind.hosts, kind.threads) == (8, ("another", "some CPU"), (7,))
    assert main(["bench", "tables", "--records", str(tmp_path / "none"), "--accuracy", str(out)]) == 2
