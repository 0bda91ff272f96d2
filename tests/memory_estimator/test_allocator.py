"""The allocator on paper: sequences worked out by hand, a recorded one, and what must hold for any."""

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memory_estimator.step.allocator import MIB, SMALL_BYTES, Allocator, NoRegionError, fits_regions, region_bytes, use
from memory_estimator.step.program import Program, StepOp, Tensor, rounded
from models.config import UNetConfig

RECORDED = Path(__file__).parent / "data" / "allocations_96.json"


def taking(*mib, limit_mib=None):
    """An allocator that has taken so many MiB, under the names "0", "1" ..."""
    allocator = Allocator(limit_mib and limit_mib * MIB)
    for name, size in enumerate(mib):
        allocator.take(str(name), int(size * MIB))
    return allocator


@pytest.mark.parametrize(
    ("free", "asked", "counted"),
    [
        (32, 16, 16),  # exactly twice: split
        (32, 16.5, 32),  # less than twice: handed out whole
        (512, 384, 384),  # less than twice, but 128 MiB to spare: split
        (512, 385, 512),  # 127 MiB to spare
    ],
)
def test_a_chunk_is_split_if_twice_as_large_as_asked_for_or_with_128_mib_to_spare(free, asked, counted):
    allocator = taking(free)  # one region, a power of two
    allocator.give_back("0")
    allocator.take("a", int(asked * MIB))
    assert allocator.counted_bytes == counted * MIB


def test_a_recorded_process_is_followed_chunk_by_chunk():
    calls = json.loads(RECORDED.read_text())["calls"]
    allocator, taken = Allocator(), 0
    for call in calls:
        before = allocator.counted_bytes
        if isinstance(call, list):
            requested, handed_out = call
            allocator.take(str(taken), requested)
            assert allocator.counted_bytes - before == handed_out, f"take {taken} of {requested} bytes"
            taken += 1
        else:
            allocator.give_back(str(call))
    assert taken > 1000
    # What `get_memory_info` said of that process.
    assert allocator.peak_bytes == 643_607_296


CALLS = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40 * MIB)), max_size=60)
"""(name, bytes): a name that is held is given back, another one is taken."""


@given(CALLS)
@settings(max_examples=150)
def test_no_two_tensors_overlap_and_no_tensor_is_short_and_all_that_is_given_back_is_one_again(calls):
    allocator, held = Allocator(), {}
    for name, size in calls:
        if name in held:
            allocator.give_back(name)
            del held[name]
        else:
            allocator.take(name, size)
            held[name] = size
        chunks = {each: allocator._by_name[each] for each, size in held.items() if size >= SMALL_BYTES}
        spans = sorted((chunk.start, chunk.start + chunk.size) for chunk in chunks.values())
        assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:]))
        assert all(chunk.size >= rounded(held[each]) for each, chunk in chunks.items())
        assert sum(rounded(held[each]) for each in chunks) <= allocator.counted_bytes <= allocator.reserved_bytes
        assert allocator.counted_bytes == sum(chunk.size for chunk in chunks.values())
    for name in held:
        allocator.give_back(name)
    assert allocator.counted_bytes == 0
    # Every region is one free chunk again: what had no neighbour left is handed out whole.
    assert sum(chunk.size for chunk in allocator._chunks.values()) == allocator.reserved_bytes


def test_a_tensor_that_no_region_holds_fails_although_there_is_as_much_free():
    taking(1, 2, 1, limit_mib=5)  # then a byte more than 1 MiB is free in neither region, 2 MiB in both together
    for sizes in ((1, 2, 2), (1, 4)):
        with pytest.raises(NoRegionError):
            taking(*sizes, limit_mib=5)


def test_a_program_fits_the_regions_it_takes_without_a_limit_and_not_those_a_tensor_is_too_large_for():
    x, y, z = (Tensor(name, 3 * MIB, "transients") for name in "xyz")
    program = Program((x,), (StepOp("a", "pool", ("x",), (y,)), StepOp("b", "pool", ("y",), (z,))))
    reserved = use(program).reserved_bytes
    assert fits_regions(program, reserved)
    assert not fits_regions(program, 8 * MIB)  # three times 3 MiB


SHAPE = (64, 64, 64)
UNET = UNetConfig(channels=1, outputs=1, filters=1, depth=2, norm="none", policy="balanced")
# The image 1 map, the encoder 4, the pool and the bottom's four (1 + 4 * 2) / 8, the decoder's up-sampled 1, join 2 and
# block 4, the head 1: 14.125 MiB, and a few KiB of weights.


def mib(shape=SHAPE, micro=1, host_bytes=None, **changes):
    size = region_bytes(dataclasses.replace(UNET, **changes), shape, micro, host_bytes)
    assert size % MIB == 0
    return size // MIB


def test_it_is_the_first_power_of_two_that_holds_the_share_of_all_maps_and_no_larger_than_the_host():
    # 1.15 of 14.125; 0.9 of them is 12.7.
    assert mib() == 32
    assert mib(policy="lean") == 16
    assert mib(policy="lean", dtype="bfloat16") == 8
    assert [mib(policy="lean", micro=micro) for micro in (2, 3)] == [32, 64]
    assert [mib(host_bytes=16 * MIB - less) for less in (0, 1)] == [16, 8]
    assert mib(policy="speed") == 0
