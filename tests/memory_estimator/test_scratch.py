"""What own operations take besides maps: as the C functions say, in sum, and as a process grows."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memory_estimator.host import read_host
from memory_estimator.step.scratch import OWN_KINDS, scratch_bytes, scratch_of
from memory_estimator.step.timeline import OwnOperation, StepOp
from models.native.build import build
from models.strides import STRIDES
from tests.models.native import reference
from tests.models.native.reference import DTYPES, KERNELS, LIBRARY, operation

L2_BYTES = read_host().l2_bytes
WIDTHS = (1, 3, 4, 16, 20, 33, 256, 2048)


@pytest.fixture(scope="module")
def path():
    try:
        return LIBRARY or build().kernels
    except OSError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def library(path):
    return reference.load(path)


def operations(kind, dtype):
    """Own operations of a kind, with threads, and whether they write over their map."""
    widths = st.tuples(st.sampled_from(WIDTHS), st.sampled_from(WIDTHS))
    grids = st.tuples(st.integers(1, 70), st.integers(1, 300), st.integers(1, 300))
    value_bytes = np.dtype(DTYPES[dtype][1]).itemsize
    made = st.builds(
        lambda batch, grid, widths, strides: OwnOperation(
            kind, batch, grid, *widths, value_bytes, strides
        ),
        st.integers(1, 3),
        grids,
        widths,
        st.sampled_from(STRIDES),
    )
    return st.tuples(made, st.sampled_from((1, 2, 3, 8, 56)), st.booleans())


@pytest.mark.parametrize("kind", OWN_KINDS)
@pytest.mark.parametrize(("instructions", "dtype"), KERNELS)
def test_every_operation_takes_what_the_c_function_says(library, kind, instructions, dtype):
    if not library.native_kernels(instructions.encode(), DTYPES[dtype][0]):
        pytest.skip(f"needs a CPU with {instructions}")
    if kind == "orthogonal" and dtype != "float32":
        pytest.skip("a kernel is float32")

    @given(operations(kind, dtype))
    @settings(max_examples=25, deadline=None, derandomize=True)
    def agree(drawn):
        op, threads, in_place = drawn
        in_place = in_place and kind in ("convolve", "input_gradient") and op.channels == op.outputs
        maps = [np.zeros((1, op.channels)), np.zeros((1, op.outputs))]
        arrays = {"map": maps[0] if in_place else maps[1], "scratch": np.zeros(3, np.uint64)}
        if kind.startswith(("project", "up_")) and kind != "up_filter_gradient":
            arrays["filters"] = maps[1]
        if kind.endswith("filter_gradient") or kind in ("project_gradient", "project_sums"):
            arrays["filter_gradient"] = maps[1]
        about = (kind, dtype, (op.batch, *op.grid), threads)
        call = operation(*about, maps[:1], op.outputs, maps[1:], op.strides, **arrays)
        assert library.native_run(instructions.encode(), call) == 0
        assert tuple(arrays["scratch"]) == scratch_of(op, threads, instructions, L2_BYTES, in_place)

    agree()


def step_op(name, kind, grid, channels, over=None):
    own = OwnOperation(kind, 1, grid, channels, 16, 4)
    return StepOp(name, kind, ("map",), takes_over=over, own=own)


def test_each_buffer_is_as_large_as_the_operation_that_takes_most_of_it():
    wide = step_op("wide", "convolve", (2, 1, 16), 640)
    flat = step_op("flat", "convolve", (8, 8, 16), 16)
    of_wide, of_flat = (scratch_of(op.own, 8, "avx2", 2**20) for op in (wide, flat))
    assert of_wide.threads == 2  # as many as there are rows
    assert of_flat.threads == 8
    assert of_wide.kept_bytes > of_flat.kept_bytes
    assert of_wide.passing_bytes > of_flat.passing_bytes
    together = scratch_bytes([wide, flat], 8, "avx2", 2**20)
    whole = 2 * of_wide.kept_bytes + 6 * of_flat.kept_bytes + of_wide.passing_bytes
    assert whole < together <= whole + 9 * (64 + 4096)  # a buffer's first line, in whole pages
    assert scratch_bytes([flat, wide, StepOp("engine's", "pass")], 8, "avx2", 2**20) == together
    in_place = step_op("in place", "convolve", (8, 8, 16), 16, over="map")
    assert scratch_bytes([in_place], 8, "avx2", 2**20) > scratch_bytes([flat], 8, "avx2", 2**20)
    assert scratch_bytes([StepOp("engine's", "pass")], 8, "avx2", 2**20) <= 4096


def test_a_process_that_computes_grows_by_what_is_predicted_and_not_with_the_operations(path):
    """In a fresh process, besides the maps: many sizes, the largest neither first nor last."""
    script = f"""
import numpy as np
from memory_estimator.step.timeline import OwnOperation, StepOp
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
        own = OwnOperation(kind, 1, shape[1:], channels, channels, 4)
        ops.append(StepOp(kind, kind, ("map",), own=own))
before = most_resident()
for call in 3 * calls:
    assert library.native_run(b"avx2", call) == 0
grown, predicted = most_resident() - before, scratch_bytes(ops, threads, "avx2", {L2_BYTES})
assert 0.7 * predicted < grown < 1.02 * predicted + 2**20, (grown / 2**20, predicted / 2**20)
"""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, cwd=root, timeout=120, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
