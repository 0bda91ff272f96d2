"""A store as a tf.data.Dataset of whole volumes: memory-mapped, normalised in the graph, the same for a seed anywhere.

    from cpu3d.data.source import open_store, volume_dataset

    store = open_store("store")
    for image, target in volume_dataset(store, split="train", stop=100):
        ...  # image (1, X, Y, Z, C) float32, target (1, X, Y, Z, R) uint8

Voxels go from the page cache into TensorFlow without a copy on the way: a .npy map is C-ordered, native and aligned to
64 bytes, so the tensor *is* the map. What is not touched (outside the box) is not read.
"""

from typing import Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf

from cpu3d.data.augment import NO_AUGMENT, AugmentConfig, flip, resample, sample_params
from cpu3d.data.extent import case_region, grid_size
from cpu3d.data.region import Region, Shape3, crop
from cpu3d.data.sampling import sample_at
from cpu3d.data.store import CaseRecord, Store, check_names, open_store
from cpu3d.errors import InputError

__all__ = ["case_region", "grid_size", "normalise", "open_store", "stored_volumes", "volume_dataset"]


def volume_dataset(
    store: Store,
    *,
    split: str = "train",
    start: int = 0,
    stop: Optional[int] = None,
    shuffle: bool = True,
    seed: int = 0,
    batch: int = 1,
    extent: str = "brain",
    grid: Optional[Shape3] = None,
    multiple: int = 16,
    channels: Optional[Sequence[str]] = None,
    regions: Optional[Sequence[str]] = None,
    augment: AugmentConfig = NO_AUGMENT,
    dtype: str = "float32",
) -> tf.data.Dataset:
    """Whole volumes of a split as batches `(image, target)`, in an order that is a pure function of the seed.

    image: (batch, X, Y, Z, C) in `dtype` ("float32" or "bfloat16"): per channel (value - mean) / std over the whole
    volume's non-zero voxels, 0 where the voxel is 0. target: (batch, X, Y, Z, R) uint8, 1 inside the region.

    The stream is endless: epoch after epoch over the split's cases, each once an epoch. `start` and `stop` are
    positions in it, counted in samples: `start=k` gives exactly what an uninterrupted run gives from sample k on,
    augmentation included. `stop` defaults to the end of the first epoch. A last incomplete batch is dropped.

    `extent` "brain" cuts the same box size out of every case, around its brain, large enough to lose no non-zero or
    labelled voxel of any case of the store; "full" keeps the whole grid. Both are padded with zeros to a multiple of
    `multiple`; `grid` asks for a size (X, Y, Z) of your own.

    In memory at a time, besides mapped pages: the batch in use, one batch ahead, and one volume in preparation.
    Raises InputError for an unknown split, channel, region or extent, an empty split or cases without labels.
    """
    records = _labelled(store, split)
    size = grid_size(store, extent=extent, multiple=multiple) if grid is None else tuple(grid)
    picked = _pick("channels", channels, store.manifest.channels)
    names = _pick("regions", regions, tuple(store.manifest.regions))
    table = _region_table(store, [tuple(store.manifest.regions)[i] for i in names])
    place = [case_region(record, size, extent) for record in records]
    everything = picked == tuple(range(len(store.manifest.channels)))

    def draw(position):
        sample = sample_at(int(position), cases=len(records), seed=seed, shuffle=shuffle)
        record, region = records[sample.index], place[sample.index]
        params = sample_params(augment, seed=seed, position=sample.position, channels=len(store.manifest.channels))
        scale, shift = _normalisation(record)
        inside = region.slices(record.shape)
        return (
            *_stored(store, record),
            np.float32(scale * params.gain),
            np.float32(shift * params.gain + params.offset),
            np.int64([part.start for part in inside]),
            np.int64([part.stop - part.start for part in inside]),
            np.int64(region.padding(record.shape)),
            np.array(params.flips),
            np.float32([params.plane_xy, params.plane_yz]),
        )

    def prepare(bits, is_half, label, scale, shift, inside_start, inside_size, padding, flips, planes):
        bits = tf.slice(bits, tf.concat([inside_start, [0]], 0), tf.concat([inside_size, [-1]], 0))
        label = tf.slice(label, inside_start, inside_size)
        if not everything:
            bits, scale, shift = (tf.gather(part, picked, axis=-1) for part in (bits, scale, shift))
        image = _normalise(bits, is_half, scale, shift)
        if augment.resamples:
            image = resample(image, planes[0], planes[1], linear=True)
            label = resample(label[..., None], planes[0], planes[1], linear=False)[..., 0]
        image = tf.cast(image, dtype)
        target = tf.gather(table, tf.cast(label, tf.int32))
        image = tf.pad(image, tf.concat([padding, [[0, 0]]], 0))
        target = tf.pad(target, tf.concat([padding, [[0, 0]]], 0))
        image = tf.ensure_shape(flip(image, flips), (*size, len(picked)))
        return image, tf.ensure_shape(flip(target, flips), (*size, len(names)))

    end = len(records) if stop is None else stop
    kinds = (tf.int16, tf.bool, tf.uint8, tf.float32, tf.float32, tf.int64, tf.int64, tf.int64, tf.bool, tf.float32)
    shapes = ((None,) * 4, (), (None,) * 3, (None,), (None,), (3,), (3,), (3, 2), (3,), (2, 4))
    dataset = tf.data.Dataset.range(start, max(end, start))
    dataset = dataset.map(lambda position: prepare(*_numpy(draw, position, kinds, shapes)))
    # Batching copies; a batch of one needs only another axis.
    dataset = dataset.map(lambda *pair: [part[None] for part in pair]) if batch == 1 else dataset.batch(batch, True)
    return dataset.prefetch(1).with_options(_bounded())


def stored_volumes(store: Store, *, split: str = "train") -> tf.data.Dataset:
    """The split's cases as they are stored: `(bits, is_half, label)`, in the manifest's order, without any copy.

    bits: (X, Y, Z, C) int16; where `is_half` is true they are float16 bits (`tf.bitcast` them). label: (X, Y, Z) uint8.
    The tensors are the mapped pages themselves: nothing is read before it is used, and nothing may be written.
    """
    records = _labelled(store, split)
    kinds, shapes = (tf.int16, tf.bool, tf.uint8), ((None,) * 4, (), (None,) * 3)
    dataset = tf.data.Dataset.range(len(records))
    dataset = dataset.map(lambda index: _numpy(lambda i: _stored(store, records[i]), index, kinds, shapes))
    return dataset.with_options(_bounded())


def normalise(image: np.ndarray, record: CaseRecord, region: Region) -> np.ndarray:
    """What the graph does to an image, in NumPy: `region` of (X, Y, Z, C) as float32, for prediction and for tests."""
    scale, shift = _normalisation(record)
    part = crop(image, region)
    return np.where(part == 0, np.float32(0), part.astype(np.float32) * np.float32(scale) + np.float32(shift))


# --- Private helpers ---


def _labelled(store: Store, split: str) -> Tuple[CaseRecord, ...]:
    if split not in store.manifest.split:
        raise InputError(f"split must be one of {', '.join(store.manifest.split)}, got {split!r}; pick one")
    records = store.cases(split)
    if not records:
        raise InputError(
            f"split {split!r} of {store.folder} must hold cases, it is empty; prepare with another --split"
        )
    bare = [record.case_id for record in records if not record.has_label]
    if bare:
        raise InputError(*(f"case {case_id} must have a label to train or score on, it has none" for case_id in bare))
    store.check(records)
    return records


def _pick(what: str, wanted: Optional[Sequence[str]], there: Sequence[str]) -> Tuple[int, ...]:
    """Indices of the wanted names; all of them for None."""
    if wanted is None:
        return tuple(range(len(there)))
    check_names(what, wanted, there)
    return tuple(there.index(name) for name in wanted)


def _region_table(store: Store, names: Sequence[str]) -> np.ndarray:
    """(256, R) uint8: row = label code, column = region."""
    table = np.zeros((256, len(names)), np.uint8)
    for column, name in enumerate(names):
        table[list(store.manifest.regions[name]), column] = 1
    return table


def _normalisation(record: CaseRecord) -> Tuple[np.ndarray, np.ndarray]:
    """(scale, shift), float64, so that scale * value + shift has mean 0 and standard deviation 1 over the brain."""
    scale = 1 / np.array(record.channel_std)
    return scale, -np.array(record.channel_mean) * scale


def _stored(store: Store, record: CaseRecord) -> Tuple[np.ndarray, np.bool_, np.ndarray]:
    """A case's arrays as maps. float16 goes as its bits: one dataset has one dtype, and a view costs nothing."""
    image = store.image(record.case_id)
    return image.view(np.int16), np.bool_(image.dtype == np.float16), store.label(record.case_id)


def _numpy(function, position, kinds, shapes):
    """Call NumPy code from the graph. Stateless: a stateful op would make a deterministic pipeline serial."""
    outputs = tf.numpy_function(function, [position], kinds, stateful=False)
    return [tf.ensure_shape(output, shape) for output, shape in zip(outputs, shapes)]


def _normalise(bits, is_half, scale, shift):
    """Stored bits (X, Y, Z, C) -> float32, background exactly 0.

    Rows of Z * C values are scaled at once: broadcasting four values over the last axis is several times slower.
    """
    value = tf.cond(
        is_half,
        lambda: tf.cast(tf.bitcast(bits, tf.float16), tf.float32),
        lambda: tf.cast(bits, tf.float32),
    )
    shape = tf.shape(value)
    rows = tf.reshape(value, (shape[0] * shape[1], shape[2] * shape[3]))
    scaled = rows * tf.tile(scale, shape[2:3]) + tf.tile(shift, shape[2:3])
    return tf.reshape(tf.where(tf.equal(rows, 0), 0.0, scaled), shape)


def _bounded() -> tf.data.Options:
    """One sample ahead, one thread, no autotuning: its memory budget is half of the host's RAM by default."""
    options = tf.data.Options()
    options.autotune.enabled = False
    options.deterministic = True
    options.experimental_optimization.inject_prefetch = False
    options.threading.private_threadpool_size = 1
    options.threading.max_intra_op_parallelism = 1
    return options
