"""The graph written from the layer plan is the Keras model: over every option of the network."""

import dataclasses
import itertools

import numpy as np
import onnxruntime
import pytest
import tensorflow as tf

from cpu3d.errors import InputError
from cpu3d.inference.export.contract import contract
from cpu3d.inference.export.formats import onnx_model, write_saved_model
from cpu3d.inference.export.network import load_network
from cpu3d.inference.postprocessing.rules import RAW
from cpu3d.settings import RunConfig
from models.config import NETWORKS, NORMS, UPS, UNetConfig
from models.unet3d import build_unet3d, finest
from models.weights import network_weights
from tests.models.test_plain import mixing  # noqa: F401

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
OPTIONS += [{"policy": "lean", "residual": True, "average": (2, 1, 2)}]
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


def random_weights(unet):
    """Weights of a network that has moved away from where it began, in Keras' order."""
    rng = np.random.default_rng(0)
    arrays = []
    for weight in network_weights(unet):
        spread = 1 / np.sqrt(np.prod(weight.shape[:-1])) if weight.name == "kernel" else 0.5
        array = rng.normal(0, spread, weight.shape)
        if weight.name in ("gamma", "moving_variance"):
            array = 0.5 + np.abs(array)
        arrays.append(array.astype(np.float32))
    return arrays


def raw_image():
    """Intensities of two channels of different scale, with background in places of their own."""
    rng = np.random.default_rng(1)
    image = rng.integers(1, 2000, (*SIZE, 2)).astype(np.float32) * [1, 0.01]
    image[rng.random(image.shape) < 0.3] = 0
    return image.astype(np.float32)


def normalised(image):
    """By the definition, in NumPy."""
    values = np.where(image == 0, np.nan, image.astype(np.float64))
    mean, std = np.nanmean(values, (0, 1, 2)), np.nanstd(values, (0, 1, 2))
    return np.nan_to_num((values - mean) / std).astype(np.float32)


def run(model, **inputs):
    content = model.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    return session.run(None, inputs)[0]


def answer_of_keras(config, weights, scores):
    """Logits of the Keras model at full resolution, of a normalised image (X, Y, Z, C)."""
    network = build_unet3d(config.unet, config.grid, 1)
    network.set_weights(weights)
    return finest(network(scores[None], training=False))[0].numpy()


@pytest.mark.parametrize(
    "options", OPTIONS, ids=lambda options: "-".join(map(str, options.values()))
)
def test_every_network_gives_the_keras_models_probabilities_of_the_raw_image(options):
    config, unet = settings_of(**options)
    weights = random_weights(unet)  # of the run's own policy: their order is the same
    image = raw_image()
    expected = tf.sigmoid(answer_of_keras(config, weights, normalised(image))).numpy()
    logits = run(onnx_model(config, weights), image=image)
    assert logits.dtype == np.float32
    assert expected.std() > 0.01
    np.testing.assert_allclose(tf.sigmoid(logits), expected, atol=2e-5)


@pytest.fixture
def check_windows():
    """Check that an answer to a window, with the statistics of its volume, is that of Keras."""
    config, unet = settings_of(mode="patch")
    weights = random_weights(unet)
    image, mean, std = raw_image(), np.float32([700, 3]), np.float32([300, 5])
    scores = np.where(image == 0, 0, (image - mean) / std)

    def check(answer):
        found = answer(config, weights, image=image, mean=mean, std=std)
        expected = answer_of_keras(config, weights, scores)
        np.testing.assert_allclose(found, expected, atol=1e-4)

    return check


def by_onnx(config, weights, **inputs):
    return run(onnx_model(config, weights), **inputs)


@pytest.fixture
def by_saved_model(tmp_path):
    def answer(config, weights, **inputs):
        write_saved_model(config, weights, tmp_path / "saved")
        return load_network(tmp_path / "saved", "savedmodel")(**inputs)

    return answer


def test_windows_take_the_volumes_statistics_and_give_logits(check_windows, by_saved_model):
    check_windows(by_onnx)
    check_windows(by_saved_model)


def test_a_program_is_told_how_to_slide_windows_and_to_mirror_them():
    config, _ = settings_of(mode="patch", depth=3)
    told = {
        "window": SIZE,
        "overlap": 0.5,
        "sigma": 0.125,
        "multiples": (4, 4, 4),
        "crop_margin": None,
        "mirrored_axes": (0, 1, 2),
        "axes": "RAS",
        "threshold": 0.5,
        "regions": REGIONS,
        "label_codes": {"0": "background", "1": "edema", "2": "tumour"},
        "paint": [[{"output": 0, "code": 1}], [{"output": 1, "code": 2}]],
    }
    assert told.items() <= contract(config, "onnx", RAW).items()
    on_crops = dataclasses.replace(settings_of()[0], whole_every=2)
    assert "mean" in contract(on_crops, "onnx", RAW)["inputs"]


@pytest.mark.usefixtures("mixing")
def test_an_operation_that_tensorflow_alone_computes_is_in_a_saved_model_and_refused_in_onnx(
    check_windows, by_saved_model
):
    with pytest.raises(InputError, match="--format must be savedmodel for layer decoder0_mix"):
        check_windows(by_onnx)
    check_windows(by_saved_model)


def test_a_channel_that_is_empty_or_constant_counts_as_background_and_gives_no_nan(by_saved_model):
    config, unet = settings_of()
    weights = random_weights(unet)
    image = raw_image()
    for answer in (by_onnx, by_saved_model):
        image[..., 1] = 0
        empty = answer(config, weights, image=image)
        assert np.isfinite(empty).all()
        image[..., 1] = 5
        np.testing.assert_allclose(answer(config, weights, image=image), empty, atol=1e-6)
