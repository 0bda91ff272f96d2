"""What a tape has of the network: the plain layers' gradients, of the weights and the image."""

import dataclasses
import functools

import numpy as np
import pytest
import tensorflow as tf

from models.config import UNetConfig
from models.native import operations
from models.unet3d import build_unet3d

pytestmark = pytest.mark.skipif(
    not operations.available(), reason="native operations are not built"
)

GRID = (8, 8, 4)
BATCH = 2
NETWORKS = {
    "instance": UNetConfig(filters=4, depth=2),
    "batch, deep supervision": UNetConfig(filters=4, depth=3, norm="batch", deep_supervision=True),
    "residual": UNetConfig(filters=4, depth=2, channels=1, residual=True, up="upsampling"),
    "strides": UNetConfig(
        filters=4, depth=3, strides=((2, 2, 1), (1, 2, 2)), deep_supervision=True
    ),
    "no norm": UNetConfig(filters=4, depth=2, network="cicek2016", residual=True, norm="none"),
}
DRAWS = range(1, 6)
"""A value so near 0 that rounding opens or closes its ReLU changes gradients: one draw has none."""


class Case:
    """A network with weights unlike the first ones, its plain layers, and an image."""

    def __init__(self, config, draw=1, batch=BATCH):
        rng = np.random.default_rng(draw)
        self.model = build_unet3d(config, GRID, batch)
        self.layers = tf.keras.Model(self.model.input, self.model.output)
        first = self.model.get_weights()
        self.first = [weight + rng.normal(0, 0.05, weight.shape) for weight in first]
        self.image = tf.constant(rng.standard_normal((BATCH, *GRID, config.channels)), tf.float32)

    def loss(self, network, image, **training):
        """Of every logit. Statistics of a batch norm are those of `first` again."""
        self.model.set_weights(self.first)
        logits = tf.nest.flatten(network(image, **training))
        answers = [tf.sigmoid(tf.cast(each, tf.float32)) for each in logits]
        return tf.add_n([tf.reduce_mean(answer**2) for answer in answers])

    def gradients(self, network, **training):
        """Of the image and of every weight that trains."""
        with tf.GradientTape() as tape:
            tape.watch(self.image)
            loss = self.loss(network, self.image, **training)
        return tape.gradient(loss, [self.image, *self.model.trainable_weights])


@functools.cache
def case_of(network, draw=1, batch=BATCH, **changes):
    """A case that is made once; `changes` are fields of the network."""
    return Case(dataclasses.replace(NETWORKS[network], **changes), draw, batch)


@functools.cache
def of_layers(network, draw):
    """The gradients of a case's plain layers."""
    case = case_of(network, draw)
    return case.gradients(case.layers, training=True)


@pytest.fixture(scope="module", autouse=True)
def _forget_networks():
    yield
    case_of.cache_clear()
    of_layers.cache_clear()


def distance(tensors, expected):
    """The largest of them, as a share of what is expected."""
    pairs = zip(tensors, expected)
    return max(float(tf.norm(native - other) / tf.norm(other)) for native, other in pairs)


def closest(compare):
    """The least distance of a few draws, each of which must be small."""
    found = []
    for draw in DRAWS:
        found.append(compare(draw))
        assert found[-1] < 2e-2
        if found[-1] < 5e-5:
            break
    return min(found)


@pytest.mark.parametrize("network", NETWORKS)
def test_gradients_of_image_and_weights_are_those_of_the_layers(network):
    def compare(draw):
        case = case_of(network, draw)
        return distance(case.gradients(case.model, training=True), of_layers(network, draw))

    assert closest(compare) < 5e-5


def test_through_a_graph_of_an_open_batch_size_they_are_the_same():
    def compare(draw):
        case = case_of("residual", draw, batch=None, policy="lean")
        function = tf.function(lambda image: case.model(image, training=True), autograph=False)
        return distance(case.gradients(function), of_layers("residual", draw))

    assert closest(compare) < 5e-5


def test_a_persistent_tape_answers_twice_and_what_is_not_watched_has_no_gradient():
    case = case_of("instance")
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(case.image)
        loss = case.loss(case.model, case.image, training=True)
    first, again = (tape.gradient(loss, case.image) for _ in range(2))
    assert distance([again], [first]) < 1e-6
    with tf.GradientTape() as tape:
        loss = case.loss(case.model, case.image, training=True)
    assert tape.gradient(loss, case.image) is None


def test_gradients_of_an_inference_are_refused():
    case = case_of("instance")
    with pytest.raises(NotImplementedError, match="training=True"):
        case.gradients(case.model, training=False)


def test_an_image_may_come_as_keras_takes_it_and_from_another_layer():
    case = case_of("instance")
    expected = case.model(case.image)
    for image in ([case.image], {"image": case.image}, case.image.numpy().astype(float)):
        assert distance([case.model(image)], [expected]) == 0
    inputs = tf.keras.Input((*GRID, 4), BATCH)
    scaled = tf.keras.layers.Rescaling(2.0)(inputs)
    outer = tf.keras.Model(inputs, case.model(scaled))
    halved = case.image / 2
    with tf.GradientTape() as tape:
        tape.watch(halved)
        loss = case.loss(outer, halved, training=True)
    of_image = case.gradients(case.model, training=True)[0]
    assert distance([tape.gradient(loss, halved)], [2 * of_image]) < 1e-5
