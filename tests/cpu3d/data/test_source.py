"""The tf.data source against the arrays it streams from."""

import gc
import hashlib
import shutil
import threading
import zlib

import numpy as np
import pytest
import tensorflow as tf

from cpu3d.data import pipeline
from cpu3d.data.augment import NO_AUGMENT, AugmentConfig
from cpu3d.data.files.reader import Reader
from cpu3d.data.records import CaseRecord, Geometry, array_path, make_manifest, remake
from cpu3d.data.region import crop, whole
from cpu3d.data.sampling import Share
from cpu3d.data.source import (
    Batches,
    case_region,
    finish_of,
    grid_size,
    normalise,
    open_reading,
    open_store,
    patch_at,
    patch_dataset,
    patch_sampling,
    volume_dataset,
)
from cpu3d.data.store import write_store
from cpu3d.data.stores.case import facts_of
from cpu3d.data.stores.conversion import write_arrays
from cpu3d.errors import InputError
from cpu3d.util.records import by

FREE_BYTES = 8 << 30
AUGMENT = AugmentConfig(flip=True, gain=0.2, offset=0.2)
TURNED = AugmentConfig(rotation_deg=10, scaling=0.1)
FORMATS = {"b2nd": ("b2nd", False), "cropped": ("npy", True), "cropped b2nd": ("b2nd", True)}

# Golden: integers only, which every machine and version computes alike.
GOLDEN_PATCHES = 311911526
GOLDEN_VOLUMES = 946245552


def digest(element):
    parts = tf.nest.flatten(element)
    return hashlib.sha256(b"".join(tf.io.serialize_tensor(part).numpy() for part in parts)).hexdigest()


def hashes(dataset):
    return [digest(element) for element in Batches(dataset)]


def rewritten(store, folder, format_, cropped):
    """The cases of a store once more, in another format."""
    (folder / "cases").mkdir(parents=True)
    records = []
    for record in store.manifest.cases:
        image, label = np.asarray(store.image(record.case_id)), np.asarray(store.label(record.case_id))
        records.append(write_arrays(folder, record, image, label, format_=format_, cropped=cropped))
    write_store(folder, remake(store.manifest, cases=records))
    return open_store(folder)


@pytest.fixture(scope="session")
def other_stores(phantom_store, tmp_path_factory):
    """The phantoms in every other format, by the names of FORMATS."""
    folder = tmp_path_factory.mktemp("formats")
    return {name: rewritten(phantom_store, folder / name, *how) for name, how in FORMATS.items()}


def test_the_tensor_is_the_mapped_page_itself(phantom_store):
    reader, record, maps = Reader(phantom_store.folder), phantom_store.cases("train")[0], []
    op = pipeline.python_op(
        lambda _: (maps.append(reader.array(record, "x")), maps[0])[1:], {"bits": ("int16", (None,) * 4)}
    )
    (tensor,) = tf.data.Dataset.range(1).map(lambda index: op(index)["bits"])
    assert tensor._numpy().__array_interface__["data"][0] == maps[0].__array_interface__["data"][0]
    assert not maps[0].flags.writeable


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


def test_channels_and_regions_are_picked_by_name(phantom_store):
    full = next(iter(volume_dataset(phantom_store)))
    image, target = next(iter(volume_dataset(phantom_store, channels=("T2w", "FLAIR"), regions=("ET",))))
    np.testing.assert_array_equal(image, tf.gather(full[0], [3, 0], axis=-1))
    np.testing.assert_array_equal(target, full[1][..., 2:])


# --- Formats and read modes ---


@pytest.mark.parametrize("extent", ["brain", "full"])
@pytest.mark.parametrize("name", [*FORMATS, "mmap", "pread", "ram"])
def test_every_format_and_read_mode_gives_the_same_bits(phantom_store, other_stores, name, extent):
    store, mode = other_stores.get(name, phantom_store), None if name in FORMATS else name
    kinds = ({"augment": AUGMENT, "dtype": "bfloat16"}, {"augment": TURNED}, {"finished": False})
    for more in kinds if mode is None else kinds[:1]:
        expected = hashes(volume_dataset(phantom_store, extent=extent, seed=2, **more))
        assert hashes(volume_dataset(store, extent=extent, seed=2, read_mode=mode, **more)) == expected
    patches = {"extent": extent, "sampling": "foreground", "augment": AUGMENT, "stop": 6}
    expected = hashes(patch_dataset(phantom_store, (20, 30, 17), **patches))
    assert hashes(patch_dataset(store, (20, 30, 17), read_mode=mode, **patches)) == expected


def test_a_reading_of_other_cases_is_refused(phantom_store, other_stores):
    reading = open_reading(phantom_store, free_bytes=FREE_BYTES)
    for store, split in ((phantom_store, "val"), (other_stores["cropped"], "train")):
        with pytest.raises(InputError, match=f"read_mode must be a Reading opened for split {split} of {store.folder}"):
            volume_dataset(store, split=split, read_mode=reading)


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
            share = Share(rank, workers, 4)
            found.update(zip(share.positions(**span), hashes(make(share=share, threads=1 + rank % 2, **span))))
        assert found == expected


def test_a_validation_is_dealt_among_workers_and_loses_no_case(phantom_store):
    expected = hashes(volume_dataset(phantom_store, shuffle=False))
    validated = lambda share: hashes(volume_dataset(phantom_store, shuffle=False, stop=4, share=share.singly()))
    assert [validated(Share(rank, 3, 6)) for rank in range(3)] == [expected[0::3], expected[1::3], expected[2::3]]
    assert validated(Share(4, 5, 5)) == []


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
    store = fixed_store(tmp_path)
    patches = {"sampling": "foreground", "foreground": 0.5, "seed": 11, "stop": 6, "extent": "full", "batch": 2}
    assert crc(patch_dataset(store, (4, 5, 3), augment=AUGMENT, finished=False, **patches)) == GOLDEN_PATCHES
    volumes = volume_dataset(store, multiple=4, augment=AUGMENT, seed=11, stop=6, finished=False)
    assert crc(volumes) == GOLDEN_VOLUMES


def crc(dataset):
    return zlib.crc32(b"".join(raw[name].numpy().tobytes() for raw in dataset for name in ("bits", "label", "flips")))


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


def test_a_dataset_whose_files_are_closed_says_what_to_do(phantom_store):
    dataset = volume_dataset(phantom_store)
    newest = max(pipeline._functions)
    load = pipeline._functions.pop(newest)
    with pytest.raises(InputError, match="keep a reference to the dataset"):
        next(Batches(dataset))
    pipeline._functions[newest] = load
    assert len(hashes(dataset)) == 4


# --- Arguments ---


@pytest.mark.parametrize("make", [volume_dataset, lambda store, **k: patch_dataset(store, (8, 8, 8), **k)])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"split": "dev"}, "split must be one of train, val, test, got 'dev'"),
        ({"channels": ("PET",)}, "channels must be among FLAIR, T1w, t1gd, T2w, each once, got PET"),
        ({"regions": ()}, "regions must be among WT, TC, ET, each once, got none"),
        ({"extent": "tile"}, "extent must be one of brain, full, got 'tile'"),
        ({"dtype": "float64"}, "dtype must be one of float32, bfloat16, got 'float64'"),
        ({"threads": 1.5}, "threads must be an integer of at least 1, got 1.5"),
        ({"batch": 0}, "batch must be an integer of at least 1, got 0"),
        ({"start": True}, "start must be an integer of at least 0, got True"),
        ({"stop": -1}, "stop must be an integer of at least 0, got -1"),
        ({"seed": 1.5}, "seed must be an integer, got 1.5"),
        ({"multiple": 0}, "multiple must be an integer of at least 1, got 0"),
        ({"read_mode": "disk"}, "read mode must be one of mmap, pread, ram, got 'disk'"),
        ({"share": Share(0, 2, 4), "start": 2}, "start must be a multiple of the 4 samples of a step, got 2"),
        ({"share": Share(0, 2, 4), "stop": 7}, "stop must be a multiple of the 4 samples of a step, got 7"),
        ({"share": Share(0, 2, 4), "batch": 4}, "batch must be a divisor of a worker's 2 samples of a step, got 4"),
    ],
)
def test_arguments_out_of_range_are_refused_by_name(phantom_store, make, wrong, message):
    with pytest.raises(InputError, match=message) as caught:
        make(phantom_store, **wrong)
    assert len(caught.value.problems) == 1


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


@pytest.mark.parametrize("what", [{}, {"extent": "full"}, {"patch_shape": (8, 8, 8)}, {"patch_shape": (16, 16, 16)}])
def test_a_rotation_is_one_in_the_millimetres_of_its_case(tiny_store, what):
    dataset = patch_dataset if "patch_shape" in what else volume_dataset
    assert tiny_store.cases("train")[0].spacing_mm == (1, 1, 2)
    for raw in dataset(tiny_store, augment=AugmentConfig(rotation_deg=20), finished=False, **what):
        (_, across_x, across_y, _), (_, along_y, along_z, _) = raw["planes"][0].numpy()
        np.testing.assert_allclose((across_x / across_y, along_y / along_z), (-1, -4), rtol=1e-6)
