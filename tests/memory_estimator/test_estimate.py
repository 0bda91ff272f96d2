"""What an estimate is made of, and how it moves with the job. How far it is off is told by the records."""

import dataclasses

import pytest

from memory_estimator import estimate as estimate_module
from memory_estimator.accuracy import FAMILIES, load_accuracy
from memory_estimator.calibration import shipped_constants
from memory_estimator.estimate import estimate, live_at_peak
from memory_estimator.job import RECIPES, Job
from memory_estimator.step.onednn import Kernels
from memory_estimator.step.program import Tensor, Timeline
from memory_estimator.step.timing import op_seconds
from memory_estimator.step.training_step import training_step
from models.config import POLICIES, UNetConfig

SMALL = Job(UNetConfig(filters=8, depth=4, dtype="bfloat16", policy="speed"), (96, 96, 96), threads=2)
CONSTANTS = shipped_constants(Kernels())


def of(job=SMALL, **changes):
    return estimate(dataclasses.replace(job, **changes), CONSTANTS)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("changes", "unet"),
    [
        ({}, {"norm": "batch", "up": "upsampling"}),
        ({}, {"norm": "none", "residual": True, "dtype": "float32"}),
        ({"engine": "stock", "batch": 3, "optimizer": "sgd"}, {"network": "cicek2016"}),
        ({"averaged": True, "from_store": True, "cases": 10}, {"deep_supervision": True}),
    ],
)
def test_the_bill_adds_up_to_the_process_s_peak_whatever_the_job(changes, unet, policy):
    found = of(SMALL.with_unet(policy=policy, **unet), **changes)
    assert sum(line.bytes for line in found.components) == found.process_peak_bytes
    assert all(line.bytes > 0 and line.source for line in found.components)
    assert len({line.name for line in found.components}) == len(found.components)
    assert found.allocator_peak_bytes < found.process_peak_bytes < found.upper_bound_bytes
    assert found.step_s > 0


def test_a_store_adds_the_next_batch_and_to_the_bound_what_a_run_holds_beside_its_steps():
    fed, from_store = of(), of(from_store=True)
    held = {line.name: line.bytes for line in from_store.components}
    assert held["input pipeline, next batch"] == 96**3 * (4 * 2 + 3)
    assert fed.upper_bound_bytes == fed.kind.upper_bound(fed.process_peak_bytes)
    beside = {line.name: line.bytes for line in from_store.beside}
    validation = beside.pop("validation", 0)
    counted = from_store.kind.upper_bound(from_store.process_peak_bytes + validation) + sum(beside.values())
    assert from_store.upper_bound_bytes == counted
    assert beside["a volume in preparation"] == 96**3 * (4 * 2 * 2 + 4 + 3)
    assert beside["a case's files"] == 96**3 * (4 * 2 + 1)
    assert of(from_store=True, case_bytes=10**9).upper_bound_bytes - counted == 10**9 - beside["a case's files"]
    # To be rotated it is whole in float32, a few times over.
    rotated = of(from_store=True, resampled=True).upper_bound_bytes
    assert rotated - from_store.upper_bound_bytes == 96**3 * 4 * (13 - 2 * 2)
    # Several volumes lie side by side before they are copied into one batch.
    both, one = (of(from_store=True, batch=batch, micro_batch=batch).beside for batch in (2, 1))
    prepared = [line.bytes for bill in (both, one) for line in bill if line.name == "a volume in preparation"]
    assert prepared[0] - prepared[1] == 2 * 96**3 * (4 * 2 + 3)


SHIPPED_KIND = {"engine": "itex", "dtype": "bfloat16", "family": "avx512_core_bf16"}


@pytest.mark.parametrize(
    ("changes", "versions", "what"),
    [
        ({"threads": 56}, {}, "56 threads"),
        ({}, {"itex": "TensorFlow 9, ITEX 9"}, "TensorFlow 9, ITEX 9"),
        ({"isa": "avx2", "dtype": "float32"}, {}, "avx2"),
    ],
)
@pytest.mark.parametrize("policy", POLICIES)
def test_where_nothing_like_it_was_measured_the_bound_covers_every_family_of_kernels(changes, versions, what, policy):
    isa, accuracy = changes.get("isa", CONSTANTS.kernels.isa), load_accuracy(versions=versions)
    threads = changes.get("threads", SMALL.threads)
    job = dataclasses.replace(SMALL.with_unet(policy=policy, dtype=changes.get("dtype", "bfloat16")), threads=threads)
    found = estimate(job, kernels(isa), accuracy)
    assert found.kind is None
    assert what in found.uncovered
    assert found.to_json()["errors"]["records"] is None
    for family in FAMILIES[job.unet.dtype]:
        peak = estimate(job, kernels(family), accuracy).process_peak_bytes
        assert found.upper_bound_bytes >= max(kind.upper_bound(peak) for kind in accuracy.kinds)


def test_bfloat16_is_refused_where_no_kernel_computes_it_and_a_float32_bound_is_wider_without_avx2():
    with pytest.raises(ValueError, match=r"dtype must be float32 .* got bfloat16"):
        estimate(SMALL, kernels("avx2"))
    job = SMALL.with_unet(dtype="float32")
    assert estimate(job, kernels("sse41")).upper_bound_bytes > 3 * estimate(job, kernels("avx2")).process_peak_bytes


def test_with_many_threads_all_that_the_allocator_hands_out_counts():
    job = dataclasses.replace(SMALL.with_unet(filters=16, depth=4), shape=(64, 64, 64), threads=56)
    found = estimate(job, kernels("avx512_core_amx"))
    assert found.upper_bound_bytes >= found.allocator_peak_bytes + CONSTANTS.baseline_bytes["itex"]


def kernels(isa):
    return dataclasses.replace(CONSTANTS, kernels=dataclasses.replace(CONSTANTS.kernels, isa=isa))


def test_a_job_like_those_recorded_has_their_errors_whatever_its_size_and_says_of_which():
    accuracy = load_accuracy()
    for job in (SMALL, dataclasses.replace(SMALL, shape=(240, 240, 160), batch=3)):
        found = estimate(job, CONSTANTS, accuracy)
        assert {name: getattr(found.kind, name) for name in SHIPPED_KIND} == SHIPPED_KIND
        assert found.upper_bound_bytes == found.kind.upper_bound(found.process_peak_bytes)
        errors = found.to_json()["errors"]
        assert errors["process_peak"].startswith("± ")
        assert errors["records"]["hosts"]


def test_a_step_is_its_micro_batches_and_one_update():
    two, three, four = (of(batch=batch, cases=8) for batch in (2, 3, 4))
    part_s = three.step_s - two.step_s
    assert four.step_s - three.step_s == pytest.approx(part_s)
    job = dataclasses.replace(SMALL, batch=2)
    program = training_step(job)
    begin = next(index for index, op in enumerate(program.ops) if op.name.endswith("/change"))  # the first momentum's
    update_s = sum(list(op_seconds(program, CONSTANTS, job))[begin:])
    assert 0 < update_s < part_s
    assert two.step_s == pytest.approx(2 * part_s + update_s)
    assert four.volume_s == pytest.approx(four.step_s / 4)
    assert four.epoch_s == pytest.approx(2 * four.step_s)


def test_a_host_whose_regions_do_not_hold_the_job_would_have_to_be_larger(monkeypatch):
    job = dataclasses.replace(RECIPES["brats-regions"].job.with_unet(policy="speed"), threads=2)
    fits = estimate(job, CONSTANTS)
    host_bytes = fits.upper_bound_bytes
    assert estimate(job, CONSTANTS, host_bytes=host_bytes) == fits  # the last region is cut down, and suffices
    monkeypatch.setattr(estimate_module, "fits_regions", lambda program, limit: False)
    short = estimate(job, CONSTANTS, host_bytes=host_bytes)
    assert short.regions_short
    assert short.upper_bound_bytes > host_bytes
    assert short.process_peak_bytes == fits.process_peak_bytes
    # Nothing is asked where all regions fit, nor where the job is too large anyway.
    assert not estimate(job, CONSTANTS, host_bytes=short.upper_bound_bytes).regions_short
    assert not estimate(job, CONSTANTS, host_bytes=host_bytes - 1).regions_short


def held(*tensors):
    return live_at_peak(Timeline((0,), "op", tuple(Tensor(*each) for each in tensors)))


def test_tensors_are_added_up_by_cause_in_the_order_of_a_bill():
    bill = held(
        ("encoder0_conv1", 4096, "activations, level 0"),
        ("decoder0_act2/gradient", 2048, "transients"),
        ("encoder1_conv1", 1000, "activations, level 1"),
        ("kernel/m", 700, "optimizer slots"),
        ("kernel/v", 700, "optimizer slots"),
        ("kernel", 512, "weights"),
    )
    assert [(line.name, line.bytes) for line in bill] == [
        ("weights", 512),
        ("optimizer slots", 2 * 768),  # rounded up to 256 each, as the allocator does
        ("activations, level 0", 4096),
        ("activations, level 1", 1024),
        ("transients", 2048),
    ]
    assert "decoder0_act2/gradient" in bill[-1].source
    with pytest.raises(ValueError, match=r"group must be one of weights, .*got 'weights, of another kind'; declare it"):
        held(("surprise", 256, "weights, of another kind"))


@pytest.mark.parametrize(
    ("job", "measured_mib"),  # of the process, records/memory/epyc-avx512-bf16.jsonl
    [
        (Job(UNetConfig(policy="lean"), (16, 16, 16), batch=16, micro_batch=16, optimizer="adam", threads=2), 1766),
        (Job(UNetConfig(policy="speed", filters=48), (48, 48, 48), engine="stock", threads=2), 1719),
        (Job(UNetConfig(policy="balanced", filters=48), (48, 48, 48), threads=2), 2076),
    ],
    ids=["many volumes at once in slabs", "a wide network, stock", "a wide network"],
)
def test_the_bound_holds_for_many_volumes_at_once_and_for_wide_networks(job, measured_mib):
    bill = estimate(job, CONSTANTS, load_accuracy())
    assert measured_mib < bill.upper_bound_bytes / 2**20 < 1.15 * measured_mib
