"""What trainings show of a host's speed: when it is kept, what replaces it, and what is predicted then."""

import dataclasses
import json

import pytest

from cpu3d.errors import InputError
from cpu3d.host.speed import Observer, keep_constants, keep_training
from memory_estimator.calibration import find_constants, host_file
from memory_estimator.estimate import estimate
from memory_estimator.host import read_host
from memory_estimator.job import Job
from models.config import UNetConfig

HOST = read_host()
JOB = Job(UNetConfig(depth=2, filters=8, dtype="float32"), (64, 64, 64), engine="stock", threads=2)
LARGE = dataclasses.replace(JOB, shape=(240, 240, 160))


def predicted_s(job=JOB):
    return estimate(job, find_constants(HOST)).step_s


def basis(job=JOB):
    return find_constants(HOST).for_threads(job.threads).basis(job.unet.dtype, HOST)


def test_all_predictions_are_scaled_to_what_a_training_took(tmp_path):
    in_bfloat16 = JOB.with_unet(dtype="bfloat16")
    jobs = [JOB, LARGE, in_bfloat16]
    before = [predicted_s(job) for job in jobs]
    assert "assumed from" in basis()
    keep_training(JOB, 3 * before[0], HOST, quiet=True)
    assert [predicted_s(job) for job in jobs] == pytest.approx([3 * seconds for seconds in before])
    assert basis().startswith("scaled by 3.00 to a training here on ")
    assert basis().endswith(", 64 x 64 x 64 in float32")
    keep_training(JOB, 1.5 * before[0], HOST, quiet=True)  # against what was predicted without any training
    assert predicted_s(LARGE) == pytest.approx(1.5 * before[1])
    assert basis(dataclasses.replace(JOB, threads=6)).endswith("from 2 threads to 6 by assumption")
    other = dataclasses.replace(HOST, cpu_model="Another CPU")
    assert find_constants(other).basis("float32", other).startswith("assumed from ")


@pytest.mark.parametrize(("measured", "scale"), [(100, 8), (1 / 100, 1 / 8)])
def test_a_scale_is_bounded(measured, scale):
    before = predicted_s(LARGE)
    keep_training(JOB, measured * predicted_s(), HOST, quiet=True)
    assert predicted_s(LARGE) == pytest.approx(scale * before)


@pytest.mark.parametrize(
    ("first", "then", "kept"),
    [
        ((2, True), (3, True), 3),  # the newer of two quiet ones
        ((2, True), (1.5, False), 2),
        ((2, False), (3, True), 3),
        ((2, False), (3, False), 2),  # the less disturbed one
        ((3, False), (2, False), 2),
    ],
)
def test_a_quiet_training_counts_before_a_disturbed_one(first, then, kept):
    alone_s = predicted_s()
    for scale, quiet in (first, then):
        keep_training(JOB, scale * alone_s, HOST, quiet=quiet)
    assert predicted_s() == pytest.approx(kept * alone_s)
    assert ("other programs kept its CPUs busy" in basis()) == (not any(quiet for _, quiet in (first, then)))


def test_a_calibration_replaces_trainings_and_the_next_one_is_scaled_from_it():
    alone_s = predicted_s()
    keep_training(JOB, 3 * alone_s, HOST, quiet=True)
    measured = dataclasses.replace(find_constants(HOST), name="mine", origin="measured")
    keep_constants(measured, HOST)
    assert basis().startswith("measured here on ")
    assert predicted_s() == pytest.approx(alone_s)
    keep_training(JOB, 2 * alone_s, HOST, quiet=True)
    assert basis().startswith("scaled by 2.00 ")
    assert predicted_s() == pytest.approx(2 * alone_s)


def test_what_a_newer_version_has_kept_stays_and_what_is_damaged_is_replaced(capsys):
    path = keep_training(JOB, predicted_s(), HOST, quiet=True)
    newer = json.dumps({"schema": 99, "more": 1})
    path.write_text(newer)
    (note,) = find_constants(HOST).caveats("float32")
    assert "got schema 99" in note
    with pytest.raises(InputError, match="must be of schema 3, got 99"):
        keep_training(JOB, 1.0, HOST, quiet=True)
    assert path.read_text() == newer
    path.write_text('{"schema"')
    keep_training(JOB, 2 * predicted_s(), HOST, quiet=True)
    assert basis().startswith("scaled by 2.00")


def observed(job, steps_s, warm_up=1):
    observer = Observer(job, HOST, warm_up=warm_up)
    assert [observer.note(seconds) for seconds in steps_s] == list(range(1, len(steps_s) + 1))
    observer.record()
    return host_file(HOST).exists()


def test_a_training_is_kept_by_its_median_step_after_the_first():
    alone_s = predicted_s()
    assert observed(JOB, [90 * alone_s, 1.2 * alone_s, alone_s, 7 * alone_s])
    assert predicted_s() == pytest.approx(1.2 * alone_s)


def test_few_steps_and_small_grids_say_nothing_of_the_host():
    before = predicted_s(LARGE)
    assert not observed(dataclasses.replace(JOB, shape=(32, 32, 32)), [1.0] * 12)
    assert not observed(JOB, [1.0] * 3)  # one of them compiles
    assert predicted_s(LARGE) == before


def test_a_failure_to_keep_it_is_a_warning(monkeypatch, tmp_path, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    observer = Observer(JOB, HOST)
    for _ in range(3):
        observer.note(1.0)
    observer.record()
    assert "not kept for the estimator: " in capsys.readouterr().err
