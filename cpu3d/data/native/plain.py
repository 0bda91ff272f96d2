"""The sample of samples.c in NumPy, a step at a time: where there is no C compiler, and in
tests."""

from typing import List, Optional, Sequence, Tuple

import numpy as np

from cpu3d.data.augment import Drawn, smoothing
from cpu3d.data.region import Array, Region, Shape3, crop
from cpu3d.data.resolution import TIE


def make_sample(stored, drawn: Drawn, form) -> Tuple[Array, Array]:
    """As `samples.make_sample`, of the numbers of the picked channels."""
    value = stored.image[..., list(form.channels)].astype(np.float32)
    image = np.where(value == 0, np.float32(0), value * drawn.scale + drawn.shift)
    target = form.table[stored.label].astype(np.float32)
    at = stored.at
    if form.shrinking is not None:
        image, target = (_shrunk(volume, at, form.shrinking) for volume in (image, target))
        at = (0, 0, 0)
    image, target = (_placed(volume, at, drawn.matrix, form.grid) for volume in (image, target))
    image = _flipped(_changed(image, drawn), drawn.flips)
    target = _flipped(target >= np.float32(0.5 - TIE), drawn.flips)
    if form.dtype == "bfloat16":
        image = _bfloat16_bits(image)
    return np.ascontiguousarray(image), np.ascontiguousarray(target, np.uint8)


def smoothings(drawn: Drawn, grid: Shape3) -> List[Optional[Tuple[Array, ...]]]:
    """Of each channel the matrices by which it is smoothed along X, Y and Z; None if it is not."""
    each: List[Optional[Tuple[Array, ...]]] = []
    for channel in range(len(drawn.scale)):
        blur = 0.0 if drawn.blur is None else float(drawn.blur[channel])
        low = 1.0 if drawn.low_resolution is None else float(drawn.low_resolution[channel])
        is_smoothed = blur > 0 or low < 1
        each.append(tuple(smoothing(n, blur, low) for n in grid) if is_smoothed else None)
    return each


def _shrunk(volume: Array, at: Shape3, matrices: Sequence[Array]) -> Array:
    """A box at this place of the store's grid, averaged down: all of the network's grid."""
    for axis, (start, matrix) in enumerate(zip(at, matrices)):
        weights = matrix[:, start : start + volume.shape[axis]]
        volume = _along(volume, weights, axis)
    return volume


def _along(volume: Array, matrix: Array, axis: int) -> Array:
    """A volume with a matrix (to, from) applied along an axis."""
    return np.moveaxis(np.tensordot(matrix, volume, (1, axis)), 0, axis)


def _placed(volume: Array, at: Shape3, matrix: Optional[Array], grid: Shape3) -> Array:
    """A box at this place of the grid with zeros around it, turned about the grid's centre."""
    if matrix is None:
        return crop(volume, Region(tuple(-n for n in at), grid))
    centre = (np.array(grid) - 1) / 2
    made = np.stack(np.indices(grid), -1) - centre
    places = made @ matrix.T.astype(np.float64) + (centre - at)  # (X, Y, Z, 3): in the box
    first = np.floor(places).astype(int)
    share = np.float32(places - first)
    turned = np.zeros((*grid, volume.shape[3]), np.float32)
    for corner in np.ndindex(2, 2, 2):
        voxel = first + corner
        weight = np.where(corner, share, 1 - share).prod(-1)
        is_inside = ((voxel >= 0) & (voxel < volume.shape[:3])).all(-1)
        x, y, z = np.moveaxis(np.where(is_inside[..., None], voxel, 0), -1, 0)
        turned += np.where(is_inside, weight, 0)[..., None] * volume[x, y, z]
    return turned


def _changed(image: Array, drawn: Drawn) -> Array:
    """The image with the changes of intensity in the voxels that are not background."""
    image = image.copy()
    matrices = smoothings(drawn, image.shape[:3])
    for channel in range(image.shape[3]):
        volume = image[..., channel]
        inside = volume != 0
        if drawn.noise is not None:
            volume = volume + _noise(volume.shape, drawn.noise_keys[channel]) * drawn.noise[channel]
            volume = np.where(inside, volume, 0)
        for axis, matrix in enumerate(matrices[channel] or ()):
            volume = _along(volume, matrix, axis)
        volume = np.where(inside, volume, 0)
        inside = volume != 0  # what has become 0 counts as background, too
        values = volume[inside].astype(np.float64)
        if values.size and drawn.contrast is not None and drawn.contrast[channel] != 1:
            changed = values.mean() + drawn.contrast[channel] * (values - values.mean())
            values = np.clip(changed, values.min(), values.max())
        if values.size and drawn.gamma is not None and drawn.gamma[channel] != 1:
            values = _with_gamma(values, drawn.gamma[channel], drawn.negative)
        volume[inside] = values
        image[..., channel] = volume
    return image


def _with_gamma(values: Array, exponent: float, negative: bool) -> Array:
    """Gamma over the range of values or of their negatives, which keeps mean and deviation."""
    low, high = values.min(), values.max()
    if low == high:
        return values
    share = (high - values if negative else values - low) / (high - low)
    changed = np.clip(share, 1e-6, 1) ** exponent
    if negative:
        changed = -changed
    deviation = changed.std()
    if deviation == 0:
        return values
    return values.mean() + (changed - changed.mean()) * values.std() / deviation


def _noise(shape: Shape3, keys: Array) -> Array:
    """Noise of mean 0 and deviation 1: the sum of eight bytes, which are a function of the keys and
    of a voxel's number."""
    numbers = np.arange(np.prod(shape), dtype=np.uint64).astype(np.uint32).reshape(shape)
    first = _mixed(_mixed(numbers ^ keys[0]) + keys[1])
    words = np.stack([first, _mixed(first + np.uint32(0x9E3779B9))], -1)
    total = words.view(np.uint8).astype(np.int32).sum(-1)
    return np.float32(total - 1020) * np.float32(1 / 209.0215)


def _mixed(word: Array) -> Array:
    """Wellons 2018, "Prospecting for hash functions": lowbias32."""
    word = (word ^ word >> np.uint32(16)) * np.uint32(0x7FEB352D)
    word = (word ^ word >> np.uint32(15)) * np.uint32(0x846CA68B)
    return word ^ word >> np.uint32(16)


def _flipped(volume: Array, flips: Sequence[bool]) -> Array:
    return np.flip(volume, [axis for axis in range(3) if flips[axis]])


def _bfloat16_bits(image: Array) -> Array:
    """The upper half of each float32, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(image).view(np.uint32)
    last = bits >> np.uint32(16) & np.uint32(1)
    rounded = (bits + np.uint32(0x7FFF) + last) >> np.uint32(16)
    return np.where(np.isnan(image), 0x7FC0, rounded).astype(np.uint16)
