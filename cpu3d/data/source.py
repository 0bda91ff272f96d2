"""A store as a tf.data.Dataset of whole volumes or of patches: lazy, normalised, the same for a
seed anywhere.

    from cpu3d.data.source import open_store, volume_dataset

    store = open_store("store")
    for image, target in volume_dataset(store, split="train", stop=100):
        ...  # image (1, X, Y, Z, C) float32, target (1, X, Y, Z, R) uint8

Samples are made from the map of a .npy file, and voxels outside the patch or the brain's box are
not read. A sample's case, place and augmentation are a pure function of the seed and of its
position in the endless stream of epochs: `start=k` gives what an uninterrupted run gives from
sample k on, whatever the threads, the read mode and the store's format."""

import collections
import itertools
from dataclasses import dataclass
from typing import Any, Callable, Deque, Iterable, Optional, Sequence, Tuple, Union

import tensorflow as tf

from cpu3d.data.augment import NO_AUGMENT, AugmentConfig
from cpu3d.data.files.loader import labelled, loader, open_reading
from cpu3d.data.files.reader import Reader
from cpu3d.data.labels import mirrored_axes
from cpu3d.data.native.samples import Form
from cpu3d.data.normalise import normalise
from cpu3d.data.region import Array, Shape3, is_integer, require
from cpu3d.data.resolution import field_of, network_grid, shrinking
from cpu3d.data.sampling import ALL, PatchSampling, Share, patch_at
from cpu3d.data.store import Store, case_region, check_names, grid_size, open_store
from cpu3d.errors import InputError
from memory_estimator.common.units import by

__all__ = [
    "Batches", "PatchSampling", "Stream", "case_region", "grid_size", "normalise",
    "open_reading", "open_store", "patch_at", "patch_dataset", "patch_sampling", "volume_dataset",
]  # fmt: skip


@dataclass(frozen=True)
class Stream:
    """The arguments that `volume_dataset` and `patch_dataset` have in common."""

    split: str = "train"
    start: int = 0  # position of the first sample in the endless stream of epochs
    stop: Optional[int] = None
    """Position after the last sample; by default the end of the first epoch, or of its last whole
    step of `share`."""
    seed: int = 0
    batch: int = 1
    """Samples of a batch; an incomplete last batch is dropped. It divides the worker's samples of a
    step."""
    share: Share = (
        ALL  # this worker's samples. `start` and `stop` are positions in the stream of all workers
    )
    channels: Optional[Sequence[str]] = None
    regions: Optional[Sequence[str]] = (
        None  # names, in the order of the target; None for all of the store's
    )
    augment: AugmentConfig = NO_AUGMENT
    dtype: str = "float32"  # of images, "float32" or "bfloat16"
    read_mode: Union[str, Reader, None] = None
    """One of READ_MODES, or a reader of the store, from `open_reading`, that several datasets
    share."""
    threads: int = 1  # samples prepared at a time

    def __post_init__(self):
        stop, step, part = (
            0 if self.stop is None else self.stop,
            self.share.batch or 1,
            self.share.part,
        )
        least = (
            ("start", 0, self.start),
            ("stop", 0, stop),
            ("batch", 1, self.batch),
            ("threads", 1, self.threads),
        )
        require(
            *(
                (name, f"an integer of at least {low}", n, is_integer(n, low))
                for name, low, n in least
            )
        )
        steps, divides = (
            f"a multiple of the {step} samples of a step",
            not self.share.batch or part % self.batch == 0,
        )
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
    resolution: float = 1.0,
    **stream: Any,
) -> tf.data.Dataset:
    """Whole volumes of a split as batches `(image, target)`, in an order that is a pure function of
    the seed.

    image: (batch, X, Y, Z, C) in `dtype`: per channel (value - mean) / std over the whole volume's
    non-zero voxels, 0 where the voxel is 0. target: (batch, X, Y, Z, R) uint8, 1 inside the region.
    `stream` are the fields of `Stream`.

    `extent` "brain" cuts a box of the same size out of every case, around its brain, large enough
    to lose no voxel; "full" keeps the whole grid. Both are averaged down to a share `resolution` of
    the store's voxels along each axis, a region staying where it fills half of a voxel, and padded
    with zeros to a multiple of `multiple`, or to `grid` (X, Y, Z), which must hold as much. Raises
    InputError for arguments out of range, unknown names, an empty split, cases without labels, and
    damaged files."""
    require(("resolution", "above 0 and at most 1", resolution, 0 < resolution <= 1))
    chosen, size = Stream(**stream), _volume_size(store, grid, extent, multiple, resolution)
    field, weights = size, None
    if resolution < 1:
        field = field_of(size, resolution, at_least=grid_size(store, extent=extent, multiple=1))
        weights = tuple(shrinking(seen, voxels, resolution) for seen, voxels in zip(size, field))
    sampling = PatchSampling(field, "centre", extent=extent, seed=chosen.seed, shuffle=shuffle)
    return _dataset(store, chosen, sampling, size, weights)


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
    """Patches of a split's cases as batches `(image, target)` of size `patch_shape`; only their own
    bytes are read.

    A patch is the crop of its normalised volume, 0 outside of it; of a volume that is turned and
    zoomed about the patch's centre, if that is drawn. An epoch is one patch of each case.
    `PatchSampling` describes `sampling` and `foreground`; the rest is as for `volume_dataset`."""
    chosen = Stream(**stream)
    drawn = {
        "sampling": sampling,
        "foreground": foreground,
        "shuffle": shuffle,
        "seed": chosen.seed,
        "extent": extent,
    }
    wanted = patch_sampling(store, patch_shape, regions=chosen.regions, **drawn)
    return _dataset(store, chosen, wanted, wanted.shape)


def patch_sampling(
    store: Store, patch_shape: Shape3, *, regions: Optional[Sequence[str]] = None, **drawn: Any
) -> PatchSampling:
    """The rule by which `patch_dataset` draws patches, from its arguments; `drawn` are those of
    PatchSampling."""
    return PatchSampling(tuple(patch_shape), codes=_codes(store, regions), **drawn)


def _codes(store: Store, regions: Optional[Sequence[str]]) -> Tuple[Tuple[int, ...], ...]:
    """Label codes of each wanted region."""
    codes = tuple(store.manifest.regions.values())
    return tuple(codes[index] for index in _pick("regions", regions, tuple(store.manifest.regions)))


def _dataset(
    store: Store,
    chosen: Stream,
    sampling: PatchSampling,
    grid: Shape3,
    weights: Optional[Tuple[Array, ...]] = None,
) -> tf.data.Dataset:
    """The samples at `start` to `stop`, averaged down to the network's `grid` by `weights`, as
    `Form` has them."""
    records = labelled(store, chosen.split)
    picked = _pick("channels", chosen.channels, store.manifest.channels)
    form = Form(grid, picked, _codes(store, chosen.regions), chosen.dtype, weights)
    share, reader = chosen.share, chosen.read_mode
    stop = len(records) - len(records) % (share.batch or 1) if chosen.stop is None else chosen.stop
    own = share.indices(chosen.start, max(stop, chosen.start))
    if not isinstance(reader, Reader):
        reader = open_reading(store, (chosen.split,), read_mode=reader, share=share)
    mirrored = mirrored_axes(store.manifest.labels.values())
    load = _keeping_errors(
        loader(reader, records, sampling, chosen.augment, form, share=share, mirrored=mirrored)
    )
    stored_as = tf.uint16 if chosen.dtype == "bfloat16" else tf.float32

    # nothing in it branches on a tensor, and it is traced sooner
    @tf.autograph.experimental.do_not_convert
    def sample(index):
        # A stateful op would make a deterministic pipeline serial.
        image, target = tf.numpy_function(load, [index], [stored_as, tf.uint8], stateful=False)
        if chosen.dtype == "bfloat16":
            image = tf.bitcast(image, tf.bfloat16)
        return tf.ensure_shape(image, (*grid, len(picked))), tf.ensure_shape(
            target, (*grid, len(form.codes))
        )

    options = tf.data.Options()
    options.autotune.enabled = False  # its memory budget is half of the host's RAM
    options.deterministic = True
    options.experimental_optimization.inject_prefetch = False
    options.threading.private_threadpool_size = int(chosen.threads)
    options.threading.max_intra_op_parallelism = 1
    dataset = tf.data.Dataset.range(own.start, own.stop)
    dataset = dataset.map(
        sample, num_parallel_calls=int(chosen.threads) if chosen.threads > 1 else None
    )
    if chosen.batch > 1:
        dataset = dataset.batch(chosen.batch, drop_remainder=True)
    else:  # batching copies into TensorFlow's allocator; a batch of one needs only another axis
        dataset = dataset.map(lambda image, target: (image[None], target[None]))
    return dataset.prefetch(1).with_options(options)


def _volume_size(
    store: Store, grid: Optional[Sequence[int]], extent: str, multiple: int, resolution: float
) -> Shape3:
    """The size of every volume: `grid`, or the least for all cases. InputError for a grid that
    would lose voxels."""
    largest = grid_size(store, extent=extent, multiple=1)
    fitting = network_grid(largest, resolution, multiple)
    if grid is None:
        return fitting
    least, size = network_grid(largest, resolution, 1), tuple(grid)
    if len(size) != 3 or not all(map(is_integer, size, least)):
        rule = (
            f"grid must be three integers of at least {by(least)}, the largest extent in the store"
        )
        raise InputError(
            f"{rule}, got {by(size)}; give {by(fitting)}, or take patches (patch_dataset)"
        )
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


def _keeping_errors(load: Callable) -> Callable[[Array], Tuple[Array, ...]]:
    """The loader, whose InputError and OSError `Batches` raises as they were: TensorFlow keeps
    their text alone."""

    @tf.autograph.experimental.do_not_convert
    def call(index: Array) -> Tuple[Array, ...]:
        try:
            return load(index)
        except (InputError, OSError) as error:
            mark = f"loader failure {next(_marks)}:"
            _failures.append((mark, error))
            raise RuntimeError(f"{mark} {error}") from None

    return call


class Batches:
    """An iterator over a dataset that raises its loader's InputError and OSError as they were. It
    keeps no batch."""

    def __init__(self, dataset: Iterable[Any]):
        self._elements = iter(dataset)

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> Any:
        try:
            return next(self._elements)
        except tf.errors.OpError as error:
            own = next(
                (failure for mark, failure in list(_failures) if mark in str(error.message)), None
            )
            if own is None:
                raise
            raise own.with_traceback(None) from None
