"""What native operations take besides maps, as their library answers: as a process grows, in sum,
for any CPU, and at most where no library can be asked."""

import dataclasses

import pytest
from hypothesis import given, settings

from memory_estimator.host import read_host
from memory_estimator.step import scratch
from memory_estimator.step.scratch import busy_share, scratch_bound, scratch_bytes, scratch_of
from memory_estimator.step.timeline import NativeOperation, StepOp
from memory_estimator.step.training_step import training_step
from models.native import build
from models.native.instruction_sets import INSTRUCTION_SETS
from tests.memory_estimator.test_training_step import JOBS
from tests.models.native.reference import LIBRARY
from tests.test_imports import run_python

L2_BYTES = read_host().l2_bytes


@pytest.fixture(scope="module")
def path(needs_native):
    return LIBRARY or build.existing().kernels


def step_op(name, kind, grid, channels, over=None):
    native = NativeOperation(kind, 1, grid, channels, 16, 4)
    return StepOp(name, kind, ("map",), takes_over=over, native=native)


@pytest.mark.usefixtures("path")
def test_each_buffer_is_as_large_as_the_operation_that_takes_most_of_it():
    wide = step_op("wide", "convolve", (2, 1, 16), 640)
    flat = step_op("flat", "convolve", (8, 8, 16), 16)
    of_wide, of_flat = (scratch_of(op.native, 8, "avx2", 2**20) for op in (wide, flat))
    assert of_wide.threads == 2  # as many as there are rows
    assert of_wide.kept_bytes > of_flat.kept_bytes
    together = scratch_bytes([wide, flat], 8, "avx2", 2**20)
    whole = 2 * of_wide.kept_bytes + 6 * of_flat.kept_bytes + of_wide.passing_bytes
    assert whole < together <= whole + 9 * (64 + 4096)  # a buffer's first line, in whole pages
    alone = scratch_bytes([flat], 8, "avx2", 2**20)
    assert scratch_bytes([flat, wide, StepOp("engine's", "pass")], 8, "avx2", 2**20) == together
    narrow = step_op("narrow", "convolve", (2, 1, 16), 8)
    assert scratch_bytes([narrow, flat], 8, "avx2", 2**20) == alone
    in_place = step_op("in place", "convolve", (8, 8, 16), 16, over="map")
    assert scratch_bytes([in_place], 8, "avx2", 2**20) > alone
    assert scratch_bytes([StepOp("engine's", "pass")], 8, "avx2", 2**20) <= 4096


CONVOLUTION = NativeOperation("convolve", 1, (8, 4, 16), 16, 16, 4)
ORTHOGONAL = NativeOperation("orthogonal", 1, (1728, 1, 1), 0, 16, 4)
WIDE = dataclasses.replace(ORTHOGONAL, outputs=128)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(
    ("op", "instructions", "threads", "answer"),
    [
        # Of Winograd's rows: a ring of 3 * (4 + 2) + 1 rows of 49 cache lines, two formed rows,
        # sums of 64 tiles, pointers; and filters, and a position's sums.
        (CONVOLUTION, "avx512", 1, (1, 19 * 3136 + 2304 + 24576 + 64, 55296 + 384, 1)),
        # Of tiles, whatever this CPU is: the sums of 8, a ring of 4 * (4 + 2) rows; the same.
        (
            dataclasses.replace(CONVOLUTION, value_bytes=2),
            "amx",
            1,
            (1, 8192 + 24 * 576, 18944 + 384, 1),
        ),
        # A matrix in panels and five square ones. Of 16 columns a block column of 32: 4 blocks of
        # 8 x 32, for one thread of eight.
        (ORTHOGONAL, "amx", 8, (0, 0, 4 * (1728 * 32 + 5 * 32**2), 1 / 8)),
        # Eight of 16: 144 blocks of 4 x 16, 18 for each thread.
        (WIDE, "avx2", 8, (0, 0, 4 * (1728 * 128 + 5 * 128**2), 1)),
    ],
)
def test_any_instruction_set_answers_on_any_cpu(op, instructions, threads, answer):
    assert scratch_of(op, threads, instructions, 2**20) == pytest.approx(answer)


@given(JOBS)
@settings(max_examples=60, deadline=None)
def test_where_no_library_can_be_asked_scratch_is_bounded(path, job):
    program = training_step(job)
    for name, each in INSTRUCTION_SETS.items():
        if not each.bfloat16_alone or job.unet.dtype == "bfloat16":
            for l2_bytes in (2**19, 2**21):
                asked = scratch_bytes(program.ops, job.threads, name, l2_bytes)
                bound = scratch_bound(program.ops, job.threads, l2_bytes)
                assert asked <= bound <= 12 * asked + job.threads * 2**23


def test_a_host_without_a_library_has_the_bound(monkeypatch):
    monkeypatch.setattr(build, "existing", lambda: None)
    scratch._library.cache_clear()
    scratch_of.cache_clear()
    flat = step_op("flat", "convolve", (8, 8, 16), 16)
    try:
        assert scratch_bytes([flat], 8, "amx", 2**20) == scratch_bound([flat], 8, 2**20)
        assert busy_share(flat, 8, "amx") == 1
    finally:
        scratch._library.cache_clear()
        scratch_of.cache_clear()


def test_a_process_that_computes_grows_by_what_is_predicted_and_not_with_the_operations(path):
    """In a fresh process, besides the maps: many sizes, the largest neither first nor last."""
    script = f"""
import numpy as np
from memory_estimator.step.timeline import NativeOperation, StepOp
from memory_estimator.step.scratch import scratch_bytes
from tests.models.native.reference import *
library, threads = load({str(path)!r}), 8

def most_resident():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

ops, calls, arrays = [], [], []
for x, channels in ((4, 64), (16, 16), (12, 96), (8, 128), (20, 48), (6, 80)):
    shape, filters = (1, x, 8, 16), np.ones((3, 3, 3, channels, channels), np.float32)
    maps = [np.ones((*shape, channels), np.float32) for _ in range(2)]
    arrays += [filters, *maps]
    about = ("float32", shape, threads, maps[:1], channels)
    calls.append(operation("convolve", *about, filters=filters, map=maps[1]))
    calls.append(operation("filter_gradient", *about, maps[1:], filter_gradient=filters))
    for kind in ("convolve", "filter_gradient"):
        native = NativeOperation(kind, 1, shape[1:], channels, channels, 4)
        ops.append(StepOp(kind, kind, ("map",), native=native))
before = most_resident()
for call in 3 * calls:
    assert library.native_run(b"avx2", call) == 0
grown, predicted = most_resident() - before, scratch_bytes(ops, threads, "avx2", {L2_BYTES})
assert 0.7 * predicted < grown < 1.02 * predicted + 2**20, (grown / 2**20, predicted / 2**20)
"""
    ended = run_python(script)
    assert ended.returncode == 0, ended.stderr
