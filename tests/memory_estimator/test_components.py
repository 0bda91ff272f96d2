"""The bill of a timeline made by hand, and its exact lines against live Keras variables."""

import pytest
import tensorflow as tf

from memory_estimator.components import bill
from memory_estimator.job import Job
from memory_estimator.liveness import Moment, Timeline
from memory_estimator.program import Tensor
from memory_estimator.training_step import training_step
from models.config import POLICIES, UNetConfig
from models.unet3d import build_unet3d

PEAK = (
    Tensor("encoder0_conv1", 4096, "activations, level 0"),
    Tensor("decoder0_act2/gradient", 2048, "transients"),
    Tensor("encoder1_conv1", 1000, "activations, level 1"),
    Tensor("kernel/m", 700, "optimizer slots"),
    Tensor("kernel/v", 700, "optimizer slots"),
    Tensor("kernel", 512, "weights"),
    Tensor("kernel/reordered", 256, "weights, reordered"),
)


def lines(**around):
    around = {"overhead_bytes": 0, "hidden_bytes": 0, "baseline_bytes": 0, "baseline": "measured: here", **around}
    return bill(Timeline((Moment("op", 0, 0),), 0, PEAK), **around)


def test_tensors_are_added_up_by_cause_in_the_order_of_a_bill():
    assert [(line.name, line.bytes) for line in lines()] == [
        ("weights", 512),
        ("weights, reordered", 256),
        ("optimizer slots", 2 * 768),  # rounded up to 256 each, as the allocator does
        ("activations, level 0", 4096),
        ("activations, level 1", 1024),
        ("transients", 2048),
    ]


def test_what_lies_around_the_tensors_comes_last_and_nothing_is_left_out():
    found = lines(overhead_bytes=300, hidden_bytes=20, baseline_bytes=1)
    assert [line.bytes for line in found[-3:]] == [20, 300, 1]
    assert found[-1].source == "measured: here"
    assert sum(line.bytes for line in found) == 512 + 1536 + 4096 + 1024 + 2048 + 256 + 321


def test_scratch_counts_where_it_is_written():
    scratch = (Tensor("conv/scratch0", 4096, "scratch", touched=((0, 100), (2048, 2304))),)
    line = Timeline((Moment("op", 4096, 0),), 0, scratch)
    (only,) = bill(line, overhead_bytes=0, hidden_bytes=0, baseline_bytes=0, baseline="")
    assert only.bytes == 356


def test_transients_are_named():
    (line,) = [line for line in lines() if line.name == "transients"]
    assert "decoder0_act2/gradient" in line.source


def test_a_group_that_nobody_declared_is_refused():
    peak = (Tensor("surprise", 256, "weights, of another kind"),)
    with pytest.raises(ValueError, match=r"group must be one of weights, .*got 'weights, of another kind'; declare it"):
        bill(Timeline((Moment("op", 0, 0),), 0, peak), overhead_bytes=0, hidden_bytes=0, baseline_bytes=0, baseline="")


@pytest.mark.parametrize("policy", POLICIES)
def test_every_group_of_a_step_is_declared(policy):
    unet = UNetConfig(filters=4, depth=3, dtype="bfloat16", deep_supervision=True, residual=True, policy=policy)
    program = training_step(Job(unet, (8, 8, 8), batch=2, averaged=True))
    made = [tensor for op in program.ops for tensor in (*op.writes, *op.scratch, *op.keeps)]
    line = Timeline((Moment("op", 0, 0),), 0, (*program.resident, *made))
    found = {line.name for line in bill(line, overhead_bytes=0, hidden_bytes=0, baseline_bytes=0, baseline="")}
    assert {"gradient sums", "activations, level 0"} <= found
    assert ("weights, parts" in found) == (policy != "speed")


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("norm", ["instance", "batch", "none"])
def test_weights_and_slots_are_those_of_keras(norm, optimizer):
    job = Job(UNetConfig(filters=4, depth=3, norm=norm, dtype="bfloat16"), (8, 8, 8), optimizer=optimizer)
    model = build_unet3d(job.unet, job.shape, 1)
    keras = tf.keras.optimizers.Adam() if optimizer == "adam" else tf.keras.optimizers.SGD(momentum=0.9)
    keras.build(model.trainable_variables)
    slots = [v for v in keras.variables if v.shape.rank]
    size = lambda variables: sum(int(tf.size(v)) * v.dtype.size for v in variables)
    held = lambda group: sum(tensor.bytes for tensor in training_step(job).resident if tensor.group == group)
    assert held("weights") == size(model.weights)
    assert held("optimizer slots") == size(slots)
