"""An estimate's parts, and its changes with the job. The records show its errors."""

import dataclasses

import pytest

from memory_estimator.accuracy import Accuracy, Bound, Kind
from memory_estimator.calibration import shipped_constants
from memory_estimator.estimate import estimate, live_at_peak
from memory_estimator.job import Job
from memory_estimator.step.timeline import Group, Tensor, Timeline
from memory_estimator.training import ExtraMemory, run_estimate
from models.config import POLICIES, UNetConfig

SMALL = Job(UNetConfig(filters=8, depth=4, dtype="bfloat16"), (96, 96, 96), threads=2)
CONSTANTS = shipped_constants("avx512_bf16")
VERSION = "TensorFlow 1, ITEX 1"


def kind(policy, dtype):
    """Accuracy of steps on two threads whose bounds are a tenth above their peaks."""
    bound = Bound(0.01, 0.02)
    measured = ((VERSION,), ("AMD EPYC",), ("avx512_bf16",), (2,), ("unet3d",))
    return Kind(dtype, policy, *measured, 10, 9, bound, bound, bound, 0.1, 2**20)


RECORDED = Accuracy(tuple(kind(policy, "bfloat16") for policy in POLICIES))


def of(job=SMALL, accuracy=RECORDED, constants=CONSTANTS, **changes):
    return estimate(dataclasses.replace(job, **changes), constants, accuracy)


def beside(result):
    """Component -> bytes of what is held beside the steps."""
    return {line.name: line.bytes for line in result.extra}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("changes", "unet"),
    [
        ({}, {"norm": "batch", "up": "upsampling"}),
        ({}, {"norm": "none", "residual": True, "dtype": "float32"}),
        ({"engine": "stock", "batch": 3, "optimizer": "sgd"}, {"network": "cicek2016"}),
        ({"from_store": True, "cases": 10}, {"deep_supervision": True}),
    ],
)
def test_the_bill_adds_up_to_the_process_s_peak_whatever_the_job(changes, unet, policy):
    result = of(SMALL.with_unet(policy=policy, **unet), **changes)
    assert sum(line.bytes for line in result.components) == result.process_peak_bytes
    assert all(line.bytes > 0 and line.source for line in result.components)
    assert len({line.name for line in result.components}) == len(result.components)
    assert result.allocator_peak_bytes < result.process_peak_bytes < result.upper_bound_bytes


def test_a_store_adds_the_next_batch_and_to_the_bound_what_a_run_holds_beside_its_steps():
    volume = 96**3
    sample = volume * (4 * 2 + 3)
    fed = of()
    from_store = of(from_store=True)
    (held,) = (line.bytes for line in from_store.components if "next batch" in line.name)
    assert held == sample
    # One at a time samples are never in TensorFlow's allocator.
    for figure, more in (("allocator_peak_bytes", -sample), ("process_peak_bytes", sample)):
        expected = pytest.approx(getattr(fed, figure) + more, rel=0.02)
        assert getattr(from_store, figure) == expected
    extra = beside(from_store)
    validation = extra.pop("validation", 0)
    bound = from_store.kind.upper_bound(from_store.process_peak_bytes + validation)
    assert from_store.upper_bound_bytes == bound + sum(extra.values())
    assert "samples in preparation" not in extra, "it is the next batch"
    assert extra["a case's files"] == volume * (4 * 2 + 1)
    larger = of(from_store=True, case_bytes=10**9).upper_bound_bytes - from_store.upper_bound_bytes
    assert larger == 10**9 - extra["a case's files"]
    assert extra["saving and restoring"] == 2 * 4 * 27 * 64 * 64  # the largest kernel twice
    # For gamma it is whole in float32, with a copy of a channel to smooth.
    reworked = of(from_store=True, reworked=True).upper_bound_bytes
    assert reworked - from_store.upper_bound_bytes == volume * (4 * 4 + 4)
    # A box of another sample is taken from that, of another case's files.
    mixed = of(from_store=True, mixed=True).upper_bound_bytes
    assert mixed - from_store.upper_bound_bytes == sample + volume * (4 * 2 + 1)
    # Several volumes are side by side before they are copied into one batch.
    two = of(from_store=True, batch=2, micro_batch=2)
    assert beside(two)["samples in preparation"] == 2 * sample
    # A validation has the next volume ready, and paints many maps slab by slab.
    many = of(SMALL.with_unet(outputs=40, policy="lean"), from_store=True)
    assert beside(many)["validation"] == pytest.approx(volume * (4 * 2 + 40), rel=0.2)


def test_what_a_worker_holds_beside_its_steps_is_counted_by_hand():
    """Patches of volumes of 128^3."""
    extra = ExtraMemory(volume_shape=(128,) * 3, copies=2, judged_shape=(256,) * 3, cases=10**4)
    result = run_estimate(SMALL, CONSTANTS, RECORDED, extra)
    held = beside(result)
    saved = [
        line.bytes for line in result.components if line.name in ("weights", "optimizer slots")
    ]
    assert held.pop("variables, once more") == pytest.approx(2 * sum(saved), rel=1e-3)
    # Three volumes, the scores' weights and two maps of logits.
    volumes = 128**3 * (3 * (4 * 2 + 3) + 4 + 2 * 4 * 3)
    assert held == {
        "whole volumes": volumes,
        "post-processing": (4 * 3 + 39) * 256**3 - volumes,
        "case records": 1200 * 10**4 // 2**20 * 2**20,
    }


@pytest.mark.parametrize(
    ("changes", "versions", "setting"),
    [
        ({"threads": 56}, {}, "56 threads"),
        ({}, {"itex": "TensorFlow 9, ITEX 9"}, "TensorFlow 9, ITEX 9"),
        ({"unet": dataclasses.replace(SMALL.unet, network="cicek2016")}, {}, "cicek2016"),
        ({"unet": UNetConfig()}, {}, "float32 under policy speed"),
        ({"constants": shipped_constants("avx2")}, {}, "avx2"),
    ],
)
def test_where_nothing_like_it_was_measured_the_bound_is_the_widest(changes, versions, setting):
    wider = dataclasses.replace(RECORDED.kinds[1], margin_share=0.3)
    accuracy = Accuracy((RECORDED.kinds[0], wider), versions)
    result = of(accuracy=accuracy, **changes)
    assert result.kind is None
    assert setting in result.uncovered
    assert result.to_json()["errors"]["records"] is None
    assert result.upper_bound_bytes == wider.upper_bound(result.process_peak_bytes)
    without = of(accuracy=Accuracy(())).upper_bound_bytes
    assert without == pytest.approx(1.25 * of().process_peak_bytes)


def test_a_job_like_those_recorded_has_their_errors_whatever_its_size_and_says_of_which():
    result = of(SMALL, shape=(240, 240, 160), batch=3)
    assert result.kind == RECORDED.kinds[0]
    assert result.upper_bound_bytes == result.kind.upper_bound(result.process_peak_bytes)
    mib = 2**20
    assert [result.kind.upper_bound(peak * mib) for peak in (5, 100)] == [6 * mib, 110 * mib]
    content = result.to_json()
    assert content["errors"]["process_peak"] == result.error("step_s") == "± 1.0%, worst 2.0%"
    assert content["step_s"] == pytest.approx(3 * content["volume_s"])
    assert content["peak_op"] == result.timeline.peak_op
    elsewhere = of(constants=dataclasses.replace(CONSTANTS, cpu="another"))
    assert elsewhere.error("step_s") == "not measured like this"
    assert str(result.kind) == "9 steps on AMD EPYC, bfloat16, policy speed, 2 threads"


def test_a_step_is_its_micro_batches_and_one_update():
    two, three, four = (of(batch=batch, cases=8) for batch in (2, 3, 4))
    part_s = three.step_s - two.step_s
    assert four.step_s - three.step_s == pytest.approx(part_s)
    assert 0 < two.step_s - 2 * part_s < part_s
    assert four.volume_s == pytest.approx(four.step_s / 4)
    assert four.epoch_s == pytest.approx(2 * four.step_s)


def test_tensors_are_added_up_by_cause_in_the_order_of_a_bill():
    tensors = (
        Tensor("encoder0_conv1", 4096, Group.ACTIVATIONS, 0),
        Tensor("decoder0_act2/gradient", 2048, Group.TRANSIENTS),
        Tensor("encoder1_conv1", 1000, Group.ACTIVATIONS, 1),
        Tensor("kernel/m", 700, Group.SLOTS),
        Tensor("kernel/v", 700, Group.SLOTS),
        Tensor("kernel", 512, Group.WEIGHTS),
    )
    bill = live_at_peak(Timeline((0,), "op", tensors))
    assert [(line.name, line.bytes) for line in bill] == [
        ("weights", 512),
        ("optimizer slots", 2 * 768),  # rounded up to 256 each, as the allocator does
        ("activations, level 0", 4096),
        ("activations, level 1", 1024),
        ("transients", 2048),
    ]
    assert "decoder0_act2/gradient" in bill[-1].source
