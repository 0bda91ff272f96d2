"""Holds the formula by which each kind of channel is normalised, for samples, predictions and
exports alike. Which kind a channel is, `cases/kinds.py` decides.

    levels = levels_of(record.statistics, manifest.normalisations)
    scores = normalise(image, record, region, manifest.normalisations)

A stored value v becomes `x * scale + shift + outside`, where x is v within the window of its
channel, less `origin`. The origin is what surrounds the volume, so x is 0 in padding, beyond the
edge of a turned volume, and in a store's cropped box: linear changes of x need not know the kind.
A channel with a background of exact 0 has its `shift` where x is not 0 alone; others have none, and
`outside` is what surrounds them.
"""

import enum
import math
from dataclasses import dataclass, field
from typing import Any, Dict, NamedTuple, Optional, Protocol, Sequence, Tuple

import numpy as np

from cpu3d.data.region import Array, Region, xyz

PERCENTILES = (0.5, 99.5)  # of the labelled foreground: the window of a CT, as nnU-Net's
CHOSEN = "by --normalise"  # the reason for a kind that a user chose


class Kind(str, enum.Enum):
    """What a channel's values become."""

    FOREGROUND = "zscore-foreground"
    """Scores over the voxels that are not 0; 0 is background, and stays 0."""
    ZSCORE = "zscore"  # scores over all voxels
    CT = "ct"  # within a window of the data set, scores by the data set's mean and deviation
    NONE = "none"  # themselves
    RESCALE = "rescale"  # the share of the case's range, 0 to 1

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Normalisation:
    """The normalisation of a channel of a store. The four numbers are those of a CT, in the units
    of the source's files; None for other kinds, and before they are known."""

    kind: Kind = Kind.FOREGROUND
    low: Optional[float] = None
    high: Optional[float] = None
    mean: Optional[float] = None
    std: Optional[float] = None
    why: str = field(default="", compare=False)  # the reason for the kind, in words and numbers
    is_chosen: bool = field(default=False, compare=False)  # whether a user chose the kind

    @property
    def has_background(self) -> bool:
        """Whether 0 is background: what is not there, and stays 0."""
        return self.kind is Kind.FOREGROUND

    @property
    def words(self) -> str:
        """Name the kind, and the numbers of a CT."""
        if self.low is None:
            return self.kind.value
        window = f"window {self.low:.6g} to {self.high:.6g}"
        return f"{self.kind.value}, {window}, mean {self.mean:.4g}, deviation {self.std:.4g}"

    def to_json(self) -> Dict[str, Any]:
        """Return the fields that say something."""
        content = {name: value for name, value in vars(self).items() if value not in (None, "")}
        if not self.is_chosen:
            del content["is_chosen"]
        return {**content, "kind": self.kind.value}


FOREGROUND = Normalisation()


def of_all(normalisation: Sequence[Normalisation], channels: int) -> Tuple[Normalisation, ...]:
    """Return the normalisation of each channel: over the foreground in all, if it is empty."""
    return tuple(normalisation) or (FOREGROUND,) * channels


def if_any_differs(normalisation: Sequence[Normalisation]) -> Tuple[Normalisation, ...]:
    """Return what is written of normalisations: nothing if all are over the foreground."""
    if all(each.has_background for each in normalisation):
        return ()
    return tuple(normalisation)


def ct_of(foregrounds: Sequence[Sequence[float]], why: str = "") -> Normalisation:
    """Make the window of a CT from equally large samples of the labelled foreground of cases, each
    of which counts alike. Raises ValueError if there is none, or of one value."""
    pooled = np.sort(np.concatenate([np.empty(0), *foregrounds]))
    if not pooled.size:
        raise ValueError("none")
    # Values that occur, so that a shift of all values shifts the window exactly.
    low, high = (float(n) for n in np.percentile(pooled, PERCENTILES, method="lower"))
    if low == high:
        raise ValueError(f"{low:g} in most of them")
    above = pooled - low
    mean = low + float(above.mean())
    return Normalisation(Kind.CT, low, high, mean, float(above.std()), why)


# --- Of a case ---


class Statistics(NamedTuple):
    """What normalisation needs of a channel of a case, in stored values."""

    mean: float
    std: float
    low: float
    high: float
    around: float = 0.0  # what surrounds the volume, where 0 is no background
    step: float = 1.0  # a value of the source is step * stored + offset
    offset: float = 0.0


class HasStatistics(Protocol):
    """A case's record."""

    @property
    def statistics(self) -> Tuple[Statistics, ...]: ...


@dataclass(frozen=True)
class Levels:
    """The numbers by which a case's stored values are normalised, each (C,) float64."""

    window: Optional[Array]
    """(C, 3): what is read, from low to high, less the origin. None, and the two below unused, if
    all channels have a background of 0."""
    outside: Array  # is added everywhere, and so around the volume
    limits: Array  # (C, 2): lowest and highest of normalised values, whatever changes them
    scale: Array
    shift: Array  # where the result is not 0
    has_background: Array  # bool: whether 0 is background


def levels_of(statistics: Sequence[Statistics], normalisation: Sequence[Normalisation]) -> Levels:
    """Return the levels of a case's channels. An empty `normalisation` is as in `of_all`."""
    kinds = of_all(normalisation, len(statistics))
    columns: Any = map(np.array, zip(*map(_level, statistics, kinds)))
    window, outside, limits, scale, shift = columns
    has_background = np.array([each.has_background for each in kinds])
    if has_background.all():
        window = None
    return Levels(window, outside, limits, scale, shift, has_background)


def _level(own: Statistics, each: Normalisation) -> Tuple[Any, float, Any, float, float]:
    """Return the window, outside, limits, scale and shift of a channel."""
    endless = (-math.inf, math.inf)
    if each.kind is Kind.FOREGROUND:
        scale = 1 / own.std
        return (*endless, 0.0), 0.0, endless, scale, -own.mean * scale
    if each.kind is Kind.CT:
        if each.low is None or each.high is None or each.mean is None or each.std is None:
            raise ValueError("ct must have its window, got none")
        low, high = ((value - own.offset) / own.step for value in (each.low, each.high))
        limits = ((each.low - each.mean) / each.std, (each.high - each.mean) / each.std)
        return (low, high, low), limits[0], limits, own.step / each.std, 0.0
    if each.kind is Kind.NONE:
        scale = own.step
        outside = own.around * own.step + own.offset
    elif each.kind is Kind.RESCALE:
        scale = 1 / (own.high - own.low)
        outside = (own.around - own.low) * scale
    elif each.kind is Kind.ZSCORE:
        scale = 1 / own.std
        outside = (own.around - own.mean) / own.std
    else:
        raise ValueError(f"normalisation {each.kind} must have a formula, got none; write it here")
    return (*endless, own.around), outside, endless, scale, 0.0


def scaled(stored: Array, scale: Array, shift: Array, window: Optional[Array]) -> Array:
    """Normalise stored values (..., C) float32: read within their `window`, times `scale` plus
    `shift`; 0 stays 0."""
    if window is not None:
        low, high, origin = window.T
        stored = np.clip(stored, low, high) - origin
    return np.where(stored == 0, np.float32(0), stored * scale + shift)


def in_units(image: Array, units: Sequence[Tuple[float, float]]) -> Array:
    """Return an image (X, Y, Z, C) in the source's units, those of a record; as it is without."""
    if not units:
        return image
    steps, offsets = (np.array(column, np.float32) for column in zip(*units))
    return image * steps + offsets


def normalise(
    image: Array,
    record: HasStatistics,
    region: Region,
    normalisation: Sequence[Normalisation] = (),
) -> Array:
    """Normalise a `region` of an image (X, Y, Z, C) as a sample is, float32; for prediction.
    `record` and `normalisation` are of the image's channels."""
    levels = levels_of(record.statistics, normalisation)
    shape = xyz(image.shape[:3])
    stored = image[region.slices(shape)].astype(np.float32)
    window = None
    if levels.window is not None:
        window = levels.window.astype(np.float32)
    scale = levels.scale.astype(np.float32)
    values = scaled(stored, scale, levels.shift.astype(np.float32), window)
    padding = region.padding(shape)
    if any(map(any, padding)):
        values = np.pad(values, [*padding, (0, 0)])
    if window is None:
        return values
    values += levels.outside.astype(np.float32)
    lowest, highest = levels.limits.astype(np.float32).T
    return np.clip(values, lowest, highest, out=values)
