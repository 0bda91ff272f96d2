"""Muon: what it makes of a kernel, one step by hand, as an optimizer of Keras; Adam and SGD beside
Keras' own."""

import math

import numpy as np
import pytest
import tensorflow as tf

from cpu3d.training.optimizers import RuleOptimizer, orthogonal
from tests.models.native import reference


def noise(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def orthogonal_by_hand(kernel):
    return reference.orthogonal(kernel.reshape(-1, kernel.shape[-1])).reshape(kernel.shape)


@pytest.mark.parametrize("shape", [(3, 3, 3, 4, 16), (3, 3, 3, 1, 64)], ids=["tall", "wide"])
def test_what_is_made_orthogonal_has_singular_values_near_one_times_its_scale(shape):
    matrix = orthogonal(tf.constant(noise(*shape))).numpy()
    assert matrix.shape == shape
    rows = math.prod(shape[:-1])
    columns = shape[-1]
    values = np.linalg.svd(matrix.reshape(rows, columns), compute_uv=False)
    scale = math.sqrt(max(1.0, rows / columns))
    assert values.min() >= 0.68 * scale
    assert values.max() <= 1.2 * scale
    np.testing.assert_allclose(matrix, orthogonal_by_hand(noise(*shape)), atol=2e-3 * scale)


def test_of_a_gradient_of_zeros_nothing_is_made():
    assert not orthogonal(tf.zeros((3, 3, 3, 2, 4))).numpy().any()


def stepped(optimizer):
    """Variables after two steps along made-up gradients."""
    variables = [tf.Variable(noise(*shape)) for shape in ((3, 3, 3, 2, 4), (1, 1, 1, 4, 3), (4,))]
    optimizer.build(variables)
    take = tf.function(lambda *gradients: optimizer.apply_gradients(zip(gradients, variables)))
    for step in (1, 2):
        take(*(tf.constant(noise(*v.shape, seed=step)) for v in variables))
    return variables


def test_adam_and_sgd_move_weights_as_keras_does():
    by_keras = tf.keras.optimizers.SGD(0.01, momentum=0.9, nesterov=True)
    sgd = RuleOptimizer("sgd", 0.01, momentum=0.9)
    adam = RuleOptimizer("adam", 0.01)
    for own, other in ((sgd, by_keras), (adam, tf.keras.optimizers.Adam(0.01))):
        for weight, expected in zip(stepped(own), stepped(other)):
            np.testing.assert_allclose(weight, expected, rtol=1e-5, atol=1e-6)


def test_two_steps_are_those_worked_out_by_hand(tmp_path):
    muon = RuleOptimizer("muon", 0.1, momentum=0.9)
    weights = stepped(muon)
    tf.train.Checkpoint(optimizer=muon).write(tmp_path / "state")  # refuses what is of a graph
    adam = stepped(tf.keras.optimizers.Adam(0.15))
    kernel = noise(3, 3, 3, 2, 4).astype(np.float64)
    mean = 0.0
    for step in (1, 2):
        gradient = noise(3, 3, 3, 2, 4, seed=step)
        mean = 0.9 * mean + gradient
        kernel -= 0.1 * orthogonal_by_hand(gradient + 0.9 * mean)
    np.testing.assert_allclose(weights[0], kernel, atol=1e-3)
    for weight, other in zip(weights[1:], adam[1:]):
        np.testing.assert_allclose(weight, other, atol=1e-5)
