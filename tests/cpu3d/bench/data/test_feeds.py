"""All ways to feed a training run give the same samples: otherwise their times would not compare."""

import numpy as np
import pytest
import tensorflow as tf

from cpu3d.bench.data import training
from cpu3d.bench.data.files import TINY
from cpu3d.bench.data.loading import augmented
from cpu3d.bench.data.training import FLOAT, GRAPH, HALF, OURS, OURS_NPY, PACKED, in_thread
from cpu3d.data.augment import AugmentConfig, sample_params
from cpu3d.data.finish import Finish


def patches(files, name):
    return list(training.patch_batches(name, files.cts(), TINY.patch, 2, 3, "float32"))


@pytest.mark.parametrize("name", sorted(set(training.FEEDS) - {training.MMAP, training.NOTHING}))
def test_every_feed_of_patches_gives_what_the_store_gives(bench_files, name):
    ours, theirs = patches(bench_files, training.MMAP), patches(bench_files, name)
    assert len(ours) == len(theirs) == 3
    for (image, target), (other_image, other_target) in zip(ours, theirs):
        assert image.shape == (2, *TINY.patch, 1)
        assert float(np.std(image)) > 0.1
        np.testing.assert_array_equal(other_image, image)
        np.testing.assert_array_equal(other_target, target)


def test_no_loading_gives_one_batch_again_and_again(bench_files):
    first, second, third = patches(bench_files, training.NOTHING)
    assert first[0] is second[0] is third[0]
    assert first[0].shape == (2, *TINY.patch, 1)


def rung(files, name):
    batches = training.ladder_batches(name, files.brains(), TINY.grid_of_ladder, 3, "float32")
    return [(np.asarray(image), np.asarray(target)) for image, target in batches]


def test_the_rungs_with_numpy_augmentation_agree(bench_files):
    first = rung(bench_files, FLOAT)
    assert first[0][0].shape == (1, *TINY.grid_of_ladder, 4)
    assert first[0][0].std() > 0.1
    for name in (PACKED, HALF):
        for (image, target), (other_image, other_target) in zip(first, rung(bench_files, name)):
            np.testing.assert_allclose(other_image, image, atol=1e-4)
            np.testing.assert_array_equal(other_target, target)


def test_the_rungs_with_augmentation_in_the_graph_agree(bench_files):
    first = rung(bench_files, GRAPH)
    assert first[0][1].max() == 1
    for name in (OURS, OURS_NPY):
        for (image, target), (other_image, other_target) in zip(first, rung(bench_files, name)):
            np.testing.assert_allclose(other_image, image, atol=1e-5)
            np.testing.assert_array_equal(other_target, target)


def test_the_rungs_differ_by_interpolation_alone(bench_files):
    for (image, target), (other_image, other_target) in zip(rung(bench_files, FLOAT), rung(bench_files, GRAPH)):
        inside = (slice(None),) + (slice(3, -3),) * 3
        assert np.corrcoef(image[inside].ravel(), other_image[inside].ravel())[0, 1] > 0.9
        assert np.mean(target[inside] != other_target[inside]) < 0.05


def test_a_thread_loads_in_order_and_its_errors_arrive():
    assert list(in_thread(lambda position: position * 2, 5)) == [0, 2, 4, 6, 8]

    def load(position):
        if position == 2:
            raise OSError("gone")
        return position

    stream = in_thread(load, 5)
    assert [next(stream), next(stream)] == [0, 1]
    with pytest.raises(OSError, match="gone"):
        next(stream)


@pytest.mark.parametrize("position", range(2))
@pytest.mark.parametrize(
    ("config", "turns"),
    [(AugmentConfig(), False), (AugmentConfig(flip=False, gain=0, offset=0, scaling=0.2), True)],
    ids=["flips and intensity", "zoom"],
)
def test_augmentation_by_numpy_is_the_graph_s(position, config, turns):
    rng = np.random.default_rng(0)
    bits = np.cumsum(rng.integers(-20, 21, (12, 10, 8, 2)), axis=2).astype(np.int16) + 500
    label = np.zeros((12, 10, 8), np.uint8)
    label[3:8, 2:7, 2:6] = 1
    params = sample_params(config, seed=0, position=position, channels=2)
    planes = params.planes((1, 1, 2))
    image, codes = augmented(bits.astype(np.float32), label, params, planes if turns else None)
    raw = {
        "bits": bits,
        "label": label,
        "is_half": np.bool_(False),
        "scale": np.float32(params.gain),
        "shift": np.float32(params.offset),
        "flips": np.array(params.flips),
        "planes": planes,
    }
    tensors = {name: tf.convert_to_tensor(part) for name, part in raw.items()}
    graph_image, graph_target = Finish(codes=((1,),), resamples=turns)(tensors)
    inside = (slice(2, -2),) * 3 if turns else ...
    np.testing.assert_allclose(image[inside], graph_image.numpy()[inside], rtol=1e-3, atol=1e-2)
    np.testing.assert_array_equal(codes[inside], graph_target.numpy()[..., 0][inside])
