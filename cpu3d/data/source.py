"""A store as a tf.data.Dataset of whole volumes or of patches: lazy, normalised, the same for a seed anywhere.

    from cpu3d.data.source import open_store, patch_dataset, volume_dataset

    store = open_store("store")
    for image, target in volume_dataset(store, split="train", stop=100):
        ...  # image (1, X, Y, Z, C) float32, target (1, X, Y, Z, R) uint8
    for image, target in patch_dataset(store, (96, 96, 96), sampling="foreground", batch=2):
        ...

Voxels go from the page cache into TensorFlow without a copy on the way: a .npy map is C-ordered, native and aligned to
64 bytes, so the tensor *is* the map. What is not touched (outside the patch, outside the brain's box) is not read.

What is drawn for a sample, its case, place and augmentation, is a pure function of the seed and the sample's position
in the endless stream of epochs: `start=k` gives exactly what an uninterrupted run gives from sample k on, whatever the
threads, the read mode and the store's format. Iterate through `Batches` to get a loader's errors as they are.
"""

from pathlib import Path
from typing import Any, Callable, Dict, Optional, Sequence, Tuple, Union

import numpy as np
import tensorflow as tf

from cpu3d.data.arguments import Checks, check_stream, volume_size
from cpu3d.data.augment import NO_AUGMENT, AugmentConfig
from cpu3d.data.extent import case_region, grid_size
from cpu3d.data.failures import Batches, own_errors
from cpu3d.data.finish import Finish, check_dtype, padded
from cpu3d.data.loader import BOX, Loader, normalise
from cpu3d.data.patches import OVERLAP, PatchSample, PatchSampling, patch_at
from cpu3d.data.python_op import python_op
from cpu3d.data.reading import Reading, labelled, open_reading
from cpu3d.data.records import CaseRecord
from cpu3d.data.region import Region, Shape3
from cpu3d.data.sampling import sample_at
from cpu3d.data.sharding import ALL, Share
from cpu3d.data.store import Store, check_names, open_store
from cpu3d.errors import InputError
from memory_estimator.host import read_host

__all__ = [
    "Batches",
    "Finish",
    "PatchSample",
    "PatchSampling",
    "case_region",
    "finish_of",
    "grid_size",
    "normalise",
    "open_reading",
    "open_store",
    "own_errors",
    "patch_at",
    "patch_dataset",
    "patch_sampling",
    "stored_volumes",
    "volume_dataset",
]

HORIZON = 1024
"""Positions that are looked into, at most, for what to keep in memory; below the records that a store keeps parsed."""


def volume_dataset(
    store: Store,
    *,
    split: str = "train",
    start: int = 0,
    stop: Optional[int] = None,
    shuffle: bool = True,
    seed: int = 0,
    batch: int = 1,
    share: Share = ALL,
    extent: str = "brain",
    grid: Optional[Shape3] = None,
    multiple: int = 16,
    channels: Optional[Sequence[str]] = None,
    regions: Optional[Sequence[str]] = None,
    augment: AugmentConfig = NO_AUGMENT,
    dtype: str = "float32",
    read_mode: Union[str, Reading] = "auto",
    page_budget_bytes: Optional[int] = None,
    threads: int = 1,
    finished: bool = True,
) -> tf.data.Dataset:
    """Whole volumes of a split as batches `(image, target)`, in an order that is a pure function of the seed.

    image: (batch, X, Y, Z, C) in `dtype` ("float32" or "bfloat16"): per channel (value - mean) / std over the whole
    volume's non-zero voxels, 0 where the voxel is 0. target: (batch, X, Y, Z, R) uint8, 1 inside the region.

    The stream is endless: epoch after epoch over the split's cases, each once an epoch. `start` and `stop` are
    positions in it, counted in samples. `stop` defaults to the end of the first epoch. A last incomplete batch is
    dropped.

    Of several workers each gives the samples of its `share`, and each is what it is without sharing. `start` and `stop`
    stay positions in the stream of all of them, where a step begins; by default those of the first epoch's whole steps.
    `batch` divides the worker's samples of a step. A share without steps gives its part of any positions.

    `extent` "brain" cuts the same box size out of every case, around its brain, large enough to lose no non-zero or
    labelled voxel of any case of the store; "full" keeps the whole grid. Both are padded with zeros to a multiple of
    `multiple`; `grid` asks for a size (X, Y, Z) of your own, which must hold that much.

    `read_mode` is one of READ_MODES, or a Reading that several datasets share; `page_budget_bytes` is how many pages of
    the store's files to leave in memory, half of what is free by default. `threads` prepare as many samples at a time.
    With `finished=False` the batches are raw, for `finish_of` to be applied where the model runs.

    In memory, besides mapped pages: the batch in use, one batch ahead, and a volume per thread in preparation.
    Raises InputError for all arguments out of range and unknown names at once, for a grid that would lose voxels, an
    empty split, cases without labels, and files that are damaged.
    """
    checks = Checks()
    records = checks.of(labelled, store, split)
    size = checks.of(volume_size, store, grid, extent=extent, multiple=multiple)

    def place_at(position: int) -> Tuple[CaseRecord, Region]:
        record = records[sample_at(position, cases=len(records), seed=seed, shuffle=shuffle).index]
        return record, case_region(record, size, extent)

    return _dataset(
        store,
        checks,
        place_at,
        size,
        split=split,
        epoch=len(records or ()),
        start=start,
        stop=stop,
        seed=seed,
        batch=batch,
        share=share,
        channels=channels,
        regions=regions,
        augment=augment,
        dtype=dtype,
        read_mode=read_mode,
        page_budget_bytes=page_budget_bytes,
        patches=False,
        threads=threads,
        finished=finished,
    )


def patch_dataset(
    store: Store,
    patch_shape: Shape3,
    *,
    split: str = "train",
    sampling: str = "random",
    foreground: float = 1 / 3,
    overlap: float = OVERLAP,
    start: int = 0,
    stop: Optional[int] = None,
    shuffle: bool = True,
    seed: int = 0,
    batch: int = 1,
    share: Share = ALL,
    extent: str = "brain",
    multiple: int = 16,
    channels: Optional[Sequence[str]] = None,
    regions: Optional[Sequence[str]] = None,
    augment: AugmentConfig = NO_AUGMENT,
    dtype: str = "float32",
    read_mode: Union[str, Reading] = "auto",
    page_budget_bytes: Optional[int] = None,
    threads: int = 1,
    finished: bool = True,
) -> tf.data.Dataset:
    """Patches of a split's cases as batches `(image, target)` of size `patch_shape`; only their own bytes are read.

    A patch is exactly what `crop` would cut out of its whole volume: the statistics it is normalised by are those of
    the volume, and what reaches outside is 0. Rotation and scaling turn a patch about its own centre, and what comes
    into its corners then is 0 as well.

    An epoch is one patch of each case, whether `sampling` is "random", "foreground" or "centre"; `PatchSampling` says
    what `sampling`, `foreground` and `overlap` mean. With "grid" it is all the patches that cover the common grid of
    the extent, rounded up to `multiple`, one case after another. `patch_at(position, patch_sampling(store, ...),
    records)` tells which patch of which case comes at a position. All else is as for `volume_dataset`.
    """
    checks = Checks()
    records = checks.of(labelled, store, split)
    drawn = checks.of(
        patch_sampling,
        store,
        patch_shape,
        sampling=sampling,
        foreground=foreground,
        overlap=overlap,
        shuffle=shuffle,
        seed=seed,
        extent=extent,
        multiple=multiple,
        regions=regions,
    )

    def place_at(position: int) -> Tuple[CaseRecord, Region]:
        sample = patch_at(position, drawn, records)
        return records[sample.index], sample.region

    return _dataset(
        store,
        checks,
        place_at,
        drawn.shape if drawn else None,
        split=split,
        epoch=len(records) * drawn.per_case if records and drawn else 0,
        start=start,
        stop=stop,
        seed=seed,
        batch=batch,
        share=share,
        channels=channels,
        regions=regions,
        augment=augment,
        dtype=dtype,
        read_mode=read_mode,
        page_budget_bytes=page_budget_bytes,
        patches=True,
        threads=threads,
        finished=finished,
    )


def patch_sampling(
    store: Store,
    patch_shape: Shape3,
    *,
    extent: str = "brain",
    multiple: int = 16,
    regions: Optional[Sequence[str]] = None,
    **drawn: Any,
) -> PatchSampling:
    """How `patch_dataset` draws patches from this store, given the same arguments; `drawn` are PatchSampling's own.

    Raises InputError for values out of range and unknown names, all at once.
    """
    checks = Checks()
    codes = checks.of(_codes, store, regions)
    grid = checks.of(grid_size, store, extent=extent, multiple=multiple)
    drawn.update(codes=codes or (), grid=grid or PatchSampling.grid, extent=extent)
    sampling = checks.of(PatchSampling, tuple(patch_shape), **drawn)
    checks.done()
    return sampling


def finish_of(
    store: Store,
    *,
    regions: Optional[Sequence[str]] = None,
    augment: AugmentConfig = NO_AUGMENT,
    dtype: str = "float32",
) -> Finish:
    """What turns raw batches of this store (`finished=False`) into `(image, target)`, given the dataset's arguments."""
    checks = Checks()
    checks.of(check_dtype, dtype)
    codes = checks.of(_codes, store, regions)
    checks.done()
    return Finish(codes, dtype, augment.resamples)


def stored_volumes(store: Store, *, split: str = "train", read_mode: Union[str, Reading] = "auto") -> tf.data.Dataset:
    """The split's cases as they are stored: `(bits, is_half, label)`, in the manifest's order.

    bits: (X, Y, Z, C) int16; where `is_half` is true they are float16 bits (`tf.bitcast` them). label: (X, Y, Z) uint8.
    Of a cropped store they are the box that is stored. Of .npy files that are mapped the tensors are the mapped pages
    themselves, without any copy: nothing is read before it is used, and nothing may be written.
    """
    records = labelled(store, split)
    reader = _reading(store, split, read_mode, None, patches=False, share=ALL).reader

    def stored(index):
        record = records[int(index)]
        half = np.bool_(record.image_dtype == "float16")
        return reader.array(record, "x").view(np.int16), half, reader.array(record, "y")

    op = python_op(stored, {name: BOX[name] for name in ("bits", "is_half", "label")})
    dataset = tf.data.Dataset.range(len(records)).map(lambda index: tuple(op(index).values()))
    return dataset.with_options(_bounded(1))


# --- Private helpers ---


def _dataset(
    store: Store,
    checks: Checks,
    place_at: Callable[[int], Tuple[CaseRecord, Region]],
    size: Optional[Shape3],
    *,
    split: str,
    epoch: int,
    start: int,
    stop: Optional[int],
    seed: int,
    batch: int,
    share: Share,
    channels: Optional[Sequence[str]],
    regions: Optional[Sequence[str]],
    augment: AugmentConfig,
    dtype: str,
    read_mode: Union[str, Reading],
    page_budget_bytes: Optional[int],
    patches: bool,
    threads: int,
    finished: bool,
) -> tf.data.Dataset:
    """The samples at `start` to `stop`, each `size` voxels of the place that `place_at` says, if `checks` are met."""
    numbers = {"start": start, "stop": stop, "seed": seed, "batch": batch, "threads": threads}
    checks.of(check_stream, page_budget_bytes=page_budget_bytes, share=share, **numbers)
    picked = checks.of(_pick, "channels", channels, store.manifest.channels)
    finish = checks.of(finish_of, store, regions=regions, augment=augment, dtype=dtype)
    checks.done()
    reading = _reading(store, split, read_mode, page_budget_bytes, patches=patches, share=share)
    own = share.indices(start, max(share.whole_steps(epoch) if stop is None else stop, start))
    horizon = min(2 * epoch, HORIZON)
    load = Loader(
        reading.reader,
        place_at,
        augment=augment,
        seed=seed,
        start=own.start,
        stop=own.stop,
        page_budget_bytes=reading.budget_of(split),
        horizon=horizon,
        threads=threads,
        share=share,
    )
    box_of = python_op(load, BOX)

    def sample(index):
        box = {**box_of(index), "channels": picked}
        if not finished:
            return _sized(padded(box), size, len(picked))
        image, target = finish.from_box(box)
        return tf.ensure_shape(image, (*size, len(picked))), tf.ensure_shape(target, (*size, len(finish.codes)))

    dataset = tf.data.Dataset.range(own.start, own.stop)
    dataset = dataset.map(sample, num_parallel_calls=int(threads) if threads > 1 else None)
    if batch == 1:  # batching copies; a batch of one needs only another axis
        dataset = dataset.map(lambda *parts: tf.nest.map_structure(lambda part: part[None], _one(parts)))
    else:
        dataset = dataset.batch(batch, drop_remainder=True)
    return dataset.prefetch(1).with_options(_bounded(threads))


def _one(parts: Tuple) -> Any:
    """An element as `map` gives it: a dictionary comes as its only argument, a pair as two."""
    return parts[0] if len(parts) == 1 else parts


def _sized(raw: Dict[str, tf.Tensor], size: Shape3, channels: int) -> Dict[str, tf.Tensor]:
    """A raw sample whose shapes are known, as batching and `Finish` need them."""
    shapes = {"bits": (*size, channels), "label": size, "scale": (channels,), "shift": (channels,)}
    return {name: tf.ensure_shape(part, shapes.get(name, part.shape)) for name, part in raw.items()}


def _reading(
    store: Store,
    split: str,
    read_mode: Union[str, Reading],
    page_budget_bytes: Optional[int],
    *,
    patches: bool,
    share: Share,
) -> Reading:
    if isinstance(read_mode, Reading):
        if Path(read_mode.reader.folder) != store.folder or split not in read_mode.split_bytes:
            raise InputError(
                f"read_mode must be a Reading opened for split {split} of {store.folder}, got one for"
                f" {', '.join(read_mode.split_bytes)} of {read_mode.reader.folder}; name all splits to open_reading"
            )
        return read_mode
    return open_reading(
        store,
        (split,),
        free_bytes=read_host().free_bytes,
        read_mode=read_mode,
        page_budget_bytes=page_budget_bytes,
        patches=patches,
        share=share,
    )


def _codes(store: Store, regions: Optional[Sequence[str]]) -> Tuple[Tuple[int, ...], ...]:
    """Label codes of each wanted region."""
    names = tuple(store.manifest.regions)
    return tuple(store.manifest.regions[names[index]] for index in _pick("regions", regions, names))


def _pick(what: str, wanted: Optional[Sequence[str]], there: Sequence[str]) -> Tuple[int, ...]:
    """Indices of the wanted names; all of them for None."""
    if wanted is None:
        return tuple(range(len(there)))
    check_names(what, wanted, there)
    return tuple(there.index(name) for name in wanted)


def _bounded(threads: int) -> tf.data.Options:
    """One batch ahead, no autotuning: its memory budget is half of the host's RAM by default."""
    options = tf.data.Options()
    options.autotune.enabled = False
    options.deterministic = True
    options.experimental_optimization.inject_prefetch = False
    options.threading.private_threadpool_size = int(threads)
    options.threading.max_intra_op_parallelism = 1
    return options
