"""Without a GPU it can still be known whether TensorFlow has a GPU's kernel for everything that a patch step does."""

import pytest
import tensorflow as tf
from tensorflow.python.framework import kernels

from cpu3d.data.finish import Finish
from cpu3d.settings import RunConfig
from cpu3d.training.learner import Learner
from models.config import UNetConfig

GRID = (16, 16, 16)


def has_gpu_kernel(op):
    """Whether a kernel for GPUs, or for any device, is registered for the operation's types."""
    for kernel in kernels.get_registered_kernels_for_op(op.type).kernel:
        if kernel.device_type in ("GPU", "DEFAULT") and all(allows(op, rule) for rule in kernel.constraint):
            return True
    return False


def allows(op, rule):
    allowed = rule.allowed_values.list.type
    given = op.get_attr(rule.name) if rule.name in op.node_def.attr else ()
    given = given if isinstance(given, (list, tuple)) else [given]
    return not allowed or all(tf.as_dtype(one).as_datatype_enum in allowed for one in given)


def without_kernel(function):
    return sorted({op.type for op in function.graph.get_operations() if not has_gpu_kernel(op)})


pytestmark = pytest.mark.skipif(not tf.test.is_built_with_cuda(), reason="this TensorFlow is built without CUDA")


def test_every_operation_of_a_patch_step_has_a_gpu_kernel():
    unet = UNetConfig(filters=4, depth=3, dtype="bfloat16", policy="speed")
    learner = Learner(RunConfig(mode="patch", grid=GRID, unet=unet, device="gpu:0"))
    image, target = tf.TensorSpec((1, *GRID, 4), "bfloat16"), tf.TensorSpec((1, *GRID, 3), tf.uint8)
    assert without_kernel(learner._step.get_concrete_function(image, target)) == []
    assert without_kernel(learner._predict.get_concrete_function(image)) == []


@pytest.mark.parametrize("resamples", [False, True])
def test_every_operation_that_finishes_a_patch_has_a_gpu_kernel(resamples):
    raw = {
        "bits": tf.TensorSpec((2, *GRID, 4), tf.int16),
        "label": tf.TensorSpec((2, *GRID), tf.uint8),
        "is_half": tf.TensorSpec((2,), tf.bool),
        "scale": tf.TensorSpec((2, 4)),
        "shift": tf.TensorSpec((2, 4)),
        "flips": tf.TensorSpec((2, 3), tf.bool),
        "planes": tf.TensorSpec((2, 2, 4)),
    }
    finish = Finish(((1, 2, 3), (3,)), "bfloat16", resamples)
    assert without_kernel(tf.function(finish).get_concrete_function(raw)) == []
