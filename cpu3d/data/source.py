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

import dataclasses
import numbers
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, Union

import tensorflow as tf

from cpu3d.data.augment import NO_AUGMENT, AugmentConfig
from cpu3d.data.files.loader import BOX, Loader, Reading, labelled, normalise, open_reading
from cpu3d.data.finish import Finish, padded
from cpu3d.data.pipeline import Batches, own_errors, python_op
from cpu3d.data.records import CaseRecord
from cpu3d.data.region import Region, Shape3, case_region, grid_size
from cpu3d.data.sampling import ALL, PatchSample, PatchSampling, Share, patch_at, sample_at
from cpu3d.data.store import Store, check_names, open_store
from cpu3d.errors import InputError, refuse
from cpu3d.util.records import by
from memory_estimator.host import read_host

__all__ = [
    "Batches", "Finish", "PatchSample", "PatchSampling", "Stream", "case_region", "finish_of", "grid_size", "normalise",
    "open_reading", "open_store", "own_errors", "patch_at", "patch_dataset", "patch_sampling", "volume_dataset",
]  # fmt: skip


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
    threads: int = 1
    """Samples prepared at a time."""
    finished: bool = True
    """False for raw batches, for `finish_of` to be applied where the model runs."""

    def check(self) -> None:
        """Raise InputError with all that is out of range."""
        found = []
        for name, low in {"start": 0, "stop": 0, "seed": None, "batch": 1, "threads": 1}.items():
            value = getattr(self, name)
            integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
            if (not integer or (low is not None and value < low)) and (name, value) != ("stop", None):
                rule = "an integer" if low is None else f"an integer of at least {low}"
                found.append(f"{name} must be {rule}, got {value!r}; give another")
        refuse(found or self.share.problems(start=self.start, stop=self.stop, batch=self.batch))


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
    return _dataset(store, Stream(**stream), lambda: _volume_size(store, grid, extent, multiple), shuffle, extent)


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
    how.update(extent=extent, multiple=multiple, regions=asked.regions)
    return _dataset(store, asked, lambda: patch_sampling(store, patch_shape, **how), shuffle, extent)


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
    finish, grid, sampling = _all(
        lambda: finish_of(store, regions=regions),
        lambda: grid_size(store, extent=extent, multiple=multiple),
        lambda: PatchSampling(tuple(patch_shape), extent=extent, **drawn),
    )
    return dataclasses.replace(sampling, codes=finish.codes, grid=grid)


def finish_of(
    store: Store,
    *,
    regions: Optional[Sequence[str]] = None,
    augment: AugmentConfig = NO_AUGMENT,
    dtype: str = "float32",
) -> Finish:
    """What turns raw batches of this store (`finished=False`) into `(image, target)`, given the dataset's arguments."""
    codes = tuple(store.manifest.regions.values())
    picked = _pick("regions", regions, tuple(store.manifest.regions))
    return Finish(tuple(codes[index] for index in picked), dtype, augment.resamples)


# --- Private helpers ---


def _dataset(
    store: Store,
    asked: Stream,
    what: Callable[[], Union[Shape3, PatchSampling]],
    shuffle: bool,
    extent: str,
) -> tf.data.Dataset:
    """The samples at `start` to `stop`: volumes of the size, or the patches, that `what` gives."""
    records, drawn, picked, finish, _ = _all(
        lambda: labelled(store, asked.split),
        what,
        lambda: _pick("channels", asked.channels, store.manifest.channels),
        lambda: finish_of(store, regions=asked.regions, augment=asked.augment, dtype=asked.dtype),
        asked.check,
    )
    cases, share, patches = len(records), asked.share, isinstance(drawn, PatchSampling)
    size, epoch = (drawn.shape, cases * drawn.per_case) if patches else (drawn, cases)

    def place_at(position: int) -> Tuple[CaseRecord, Region]:
        if patches:
            sample = patch_at(position, drawn, records)
            return records[sample.index], sample.region
        record = records[sample_at(position, cases=cases, seed=asked.seed, shuffle=shuffle).index]
        return record, case_region(record, size, extent)

    stop = epoch - epoch % (share.batch or 1) if asked.stop is None else asked.stop
    own = share.indices(asked.start, max(stop, asked.start))
    load = Loader(
        _reading(store, asked, patches),
        place_at,
        augment=asked.augment,
        seed=asked.seed,
        samples=own,
        threads=asked.threads,
        share=share,
    )
    box_of, channels = python_op(load, BOX), len(picked)
    shapes = {"bits": (*size, channels), "label": size, "scale": (channels,), "shift": (channels,)}

    def sample(index):
        box = {**box_of(index), "channels": picked}
        if not asked.finished:
            return {name: tf.ensure_shape(part, shapes.get(name, part.shape)) for name, part in padded(box).items()}
        image, target = finish.from_box(box)
        return tf.ensure_shape(image, (*size, channels)), tf.ensure_shape(target, (*size, len(finish.codes)))

    options = tf.data.Options()
    options.autotune.enabled = False  # its memory budget is half of the host's RAM
    options.deterministic = True
    options.experimental_optimization.inject_prefetch = False
    options.threading.private_threadpool_size = int(asked.threads)
    options.threading.max_intra_op_parallelism = 1
    dataset = tf.data.Dataset.range(own.start, own.stop)
    dataset = dataset.map(sample, num_parallel_calls=int(asked.threads) if asked.threads > 1 else None)
    if asked.batch > 1:
        dataset = dataset.batch(asked.batch, drop_remainder=True)
    elif asked.finished:  # batching copies; a batch of one needs only another axis
        dataset = dataset.map(lambda image, target: (image[None], target[None]))
    else:
        dataset = dataset.map(lambda raw: {name: part[None] for name, part in raw.items()})
    return dataset.prefetch(1).with_options(options)


def _reading(store: Store, asked: Stream, patches: bool) -> Reading:
    found, split = asked.read_mode, asked.split
    if not isinstance(found, Reading):
        how = {"read_mode": found, "patches": patches, "share": asked.share}
        return open_reading(store, (split,), free_bytes=read_host().free_bytes, **how)
    if found.reader.folder != store.folder or split not in found.split_bytes:
        rule = f"read_mode must be a Reading opened for split {split} of {store.folder}"
        raise InputError(f"{rule}, got one for {', '.join(found.split_bytes)} of {found.reader.folder}")
    return found


def _volume_size(store: Store, grid: Optional[Sequence[int]], extent: str, multiple: int) -> Shape3:
    """The size of every volume: `grid`, or what holds all cases. InputError for a grid that would lose voxels."""
    fitting = grid_size(store, extent=extent, multiple=multiple)
    if grid is None:
        return fitting
    least, size = grid_size(store, extent=extent, multiple=1), tuple(grid)
    if len(size) != 3 or not all(isinstance(n, numbers.Integral) and n >= m for n, m in zip(size, least)):
        rule = f"grid must be three integers of at least {by(least)}, the largest extent in the store"
        raise InputError(f"{rule}, got {by(size)}; give {by(fitting)}, or take patches (patch_dataset)")
    return size


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
