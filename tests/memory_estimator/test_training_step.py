"""The step on paper: a small network's by hand, the rules of engines and policies, and measured peaks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memory_estimator.job import Job
from memory_estimator.step.allocator import use
from memory_estimator.step.program import requests, timeline
from memory_estimator.step.scratch import is_narrow, mask_bytes
from memory_estimator.step.training_step import training_step
from models.config import DTYPES, NETWORKS, NORMS, POLICIES, UPS, UNetConfig
from tests.memory_estimator.steps import names, op, step, written


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


@pytest.mark.parametrize(("dtype", "value_bytes"), [("float32", 4), ("bfloat16", 2)])
def test_maps_kernels_and_gradients_have_the_sizes_of_their_dtype(dtype, value_bytes):
    program = step(batch=3, dtype=dtype, norm="batch")
    voxels = 3 * 16**3
    assert written(program, "image").bytes == voxels * value_bytes
    assert written(program, "target").bytes == voxels
    assert written(program, "decoder0_concat").bytes == voxels * 16 * value_bytes
    assert written(program, "encoder1_pool/winners").bytes == voxels // 8 * 8
    assert written(program, "encoder0_conv2/kernel").bytes == 27 * 8 * 8 * 4
    assert written(program, "encoder0_conv2/filter_gradient").bytes == 27 * 8 * 8 * value_bytes
    # The loss is float32 either way.
    assert written(program, "head/loss/products").bytes == voxels * 4


@pytest.mark.parametrize(
    ("channels", "dtype", "engine", "bytes_"),
    [
        (16, "bfloat16", "itex", 100),
        (8, "bfloat16", "itex", 800),
        (8, "float32", "itex", 100),
        (16, "float32", "stock", 400),
        (24, "bfloat16", "stock", 3200),
        (12, "float32", "stock", 3200),
    ],
)
def test_a_norms_mask_is_a_bit_a_value_or_a_byte_and_stock_takes_four_times_that(channels, dtype, engine, bytes_):
    assert mask_bytes(800, channels, dtype, engine) == bytes_
    assert is_narrow(channels, dtype) == (bytes_ in (800, 3200))


JOBS = st.builds(
    lambda unet, shape, batch, at_once, **more: Job(
        UNetConfig(**unet), shape, batch, micro_batch=batch if at_once else 1, **more
    ),
    unet=st.fixed_dictionaries(
        {
            "channels": st.sampled_from((1, 4)),
            "outputs": st.sampled_from((1, 3)),
            "filters": st.sampled_from((4, 8, 16, 24)),
            "depth": st.sampled_from((2, 3)),
            "network": st.sampled_from(NETWORKS),
            "norm": st.sampled_from(NORMS),
            "up": st.sampled_from(UPS),
            "residual": st.booleans(),
            "deep_supervision": st.booleans(),
            "dtype": st.sampled_from(DTYPES),
            "policy": st.sampled_from(POLICIES),
        }
    ),
    shape=st.tuples(*(st.sampled_from((16, 32, 48)),) * 3),
    batch=st.integers(1, 4),
    at_once=st.booleans(),
    optimizer=st.sampled_from(("adam", "sgd")),
    engine=st.sampled_from(("itex", "stock")),
    threads=st.sampled_from((1, 2, 8)),
    averaged=st.booleans(),
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


def gradients(program, block):
    """What the backward pass does in a block, filter gradients by planes taken together."""
    done = [each.name for each in program.ops if each.kind not in ("join", "update")]
    done = done[done.index("head/input_gradient") :]
    found = [name for name in done if name.startswith(block) and name != "encoder0_act2/gradient"]
    return list(dict.fromkeys(name.partition("/sample")[0] for name in found))


def test_a_balanced_blocks_backward_pass_makes_the_norm_and_the_up_sampled_map_again():
    assert gradients(step(policy="balanced"), "decoder0") == [
        "decoder0_act2/gradient_below",
        "decoder0_act1/once_more",
        *("decoder0_conv2/filter_gradient", "decoder0_conv2/input_gradient"),
        "decoder0_act1/gradient_below",
        "decoder0_up/once_more",
        *("decoder0_conv1/decoder0_up/filter_gradient", "decoder0_conv1/decoder0_up/input_gradient"),
        *("decoder0_up/filter_gradient", "decoder0_up/input_gradient"),
        *("decoder0_conv1/encoder0_act2/filter_gradient", "decoder0_conv1/encoder0_act2/input_gradient"),
    ]


def test_a_filter_gradient_by_planes_is_three_of_a_third_of_the_work_and_next_to_no_scratch():
    speed, lean = (step((32, 32, 32), filters=16, dtype="bfloat16", policy=policy) for policy in ("speed", "lean"))
    whole = op(speed, "decoder0_conv2/filter_gradient")
    planes = [op(lean, f"decoder0_conv2/filter_gradient/sample0/plane{plane}") for plane in range(3)]
    assert sum(plane.flops for plane in planes) == whole.flops
    assert [plane.writes[0].bytes for plane in planes] == [whole.writes[0].bytes // 3] * 3
    assert planes[0].scratch[0].bytes < whole.scratch[0].bytes / 8
    # The head's kernel has one plane; the up-convolution's gradient goes over the whole volume.
    assert len([name for name in names(lean, "conv_filter_gradient") if name.startswith("head/")]) == 1
    assert op(lean, "decoder0_up/filter_gradient").scratch == op(speed, "decoder0_up/filter_gradient").scratch
