"""What the allocator counts over the time of one step."""

import pytest

from memory_estimator.allocator import counted_by_op, use
from memory_estimator.job import Job
from memory_estimator.program import Program, StepOp, Tensor
from memory_estimator.training_step import training_step
from models.config import POLICIES, UNetConfig

MIB = 2**20


def tensor(name, mib):
    return Tensor(name, mib * MIB, "")


def test_each_operation_shows_the_most_that_it_finds_live():
    program = Program(
        resident=(tensor("weights", 8),),
        ops=(
            StepOp("a", "conv", reads=("weights",), writes=(tensor("x", 16),), scratch=(tensor("t", 4),)),
            StepOp("look", "pointwise", reads=("x",)),
            StepOp("b", "conv", reads=("x",), writes=(tensor("y", 1),)),
            StepOp("c", "conv", reads=("y",), writes=(tensor("z", 2),)),
        ),
    )
    # b finds x and y beside the weights; x is given back after it.
    assert counted_by_op(program) == (28 * MIB, 24 * MIB, 25 * MIB, 11 * MIB)


@pytest.mark.parametrize("policy", POLICIES)
def test_its_highest_point_is_the_allocators_peak(policy):
    program = training_step(Job(UNetConfig(filters=8, depth=3, policy=policy), (32, 32, 32)))
    curve = counted_by_op(program)
    assert len(curve) == len(program.ops)
    assert max(curve) == use(program).peak_bytes
