"""Normalises stored voxels to z-scores over the brain: of a sample's channels, and of an image to
predict on."""

from typing import Tuple

import numpy as np

from cpu3d.data.manifest import CaseRecord
from cpu3d.data.region import Array, Region, crop


def normalisation(record: CaseRecord) -> Tuple[Array, Array]:
    """(scale, shift), float64, so that scale * value + shift has mean 0 and standard deviation 1
    over the brain."""
    scale = 1 / np.array(record.channel_std)
    return scale, -np.array(record.channel_mean) * scale


def normalise(image: Array, record: CaseRecord, region: Region) -> Array:
    """A `region` of an image (X, Y, Z, C) as float32, normalised as a sample's; for prediction."""
    scale, shift = normalisation(record)
    stored = crop(image, region)
    values = stored.astype(np.float32) * scale.astype(np.float32) + shift.astype(np.float32)
    return np.where(stored == 0, np.float32(0), values)
