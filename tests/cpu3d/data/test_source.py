"""The tf.data source against the arrays it streams from."""

import dataclasses
import hashlib
import shutil

import numpy as np
import pytest
import tensorflow as tf

from cpu3d.data.augment import AugmentConfig
from cpu3d.data.region import crop
from cpu3d.data.source import case_region, grid_size, normalise, open_store, stored_volumes, volume_dataset
from cpu3d.data.store import Store
from cpu3d.errors import InputError

AUGMENT = AugmentConfig(flip=True, gain=0.2, offset=0.2)


def hashes(dataset):
    return [hashlib.sha256(image.numpy().tobytes() + target.numpy().tobytes()).hexdigest() for image, target in dataset]


def test_the_tensor_is_the_mapped_page_itself(phantom_store, monkeypatch):
    maps = {}
    for name in ("image", "label"):
        original = getattr(Store, name)

        def remember(self, case_id, original=original, name=name):
            array = original(self, case_id)
            maps[name, case_id] = array
            return array

        monkeypatch.setattr(Store, name, remember)
    cases = phantom_store.cases("train")
    for record, (bits, is_half, label) in zip(cases, stored_volumes(phantom_store)):
        assert not is_half
        for tensor, name in ((bits, "image"), (label, "label")):
            array = maps[name, record.case_id]
            address = array.__array_interface__["data"][0]
            assert address % 64 == 0
            assert tensor._numpy().__array_interface__["data"][0] == address
            assert not array.flags.writeable


def test_a_copy_would_be_noticed_by_the_pointer_test(phantom_store):
    """The same comparison on an array that TensorFlow must copy, for want of alignment."""
    array = np.frombuffer(bytes(4097), np.uint8)[1:]
    array = array if array.ctypes.data % 64 else array[1:]
    tensor = next(iter(tf.data.Dataset.range(1).map(lambda i: tf.numpy_function(lambda _: array, [i], tf.uint8))))
    assert tensor._numpy().__array_interface__["data"][0] != array.ctypes.data


@pytest.mark.parametrize("extent", ["brain", "full"])
def test_a_volume_is_its_case_normalised_over_the_brain(phantom_store, extent):
    size = grid_size(phantom_store, extent=extent, multiple=16)
    dataset = volume_dataset(phantom_store, extent=extent, shuffle=False)
    for record, (image, target) in zip(phantom_store.cases("train"), dataset):
        region = case_region(record, size, extent)
        expected = normalise(np.asarray(phantom_store.image(record.case_id)), record, region)
        np.testing.assert_allclose(image[0], expected, atol=1e-5)
        label = crop(np.asarray(phantom_store.label(record.case_id)), region)
        for index, codes in enumerate(phantom_store.manifest.regions.values()):
            np.testing.assert_array_equal(target[0, ..., index], np.isin(label, codes))
        brain = image[0].numpy()[np.asarray(expected) != 0]
        assert abs(brain.mean()) < 0.05
        assert abs(brain.std() - 1) < 0.05


def test_the_brain_box_loses_no_voxel(phantom_store):
    size = grid_size(phantom_store, extent="brain", multiple=4)
    for record in phantom_store.manifest.cases:
        region = case_region(record, size, "brain")
        for array in (phantom_store.image(record.case_id), phantom_store.label(record.case_id)):
            assert np.count_nonzero(crop(array, region)) == np.count_nonzero(array)


def test_the_full_grid_is_padded_on_both_sides_to_the_next_multiple(phantom_store):
    image, target = next(iter(volume_dataset(phantom_store, extent="full", multiple=16)))
    assert image.shape == (1, 48, 48, 48, 4)
    assert target.shape == (1, 48, 48, 48, 3)
    assert not np.any(image[0, :4])
    assert not np.any(image[0, :, :, 42:])


def test_a_restart_at_any_position_continues_bit_for_bit(phantom_store):
    whole = hashes(volume_dataset(phantom_store, seed=3, stop=9, augment=AUGMENT))
    assert len(set(whole)) == 9
    for position in (1, 4, 7):
        assert (
            hashes(volume_dataset(phantom_store, seed=3, start=position, stop=9, augment=AUGMENT)) == whole[position:]
        )


def test_the_order_depends_on_the_seed_alone(phantom_store):
    first = hashes(volume_dataset(phantom_store, seed=3, stop=6))
    options = tf.data.Options()
    options.threading.private_threadpool_size = 4
    options.threading.max_intra_op_parallelism = 2
    assert hashes(volume_dataset(phantom_store, seed=3, stop=6).with_options(options)) == first
    tf.random.set_seed(99)
    np.random.seed(99)
    assert hashes(volume_dataset(phantom_store, seed=3, stop=6)) == first
    assert hashes(volume_dataset(phantom_store, seed=4, stop=6)) != first


def test_a_batch_is_its_samples_side_by_side(phantom_store):
    singles = list(volume_dataset(phantom_store, seed=1, stop=4, augment=AUGMENT))
    pairs = list(volume_dataset(phantom_store, seed=1, stop=4, batch=2, augment=AUGMENT))
    for pair, first, second in zip(pairs, singles[::2], singles[1::2]):
        for joined, left, right in zip(pair, first, second):
            np.testing.assert_array_equal(joined, tf.concat([left, right], 0))


def test_channels_and_regions_are_picked_by_name(phantom_store):
    full = next(iter(volume_dataset(phantom_store)))
    image, target = next(iter(volume_dataset(phantom_store, channels=("T2w", "FLAIR"), regions=("ET",))))
    np.testing.assert_array_equal(image, tf.gather(full[0], [3, 0], axis=-1))
    np.testing.assert_array_equal(target, full[1][..., 2:])


def test_float16_bits_in_the_store_give_the_same_image(phantom_store, tmp_path, monkeypatch):
    record = phantom_store.cases("train")[0]
    region = case_region(record, record.shape, "full")
    z = normalise(np.asarray(phantom_store.image(record.case_id)), record, region).astype(np.float16)
    np.save(tmp_path / "half.npy", z)
    half = dataclasses.replace(record, channel_mean=(0.0,) * 4, channel_std=(1.0,) * 4, image_dtype="float16")
    monkeypatch.setattr(Store, "image", lambda self, case_id: np.load(tmp_path / "half.npy", mmap_mode="r"))
    monkeypatch.setattr(Store, "cases", lambda self, split: (half,))
    image, _ = next(iter(volume_dataset(phantom_store, extent="full", multiple=1, shuffle=False)))
    np.testing.assert_allclose(image[0], z, atol=1e-6)


def test_bfloat16_is_the_rounded_float32(phantom_store):
    exact, _ = next(iter(volume_dataset(phantom_store)))
    short, _ = next(iter(volume_dataset(phantom_store, dtype="bfloat16")))
    assert short.dtype == tf.bfloat16
    np.testing.assert_array_equal(tf.cast(exact, tf.bfloat16), short)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"split": "dev"}, "split must be one of train, val, test, got 'dev'"),
        ({"channels": ("PET",)}, "channels must be among FLAIR, T1w, t1gd, T2w, each once, got PET"),
        ({"regions": ()}, "regions must be among WT, TC, ET, each once, got none"),
        ({"extent": "tile"}, "extent must be one of brain, full, got 'tile'"),
    ],
)
def test_bad_arguments_are_refused_by_name(phantom_store, wrong, message):
    with pytest.raises(InputError, match=message):
        volume_dataset(phantom_store, **wrong)


def test_all_channels_in_another_order_come_in_that_order(phantom_store):
    image, _ = next(iter(volume_dataset(phantom_store)))
    turned, _ = next(iter(volume_dataset(phantom_store, channels=("T2w", "t1gd", "T1w", "FLAIR"))))
    np.testing.assert_array_equal(turned, image[..., ::-1])


def test_rotation_and_scaling_move_image_and_target_alike(phantom_store):
    augment = AugmentConfig(flip=False, gain=0, offset=0, rotation_deg=20, scaling=0.2)
    plain = next(iter(volume_dataset(phantom_store, seed=2)))
    image, target = next(iter(volume_dataset(phantom_store, seed=2, augment=augment)))
    assert image.shape == plain[0].shape
    assert not np.array_equal(target, plain[1])
    inside, outside = (float(tf.reduce_mean(image[..., 0][target[..., 0] == value])) for value in (1, 0))
    before = float(tf.reduce_mean(plain[0][..., 0][plain[1][..., 0] == 1]))
    assert inside > outside + 0.5 * (before - outside)


def test_damaged_files_are_all_named_before_the_first_volume(phantom_store, tmp_path):
    shutil.copytree(phantom_store.folder, tmp_path / "store")
    store = open_store(tmp_path / "store")
    first, second = (record.case_id for record in store.cases("train")[:2])
    image = tmp_path / "store" / "cases" / f"{first}.x.npy"
    image.write_bytes(image.read_bytes()[:-10])
    label = tmp_path / "store" / "cases" / f"{second}.y.npy"
    label.write_bytes(b"not numpy" + label.read_bytes()[9:])
    with pytest.raises(InputError) as caught:
        volume_dataset(store)
    assert len(caught.value.problems) == 2
    assert f"{first}.x.npy must be" in caught.value.problems[0]
    assert f"{second}.y.npy must be a .npy array" in caught.value.problems[1]
