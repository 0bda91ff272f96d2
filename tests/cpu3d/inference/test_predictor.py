"""A network over a case: in one pass, by a window, over mirror images."""

import dataclasses
import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf

from cpu3d.data.region import Region, centred, crop, whole
from cpu3d.errors import DivergedError, DoesNotFitError
from cpu3d.inference import predictor as predictor_module
from cpu3d.inference.predictor import Predictor, over_mirror_images
from cpu3d.inference.runs import Inference
from models.unet3d import build_unet3d
from tests.cpu3d.runs import SMALL, decided


@pytest.fixture
def networks(phantom_store, tmp_path):
    """A whole-volume run's predictor in any way of inference, from untrained weights."""
    config = decided(phantom_store, tmp_path, **SMALL)
    arrays = [v.numpy() for v in build_unet3d(config.unet, (16, 16, 16), 1).weights]
    return lambda **how: Predictor(config, arrays, Inference(**how))


def test_a_window_as_large_as_the_volume_is_one_pass(phantom_store, networks):
    record = phantom_store.cases("test")[0]
    image = phantom_store.image(record.case_id)
    one_pass = networks()
    window = networks(window=one_pass.config.grid)
    np.testing.assert_array_equal(
        window.probabilities(image, record), one_pass.probabilities(image, record)
    )


def test_an_image_smaller_than_the_window_is_predicted_as_if_zeros_were_around_it(
    phantom_store, networks
):
    record = phantom_store.cases("test")[0]
    box, size = record.box, (12, 20, 10)
    middle = Region(
        tuple(a + n // 2 - want // 2 for a, n, want in zip(box.start, box.size, size)), size
    )
    image = crop(np.asarray(phantom_store.image(record.case_id)), middle)
    small = dataclasses.replace(record, shape=image.shape[:3], box=whole(image.shape[:3]))
    predictor = networks(window=(16, 16, 16))
    region = predictor.region(small)
    assert region.size == (16, 20, 16)
    answers = predictor.probabilities(image, small)
    assert answers.shape == (12, 20, 10, 3)
    padded = dataclasses.replace(record, shape=region.size, box=whole(region.size))
    around = predictor.probabilities(crop(image, region), padded)
    np.testing.assert_array_equal(
        answers, crop(around, Region(tuple(-n for n in region.start), image.shape[:3]))
    )


def test_the_mean_over_mirror_images_undoes_each_mirror():
    volume = tf.constant(np.random.default_rng(0).standard_normal((1, 3, 4, 5, 2)), tf.float32)
    np.testing.assert_allclose(
        over_mirror_images(lambda x: x.numpy()[0], volume), volume[0], rtol=1e-6
    )
    calls = []
    over_mirror_images(lambda x: calls.append(x.numpy().tobytes()) or x.numpy()[0], volume)
    assert len(set(calls)) == 8


def test_left_and_right_of_a_pair_are_not_exchanged_by_mirror_images(phantom_store, networks):
    """The answer to a mirrored image is the mirrored answer only if the mean holds that image."""
    record = phantom_store.cases("test")[0]
    region = centred(record.box, (12, 12, 12), record.shape)
    image = crop(np.asarray(phantom_store.image(record.case_id)), region)
    small = dataclasses.replace(record, shape=(12, 12, 12), box=whole((12, 12, 12)))
    predictor = networks(flips=True)

    def differences():
        turned = predictor.probabilities(np.ascontiguousarray(image[::-1]), small)
        return np.abs(turned[::-1] - predictor.probabilities(image, small)).max()

    assert differences() < 1e-5
    names = dict(enumerate(("background", "Kidney_L", "Kidney_R", "liver")))
    predictor.config = dataclasses.replace(predictor.config, label_names=names)
    assert differences() > 1e-3


def test_networks_of_two_grids_at_most_are_kept(phantom_store, networks, monkeypatch):
    record, alive = phantom_store.cases("test")[0], weakref.WeakSet()

    def build(config, size, **how):
        alive.add(model := build_unet3d(config, size, **how))
        return model

    monkeypatch.setattr(predictor_module, "build_unet3d", build)
    predictor = networks()
    predictor.config = dataclasses.replace(predictor.config, grid=(8, 8, 8))
    for shape in ((8, 8, 8), (8, 8, 12), (8, 12, 8)):
        image = np.zeros((*shape, len(predictor.channels)), np.int16)
        case = dataclasses.replace(record, shape=shape, box=whole(shape))
        assert predictor.probabilities(image, case).shape[:3] == shape
    gc.collect()
    assert len(alive) == 2


def test_a_network_that_has_diverged_is_named_with_the_case(phantom_store, networks):
    record, predictor = phantom_store.cases("test")[0], networks(window=(16, 16, 16))
    predictor.weights[-1] = np.full_like(predictor.weights[-1], np.nan)
    with pytest.raises(DivergedError, match=f"case {record.case_id} must be finite"):
        predictor.probabilities(phantom_store.image(record.case_id), record)


def test_memory_that_runs_out_names_a_smaller_way(phantom_store, networks, monkeypatch):
    record = phantom_store.cases("test")[0]

    def full(*_, **more):
        raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor")

    predictor = networks()
    monkeypatch.setattr(predictor_module, "build_unet3d", full)
    with pytest.raises(DoesNotFitError, match=f"of case {record.case_id}, got out of.*--window"):
        predictor.probabilities(phantom_store.image(record.case_id), record)
