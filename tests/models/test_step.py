"""The pass by native operations is the same mathematics as the plain Keras layers: answers,
gradients, statistics."""

import dataclasses
import functools
import gc
import weakref
from typing import NamedTuple

import numpy as np
import pytest
import tensorflow as tf

from models.config import EPSILON, POLICIES, UNetConfig
from models.engine import layers_have_bfloat16
from models.layer_plan import LayerKind, layer_plan
from models.layers import NormActivation
from models.native import operations
from models.supervision import thinned
from models.unet3d import UNet3D, build_unet3d

pytestmark = pytest.mark.skipif(
    not operations.available(), reason="native operations are not built"
)

GRID = (16, 8, 8)

NETWORKS = {
    "batch, one level below": (UNetConfig(filters=5, channels=1, depth=2, norm="batch"), 2),
    "cicek, instance": (UNetConfig(filters=4, depth=3, network="cicek2016"), 1),
    "cicek, residual, no norm": (
        UNetConfig(filters=4, depth=3, network="cicek2016", residual=True, norm="none"),
        1,
    ),
    "strides, deep supervision": (
        UNetConfig(
            filters=4, depth=4, strides=((2, 2, 1), (1, 2, 2), (2, 2, 2)), deep_supervision=True
        ),
        2,
    ),
    "strides, residual, batch": (
        UNetConfig(
            filters=4,
            depth=3,
            strides=((2, 1, 1), (2, 2, 2)),
            residual=True,
            norm="batch",
            up="upsampling",
        ),
        2,
    ),
}
"""Every norm, both ways up, residual or not, one head or several, both networks, all axes halved
or some, a batch of 1 and of 2; three levels have a first block, one between, the deepest and two
decoders."""

DRAWS = range(2, 7)
"""Seeds of weights and volumes. One of a million values may be so near 0 that the order of a sum
opens or closes its ReLU, which changes up to 2e-3 of the gradients before it."""


class Step(NamedTuple):
    """Results of a step; the weights are after it: batch norm's statistics have moved."""

    loss: float
    answers: list  # in inference
    logits: list
    gradients: list
    weights: list


def plain(model, image, training):
    """The outputs without native operations, as on a card: of the layers, one by one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operations, "available", lambda: False)
        return model(image, training=training)


@functools.cache
def layers_and_weights(config, grid, batch):
    """A model and its first weights."""
    model = build_unet3d(config, grid, batch)
    return model, model.get_weights()


def model_of(config, grid, batch):
    """A model of a policy and its first weights; those of all policies are of the same layers."""
    model, first = layers_and_weights(dataclasses.replace(config, policy="speed"), grid, batch)
    return UNet3D(config, model.input, model.output), first


@functools.cache
def compiled(config, batch, call):
    """A model and its compiled step: image and a target for each head -> loss, answers in
    inference, logits and gradients."""
    model, first = model_of(config, GRID, batch)

    @functools.partial(tf.function, autograph=False)  # nothing in it branches on a tensor
    def function(image, targets):
        answers = tf.nest.flatten(call(model, image, False))
        with tf.GradientTape() as tape:
            logits = tf.nest.flatten(call(model, image, True))
            errors = [
                (tf.sigmoid(tf.cast(map_, tf.float32)) - target) ** 2
                for map_, target in zip(logits, targets)
            ]
            loss = tf.add_n([tf.reduce_mean(error) for error in errors])
        return loss, answers, logits, tape.gradient(loss, model.trainable_variables)

    return model, first, function


@pytest.fixture(scope="module", autouse=True)
def _forget_compiled():
    """Else they would be taken down with the interpreter, in an order that TensorFlow does not
    bear."""
    yield
    for cached in (layers_and_weights, compiled, step_of_layers, exact_step):
        cached.cache_clear()


@functools.cache
def step_of_layers(config, batch, draw=0):
    """`step` without native operations, which is the same under every policy. It is not compiled,
    as it is called once or twice."""
    return step(dataclasses.replace(config, policy="speed"), batch, draw, plain, eager=True)


def step(config, batch, draw=0, call=UNet3D.__call__, eager=False, open_size=False):
    """A training step without the update, on weights unlike the first ones, so that none is 0 or
    1."""
    model, first, function = compiled(config, None if open_size else batch, call)
    rng = np.random.default_rng(draw)
    model.set_weights([weight + rng.normal(0, 0.05, weight.shape) for weight in first])
    image = rng.standard_normal((batch, *GRID, config.channels))
    image = tf.cast(image, config.dtype)
    targets = [
        tf.constant(rng.random((batch, *head.shape[1:])) < 0.1, tf.float32)
        for head in model.outputs
    ]
    loss, answers, logits, gradients = (function.python_function if eager else function)(
        image, targets
    )
    answers, logits = (
        [tf.cast(map_, tf.float32).numpy() for map_ in maps] for maps in (answers, logits)
    )
    return Step(
        float(loss),
        answers,
        logits,
        [gradient.numpy() for gradient in gradients],
        model.get_weights(),
    )


def distances(arrays, expected):
    """The distance of each array, as a share of it."""
    assert [array.shape for array in arrays] == [array.shape for array in expected]
    return [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(arrays, expected)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("network", NETWORKS)
def test_answers_gradients_and_moved_statistics_are_those_of_the_layers(network, policy):
    config, batch = NETWORKS[network]
    config = dataclasses.replace(config, policy=policy)
    apart = []
    for draw in DRAWS:
        native = step(config, batch, draw)
        of_layers = step_of_layers(config, batch, draw)
        assert native.loss == pytest.approx(of_layers.loss, rel=1e-6)
        assert max(distances(native.logits, of_layers.logits)) < 1e-5
        assert max(distances(native.answers, of_layers.answers)) < 1e-5
        for weight, expected in zip(native.weights, of_layers.weights):
            np.testing.assert_allclose(weight, expected, rtol=0, atol=1e-6)
        apart.append(max(distances(native.gradients, of_layers.gradients)))
        assert apart[-1] < 1e-2
        if apart[-1] < 2e-5:
            return
    pytest.fail(
        f"gradients must be within 2e-5 of the layers' in one draw of {len(DRAWS)}, got {apart}"
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_in_bfloat16_gradients_are_about_as_far_from_float32s_as_those_of_the_layers(policy):
    if not layers_have_bfloat16():
        pytest.skip("needs layers that compute in bfloat16")
    config, batch = NETWORKS["cicek, instance"]
    config = dataclasses.replace(config, policy=policy)
    half = dataclasses.replace(config, dtype="bfloat16")
    steps = step(config, batch), step_of_layers(half, batch), step(half, batch)
    exact, of_layers, native = (
        np.concatenate([g.ravel() for g in result.gradients]) for result in steps
    )
    (rounding,) = distances([of_layers], [exact])
    assert distances([native], [exact])[0] < 1.5 * rounding


@pytest.mark.parametrize("network", ["strides, deep supervision", "strides, residual, batch"])
def test_a_tape_that_is_asked_twice_answers_the_same(network):
    model = build_unet3d(NETWORKS[network][0], GRID, 1)
    with tf.GradientTape(persistent=True) as tape:
        loss = tf.add_n(
            [
                tf.reduce_sum(output**2)
                for output in tf.nest.flatten(model(tf.ones((1, *GRID, 4)), True))
            ]
        )
    first, again = (tape.gradient(loss, model.trainable_variables) for _ in range(2))
    assert (
        max(
            distances(
                [gradient.numpy() for gradient in again], [gradient.numpy() for gradient in first]
            )
        )
        < 1e-6
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_a_frozen_batch_norm_takes_and_keeps_its_moving_statistics(policy):
    model = build_unet3d(UNetConfig(filters=4, depth=2, norm="batch", policy=policy), (8, 8, 8), 1)
    rng = np.random.default_rng(0)
    model.set_weights(
        [weight + rng.uniform(0, 0.1, weight.shape) for weight in model.get_weights()]
    )
    first = model.get_weights()
    image = tf.constant(rng.standard_normal((1, 8, 8, 8, 4)), tf.float32)
    for layer in model.layers:
        if isinstance(layer, NormActivation):
            layer.trainable = False
    gradients = []
    for call in (UNet3D.__call__, plain):
        with tf.GradientTape() as tape:
            logits = call(model, image, True)
            loss = tf.reduce_mean(tf.sigmoid(logits) ** 2)
        assert distances([logits], [model(image)])[0] < 1e-5
        for weight, before in zip(model.get_weights(), first):
            np.testing.assert_array_equal(weight, before)
        gradients.append(tape.gradient(loss, model.trainable_variables))
        assert len(gradients[-1]) == 9  # kernels, and the head's bias
    assert max(distances(*gradients)) < 1e-4


@pytest.mark.parametrize("policy", POLICIES)
def test_without_a_compiled_step_and_with_an_open_batch_size_it_is_the_same(policy):
    config, batch = NETWORKS["batch, one level below"]
    config = dataclasses.replace(config, policy=policy)
    expected = step(config, batch)
    for more in ({"eager": True}, {"open_size": True}):
        result = step(config, batch, **more)
        assert (
            max(distances(result.logits + result.gradients, expected.logits + expected.gradients))
            < 1e-5
        )


def test_a_weight_that_keras_updates_at_once_does_not_change_the_gradients_of_others():
    changes = []
    rng = np.random.default_rng(0)
    image = rng.standard_normal((2, *GRID, 4)).astype(np.float32)
    target = (rng.random((2, *GRID, 3)) < 0.1).astype(np.float32)
    for eager in (True, False):
        model = build_unet3d(UNetConfig(filters=4, depth=2), GRID)
        first = model.get_weights()
        loss = tf.keras.losses.BinaryCrossentropy(from_logits=True)
        model.compile(tf.keras.optimizers.SGD(1.0), loss, run_eagerly=eager)
        model.fit(image, target, batch_size=2, verbose=0)
        changes.append([after - before for after, before in zip(model.get_weights(), first)])
    assert max(distances(*changes)) < 1e-3


@pytest.mark.parametrize("policy", POLICIES)
def test_a_dropped_network_goes_with_its_graph(policy):
    def build():
        model = build_unet3d(UNetConfig(filters=2, depth=2, policy=policy), (8, 8, 8), 1)
        predict = tf.function(lambda image: model(image, training=False))
        graph = predict.get_concrete_function(tf.TensorSpec((1, 8, 8, 8, 4))).graph
        return weakref.ref(model), weakref.ref(graph)

    held = build()
    gc.collect()
    assert [reference() for reference in held] == [None, None]


# --- Against float64 ---


def convolved(x, kernel, bias=0.0):
    return tf.nn.conv3d(x, kernel, (1,) * 5, "SAME") + bias


def normed(x, gamma, beta):
    """Instance norm."""
    mean, variance = tf.nn.moments(x, (1, 2, 3), keepdims=True)
    return (x - mean) * tf.math.rsqrt(variance + EPSILON) * gamma + beta


def pooled(x, strides):
    """The first of the largest values of a window: its gradient goes there alone."""
    for axis, stride in reversed(list(enumerate(strides, 1))):
        shape = [*x.shape[:axis], x.shape[axis] // stride, stride, *x.shape[axis + 1 :]]
        first, *others = tf.unstack(tf.reshape(x, shape), axis=axis + 1)
        for other in others:
            # Sums in another order are no other values.
            first = tf.where(other > first + 1e-9, other, first)
        x = first
    return x


def sampled_up(x, kernel):
    """The transposed convolution whose taps do not overlap."""
    grid = [stride * side for stride, side in zip(kernel.shape[:3], x.shape[1:4])]
    made = tf.einsum("nxyzi,abcoi->nxaybzco", x, kernel)
    return tf.reshape(made, (x.shape[0], *grid, kernel.shape[3]))


def repeated(x, strides):
    for axis, stride in enumerate(strides, 1):
        x = tf.repeat(x, stride, axis)
    return x


EXACT = {
    "conv": lambda op, inputs, weights: convolved(*inputs, *weights),
    "head": lambda op, inputs, weights: convolved(*inputs, *weights),
    "norm": lambda op, inputs, weights: normed(*inputs, *weights),
    "norm_act": lambda op, inputs, weights: tf.nn.relu(normed(*inputs, *weights)),
    "act": lambda op, inputs, weights: tf.nn.relu(*inputs),
    "concat": lambda op, inputs, weights: tf.concat(inputs, -1),
    "shortcut": lambda op, inputs, weights: inputs[0] + convolved(inputs[1], *weights),
    "pool": lambda op, inputs, weights: pooled(*inputs, op.strides),
    "upsample": lambda op, inputs, weights: repeated(*inputs, op.strides),
    "up_conv": lambda op, inputs, weights: sampled_up(*inputs, *weights),
}
"""Kind of a layer -> its output by definition."""


def squared_errors(heads, target):
    """Of the probabilities of each head, from every 2nd, 4th ... voxel of the target."""
    return tf.add_n(
        [tf.reduce_mean((tf.sigmoid(head) - thinned(target, head)) ** 2) for head in heads]
    )


def exact_gradients(model, image, target):
    """Gradients of `squared_errors` in float64, of an instance-norm U-Net layer by layer."""
    weights = {}
    for layer in model.layers:
        weights[layer.name] = [tf.constant(w, tf.float64) for w in layer.get_weights()]
    grid = tuple(image.shape[1:4])
    with tf.GradientTape() as tape:
        tape.watch(weights)
        maps = {"image": tf.constant(image, tf.float64)}
        heads = []
        for op in layer_plan(model.unet, grid)[1:]:
            inputs = [maps[name] for name in op.inputs]
            maps[op.name] = EXACT[op.kind.value](op, inputs, weights[op.name])
            if op.kind is LayerKind.HEAD:
                heads.append(maps[op.name])
        loss = squared_errors(heads, tf.constant(target, tf.float64))
    gradients = tape.gradient(loss, weights)
    return [gradient.numpy() for layer in model.layers for gradient in gradients[layer.name]]


MIXED = ((2, 2, 1), (2, 2, 2), (1, 2, 2))
EXACTLY = {
    "all axes": ({"depth": 3}, (32, 24, 16)),
    # 20 is no multiple of 8
    "strides, upsampling, deep supervision": (
        {"depth": 4, "strides": MIXED, "up": "upsampling", "deep_supervision": True},
        (16, 24, 20),
    ),
    "strides, cicek, residual": (
        {"depth": 3, "strides": MIXED[:2], "network": "cicek2016", "residual": True},
        (16, 24, 18),
    ),
    "five slices": ({"depth": 3, "strides": ((2, 2, 1), (2, 2, 1))}, (32, 24, 5)),
}
"""Name -> network, grid."""


@functools.cache
def exact_step(network, draw):
    """Image, target and exact gradients of a draw, which are the same under every policy. Most of
    the image is zero, as outside a brain: there one ReLU is that of many voxels alike."""
    options, grid = EXACTLY[network]
    axes = np.meshgrid(*(np.linspace(-1, 1, size) for size in grid), indexing="ij")
    inside = (sum(axis**2 for axis in axes) < 0.8)[None, ..., None]
    rng = np.random.default_rng(draw)
    image = rng.standard_normal((1, *grid, 4)) * inside
    target = rng.random((1, *grid, 3)) < 0.1
    model, _ = model_of(UNetConfig(filters=4, **options), grid, 1)
    exact = exact_gradients(model, image.astype(np.float32), target.astype(float))
    return image, target, exact


@pytest.mark.parametrize("computed_by", [*POLICIES, "layers"])
@pytest.mark.parametrize("network", EXACTLY)
def test_gradients_are_close_to_float64s(network, computed_by):
    """Of native operations under a policy, or of TensorFlow's layers."""
    options, grid = EXACTLY[network]
    policy = "speed" if computed_by == "layers" else computed_by
    model, _ = model_of(UNetConfig(filters=4, policy=policy, **options), grid, 1)
    call = plain if computed_by == "layers" else UNet3D.__call__
    apart = []

    @functools.partial(tf.function, autograph=False)
    def gradients(image, target):
        with tf.GradientTape() as tape:
            loss = squared_errors(tf.nest.flatten(call(model, image, training=True)), target)
        return tape.gradient(loss, model.trainable_variables)

    for draw in DRAWS:
        image, target, exact = exact_step(network, draw)
        result = gradients(*(tf.constant(array, tf.float32) for array in (image, target)))
        apart.append(max(distances([gradient.numpy() for gradient in result], exact)))
        assert apart[-1] < 1e-2
        if apart[-1] < 1e-5:
            return
    pytest.fail(
        f"gradients must be within 1e-5 of float64's in one draw of {len(DRAWS)}, got {apart}"
    )
