"""What an estimate is made of, and how it moves with the job. How far it is off is told by the records."""

import dataclasses
import json

import pytest

from memory_estimator import estimate as estimate_module
from memory_estimator.accuracy import Accuracy, Bound
from memory_estimator.calibration import shipped_constants
from memory_estimator.estimate import estimate
from memory_estimator.job import Job
from memory_estimator.planner import with_policy
from memory_estimator.recipes import JOBS
from memory_estimator.timing import step_seconds
from memory_estimator.training_step import training_step
from models.config import POLICIES, UNetConfig

SMALL = Job(UNetConfig(filters=8, depth=4, dtype="bfloat16", policy="speed"), (96, 96, 96), threads=2)
CONSTANTS = shipped_constants(("avx512_bf16",))


def of(job=SMALL, **changes):
    return estimate(dataclasses.replace(job, **changes), CONSTANTS)


def with_unet(**changes):
    return dataclasses.replace(SMALL, unet=dataclasses.replace(SMALL.unet, **changes))


@pytest.mark.parametrize(
    "job",
    [
        SMALL,
        *(with_unet(**changes) for changes in ({"norm": "batch"}, {"norm": "none"}, {"residual": True})),
        *(with_unet(**changes) for changes in ({"up": "upsampling"}, {"deep_supervision": True}, {"dtype": "float32"})),
        with_unet(network="cicek2016"),
        *(with_unet(policy=policy) for policy in POLICIES[1:]),
        dataclasses.replace(SMALL, engine="stock", batch=3, optimizer="sgd"),
        dataclasses.replace(SMALL, averaged=True, from_store=True, cases=10),
    ],
)
def test_the_bill_adds_up_to_the_process_s_peak_whatever_the_job(job):
    found = of(job)
    assert sum(line.bytes for line in found.components) == found.process_peak_bytes
    assert all(line.bytes > 0 and line.source for line in found.components)
    assert len({line.name for line in found.components}) == len(found.components)
    assert found.allocator_peak_bytes < found.process_peak_bytes < found.upper_bound_bytes
    assert found.step_s > 0


def test_more_of_anything_takes_more_memory_and_more_time():
    full = with_unet(filters=16)  # fewer bfloat16 channels do not fill a vector, and take longer than 16
    here = of(full)
    for more in (of(full, batch=4, micro_batch=4), of(full, shape=(128, 128, 128)), of(with_unet(filters=32))):
        assert more.allocator_peak_bytes > 1.5 * here.allocator_peak_bytes
        assert more.process_peak_bytes > here.process_peak_bytes
        assert more.step_s > here.step_s


def test_averaged_weights_are_one_copy_more():
    weights = {line.name: line.bytes for line in of(averaged=True).components}
    assert weights["averaged weights"] == pytest.approx(weights["optimizer slots"] / 2, rel=0.01)


def test_a_store_adds_the_next_batch_and_to_the_bound_a_volume_in_preparation(monkeypatch):
    monkeypatch.setattr(estimate_module, "validation_pass", lambda job: ())
    fed, from_store = of(), of(from_store=True)
    held = {line.name: line.bytes for line in from_store.components}
    assert held["input pipeline, next batch"] == 96**3 * (4 * 2 + 3)
    prepared = 96**3 * (4 * 2 * 2 + 4 + 3)
    assert fed.upper_bound_bytes == fed.accuracy.upper_bound(fed.process_peak_bytes)
    around = int(0.1 * from_store.process_peak_bytes)
    assert from_store.upper_bound_bytes - prepared - around == fed.accuracy.upper_bound(from_store.process_peak_bytes)
    # To be rotated it is whole in float32, a few times over.
    rotated = of(from_store=True, resampled=True).upper_bound_bytes
    assert rotated - from_store.upper_bound_bytes == 96**3 * 4 * (13 - 2 * 2)
    # Several volumes lie side by side before they are copied into one batch.
    both, one = (of(from_store=True, batch=batch, micro_batch=batch) for batch in (2, 1))
    bound = lambda peak: of().accuracy.upper_bound(peak) + int(0.1 * peak)
    beyond = lambda found: found.upper_bound_bytes - bound(found.process_peak_bytes)
    assert beyond(both) - beyond(one) == 2 * 96**3 * (4 * 2 + 3)


def test_the_bound_holds_the_step_that_follows_a_validation_and_the_weights_that_one_has_kept():
    wide = dataclasses.replace(with_unet(filters=64, dtype="float32"), shape=(16, 16, 16))
    found, alone = of(wide, from_store=True), of(wide)
    assert found.process_peak_bytes - alone.process_peak_bytes < 2**20, "the next batch of small volumes"
    kept = {line.name: line.bytes for line in found.components}["weights, reordered"]
    beyond = found.upper_bound_bytes - found.accuracy.upper_bound(found.process_peak_bytes)
    assert beyond > int(0.1 * found.process_peak_bytes) + 0.4 * kept  # those of the forward pass


def test_an_epoch_is_whole_batches_and_unknown_without_cases():
    found = of(batch=4, cases=11)
    assert found.epoch_s == pytest.approx(2 * found.step_s)
    assert found.volume_s == pytest.approx(found.step_s / 4)
    assert of().epoch_s is None


def test_a_step_is_its_micro_batches_and_one_update():
    two, three, four = (of(batch=batch, cases=8) for batch in (2, 3, 4))
    part_s = three.step_s - two.step_s
    assert four.step_s - three.step_s == pytest.approx(part_s)
    job = dataclasses.replace(SMALL, batch=2)
    program = training_step(job)
    timed = zip(program.ops, step_seconds(program, CONSTANTS, job).op_s)
    update_s = sum(seconds for op, seconds in timed if op.name.endswith(("/square", "/update")))
    assert 0 < update_s < part_s
    assert two.step_s == pytest.approx(2 * part_s + update_s)
    assert four.volume_s == pytest.approx(four.step_s / 4)
    assert four.epoch_s == pytest.approx(2 * four.step_s)


def test_a_store_holds_one_micro_batch_ready_whatever_the_batch(monkeypatch):
    one_part = training_step(SMALL)
    monkeypatch.setattr(estimate_module, "training_step", lambda job: one_part)
    one, four = of(from_store=True), of(from_store=True, batch=4)
    assert four.upper_bound_bytes == one.upper_bound_bytes
    held = {line.name: line.bytes for line in of(from_store=True, batch=4, micro_batch=2).components}
    assert held["input pipeline, next batch"] == 2 * 96**3 * (4 * 2 + 3)


def test_the_largest_tensors_come_first_and_are_live_at_the_peak():
    found = of()
    sizes = [tensor.bytes for tensor in found.largest]
    assert len(sizes) == 5
    assert sizes == sorted(sizes, reverse=True)
    assert sum(tensor.bytes for tensor in found.timeline.peak_tensors) <= found.allocator_peak_bytes


def test_a_hundred_terabytes_are_counted_exactly():
    paper = with_policy(JOBS["paper-2020"], "speed")
    job = dataclasses.replace(paper, shape=(1024, 1024, 1024), batch=64, micro_batch=64, threads=80)
    found = of(job)
    assert found.process_peak_bytes > 100 * 10**12
    # In a job this large nothing but the maps counts: twice the volumes are twice the bytes.
    twice = of(job, batch=128, micro_batch=128)
    assert twice.allocator_peak_bytes == pytest.approx(2 * found.allocator_peak_bytes, rel=0.15)


def test_the_json_is_plain_and_has_what_was_promised():
    content = json.loads(json.dumps(of(cases=3).to_json(), allow_nan=False))
    for key in ("allocator_peak_bytes", "process_peak_bytes", "upper_bound_bytes", "step_s"):
        assert content[key] > 0
    assert set(content["components"][0]) == {"name", "bytes", "source"}
    errors = content["errors"]
    for name in ("allocator_peak_bytes", "process_peak_bytes", "step_s", "volume_s", "epoch_s"):
        assert 0 <= errors[name]["median"] <= errors[name]["worst"]
    assert set(errors["upper_bound_bytes"]) == {"margin_share", "margin_bytes", "exceeded", "mean_slack"}
    assert content["constants"]["name"] == CONSTANTS.name
    assert (content["job"]["policy"], content["job"]["micro_batch"]) == ("speed", 1)


def test_what_was_not_measured_is_not_called_measured():
    nobody = Accuracy("none", 0, Bound(0.01, 0.03), Bound(0.02, 0.05), Bound(0.08, 0.2), 0.03, 50_000_000)
    assert estimate(SMALL, CONSTANTS, nobody).to_json()["errors"]["measured"] is False


def test_a_host_whose_regions_do_not_hold_the_job_would_have_to_be_larger(monkeypatch):
    job = dataclasses.replace(with_policy(JOBS["brats-regions"], "speed"), threads=2)
    fits = estimate(job, CONSTANTS)
    host_bytes = fits.upper_bound_bytes
    assert estimate(job, CONSTANTS, host_bytes=host_bytes) == fits  # the last region is cut down, and suffices
    asked = []
    monkeypatch.setattr(estimate_module, "fits_regions", lambda program, limit: asked.append(limit))
    short = estimate(job, CONSTANTS, host_bytes=host_bytes)
    assert short.regions_short
    assert short.upper_bound_bytes > host_bytes
    assert short.process_peak_bytes == fits.process_peak_bytes
    # Nothing is asked where all regions fit, nor where the job is too large anyway.
    assert not estimate(job, CONSTANTS, host_bytes=short.upper_bound_bytes).regions_short
    assert not estimate(job, CONSTANTS, host_bytes=host_bytes - 1).regions_short
    assert asked == [host_bytes]
