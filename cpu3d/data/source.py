"""A store as a tf.data.Dataset of whole volumes or of patches: lazy, normalised, the same for a
seed anywhere.

    from cpu3d import open_store, volume_dataset

    store = open_store("store")
    for image, target in volume_dataset(store, split="train", stop=100):
        ...  # image (1, X, Y, Z, C) float32, target (1, X, Y, Z, R) uint8

Samples are made from the map of a .npy file, and voxels outside the patch or the content box are
not read. A sample's case, place and augmentation are a pure function of the seed and of its
position in the endless stream of epochs: `start=k` gives what an uninterrupted run gives from
sample k on, whatever the threads, the read mode and the store's format."""

import collections
import itertools
from typing import Any, Callable, Deque, Iterable, Optional, Sequence, Tuple, Union, cast

import tensorflow as tf

from cpu3d.data.augment import NO_AUGMENT, AugmentConfig
from cpu3d.data.files.loader import Loader, labelled, open_reading
from cpu3d.data.files.reader import Reader
from cpu3d.data.native.spec import ImageAndTarget, SampleSpec
from cpu3d.data.normalise import normalise
from cpu3d.data.region import EXTENTS, NO_GRID, Multiple, Shape3, by_axis, is_integer, require
from cpu3d.data.sampling import ALL, PatchSampling, Share, VolumeSampling, patch_at
from cpu3d.data.store import Store, case_region, check_names, grid_size, open_store
from cpu3d.errors import InputError
from memory_estimator.common.units import by

__all__ = [
    "Batches", "PatchSampling", "case_region", "grid_size", "normalise", "open_reading",
    "open_store", "patch_at", "patch_dataset", "volume_dataset",
]  # fmt: skip


def volume_dataset(
    store: Store,
    *,
    split: str = "train",
    start: int = 0,
    stop: Optional[int] = None,
    seed: int = 0,
    shuffle: bool = True,
    batch: int = 1,
    extent: str = "brain",
    grid: Optional[Shape3] = None,
    multiple: Multiple = 16,
    whole_every: int = 1,
    channels: Optional[Sequence[str]] = None,
    regions: Optional[Sequence[str]] = None,
    augment: AugmentConfig = NO_AUGMENT,
    dtype: str = "float32",
    share: Share = ALL,
    reader: Optional[Reader] = None,
    threads: int = 1,
) -> tf.data.Dataset:
    """Stream the whole volumes of a split as batches `(image, target)`, in an order that is a pure
    function of the seed.

        for image, target in volume_dataset(open_store("store"), seed=1, stop=100, batch=2):
            ...  # image (2, X, Y, Z, C) float32, target (2, X, Y, Z, R) uint8

    image: (batch, X, Y, Z, C) in `dtype`, normalised as the store says: by default per channel
    (value - mean) / std over the whole volume's non-zero voxels, 0 where the voxel is 0. target:
    (batch, X, Y, Z, R) uint8, 1 inside the region; 255 in all regions where the store has a label
    that is to be ignored.

    Args:
        store: an open store, of `open_store`.
        split: "train", "val" or "test".
        start: position of the first sample in the endless stream of epochs; an epoch has each case
            of the split once.
        stop: position after the last sample; None for the end of the first epoch, or of its last
            whole step of `share`.
        seed: of the order and of the augmentation.
        shuffle: whether cases come in another order every epoch; else in that of their ids.
        batch: samples of a batch; an incomplete last batch is dropped. It divides the worker's
            samples of a step.
        extent: "brain" cuts the box of its content out of every case; "full" keeps the whole grid.
        grid: voxels X, Y, Z of all volumes, padded with what surrounds them, at least those of the
            largest case; None for the least of each volume that are a multiple of `multiple`, and
            hold the others of its batch.
        multiple: of voxels along each axis, or along X, Y and Z, for a network that halves them
            several times.
        whole_every: steps, of `share.batch` samples or else of `batch`, of which the last has
            whole volumes, and the others crops that hold the labels, at a place that is drawn.
        channels: names, in the order of the image; None for all of the store's.
        regions: names, in the order of the target; None for all of the store's.
        augment: how samples are changed by chance; not at all by default.
        dtype: of images, "float32" or "bfloat16".
        share: this worker's samples. `start` and `stop` are positions in the stream of all workers.
        reader: from `open_reading`, of the store's files, which several datasets may share; None
            for one of its own.
        threads: samples prepared at a time. Samples are the same with any number.

    Raises InputError for arguments out of range, unknown names, an empty split, cases without
    labels, and damaged files. Those that are damaged later end the dataset with an error of
    TensorFlow, from which `Batches` makes an InputError again."""
    require(
        ("extent", f"one of {', '.join(EXTENTS)}", extent, extent in EXTENTS),
        ("whole_every", "an integer of at least 1", whole_every, is_integer(whole_every, 1)),
        ("grid", "None for crops", grid, grid is None or whole_every == 1),
    )
    if grid is not None:
        _check_grid(store, grid, extent)
    volumes = VolumeSampling(
        extent, grid, by_axis(multiple), seed, shuffle, whole_every, share.batch or batch
    )
    return _dataset(
        store,
        volumes,
        grid,
        split=split,
        start=start,
        stop=stop,
        batch=batch,
        channels=channels,
        regions=regions,
        augment=augment,
        dtype=dtype,
        share=share,
        reader=reader,
        threads=threads,
    )


def patch_dataset(
    store: Store,
    patch_shape: Shape3,
    *,
    sampling: str = "random",
    foreground: float = PatchSampling.foreground,
    split: str = "train",
    start: int = 0,
    stop: Optional[int] = None,
    seed: int = 0,
    shuffle: bool = True,
    batch: int = 1,
    extent: str = "brain",
    channels: Optional[Sequence[str]] = None,
    regions: Optional[Sequence[str]] = None,
    augment: AugmentConfig = NO_AUGMENT,
    dtype: str = "float32",
    share: Share = ALL,
    reader: Optional[Reader] = None,
    threads: int = 1,
) -> tf.data.Dataset:
    """Stream patches of a split's cases as batches `(image, target)` of size `patch_shape`; only
    their own bytes are read.

        patches = patch_dataset(open_store("store"), (128, 128, 128), sampling="foreground")
        for image, target in patches:
            ...  # image (1, 128, 128, 128, C) float32, target (1, 128, 128, 128, R) uint8

    A patch is the crop of its normalised volume, background outside of it; of a volume that is
    turned and zoomed about the patch's centre, if that is drawn. An epoch is one patch of each
    case.

    Args:
        patch_shape: voxels X, Y, Z of a patch.
        sampling: "random": anywhere in the case's extent. "foreground": a share of the patches
            around labelled voxels, the others random.
        foreground: with "foreground" the share of patches around labelled voxels, 0 to 1. Any
            number of successive patches has its share, to the nearest one, before boxes of others
            (`cutmix`) are put into them, and may have more where the store has a label to be
            ignored: a patch of nothing else is drawn again, the last time around a labelled voxel.
        extent: where patches are: "brain" for the content box, "full" for the whole grid.

    The other arguments, the batches and the errors are as for `volume_dataset`."""
    patches = PatchSampling(
        cast(Shape3, tuple(patch_shape)),  # which is checked there
        sampling,
        foreground=foreground,
        codes=_codes(store, regions),
        extent=extent,
        seed=seed,
        shuffle=shuffle,
    )
    return _dataset(
        store,
        patches,
        patches.shape,
        split=split,
        start=start,
        stop=stop,
        batch=batch,
        channels=channels,
        regions=regions,
        augment=augment,
        dtype=dtype,
        share=share,
        reader=reader,
        threads=threads,
    )


def _codes(store: Store, regions: Optional[Sequence[str]]) -> Tuple[Tuple[int, ...], ...]:
    """Return the label codes of each wanted region."""
    codes = tuple(store.manifest.regions.values())
    return tuple(codes[index] for index in _pick("regions", regions, tuple(store.manifest.regions)))


def _dataset(
    store: Store,
    sampling: Union[PatchSampling, VolumeSampling],
    grid: Optional[Shape3],
    *,
    split: str,
    start: int,
    stop: Optional[int],
    batch: int,
    channels: Optional[Sequence[str]],
    regions: Optional[Sequence[str]],
    augment: AugmentConfig,
    dtype: str,
    share: Share,
    reader: Optional[Reader],
    threads: int,
) -> tf.data.Dataset:
    """Make samples, all on `grid` if there is one; the rest as of `volume_dataset`."""
    records = labelled(store, split)
    if stop is None:
        stop = len(records) - len(records) % max(share.batch, 1)
    require(
        *(
            (name, f"an integer of at least {least}", value, is_integer(value, least))
            for name, value, least in (
                ("start", start, 0),
                ("stop", stop, 0),
                ("batch", batch, 1),
                ("threads", threads, 1),
            )
        )
    )
    manifest = store.manifest
    picked = _pick("channels", channels, manifest.channels)
    codes = _codes(store, regions)
    spec = SampleSpec(grid or NO_GRID, picked, codes, dtype, ignore=manifest.ignore)
    indices = share.indices(start, max(stop, start))
    load = Loader(
        reader or open_reading(store, (split,), share=share),
        records,
        sampling,
        augment,
        spec,
        share=share,
        batch=int(batch),
        first=indices.start,
        mirrored=augment.mirrored_axes((*manifest.labels.values(), *manifest.regions)),
        normalisation=manifest.normalisation,
    )
    return _pipeline(_keeping_errors(load), indices, spec, grid, int(batch), int(threads))


def _pipeline(
    load: Callable[[int], ImageAndTarget],
    indices: range,
    spec: SampleSpec,
    grid: Optional[Shape3],
    batch: int,
    threads: int,
) -> tf.data.Dataset:
    """Load the samples of the indices, in their order, in batches."""
    sides = grid or (None, None, None)
    stored_as = tf.uint16 if spec.is_bfloat16 else tf.float32

    # nothing in it branches on a tensor, and it is traced sooner
    @tf.autograph.experimental.do_not_convert
    def sample(index: tf.Tensor) -> Tuple[tf.Tensor, tf.Tensor]:
        # A stateful op would make a deterministic pipeline serial.
        image, target = tf.numpy_function(load, [index], [stored_as, tf.uint8], stateful=False)
        if spec.is_bfloat16:
            image = tf.bitcast(image, tf.bfloat16)
        image = tf.ensure_shape(image, (*sides, len(spec.channels)))
        target = tf.ensure_shape(target, (*sides, len(spec.codes)))
        if batch > 1:
            return image, target
        # Batching copies into TensorFlow's allocator; a batch of one needs only another axis.
        return tf.expand_dims(image, 0), tf.expand_dims(target, 0)

    options = tf.data.Options()
    options.autotune.enabled = False  # its memory budget is half of the host's RAM
    options.deterministic = True
    options.experimental_optimization.inject_prefetch = False
    options.threading.private_threadpool_size = threads
    options.threading.max_intra_op_parallelism = 1
    dataset = tf.data.Dataset.range(indices.start, indices.stop)
    dataset = dataset.map(sample, num_parallel_calls=threads if threads > 1 else None)
    if batch > 1:
        dataset = dataset.batch(batch, drop_remainder=True)
    return dataset.prefetch(1).with_options(options)


def _check_grid(store: Store, grid: Shape3, extent: str) -> None:
    """Raise InputError for a grid of all volumes that would lose voxels."""
    least = grid_size(store, extent=extent, multiple=1)
    if len(grid) != 3 or not all(map(is_integer, grid, least)):
        rule = (
            f"grid must be three integers of at least {by(least)}, the largest extent in the store"
        )
        todo = "leave it out, or take patches (patch_dataset)"
        raise InputError(f"{rule}, got {by(grid)}; {todo}")


def _pick(kind: str, wanted: Optional[Sequence[str]], names: Sequence[str]) -> Tuple[int, ...]:
    """Return the indices of the wanted names; all of them for None."""
    if wanted is None:
        return tuple(range(len(names)))
    check_names(kind, wanted, names)
    return tuple(names.index(name) for name in wanted)


# --- Errors of a pipeline ---

_marks = itertools.count()
_failures: Deque[Tuple[str, BaseException]] = collections.deque(maxlen=64)
"""(mark in the text of TensorFlow's error, the error as it was raised)."""


def _keeping_errors(load: Callable[[int], ImageAndTarget]) -> Callable[[int], ImageAndTarget]:
    """Wrap the loader so that `Batches` can raise its InputError and OSError as they were:
    TensorFlow keeps their text alone."""

    @tf.autograph.experimental.do_not_convert
    def call(index: int) -> ImageAndTarget:
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
            for mark, own in list(_failures):
                if mark in str(error.message):
                    raise own.with_traceback(None) from None
            raise
