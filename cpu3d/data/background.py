"""Finds what is no measurement in a channel: a background of 0, or what stands in its stead,
what surrounds the volume of a channel without one, and values far out of range.

Where a channel is normalised over its foreground, everything else takes 0 as background.
"""

from typing import Tuple

import numpy as np

from cpu3d.data.region import Array

# Shares of the robust maximum. Residue is less than one step of a scanner's 12 bits (2.4e-4), so
# nothing that was measured is as small, and a hundred times what resampling in float32 leaves
# (1e-6).
TOLERANCE = 1e-4
# Cubic splines swing around 0 beside a head's edge, by a factor of 4 less with each voxel. In a
# real FLAIR and T1 turned by 7 degrees no voxel of the brain was below this share, and the mean of
# what was left differed by 0.1 standard deviations from the brain's; by 0.5 if only residue is
# removed.
NEAR = 1e-2
SWINGS_SHARE = 0.2  # of the voxels between both that must be below 0, as no intensity is
ROBUST = 99.9  # percentile of the magnitudes: a few hot voxels are no maximum
BORDER_SHARE = 0.5  # of the grid's outermost voxels that must be alike to be background
# Of the voxels within the tolerance of 0, those that must not be 0 to be residue. Behind a
# background of exact zeros, one z-score in thousands is that near to 0 by chance, and stays as it
# is.
RESIDUE_SHARE = 0.01
# Of the voxels below NEAR, those within the tolerance from which on these are a background of their
# own, also if a crop has few of them at its border. Of scores in a brain one in a hundred is.
APART_SHARE = 0.5
# Of a channel's bulk, and of how many times its range a value is from it that is no measurement: a
# dead pixel is among the first voxel of a thousand at either end, and metal in a CT is nearer; a
# failed reconstruction may have more voxels, and is farther away. What is left keeps its precision
# as int16: half a step is below 0.001 of the range of the bulk.
FAR = ((1000, 10), (100, 100))


def without_residue(volume: Array) -> Array:
    """Set to 0 what an interpolation leaves around a head in a finite volume `(X, Y, Z)`: values
    that are almost 0, and what splines let swing beside the head's edge. That is all below 1 %
    of the maximum that is connected to the border, if it is of mixed sign.

    Returned as it is if its voxels are whole numbers, if its background is exactly 0 already, or if
    not most of what is below 1 % is almost 0, as the noise in the air of a scan that is not
    skull-stripped.
    """
    if volume.dtype.kind != "f" or np.array_equal(np.rint(volume), volume):
        return volume
    size = np.abs(volume)
    tolerance = _tolerance(volume)
    tiny = size <= tolerance
    near = size <= tolerance * NEAR / TOLERANCE
    tiny_voxels = np.count_nonzero(tiny)
    if np.count_nonzero(volume[tiny]) <= RESIDUE_SHARE * tiny_voxels:
        return volume
    if tiny_voxels < APART_SHARE * np.count_nonzero(near):
        return volume
    from scipy.ndimage import label  # on use, as below

    components = label(near)[0]  # (X, Y, Z): the number of each voxel's component; 0 for none
    at_border = np.setdiff1d(_border(components), [0])
    outside = np.isin(components, at_border)
    beside = volume[outside & ~tiny]
    if np.count_nonzero(beside < 0) >= SWINGS_SHARE * max(beside.size, 1):
        tiny |= outside
    return np.where(tiny, volume.dtype.type(0), volume)


def border_value(volume: Array) -> float:
    """Return the value of most of the outermost voxels of a finite volume `(X, Y, Z)` if it should
    perhaps be 0: a constant, or values that are too near to 0 for a head. Return 0 if it is 0,
    if they vary, or for the noise of a scanner, which is of whole numbers."""
    border = _border(volume)
    middle = float(np.median(border))
    if middle == 0:
        return 0.0
    tolerance = _tolerance(volume)
    if np.mean(np.abs(border - middle) <= tolerance) >= BORDER_SHARE:
        return middle if abs(middle) > tolerance else 0.0
    size = np.abs(border)
    near = (size > 0) & (size <= tolerance * NEAR / TOLERANCE)
    if volume.dtype.kind != "f" or near.mean() < BORDER_SHARE:
        return 0.0
    return float(np.median(size[near]))


def surroundings(volume: Array, is_ct: bool) -> float:
    """Return what surrounds a volume `(X, Y, Z)` whose background is no value of its own: the
    median of its border's finite voxels, a value that occurs. Of a CT, and without such voxels,
    it is the least value: a body may reach the border, and air has no other."""
    border = _border(volume)
    finite = border[np.isfinite(border)]
    if finite.size and not is_ct:
        return float(np.percentile(finite, 50, method="lower"))
    values = volume[np.isfinite(volume)]
    return float(values.min()) if values.size else 0.0


def without_far_values(volume: Array, has_background: bool) -> Tuple[Array, int]:
    """Replace values of a volume `(X, Y, Z)` that are FAR from its bulk by the median of their
    neighbours, or without such by the least or the largest of the others, and count them. NaN
    stays, and 0 where it is background."""
    is_value = np.isfinite(volume)
    if has_background:
        is_value &= volume != 0
    values = volume[is_value]
    least = -np.inf
    most = np.inf
    for share, times in FAR:
        ends = values.size // share
        if not ends:  # a few voxels have no bulk
            continue
        values.partition((ends, values.size - 1 - ends))
        low = float(values[ends])
        high = float(values[-1 - ends])
        if low < high:
            least = max(least, low - times * (high - low))
            most = min(most, high + times * (high - low))
    if not values.size or (least <= values.min() and values.max() <= most):
        return volume, 0
    is_far = is_value & ((volume < least) | (volume > most))
    near = volume[is_value & ~is_far]
    made = np.where(is_far, np.clip(volume, near.min(), near.max()), volume)
    is_near = np.isfinite(volume) & ~is_far
    for x, y, z in np.argwhere(is_far):
        cube = (
            slice(max(x - 1, 0), x + 2),
            slice(max(y - 1, 0), y + 2),
            slice(max(z - 1, 0), z + 2),
        )
        neighbours = np.sort(volume[cube][is_near[cube]])
        if neighbours.size:  # else it is amid others, as of metal
            made[x, y, z] = neighbours[(neighbours.size - 1) // 2]
    return made, int(np.count_nonzero(is_far))


def background_share(volume: Array) -> float:
    """Return the share of a volume that is background as a whole: 0, as all six neighbours are.
    Noise that happens to be 0 is not."""
    from scipy.ndimage import binary_erosion  # on use: an estimate of a store needs no scipy

    return float(np.count_nonzero(binary_erosion(volume == 0, border_value=1))) / volume.size


def _tolerance(volume: Array) -> float:
    return TOLERANCE * float(np.percentile(np.abs(volume.astype(np.float32)), ROBUST))


def _border(volume: Array) -> Array:
    """Return the voxels of the six faces."""
    faces = []
    for axis in range(3):
        slices = np.moveaxis(volume, axis, 0)
        faces += [slices[0].ravel(), slices[-1].ravel()]
    return np.concatenate(faces)
