"""Records of measured steps: how they are read."""

import json
import math

import pytest

from cpu3d.__main__ import main
from cpu3d.bench.estimator_errors import read_measured
from cpu3d.errors import InputError
from memory_estimator.accuracy import load_accuracy
from memory_estimator.job import Job
from models.config import UNetConfig

RECORD = {
    "schema": 1,
    "kind": "memory",
    "date": "2026-11-20",
    "shape": [64, 64, 64],
    "batch": 2,
    "micro_batch": 2,
    "unet": {"filters": 8, "dtype": "bfloat16", "policy": "speed"},
    "optimizer": "sgd",
    "engine": "auto",
    "engine_name": "TensorFlow 2.15.1, oneDNN, ITEX 2.15.0.0",
    "threads": {"TF_NUM_INTRAOP_THREADS": "7"},
    "host": {"cpu": "some CPU", "isa": ["avx"]},
    "step_s": 0.5,
    "process_peak_bytes": 1000,
    "allocator_peak_bytes": 500,
}


@pytest.fixture
def read(tmp_path):
    def measured(*records):
        path = tmp_path / "memory.jsonl"
        path.write_text(
            "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in records)
        )
        return read_measured(path)

    return measured


def test_a_record_is_read_as_the_job_that_really_ran(read):
    unknown = {**RECORD, "engine_name": "TensorFlow 2.15.1, no oneDNN"}
    failed = {**RECORD, "batch": 4, "error": "exited with -9", "step_s": None}
    first, second = read({"schema": 1, "kind": "step"}, RECORD, unknown, failed)
    unet = UNetConfig(filters=8, dtype="bfloat16", policy="speed")
    assert first.job == Job(unet, (64, 64, 64), 2, 2, "sgd", "itex", threads=7)
    assert (first.step_s, first.process_peak_bytes, first.allocator_peak_bytes) == (0.5, 1000, 500)
    assert (first.host, first.isa, first.date, first.held_out) == (
        "some CPU",
        ("avx",),
        "2026-11-20",
        False,
    )
    assert second.failure == "exited with -9"
    (stock,) = read(
        {**RECORD, "engine_name": "TensorFlow 2.15.1, oneDNN", "versions": {"tensorflow": "2.15.1"}}
    )
    assert (stock.job.engine, stock.version) == ("stock", "TensorFlow 2.15.1")
    (untimed,) = read({name: value for name, value in RECORD.items() if name != "step_s"})
    assert math.isnan(untimed.step_s)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r":2 must be JSON of schema 1"),
        ({**RECORD, "unet": {"policy": "leanest"}}, r":2 must be JSON of schema 1 .*leanest"),
        (
            {name: value for name, value in RECORD.items() if name != "threads"},
            r":2 must be .*threads",
        ),
    ],
)
def test_a_damaged_or_foreign_record_is_refused_with_its_line(read, line, message):
    with pytest.raises(InputError, match=message):
        read(RECORD, line)


def test_of_one_job_on_one_host_the_newest_measurement_counts(read):
    lines = [RECORD, {**RECORD, "batch": 4}, {**RECORD, "host": {"cpu": "another", "isa": []}}]
    first, second, third = read(*lines, {**RECORD, "process_peak_bytes": 7})
    assert (first.process_peak_bytes, first.job.batch) == (7, 2)
    assert (second.job.batch, third.host) == (4, "another")


def test_the_accuracy_of_a_folder_of_records_is_written_and_a_missing_folder_is_bad_input(tmp_path):
    large, folder = (
        {**RECORD, "shape": [128, 128, 128], "batch": 1, "micro_batch": 1},
        tmp_path / "memory",
    )
    folder.mkdir()
    for name, cpu in (("one", "some CPU"), ("other", "another")):
        lines = [
            {**large, "host": {**RECORD["host"], "cpu": cpu}, "unet": {"filters": n}}
            for n in range(8, 12)
        ]
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    out = tmp_path / "accuracy.json"
    assert main(["bench", "tables", "--records", str(tmp_path), "--accuracy", str(out)]) == 0
    (kind,) = load_accuracy(out).kinds
    assert (kind.records, kind.hosts, kind.threads) == (8, ("another", "some CPU"), (7,))
    assert (
        main(["bench", "tables", "--records", str(tmp_path / "none"), "--accuracy", str(out)]) == 2
    )
