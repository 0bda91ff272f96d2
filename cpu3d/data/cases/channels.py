"""Describes the channels of a case for its record, and stores them in int16: as they are, or in
steps."""

import math
from typing import List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from cpu3d.data.background import surroundings
from cpu3d.data.normalise import Kind, Normalisation
from cpu3d.data.region import Array, Region, bounding_box, whole
from cpu3d.errors import raise_if_any

INT16 = np.iinfo(np.int16)
FOREGROUND_VALUES = 1000  # of a CT's labelled voxels in a record
AS_IT_IS = (1.0, 0.0)  # step and offset

Unit = Tuple[float, float]  # (step, offset): the source's value is step * stored + offset


class ChannelFacts(NamedTuple):
    """The entries of a record for one channel; `around` and the field below it as there."""

    mean: float
    std: float
    low: float
    high: float
    voxels: int  # that the others are over
    around: float = 0.0
    foreground: Tuple[float, ...] = ()


def facts_of_channel(
    channel: Array, each: Normalisation, unit: Unit, is_labelled: Optional[Array]
) -> ChannelFacts:
    """Describe the stored values (X, Y, Z) of a channel, of which some voxels may be labelled."""
    values = channel[channel != 0] if each.has_background else channel
    facts = ChannelFacts(
        mean=float(values.mean(dtype=np.float64)),
        std=float(values.std(dtype=np.float64)),
        low=float(values.min()),
        high=float(values.max()),
        voxels=values.size,
    )
    if each.has_background:
        return facts
    facts = facts._replace(around=surroundings(channel, each.kind is Kind.CT))
    if each.kind is Kind.CT and is_labelled is not None and is_labelled.any():
        step, offset = unit
        values = np.sort(channel[is_labelled])
        ranks = (2 * np.arange(FOREGROUND_VALUES) + 1) * values.size // (2 * FOREGROUND_VALUES)
        facts = facts._replace(foreground=tuple((values[ranks] * step + offset).tolist()))
    return facts


def content_box(
    image: Array,
    label: Optional[Array],
    kinds: Sequence[Normalisation],
    units: Sequence[Unit],
    around: Sequence[float],
    ignore: Optional[int],
) -> Region:
    """Return the box around all that is there: labelled voxels but those to `ignore`, and voxels
    that differ from what is `around` the volume in some channel of a stored image (X, Y, Z, C),
    in a CT those above its window's lower end. It is the whole grid if nothing is there, or if
    a window is not known yet."""
    mask = np.zeros(image.shape[:3], bool)
    if label is not None:
        mask = (label > 0) & (label != (0 if ignore is None else ignore))
    for index, each in enumerate(kinds):
        channel = image[..., index]
        if each.kind is not Kind.CT:
            mask |= channel != (around[index] if around else 0)
        elif each.low is None:
            return whole(channel.shape)
        else:
            step, offset = units[index] if units else AS_IT_IS
            mask |= channel > (each.low - offset) / step
    return bounding_box(mask)


# --- Stored in steps ---


def image_in_steps(
    volumes: Sequence[Array],
    names: Sequence[str],
    kinds: Sequence[Normalisation],
) -> Tuple[Array, float, Tuple[Unit, ...]]:
    """Stack channels last as int16, and return the unit of each, by which values come back to half
    a step, of which a channel's range has 65,534; no units if all are int16 already.

    Where 0 is background, the offset is 0 and only 0 becomes 0. Returned with the largest rounding
    error, in standard deviations; of CT in those of its window, 0 before that is known. Raises
    InputError, with their `names`, for channels whose range is no number."""
    image = np.empty((*volumes[0].shape, len(volumes)), "<i2")
    if all(volume.dtype == np.int16 for volume in volumes):
        return np.stack(volumes, -1, out=image), 0.0, ()
    units: List[Unit] = []
    problems = []
    error = 0.0
    for index, volume in enumerate(volumes):
        if volume.dtype == np.int16:
            image[..., index] = volume
            units.append(AS_IT_IS)
            continue
        values = volume.astype(np.float64)
        step, offset = _unit_of(values, kinds[index].has_background)
        with np.errstate(all="ignore"):  # an overflow is refused below
            std = float(values.std())
        if not (0 < std < math.inf and 0 < step < math.inf):
            rule = f"{names[index]} must have a deviation that is a number"
            problems.append(f"{rule}, got {std:g}; rescale it or leave the case out")
            continue
        stored = np.rint((values - offset) / step)
        if kinds[index].has_background:
            stored = np.where((stored == 0) & (values != 0), np.copysign(1, values), stored)
        if kinds[index].kind is not Kind.CT:
            error = max(error, float(np.abs(stored * step + offset - values).max()) / std)
        image[..., index] = stored
        units.append((step, offset))
    raise_if_any(problems)
    return image, max(error, rounding_in_windows(units, kinds)), tuple(units)


def rounding_in_windows(units: Sequence[Unit], kinds: Sequence[Normalisation]) -> float:
    """Return the largest rounding error of CT channels in steps, half a step, in deviations of
    their windows; 0 for whole numbers and for unknown windows."""
    errors = [0.0]
    for (step, _), each in zip(units, kinds):
        if each.std is not None and step != 1:
            errors.append(step / 2 / each.std)
    return max(errors)


def _unit_of(values: Array, has_background: bool) -> Unit:
    """Choose the unit in which int16 holds a channel's values, exactly if they are whole numbers
    and their range fits."""
    low = float(values.min())
    high = float(values.max())
    if has_background:
        return max(-low, high) / INT16.max, 0.0
    if high - low <= INT16.max - INT16.min and np.array_equal(np.rint(values), values):
        return 1.0, low - INT16.min
    return (high / 2 - low / 2) / INT16.max, low / 2 + high / 2
