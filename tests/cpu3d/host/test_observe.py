"""Which operation of the step a profiled event belongs to."""

import pytest

from cpu3d.host.observe import Event, rows
from memory_estimator.job import Job
from memory_estimator.step.timing import CONVOLUTIONS
from memory_estimator.step.training_step import training_step
from models.config import UNetConfig

PROGRAM = training_step(Job(UNetConfig(depth=2, filters=8, policy="speed"), (32, 32, 32), engine="stock", threads=2))

CONVS = [op for op in PROGRAM.ops if op.kind in CONVOLUTIONS]


def test_operations_are_matched_by_order_and_type_and_the_rest_is_loss():
    norms = [op for op in PROGRAM.ops if op.kind == "norm"]
    kinds = ["Conv3DBackpropFilterV2" if op.kind.endswith("filter_gradient") else "Conv3D" for op in CONVS]
    events = [
        *(Event(f"{kind}_3", f"_MklNative{kind}", float(number)) for number, kind in enumerate(kinds)),
        *(Event(f"act{i}/FusedBatchNormV3", "_MklNativeFusedBatchNormEx", 1.0 + i) for i in range(len(norms))),
        Event("Softplus", "Softplus", 20.0),
        Event("Adam/mul_3", "Mul", 30.0),
        Event("unet3d/encoder0_conv1/Conv3D/Cast", "Cast", 1.0),
        Event("Sum_2", "Sum", 2.0),
        Event("a", "MaxPool3D", 1.0),
        Event("b", "MaxPool3D", 1.0),
    ]
    found = rows(PROGRAM, events, 2**25)
    assert [row["seconds"] for row in found[: len(CONVS)]] == list(range(len(CONVS)))
    assert [row["group"] for row in found[:2]] == ["first_conv", "conv"]
    seconds = lambda group: [row["seconds"] for row in found if row["group"] == group]
    assert seconds("norm") == [1.0 + i for i in range(len(norms))]
    assert (seconds("loss"), seconds("update")) == ([22.0], [31.0])
    (pool,) = [row for row in found if row["group"] == "pool"]  # two for one: the group as a whole
    assert pool["seconds"] == 2.0
    assert pool["features"] == {"cached": sum(op.traffic_bytes for op in PROGRAM.ops if op.kind == "pool")}
    with pytest.raises(RuntimeError, match=rf"must run the {len(CONVS)} convolutions .* got {len(CONVS) - 1}"):
        rows(PROGRAM, events[1:], 2**25)
