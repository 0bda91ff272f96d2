"""What is read and drawn for one position: a box of a case's arrays and a few numbers, as NumPy. No TensorFlow.

The half of the data path that needs files. The other half, `finish`, needs none and may run elsewhere.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Callable, Dict, FrozenSet, Mapping, Optional, Sequence, Tuple

import numpy as np

from cpu3d.data.augment import DRAWN, AugmentConfig, draw
from cpu3d.data.files.pages import LookAhead
from cpu3d.data.files.reader import Reader, ReadPlan, Slices, choose_read_mode, file_system, parts_of
from cpu3d.data.records import CaseRecord
from cpu3d.data.region import Region, crop
from cpu3d.data.sampling import ALL, Share
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

IN_FLIGHT = 3
"""Samples besides those being prepared whose maps TensorFlow may still hold: it lets go when it asks for the next."""


@dataclass(frozen=True)
class Reading:
    """How the cases of a store are read. The datasets of a run share one."""

    reader: Reader
    plan: ReadPlan
    split_bytes: Mapping[str, int]
    """Bytes of the files of each split that it was opened for."""
    kept: FrozenSet[str]
    """Stems of the arrays that stay in memory from one epoch to the next: of each split the first that its part of the
    page budget holds. They follow from the store and the budget alone, so all workers of a host keep the same."""


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
    sizes: Dict[str, Dict[str, int]] = {split: {} for split in splits}

    def counted(split: str):
        for record in distinct(labelled(store, split)):
            sizes[split][record.stem] = record.image_bytes + record.label_bytes
            yield record

    for split in splits:
        store.check(itertools.islice(counted(split), share.rank, None, share.workers))
    split_bytes = {split: sum(found.values()) for split, found in sizes.items()}
    total = sum(split_bytes.values())
    facts = {"file_system": file_system(store.folder), "needed_bytes": total, "free_bytes": free_bytes}
    plan = choose_read_mode(read_mode, **facts, patches=patches)
    kept = set()
    for split, found in sizes.items():
        budget = plan.page_budget_bytes * split_bytes[split] // total
        kept |= {stem for stem, end in zip(found, itertools.accumulate(found.values())) if end <= budget}
    return Reading(Reader(store.folder, plan.mode), plan, split_bytes, frozenset(kept))


def labelled(store: Store, split: str) -> Sequence[CaseRecord]:
    """The cases of a split. Raises InputError when there is no such split, it is empty, or a case has no label."""
    if split not in store.manifest.split:
        raise InputError(f"split must be one of {', '.join(store.manifest.split)}, got {split!r}; pick one")
    records = store.cases(split)
    if not records:
        raise InputError(f"split {split!r} of {store.folder} must hold cases, got none; prepare with another --split")
    bare = sorted(set(store.manifest.unlabelled) & set(store.manifest.split[split]))
    refuse(f"case {case_id} must have a label to train or score on, it has none" for case_id in bare)
    return records


class Loader:
    """sample -> the arrays of `BOX`, in that order. Any number of threads may call it, in any order.

    Samples are those of `share`, by their index; whose share is everything has sample n at position n. `place_at` says
    which part of which case comes at a position; `samples` are those of a pass.
    """

    def __init__(
        self,
        reading: Reading,
        place_at: Callable[[int], Tuple[CaseRecord, Region]],
        *,
        augment: AugmentConfig,
        seed: int,
        samples: range,
        threads: int = 1,
        share: Share = ALL,
    ):
        self._reader, self._place_at, self._share = reading.reader, place_at, share
        self._augment, self._seed = augment, seed
        reader, kept = reading.reader, reading.kept  # functions of no `self`: the look-ahead must not keep this alive

        def bring_in(sample: int) -> None:
            record, region = place_at(share.position(sample))
            inside = region.overlap(record.box)
            if inside:
                reader.advise(record, _slices(record, inside))

        def release(sample: int, in_use: range) -> None:
            record, _ = place_at(share.position(sample))
            if record.stem not in kept | {place_at(share.position(other))[0].stem for other in in_use}:
                reader.give_back(record)

        self._ahead = LookAhead(bring_in, release, samples=samples, in_flight=threads + IN_FLIGHT)

    def __call__(self, sample: int) -> Tuple[np.ndarray, ...]:
        self._ahead.at(int(sample))
        position = self._share.position(int(sample))
        record, region = self._place_at(position)
        scale, shift = normalisation(record)
        case = {"scale": scale, "shift": shift, "spacing_mm": record.spacing_mm}
        box = {**self._arrays(record, region), **draw(self._augment, seed=self._seed, position=position, **case)}
        return tuple(box[name] for name in BOX)

    def _arrays(self, record: CaseRecord, region: Region) -> Dict[str, np.ndarray]:
        """The stored arrays and what to take of them: mapped as they are where that is no copy, else the box alone."""
        inside = region.overlap(record.box)
        at = (0, 0, 0)
        if inside is None:
            # Nothing but background: one voxel of it, and zeros around.
            bits, label = np.zeros((1, 1, 1, record.channels), np.int16), np.zeros((1, 1, 1), np.uint8)
            inside = Region(region.start, (1, 1, 1))
        elif (
            record.format == "npy"
            and self._reader.mode != "pread"
            and SMALL * math.prod(inside.size) >= math.prod(record.stored.size)
        ):
            bits, label = (self._reader.array(record, part) for part in parts_of(record))
            at = tuple(a - b for a, b in zip(inside.start, record.stored.start))
        else:
            slices = _slices(record, inside)
            bits, label = (self._reader.box(record, part, slices) for part in parts_of(record))
        around = [(a - b, d - c) for a, b, c, d in zip(inside.start, region.start, inside.stop, region.stop)]
        return {
            "bits": bits.view(np.int16),  # float16 goes as its bits: a dataset has one dtype, and a view costs nothing
            "is_half": np.bool_(record.image_dtype == "float16"),
            "label": label,
            "start": np.int64(at),
            "size": np.int64(inside.size),
            "padding": np.int64(around),
        }


def normalisation(record: CaseRecord) -> Tuple[np.ndarray, np.ndarray]:
    """(scale, shift), float64, so that scale * value + shift has mean 0 and standard deviation 1 over the brain."""
    scale = 1 / np.array(record.channel_std)
    return scale, -np.array(record.channel_mean) * scale


def normalise(image: np.ndarray, record: CaseRecord, region: Region) -> np.ndarray:
    """What the graph does to an image, in NumPy: `region` of (X, Y, Z, C) as float32, for prediction and for tests."""
    scale, shift = normalisation(record)
    part = crop(image, region)
    return np.where(part == 0, np.float32(0), part.astype(np.float32) * np.float32(scale) + np.float32(shift))


# --- Private helpers ---


def _slices(record: CaseRecord, inside: Region) -> Slices:
    """A region of the grid in the stored array's own voxels."""
    return tuple(slice(a - b, c - b) for a, b, c in zip(inside.start, record.stored.start, inside.stop))
