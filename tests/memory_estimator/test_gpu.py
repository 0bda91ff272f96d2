"""The patch for a GPU: it fits, the next larger one does not, it lies within the volume, and its bottom is no voxel."""

import dataclasses
import functools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memory_estimator.gpu import CONTEXT_BYTES, gpu_bytes, largest_patch, patch_for, patch_shapes
from memory_estimator.job import Job
from memory_estimator.liveness import timeline
from memory_estimator.training_step import training_step
from models.config import UNetConfig

GIB = 2**30
JOB = Job(UNetConfig(dtype="float32", policy="speed"), (240, 240, 160), threads=2)

priced = functools.lru_cache(maxsize=None)(gpu_bytes)


# --- Shapes to choose from ---


def test_cubes_and_near_cubes_up_to_the_volume():
    assert patch_shapes((24, 32, 24), 8) == ((16, 16, 16), (24, 16, 16), (24, 24, 16), (24, 24, 24), (24, 32, 24))


def test_an_axis_that_is_as_long_as_the_volume_lets_the_others_grow():
    assert patch_shapes((32, 24, 8), 4)[:5] == ((8, 8, 8), (12, 8, 8), (12, 12, 8), (16, 12, 8), (16, 16, 8))
    assert patch_shapes((32, 24, 8), 4)[-2:] == ((28, 24, 8), (32, 24, 8))


def test_a_volume_thinner_than_the_least_patch_is_taken_whole():
    assert patch_shapes((48, 16, 32), 16) == ((32, 16, 32), (48, 16, 32))
    assert patch_shapes((16, 16, 16), 16) == ((16, 16, 16),)


@given(sides=st.tuples(*[st.integers(1, 12)] * 3), depth=st.integers(2, 6))
def test_every_patch_divides_lies_within_the_volume_and_is_one_step_larger_than_the_last(sides, depth):
    divisor = 2 ** (depth - 1)
    volume = tuple(divisor * n for n in sides)
    shapes = patch_shapes(volume, divisor)
    assert shapes[-1] == volume
    assert all(n % divisor == 0 and n <= most for shape in shapes for n, most in zip(shape, volume))
    # Two voxels at the bottom, where the volume has them: a norm over one voxel alone is zero.
    assert all(n // divisor >= min(2, most // divisor) for shape in shapes for n, most in zip(shape, volume))
    assert all(sum(two) - sum(one) == divisor for one, two in zip(shapes, shapes[1:]))
    for shape in shapes:  # near-cubes: a side is longer than another only by a step, or where that other is at its end
        assert all(a - b <= divisor or b == most for a in shape for b, most in zip(shape, volume))


# --- Which fits ---


@settings(deadline=None, max_examples=25)
@given(memory_bytes=st.integers(GIB, 40 * GIB), batch=st.sampled_from([(1, 1), (2, 1), (2, 2)]))
def test_the_patch_fits_and_the_next_larger_one_does_not(memory_bytes, batch):
    job = dataclasses.replace(JOB, shape=(144, 192, 144), batch=batch[0], micro_batch=batch[1])
    patch = largest_patch(job, memory_bytes)
    shapes = patch_shapes(job.shape, 16)
    if patch is None:
        assert priced(dataclasses.replace(job, shape=shapes[0])) > memory_bytes
        return
    assert patch.bytes == priced(patch.job) <= memory_bytes
    place = shapes.index(patch.job.shape)
    if patch.holds_volume:
        assert (patch.job, place, patch.share_of_volume) == (job, len(shapes) - 1, 1)
    else:
        assert priced(dataclasses.replace(job, shape=shapes[place + 1])) > memory_bytes


def test_a_smaller_card_gets_a_smaller_patch_and_the_smallest_none():
    shares = [largest_patch(JOB, size * GIB).share_of_volume for size in (4, 8, 16, 80)]
    assert shares == sorted(shares)
    assert shares[0] < shares[-1]
    assert largest_patch(JOB, CONTEXT_BYTES) is None


def test_a_volume_of_one_thin_axis_still_fills_the_card():
    thin, cube = (largest_patch(dataclasses.replace(JOB, shape=(640, 640, side)), 8 * GIB) for side in (32, 640))
    assert thin.job.shape[2] == 32
    assert thin.job.shape[0] > cube.job.shape[0]


def test_whether_the_whole_volume_fits_is_said():
    small = dataclasses.replace(JOB, shape=(64, 64, 64))
    assert largest_patch(small, 16 * GIB).holds_volume
    assert largest_patch(small, 16 * GIB).job == small
    assert not largest_patch(dataclasses.replace(JOB, shape=(640, 640, 640)), 16 * GIB).holds_volume


def test_more_patches_at_a_time_are_smaller_ones_and_a_batch_in_parts_costs_its_sums_alone():
    alone, parts, at_once = (
        largest_patch(dataclasses.replace(JOB, batch=batch, micro_batch=micro), 8 * GIB)
        for batch, micro in ((1, 1), (8, 1), (8, 8))
    )
    assert at_once.share_of_volume < parts.share_of_volume <= alone.share_of_volume
    assert (parts.job.batch, parts.job.micro, at_once.job.micro) == (8, 1, 8)
    job = dataclasses.replace(JOB, shape=(64, 64, 64))
    weights = 4 * 2**20 * 4
    assert 0 < gpu_bytes(dataclasses.replace(job, batch=8)) - gpu_bytes(job) < 2 * weights


def test_bfloat16_gets_a_larger_patch():
    light = dataclasses.replace(JOB, unet=dataclasses.replace(JOB.unet, dtype="bfloat16"))
    assert largest_patch(light, 8 * GIB).share_of_volume > largest_patch(JOB, 8 * GIB).share_of_volume


def test_the_shape_for_a_card_is_that_of_the_largest_patch():
    assert patch_for(JOB, 8 * GIB) == largest_patch(JOB, 8 * GIB).job.shape


@pytest.mark.parametrize(
    ("job", "least", "lower"),
    [
        (JOB, "32 x 32 x 32,", "--filters, or"),
        (
            dataclasses.replace(JOB, batch=4, micro_batch=2),
            "32 x 32 x 32, 2 at a time,",
            "--filters or --micro-batch, or",
        ),
        (dataclasses.replace(JOB, unet=UNetConfig(depth=3)), "8 x 8 x 8,", "--filters, or"),
    ],
)
def test_a_card_too_small_for_any_patch_is_told_what_the_smallest_takes(job, least, lower):
    with pytest.raises(ValueError, match="gpu_memory must hold a patch of at least") as raised:
        patch_for(job, GIB)
    assert re.search(rf"at least {least} which takes 1\.\d\d GiB, got 1\.00 GiB; lower {lower}", str(raised.value))
    with pytest.raises(ValueError, match=r"^gpu:3 must hold a patch"):
        patch_for(job, GIB, "gpu:3")


# --- What a step takes ---


def test_the_cpu_s_scratch_and_threads_do_not_count():
    assert gpu_bytes(dataclasses.replace(JOB, threads=64, engine="itex")) == gpu_bytes(
        dataclasses.replace(JOB, threads=1, engine="stock")
    )


def test_a_workspace_is_added_to_what_the_maps_take():
    job = dataclasses.replace(JOB, engine="stock", threads=1)
    maps = timeline(training_step(job)).peak_bytes
    one_map = 240 * 240 * 160 * 16 * 4
    assert maps + one_map <= gpu_bytes(job) - CONTEXT_BYTES <= maps + 4 * GIB
