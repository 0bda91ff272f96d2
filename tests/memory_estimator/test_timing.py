"""Seconds of a step: sums worked out by hand, and how they must grow."""

import dataclasses

import pytest

from memory_estimator.calibration import HostConstants
from memory_estimator.job import Job
from memory_estimator.step.program import Program, StepOp, Tensor
from memory_estimator.step.timing import op_seconds
from models.config import UNetConfig

MIB = 2**20

CONSTANTS = HostConstants(
    name="by hand",
    cpu="",
    origin="assumed",
    origins={},
    record="none",
    date="2026-01-01",
    threads=2,
    cache_bytes=MIB,
    saturating_threads=4,
    baseline_bytes={"stock": 1000},
    op_bytes={"stock": 10},
    costs={
        "stock": {
            "float32": {
                "conv": {"work": 1e-12, "work/out": 2e-12, "kernel": 1e-9},
                "join": {"cached": 1e-10, "traffic": 2e-10},
                "norm": {"cached": 1e-9, "traffic": 3e-9},
                "every_op": {"seconds": 1e-5},
            }
        }
    },
)

JOB = Job(UNetConfig(depth=2, policy="speed"), (32, 32, 32), engine="stock", threads=2)


def convolution(**changes):
    more = {"flops": 10**9, "traffic_bytes": 3 * MIB, "in_channels": 32, "out_channels": 32, **changes}
    return StepOp("a_conv", "conv", ("x", "a_conv/kernel"), (Tensor("y", MIB, "m"),), **more)


def program(*ops):
    return Program((Tensor("x", MIB, "m"), Tensor("a_conv/kernel", 5000, "weights")), ops)


def seconds(*ops, job=JOB, constants=CONSTANTS):
    return sum(op_seconds(program(*ops), constants, job))


def test_a_convolution_takes_its_work_its_kernel_and_the_overhead():
    # Two vectors are written: 1e9 * (1e-12 + 2e-12 / 2) + 5000 * 1e-9 + 1e-5.
    assert seconds(convolution()) == pytest.approx(2e-3 + 5e-6 + 1e-5)


def test_work_divides_by_the_threads_and_traffic_until_the_memory_is_busy():
    without = dataclasses.replace(
        CONSTANTS, costs={"stock": {"float32": {**CONSTANTS.speeds("stock", "float32"), "every_op": {"seconds": 0.0}}}}
    )
    at = lambda op, threads: seconds(op, job=dataclasses.replace(JOB, threads=threads), constants=without)
    work = StepOp("c", "conv", ("x",), (Tensor("y", 1, "m"),), flops=10**9, in_channels=32, out_channels=32)
    traffic = StepOp("n", "norm", ("x",), traffic_bytes=2 * MIB)
    assert at(work, 2) / at(work, 16) == pytest.approx(8)
    assert at(traffic, 2) / at(traffic, 4) == pytest.approx(2)
    assert at(traffic, 4) == at(traffic, 64)
