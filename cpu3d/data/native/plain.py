"""The sample of samples.c in NumPy, a step at a time: where there is no C compiler, and in
tests."""

from typing import List, Optional, Sequence, Tuple

import numpy as np

from cpu3d.data.augment import AugmentParams, smoothing
from cpu3d.data.cases.resample import TIE
from cpu3d.data.native.spec import ImageAndTarget, SampleSpec, Stored
from cpu3d.data.normalise import scaled
from cpu3d.data.region import Array, Region, Shape3, crop, xyz
from models.native.shared import IGNORED


def make_sample(stored: Stored, drawn: AugmentParams, spec: SampleSpec) -> ImageAndTarget:
    """Make the sample as `samples.make_sample` does, of the numbers of the picked channels."""
    picked = stored.image[..., list(spec.channels)].astype(np.float32)
    image = scaled(picked, drawn.scale, drawn.shift, drawn.window)
    target = spec.table[stored.label].astype(np.float32)
    image = _moved(image, stored.start, drawn.matrix, spec.grid)
    target = _moved(target, stored.start, drawn.matrix, spec.grid)
    if drawn.outside is not None:
        image = image + drawn.outside
    image = _changed(image, drawn)
    if drawn.limits is not None:
        image = np.clip(image, *drawn.limits.T)
    image = _flipped(image, drawn.flips)
    target = _flipped(_decided(target, spec), drawn.flips)
    if spec.is_bfloat16:
        from ml_dtypes import bfloat16  # of TensorFlow, on use

        image = image.astype(bfloat16).view(np.uint16)
    return np.ascontiguousarray(image), np.ascontiguousarray(target, np.uint8)


def _decided(target: Array, spec: SampleSpec) -> Array:
    """Decide the target of means (X, Y, Z, R), or with those of ignored voxels (X, Y, Z, R + 1)."""
    inside = np.float32(0.5 - TIE)
    if spec.ignore is None:
        return target >= inside
    ignored = target[..., -1:]
    regions = target[..., :-1] >= inside * (1 - ignored)
    return np.where(ignored > np.float32(0.5 + TIE), IGNORED, regions)


def smoothings(drawn: AugmentParams, grid: Shape3) -> List[Optional[Tuple[Array, ...]]]:
    """Return the matrices by which each channel is smoothed along X, Y and Z; None if it is not."""
    matrices: List[Optional[Tuple[Array, ...]]] = []
    for channel in range(len(drawn.scale)):
        blur = 0.0
        resolution = 1.0
        if drawn.blur is not None:
            blur = float(drawn.blur[channel])
        if drawn.low_resolution is not None:
            resolution = float(drawn.low_resolution[channel])
        if blur > 0 or resolution < 1:
            matrices.append(tuple(smoothing(n, blur, resolution) for n in grid))
        else:
            matrices.append(None)
    return matrices


def _along(volume: Array, matrix: Array, axis: int) -> Array:
    """Apply a matrix (to, from) to a volume along an axis."""
    return np.moveaxis(np.tensordot(matrix, volume, (1, axis)), 0, axis)


def _moved(volume: Array, start: Shape3, matrix: Optional[Array], grid: Shape3) -> Array:
    """Put a box that begins at this voxel on the grid, with zeros around it, and turn it about the
    grid's centre."""
    if matrix is None:
        return crop(volume, Region(xyz(-n for n in start), grid))
    if not volume.size:
        return np.zeros((*grid, volume.shape[3]), np.float32)
    from scipy.ndimage import affine_transform  # on use: not where C makes samples

    centre = (np.array(grid) - 1) / 2
    turn = matrix.astype(np.float64)
    offset = centre - start - turn @ centre
    how = {"output_shape": grid, "order": 1, "mode": "grid-constant"}
    channels = np.moveaxis(volume, 3, 0)
    return np.stack([affine_transform(each, turn, offset, **how) for each in channels], -1)


def _changed(image: Array, drawn: AugmentParams) -> Array:
    """Change the intensities of the voxels that are not background."""
    image = image.copy()
    matrices = smoothings(drawn, xyz(image.shape[:3]))
    for channel in range(image.shape[3]):
        background = 0.0 if drawn.background is None else float(drawn.background[channel])
        volume = image[..., channel]
        inside = volume != background  # all of it if that is NaN
        if drawn.noise is not None and drawn.noise_keys is not None:
            noise = _noise(xyz(volume.shape), drawn.noise_keys[channel])
            volume = np.where(inside, volume + noise * drawn.noise[channel], 0)
        for axis, matrix in enumerate(matrices[channel] or ()):
            volume = _along(volume, matrix, axis)
        volume = np.where(inside, volume, 0)
        inside = volume != background  # what has become 0 counts as background, too
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
    """Apply a gamma over the range of values or of their negatives, and keep mean and deviation."""
    low = values.min()
    high = values.max()
    if low == high:
        return values
    if negative:
        changed = -(np.clip((high - values) / (high - low), 1e-6, 1) ** exponent)
    else:
        changed = np.clip((values - low) / (high - low), 1e-6, 1) ** exponent
    deviation = changed.std()
    if deviation == 0:
        return values
    return values.mean() + (changed - changed.mean()) * values.std() / deviation


def _noise(shape: Shape3, keys: Array) -> Array:
    """Make noise of mean 0 and deviation 1: the sum of eight bytes, which are a function of the
    keys and of a voxel's number."""
    numbers = np.arange(np.prod(shape), dtype=np.uint64).astype(np.uint32).reshape(shape)
    first = _mixed(_mixed(numbers ^ keys[0]) + keys[1])
    words = np.stack([first, _mixed(first + np.uint32(0x9E3779B9))], -1)
    total = words.view(np.uint8).astype(np.int32).sum(-1)
    return (total - 1020).astype(np.float32) * np.float32(1 / 209.0215)


def _mixed(word: Array) -> Array:
    """Wellons 2018, "Prospecting for hash functions": lowbias32."""
    word = (word ^ word >> np.uint32(16)) * np.uint32(0x7FEB352D)
    word = (word ^ word >> np.uint32(15)) * np.uint32(0x846CA68B)
    return word ^ word >> np.uint32(16)


def _flipped(volume: Array, flips: Sequence[bool]) -> Array:
    return np.flip(volume, [axis for axis in range(3) if flips[axis]])
