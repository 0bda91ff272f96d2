"""A sample of a stream, made by native/samples.py of a box of a case and of the numbers drawn."""

import itertools
import math
from typing import Callable, Optional, Sequence

import numpy as np

from cpu3d.data.augment import AugmentConfig, draw
from cpu3d.data.files.reader import READ_MODES, Reader, choose_read_mode, file_system, parts_of
from cpu3d.data.native.samples import Form, Sample, Stored, make_sample
from cpu3d.data.normalise import normalisation
from cpu3d.data.records import CaseRecord
from cpu3d.data.region import Array, Region
from cpu3d.data.sampling import ALL, PatchSampling, Share, patch_at
from cpu3d.data.store import Store
from cpu3d.errors import InputError, raise_if_any

# a box of less than 1/SMALL of its array is copied out of the file; a larger one is a map of the
# array
SMALL = 8


def open_reading(
    store: Store,
    splits: Sequence[str] = ("train",),
    *,
    read_mode: Optional[str] = None,
    share: Share = ALL,
) -> Reader:
    """A reader in `read_mode`, one of READ_MODES, or in the one that fits the disk, once the
    splits' files are checked.

    No voxels are read. A worker checks every n-th file, by its `share`. Raises InputError for an
    unknown or empty split, cases without labels, and damaged files."""
    records = itertools.chain.from_iterable([labelled(store, split) for split in splits])
    if read_mode not in (None, *READ_MODES):
        raise InputError(
            f"read mode must be one of {', '.join(READ_MODES)}, got {read_mode!r}; leave it out"
        )
    store.check(itertools.islice(records, share.rank, None, share.workers))
    return Reader(store.folder, read_mode or choose_read_mode(file_system(store.folder)))


def labelled(store: Store, split: str) -> Sequence[CaseRecord]:
    """The cases of a split. Raises InputError if there is no such split, it is empty, or a case has
    no label."""
    if split not in store.manifest.split:
        raise InputError(
            f"split must be one of {', '.join(store.manifest.split)}, got {split!r}; pick one"
        )
    if not store.manifest.split[split]:
        raise InputError(
            f"split {split!r} of {store.folder} must hold cases, got none; prepare with another --split"
        )
    bare = sorted(set(store.manifest.unlabelled) & set(store.manifest.split[split]))
    raise_if_any(
        f"case {case_id} must have a label to train or score on, got none; leave it out"
        for case_id in bare
    )
    return store.cases(split)


def loader(
    reader: Reader,
    records: Sequence[CaseRecord],
    sampling: PatchSampling,
    augment: AugmentConfig,
    form: Form,
    *,
    share: Share,
    mirrored: Sequence[int],
) -> Callable[[int], Sample]:
    """Index of a sample of `share` -> its image and target.

    Threads may call it, in any order. `mirrored` are the axes along which samples may be mirrored.
    """

    def load(sample: int) -> Sample:
        position = share.position(int(sample))
        _, _, index, region = patch_at(position, sampling, records)
        record = records[index]
        drawn = draw(
            augment,
            *normalisation(record),
            record.spacing_mm,
            seed=sampling.seed,
            position=position,
            mirrored=mirrored,
        )
        needed = region
        if drawn.matrix is not None and form.shrinking is None:
            needed = _turned(region, drawn.matrix)
        return make_sample(_stored(reader, record, region, needed), drawn, form)

    return load


def _turned(region: Region, matrix: Array) -> Region:
    """The voxels from which those of a region come that is turned about its centre by a `matrix` of
    `draw`."""
    half = (np.array(region.size) - 1) / 2
    centre, reach = region.start + half, np.abs(matrix) @ half + 1
    start, stop = np.floor(centre - reach), np.ceil(centre + reach) + 1
    return Region(tuple(start.astype(int).tolist()), tuple((stop - start).astype(int).tolist()))


def _stored(reader: Reader, record: CaseRecord, region: Region, needed: Region) -> Stored:
    """The stored voxels of a case in `needed`, with their place in `region`."""
    inside = needed.overlap(record.box)
    if inside is None:  # one voxel of background
        return Stored(
            np.zeros((1, 1, 1, record.channels), np.int16), np.zeros((1, 1, 1), np.uint8), (0, 0, 0)
        )
    starts, stops = (
        [a - b for a, b in zip(ends, record.stored.start)] for ends in (inside.start, inside.stop)
    )
    slices = tuple(map(slice, starts, stops))
    mapped = record.format == "npy" and reader.mode == "mmap"
    if mapped and SMALL * math.prod(inside.size) >= math.prod(record.stored.size):
        arrays = [reader.array(record, part)[slices] for part in parts_of(record)]
    else:
        arrays = [reader.array(record, part, slices) for part in parts_of(record)]
    return Stored(*arrays, at=tuple(a - b for a, b in zip(inside.start, region.start)))
