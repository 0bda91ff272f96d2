"""What Keras saves of a network is loaded by a program that has TensorFlow but not this project."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Dict, NamedTuple

import numpy as np
import pytest
import tensorflow as tf

from models.config import UNetConfig
from models.unet3d import UNet3D, build_unet3d

pytestmark = pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5")

GRID = (8, 4, 4)
NETWORKS = {
    "instance": UNetConfig(filters=4, depth=2, channels=1, outputs=1),
    "residual": UNetConfig(
        filters=4,
        depth=2,
        channels=1,
        norm="batch",
        residual=True,
        deep_supervision=True,
    ),
    "strides": UNetConfig(filters=4, depth=2, channels=1, outputs=1, strides=((2, 1, 2),)),
}
ELSEWHERE = """
import json, sys
import numpy as np
import tensorflow as tf

image = np.load("image.npy")
for name in sys.argv[1:]:
    if name.startswith("module"):
        loaded = tf.saved_model.load(name)
        answer = getattr(loaded, "serve", loaded)(image)
    else:
        loaded = tf.keras.models.load_model(name)
        assert not loaded.get_layer("encoder0_conv1").trainable, name
        answer = loaded(image)
    np.save(name + ".answer.npy", np.asarray(tf.nest.flatten(answer)[0]))
"""


def network(config):
    """One with weights unlike the first ones and a frozen layer, compiled."""
    model = build_unet3d(config, GRID, 1)
    rng = np.random.default_rng(0)
    first = model.get_weights()
    model.set_weights([weight + rng.uniform(0, 0.1, weight.shape) for weight in first])
    model.get_layer("encoder0_conv1").trainable = False
    model.compile("adam", "mse")
    return model


@pytest.fixture(scope="module")
def image():
    return np.random.default_rng(1).standard_normal((1, *GRID, 1)).astype("float32")


class Saved(NamedTuple):
    """The networks, each in a file of both kinds in a folder."""

    folder: Path
    models: Dict[str, UNet3D]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    models = {name: network(config) for name, config in NETWORKS.items()}
    for name, model in models.items():
        for ending in (".keras", ".h5"):
            model.save(folder / (name + ending))
    return Saved(folder, models)


def test_another_program_has_the_same_answers_from_every_kind_of_file(image, saved):
    folder = saved.folder
    expected = {path.name: saved.models[path.stem] for path in folder.iterdir()}
    plain = saved.models["instance"]
    plain.save(folder / "folder")
    plain.export(str(folder / "module exported"))
    tf.saved_model.save(plain, str(folder / "module saved"))
    expected.update(dict.fromkeys(("folder", "module exported", "module saved"), plain))
    np.save(folder / "image.npy", image)
    variables = ("PATH", "HOME", "TF_USE_LEGACY_KERAS")
    environment = {name: os.environ[name] for name in variables if name in os.environ}
    command = [sys.executable, "-c", ELSEWHERE, *expected]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert len(expected) == 2 * len(NETWORKS) + 3
    for name, model in expected.items():
        answer = np.load(folder / f"{name}.answer.npy")
        own = tf.nest.flatten(model(image))[0]
        np.testing.assert_allclose(answer, own, rtol=1e-3, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("name", NETWORKS)
def test_here_a_file_is_the_network_itself_again(name, image, saved):
    model = saved.models[name]
    for ending, more in ((".keras", None), (".h5", {"Functional": UNet3D})):
        again = tf.keras.models.load_model(saved.folder / (name + ending), custom_objects=more)
        assert isinstance(again, UNet3D)
        frozen = ([layer.trainable for layer in each.layers] for each in (again, model))
        assert next(frozen) == next(frozen)
        for own, other in zip(tf.nest.flatten(model(image)), tf.nest.flatten(again(image))):
            np.testing.assert_array_equal(own, other)


def test_a_norm_that_keras_lacks_is_saved_for_this_project(image, tmp_path):
    model = network(UNetConfig(filters=4, depth=2, channels=1, outputs=1, norm="none"))
    model.save(tmp_path / "network.keras")
    again = tf.keras.models.load_model(tmp_path / "network.keras")
    np.testing.assert_array_equal(again(image), model(image))


def test_a_configuration_of_an_earlier_version_is_read_with_its_names(image, tmp_path):
    """By them Keras finds the weights in a file, also of a network inside another model."""
    own = network(NETWORKS["residual"])
    config = own.get_config()
    before = {name: config[name] for name in ("unet", "shape", "batch_size", "frozen")}
    model = UNet3D.from_config(before)
    names = {type(layer).__name__ for layer in (model, *model.layers)}
    assert {"UNet3D", "NormActivation", "ShortcutSum"} <= names
    model.set_weights(own.get_weights())
    entry = tf.keras.Input((*GRID, 1), 1)
    tf.keras.Model(entry, model(entry)).save(tmp_path / "outer.keras")
    again = tf.keras.models.load_model(tmp_path / "outer.keras")
    np.testing.assert_allclose(again(image)[0], own(image)[0], rtol=1e-3, atol=1e-4)
