"""Regions under a limit, by hand: the last one is cut down, and no tensor lies in two."""

import pytest

from memory_estimator.allocator import Allocator, NoRegionError, fits_regions, use
from memory_estimator.program import Program, StepOp, Tensor

MIB = 2**20


def taken(limit_mib, *sizes_mib):
    allocator = Allocator(limit_mib * MIB)
    for number, size in enumerate(sizes_mib):
        allocator.take(str(number), size * MIB)
    return allocator


def test_the_last_region_is_what_is_left_of_the_limit():
    assert taken(5, 1, 3).reserved_bytes == 5 * MIB  # 2 and, instead of 4, 3
    assert taken(6, 1, 3).reserved_bytes == 6 * MIB
    assert taken(7, 1, 3).reserved_bytes == 6 * MIB


def test_a_tensor_that_no_region_holds_fails_although_there_is_as_much_free():
    allocator = taken(5, 1, 2)  # a byte more than 1 MiB is free in neither region, 2 MiB in both together
    allocator.take("fits", MIB)
    with pytest.raises(NoRegionError):
        taken(5, 1, 2, 2)
    with pytest.raises(NoRegionError):
        taken(5, 1, 4)


def test_what_was_given_back_is_taken_again_under_the_limit():
    allocator = taken(5, 1, 3)
    allocator.give_back("1")
    allocator.take("again", 3 * MIB)
    assert allocator.reserved_bytes == 5 * MIB


def test_a_program_fits_the_regions_it_takes_without_a_limit_and_not_those_a_tensor_is_too_large_for():
    x, y, z = (Tensor(name, 3 * MIB, "transients") for name in "xyz")
    program = Program((x,), (StepOp("a", "pool", ("x",), (y,)), StepOp("b", "pool", ("y",), (z,))))
    reserved = use(program).reserved_bytes
    assert fits_regions(program, reserved)
    assert not fits_regions(program, 8 * MIB)  # three times 3 MiB
