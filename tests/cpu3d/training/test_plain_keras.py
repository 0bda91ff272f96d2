"""The network by plain Keras: compiled, fitted, saved and loaded as anyone would write it."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from cpu3d.training.losses import DiceCrossEntropy, RegionDice
from cpu3d.training.optimizers import RuleOptimizer
from models.config import UNetConfig
from models.losses import DEFAULT_LOSS
from models.supervision import head_weights
from models.unet3d import build_unet3d

GRID = (8, 8, 8)
DEEP = {"depth": 3, "deep_supervision": True}
DEEP_BF16 = {"policy": "speed", "norm": "none", "dtype": "bfloat16", **DEEP}


def volumes(count=4):
    rng = np.random.default_rng(0)
    image = rng.standard_normal((count, *GRID, 4))
    target = rng.random((count, *GRID, 3)) < 0.3
    data = tf.data.Dataset.from_tensor_slices((image.astype("f4"), target.astype("u1")))
    return data.batch(2, drop_remainder=True)


def compiled(more):
    model = build_unet3d(UNetConfig(filters=4, **more), GRID, 2)
    model.layers[1].trainable = False
    model.compile(
        RuleOptimizer("muon", momentum=0.8),
        DiceCrossEntropy(),
        loss_weights=head_weights(model.unet),
        metrics=[RegionDice(0, "WT")],
    )
    return model


def same(arrays, expected):
    return all(map(np.array_equal, tf.nest.flatten(arrays), tf.nest.flatten(expected)))


@pytest.mark.usefixtures("needs_native")
def test_a_saved_model_answers_and_goes_on_as_the_one_it_was(tmp_path):
    model = compiled(DEEP_BF16)
    data = volumes()
    callback = tf.keras.callbacks.ModelCheckpoint(str(tmp_path / "model.keras"))
    first = model.fit(data, epochs=2, callbacks=[callback], verbose=0).history
    assert first["loss"][1] < first["loss"][0]
    assert set(first) == {"loss", "head_loss", "head1_loss", "head_WT", "head1_WT"}

    again = tf.keras.models.load_model(tmp_path / "model.keras")  # without `custom_objects`
    assert [layer.name for layer in again.layers if not layer.trainable] == [model.layers[1].name]
    assert same(again.predict(data, verbose=0), model.predict(data, verbose=0))
    histories = [each.fit(data, verbose=0).history for each in (again, model)]
    assert histories[0] == histories[1]
    assert same(again.get_weights(), model.get_weights())


def test_its_loss_is_the_one_that_train_minimises():
    model = compiled(DEEP)
    ((image, target),) = volumes(2)
    expected, *_ = model.loss_and_gradients(DEFAULT_LOSS, image, target)
    losses = [
        model.loss(target, head) * weight
        for head, weight in zip(model(image), head_weights(model.unet))
    ]
    assert float(sum(losses)) == pytest.approx(float(expected), rel=1e-5)


def test_the_example_trains_saves_and_goes_on(phantom_store, tmp_path, capsys, monkeypatch):
    file = Path(__file__).resolve().parents[3] / "examples" / "plain_keras.py"
    spec = importlib.util.spec_from_file_location("plain_keras", file)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    monkeypatch.setattr(
        example, "UNetConfig", lambda **own: UNetConfig(**{**own, "filters": 4, "depth": 2})
    )
    losses = example.main(phantom_store.folder, tmp_path, epochs=2)
    assert losses[1] < losses[0]
    assert {"best.keras", "last.keras"} <= {path.name for path in tmp_path.iterdir()}
    assert "WT: " in capsys.readouterr().out
