"""A sample of a training, and what it is made from: stored voxels, and the form of the network's
input."""

from dataclasses import dataclass
from typing import Optional, Tuple

import numpy as np

from cpu3d.data.region import Array, Shape3
from cpu3d.errors import InputError
from models.config import DTYPES

# (X, Y, Z, C), and (X, Y, Z, R) uint8: 1 in a region, 0 outside, IGNORED where it is not learnt
ImageAndTarget = Tuple[Array, Array]


@dataclass(frozen=True)
class Stored:
    """A box of a case's stored voxels; what is around it surrounds the volume."""

    image: Array  # (X, Y, Z, channels of the store) int16
    label: Array  # (X, Y, Z) uint8, codes
    start: Shape3
    """Its first voxel among those of the sample; outside of them for a turn."""


@dataclass(frozen=True)
class SampleSpec:
    """What all samples of a stream have in common."""

    grid: Shape3  # its voxels X, Y, Z
    channels: Tuple[int, ...]  # those of the store, in the order of the image's last axis
    codes: Tuple[Tuple[int, ...], ...]  # of each region, in the order of the target's last axis
    dtype: str = "float32"  # of the image, one of DTYPES
    ignore: Optional[int] = None  # code of the voxels that are not to be learnt

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            names = ", ".join(DTYPES)
            raise InputError(f"dtype must be one of {names}, got {self.dtype!r}; pick one")

    @property
    def is_bfloat16(self) -> bool:
        """Whether the image is given as bits of bfloat16, uint16: NumPy has no such type."""
        return DTYPES[self.dtype].bytes == 2

    @property
    def table(self) -> Array:
        """(256, R) uint8: 1 where a code belongs to a region. A column more, if there is a code to
        be ignored: where it is that."""
        columns = list(self.codes)
        if self.ignore is not None:
            columns.append((self.ignore,))
        rows = [[code in codes for codes in columns] for code in range(256)]
        return np.array(rows, np.uint8)
