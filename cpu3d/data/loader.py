"""What is read and drawn for one position: a box of a case's arrays and a few numbers, as NumPy. No TensorFlow.

The half of the data path that needs files. The other half, `finish`, needs none and may run elsewhere.
"""

import math
from typing import Callable, Dict, Optional, Tuple

import numpy as np

from cpu3d.data.augment import AugmentConfig, sample_params
from cpu3d.data.files.look_ahead import LookAhead
from cpu3d.data.files.reader import Reader, Slices, parts_of
from cpu3d.data.records import CaseRecord
from cpu3d.data.region import Region, crop
from cpu3d.data.sharding import ALL, Share

BOX = {
    "bits": ("int16", (None, None, None, None)),
    "is_half": ("bool", ()),
    "label": ("uint8", (None, None, None)),
    "scale": ("float32", (None,)),
    "shift": ("float32", (None,)),
    "flips": ("bool", (3,)),
    "planes": ("float32", (2, 4)),
    "start": ("int64", (3,)),
    "size": ("int64", (3,)),
    "padding": ("int64", (3, 2)),
}
"""Name -> dtype and shape of what a Loader gives: `finish` says what each is."""

SMALL = 8
"""A box below this part of its array is copied out of the file rather than left in a map."""

MOST_APART = 8
"""Samples by which the workers of a host are taken to be apart at most, though a step may be longer: what one gives
back while another is further behind, that one has not brought in yet."""


class Loader:
    """sample -> the arrays of `BOX`, in that order. Any number of threads may call it, in any order.

    Samples are those of `share`, by their index; whose share is everything has sample n at position n.
    """

    def __init__(
        self,
        reader: Reader,
        place_at: Callable[[int], Tuple[CaseRecord, Region]],
        *,
        augment: AugmentConfig,
        seed: int,
        start: int,
        stop: int,
        page_budget_bytes: int,
        horizon: int,
        threads: int = 1,
        share: Share = ALL,
    ):
        """`place_at` says which part of which case comes at a position; `start` and `stop` are samples.

        `horizon` is LookAhead's. The budget is of all workers on this host.
        """
        self._reader, self._place_at, self._share = reader, place_at, share
        self._augment, self._seed = augment, seed
        workers, in_flight = len(share.in_step), threads + 1  # TensorFlow lets go of an array when it asks for the next
        self._ahead = LookAhead(
            reader,
            lambda place: place_at(share.position_here(place))[0],
            start=start,
            stop=stop,
            page_budget_bytes=page_budget_bytes * workers // len(share.here),
            horizon=horizon,
            in_flight=in_flight,
            workers=workers,
            turn=share.in_step.index(share.rank),
            apart=min(share.part, MOST_APART) + in_flight if workers > 1 else 0,
            # Not methods: the look-ahead must not keep this.
            box_at=lambda place: _slices_at(place_at(share.position_here(place))),
        )

    def __call__(self, sample: int) -> Tuple[np.ndarray, ...]:
        self._ahead.at(int(sample))
        position = self._share.position(int(sample))
        record, region = self._place_at(position)
        params = sample_params(self._augment, seed=self._seed, position=position, channels=record.channels)
        scale, shift = normalisation(record)
        box: Dict[str, np.ndarray] = {
            **self._arrays(record, region),
            "scale": np.float32(scale * params.gain),
            "shift": np.float32(shift * params.gain + params.offset),
            "flips": np.array(params.flips),
            "planes": params.planes(record.spacing_mm),
        }
        return tuple(box[name] for name in BOX)

    def _arrays(self, record: CaseRecord, region: Region) -> Dict[str, np.ndarray]:
        """The stored arrays and what to take of them: mapped as they are where that is no copy, else the box alone."""
        inside = occupied(record, region)
        half = np.bool_(record.image_dtype == "float16")
        if inside is None:
            # Nothing but background: one voxel of it, and zeros around.
            bits, label = np.zeros((1, 1, 1, record.channels), np.int16), np.zeros((1, 1, 1), np.uint8)
            inside, at = Region(region.start, (1, 1, 1)), (0, 0, 0)
        elif self._maps(record, inside):
            bits, label = (self._reader.array(record, part) for part in parts_of(record))
            at = tuple(a - b for a, b in zip(inside.start, record.stored.start))
        else:
            slices = _slices(record, inside)
            bits, label = (self._reader.box(record, part, slices) for part in parts_of(record))
            at = (0, 0, 0)
        around = [(a - b, d - c) for a, b, c, d in zip(inside.start, region.start, inside.stop, region.stop)]
        # float16 goes as its bits: a dataset has one dtype, and a view costs nothing.
        return {
            "bits": bits.view(np.int16),
            "is_half": half,
            "label": label,
            "start": np.int64(at),
            "size": np.int64(inside.size),
            "padding": np.int64(around),
        }

    def _maps(self, record: CaseRecord, inside: Region) -> bool:
        """Whether to take the mapped arrays: no copy, but a new map costs its page faults, more than a small copy."""
        if record.format != "npy" or self._reader.mode == "pread":
            return False
        return self._reader.mode == "ram" or SMALL * math.prod(inside.size) >= math.prod(record.stored.size)


def occupied(record: CaseRecord, region: Region) -> Optional[Region]:
    """The part of `region` that lies in the case's brain: all that has to be read. None where they do not meet."""
    start = tuple(max(a, b) for a, b in zip(region.start, record.box.start))
    stop = tuple(min(a, b) for a, b in zip(region.stop, record.box.stop))
    size = tuple(b - a for a, b in zip(start, stop))
    return Region(start, size) if min(size) > 0 else None


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


def _slices_at(place: Tuple[CaseRecord, Region]) -> Slices:
    record, region = place
    inside = occupied(record, region)
    return (slice(0, 0),) * 3 if inside is None else _slices(record, inside)


def _slices(record: CaseRecord, inside: Region) -> Slices:
    """A region of the grid in the stored array's own voxels."""
    return tuple(slice(a - b, c - b) for a, b, c in zip(inside.start, record.stored.start, inside.stop))
