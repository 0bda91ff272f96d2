"""A sample of a stream, made by native/samples.py of a box of a case and of the numbers drawn."""

import dataclasses
import itertools
import math
from dataclasses import dataclass
from typing import Sequence, Union

import numpy as np

from cpu3d.data.augment import AugmentConfig, draw, draw_box
from cpu3d.data.files.reader import Reader, choose_read_mode, file_system
from cpu3d.data.manifest import CaseRecord
from cpu3d.data.native.samples import make_sample
from cpu3d.data.native.spec import ImageAndTarget, SampleSpec, Stored
from cpu3d.data.normalise import Normalisation, levels_of
from cpu3d.data.region import Array, Region, xyz
from cpu3d.data.sampling import (
    ALL,
    ATTEMPTS,
    Patch,
    PatchSampling,
    Share,
    VolumeSampling,
    patch_at,
    volume_at,
)
from cpu3d.data.store import Store
from cpu3d.errors import InputError, raise_if_any
from models.native.shared import IGNORED

# A box of less than 1/SMALL of its array is copied out of the file; of a larger one the array is
# mapped.
SMALL = 8
_Sampling = Union[PatchSampling, VolumeSampling]


def open_reading(store: Store, splits: Sequence[str] = ("train",), *, share: Share = ALL) -> Reader:
    """A reader in the mode that fits the disk, once the splits' files are checked.

    No voxels are read. A worker checks every n-th file, by its `share`. Raises InputError for an
    unknown or empty split, cases without labels, and damaged files."""
    records = itertools.chain.from_iterable([labelled(store, split) for split in splits])
    store.check(itertools.islice(records, share.rank, None, share.workers))
    return Reader(store.folder, choose_read_mode(file_system(store.folder)))


def labelled(store: Store, split: str) -> Sequence[CaseRecord]:
    """Return the cases of a split. Raises InputError if there is no such split, it is empty, or a
    case has no label."""
    splits = store.manifest.split
    if split not in splits:
        raise InputError(f"split must be one of {', '.join(splits)}, got {split!r}; pick one")
    if not splits[split]:
        rule = f"split {split!r} of {store.folder} must hold cases"
        raise InputError(f"{rule}, got none; prepare with another --split")
    bare = sorted(set(store.manifest.unlabelled) & set(splits[split]))
    raise_if_any(
        f"case {case_id} must have a label to train or score on, got none; leave it out"
        for case_id in bare
    )
    return store.cases(split)


@dataclass(frozen=True)
class Loader:
    """Index of a sample of `share` -> its image and target.

    A patch in which nothing is annotated is drawn again. Some samples take a box of another one,
    which is made on the same grid. Threads may call it, in any order."""

    reader: Reader
    records: Sequence[CaseRecord]
    sampling: _Sampling
    augment: AugmentConfig
    spec: SampleSpec
    share: Share
    batch: int  # samples that become one, from sample `first` on
    first: int
    mirrored: Sequence[int]  # axes along which samples may be mirrored
    normalisation: Sequence[Normalisation] = ()  # of the store

    def __call__(self, sample: int) -> ImageAndTarget:
        sample = int(sample)
        position = self.share.position(sample)
        sampling = self.sampling
        if isinstance(sampling, VolumeSampling):
            begin = sample - (sample - self.first) % self.batch
            together = [self.share.position(begin + index) for index in range(self.batch)]
            sampling = sampling.at(together[0])
            volume = volume_at(position, sampling, self.records, together)
            sampling = dataclasses.replace(sampling, grid=volume.region.size)
        image, target = self._sample(position, sampling)
        drawn = draw_box(
            self.augment.cutmix,
            image.shape[:3],
            len(self.records),
            seed=sampling.seed,
            position=position,
        )
        if drawn is not None:
            donor, box = drawn
            for values, others in zip((image, target), self._sample(donor, sampling)):
                values[box] = others[box]
        return image, target

    def _sample(self, position: int, sampling: _Sampling) -> ImageAndTarget:
        """Make the sample at a position, without a box of another."""
        if isinstance(sampling, VolumeSampling):
            return self._made(position, volume_at(position, sampling, self.records))
        made = self._made(position, patch_at(position, sampling, self.records))
        if self.spec.ignore is None:
            return made
        attempt = 1
        while attempt < ATTEMPTS and (made[1] == IGNORED).all():  # nothing is to be learnt of it
            made = self._made(position, patch_at(position, sampling, self.records, attempt))
            attempt += 1
        return made

    def _made(self, position: int, patch: Patch) -> ImageAndTarget:
        record = self.records[patch.case_index]
        drawn = draw(
            self.augment,
            levels_of(record.statistics, self.normalisation),
            record.spacing_mm,
            seed=self.sampling.seed,
            position=position,
            mirrored=self.mirrored,
        )
        needed = patch.region
        if drawn.matrix is not None:
            needed = _turned(patch.region, drawn.matrix)
        stored = _stored(self.reader, record, patch.region, needed)
        spec = dataclasses.replace(self.spec, grid=patch.region.size)
        return make_sample(stored, drawn, spec)


def _turned(region: Region, matrix: Array) -> Region:
    """Return the region that a region's voxels come from if it is turned about its centre by a
    `matrix` of `draw`."""
    half = (np.array(region.size) - 1) / 2
    centre = region.start + half
    reach = np.abs(matrix) @ half + 1
    start = np.floor(centre - reach).astype(int)
    stop = np.ceil(centre + reach).astype(int) + 1
    return Region(xyz(start.tolist()), xyz((stop - start).tolist()))


def _stored(reader: Reader, record: CaseRecord, region: Region, needed: Region) -> Stored:
    """Read the stored voxels of a case in `needed`, with their start in `region`."""
    inside = needed.overlap(record.box)
    if inside is None:  # no voxel of it
        image = np.zeros((0, 0, 0, record.channels), np.int16)
        label = np.zeros((0, 0, 0), np.uint8)
        return Stored(image, label, (0, 0, 0))
    ends = zip(inside.start, inside.stop, record.stored.start)
    slices = xyz(slice(start - first, stop - first) for start, stop, first in ends)
    is_map = record.format == "npy" and reader.mode == "mmap"
    is_large = SMALL * math.prod(inside.size) >= math.prod(record.stored.size)

    def read(kind: str) -> Array:
        if is_map and is_large:
            return reader.array(record, kind)[slices]
        return reader.array(record, kind, slices)

    start = xyz(a - b for a, b in zip(inside.start, region.start))
    return Stored(read("x"), read("y"), start)
