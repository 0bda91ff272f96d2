"""Slabs are a way to compute: a map cut along X gives what the whole map gives."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from models.config import UNetConfig
from models.finest_level import finest_level
from models.slabs import Cut, convolve, filter_gradient, input_gradient, made, near
from models.unet3d import build_unet3d

SAMPLES, PLANES = 2, 10


def drawn(*shape):
    return tf.constant(np.random.default_rng(len(shape)).standard_normal(shape), tf.float32)


@pytest.mark.parametrize("height", [2, 4, 10])
def test_convolutions_of_slabs_are_those_of_the_whole(height):
    x, kernel, upstream = drawn(SAMPLES, PLANES, 6, 5, 3), drawn(3, 3, 3, 3, 4), drawn(SAMPLES, PLANES, 6, 5, 4)
    with tf.GradientTape() as tape:
        tape.watch([x, kernel])
        y = tf.nn.conv3d(x, kernel, (1, 1, 1, 1, 1), "SAME")
    expected = (y, *tape.gradient(y, [x, kernel], upstream))

    cut = Cut(SAMPLES, PLANES, height)
    xs, ups = cut.of(x), cut.of(upstream)
    outputs, at_x, of_kernel = [], [], []
    for index in range(len(cut.pieces)):
        of_x, of_up = (made(near(cut, index, slabs), tf.identity) for slabs in (xs, ups))
        outputs.append(convolve(of_x, kernel))
        at_x.append(input_gradient(of_up, kernel))
        of_kernel.append(filter_gradient(of_x, ups[index], kernel))
    for found, one in zip((cut.join(outputs), cut.join(at_x), tf.add_n(of_kernel)), expected):
        np.testing.assert_allclose(found, one, rtol=1e-4, atol=1e-4)


def test_the_last_slab_may_be_lower():
    cut = Cut(2, 10, 4)
    assert cut.pieces == [(0, 0, 4), (0, 4, 8), (0, 8, 10), (1, 0, 4), (1, 4, 8), (1, 8, 10)]
    x = drawn(2, 10, 2, 2, 1)
    np.testing.assert_array_equal(cut.join(cut.of(x)), x)


def test_slabs_of_any_height_answer_alike():
    """Bits of sums apart."""
    config = UNetConfig(filters=4, depth=2, policy="lean")
    image, answers = drawn(1, 12, 4, 4, 4), []
    for height in (2, 8, 12):
        inputs = tf.keras.Input((12, 4, 4, 4), 1)
        down, up = finest_level(config, (12, 4, 4), 1, height)
        pooled, held = down(inputs)
        below = tf.keras.layers.Conv3D(8, 1, kernel_initializer="ones")(pooled)
        answers.append(tf.keras.Model(inputs, up({**held, "below": below}))(image))
    for answer in answers[1:]:
        np.testing.assert_allclose(answer, answers[0], rtol=1e-5, atol=1e-6)


def test_a_norm_of_a_large_mean_keeps_its_digits():
    """Sums of squares lose what the mean is larger than the deviation; an image far from zero is such a case."""
    config = UNetConfig(filters=4, depth=2)
    image = drawn(1, 16, 8, 8, 4) + 30
    answers = []
    for policy in ("speed", "lean"):
        model = build_unet3d(dataclasses.replace(config, policy=policy), (16, 8, 8), 1)
        answers.append(model(image))
    np.testing.assert_allclose(answers[1], answers[0], rtol=1e-3, atol=1e-3)
