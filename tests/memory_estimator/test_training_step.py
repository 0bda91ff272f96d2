"""The step on paper: a small network's by hand, the rules of engines and policies, and measured peaks."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memory_estimator.job import Job
from memory_estimator.step.allocator import use
from memory_estimator.step.program import requests, timeline
from memory_estimator.step.training_step import training_step
from models.config import DTYPES, NETWORKS, NORMS, POLICIES, UPS, UNetConfig

SMALL = UNetConfig(channels=1, outputs=1, filters=8, depth=2, policy="speed")


def step(shape=(16, 16, 16), batch=1, micro_batch=None, **unet):
    """Of a small network, of a batch that is computed at once unless it is told otherwise."""
    network = dataclasses.replace(SMALL, **unet)
    return training_step(Job(network, shape, batch, micro_batch=micro_batch or batch, threads=2))


def op(program, name):
    return next(each for each in program.ops if each.name == name)


def names(program, *kinds):
    return [each.name for each in program.ops if each.kind in kinds]


def written(program, name):
    made = [tensor for each in (*program.before, *program.ops) for tensor in (*each.writes, *each.keeps)]
    return next(tensor for tensor in [*made, *program.resident] if tensor.name == name)


def test_the_forward_pass_is_the_plan_and_the_backward_pass_its_mirror():
    program = step()
    assert names(program, "conv", "up_conv", "pool", "join") == [
        *("encoder0_conv1", "encoder0_conv2", "encoder1_pool", "encoder1_conv1", "encoder1_conv2"),
        *("decoder0_up", "decoder0_concat", "decoder0_conv1", "decoder0_conv2", "head"),
    ]
    gradients = names(program, "conv_filter_gradient", "conv_input_gradient")
    assert gradients[:2] == ["head/filter_gradient", "head/input_gradient"]
    assert gradients[-1] == "encoder0_conv1/filter_gradient"  # the image has no gradient


def test_a_steps_program_is_one_micro_batchs_and_the_update_from_the_sums():
    alone, parts = step(batch=2), step(batch=6, micro_batch=2)
    size = written(alone, "image").bytes
    assert written(parts, "image").bytes == size
    done = [each.name for each in parts.ops]
    added = [name for name in done if name.startswith("sums/")]
    assert done[: -len(added) - len(names(parts, "update"))] == [
        each.name for each in alone.ops if each.kind != "update"
    ]
    assert op(parts, "sums/head").reads == ("head/filter_gradient", "head/gradient_sum")
    assert "head/gradient_sum" in op(parts, "head/update").reads
    assert "head/filter_gradient" in op(alone, "head/update").reads


BOTH = (False, True)
UNETS = {"channels": (1, 4), "outputs": (1, 3), "filters": (4, 8, 16, 24), "depth": (2, 3), "network": NETWORKS}
UNETS.update(norm=NORMS, up=UPS, residual=BOTH, deep_supervision=BOTH, dtype=DTYPES, policy=POLICIES)
MORE = {"optimizer": ("adam", "sgd"), "engine": ("itex", "stock"), "threads": (1, 2, 8), "averaged": BOTH}
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
    # `bench memory` makes them. Under policy speed hardly a KiB is off; under the others the kernels' copies come in an
    # order a little different, so that the allocator's pieces differ.
    (BFLOAT16, (96, 96, 96), 1, "itex", 643_688_960, 5e-6),
    (FLOAT32, (96, 96, 96), 1, "itex", 1_049_526_272, 5e-6),
    (FLOAT32, (96, 96, 96), 1, "stock", 987_004_928, 5e-6),
    ({**BFLOAT16, "residual": True}, (64, 64, 64), 1, "itex", 266_826_240, 5e-6),
    ({**FLOAT32, "residual": True}, (64, 64, 64), 1, "stock", 383_254_528, 5e-6),
    ({**FLOAT32, "residual": True, "norm": "batch", "filters": 8}, (64, 64, 64), 2, "itex", 331_350_016, 5e-6),
    ({**BFLOAT16, "residual": True}, (96, 64, 64), 2, "stock", 625_999_872, 5e-6),
    ({**BFLOAT16, "deep_supervision": True}, (64, 64, 64), 1, "itex", 263_192_576, 5e-6),
    ({**FLOAT32, "policy": "lean"}, (64, 64, 64), 1, "stock", 192_724_992, 5e-6),
    ({**BFLOAT16, "policy": "lean"}, (64, 64, 64), 1, "itex", 166_035_456, 5e-3),
    ({**BFLOAT16, "policy": "balanced"}, (64, 64, 64), 1, "itex", 185_712_640, 5e-3),
    ({**BFLOAT16, "policy": "balanced"}, (64, 64, 64), 1, "stock", 162_971_648, 5e-3),
]


@pytest.mark.parametrize(("unet", "shape", "batch", "engine", "measured", "within"), MEASURED)
def test_the_allocators_peak_is_the_measured_one(unet, shape, batch, engine, measured, within):
    job = Job(UNetConfig(**{"policy": "speed", **unet}), shape, batch, micro_batch=batch, engine=engine, threads=2)
    assert use(training_step(job)).peak_bytes == pytest.approx(measured, rel=within)
