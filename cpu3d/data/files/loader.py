"""What is read and drawn for one position: a box of a case's arrays and a few numbers, as NumPy; `finish` goes on."""

import contextlib
import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Dict, FrozenSet, Optional, Sequence, Tuple

import numpy as np

from cpu3d.data.augment import DRAWN, AugmentConfig, draw
from cpu3d.data.files.reader import Reader, ReadPlan, Slices, choose_read_mode, file_system, parts_of
from cpu3d.data.records import CaseRecord
from cpu3d.data.region import Region, crop
from cpu3d.data.sampling import ALL, PatchSampling, Share, patch_at
from cpu3d.data.store import Store, distinct
from cpu3d.errors import InputError, refuse

BOX = {
    "bits": ("int16", (None, None, None, None)),
    "is_half": ("bool", ()),
    "label": ("uint8", (None, None, None)),
    **DRAWN,
    "start": ("int64", (3,)),
    "size": ("int64", (3,)),
    "padding": ("int64", (3, 2)),
}
"""Name -> dtype and shape of what a Loader gives: `finish` says what each is."""

SMALL = 8
"""A box below this part of its array is copied out of the file rather than left in a map."""

AHEAD, IN_FLIGHT = 2, 3
"""Samples to bring in before they come; those besides the ones being prepared whose maps TensorFlow may hold."""


@dataclass(frozen=True)
class Reading:
    """How the cases of a store are read. The datasets of a run share one."""

    reader: Reader
    plan: ReadPlan
    kept: FrozenSet[str]
    """Stems of the arrays that stay in memory from one epoch to the next: the first that the page budget holds."""
    splits: Tuple[str, ...] = ()
    """Whose arrays were looked at."""


def open_reading(
    store: Store,
    splits: Sequence[str] = ("train",),
    *,
    free_bytes: int,
    read_mode: Optional[str] = None,
    patches: bool = False,
    share: Share = ALL,
) -> Reading:
    """Look at every array of these splits once, at no voxel, and choose how to read them.

    `free_bytes` is the memory that a run may use here, of which pages get half at most; `read_mode` is one of
    READ_MODES; `patches` says that parts will be read, not volumes. The workers of a run look at a `share` of the
    arrays each. Raises InputError for an unknown or empty split, for cases without labels, for all arrays that are
    damaged, and for "ram" when they do not fit.
    """
    sizes: Dict[str, int] = {}

    def counted():
        for record in itertools.chain.from_iterable(distinct(labelled(store, split)) for split in splits):
            sizes[record.stem] = record.image_bytes + record.label_bytes
            yield record

    store.check(itertools.islice(counted(), share.rank, None, share.workers))
    facts = {"file_system": file_system(store.folder), "needed_bytes": sum(sizes.values()), "free_bytes": free_bytes}
    plan = choose_read_mode(read_mode, **facts, patches=patches)
    ends = zip(sizes, itertools.accumulate(sizes.values()))
    kept = frozenset(stem for stem, end in ends if end <= plan.page_budget_bytes)
    return Reading(Reader(store.folder, plan.mode), plan, kept, tuple(splits))


def labelled(store: Store, split: str) -> Sequence[CaseRecord]:
    """The cases of a split. Raises InputError when there is no such split, it is empty, or a case has no label."""
    if split not in store.manifest.split:
        raise InputError(f"split must be one of {', '.join(store.manifest.split)}, got {split!r}; pick one")
    if not store.manifest.split[split]:
        raise InputError(f"split {split!r} of {store.folder} must hold cases, got none; prepare with another --split")
    bare = sorted(set(store.manifest.unlabelled) & set(store.manifest.split[split]))
    refuse(f"case {case_id} must have a label to train or score on, it has none" for case_id in bare)
    return store.cases(split)


class Loader:
    """sample -> the arrays of `BOX`, in that order. Any number of threads may call it, in any order.

    Samples are those of `share`, by their index; whose share is everything has sample n at position n. `samples` are
    those of a pass. A thread that lives as long as this object asks the kernel for the files of what comes next, and
    gives back those of what was used: the kernel would drop what was used longest ago, which in epochs comes next.
    """

    def __init__(
        self,
        reading: Reading,
        records: Sequence[CaseRecord],
        sampling: PatchSampling,
        *,
        augment: AugmentConfig,
        samples: range,
        threads: int = 1,
        share: Share = ALL,
    ):
        self._reader, self._kept, self._records, self._sampling = reading.reader, reading.kept, records, sampling
        self._augment, self._samples, self._share, self._in_flight = augment, samples, share, threads + IN_FLIGHT
        self._adviser = ThreadPoolExecutor(1, "cpu3d look-ahead")

    def __call__(self, sample: int) -> Tuple[np.ndarray, ...]:
        with contextlib.suppress(RuntimeError):  # Python ends, and TensorFlow still prefetches
            self._adviser.submit(self._advise, int(sample))
        record, region = self._place_of(int(sample))
        key = {"seed": self._sampling.seed, "position": self._share.position(int(sample))}
        drawn = draw(self._augment, *normalisation(record), record.spacing_mm, **key)
        inside = region.overlap(record.box) or Region(region.start, (1, 1, 1))
        bits, label, at = self._arrays(record, inside)
        box = {
            **drawn,
            "bits": bits.view(np.int16),  # float16 goes as its bits: a dataset has one dtype, and a view costs nothing
            "is_half": np.bool_(record.image_dtype == "float16"),
            "label": label,
            "start": np.int64(at),
            "size": np.int64(inside.size),
            "padding": np.int64([inside.start, region.stop]).T - np.int64([region.start, inside.stop]).T,
        }
        return tuple(box[name] for name in BOX)

    def _place_of(self, sample: int) -> Tuple[CaseRecord, Region]:
        drawn = patch_at(self._share.position(sample), self._sampling, self._records)
        return self._records[drawn.index], drawn.region

    def _advise(self, sample: int) -> None:
        """Give back what was used before `sample`, bring in what comes after. What fails here fails when it is read."""
        first, end, used = self._samples.start, min(sample + AHEAD + 1, self._samples.stop), sample - self._in_flight
        if used >= first:
            record, _ = self._place_of(used)
            in_use = {self._place_of(other)[0].stem for other in range(used + 1, end)}
            if record.stem not in self._kept and record.stem not in in_use:
                self._reader.give_back(record)
        for coming in range(sample if sample == first else sample + AHEAD, end):
            record, region = self._place_of(coming)
            inside = region.overlap(record.box)
            if inside:
                self._reader.advise(record, _slices(record, inside))

    def _arrays(self, record: CaseRecord, inside: Region) -> Tuple[np.ndarray, np.ndarray, Tuple[int, ...]]:
        """(bits, label, where the region begins in them): mapped as they are where that is no copy, else it alone."""
        if not inside.overlap(record.box):  # one voxel of background
            return np.zeros((1, 1, 1, record.channels), np.int16), np.zeros((1, 1, 1), np.uint8), (0, 0, 0)
        slices, parts = _slices(record, inside), parts_of(record)
        mapped = record.format == "npy" and self._reader.mode != "pread"
        if mapped and SMALL * math.prod(inside.size) >= math.prod(record.stored.size):
            return (*(self._reader.array(record, part) for part in parts), tuple(one.start for one in slices))
        return (*(self._reader.box(record, part, slices) for part in parts), (0, 0, 0))


def normalisation(record: CaseRecord) -> Tuple[np.ndarray, np.ndarray]:
    """(scale, shift), float64, so that scale * value + shift has mean 0 and standard deviation 1 over the brain."""
    scale = 1 / np.array(record.channel_std)
    return scale, -np.array(record.channel_mean) * scale


def normalise(image: np.ndarray, record: CaseRecord, region: Region) -> np.ndarray:
    """What the graph does to an image, in NumPy: `region` of (X, Y, Z, C) as float32, for prediction and for tests."""
    scale, shift = normalisation(record)
    part = crop(image, region)
    return np.where(part == 0, np.float32(0), part.astype(np.float32) * np.float32(scale) + np.float32(shift))


def _slices(record: CaseRecord, inside: Region) -> Slices:
    """A region of the grid in the stored array's own voxels."""
    return tuple(slice(a - b, c - b) for a, b, c in zip(inside.start, record.stored.start, inside.stop))
