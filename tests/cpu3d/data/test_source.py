"""The tf.data source against the arrays it streams from."""

import dataclasses
import hashlib
import math
import shutil
import zlib
from unittest.mock import Mock

import numpy as np
import pytest
import tensorflow as tf

from cpu3d.data import source
from cpu3d.data.augment import AUGMENTS, AugmentConfig
from cpu3d.data.cases.case import facts_of
from cpu3d.data.files.reader import Reader
from cpu3d.data.manifest import Geometry, array_path, remake
from cpu3d.data.nifti import affine_rows
from cpu3d.data.region import crop
from cpu3d.data.sampling import Share
from cpu3d.data.source import (
    Batches,
    PatchSampling,
    open_store,
    patch_dataset,
    volume_dataset,
)
from cpu3d.data.store import Store, write_store
from cpu3d.data.stores.convert import write_arrays
from cpu3d.errors import InputError
from tests.cpu3d.data.made_datasets import make_record, manifest_of, tiny_image, tiny_label

AUGMENT = AugmentConfig(flip=True, gain=0.2, offset=0.2)
EVERY = dataclasses.replace(AUGMENTS["nnunet"], cutmix=0.5)
SEED = 27  # by which the first four samples have all changes of EVERY between them
FORMATS = {"b2nd": ("b2nd", False), "cropped": ("npy", True), "cropped b2nd": ("b2nd", True)}


def digest(element):
    tensors = [tf.io.serialize_tensor(tensor).numpy() for tensor in tf.nest.flatten(element)]
    return hashlib.sha256(b"".join(tensors)).hexdigest()


def hashes(dataset):
    return [digest(element) for element in Batches(dataset)]


def in_step(first, second):
    """Pairs of two streams, which are equally long and not empty."""
    first = list(first)
    second = list(second)
    assert len(first) == len(second) > 0
    return zip(first, second)


@pytest.fixture(scope="session")
def other_stores(phantom_store, tmp_path_factory):
    """The phantoms in every other format, by the names of FORMATS."""
    stores = {}
    for name, (format_, cropped) in FORMATS.items():
        folder = tmp_path_factory.mktemp("formats")
        records = []
        (folder / "cases").mkdir()
        for record in phantom_store.manifest.cases:
            image = np.asarray(phantom_store.image(record.case_id))
            label = np.asarray(phantom_store.label(record.case_id))
            written = write_arrays(folder, record, image, label, format_=format_, cropped=cropped)
            records.append(written)
        write_store(folder, remake(phantom_store.manifest, cases=records))
        stores[name] = open_store(folder)
    return stores


KINDS = {
    "volumes": {"augment": AUGMENT, "dtype": "bfloat16"},
    "every change": {"augment": EVERY},
    "crops": {"augment": EVERY, "whole_every": 3, "multiple": 4},
    "patches": {"augment": EVERY, "sampling": "foreground"},
}


def hashes_of(store, kind, **more):
    """Hashes of the samples of a short stream."""
    options = {"seed": SEED, "stop": 5, **KINDS[kind], **more}
    if kind == "patches":
        return hashes(patch_dataset(store, (20, 30, 17), **options))
    return hashes(volume_dataset(store, **options))


@pytest.fixture(scope="module")
def expected(phantom_store):
    """Kind and extent -> the hashes of the phantoms."""
    return {
        (kind, extent): hashes_of(phantom_store, kind, extent=extent)
        for kind in KINDS
        for extent in ("brain", "full")
    }


@pytest.mark.parametrize("extent", ["brain", "full"])
@pytest.mark.parametrize("name", [*FORMATS, "mmap", "pread"])
def test_every_format_and_read_mode_gives_the_same_bits(
    phantom_store, other_stores, expected, name, extent
):
    store = other_stores.get(name, phantom_store)
    reader = Reader(store.folder, name) if name not in FORMATS else None
    for kind in KINDS:
        made = hashes_of(store, kind, extent=extent, reader=reader)
        assert made == expected[kind, extent], kind


@pytest.mark.parametrize("extent", ["brain", "full"])
@pytest.mark.parametrize(
    ("how", "shape"), [({"sampling": "foreground"}, (16, 12, 20)), ({}, (20, 12, 64))]
)
def test_a_patch_is_the_crop_of_its_normalised_volume_bit_for_bit(
    phantom_store, how, shape, extent
):
    cases = phantom_store.cases("train")
    codes = (phantom_store.manifest.regions["ET"],)
    options = {**how, "foreground": 1.0, "extent": extent, "seed": 4, "shuffle": False}
    patches = PatchSampling(shape, codes=codes, **options)
    chosen = {"regions": ("ET",)}
    wide = volume_dataset(phantom_store, extent="full", multiple=1, shuffle=False, **chosen)
    volumes = [[volume[0].numpy() for volume in pair] for pair in wide]
    dataset = patch_dataset(phantom_store, shape, **options, **chosen)
    for position, patch in in_step(range(len(cases)), dataset):
        sample = source.patch_at(position, patches, cases)
        for own, volume in zip(patch, volumes[sample.case_index]):
            expected = crop(volume, sample.region)
            assert own[0].shape == expected.shape
            assert own[0].numpy().tobytes() == expected.tobytes()


# --- The stream ---


@pytest.mark.parametrize("kind", KINDS)
def test_a_restart_at_every_position_with_any_threads_continues_bit_for_bit(
    phantom_store, expected, kind
):
    whole = expected[kind, "brain"]
    assert len(set(whole)) == len(whole) == 5
    for start in range(5):
        rest = hashes_of(phantom_store, kind, start=start, threads=3 - start % 3)
        assert rest == whole[start:]


@pytest.mark.parametrize("kind", ["volumes", "crops", "patches"])
def test_workers_together_give_the_bits_of_one_in_the_same_order(phantom_store, kind):
    span = {"start": 4, "stop": 12}
    alone = {"share": Share(0, 1, 4)}  # in steps of as many samples
    joined = {}
    for share in (Share(0, 2, 4), Share(1, 2, 4), Share(2, 4, 4)):
        own = hashes_of(phantom_store, kind, share=share, threads=1 + share.rank % 2, **span)
        joined.update(zip(share.positions(**span), own))
    assert joined == dict(zip(range(4, 12), hashes_of(phantom_store, kind, **alone, **span)))
    # An epoch of four cases is one whole step of three.
    assert len(hashes_of(phantom_store, kind, share=Share(0, 3, 3), stop=None)) == 1


def written(folder, arrays, spacing_mm=(1.0, 1.0, 1.0), **fields):
    """The store of cases with these images and labels, on a grid in axes R A S."""
    affine = affine_rows(np.diag([*spacing_mm, 1]))
    (folder / "cases").mkdir()
    records = []
    for case_id, (image, label) in arrays.items():
        geometry = Geometry(label.shape, affine, "RAS", 1, 1)
        facts = {"spacing_mm": spacing_mm, **facts_of(image, label)}
        record = make_record(case_id, geometry=geometry, **facts)
        records.append(write_arrays(folder, record, image, label, format_="npy", cropped=False))
    write_store(folder, manifest_of(records, **fields))
    return open_store(folder)


def test_what_a_seed_draws_never_changes_silently(tmp_path):
    arrays = {}
    for number, case_id in enumerate("abc"):
        image = np.stack([tiny_image(number), tiny_image(9 + number)], -1)
        arrays[case_id] = (image, tiny_label(1, 2, number))
    labels = {0: "none", 1: "one", 2: "two"}
    regions = {"all": (1, 2), "two": (2,)}
    store = written(tmp_path, arrays, channels=("A", "B"), labels=labels, regions=regions)
    common = {"augment": dataclasses.replace(AUGMENT, cutmix=0.5), "seed": 11, "stop": 6}
    patches = {"sampling": "foreground", "foreground": 0.5, "extent": "full", "batch": 2}
    assert rounded_crc32(patch_dataset(store, (4, 5, 3), **patches, **common)) == 3578590071
    assert rounded_crc32(volume_dataset(store, **common)) == 1026308560


def rounded_crc32(dataset):
    """A check sum of images and targets, which is the same on every host."""
    arrays = [array.numpy() for sample in dataset for array in sample]
    rounded = [np.round(array, 3).astype(np.float32).tobytes() for array in arrays]
    return zlib.crc32(b"".join(rounded))


# --- Channels, and what is outside of a patch ---


def test_some_channels_and_regions_are_those_of_all(phantom_store):
    every = volume_dataset(phantom_store, augment=EVERY, stop=12)
    chosen = {"channels": ("t1gd", "FLAIR"), "regions": ("ET", "WT")}
    some = volume_dataset(phantom_store, augment=EVERY, stop=12, **chosen)
    for (image, target), (picked, regions) in in_step(every, some):
        np.testing.assert_allclose(picked, image.numpy()[..., [2, 0]], atol=1e-3)
        np.testing.assert_array_equal(regions, target.numpy()[..., [2, 0]])


def test_what_is_turned_keeps_its_shape_in_mm_and_is_what_is_around_a_patch(tmp_path):
    """Of a ball in a case whose voxels are all 100: beside a patch there is no 0."""
    spacing_mm = (2.0, 2.0, 1.0)
    places_mm = (np.moveaxis(np.indices((60, 60, 60)), 0, -1) - 29.5) * spacing_mm
    label = np.linalg.norm(places_mm, axis=-1) < 14
    image = np.full((60, 60, 60, 1), 100, np.int16)
    image[0, 0, 0] = 300
    store = written(tmp_path, {"a": (image, label.astype(np.uint8))}, spacing_mm)
    turns = {"augment": AugmentConfig(flip=False, gain=0, offset=0, rotation_deg=40), "stop": 4}
    around = {"sampling": "foreground", "foreground": 1.0}
    for patch, _ in patch_dataset(store, (8, 8, 8), **around, **turns):
        np.testing.assert_allclose(patch, patch[0, 4, 4, 4, 0], atol=1e-3)
    for _, target in volume_dataset(store, **turns):
        places_mm = np.argwhere(target[0, ..., 0]) * spacing_mm
        assert places_mm.std(axis=0) == pytest.approx([14 / np.sqrt(5)] * 3, rel=0.05)


def test_volumes_have_their_own_grids_and_those_of_a_batch_the_least_that_holds_all(phantom_store):
    how = {"multiple": (4, 2, 2), "seed": SEED, "stop": 6}
    alone = list(volume_dataset(phantom_store, **how))
    assert len({tuple(image.shape) for image, _ in alone}) > 1
    pairs = list(volume_dataset(phantom_store, batch=2, **how))
    # of batches that begin in a step of four crops
    crops = volume_dataset(
        phantom_store, batch=2, whole_every=2, start=1, share=Share(batch=4), **how
    )
    voxels = [math.prod(image.shape) for image, _ in crops]
    assert max(voxels) < math.prod(pairs[0][0].shape) / 2
    for pair, members in zip(pairs, (alone[:2], alone[2:4], alone[4:])):
        grid = tuple(map(max, *(image.shape[1:4] for image, _ in members)))
        for index, member in enumerate(members):
            for volumes, volume in zip(pair, member):
                assert volumes.shape[1:4] == grid
                assert np.count_nonzero(volumes[index]) == np.count_nonzero(volume)
    later = volume_dataset(phantom_store, batch=2, start=2, **{**how, "stop": 5})
    assert hashes(later) == [digest(pairs[1])]
    # of two workers each has one pair of a step's four
    share = Share(1, workers=2, batch=4)
    second = volume_dataset(phantom_store, batch=2, share=share, **{**how, "stop": 4})
    assert hashes(second) == [digest(pairs[1])]


# --- Failures ---


@pytest.mark.parametrize("threads", [1, 3])
def test_a_file_cut_while_a_run_reads_is_named_after_what_was_good(
    phantom_store, tmp_path, monkeypatch, threads
):
    store = open_store(shutil.copytree(phantom_store.folder, tmp_path / "store"))
    reader = Reader(store.folder, "pread")
    batches = Batches(volume_dataset(store, shuffle=False, reader=reader, threads=threads))
    cut = array_path(store.folder, store.cases("train")[2], "x")
    cut.write_bytes(cut.read_bytes()[:-1])
    good = hashes(volume_dataset(phantom_store, shuffle=False, stop=2))
    assert [digest(next(batches)) for _ in range(2)] == good
    with pytest.raises(InputError, match=f"store file {cut} must be .* bytes long") as caught:
        next(batches)
    assert len(caught.value.problems) == 1
    # A disk that fails is named as it is.
    monkeypatch.setattr("os.preadv", Mock(side_effect=OSError(5, "bad")))
    with pytest.raises(OSError, match="bad") as failed:
        next(Batches(volume_dataset(store, reader=reader, stop=1)))
    assert str(store.folder) in failed.value.filename
    monkeypatch.undo()
    # The next run sees it at once, in the worker that has a look at this file.
    monkeypatch.setattr("cpu3d.data.files.loader.file_system", lambda folder: "nfs4")
    assert source.open_reading(store, share=Share(1, 2)).mode == "pread"
    with pytest.raises(InputError, match=f"store file {cut}"):
        source.open_reading(store, share=Share(0, 2))
    monkeypatch.setattr("os.preadv", Mock(side_effect=OSError(5, "a bad disk")))
    with pytest.raises(OSError, match=r"a bad disk.*\.npy"):
        next(Batches(volume_dataset(store, reader=reader)))


# --- Arguments ---


@pytest.mark.parametrize(
    "wrong",
    [
        {"split": "dev"},
        {"channels": ("PET",)},
        {"channels": ("T1w",) * 2},
        {"regions": ()},
        {"extent": "tile"},
        {"dtype": "float64"},
        {"batch": 0},
        {"start": -1},
        {"stop": -1},
        {"threads": 0},
        {"batch": True},
        {"whole_every": 0},
        {"whole_every": 2, "grid": (64, 64, 64)},
        {"grid": (64, 64)},
        {"grid": (64, 64, 99.5)},
    ],
)
def test_arguments_out_of_range_are_refused_by_name(phantom_store, wrong):
    *_, name = wrong
    with pytest.raises(InputError, match=f"^{name} must be .*, got ") as caught:
        volume_dataset(phantom_store, **wrong)
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(
    ("split", "rule"),
    [
        ("train", "case a must have a label to train or score on"),
        ("val", r"split 'val' of .* must hold cases, got none"),
    ],
)
def test_stores_and_splits_that_cannot_be_read_so_are_refused(tmp_path, split, rule):
    bare = make_record(label_voxels={}, centres={}, label_voxels_sha256="")
    write_store(tmp_path, manifest_of([bare]))
    with pytest.raises(InputError, match=rule):
        volume_dataset(open_store(tmp_path), split=split)


@pytest.mark.parametrize("extent", ["brain", "full"])
def test_a_grid_that_would_lose_voxels_is_refused(phantom_store, extent):
    manifest = phantom_store.manifest
    store = phantom_store.with_split({**manifest.split, "train": manifest.split["val"]})
    records = manifest.cases
    sides = [record.box.size if extent == "brain" else record.shape for record in records]
    least = tuple(np.max(sides, 0))
    image, _ = next(iter(volume_dataset(store, extent=extent, grid=least)))
    assert image.shape[1:4] == least
    for axis in range(3):
        grid = [side - (k == axis) for k, side in enumerate(least)]
        with pytest.raises(InputError, match="grid must be three integers of at least"):
            volume_dataset(store, extent=extent, grid=grid)


def test_volumes_whose_labels_or_regions_pair_left_and_right_are_not_mirrored_along_x(
    phantom_store,
):
    manifest = phantom_store.manifest
    names = ("background", "left kidney", "right kidney", "liver")
    sided = {"labels": dict(zip(manifest.labels, names))}
    regions = {"regions": dict(zip(names[1:], manifest.regions.values()))}
    for changes, mirrored in (({}, 8), (sided, 4), (regions, 4)):
        store = Store(phantom_store.folder, dataclasses.replace(manifest, **changes))
        augment = AugmentConfig(gain=0, offset=0)
        made = volume_dataset(store, split="val", augment=augment, stop=40)
        assert len({image.numpy().tobytes() for image, _ in made}) == mirrored
