"""Seconds of a step: sums worked out by hand, and how they must grow."""

import dataclasses

import pytest

from memory_estimator.calibration import HostConstants
from memory_estimator.job import Job
from memory_estimator.step.timeline import NativeOperation, Program, StepOp
from memory_estimator.step.timing import op_seconds
from models.config import UNetConfig

MIB = 2**20

CONSTANTS = HostConstants(
    name="by hand",
    instructions="",
    cpu="",
    origin="assumed",
    origins={},
    record="none",
    date="2026-01-01",
    threads=2,
    saturating_threads=4,
    baseline_bytes={"stock": 1000},
    op_bytes={"stock": 10},
    l2_bytes=2**20,
    costs={
        "float32": {
            "convolve": {"work": 1e-12, "work, values": 2e-9},
            "pass": {"traffic": 3e-9},
            "every_op": {"seconds": 1e-5},
        }
    },
)

JOB = Job(
    UNetConfig(depth=2, policy="speed", dtype="float32"), (32, 32, 32), engine="stock", threads=2
)


def seconds(*ops, threads=2, constants=CONSTANTS):
    return sum(op_seconds(Program((), ops), constants, dataclasses.replace(JOB, threads=threads)))


def convolution(inputs, outputs, voxels=1000):
    flops = 54 * voxels * inputs * outputs
    return StepOp(
        "c", "convolve", flops=flops, traffic_bytes=MIB, in_channels=inputs, out_channels=outputs
    )


def test_a_convolution_takes_its_work_in_whole_blocks_its_values_and_the_overhead():
    assert seconds(convolution(32, 16)) == pytest.approx(54e3 * 512 * 1e-12 + 48e3 * 2e-9 + 1e-5)
    # 3 channels are read as 4, and as many written as 16.
    assert seconds(convolution(3, 3)) == pytest.approx(54e3 * 64 * 1e-12 + 20e3 * 2e-9 + 1e-5)


def test_work_divides_by_the_threads_and_traffic_until_the_memory_is_busy():
    without = {"float32": {**CONSTANTS.costs["float32"], "every_op": {"seconds": 0.0}}}
    at = lambda op, threads: seconds(
        op, threads=threads, constants=dataclasses.replace(CONSTANTS, costs=without)
    )
    work = convolution(16, 16)
    traffic = StepOp("n", "pass", traffic_bytes=2 * MIB)
    assert at(work, 2) / at(work, 16) == pytest.approx(8)
    assert at(traffic, 2) / at(traffic, 4) == pytest.approx(2)
    assert at(traffic, 4) == at(traffic, 64)


def test_an_operation_takes_as_long_as_the_thread_with_most_of_its_rows():
    """Three rows: on two threads one has two of them, on eight each has one at most."""
    native = NativeOperation("project", 1, (1, 3, 8), 16, 3, 4)
    work = StepOp("p", "project", ("map",), native=native, flops=10**6)
    costs = {"project": {"work": 1e-9, "traffic": 0.0}, "every_op": {"seconds": 0.0}}
    by_own = dataclasses.replace(CONSTANTS, instructions="avx2", costs={"float32": costs})
    assert seconds(work, threads=2, constants=by_own) == pytest.approx(1e-3)
    assert seconds(work, threads=8, constants=by_own) == pytest.approx(0.5e-3)
    assert seconds(work, threads=1, constants=by_own) == pytest.approx(1.5e-3)
