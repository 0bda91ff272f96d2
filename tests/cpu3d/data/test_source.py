"""The tf.data source against the arrays it streams from."""

import dataclasses
import gc
import hashlib
import os
import shutil
import subprocess
import sys
import threading
import zlib
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from cpu3d.data import loader, python_op
from cpu3d.data.augment import NO_AUGMENT, AugmentConfig
from cpu3d.data.case import facts_of, float16_image
from cpu3d.data.files.look_ahead import LookAhead
from cpu3d.data.files.reader import Reader
from cpu3d.data.records import CaseRecord, Geometry, array_path, make_manifest, remake
from cpu3d.data.region import crop, whole
from cpu3d.data.sharding import ALL, Share
from cpu3d.data.source import (
    Batches,
    case_region,
    finish_of,
    grid_size,
    normalise,
    open_reading,
    open_store,
    own_errors,
    patch_at,
    patch_dataset,
    patch_sampling,
    stored_volumes,
    volume_dataset,
)
from cpu3d.data.store import write_store
from cpu3d.data.words import by
from cpu3d.data.write_cases import write_arrays
from cpu3d.errors import InputError

FREE_BYTES = 8 << 30
ROOT = Path(__file__).resolve().parents[3]
AUGMENT = AugmentConfig(flip=True, gain=0.2, offset=0.2)
TURNED = AugmentConfig(rotation_deg=10, scaling=0.1)
FORMATS = {"b2nd": ("b2nd", False), "cropped": ("npy", True), "cropped b2nd": ("b2nd", True)}


def digest(element):
    parts = tf.nest.flatten(element)
    return hashlib.sha256(b"".join(tf.io.serialize_tensor(part).numpy() for part in parts)).hexdigest()


def hashes(dataset):
    return [digest(element) for element in Batches(dataset)]


def rewritten(store, folder, format_="npy", cropped=False, half=False):
    """The cases of a store once more, in another format."""
    (folder / "cases").mkdir(parents=True)
    records = []
    for record in store.manifest.cases:
        image, label = np.asarray(store.image(record.case_id)), np.asarray(store.label(record.case_id))
        if half:
            channels = store.manifest.channels
            image, error = float16_image([image[..., index] for index in range(len(channels))], channels)
            record = dataclasses.replace(record, max_abs_error=error, **facts_of(image, label))
        records.append(write_arrays(folder, record, image, label, format_=format_, cropped=cropped))
    write_store(folder, remake(store.manifest, cases=records))
    return open_store(folder)


@pytest.fixture(scope="session")
def other_stores(phantom_store, tmp_path_factory):
    """The phantoms in every other format, by the names of FORMATS."""
    folder = tmp_path_factory.mktemp("formats")
    return {name: rewritten(phantom_store, folder / name, *how) for name, how in FORMATS.items()}


def test_the_tensor_is_the_mapped_page_itself(phantom_store, monkeypatch):
    maps, original = {}, Reader.array

    def remember(self, record, part):
        maps[part, record.case_id] = original(self, record, part)
        return maps[part, record.case_id]

    monkeypatch.setattr(Reader, "array", remember)
    cases = phantom_store.cases("train")
    for record, (bits, is_half, label) in zip(cases, stored_volumes(phantom_store, read_mode="mmap")):
        assert not is_half
        for tensor, part in ((bits, "x"), (label, "y")):
            array = maps[part, record.case_id]
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


def test_float16_bits_in_the_store_give_the_same_image(phantom_store, tmp_path):
    half = rewritten(phantom_store, tmp_path / "half", half=True)
    record = half.cases("train")[0]
    assert record.image_dtype == "float16"
    scores = np.asarray(half.image(record.case_id))
    for format_ in ("npy", "b2nd"):
        store = rewritten(half, tmp_path / format_, format_)
        image, _ = next(iter(volume_dataset(store, extent="full", multiple=1, shuffle=False)))
        np.testing.assert_allclose(image[0], scores, atol=2e-3)
    exact, _ = next(iter(volume_dataset(phantom_store, extent="full", multiple=1, shuffle=False)))
    np.testing.assert_allclose(image, exact, atol=2e-3)


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


@pytest.mark.parametrize("what", [{}, {"extent": "full"}, {"patch_shape": (8, 8, 8)}, {"patch_shape": (16, 16, 16)}])
def test_a_rotation_is_one_in_the_millimetres_of_its_case(tiny_store, what):
    dataset = patch_dataset if "patch_shape" in what else volume_dataset
    assert tiny_store.cases("train")[0].spacing_mm == (1, 1, 2)
    for raw in dataset(tiny_store, augment=AugmentConfig(rotation_deg=20), finished=False, **what):
        (_, across_x, across_y, _), (_, along_y, along_z, _) = raw["planes"][0].numpy()
        np.testing.assert_allclose((across_x / across_y, along_y / along_z), (-1, -4), rtol=1e-6)


def test_damaged_files_are_all_named_before_the_first_volume(phantom_store, tmp_path):
    shutil.copytree(phantom_store.folder, tmp_path / "store")
    store = open_store(tmp_path / "store")
    first, second = store.cases("train")[:2]
    image, label = array_path(store.folder, first, "x"), array_path(store.folder, second, "y")
    image.write_bytes(image.read_bytes()[:-10])
    label.write_bytes(b"not numpy" + label.read_bytes()[9:])
    for dataset in (volume_dataset, lambda store: patch_dataset(store, (8, 8, 8))):
        with pytest.raises(InputError) as caught:
            dataset(store)
        assert len(caught.value.problems) == 2
        assert f"{image.name} must be" in caught.value.problems[0]
        assert f"{label.name} must be a .npy array" in caught.value.problems[1]


# --- Formats and read modes ---


@pytest.mark.parametrize("extent", ["brain", "full"])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_bits(phantom_store, other_stores, name, extent):
    store = other_stores[name]
    for more in ({"augment": AUGMENT, "dtype": "bfloat16"}, {"augment": TURNED}, {"finished": False}):
        expected = hashes(volume_dataset(phantom_store, extent=extent, seed=2, **more))
        assert hashes(volume_dataset(store, extent=extent, seed=2, **more)) == expected
    patches = {"extent": extent, "sampling": "foreground", "augment": AUGMENT, "stop": 6}
    expected = hashes(patch_dataset(phantom_store, (20, 30, 17), **patches))
    assert hashes(patch_dataset(store, (20, 30, 17), **patches)) == expected


@pytest.mark.parametrize("mode", ["mmap", "pread", "ram"])
def test_every_read_mode_gives_the_same_bits(phantom_store, mode):
    for extent in ("brain", "full"):
        expected = hashes(volume_dataset(phantom_store, extent=extent, augment=AUGMENT))
        assert hashes(volume_dataset(phantom_store, extent=extent, augment=AUGMENT, read_mode=mode)) == expected
    expected = hashes(patch_dataset(phantom_store, (24, 24, 24), stop=6))
    assert hashes(patch_dataset(phantom_store, (24, 24, 24), stop=6, read_mode=mode)) == expected


def test_no_more_than_the_patch_is_read(phantom_store):
    reading = open_reading(phantom_store, free_bytes=FREE_BYTES, read_mode="pread")
    cases, size = phantom_store.cases("train"), (4, 16, 18)
    sampling = patch_sampling(phantom_store, size, seed=1)
    inside = 0
    for position in range(8):
        sample = patch_at(position, sampling, cases)
        slices = sample.region.slices(cases[sample.index].shape)
        inside += np.prod([part.stop - part.start for part in slices])
    before = reading.reader.reads
    for _ in patch_dataset(phantom_store, size, seed=1, stop=8, read_mode=reading):
        pass
    bytes_read = reading.reader.reads.bytes_read - before.bytes_read
    # Of a row along Z the patch takes a half; the rest lies between two of its runs, and one read spans both.
    assert 0 < bytes_read <= 2 * inside * (4 * 2 + 1)
    assert reading.reader.reads.zero_copy == 0


def test_of_a_volume_the_brain_s_box_is_read_and_no_more(phantom_store):
    sizes = {}
    for extent in ("brain", "full"):
        reading = open_reading(phantom_store, free_bytes=FREE_BYTES, read_mode="pread")
        for _ in volume_dataset(phantom_store, extent=extent, read_mode=reading):
            pass
        sizes[extent] = reading.reader.reads.bytes_read
    whole_bytes = sum(np.prod(record.shape) * 9 for record in phantom_store.cases("train"))
    planes = sum(record.box.size[0] / record.shape[0] for record in phantom_store.cases("train")) / 4
    assert sizes["brain"] == sizes["full"] <= planes * whole_bytes


def test_a_shared_reading_counts_what_all_datasets_read(phantom_store):
    reading = open_reading(phantom_store, ("train", "val"), free_bytes=FREE_BYTES, read_mode="mmap")
    for split in ("train", "val"):
        for _ in volume_dataset(phantom_store, split=split, read_mode=reading):
            pass
    assert reading.reader.reads.arrays == 2 * (4 + 1)
    assert reading.reader.reads.zero_copy_ratio == 1


def test_datasets_that_share_a_reading_share_its_budget(phantom_store, monkeypatch):
    budgets = []

    def spy(*arguments, page_budget_bytes, **named):
        budgets.append(page_budget_bytes)
        return LookAhead(*arguments, page_budget_bytes=page_budget_bytes, **named)

    monkeypatch.setattr(loader, "LookAhead", spy)
    for splits in (("train",), ("train", "val")):
        reading = open_reading(phantom_store, splits, free_bytes=FREE_BYTES, page_budget_bytes=1000)
        for split in splits:
            volume_dataset(phantom_store, split=split, read_mode=reading)
    whole_bytes = {
        split: sum(record.image_bytes + record.label_bytes for record in phantom_store.cases(split))
        for split in ("train", "val")
    }
    assert budgets == [1000, *(1000 * size // sum(whole_bytes.values()) for size in whole_bytes.values())]
    assert budgets[2] > 0


def test_a_reading_of_other_cases_is_refused(phantom_store, other_stores):
    reading = open_reading(phantom_store, free_bytes=FREE_BYTES)
    for store, split in ((phantom_store, "val"), (other_stores["cropped"], "train")):
        with pytest.raises(InputError, match=f"read_mode must be a Reading opened for split {split} of {store.folder}"):
            volume_dataset(store, split=split, read_mode=reading)


def test_small_patches_are_copied_out_of_the_file_and_large_ones_stay_in_the_map(phantom_store):
    for size, zero_copy in ((12, 0), (30, 1)):
        reading = open_reading(phantom_store, free_bytes=FREE_BYTES, read_mode="mmap")
        for _ in patch_dataset(phantom_store, (size,) * 3, read_mode=reading, stop=8):
            pass
        assert reading.reader.reads.zero_copy_ratio == zero_copy


def test_how_to_read_follows_from_the_memory_that_is_told(phantom_store):
    assert open_reading(phantom_store, free_bytes=1000, patches=True).plan.page_budget_bytes == 500
    with pytest.raises(InputError, match="read mode ram must hold"):
        open_reading(phantom_store, free_bytes=1000, read_mode="ram")


# --- Patches ---


@pytest.mark.parametrize("extent", ["brain", "full"])
@pytest.mark.parametrize(
    ("sampling", "shape"),
    [
        ("random", (16, 12, 20)),
        ("foreground", (16, 12, 20)),
        ("centre", (20, 12, 64)),
        ("grid", (32, 24, 16)),
        ("grid", (64, 20, 50)),
    ],
)
def test_a_patch_is_the_crop_of_its_normalised_volume_bit_for_bit(phantom_store, sampling, shape, extent):
    cases = phantom_store.cases("train")
    drawn = patch_sampling(phantom_store, shape, sampling=sampling, extent=extent, seed=4)
    stop = min(len(cases) * drawn.per_case, 60)
    wide = {"extent": "full", "multiple": 1, "shuffle": False}
    volumes = [[part[0].numpy() for part in pair] for pair in volume_dataset(phantom_store, **wide)]
    dataset = patch_dataset(phantom_store, shape, sampling=sampling, extent=extent, seed=4, stop=stop)
    reached_out = seen = 0
    for position, patch in enumerate(dataset):
        sample = patch_at(position, drawn, cases)
        for part, volume in zip(patch, volumes[sample.index]):
            expected = crop(volume, sample.region)
            assert part[0].shape == expected.shape
            assert part[0].numpy().tobytes() == expected.tobytes()
        reached_out += any(n for pair in sample.region.padding(cases[sample.index].shape) for n in pair)
        seen += 1
    assert seen == stop
    assert reached_out or shape[0] < 40


def test_patches_of_a_grid_put_together_are_the_volume(phantom_store):
    shape, cases = (24, 20, 28), phantom_store.cases("train")
    drawn = patch_sampling(phantom_store, shape, sampling="grid", extent="full", overlap=0.25, shuffle=False)
    for position, (image, _) in enumerate(
        patch_dataset(phantom_store, shape, sampling="grid", extent="full", overlap=0.25, shuffle=False)
    ):
        sample = patch_at(position, drawn, cases)
        record = cases[sample.index]
        if position % drawn.per_case == 0:
            found, covered = np.zeros((*record.shape, 4), np.float32), np.zeros(record.shape, bool)
        inside = tuple(slice(a, n - b) for (a, b), n in zip(sample.region.padding(record.shape), shape))
        found[sample.region.slices(record.shape)] = image[0].numpy()[inside]
        covered[sample.region.slices(record.shape)] = True
        if position % drawn.per_case == drawn.per_case - 1:
            assert covered.all()
            expected = normalise(np.asarray(phantom_store.image(record.case_id)), record, whole(record.shape))
            np.testing.assert_allclose(found, expected, atol=1e-5)
    assert position + 1 == len(cases) * drawn.per_case


def test_foreground_patches_hold_foreground_and_batches_their_share(phantom_store):
    dataset = patch_dataset(
        phantom_store, (8, 8, 8), sampling="foreground", foreground=0.5, batch=4, stop=40, regions=("ET",)
    )
    for _, target in dataset:
        assert np.count_nonzero(tf.reduce_any(target > 0, axis=(1, 2, 3, 4))) >= 2


# --- The stream ---


def streams(store, **more):
    """Short streams of every kind, by name."""
    volumes, patches = {"stop": 5, "seed": 3, **more}, {"stop": 6, "seed": 3, "augment": AUGMENT, **more}
    return {
        "volumes": lambda **k: volume_dataset(store, augment=AUGMENT, dtype="bfloat16", **{**volumes, **k}),
        "turned": lambda **k: volume_dataset(store, augment=TURNED, **{**volumes, **k}),
        "raw": lambda **k: volume_dataset(store, augment=AUGMENT, finished=False, **{**volumes, **k}),
        "random": lambda **k: patch_dataset(store, (16, 16, 16), **{**patches, **k}),
        "foreground": lambda **k: patch_dataset(store, (16, 16, 16), sampling="foreground", **{**patches, **k}),
        "grid": lambda **k: patch_dataset(store, (16, 24, 24), sampling="grid", **{**patches, **k}),
    }


KINDS = ("volumes", "turned", "raw", "random", "foreground", "grid")


@pytest.mark.parametrize("kind", KINDS)
def test_a_restart_at_every_position_with_any_threads_continues_bit_for_bit(phantom_store, kind):
    make = streams(phantom_store)[kind]
    expected = hashes(make())
    assert len(set(expected)) == len(expected)
    assert hashes(make(threads=3)) == expected
    for position in range(1, len(expected)):
        assert hashes(make(start=position, threads=1 + position % 3)) == expected[position:]


@pytest.mark.parametrize("kind", ["volumes", "foreground", "grid"])
def test_workers_together_give_the_bits_of_one_in_the_same_order(phantom_store, kind):
    make, span = streams(phantom_store)[kind], {"start": 4, "stop": 12}
    expected = dict(zip(range(4, 12), hashes(make(**span))))
    for workers in (2, 4):
        found = {}
        for rank in range(workers):
            share = Share(rank, workers, 4, tuple(range(workers)))
            found.update(zip(share.positions(**span), hashes(make(share=share, threads=1 + rank % 2, **span))))
        assert found == expected


def test_the_micro_batches_of_a_worker_are_those_of_its_block(phantom_store):
    share, common = Share(1, 2, 8), {"batch": 2, "seed": 3, "augment": AUGMENT}
    found = hashes(volume_dataset(phantom_store, stop=16, share=share, **common))
    blocks = [volume_dataset(phantom_store, start=start, stop=start + 4, **common) for start in (4, 12)]
    assert found == [one for block in blocks for one in hashes(block)]
    assert found[2:] == hashes(volume_dataset(phantom_store, start=8, stop=16, share=share, **common))


def test_the_first_epoch_of_several_workers_is_of_whole_steps(phantom_store):
    expected = hashes(volume_dataset(phantom_store, shuffle=False))
    assert len(expected) == 4
    for rank in range(3):
        found = hashes(volume_dataset(phantom_store, shuffle=False, share=Share(rank, 3, 3)))
        assert found == expected[rank : rank + 1]
    assert hashes(patch_dataset(phantom_store, (8, 8, 8), share=Share(0, 2, 6))) == []


def test_a_validation_is_dealt_among_workers_and_loses_no_case(phantom_store):
    expected = hashes(volume_dataset(phantom_store, shuffle=False))
    validated = lambda share: hashes(volume_dataset(phantom_store, shuffle=False, stop=4, share=share.singly()))
    assert [validated(Share(rank, 3, 6)) for rank in range(3)] == [expected[0::3], expected[1::3], expected[2::3]]
    assert validated(Share(4, 5, 5)) == []


def test_each_worker_looks_at_its_own_share_of_the_files(phantom_store, tmp_path):
    shutil.copytree(phantom_store.folder, tmp_path / "store")
    store = open_store(tmp_path / "store")
    bad = array_path(store.folder, store.cases("train")[3], "x")
    bad.write_bytes(bad.read_bytes()[:-10])
    whole_bytes = open_reading(phantom_store, free_bytes=FREE_BYTES).split_bytes
    for rank in (1, 2):
        reading = open_reading(store, free_bytes=FREE_BYTES, share=Share(rank, 3, 3))
        assert reading.split_bytes == whole_bytes
    for make in (open_reading, lambda store, **k: volume_dataset(store, share=k["share"])):
        with pytest.raises(InputError, match=f"{bad.name} must be"):
            make(store, free_bytes=FREE_BYTES, share=Share(1, 2, 2))


def test_workers_of_a_host_plan_together_for_its_memory(phantom_store, monkeypatch):
    plans = []

    def spy(reader, record_at, *, page_budget_bytes, workers, turn, apart, **named):
        plans.append((page_budget_bytes, workers, turn, apart, [record_at(place).case_id for place in range(4)]))
        return LookAhead(reader, record_at, page_budget_bytes=page_budget_bytes, **named)

    monkeypatch.setattr(loader, "LookAhead", spy)
    cases = [record.case_id for record in phantom_store.cases("train")]
    share = Share(2, 4, 4, here=(1, 2))
    for one in (share, share.singly(), ALL):
        volume_dataset(phantom_store, shuffle=False, stop=8, page_budget_bytes=1000, share=one)
    together, single, alone = plans
    assert together == (1000, 2, 1, 3, [cases[1], cases[2], cases[1], cases[2]])
    assert single == (500, 1, 0, 0, [cases[2]] * 4)  # nobody waits in a validation: its own files, half of the memory
    assert alone == (1000, 1, 0, 0, cases)


FRESH = """
import sys
sys.path[:0] = {path!r}
import tensorflow as tf
tf.random.set_seed(1)
tf.config.experimental.enable_op_determinism()
from test_source import KINDS, hashes, open_store, streams
made = streams(open_store({store!r}), threads=3)
for kind in KINDS:
    print("stream", kind, *hashes(made[kind]()))
"""


def test_a_fresh_process_with_op_determinism_gives_the_same_bits(phantom_store):
    script = FRESH.format(path=[str(ROOT), str(Path(__file__).parent)], store=str(phantom_store.folder))
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "7"},
    )
    found = {line.split()[1]: line.split()[2:] for line in done.stdout.splitlines() if line.startswith("stream")}
    assert found == {kind: hashes(make()) for kind, make in streams(phantom_store).items()}


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("augment", [NO_AUGMENT, AUGMENT, TURNED])
def test_raw_batches_finished_in_a_step_are_the_finished_ones(phantom_store, augment, batch):
    common = {"seed": 5, "augment": augment, "batch": batch, "channels": ("T2w", "FLAIR"), "regions": ("ET", "WT")}
    finish = finish_of(phantom_store, augment=augment, regions=("ET", "WT"), dtype="bfloat16")
    step = tf.function(lambda raw: finish(raw))
    for make in (
        lambda **k: volume_dataset(phantom_store, extent="full", stop=6, **common, **k),
        lambda **k: patch_dataset(phantom_store, (20, 18, 16), stop=6, **common, **k),
    ):
        finished = hashes(make(dtype="bfloat16"))
        assert len(finished) == 6 // batch
        assert [digest(step(raw)) for raw in make(finished=False)] == finished


def test_what_a_seed_draws_never_changes_silently(tmp_path):
    """Golden: integers only, which every machine and version computes alike."""
    store = fixed_store(tmp_path)
    patches = {"sampling": "foreground", "foreground": 0.5, "seed": 11, "stop": 6, "extent": "full", "batch": 2}
    assert crc(patch_dataset(store, (4, 5, 3), augment=AUGMENT, finished=False, **patches)) == GOLDEN_PATCHES
    volumes = volume_dataset(store, multiple=4, augment=AUGMENT, seed=11, stop=6, finished=False)
    assert crc(volumes) == GOLDEN_VOLUMES


def crc(dataset):
    parts = (raw[name].numpy().tobytes() for raw in dataset for name in ("bits", "label", "flips"))
    return zlib.crc32(b"".join(parts))


def fixed_store(folder):
    """Three cases of 8 x 7 x 6 voxels whose every value is written down here."""
    (folder / "cases").mkdir()
    geometry = Geometry((8, 7, 6), tuple(map(tuple, np.eye(4).tolist())), "RAS", 1, 1)
    records = []
    for number, case_id in enumerate("abc"):
        image = (np.arange(8 * 7 * 6 * 2).reshape(8, 7, 6, 2) * (number + 3) % 97).astype(np.int16)
        image[: number + 1] = 0
        label = (np.arange(8 * 7 * 6).reshape(8, 7, 6) % 89 == number).astype(np.uint8)
        label[5, 3, 2] = 2
        record = CaseRecord(
            case_id=case_id, patient_id=case_id, spacing_mm=(1.0, 1.0, 1.0), max_abs_error=0.0, zeroed_voxels=0,
            geometry=geometry, sources=(), stem=case_id, format="", stored=whole(image.shape[:3]), image_bytes=0,
            image_sha256="", label_bytes=0, label_sha256="", **facts_of(image, label),
        )  # fmt: skip
        records.append(write_arrays(folder, record, image, label, format_="npy", cropped=False))
    manifest = make_manifest(
        name="fixed", layout="decathlon", channels=("A", "B"), labels={0: "none", 1: "one", 2: "two"},
        regions={"all": (1, 2), "two": (2,)}, split={"train": ("a", "b", "c"), "val": (), "test": ()}, split_seed=0,
        cases=records, versions={},
    )  # fmt: skip
    write_store(folder, manifest)
    return open_store(folder)


# --- Failures ---


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("make", [volume_dataset, lambda store, **k: patch_dataset(store, (8, 8, 8), **k)])
def test_a_file_cut_while_a_run_reads_is_told_by_name_after_what_was_good(phantom_store, tmp_path, make, threads):
    shutil.copytree(phantom_store.folder, tmp_path / "store")
    store = open_store(tmp_path / "store")
    dataset = make(store, shuffle=False, read_mode="pread", threads=threads)
    cut = array_path(store.folder, store.cases("train")[2], "x")
    cut.write_bytes(cut.read_bytes()[:-1])
    batches = Batches(dataset)
    good = hashes(make(phantom_store, shuffle=False, stop=2))
    assert [digest(next(batches)) for _ in range(2)] == good
    with pytest.raises(InputError, match=f"store file {cut} must be .* bytes long") as caught:
        next(batches)
    assert len(caught.value.problems) == 1


def test_a_disk_that_fails_is_an_os_error_with_its_file(phantom_store, monkeypatch):
    def fail(self, record, part, slices):
        raise OSError(5, "Input/output error", str(array_path(self.folder, record, part)))

    monkeypatch.setattr(Reader, "box", fail)
    with pytest.raises(OSError, match="Input/output error") as caught, own_errors():
        list(volume_dataset(phantom_store, read_mode="pread").take(1))
    assert caught.value.filename.endswith(".x.npy")
    assert not isinstance(caught.value, tf.errors.OpError)


def test_our_own_bugs_stay_tensorflow_s_to_tell(phantom_store, monkeypatch):
    def fail(self, record, part):
        raise AttributeError("a bug")

    monkeypatch.setattr(Reader, "array", fail)
    with pytest.raises(tf.errors.OpError, match="a bug"):
        next(Batches(volume_dataset(phantom_store, read_mode="mmap")))


def test_a_dataset_that_is_gone_leaves_no_thread_behind(phantom_store):
    def threads():
        return {thread for thread in threading.enumerate() if "look-ahead" in thread.name}

    gc.collect()
    before = threads()
    elements = iter(volume_dataset(phantom_store))
    gc.collect()
    assert len(list(elements)) == 4
    begun = threads() - before
    assert len(begun) == 1
    del elements
    gc.collect()
    for thread in begun:
        thread.join(60)
        assert not thread.is_alive()


# --- How long a dataset's files stay open ---


def held():
    """The datasets whose files are open, after all that can be collected was."""
    gc.collect()
    return set(python_op._functions)


def count(dataset):
    """How many elements the dataset gives within a graph."""
    total = 0
    for _ in dataset:
        total += 1
    return total


def test_a_dataset_made_within_a_function_lives_as_long_as_the_function(phantom_store):
    before = held()
    made = tf.function(lambda: count(volume_dataset(phantom_store)))
    for _ in range(2):
        assert made() == 4
        assert len(held() - before) == 1
    del made
    assert not held() - before


def test_a_dataset_that_a_function_captured_may_lose_its_name(phantom_store):
    before = held()
    names = {"whole": volume_dataset(phantom_store), "part": patch_dataset(phantom_store, (8, 8, 8), stop=9).take(7)}
    captured = tf.function(lambda: count(names["whole"]) + count(names["part"]))
    assert captured() == 11
    names.clear()
    gc.collect()
    assert captured() == 11
    del captured
    assert not held() - before


@pytest.mark.parametrize("threads", [None, 2])
def test_datasets_are_interleaved(phantom_store, threads):
    both = tf.data.Dataset.range(2).interleave(
        lambda _: volume_dataset(phantom_store), cycle_length=2, num_parallel_calls=threads
    )
    gc.collect()
    expected = hashes(volume_dataset(phantom_store))
    for _ in range(2):
        assert hashes(both) == [one for one in expected for _ in range(2)]
    flat = tf.function(lambda: count(tf.data.Dataset.range(2).flat_map(lambda _: volume_dataset(phantom_store))))
    assert flat() == 8
    gc.collect()
    assert flat() == 8


def test_a_dataset_that_was_a_variant_is_the_same(phantom_store):
    before = held()
    dataset = volume_dataset(phantom_store)
    expected, spec = hashes(dataset), dataset.element_spec
    again = tf.data.experimental.from_variant(tf.data.experimental.to_variant(dataset), spec)
    del dataset
    gc.collect()
    assert hashes(again) == expected
    elements = iter(again)
    del again
    gc.collect()
    assert [digest(element) for element in elements] == expected
    del elements
    assert not held() - before


def test_a_dataset_whose_files_are_closed_says_what_to_do(phantom_store):
    dataset = volume_dataset(phantom_store)
    newest = max(python_op._functions)
    load = python_op._functions.pop(newest)
    with pytest.raises(InputError, match="keep a reference to the dataset"):
        next(Batches(dataset))
    python_op._functions[newest] = load
    assert len(hashes(dataset)) == 4


# --- Arguments ---


@pytest.mark.parametrize("make", [volume_dataset, lambda store, **k: patch_dataset(store, (8, 8, 8), **k)])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dtype": "int8"}, "dtype must be one of float32, bfloat16, got 'int8'"),
        ({"dtype": "float64"}, "dtype must be one of float32, bfloat16, got 'float64'"),
        ({"threads": -1}, "threads must be an integer of at least 1, got -1"),
        ({"threads": 1.5}, "threads must be an integer of at least 1, got 1.5"),
        ({"batch": 0}, "batch must be an integer of at least 1, got 0"),
        ({"start": -5}, "start must be an integer of at least 0, got -5"),
        ({"stop": -1}, "stop must be an integer of at least 0, got -1"),
        ({"seed": 1.5}, "seed must be an integer, got 1.5"),
        ({"multiple": 0}, "multiple must be an integer of at least 1, got 0"),
        ({"page_budget_bytes": -1}, "page_budget_bytes must be an integer of at least 0, got -1"),
        ({"share": Share(0, 2, 4), "start": 2}, "start must be a multiple of the 4 samples of a step, got 2; give 0"),
        ({"share": Share(0, 2, 4), "stop": 7}, "stop must be a multiple of the 4 samples of a step, got 7; give 4"),
        ({"share": Share(0, 2, 4), "batch": 4}, "batch must divide a worker's 2 samples of a step, got 4"),
    ],
)
def test_numbers_out_of_range_are_refused(phantom_store, make, wrong, message):
    with pytest.raises(InputError, match=message) as caught:
        make(phantom_store, **wrong)
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize("make", [volume_dataset, lambda store, **k: patch_dataset(store, (8, 0, 8), **k)])
def test_all_wrong_arguments_are_told_at_once(phantom_store, make):
    wrong = {"split": "dev", "extent": "tile", "channels": (), "regions": ("XX",), "dtype": "int8", "start": -1}
    with pytest.raises(InputError) as caught:
        make(phantom_store, batch=0, threads=0, seed="1", multiple=-1, **wrong)
    named = {problem.split()[0] for problem in caught.value.problems}
    assert named - {"patch_shape"} == {*wrong, "batch", "threads", "seed", "multiple"}
    assert len(caught.value.problems) == len(named) == (10 if make is volume_dataset else 11)


def test_numpy_s_integers_are_integers(phantom_store):
    one = np.int64(1)
    assert len(hashes(volume_dataset(phantom_store, start=one, batch=one, threads=one, seed=one, stop=one + one))) == 1


@pytest.mark.parametrize("extent", ["brain", "full"])
def test_a_grid_that_would_lose_voxels_is_refused(phantom_store, extent):
    least = grid_size(phantom_store, extent=extent, multiple=1)
    image, _ = next(iter(volume_dataset(phantom_store, extent=extent, grid=least)))
    assert image.shape[1:4] == least
    smaller = (*least[:2], least[2] - 1)
    for grid in (smaller, (8, 8, 8), (0, 8, 8), least[:2], (*least[:2], 99.5)):
        rule = f"grid must be three integers of at least {by(least)}, .*, got {by(grid)};"
        with pytest.raises(InputError, match=rule):
            volume_dataset(phantom_store, extent=extent, grid=grid)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"sampling": "dense"}, "sampling must be one of random, foreground, grid, centre, got 'dense'"),
        ({"foreground": 2}, r"foreground must be in \[0, 1\], got 2"),
        ({"extent": "tile"}, "extent must be one of brain, full, got 'tile'"),
        ({"regions": ("XX",)}, "regions must be among WT, TC, ET, each once, got XX"),
        ({"read_mode": "fast"}, "read mode must be one of auto, mmap, pread, ram, got 'fast'"),
    ],
)
def test_bad_patch_arguments_are_refused_by_name(phantom_store, wrong, message):
    with pytest.raises(InputError, match=message):
        patch_dataset(phantom_store, (8, 8, 8), **wrong)


GOLDEN_PATCHES = 311911526
GOLDEN_VOLUMES = 946245552
