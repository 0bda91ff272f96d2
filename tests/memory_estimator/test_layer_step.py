"""A step by TensorFlow's layers, as it is predicted where native operations do not run."""

import dataclasses

import pytest

from memory_estimator.calibration import constants_of, shipped_constants
from memory_estimator.estimate import estimate
from memory_estimator.job import Job
from memory_estimator.step.layer_step import layer_step
from models import native
from models.config import POLICIES, UNetConfig
from tests.cpu3d.host.hosts import SMALL

MIB = 2**20
WITHOUT = dataclasses.replace(SMALL.host, isa=("avx",))
"""A host on which native operations do not run."""

# Job, side, MiB of the process at most: `bench step` without built libraries on two cores of an AMD
# EPYC, TensorFlow 2.15.1, 2026-11-26.
MEASURED = [
    ({}, {}, 96, 1914),
    ({"norm": "batch"}, {"batch": 2, "micro_batch": 2}, 64, 1435),
    ({"residual": True, "deep_supervision": True}, {"optimizer": "adam"}, 64, 1141),
    ({}, {"engine": "stock"}, 96, 1532),
    ({"dtype": "bfloat16"}, {"engine": "stock"}, 96, 1195),
    ({"dtype": "bfloat16"}, {}, 128, 2275),
]


@pytest.mark.parametrize(("unet", "more", "side", "held_mib"), MEASURED)
def test_the_bound_is_above_what_a_process_held_but_not_by_half(unet, more, side, held_mib):
    job = Job(UNetConfig(**unet), (side,) * 3, threads=2, **more)
    predicted = estimate(job, constants_of(WITHOUT))
    assert held_mib * MIB <= predicted.upper_bound_bytes <= 1.5 * held_mib * MIB


@pytest.mark.parametrize(
    ("network", "step_s"),
    [({}, 9.46281), ({"up": "upsampling", "residual": True, "norm": "none"}, 9.96348)],
)
def test_it_takes_more_memory_and_time_than_native_operations_under_every_policy_alike(
    network, step_s
):
    """Seconds by the shipped constants of "avx2", doubled."""
    unets = [UNetConfig(policy=policy, **network) for policy in POLICIES]
    jobs = [Job(unet, (64, 64, 64), batch=4, micro_batch=2, from_store=True) for unet in unets]
    native = [estimate(job, shipped_constants("avx2")) for job in jobs]
    layers = [estimate(job, constants_of(WITHOUT)) for job in jobs]
    for one, other in zip(native, layers):
        assert one.upper_bound_bytes < other.upper_bound_bytes
        assert one.step_s < other.step_s == pytest.approx(step_s)
    assert layers[0].upper_bound_bytes == layers[1].upper_bound_bytes
    assert "TensorFlow's layers" in layers[0].margin
    assert constants_of(WITHOUT).name.startswith("2 times the seconds")
    assert sum(line.bytes for line in layers[0].components) == layers[0].process_peak_bytes


def test_what_an_operation_of_layers_holds_on_the_way_is_that_by_hand():
    """Of two volumes of 64 voxels: copies in another layout, and float32 maps."""
    unet = UNetConfig(channels=1, filters=2, depth=2, dtype="bfloat16")
    ops = layer_step(Job(unet, (4, 4, 4), batch=2, micro_batch=2)).ops
    held = {op.name: sum(tensor.bytes for tensor in op.scratch) for op in ops}
    assert held["encoder0_conv1"] == 3 * 2 * 128 * (1 + 2)
    assert held["encoder1_pool/gradient"] == 2 * 4 * 128 * 2
    assert held["head/slope"] == 4 * 4 * 128 * 3


def test_this_host_is_asked_and_its_flags_are_not_believed(monkeypatch, tmp_path):
    monkeypatch.setattr(native.build, "BUILT", tmp_path)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    here = dataclasses.replace(SMALL.host, is_here=True)
    assert here.instructions == ""
    assert here.native.why
    assert here.best_dtype == "bfloat16"  # TensorFlow's layers multiply in it too
