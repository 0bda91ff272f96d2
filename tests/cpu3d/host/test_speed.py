"""A host's speed by its trainings: when it is kept, when it is replaced, and the predictions from
it."""

import dataclasses

import numpy as np
import pytest

from cpu3d.host.speed import Observer, computes_as_predicted, keep_training
from cpu3d.util.atomic import write_json
from cpu3d.util.lock import locked
from memory_estimator.calibration import find_constants, host_file
from memory_estimator.common.files import read_json
from memory_estimator.estimate import estimate
from memory_estimator.host import read_host
from memory_estimator.job import Job
from models.config import UNetConfig
from tests.cpu3d.host.hosts import BFLOAT16

HOST = dataclasses.replace(read_host(), isa=BFLOAT16, is_here=False)
JOB = Job(UNetConfig(depth=2, filters=8, dtype="float32"), (64, 64, 64), engine="stock", threads=2)
LARGE = dataclasses.replace(JOB, shape=(240, 240, 160))


def predicted_s(job=JOB):
    return estimate(job, find_constants(HOST)).step_s


def basis(job=JOB):
    return find_constants(HOST).basis(job, HOST)


def test_all_predictions_are_scaled_to_what_a_training_took():
    in_bfloat16 = JOB.with_unet(dtype="bfloat16")
    jobs = [JOB, LARGE, in_bfloat16]
    before = np.array([predicted_s(job) for job in jobs])
    keep_training(JOB, 3 * before[0], HOST)
    assert [predicted_s(job) for job in jobs] == pytest.approx(3 * before)
    assert "64 x 64 x 64 in float32; other programs may" in basis()
    # against what was predicted without any training
    keep_training(JOB, 1.5 * before[0], HOST)
    # which has a scale of its own from now on
    keep_training(in_bfloat16, 2 * before[2], HOST)
    assert [predicted_s(job) for job in jobs] == pytest.approx([1.5, 1.5, 2] * before)
    assert basis(dataclasses.replace(JOB, threads=6)).endswith("from 2 threads to 6 by assumption")


def test_the_fastest_training_counts_within_limits():
    alone_s = predicted_s()
    for scale, kept in ((20, 8), (2, 2), (3, 2), (0.01, 1 / 8)):
        keep_training(JOB, scale * alone_s, HOST)
        assert predicted_s() == pytest.approx(kept * alone_s)


@pytest.mark.parametrize("name", ["schema", "shipped"])
def test_what_is_of_another_version_or_of_other_constants_is_not_used_and_replaced(name):
    before = predicted_s()
    keep_training(JOB, 3 * before, HOST)
    path = host_file(HOST)
    write_json(path, {**read_json(path), name: "another"})
    assert predicted_s() == before
    keep_training(JOB, 2 * before, HOST)
    assert basis().startswith("scaled by 2.00")


def observed(job, steps_s):
    observer = Observer(job, HOST, warm_up=1)
    for seconds in steps_s:
        observer.note(seconds)
    observer.record()
    return host_file(HOST).exists()


def test_a_training_is_kept_by_its_median_step_after_the_first():
    alone_s = predicted_s()
    assert observed(JOB, [90 * alone_s, 1.2 * alone_s, alone_s, 7 * alone_s])
    assert predicted_s() == pytest.approx(1.2 * alone_s)


def test_few_steps_and_small_grids_say_nothing_of_the_host():
    assert not observed(dataclasses.replace(JOB, shape=(64, 64, 62)), [1.0] * 12)
    assert not observed(JOB, [1.0] * 3)  # one of them compiles


def test_a_failure_to_keep_it_as_another_process_writes_is_a_warning(capsys):
    folder = host_file(HOST).parent
    folder.mkdir(parents=True)
    with locked(folder, "folder"):
        assert not observed(JOB, [1.0] * 4)
    assert "not kept for the estimator: folder " in capsys.readouterr().err


def test_seconds_are_kept_of_the_best_native_operations_alone(monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setenv("CPU3D_INSTRUCTION_SET", "avx2")
        assert not computes_as_predicted()
    monkeypatch.setattr("models.native.build.BUILT", tmp_path)
    assert not computes_as_predicted()  # none is there
