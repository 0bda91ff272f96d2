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

import math
import numbers
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, Union

import numpy as np
import tensorflow as tf

from cpu3d.data.augment import NO_AUGMENT, AugmentConfig
from cpu3d.data.files.loader import BOX, Loader, Reading, labelled, normalise, open_reading
from cpu3d.data.finish import Finish, check_dtype, padded
from cpu3d.data.pipeline import Batches, own_errors, python_op
from cpu3d.data.records import CaseRecord
from cpu3d.data.region import Region, Shape3, case_region, grid_size
from cpu3d.data.sampling import ALL, PatchSample, PatchSampling, Share, patch_at, sample_at
from cpu3d.data.store import Store, check_names, open_store
from cpu3d.errors import InputError, refuse
from cpu3d.util.records import by
from memory_estimator.host import read_host

__all__ = [
    "Batches",
    "Finish",
    "PatchSample",
    "PatchSampling",
    "Stream",
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


@dataclass(frozen=True)
class Stream:
    """Which samples a dataset gives, and how: what `volume_dataset` and `patch_dataset` take in common."""

    split: str = "train"
    start: int = 0
    """Position of the first sample in the endless stream of epochs, counted in samples."""
    stop: Optional[int] = None
    """Position after the last; the end of the first epoch by default, or of its last whole step of `share`."""
    seed: int = 0
    batch: int = 1
    """Samples of a batch; a last incomplete one is dropped. It divides the worker's samples of a step."""
    share: Share = ALL
    """Of several workers, whose samples: each is what it is without sharing. `start` and `stop` stay positions in the
    stream of all workers, where a step begins. A share without steps gives its part of any positions."""
    channels: Optional[Sequence[str]] = None
    regions: Optional[Sequence[str]] = None
    """Names of those wanted, in this order; None for all of the store's."""
    augment: AugmentConfig = NO_AUGMENT
    dtype: str = "float32"
    """Of images, "float32" or "bfloat16"."""
    read_mode: Union[str, Reading, None] = None
    """One of READ_MODES, or a Reading that several datasets share."""
    page_budget_bytes: Optional[int] = None
    """How many pages of the store's files to leave in memory; half of what is free by default."""
    threads: int = 1
    """Samples prepared at a time."""
    finished: bool = True
    """False for raw batches, for `finish_of` to be applied where the model runs."""

    def check(self, store: Store) -> Tuple[Tuple[int, ...], Finish]:
        """(places of the channels, finish). Raises InputError with all that is out of range or unknown to the store."""
        least = {"start": 0, "batch": 1, "threads": 1}
        least.update({name: 0 for name in ("stop", "page_budget_bytes") if getattr(self, name) is not None})
        problems = [
            f"{name} must be an integer of at least {low}, got {getattr(self, name)!r}; give another"
            for name, low in least.items()
            if not _is_integer(getattr(self, name), low)
        ]
        if not _is_integer(self.seed):
            problems.append(f"seed must be an integer, got {self.seed!r}; give another")
        problems = problems or self.share.problems(start=self.start, stop=self.stop, batch=self.batch)
        picked, finish, _ = _all(
            lambda: _pick("channels", self.channels, store.manifest.channels),
            lambda: finish_of(store, regions=self.regions, augment=self.augment, dtype=self.dtype),
            lambda: refuse(problems),
        )
        return picked, finish


def volume_dataset(
    store: Store,
    *,
    shuffle: bool = True,
    extent: str = "brain",
    grid: Optional[Shape3] = None,
    multiple: int = 16,
    **stream: Any,
) -> tf.data.Dataset:
    """Whole volumes of a split as batches `(image, target)`, in an order that is a pure function of the seed.

    image: (batch, X, Y, Z, C) in `dtype`: per channel (value - mean) / std over the whole volume's non-zero voxels, 0
    where the voxel is 0. target: (batch, X, Y, Z, R) uint8, 1 inside the region. `stream` are the fields of `Stream`.

    `extent` "brain" cuts the same box size out of every case, around its brain, large enough to lose no voxel; "full"
    keeps the whole grid. Both are padded with zeros to a multiple of `multiple`; `grid` asks for a size (X, Y, Z) of
    your own, which must hold that much. Raises InputError for all arguments out of range and unknown names at once, for
    an empty split, cases without labels, and files that are damaged.
    """
    asked = Stream(**stream)
    records, size, checked = _all(
        lambda: labelled(store, asked.split),
        lambda: _volume_size(store, grid, extent=extent, multiple=multiple),
        lambda: asked.check(store),
    )

    def place_at(position: int) -> Tuple[CaseRecord, Region]:
        record = records[sample_at(position, cases=len(records), seed=asked.seed, shuffle=shuffle).index]
        return record, case_region(record, size, extent)

    return _dataset(store, asked, checked, place_at, size, epoch=len(records), patches=False)


def patch_dataset(
    store: Store,
    patch_shape: Shape3,
    *,
    sampling: str = "random",
    foreground: float = PatchSampling.foreground,
    overlap: float = PatchSampling.overlap,
    shuffle: bool = True,
    extent: str = "brain",
    multiple: int = 16,
    **stream: Any,
) -> tf.data.Dataset:
    """Patches of a split's cases as batches `(image, target)` of size `patch_shape`; only their own bytes are read.

    A patch is exactly what `crop` would cut out of its volume, 0 outside of it; rotation and scaling turn it about
    its own centre. An epoch is one patch of each case, or with "grid" all the patches that cover the common grid of the
    extent, rounded up to `multiple`, one case after another. `PatchSampling` says what `sampling`, `foreground` and
    `overlap` mean, and `patch_at` which patch comes at a position. All else is as for `volume_dataset`.
    """
    asked = Stream(**stream)
    how = {"sampling": sampling, "foreground": foreground, "overlap": overlap, "shuffle": shuffle, "seed": asked.seed}
    records, drawn, checked = _all(
        lambda: labelled(store, asked.split),
        lambda: patch_sampling(store, patch_shape, extent=extent, multiple=multiple, regions=asked.regions, **how),
        lambda: asked.check(store),
    )

    def place_at(position: int) -> Tuple[CaseRecord, Region]:
        sample = patch_at(position, drawn, records)
        return records[sample.index], sample.region

    return _dataset(store, asked, checked, place_at, drawn.shape, epoch=len(records) * drawn.per_case, patches=True)


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
    # Each checks something else; the last call makes the sampling of what the others found.
    codes, grid, _ = _all(
        lambda: _codes(store, regions),
        lambda: grid_size(store, extent=extent, multiple=multiple),
        lambda: PatchSampling(tuple(patch_shape), extent=extent, **drawn),
    )
    return PatchSampling(tuple(patch_shape), extent=extent, codes=codes, grid=grid, **drawn)


def finish_of(
    store: Store,
    *,
    regions: Optional[Sequence[str]] = None,
    augment: AugmentConfig = NO_AUGMENT,
    dtype: str = "float32",
) -> Finish:
    """What turns raw batches of this store (`finished=False`) into `(image, target)`, given the dataset's arguments."""
    _, codes = _all(lambda: check_dtype(dtype), lambda: _codes(store, regions))
    return Finish(codes, dtype, augment.resamples)


def stored_volumes(
    store: Store, *, split: str = "train", read_mode: Union[str, Reading, None] = None
) -> tf.data.Dataset:
    """The split's cases as they are stored: `(bits, is_half, label)`, in the manifest's order.

    bits: (X, Y, Z, C) int16; where `is_half` is true they are float16 bits (`tf.bitcast` them). label: (X, Y, Z) uint8.
    Of a cropped store they are the box that is stored. Mapped .npy files come without a copy: nothing may be written.
    """
    records = labelled(store, split)
    reader = _reading(store, Stream(split=split, read_mode=read_mode), patches=False).reader

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
    stream: Stream,
    checked: Tuple[Tuple[int, ...], Finish],
    place_at: Callable[[int], Tuple[CaseRecord, Region]],
    size: Shape3,
    *,
    epoch: int,
    patches: bool,
) -> tf.data.Dataset:
    """The samples at `start` to `stop`, each `size` voxels of the place that `place_at` says."""
    (picked, finish), share = checked, stream.share
    stop = share.whole_steps(epoch) if stream.stop is None else stream.stop
    own = share.indices(stream.start, max(stop, stream.start))
    drawn = {"augment": stream.augment, "seed": stream.seed, "threads": stream.threads}
    load = Loader(_reading(store, stream, patches=patches), place_at, samples=own, share=share, **drawn)
    box_of, channels = python_op(load, BOX), len(picked)
    shapes = {"bits": (*size, channels), "label": size, "scale": (channels,), "shift": (channels,)}

    def sample(index):
        box = {**box_of(index), "channels": picked}
        if not stream.finished:
            return {name: tf.ensure_shape(part, shapes.get(name, part.shape)) for name, part in padded(box).items()}
        image, target = finish.from_box(box)
        return tf.ensure_shape(image, (*size, channels)), tf.ensure_shape(target, (*size, len(finish.codes)))

    dataset = tf.data.Dataset.range(own.start, own.stop)
    dataset = dataset.map(sample, num_parallel_calls=int(stream.threads) if stream.threads > 1 else None)
    if stream.batch > 1:
        dataset = dataset.batch(stream.batch, drop_remainder=True)
    elif stream.finished:  # batching copies; a batch of one needs only another axis
        dataset = dataset.map(lambda image, target: (image[None], target[None]))
    else:
        dataset = dataset.map(lambda raw: {name: part[None] for name, part in raw.items()})
    return dataset.prefetch(1).with_options(_bounded(stream.threads))


def _reading(store: Store, stream: Stream, *, patches: bool) -> Reading:
    found, split = stream.read_mode, stream.split
    if not isinstance(found, Reading):
        budget, free = stream.page_budget_bytes, read_host().free_bytes
        how = {"read_mode": found, "page_budget_bytes": budget, "patches": patches, "share": stream.share}
        return open_reading(store, (split,), free_bytes=free, **how)
    if Path(found.reader.folder) != store.folder or split not in found.split_bytes:
        rule = f"read_mode must be a Reading opened for split {split} of {store.folder}"
        raise InputError(f"{rule}, got one for {', '.join(found.split_bytes)} of {found.reader.folder}")
    return found


def _volume_size(store: Store, grid: Optional[Sequence[int]], *, extent: str, multiple: int) -> Shape3:
    """The size of every volume: `grid`, or what holds all cases. InputError for a grid that would lose voxels."""
    fitting = grid_size(store, extent=extent, multiple=multiple)
    if grid is None:
        return fitting
    least, size = grid_size(store, extent=extent, multiple=1), tuple(grid)
    if len(size) != 3 or not all(_is_integer(n, m) for n, m in zip(size, least)):
        rule = f"grid must be three integers of at least {by(least)}, the largest extent in the store"
        raise InputError(f"{rule}, got {by(size)}; give {by(fitting)}, or take patches (patch_dataset)")
    return size


def _codes(store: Store, regions: Optional[Sequence[str]]) -> Tuple[Tuple[int, ...], ...]:
    """Label codes of each wanted region."""
    codes = tuple(store.manifest.regions.values())
    return tuple(codes[index] for index in _pick("regions", regions, tuple(store.manifest.regions)))


def _pick(what: str, wanted: Optional[Sequence[str]], there: Sequence[str]) -> Tuple[int, ...]:
    """Indices of the wanted names; all of them for None."""
    if wanted is None:
        return tuple(range(len(there)))
    check_names(what, wanted, there)
    return tuple(there.index(name) for name in wanted)


def _all(*checks: Callable[[], Any]) -> List[Any]:
    """What the checks return. Raises one InputError with the problems of all of them."""
    results: List[Any] = []
    problems: Dict[str, None] = {}
    for check in checks:
        try:
            results.append(check())
        except InputError as error:
            problems.update(dict.fromkeys(error.problems))
    refuse(problems)
    return results


def _is_integer(value: Any, at_least: float = -math.inf) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and value >= at_least


def _bounded(threads: int) -> tf.data.Options:
    """One batch ahead, no autotuning: its memory budget is half of the host's RAM by default."""
    options = tf.data.Options()
    options.autotune.enabled = False
    options.deterministic = True
    options.experimental_optimization.inject_prefetch = False
    options.threading.private_threadpool_size = int(threads)
    options.threading.max_intra_op_parallelism = 1
    return options
