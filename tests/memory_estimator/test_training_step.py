"""The step on paper: consistent for every job, with the measured peaks and those of TensorFlow's own graph."""

import itertools

import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorflow.python.framework import op_def_registry

from memory_estimator.job import Job
from memory_estimator.step.allocator import SMALL_BYTES, region_bytes, use
from memory_estimator.step.onednn import USUAL, Kernels
from memory_estimator.step.program import requests, timeline
from memory_estimator.step.training_step import training_step
from models.config import DTYPES, NETWORKS, NORMS, POLICIES, UPS, UNetConfig
from tests.reference.lifetimes import estimate_step

BOTH = (False, True)
UNETS = {"channels": (1, 4), "outputs": (1, 3), "filters": (4, 8, 16, 24), "depth": (2, 3), "network": NETWORKS}
UNETS.update(norm=NORMS, up=UPS, residual=BOTH, deep_supervision=BOTH, dtype=DTYPES, policy=POLICIES)
MORE = {"optimizer": ("muon", "adam", "sgd"), "engine": ("itex", "stock"), "threads": (1, 2, 8), "averaged": BOTH}
JOBS = st.builds(
    lambda unet, shape, batch, at_once, more: Job(
        UNetConfig(**unet), shape, batch, micro_batch=batch if at_once else 1, **more
    ),
    unet=st.fixed_dictionaries({name: st.sampled_from(values) for name, values in UNETS.items()}),
    shape=st.tuples(*(st.sampled_from((16, 32, 48)),) * 3),
    batch=st.integers(1, 4),
    at_once=st.booleans(),
    more=st.fixed_dictionaries({name: st.sampled_from(values) for name, values in MORE.items()}),
)


@given(JOBS)
@settings(max_examples=80)
def test_every_program_is_consistent(job):
    program = training_step(job)
    done = [each.name for each in program.ops]
    assert len(set(done)) == len(done)
    # Raises where an operation reads what is not there.
    line = timeline(program)
    assert line.peak_bytes >= sum(tensor.bytes for tensor in program.resident)
    # What a step takes it gives back, but for what it keeps.
    kept = sum(tensor.bytes for each in program.ops for tensor in each.keeps)
    assert sum(request.bytes for request in requests(program, 2)) == kept + sum(t.bytes for t in program.resident)


BFLOAT16, FLOAT32 = {"dtype": "bfloat16"}, {"dtype": "float32"}

MEASURED = [
    # get_memory_info("CPU:0")["peak"] from the third step on: TensorFlow 2.15.1, ITEX 2.15.0.0, two threads, inputs as
    # `bench step` makes them. Hardly a KiB is off.
    (BFLOAT16, (96, 96, 96), 1, "itex", 643_688_960),
    (FLOAT32, (96, 96, 96), 1, "itex", 1_038_909_440),
    (FLOAT32, (96, 96, 96), 1, "stock", 987_004_928),
    ({**BFLOAT16, "residual": True}, (64, 64, 64), 1, "itex", 266_826_240),
    ({**FLOAT32, "residual": True}, (64, 64, 64), 1, "stock", 386_400_256),
    ({**FLOAT32, "residual": True, "norm": "batch", "filters": 8}, (64, 64, 64), 2, "itex", 337_641_472),
    ({**BFLOAT16, "residual": True}, (96, 64, 64), 2, "stock", 625_999_872),
    # Norms in passes of our own.
    ({**FLOAT32, "filters": 12}, (64, 64, 64), 1, "itex", 241_696_768),
    ({**FLOAT32, "filters": 12, "policy": "balanced"}, (64, 64, 64), 1, "stock", 125_853_696),
    # On a host whose AVX-512 has no instructions for bfloat16.
    ({**BFLOAT16, "deep_supervision": True, "isa": "avx512_core_vnni"}, (64, 64, 64), 1, "itex", 267_911_168),
    ({**FLOAT32, "policy": "balanced"}, (64, 64, 64), 1, "stock", 192_724_992),
    # Rows of 96 x 3 bytes: slabs of the target are no views.
    ({**FLOAT32, "policy": "balanced"}, (96, 96, 96), 1, "itex", 558_694_400),
    ({**BFLOAT16, "policy": "balanced"}, (64, 64, 64), 1, "itex", 166_035_456),
]


@pytest.mark.parametrize(("unet", "shape", "batch", "engine", "measured"), MEASURED)
def test_the_allocators_peak_is_the_measured_one(unet, shape, batch, engine, measured):
    unet = {"policy": "speed", "isa": "avx512_core_bf16", **unet}
    kernels = Kernels(unet.pop("isa"))
    job = Job(UNetConfig(**unet), shape, batch, micro_batch=batch, optimizer="adam", engine=engine, threads=2)
    assert use(training_step(job, kernels)).peak_bytes == pytest.approx(measured, rel=5e-6)


@pytest.mark.parametrize(("side", "measured"), [(64, 169_213_952), (128, 632_651_776)])
def test_in_slabs_it_is_the_measured_one(side, measured):
    unet = UNetConfig(policy="lean", dtype="float32")
    job = Job(unet, (side,) * 3, optimizer="adam", engine="stock", threads=2)
    assert use(training_step(job, Kernels("avx512_core_vnni"))).peak_bytes == pytest.approx(measured, rel=5e-6)


@pytest.mark.parametrize(
    ("dtype", "policy", "engine", "measured"),
    [
        ("bfloat16", "speed", "itex", 237_502_464),
        ("bfloat16", "balanced", "itex", 139_689_984),
        ("bfloat16", "speed", "stock", 198_705_152),
        ("float32", "speed", "itex", 347_865_088),
        ("float32", "speed", "stock", 340_525_056),
        ("float32", "balanced", "stock", 171_409_408),
    ],
)
def test_with_muon_it_is_the_measured_one(dtype, policy, engine, measured):
    job = Job(UNetConfig(dtype=dtype, policy=policy), (64,) * 3, optimizer="muon", engine=engine, threads=2)
    assert use(training_step(job, Kernels("avx512_core_bf16"))).peak_bytes == pytest.approx(measured, rel=5e-6)


def test_muon_keeps_one_copy_of_large_kernels_and_two_of_the_rest():
    slots = {}
    for optimizer in ("muon", "adam"):
        program = training_step(Job(UNetConfig(residual=True), (64,) * 3, optimizer=optimizer))
        slots[optimizer] = {one.name for one in program.resident if "/slot" in one.name}
    only_adam = slots["adam"] - slots["muon"]
    assert {"encoder0_conv1/slot1", "decoder0_up/slot1"} <= only_adam
    assert {"encoder1_shortcut/slot1", "head/slot1"} <= slots["muon"]


# --- Against the graph that TensorFlow runs ---

ENGINE = "stock" if op_def_registry.get("_ITEXConv3D") is None else "itex"


def both(unet, micro, parts=1, side=32, optimizer="adam"):
    """(closed form, replay) of the trainer's own step; in several parts, of the one that takes more."""
    from cpu3d.settings import RunConfig
    from cpu3d.training.learner import Learner

    shape, batch = (side, side, side), micro * parts
    config = RunConfig(grid=shape, unet=unet, batch=batch, micro_batch=micro, optimizer=optimizer)
    learner = Learner(config)
    image = tf.TensorSpec((micro, *shape, unet.channels), unet.dtype)
    target = tf.TensorSpec((micro, *shape, unet.outputs), tf.uint8)
    variables = [*learner.model.weights, *learner.optimizer.variables, *learner._sums]
    held = {"variables": variables, "region_bytes": region_bytes(unet, shape, micro), "kernels": USUAL}
    steps = [(learner._step, image, target)]
    if parts > 1:
        steps = [(learner._accumulate, image, target), (learner._apply,)]
    replays = [estimate_step(*one, **held) for one in steps]
    job = Job(unet, shape, batch, micro_batch=micro, optimizer=optimizer, engine=ENGINE, threads=2)
    return training_step(job), max(replays, key=lambda each: each.timeline.peak_bytes)


GRID = [
    ({"norm": norm, "residual": residual, "deep_supervision": deep, "up": up, "dtype": dtype, "policy": policy}, batch)
    for norm, residual, deep, up, dtype, batch, policy in itertools.product(
        NORMS, (False, True), (False, True), UPS, DTYPES, (1, 2), POLICIES
    )
]
QUICK = GRID[::61]
"""What runs by default: every pair of two settings is among them."""


@pytest.mark.parametrize(
    ("unet", "batch"), [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in GRID]
)
def test_both_engines_of_the_estimator_agree(unet, batch):
    depth = 3 if unet["deep_supervision"] else 2
    closed, replay = both(UNetConfig(filters=16, depth=depth, **unet), batch)
    # In slabs the graph has a thousand constants, which count at a grid as small as this.
    near = 0.1 if unet["policy"] == "lean" else 0.01
    assert timeline(closed).peak_bytes == pytest.approx(replay.timeline.peak_bytes, rel=near)


@pytest.mark.parametrize(
    ("policy", "norm", "micro"), [("speed", "instance", 1), ("balanced", "batch", 2), ("lean", "instance", 2)]
)
def test_they_agree_on_micro_batches_too(policy, norm, micro):
    unet = UNetConfig(filters=16, depth=2, policy=policy, norm=norm, dtype="bfloat16")
    closed, replay = both(unet, micro, parts=2)
    near = 0.1 if policy == "lean" else 0.01
    assert timeline(closed).peak_bytes == pytest.approx(replay.timeline.peak_bytes, rel=near)


@pytest.mark.parametrize(
    ("dtype", "policy", "optimizer"),
    [("float32", "speed", "muon"), ("bfloat16", "balanced", "muon"), ("bfloat16", "speed", "adam")],
)
def test_they_see_the_same_history_with_every_optimizer(dtype, policy, optimizer):
    # At 32^3 voxels the constants of Muon's iteration would count.
    closed, replay = both(UNetConfig(filters=16, depth=3, dtype=dtype, policy=policy), 1, side=48, optimizer=optimizer)
    made = lambda program: [t.bytes for op in program.before for t in op.writes if t.bytes >= SMALL_BYTES]
    assert made(closed) == made(replay.program)
    assert timeline(closed).peak_bytes == pytest.approx(replay.timeline.peak_bytes, rel=0.01)
    assert use(closed).peak_bytes == pytest.approx(replay.allocator_peak_bytes, rel=0.01)
    assert use(closed).resident_bytes == pytest.approx(use(replay.program).resident_bytes, rel=0.01)
