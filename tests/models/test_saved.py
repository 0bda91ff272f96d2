"""What Keras saves of a network."""

import os
import subprocess
import sys

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
    "no norm": UNetConfig(filters=4, depth=2, channels=1, outputs=1, norm="none"),
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


def test_another_program_has_the_same_answers_from_a_saved_model(image, tmp_path):
    model = network(NETWORKS["instance"])
    model.save(tmp_path / "folder")
    model.export(str(tmp_path / "module exported"))
    tf.saved_model.save(model, str(tmp_path / "module saved"))
    names = [path.name for path in tmp_path.iterdir()]
    np.save(tmp_path / "image.npy", image)
    variables = ("PATH", "HOME", "TF_USE_LEGACY_KERAS")
    environment = {name: os.environ[name] for name in variables if name in os.environ}
    command = [sys.executable, "-c", ELSEWHERE, *names]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    for name in names:
        answer = np.load(tmp_path / f"{name}.answer.npy")
        np.testing.assert_allclose(answer, model(image), rtol=1e-3, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("ending", [".keras", ".h5"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_file_is_the_network_itself_again(name, ending, image, tmp_path):
    model = network(NETWORKS[name])
    model.save(tmp_path / f"network{ending}")
    known = {"UNet3D": UNet3D} if ending == ".h5" else None
    again = tf.keras.models.load_model(tmp_path / f"network{ending}", custom_objects=known)
    assert isinstance(again, UNet3D)
    frozen = ([layer.trainable for layer in each.layers] for each in (again, model))
    assert next(frozen) == next(frozen)
    for native, other in zip(tf.nest.flatten(model(image)), tf.nest.flatten(again(image))):
        np.testing.assert_array_equal(native, other)
