"""Lifetimes and the allocator on paper: sequences worked out by hand, and a recorded one."""

import json
from pathlib import Path

import pytest

from cpu3d.host.memory import reserve
from memory_estimator.job import Job
from memory_estimator.step.allocator import MIB, Allocator, use_of_run
from memory_estimator.step.layer_step import step_of
from memory_estimator.step.timeline import (
    GRANULE_BYTES,
    Group,
    Program,
    StepOp,
    Tensor,
    timeline,
)
from models.native.library import native_operations

RECORDED = Path(__file__).parent / "data" / "allocations_96.json"


@pytest.mark.parametrize(
    ("free", "asked", "counted"),
    [
        (32, 16, 16),  # exactly twice: split
        (32, 16.5, 32),  # less than twice: handed out whole
        (512, 384, 384),  # less than twice, but 128 MiB to spare: split
        (512, 385, 512),  # 127 MiB to spare
    ],
)
def test_a_chunk_is_split_if_twice_as_large_as_asked_for_or_with_128_mib_to_spare(
    free, asked, counted
):
    allocator = Allocator()
    for name in "012":  # regions, powers of two; they double if they are large enough
        allocator.take(name, free * MIB)
    assert allocator.reserved_bytes == 4 * free * MIB
    allocator.give_back("0")
    allocator.take("a", int(asked * MIB))
    assert allocator.counted_bytes == (2 * free + counted) * MIB


def test_a_run_of_two_grids_gives_back_the_first_weights_once_the_second_are_there():
    weights = Tensor("weights", 4 * MIB, Group.WEIGHTS)
    step = StepOp("step", "pass", ("weights",), (Tensor("map", 6 * MIB, Group.TRANSIENTS),))
    program = Program(resident=(weights,), ops=(step,))
    assert use_of_run([program]).peak_bytes == 10 * MIB  # of 16 that are reserved
    # The first weights go, and 4 and 8 are free beside the second: 8 are handed out whole.
    assert use_of_run([program, program]).peak_bytes == 12 * MIB


def test_a_recorded_process_is_followed_chunk_by_chunk():
    calls = json.loads(RECORDED.read_text())["calls"]
    allocator = Allocator()
    taken = 0
    for call in calls:
        before = allocator.counted_bytes
        if isinstance(call, list):
            requested, handed_out = call
            allocator.take(str(taken), requested)
            assert allocator.counted_bytes - before == handed_out, taken
            taken += 1
        else:
            allocator.give_back(str(call))
    # As `get_memory_info` had it of that process.
    assert allocator.peak_bytes == 643_607_296


def test_a_step_s_peak_and_a_sixteenth_are_reserved_in_whole_rows(monkeypatch):
    import tensorflow as tf

    asked = []
    monkeypatch.setattr(tf.raw_ops, "Empty", lambda shape, **_: asked.append(shape))
    job = Job(shape=(32, 32, 32))
    reserve(job)
    ((rows, row_bytes),) = asked
    peak_bytes = timeline(step_of(job, native_operations().bfloat16)).peak_bytes
    assert 0 <= rows * row_bytes - peak_bytes * 17 / 16 < row_bytes


# --- When a tensor comes, when it goes, and what the allocator is asked for ---


def tensor(name, granules):
    """A tensor of so many of the allocator's smallest units."""
    return Tensor(name, granules * GRANULE_BYTES, Group.TRANSIENTS)


def test_a_tensor_goes_with_the_last_operation_that_reads_it():
    program = Program(
        (tensor("image", 1),),
        (
            StepOp("a", "conv", ("image",), (tensor("x", 10),)),
            StepOp("b", "conv", ("x",), (tensor("y", 100),)),
            StepOp("c", "join", ("x", "y"), (tensor("z", 1000),)),
            StepOp("d", "reduce", ("z",)),
        ),
    )
    line = timeline(program)
    # While c runs its inputs are there; after it x and y go.
    assert [live // GRANULE_BYTES for live in line.live_bytes] == [11, 111, 1111, 1001]
    assert line.peak_op == "c"
    assert line.peak_bytes == 1111 * GRANULE_BYTES
    assert [held.name for held in line.peak_tensors] == ["z", "y", "x", "image"]
