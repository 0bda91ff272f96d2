"""The patch for a GPU: it fits, the next larger one does not, and a smaller card gets a smaller one."""

import dataclasses

from memory_estimator.gpu import CONTEXT_BYTES, gpu_bytes, largest_patch
from memory_estimator.job import Job
from memory_estimator.liveness import timeline
from memory_estimator.training_step import training_step
from models.config import UNetConfig

JOB = Job(UNetConfig(dtype="float32", policy="speed"), (240, 240, 160), threads=2)


def test_the_patch_fits_and_one_longer_side_does_not():
    memory_bytes = 8 * 2**30
    patch = largest_patch(JOB, memory_bytes)
    assert patch.bytes == gpu_bytes(patch.job) <= memory_bytes
    x, y, z = patch.job.shape
    longer = (x, y, z + 16) if z < x else (x, y + 16, z) if y < x else (x + 16, y, z)
    assert gpu_bytes(dataclasses.replace(patch.job, shape=longer)) > memory_bytes


def test_a_smaller_card_gets_a_smaller_patch_and_the_smallest_none():
    shares = [largest_patch(JOB, size * 2**30).share_of_volume for size in (4, 8, 16, 80)]
    assert shares == sorted(shares)
    assert shares[0] < shares[-1]
    assert largest_patch(JOB, CONTEXT_BYTES) is None


def test_whether_the_whole_volume_fits_is_said():
    small = dataclasses.replace(JOB, shape=(64, 64, 64))
    assert largest_patch(small, 16 * 2**30).holds_volume
    assert not largest_patch(dataclasses.replace(JOB, shape=(640, 640, 640)), 16 * 2**30).holds_volume


def test_the_largest_patch_is_that_of_a_batch_of_one():
    assert largest_patch(dataclasses.replace(JOB, batch=16), 8 * 2**30) == largest_patch(JOB, 8 * 2**30)


def test_the_cpu_s_scratch_and_threads_do_not_count():
    assert gpu_bytes(dataclasses.replace(JOB, threads=64, engine="itex")) == gpu_bytes(
        dataclasses.replace(JOB, threads=1, engine="stock")
    )


def test_a_workspace_is_added_to_what_the_maps_take():
    job = dataclasses.replace(JOB, engine="stock", threads=1)
    maps = timeline(training_step(job)).peak_bytes
    one_map = 240 * 240 * 160 * 16 * 4
    assert maps + one_map <= gpu_bytes(job) - CONTEXT_BYTES <= maps + 4 * 2**30
