"""A store as a tf.data.Dataset of whole volumes or of patches: lazy, normalised, the same for a seed anywhere.

    from cpu3d.data.source import open_store, volume_dataset

    store = open_store("store")
    for image, target in volume_dataset(store, split="train", stop=100):
        ...  # image (1, X, Y, Z, C) float32, target (1, X, Y, Z, R) uint8

The tensor *is* the map of a .npy file, and voxels outside the patch or the brain's box are not read. A sample's case,
place and augmentation are a pure function of the seed and of its position in the endless stream of epochs: `start=k`
gives what an uninterrupted run gives from sample k on, whatever the threads, the read mode and the store's format.
"""

import collections
import itertools
from dataclasses import dataclass
from typing import Any, Callable, Deque, Iterable, Optional, Sequence, Tuple, Union

import numpy as np
import tensorflow as tf

from cpu3d.data.augment import NO_AUGMENT, AugmentConfig
from cpu3d.data.files.loader import BOX, labelled, loader, open_reading
from cpu3d.data.files.reader import Reader
from cpu3d.data.labels import mirrored_axes
from cpu3d.data.normalise import Finish, normalise, padded
from cpu3d.data.region import Shape3, is_integer, require
from cpu3d.data.sampling import ALL, PatchSampling, Share, patch_at
from cpu3d.data.store import Store, case_region, check_names, grid_size, open_store
from cpu3d.errors import InputError
from memory_estimator.common.units import by

__all__ = [
    "Batches", "Finish", "PatchSampling", "Stream", "case_region", "finish_of", "grid_size", "normalise",
    "open_reading", "open_store", "patch_at", "patch_dataset", "patch_sampling", "volume_dataset",
]  # fmt: skip


@dataclass(frozen=True)
class Stream:
    """The arguments that `volume_dataset` and `patch_dataset` have in common."""

    split: str = "train"
    start: int = 0  # position of the first sample in the endless stream of epochs
    stop: Optional[int] = None
    """Position after the last sample; by default the end of the first epoch, or of its last whole step of `share`."""
    seed: int = 0
    batch: int = 1
    """Samples of a batch; an incomplete last batch is dropped. It divides the worker's samples of a step."""
    share: Share = ALL  # this worker's samples. `start` and `stop` are positions in the stream of all workers
    channels: Optional[Sequence[str]] = None
    regions: Optional[Sequence[str]] = None  # names, in the order of the target; None for all of the store's
    augment: AugmentConfig = NO_AUGMENT
    dtype: str = "float32"  # of images, "float32" or "bfloat16"
    read_mode: Union[str, Reader, None] = None
    """One of READ_MODES, or a reader of the store, from `open_reading`, that several datasets share."""
    threads: int = 1  # samples prepared at a time
    finished: bool = True  # False for raw batches, to which the caller applies `finish_of`

    def __post_init__(self):
        stop, step, part = 0 if self.stop is None else self.stop, self.share.batch or 1, self.share.part
        least = (("start", 0, self.start), ("stop", 0, stop), ("batch", 1, self.batch), ("threads", 1, self.threads))
        require(*((name, f"an integer of at least {low}", n, is_integer(n, low)) for name, low, n in least))
        steps, divides = f"a multiple of the {step} samples of a step", not self.share.batch or part % self.batch == 0
        require(
            ("start", steps, self.start, self.start % step == 0),
            ("stop", steps, stop, stop % step == 0),
            ("batch", f"a divisor of a worker's {part} samples of a step", self.batch, divides),
        )


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

    `extent` "brain" cuts a box of the same size out of every case, around its brain, large enough to lose no voxel;
    "full" keeps the whole grid. Both are padded with zeros to a multiple of `multiple`, or to `grid` (X, Y, Z), which
    must hold as much. Raises InputError for arguments out of range, unknown names, an empty split, cases without
    labels, and damaged files.
    """
    chosen, size = Stream(**stream), _volume_size(store, grid, extent, multiple)
    return _dataset(store, chosen, PatchSampling(size, "centre", extent=extent, seed=chosen.seed, shuffle=shuffle))


def patch_dataset(
    store: Store,
    patch_shape: Shape3,
    *,
    sampling: str = "random",
    foreground: float = PatchSampling.foreground,
    shuffle: bool = True,
    extent: str = "brain",
    **stream: Any,
) -> tf.data.Dataset:
    """Patches of a split's cases as batches `(image, target)` of size `patch_shape`; only their own bytes are read.

    A patch is the crop of its normalised volume, 0 outside of it; rotation and scaling turn it about its own centre. An
    epoch is one patch of each case. `PatchSampling` describes `sampling` and `foreground`; the rest is as for
    `volume_dataset`.
    """
    chosen = Stream(**stream)
    drawn = {"sampling": sampling, "foreground": foreground, "shuffle": shuffle, "seed": chosen.seed, "extent": extent}
    return _dataset(store, chosen, patch_sampling(store, patch_shape, regions=chosen.regions, **drawn))


def patch_sampling(
    store: Store, patch_shape: Shape3, *, regions: Optional[Sequence[str]] = None, **drawn: Any
) -> PatchSampling:
    """The rule by which `patch_dataset` draws patches, from its arguments; `drawn` are those of PatchSampling."""
    return PatchSampling(tuple(patch_shape), codes=finish_of(store, regions=regions).codes, **drawn)


def finish_of(
    store: Store,
    *,
    regions: Optional[Sequence[str]] = None,
    augment: AugmentConfig = NO_AUGMENT,
    dtype: str = "float32",
) -> Finish:
    """The function from raw batches of this store (`finished=False`) to `(image, target)`, for the same arguments."""
    codes = tuple(store.manifest.regions.values())
    picked = _pick("regions", regions, tuple(store.manifest.regions))
    return Finish(tuple(codes[index] for index in picked), dtype, augment.resamples)


def _dataset(store: Store, chosen: Stream, sampling: PatchSampling) -> tf.data.Dataset:
    """The samples at `start` to `stop`."""
    records = labelled(store, chosen.split)
    picked = _pick("channels", chosen.channels, store.manifest.channels)
    finish = finish_of(store, regions=chosen.regions, augment=chosen.augment, dtype=chosen.dtype)
    share, size, channels, reader = chosen.share, sampling.shape, len(picked), chosen.read_mode
    stop = len(records) - len(records) % (share.batch or 1) if chosen.stop is None else chosen.stop
    own = share.indices(chosen.start, max(stop, chosen.start))
    if not isinstance(reader, Reader):
        reader = open_reading(store, (chosen.split,), read_mode=reader, share=share)
    mirrored = mirrored_axes(store.manifest.labels.values())
    load = _keeping_errors(loader(reader, records, sampling, chosen.augment, share, mirrored))
    shapes = {"bits": (*size, channels), "label": size, "scale": (channels,), "shift": (channels,)}

    @tf.autograph.experimental.do_not_convert  # nothing in it branches on a tensor, and it is traced sooner
    def sample(index):
        # A stateful op would make a deterministic pipeline serial.
        arrays = tf.numpy_function(load, [index], [dtype for dtype, _ in BOX.values()], stateful=False)
        box = {name: tf.ensure_shape(array, shape) for array, (name, (_, shape)) in zip(arrays, BOX.items())}
        box["channels"] = picked
        if not chosen.finished:
            return {name: tf.ensure_shape(part, shapes.get(name, part.shape)) for name, part in padded(box).items()}
        image, target = finish.from_box(box)
        return tf.ensure_shape(image, (*size, channels)), tf.ensure_shape(target, (*size, len(finish.codes)))

    options = tf.data.Options()
    options.autotune.enabled = False  # its memory budget is half of the host's RAM
    options.deterministic = True
    options.experimental_optimization.inject_prefetch = False
    options.threading.private_threadpool_size = int(chosen.threads)
    options.threading.max_intra_op_parallelism = 1
    dataset = tf.data.Dataset.range(own.start, own.stop)
    dataset = dataset.map(sample, num_parallel_calls=int(chosen.threads) if chosen.threads > 1 else None)
    if chosen.batch > 1:
        dataset = dataset.batch(chosen.batch, drop_remainder=True)
    elif chosen.finished:  # batching copies; a batch of one needs only another axis
        dataset = dataset.map(lambda image, target: (image[None], target[None]))
    else:
        dataset = dataset.map(lambda raw: {name: part[None] for name, part in raw.items()})
    return dataset.prefetch(1).with_options(options)


def _volume_size(store: Store, grid: Optional[Sequence[int]], extent: str, multiple: int) -> Shape3:
    """The size of every volume: `grid`, or the least for all cases. InputError for a grid that would lose voxels."""
    fitting = grid_size(store, extent=extent, multiple=multiple)
    if grid is None:
        return fitting
    least, size = grid_size(store, extent=extent, multiple=1), tuple(grid)
    if len(size) != 3 or not all(map(is_integer, size, least)):
        rule = f"grid must be three integers of at least {by(least)}, the largest extent in the store"
        raise InputError(f"{rule}, got {by(size)}; give {by(fitting)}, or take patches (patch_dataset)")
    return size


def _pick(kind: str, wanted: Optional[Sequence[str]], names: Sequence[str]) -> Tuple[int, ...]:
    """Indices of the wanted names; all of them for None."""
    if wanted is None:
        return tuple(range(len(names)))
    check_names(kind, wanted, names)
    return tuple(names.index(name) for name in wanted)


# --- Errors of a pipeline ---

_marks = itertools.count()
_failures: Deque[Tuple[str, BaseException]] = collections.deque(maxlen=64)
"""(mark in the text of TensorFlow's error, the error as it was raised)."""


def _keeping_errors(load: Callable) -> Callable[[np.ndarray], Tuple[np.ndarray, ...]]:
    """The loader, whose InputError and OSError `Batches` raises as they were: TensorFlow keeps their text alone."""

    @tf.autograph.experimental.do_not_convert
    def call(index: np.ndarray) -> Tuple[np.ndarray, ...]:
        try:
            return load(index)
        except (InputError, OSError) as error:
            mark = f"loader failure {next(_marks)}:"
            _failures.append((mark, error))
            raise RuntimeError(f"{mark} {error}") from None

    return call


class Batches:
    """An iterator over a dataset that raises its loader's InputError and OSError as they were. It keeps no batch."""

    def __init__(self, dataset: Iterable[Any]):
        self._elements = iter(dataset)

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> Any:
        try:
            return next(self._elements)
        except tf.errors.OpError as error:
            own = next((failure for mark, failure in list(_failures) if mark in str(error.message)), None)
            if own is None:
                raise
            raise own.with_traceback(None) from None
