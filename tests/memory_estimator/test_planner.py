"""Jobs that fit, over made-up prices whose answers are known, by trying everything, and the patch
for a GPU."""

import dataclasses
import functools
import math
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memory_estimator.job import RECIPES, Job
from memory_estimator.planner import (
    check_patch,
    extent,
    fastest_that_fits,
    gpu_bytes,
    gpu_forecast,
    largest_number,
    nearest,
    patch_for,
    patch_shapes,
    plan,
)
from models.config import UNetConfig
from models.strides import STRIDES

GIB = 2**30
JOB = Job(shape=(240, 240, 160), batch=16, micro_batch=16)
ONE_VOLUME = 240 * 240 * 160 * 16 * 4
KEPT = {"speed": 4, "lean": 2}
"""Policy -> quarters of the memory."""
SECONDS = {"speed": 1.0, "lean": 1.3}
"""Policy -> of a volume."""


def estimator(job):
    """Stands in for an Estimate: under policy speed a byte a voxel, filter, volume at a time and
    byte of dtype."""
    maps = job.voxels * job.unet.filters * (4 if job.unet.dtype == "float32" else 2)
    bound = maps * KEPT[job.policy] // 4 + 1000
    volume_s = SECONDS[job.policy]
    return SimpleNamespace(
        job=job, upper_bound_bytes=bound, volume_s=volume_s, step_s=volume_s * job.batch
    )


@given(st.integers(0, 5000), st.integers(0, 10**9), st.floats(0.3, 4))
def test_the_largest_number_is_found_in_a_few_guesses_however_costs_grow(limit, fixed, power):
    cost = lambda number: int(fixed + 10**6 * number**power)
    tried = []
    assert (
        largest_number(lambda n: tried.append(n) or cost(n), cost(limit) if limit else cost(1) - 1)
        == limit
    )
    assert len(tried) <= 3 * math.log2(limit + 2) + 12


def test_the_largest_number_may_be_beyond_one_that_does_not_fit():
    costs = [1, 9, 3, 9, 9, 9, 1]
    assert largest_number(lambda n: costs[n - 1], 5, len(costs)) == 3


def test_the_plan_of_a_known_memory_is_the_one_by_hand():
    largest = plan(JOB, estimator, 5 * ONE_VOLUME + 1000)
    assert (largest["batch"].job.batch, largest["batch"].job.micro_batches) == (5, 1)
    assert largest["filters"] is None  # 8 filters at batch 16 are eight volumes
    # 5 / 16 of the voxels: 160 x 160 x 112 would be 0.311 of them, 176 x 176 x 112 are more than
    # 0.3125.
    assert largest["extent"].job.shape == (160, 160, 112)
    lean = plan(JOB.with_unet(policy="lean"), estimator, 5 * ONE_VOLUME + 1000)
    assert (lean["batch"].job.batch, lean["filters"].job.unet.filters) == (10, 8)
    # One volume at a time of any batch is a job of one volume, but for the batch at once, which
    # stays the same.
    singly = plan(dataclasses.replace(JOB, micro_batch=1), estimator, 5 * ONE_VOLUME + 1000)
    assert (singly["batch"], singly["filters"].job.unet.filters) == (largest["batch"], 80)
    assert singly["filters"].job.micro_batches == 16
    few = plan(dataclasses.replace(JOB, cases=3), estimator, 5 * ONE_VOLUME + 1000)
    assert few["batch"].job.batch == 3


@pytest.mark.parametrize(
    ("volumes", "lean_s", "policy", "fits"),
    [
        (16, 1.3, "speed", True),
        (16, 0.9, "lean", True),
        (15, 1.3, "lean", True),
        (7, 1.3, "lean", False),
    ],
)
def test_the_policy_picked_is_the_fastest_that_fits_or_else_takes_least(
    volumes, lean_s, policy, fits, monkeypatch
):
    monkeypatch.setitem(SECONDS, "lean", lean_s)
    choice = fastest_that_fits(JOB, estimator, volumes * ONE_VOLUME + 1000)
    assert (choice.policy, choice.fits) == (policy, fits)


def test_each_change_that_is_enough_alone_is_named_with_what_it_takes():
    options = nearest(JOB, estimator, ONE_VOLUME * 8 + 1000)
    assert str(options[0]) == "--policy lean: up to 4.39 GiB, 1.3 s a volume"
    changes = [option.change for option in options[1:]]
    assert changes == ["--micro-batch 8", "--dtype bfloat16", "--shape 176 176 112", "--filters 8"]
    assert nearest(JOB, estimator, 5) == []


def test_a_run_that_has_begun_is_proposed_only_what_it_may_change():
    changes = lambda job, parts: [
        option.change
        for option in nearest(job, estimator, 16 * ONE_VOLUME // parts + 1000, same_training=True)
    ]
    assert changes(JOB, 2) == ["--policy lean", "--micro-batch 8"]
    assert changes(JOB, 32) == ["--policy lean --micro-batch 1"]
    assert changes(JOB.with_unet(norm="batch"), 2) == [
        "--policy lean"
    ]  # its statistics follow the micro-batch


CARD_JOB = dataclasses.replace(JOB, batch=1, micro_batch=1)
card_bytes = functools.lru_cache(maxsize=None)(gpu_bytes)


@given(
    sides=st.tuples(*[st.integers(1, 12)] * 3),
    strides=st.lists(st.sampled_from(STRIDES), min_size=1, max_size=5),
)
def test_every_patch_can_be_learnt_from_and_is_one_step_larger_than_the_last(sides, strides):
    divisors = UNetConfig(depth=len(strides) + 1, strides=strides).divisors
    volume = tuple(divisor * n for divisor, n in zip(divisors, sides))
    shapes = patch_shapes(volume, divisors)
    assert shapes[-1] == volume
    for shape in shapes:
        check_patch(shape, volume, divisors)
        with pytest.raises(ValueError, match=r"three positive numbers, got \(0, "):
            check_patch((0, *shape[1:]), volume, divisors)
        # near-cubes: a side is longer than another only by a step, or where that other is at its
        # end
        for a, first in zip(shape, shapes[0]):
            for b, most in zip(shape, volume):
                assert a - b <= max(divisors) or b == most or a == first
    for first, second in zip(shapes, shapes[1:]):
        grown = [more - less for less, more in zip(first, second)]
        assert sorted(grown)[:2] == [0, 0]
        assert max(grown) == divisors[grown.index(max(grown))]


def test_extents_keep_their_proportions_where_axes_have_divisors_of_their_own():
    unet = UNetConfig(depth=3, strides=((2, 2, 1), (2, 2, 2)))
    job = Job(unet, (64, 48, 20))
    grids = [extent(job, number).shape for number in (1, 4, 8, 16)]
    assert grids == [(4, 4, 2), (16, 12, 6), (32, 24, 10), (64, 48, 20)]


@settings(max_examples=20)
@given(
    memory_bytes=st.integers(2 * GIB, 40 * GIB), volumes=st.sampled_from([(1, 1), (2, 1), (2, 2)])
)
def test_the_patch_fits_and_the_next_larger_one_does_not(memory_bytes, volumes):
    batch, micro_batch = volumes
    job = dataclasses.replace(CARD_JOB, shape=(144, 192, 144), batch=batch, micro_batch=micro_batch)
    shapes = patch_shapes(job.shape, (16, 16, 16))
    place = shapes.index(patch_for(job, memory_bytes, "gpu:0"))
    taken = [
        card_bytes(dataclasses.replace(job, shape=shape)) for shape in shapes[place : place + 2]
    ]
    assert taken[0] <= memory_bytes
    assert all(more > memory_bytes for more in taken[1:])


@pytest.mark.parametrize(
    ("dtype", "side", "held", "times"),
    [("float32", 64, 1_071_644_160, 1.568), ("bfloat16", 128, 5_030_344_960, 1.035)],
)
def test_a_card_is_to_hold_what_one_held(dtype, side, held, times):
    """TensorFlow's own peak on an NVIDIA H200, of `train --recipe gpu-patch` with patches of this
    side, and more on small ones, where four sets of weights are most of it."""
    job = dataclasses.replace(RECIPES["gpu-patch"].job.with_unet(dtype=dtype), shape=(side,) * 3)
    forecast = gpu_forecast(job)
    assert forecast["allocator_peak_bytes"] == pytest.approx(times * held, rel=1e-3)


def test_a_card_too_small_for_any_patch_is_told_what_the_smallest_takes():
    job = dataclasses.replace(CARD_JOB, batch=2, micro_batch=2)
    least = r"^gpu:3 .* 32 x 32 x 32, 2 at a time, which takes 1\.26 GiB, got 1\.00 GiB"
    with pytest.raises(ValueError, match=least):
        patch_for(job, GIB, "gpu:3")
