"""The graph written from the layer plan is the Keras model: over every option of the network."""

import dataclasses
import itertools
import sys

import numpy as np
import onnxruntime
import pytest
import tensorflow as tf

from cpu3d.errors import InputError
from cpu3d.inference.export.command import require_onnx
from cpu3d.inference.export.formats import onnx_model, write_saved_model
from cpu3d.settings import RunConfig
from models.config import NETWORKS, NORMS, UPS, UNetConfig
from models.unet3d import build_unet3d, finest
from models.weights import network_weights

SIZE = (8, 4, 12)
REGIONS = {"WT": (1, 2), "ET": (2,)}
OPTIONS = [
    {"network": network, "norm": norm, "up": up, "residual": residual}
    for position, (network, norm, up, residual) in enumerate(
        itertools.product(NETWORKS, NORMS, UPS, (False, True))
    )
    if position % 3 == 0  # every value of every option
]
OPTIONS += [{"deep_supervision": True, "residual": True, "depth": depth} for depth in (2, 3)]
OPTIONS += [{"policy": "lean", "residual": True}]
MIXED = {"strides": ((2, 2, 1), (2, 1, 2)), "depth": 3, "residual": True}
OPTIONS += [{"up": up, **MIXED} for up in UPS]


def settings_of(mode="whole", **options):
    """(of the export, of the run's own network)"""
    unet = UNetConfig(
        **{"channels": 2, "outputs": 2, "filters": 2, "depth": 2, "policy": "speed", **options}
    )
    config = RunConfig(
        label_names={0: "background", 1: "edema", 2: "tumour"},
        region_codes=REGIONS,
        channels=("FLAIR", "T1w"),
        regions=tuple(REGIONS),
        mode=mode,
        grid=SIZE,
        unet=dataclasses.replace(unet, policy="speed"),
    )
    return config, unet


def random_weights(unet, seed=0):
    """Weights of a network that has moved away from where it began, in Keras' order."""
    rng = np.random.default_rng(seed)
    arrays = []
    for weight in network_weights(unet):
        positive = weight.name in ("gamma", "moving_variance")
        spread = 1 / np.sqrt(np.prod(weight.shape[:-1])) if weight.name == "kernel" else 0.5
        arrays.append(
            rng.uniform(0.5, 2, weight.shape) if positive else rng.normal(0, spread, weight.shape)
        )
    return [array.astype(np.float32) for array in arrays]


def raw_image(seed=1):
    """Intensities of two channels of different scale, with background in places of their own."""
    rng = np.random.default_rng(seed)
    image = rng.integers(1, 2000, (*SIZE, 2)).astype(np.float32) * [1, 0.01]
    image[rng.random(image.shape) < 0.3] = 0
    return image.astype(np.float32)


def normalised(image):
    """By the definition, in NumPy."""
    values = np.where(image == 0, np.nan, image.astype(np.float64))
    mean, std = np.nanmean(values, (0, 1, 2)), np.nanstd(values, (0, 1, 2))
    return np.nan_to_num((values - mean) / std).astype(np.float32)


def run(model, **inputs):
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return session.run(None, inputs)[0]


def answer_of_keras(config, weights, scores):
    """Logits of the Keras model at full resolution, of a normalised image (X, Y, Z, C)."""
    network = build_unet3d(config.unet, config.grid, 1)
    network.set_weights(weights)
    return finest(network(scores[None], training=False))[0].numpy()


def both(config, weights):
    """Probabilities of the raw image by the ONNX graph, and by the Keras model of the normalised
    one."""
    image = raw_image()
    expected = tf.sigmoid(answer_of_keras(config, weights, normalised(image))).numpy()
    logits = run(onnx_model(config, weights), image=image)
    assert logits.dtype == np.float32
    return tf.sigmoid(logits).numpy(), expected


@pytest.mark.parametrize(
    "options", OPTIONS, ids=lambda options: "-".join(map(str, options.values()))
)
def test_every_network_gives_the_keras_models_probabilities_of_the_raw_image(options):
    config, unet = settings_of(**options)
    answer, expected = both(
        config, random_weights(unet)
    )  # of the run's own policy: their order is the same
    assert expected.std() > 0.01
    np.testing.assert_allclose(answer, expected, atol=2e-5)


def test_windows_take_the_volumes_statistics_and_give_logits(tmp_path):
    config, unet = settings_of(mode="patch")
    weights = random_weights(unet)
    image, mean, std = raw_image(), np.float32([700, 3]), np.float32([300, 5])
    scores = np.where(image == 0, 0, (image - mean) / std)
    expected = answer_of_keras(config, weights, scores)
    answer = run(onnx_model(config, weights), image=image, mean=mean, std=std)
    np.testing.assert_allclose(answer, expected, atol=1e-4)
    write_saved_model(config, weights, tmp_path / "saved")
    loaded = tf.saved_model.load(str(tmp_path / "saved"))
    inputs = {"image": tf.constant(image), "mean": tf.constant(mean), "std": tf.constant(std)}
    np.testing.assert_allclose(
        loaded.signatures["serving_default"](**inputs)["logits"], expected, atol=1e-4
    )


def test_a_channel_that_is_empty_or_constant_counts_as_background_and_gives_no_nan():
    config, unet = settings_of()
    model = onnx_model(config, random_weights(unet))
    image = raw_image()
    empty, constant = image.copy(), image.copy()
    empty[..., 1], constant[..., 1] = 0, 5
    answer = run(model, image=empty)
    assert np.isfinite(answer).all()
    np.testing.assert_allclose(run(model, image=constant), answer, atol=1e-6)


def test_without_onnx_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(InputError, match="onnx and onnxruntime must be installed"):
        require_onnx()
