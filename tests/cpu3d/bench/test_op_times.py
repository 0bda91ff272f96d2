"""Which operation of the step a profiled event belongs to."""

import pytest

from cpu3d.bench.op_times import Event, rows
from memory_estimator.job import Job
from memory_estimator.timing import CONVOLUTIONS
from memory_estimator.training_step import training_step
from models.config import UNetConfig

CACHE = 2**25

PROGRAM = training_step(Job(UNetConfig(depth=2, filters=8), (32, 32, 32), engine="stock", threads=2))

CONVS = [op for op in PROGRAM.ops if op.kind in CONVOLUTIONS]


def event(op, seconds):
    """As stock TensorFlow names it: gradients do not say whose they are."""
    if op.kind.endswith("filter_gradient"):
        return Event("Conv3DBackpropFilterV2_3", "_MklNativeConv3DBackpropFilterV2", seconds)
    return Event("Conv3D", "_MklNativeConv3D", seconds)


def test_convolutions_are_told_apart_by_their_order():
    found = rows(PROGRAM, [event(op, float(number)) for number, op in enumerate(CONVS)], CACHE)
    assert [row["seconds"] for row in found[: len(CONVS)]] == list(range(len(CONVS)))
    assert [row["group"] for row in found[:2]] == ["first_conv", "conv"]


def test_a_step_that_ran_others_is_refused():
    events = [event(op, 1.0) for op in CONVS]
    with pytest.raises(RuntimeError, match=rf"must run the {len(CONVS)} convolutions .* got {len(CONVS) - 1}"):
        rows(PROGRAM, events[1:], CACHE)
    swapped = [*events[:-2], events[-1], events[-2]]
    if events[-1].type != events[-2].type:
        with pytest.raises(RuntimeError, match="in place"):
            rows(PROGRAM, swapped, CACHE)


def test_everything_else_is_told_by_its_type_and_the_rest_is_loss():
    norms = [op for op in PROGRAM.ops if op.kind == "norm"]
    events = [
        *(event(op, 0.0) for op in CONVS),
        *(Event(f"act{i}/FusedBatchNormV3", "_MklNativeFusedBatchNormEx", 1.0 + i) for i in range(len(norms))),
        Event("gradient_tape/act/FusedBatchNormGradV3", "_MklNativeFusedBatchNormGradV3", 10.0),
        Event("Softplus", "Softplus", 20.0),
        Event("Adam/mul_3", "Mul", 30.0),
        Event("unet3d/encoder0_conv1/Conv3D/Cast", "Cast", 1.0),
        Event("Sum_2", "Sum", 2.0),
    ]
    found = rows(PROGRAM, events, CACHE)
    seconds = lambda group: [row["seconds"] for row in found if row["group"] == group]
    assert seconds("norm") == [1.0 + i for i in range(len(norms))]
    assert seconds("norm_gradient") == [10.0]
    assert seconds("loss") == [22.0]
    assert seconds("update") == [31.0]


def test_a_group_timed_as_a_whole_counts_all_its_operations():
    events = [*(event(op, 0.0) for op in CONVS), Event("a", "MaxPool3D", 1.0), Event("b", "MaxPool3D", 1.0)]
    (pool,) = [row for row in rows(PROGRAM, events, CACHE) if row["group"] == "pool"]
    assert pool["seconds"] == 2.0
    assert pool["features"] == {"cached": sum(op.traffic_bytes for op in PROGRAM.ops if op.kind == "pool")}
