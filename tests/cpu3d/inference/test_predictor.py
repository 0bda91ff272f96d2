"""A network over a case: in one pass, by a window, over mirror images."""

import dataclasses

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


@pytest.fixture
def record(phantom_store):
    return phantom_store.cases("test")[0]


@pytest.fixture
def image(phantom_store, record):
    return np.asarray(phantom_store.image(record.case_id))


def of_shape(record, shape):
    """The record of a whole image of another shape."""
    return dataclasses.replace(record, shape=shape, box=whole(shape))


def test_an_image_smaller_than_the_window_is_predicted_with_zeros_up_to_a_multiple(
    record, image, networks
):
    size = (11, 19, 9)
    image = crop(image, centred(record.box, size, record.shape))
    small = of_shape(record, size)
    predictor = networks(window=(16, 16, 16))
    region = predictor.region(small)
    assert region.size == (12, 20, 10)
    answers = predictor.probabilities(image, small)
    assert np.ptp(networks().probabilities(image, small) - answers[:]) > 1e-3
    around = np.asarray(predictor.probabilities(crop(image, region), of_shape(record, region.size)))
    np.testing.assert_array_equal(
        answers, crop(around, Region(tuple(-n for n in region.start), size))
    )


def test_a_run_on_crops_answers_once_more_around_what_it_found(record, image, networks):
    record = of_shape(record, record.shape)
    answers = np.asarray(networks().probabilities(image, record))
    most = answers.max()
    found = Region(tuple(np.argwhere(answers == most)[0, :3]), (1, 1, 1))
    once = networks()
    once.weights[-1] -= np.log(most / (1 - most)) - 1e-4  # no other voxel is found
    config = dataclasses.replace(once.config, whole_every=2)
    twice = Predictor(config, once.weights).probabilities(image, record)
    around = centred(found, (10, 10, 10), record.shape)  # 4 voxels on each side
    expected = np.array(once.probabilities(image, record))
    part = once.probabilities(crop(image, around), of_shape(record, around.size))
    assert np.abs(crop(expected, around) - part).max() > 0.01
    expected[around.slices(record.shape)] = part
    np.testing.assert_array_equal(twice, expected)


def test_the_mean_over_mirror_images_undoes_each_mirror():
    volume = tf.constant(np.random.default_rng(0).standard_normal((1, 3, 4, 5, 2)), tf.float32)
    seen = set()

    def network(image):
        seen.add(image.numpy().tobytes())
        return image.numpy()[0]

    np.testing.assert_allclose(over_mirror_images(network, volume), volume[0], rtol=1e-6)
    assert len(seen) == 8


def test_left_and_right_of_a_pair_are_not_exchanged_by_mirror_images(record, image, networks):
    """The answer to a mirrored image is the mirrored answer only if the mean holds that image."""
    image = crop(image, centred(record.box, (12, 12, 12), record.shape))
    small = of_shape(record, (12, 12, 12))
    predictor = networks(flips=True)

    def differences():
        mirrored = np.ascontiguousarray(image[::-1])
        answers = [np.asarray(predictor.probabilities(each, small)) for each in (image, mirrored)]
        return np.abs(answers[1][::-1] - answers[0]).max()

    assert differences() < 1e-5
    names = ("background", "Kidney_L", "Kidney_R", "liver")
    predictor.config = dataclasses.replace(predictor.config, label_names=dict(enumerate(names)))
    assert differences() > 1e-3


def test_a_network_that_has_diverged_is_named_with_the_case(record, image, networks):
    predictor = networks(window=(16, 16, 16))
    predictor.weights[-1] = np.full_like(predictor.weights[-1], np.nan)
    with pytest.raises(DivergedError, match=f"case {record.case_id} must be finite"):
        predictor.probabilities(image, record)


def test_memory_that_runs_out_names_a_smaller_way(record, image, networks, monkeypatch):
    def full(*_, **more):
        raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor")

    predictor = networks()
    monkeypatch.setattr(predictor_module, "build_unet3d", full)
    with pytest.raises(DoesNotFitError, match=f"of case {record.case_id}, got out of.*--window"):
        predictor.probabilities(image, record)
