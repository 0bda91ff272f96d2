"""What Keras saves of a network."""

import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from models.config import UNetConfig
from models.unet3d import UNet3D, build_unet3d

GRID = (8, 4, 4)
NETWORKS = {
    "instance": UNetConfig(filters=4, depth=2, channels=1),
    "batch": UNetConfig(filters=4, depth=3, channels=1, norm="batch", deep_supervision=True),
    "strides": UNetConfig(filters=4, depth=2, channels=1, norm="none", strides=((2, 1, 2),)),
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
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", ELSEWHERE, *names]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    for name in names:
        answer = np.load(tmp_path / f"{name}.answer.npy")
        np.testing.assert_allclose(answer, model(image), rtol=1e-3, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("config", NETWORKS.values(), ids=NETWORKS)
def test_a_file_is_the_network_itself_again(config, image, tmp_path):
    model = network(config)
    model.save(tmp_path / "network.keras")
    again = tf.keras.models.load_model(tmp_path / "network.keras")
    assert isinstance(again, UNet3D)
    assert not again.get_layer("encoder0_conv1").trainable
    assert again.get_layer("encoder0_conv2").trainable
    tf.nest.map_structure(np.testing.assert_array_equal, model(image), again(image))
