"""The data of one sample, as NumPy arrays: a box of a case's arrays and the numbers drawn for it."""

import itertools
import math
from typing import Callable, Optional, Sequence, Tuple

import numpy as np

from cpu3d.data.augment import DRAWN, AugmentConfig, draw
from cpu3d.data.files.reader import READ_MODES, Reader, choose_read_mode, file_system, parts_of
from cpu3d.data.normalise import normalisation
from cpu3d.data.records import CaseRecord
from cpu3d.data.region import Region
from cpu3d.data.sampling import ALL, PatchSampling, Share, patch_at
from cpu3d.data.store import Store
from cpu3d.errors import InputError, refuse

# Name -> dtype and shape of the arrays that a loader gives; normalise.py describes each.
BOX = {
    "bits": ("int16", (None, None, None, None)),
    "is_half": ("bool", ()),
    "label": ("uint8", (None, None, None)),
    **DRAWN,
    "start": ("int64", (3,)),
    "size": ("int64", (3,)),
    "padding": ("int64", (3, 2)),
}
SMALL = 8  # a box of less than 1/SMALL of its array is copied out of the file; a larger one is a map of the array


def open_reading(
    store: Store, splits: Sequence[str] = ("train",), *, read_mode: Optional[str] = None, share: Share = ALL
) -> Reader:
    """A reader in `read_mode`, one of READ_MODES, or in the one that fits the disk, once the splits' files are checked.

    No voxels are read. A worker checks every n-th file, by its `share`. Raises InputError for an unknown or empty
    split, cases without labels, and damaged files.
    """
    records = itertools.chain.from_iterable([labelled(store, split) for split in splits])
    if read_mode not in (None, *READ_MODES):
        raise InputError(f"read mode must be one of {', '.join(READ_MODES)}, got {read_mode!r}; leave it out")
    store.check(itertools.islice(records, share.rank, None, share.workers))
    return Reader(store.folder, read_mode or choose_read_mode(file_system(store.folder)))


def labelled(store: Store, split: str) -> Sequence[CaseRecord]:
    """The cases of a split. Raises InputError if there is no such split, it is empty, or a case has no label."""
    if split not in store.manifest.split:
        raise InputError(f"split must be one of {', '.join(store.manifest.split)}, got {split!r}; pick one")
    if not store.manifest.split[split]:
        raise InputError(f"split {split!r} of {store.folder} must hold cases, got none; prepare with another --split")
    bare = sorted(set(store.manifest.unlabelled) & set(store.manifest.split[split]))
    refuse(f"case {case_id} must have a label to train or score on, got none; leave it out" for case_id in bare)
    return store.cases(split)


def loader(
    reader: Reader, records: Sequence[CaseRecord], sampling: PatchSampling, augment: AugmentConfig, share: Share
) -> Callable[[int], Tuple[np.ndarray, ...]]:
    """Index of a sample of `share` -> the arrays of `BOX`, in that order. Threads may call it, in any order."""

    def load(sample: int) -> Tuple[np.ndarray, ...]:
        position = share.position(int(sample))
        _, _, index, region = patch_at(position, sampling, records)
        record = records[index]
        drawn = draw(augment, *normalisation(record), record.spacing_mm, seed=sampling.seed, position=position)
        inside = region.overlap(record.box) or Region(region.start, (1, 1, 1))
        bits, label, at = _arrays(reader, record, inside)
        box = {
            **drawn,
            "bits": bits.view(np.int16),  # float16 as its bits: a dataset has one dtype
            "is_half": np.bool_(record.image_dtype == "float16"),
            "label": label,
            "start": np.int64(at),
            "size": np.int64(inside.size),
            "padding": np.int64([inside.start, region.stop]).T - np.int64([region.start, inside.stop]).T,
        }
        return tuple(box[name] for name in BOX)

    return load


def _arrays(reader: Reader, record: CaseRecord, inside: Region) -> Tuple[np.ndarray, np.ndarray, Tuple[int, ...]]:
    """(image, label, first voxel of the region in them): the mapped arrays, or copies of the region."""
    if not inside.overlap(record.box):  # one voxel of background
        return np.zeros((1, 1, 1, record.channels), np.int16), np.zeros((1, 1, 1), np.uint8), (0, 0, 0)
    starts, stops = ([a - b for a, b in zip(ends, record.stored.start)] for ends in (inside.start, inside.stop))
    mapped = record.format == "npy" and reader.mode == "mmap"
    if mapped and SMALL * math.prod(inside.size) >= math.prod(record.stored.size):
        return (*(reader.array(record, part) for part in parts_of(record)), tuple(starts))
    slices = tuple(map(slice, starts, stops))
    return (*(reader.array(record, part, slices) for part in parts_of(record)), (0, 0, 0))
