"""How a channel's voxels are normalised, and what surrounds a volume: for samples, predictions and
exports alike.

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

    def __post_init__(self) -> None:
        numbers = (self.low, self.high, self.mean, self.std)
        if self.kind is not Kind.CT or numbers == (None,) * 4:
            return
        known = [math.nan if number is None else number for number in numbers]
        if not (known[0] < known[1] and known[3] > 0 and math.isfinite(sum(known))):
            rule = "ct must have low below high, a finite mean and a std above 0"
            raise ValueError(f"{rule}, got {numbers}; restore the file")

    @property
    def has_background(self) -> bool:
        """Whether 0 is background: what is not there, and stays 0."""
        return self.kind is Kind.FOREGROUND

    @property
    def is_of_case(self) -> bool:
        """Whether values become scores by a case's own mean and deviation."""
        return self.kind in (Kind.FOREGROUND, Kind.ZSCORE)

    @property
    def words(self) -> str:
        """The kind, and the numbers of a CT."""
        if self.low is None:
            return self.kind.value
        window = f"window {self.low:.6g} to {self.high:.6g}"
        return f"{self.kind.value}, {window}, mean {self.mean:.4g}, deviation {self.std:.4g}"

    def to_json(self) -> Dict[str, Any]:
        """The fields that say something."""
        content = {name: value for name, value in vars(self).items() if value not in (None, "")}
        if not self.is_chosen:
            del content["is_chosen"]
        return {**content, "kind": self.kind.value}


FOREGROUND = Normalisation()


def of_all(normalisation: Sequence[Normalisation], channels: int) -> Tuple[Normalisation, ...]:
    """The normalisation of each channel: none that is written is that over the foreground, in all
    of them."""
    return tuple(normalisation) or (FOREGROUND,) * channels


def if_any_differs(normalisation: Sequence[Normalisation]) -> Tuple[Normalisation, ...]:
    """The way back, as it is written."""
    if all(each.has_background for each in normalisation):
        return ()
    return tuple(normalisation)


def ct_of(foregrounds: Sequence[Sequence[float]], why: str = "") -> Normalisation:
    """The window of a CT from equally large samples of the labelled foreground of cases, each of
    which counts alike. Raises ValueError if there is none, or of one value."""
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

    low: Array  # of what is read, in stored values; -inf without a window
    high: Array
    origin: Array  # which is taken from it, and becomes 0
    scale: Array
    shift: Array  # where the result is not 0
    outside: Array  # everywhere, and so around the volume
    lowest: Array  # of normalised values, whatever changes them
    highest: Array
    has_background: Array  # bool: whether 0 is background

    @property
    def all_have_background(self) -> bool:
        """Whether nothing but scale and shift is needed."""
        return bool(self.has_background.all())


def levels_of(statistics: Sequence[Statistics], normalisation: Sequence[Normalisation]) -> Levels:
    """The levels of a case's channels, all over the foreground if `normalisation` is empty."""
    rows = []
    for own, each in zip(statistics, of_all(normalisation, len(statistics))):
        rows.append(_LEVELS[each.kind](own, each))
    columns = (np.array(column) for column in zip(*rows))
    return Levels(*columns)


_NO_LIMITS = (-math.inf, math.inf)
_Row = Tuple[float, float, float, float, float, float, float, float, bool]


def _over_foreground(own: Statistics, _: Normalisation) -> _Row:
    scale = 1 / own.std
    return (*_NO_LIMITS, 0.0, scale, -own.mean * scale, 0.0, *_NO_LIMITS, True)


def _over_all(own: Statistics, _: Normalisation) -> _Row:
    outside = (own.around - own.mean) / own.std
    return (*_NO_LIMITS, own.around, 1 / own.std, 0.0, outside, *_NO_LIMITS, False)


def _as_ct(own: Statistics, of: Normalisation) -> _Row:
    if of.low is None or of.high is None or of.mean is None or of.std is None:
        raise ValueError("ct must have its window, got none")
    low = (of.low - own.offset) / own.step
    high = (of.high - own.offset) / own.step
    lowest = (of.low - of.mean) / of.std
    highest = (of.high - of.mean) / of.std
    return (low, high, low, own.step / of.std, 0.0, lowest, lowest, highest, False)


def _as_it_is(own: Statistics, _: Normalisation) -> _Row:
    outside = own.around * own.step + own.offset
    return (*_NO_LIMITS, own.around, own.step, 0.0, outside, *_NO_LIMITS, False)


def _as_share(own: Statistics, _: Normalisation) -> _Row:
    scale = 1 / (own.high - own.low)
    outside = (own.around - own.low) * scale
    return (*_NO_LIMITS, own.around, scale, 0.0, outside, *_NO_LIMITS, False)


_LEVELS = {
    Kind.FOREGROUND: _over_foreground,
    Kind.ZSCORE: _over_all,
    Kind.CT: _as_ct,
    Kind.NONE: _as_it_is,
    Kind.RESCALE: _as_share,
}


def in_units(image: Array, units: Sequence[Tuple[float, float]]) -> Array:
    """An image (X, Y, Z, C) in the source's units, as a record has them; as it is without."""
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
    """A `region` of an image (X, Y, Z, C) as float32, normalised as a sample's; for prediction.
    `record` and `normalisation` are of the image's channels."""
    levels = levels_of(record.statistics, normalisation)
    shape = xyz(image.shape[:3])
    stored = image[region.slices(shape)].astype(np.float32)
    if not levels.all_have_background:
        np.clip(stored, np.float32(levels.low), np.float32(levels.high), out=stored)
        stored -= np.float32(levels.origin)
    values = stored * np.float32(levels.scale) + np.float32(levels.shift)
    values = np.where(stored == 0, np.float32(0), values)
    padding = region.padding(shape)
    if any(map(any, padding)):
        values = np.pad(values, [*padding, (0, 0)])
    if levels.all_have_background:
        return values
    values += np.float32(levels.outside)
    return np.clip(values, np.float32(levels.lowest), np.float32(levels.highest), out=values)
