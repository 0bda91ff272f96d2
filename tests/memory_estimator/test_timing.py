"""Seconds of a step: sums worked out by hand, and how they must grow."""

import dataclasses

import pytest

from memory_estimator.calibration import shipped_constants
from memory_estimator.job import Job
from memory_estimator.step.timeline import NativeOperation, Program, StepOp
from memory_estimator.step.timing import op_seconds, step_busy_share

MIB = 2**20

CONSTANTS = dataclasses.replace(
    shipped_constants(""),
    instructions="",
    threads=2,
    saturating_threads=4,
    costs={
        "float32": {
            "convolve": {"work": 1e-12, "work, values": 2e-9},
            "project": {"work": 1e-9, "traffic": 1e-10},
            "pass": {"traffic": 3e-9},
            "every_op": {"seconds": 1e-5},
        }
    },
)


def seconds(*ops, threads=2, constants=CONSTANTS):
    return sum(op_seconds(Program((), ops), constants, Job(threads=threads)))


def convolution(inputs, outputs, voxels=1000):
    flops = 54 * voxels * inputs * outputs
    return StepOp(
        "c", "convolve", flops=flops, traffic_bytes=MIB, in_channels=inputs, out_channels=outputs
    )


def test_a_convolution_takes_its_work_in_whole_blocks_its_values_and_the_overhead():
    assert seconds(convolution(32, 16)) == pytest.approx(54e3 * 512 * 1e-12 + 48e3 * 2e-9 + 1e-5)
    # 3 channels are read as 4, and as many written as 16.
    assert seconds(convolution(3, 3)) == pytest.approx(54e3 * 64 * 1e-12 + 20e3 * 2e-9 + 1e-5)


@pytest.mark.parametrize(
    ("threads", "work_s", "traffic_s"),
    [(1, 2, 2), (2, 1, 1), (4, 1 / 2, 1 / 2), (64, 1 / 32, 1 / 2)],
)
def test_work_divides_by_the_threads_and_traffic_until_the_memory_is_busy(
    threads, work_s, traffic_s
):
    op = StepOp("p", "project", flops=10**6, traffic_bytes=MIB)
    by_hand = 1e-3 * work_s + 1e-10 * MIB * traffic_s + 1e-5
    assert seconds(op, threads=threads) == pytest.approx(by_hand)


@pytest.mark.usefixtures("needs_native")
@pytest.mark.parametrize(("threads", "work_s"), [(1, 1.5), (2, 1), (8, 0.5)])
def test_an_operation_takes_as_long_as_the_thread_with_most_of_its_rows(threads, work_s):
    """Three rows: on two threads one has two of them, on eight each has one at most."""
    native = NativeOperation("project", 1, (1, 3, 8), 16, 3, 4)
    op = StepOp("p", "project", native=native, flops=10**6)
    constants = dataclasses.replace(CONSTANTS, instructions="avx2")
    assert seconds(op, threads=threads, constants=constants) == pytest.approx(1e-3 * work_s + 1e-5)
    share = step_busy_share(Program((), (op,)), constants, Job(threads=threads))
    assert share == pytest.approx(1.5 / (threads * work_s))
