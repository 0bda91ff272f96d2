"""Lifetimes by hand: when a tensor comes, when it goes, and what the allocator is asked for."""

import pytest

from memory_estimator.step.program import GRANULE_BYTES, Program, StepOp, Tensor, requests, timeline


def tensor(name, granules):
    """Of so many of the allocator's smallest units."""
    return Tensor(name, granules * GRANULE_BYTES, "")


def live(program):
    return [live // GRANULE_BYTES for live in timeline(program).live_bytes]


def calls(program, steps=1):
    return [(request.op, request.name, request.bytes // GRANULE_BYTES) for request in requests(program, steps)]


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
    # While c runs its inputs are there; after it x and y go.
    assert live(program) == [11, 111, 1111, 1001]
    line = timeline(program)
    assert line.peak_op == "c"
    assert line.peak_bytes == 1111 * GRANULE_BYTES
    assert [held.name for held in line.peak_tensors] == ["z", "y", "x", "image"]


def test_scratch_lives_during_its_operation_alone_and_goes_first():
    scratch = (tensor("s", 20), tensor("t", 40))
    ops = (StepOp("a", "conv", writes=(tensor("x", 1),), scratch=scratch), StepOp("b", "reduce", ("x",)))
    program = Program((), ops)
    assert live(program) == [61, 1]
    assert calls(program)[1:] == [("a", "s", 20), ("a", "t", 40), ("a", "t", -40), ("a", "s", -20), ("b", "x", -1)]


def test_a_result_in_place_takes_nothing_and_is_given_back_under_the_name_it_was_taken_under():
    program = Program(
        (),
        (
            StepOp("a", "conv", writes=(tensor("x", 8),)),
            StepOp("b", "pointwise", ("x",), (tensor("y", 8),), takes_over="x"),
            StepOp("c", "pointwise", ("y",), (tensor("z", 8), tensor("mask", 1)), takes_over="y"),
            StepOp("d", "reduce", ("z", "mask")),
        ),
    )
    # The first of what is written lies where the input lay; anything beside it is new.
    assert live(program) == [8, 8, 9, 9]
    assert calls(program) == [("a", "x", 8), ("c", "mask", 1), ("d", "x", -8), ("d", "mask", -1)]


def test_what_an_operation_keeps_is_taken_in_the_first_step_and_never_given_back():
    ops = (StepOp("a", "conv", writes=(tensor("x", 2),), keeps=(tensor("k", 30),)), StepOp("b", "reduce"))
    program = Program((), ops)
    # On paper a step is one from the second on: the copy is there from its beginning.
    assert live(program) == [32, 30]
    first = [("a", "x", 2), ("a", "k", 30), ("a", "x", -2)]
    assert calls(program, 2) == first + [("a", "x", 2), ("a", "x", -2)]


def test_reading_what_is_not_there_is_refused():
    with pytest.raises(ValueError, match="b must read tensors that are live, got x; correct the program"):
        timeline(Program((), (StepOp("a", "conv"), StepOp("b", "reduce", ("x",)))))
