"""Brings cases to voxels of one size, and answers back to the grid that their case came from.

    target_mm = target_spacing(spacings_mm, shapes)           # None where the cases agree
    shape = resampled_shape("a", shape, spacing_mm, target_mm)
    image = resample_image(volume, shape, spacing_mm)
    label = resample_label(label, shape)
    answer = to_source_grid(probability, record)              # as it is if it was not resampled

A case and its source cover the same box in space. So a voxel has the size next to the target's of
which the box holds a whole number, and a case whose numbers of voxels stay is not resampled.

Each axis is interpolated by itself: images by cubics (Catmull-Rom), linear between thick slices;
labels and probabilities linear. Where voxels become larger the interpolation widens by as much, so
that it averages over all of the source's voxels. Sums and products of float32 in a fixed order have
the same bits on every host and with any number of threads.
"""

import contextlib
import enum
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Iterable, List, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np

from cpu3d.data.datasets.dataset import CaseFiles
from cpu3d.data.manifest import CaseRecord, Geometry
from cpu3d.data.nifti import (
    affine_rows,
    is_voxel_size,
    ras_shape,
    ras_spacing_mm,
    ras_to_file,
    read_grid,
)
from cpu3d.data.region import Array, Shape3, xyz
from cpu3d.errors import InputError
from cpu3d.util.child import worker_count
from memory_estimator.common.units import by
from models.strides import LEAST_MM, MOST_MM, Spacing3

DIFFERS = 0.1  # share of a length from which on another one is another spacing
# Slices are thick from so many times the other two spacings on, as in nnU-Net's planner.
THICK_SLICES = 3
THICK_PERCENTILE = 10  # of the thick axis' spacings: fine slices are not thrown together
MOST_VOXELS = 2**31
MOST_GROWTH = 8  # times as many voxels as the source has: 2 mm become 1 mm
TIE = 1e-4  # how far float32's rounding may lift a share above a half
SLAB_BYTES = 4 << 20  # of a volume that are interpolated at once, in a core's cache


class Keep(enum.Enum):
    """What is done about spacings if none is chosen."""

    AUTO = "auto"  # resampled if those of the training cases differ
    OFF = "off"  # stored as they are


def parse_spacing(words: Sequence[str]) -> Union[Keep, Spacing3]:
    """Parse the words of --spacing: auto, off, or three sizes in mm; InputError for others."""
    if len(words) == 1 and words[0] in [keep.value for keep in Keep]:
        return Keep(words[0])
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        numbers = []
    if len(numbers) != 3 or not np.isfinite(numbers).all() or not is_voxel_size(numbers):
        rule = f"--spacing must be auto, off, or three sizes of {LEAST_MM:g} to {MOST_MM:g} mm"
        raise InputError(f"{rule}, got {' '.join(words)}; give such, as in --spacing 1 1 1")
    return xyz(numbers)


def in_mm(spacing_mm: Optional[Sequence[float]]) -> str:
    """Print a spacing, as "1 x 1 x 2.5 mm"; "off" for None."""
    if spacing_mm is None:
        return "off"
    return f"{' x '.join(f'{length:.4g}' for length in spacing_mm)} mm"


def range_in_mm(spacings_mm: Sequence[Spacing3]) -> str:
    """Print the spacings of cases, as "1 x 1 x 1 to 1.2 x 1 x 5 mm", of the least and the largest
    along each axis, or "1 x 1 x 5 mm" if all are equal."""
    least, most = (in_mm(ends(spacings_mm, axis=0)) for ends in (np.min, np.max))
    return least if least == most else f"{least.replace(' mm', '')} to {most}"


# --- Grids ---


def voxels_of(cases: Iterable[CaseFiles]) -> Tuple[List[Spacing3], List[Shape3]]:
    """Read the spacing and the voxels along R, A, S of each case from the header of its first
    image. One that cannot be read is left out: its problem is named when the case is loaded."""
    spacings = []
    shapes = []
    for files in cases:
        with contextlib.suppress(InputError):
            grid = read_grid(files.images[0])[0]
            spacings.append(ras_spacing_mm(grid))
            shapes.append(ras_shape(grid))
    return spacings, shapes


def target_spacing(spacings_mm: Sequence[Spacing3], shapes: Sequence[Shape3]) -> Optional[Spacing3]:
    """Choose the spacing that cases of these spacings and voxels are resampled to; None if there
    are no cases, or none is more than 10 % above another along any axis.

    By nnU-Net's planner: the median along each axis. Where that is of thick slices, 3 times the
    other spacings or more, and of as few, the 10th percentile of the thick axis, yet at least the
    larger of the others.
    """
    if not spacings_mm:
        return None
    all_mm = np.array(spacings_mm)
    if not differs(all_mm.max(0), all_mm.min(0)):
        return None
    target = np.median(all_mm, axis=0)
    voxels = np.median(shapes, axis=0)
    thick = thick_axis(target.tolist())
    if thick is not None and THICK_SLICES * voxels[thick] <= np.delete(voxels, thick).min():
        fine = np.percentile(all_mm[:, thick], THICK_PERCENTILE)
        target[thick] = max(fine, np.delete(target, thick).max())
    return xyz(float(f"{length:.6g}") for length in target)


def differs(spacing_mm: Sequence[float], usual_mm: Sequence[float]) -> bool:
    """Tell whether a spacing is more than 10 % off the usual one along an axis; 1.1 mm are not."""
    shares = np.abs(np.divide(spacing_mm, usual_mm) - 1)
    return bool(shares.max() > DIFFERS + 1e-6)


def thick_axis(spacing_mm: Sequence[float]) -> Optional[int]:
    """Find the axis whose spacing is at least 3 times each of the others; None if there is none."""
    axis = int(np.argmax(spacing_mm))
    if spacing_mm[axis] >= THICK_SLICES * np.delete(spacing_mm, axis).max():
        return axis
    return None


def resampled_shape(
    case_id: str, shape: Shape3, spacing_mm: Sequence[float], target_mm: Sequence[float]
) -> Shape3:
    """Return the voxels X, Y, Z of a case at a spacing, at least one along each axis. Raises
    InputError for more than 2^31, and for more than 8 times as many as before."""
    lengths = zip(shape, spacing_mm, target_mm)
    made = xyz(max(round(count * length / wanted), 1) for count, length, wanted in lengths)
    most = min(MOST_VOXELS, MOST_GROWTH * math.prod(shape))
    if math.prod(made) > most:
        rule = f"case {case_id} must have at most {most} voxels at {in_mm(target_mm)}"
        got = f"{by(made, ' x ')} from {by(shape, ' x ')}"
        todo = "leave it out, or prepare a store of a larger --spacing, or --spacing off"
        raise InputError(f"{rule}, got {got}; {todo}")
    return made


def spacing_at(shape: Shape3, spacing_mm: Sequence[float], made: Shape3) -> Spacing3:
    """The spacing of a grid of `made` voxels over the box of a source's grid."""
    lengths = zip(shape, spacing_mm, made)
    return xyz(count * length / other for count, length, other in lengths)


def grid_of(record: CaseRecord) -> Geometry:
    """Return the grid that a case is stored on: its source's, or one with axes R A S and the
    store's voxels."""
    geometry = record.geometry
    if record.resampled_from is None:
        return geometry
    factor = np.divide(record.resampled_from.shape, record.shape)
    to_source = np.diag([*factor, 1.0])
    to_source[:3, 3] = (factor - 1) / 2  # the grids' corners meet, not their first voxels' centres
    affine = np.asarray(geometry.affine) @ ras_to_file(geometry) @ to_source
    return replace(geometry, shape=record.shape, affine=affine_rows(affine), axes="RAS", forms=())


# --- Voxels ---


def resample_image(
    volume: Array, shape: Shape3, spacing_mm: Sequence[float], has_background: bool = True
) -> Array:
    """Resample a channel `(X, Y, Z)` of these spacings to another `shape`, float32, within its own
    range.

    If it `has_background`, 0 is no intensity: a voxel that is mostly made of it becomes it.
    """
    made_mm = spacing_at(xyz(volume.shape), spacing_mm, shape)
    thick = {thick_axis(spacing_mm), thick_axis(made_mm)}
    made = _resample(
        volume, _taps_of(volume.shape, shape, [axis not in thick for axis in range(3)])
    )
    np.clip(made, volume.min(), volume.max(), out=made)
    if has_background:
        made[_resample(volume != 0, _taps_of(volume.shape, shape)) < 0.5] = 0
    return made


def resample_label(label: Array, shape: Shape3, ignore: Optional[int] = None) -> Array:
    """Resample a label map `(X, Y, Z)` uint8 to another `shape`: each voxel gets the code that
    most of it holds, the lowest of equal ones.

    As in a turned sample, a voxel is `ignore` if more than half of it is; else the other codes
    decide.
    """
    if label.shape == tuple(shape):
        return label
    taps = _taps_of(label.shape, shape)
    most = _resample(label == 0, taps)  # of each voxel, the share of its code
    made = np.zeros(shape, np.uint8)
    for code in np.flatnonzero(np.bincount(label.reshape(-1))):
        if code not in (0, ignore):
            share = _resample(label == code, taps)
            made[share > most] = code
            np.maximum(most, share, out=most)
    if ignore is not None:
        made[_resample(label == ignore, taps) > 0.5 + TIE] = ignore
    return made


def to_source_grid(answer: Array, record: CaseRecord, rows: slice = slice(None)) -> Array:
    """Bring probabilities of a region `(X, Y, Z)` back from a case's grid in the store to that of
    its source, in axes R A S, float32, or these rows of it along X, of `rows_for` them; as they are
    if both are the same."""
    source = record.resampled_from
    if source is None:
        return answer
    along_x, *across = _taps_of(record.shape, source.shape)
    indices = along_x.indices[rows]
    part = Taps(indices - indices.min(), along_x.weights[rows])
    return _resample(answer, (part, *across))


def rows_for(rows: slice, record: CaseRecord) -> slice:
    """The rows along X of a case's grid in the store that these of its source's are made of."""
    source = record.resampled_from
    if source is None:
        return slice(*rows.indices(record.shape[0]))
    indices = _taps(record.shape[0], source.shape[0], False).indices[rows]
    return slice(int(indices.min()), int(indices.max()) + 1)


# --- Interpolation along one axis after another ---


def _cubic(distance: Array) -> Array:
    near = (1.5 * distance - 2.5) * distance**2 + 1
    far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
    return np.where(distance < 1, near, np.where(distance < 2, far, 0))


class Taps(NamedTuple):
    """What the voxels along an axis are made of: of each new one, T old ones and their weights."""

    indices: Array  # (N, T)
    weights: Array  # (N, T) float32


def _taps_of(
    shape: Sequence[int], made: Sequence[int], are_cubic: Sequence[bool] = (False,) * 3
) -> Tuple[Taps, Taps, Taps]:
    return xyz(map(_taps, shape, made, are_cubic))


def _taps(count: int, made: int, is_cubic: bool) -> Taps:
    """The taps from `count` voxels to `made`; beyond the edge the last voxel goes on."""
    if count == made:
        return Taps(np.arange(count)[:, None], np.ones((count, 1), np.float32))
    size = count / made  # of a new voxel, in old ones
    centres = (np.arange(made) + 0.5) * size - 0.5
    widened = max(size, 1.0)
    reach = (2 if is_cubic else 1) * widened
    first = np.floor(centres - reach).astype(int) + 1
    indices = first[:, None] + np.arange(math.ceil(2 * reach))
    distance = np.abs(indices - centres[:, None]) / widened
    weights = _cubic(distance) if is_cubic else np.maximum(1 - distance, 0)
    weights /= weights.sum(1, keepdims=True)
    return Taps(indices.clip(0, count - 1), weights.astype(np.float32))


def _resample(volume: Array, taps: Sequence[Taps]) -> Array:
    """Interpolate a volume `(X, Y, Z)` by the `taps` along its axes, float32."""
    # Most taps first, which make the volume smaller. The order is the same for a part of a volume.
    for axis in sorted(range(3), key=lambda axis: -taps[axis].indices.shape[1]):
        if taps[axis].indices.shape[1] > 1:  # else each new voxel is the old one
            volume = _along(volume, axis, taps[axis])
    return volume.astype(np.float32, copy=False)


def _along(volume: Array, axis: int, taps: Taps) -> Array:
    """Interpolate a volume by the `taps` along one axis, float32."""
    shape = list(volume.shape)
    shape[axis] = len(taps.indices)
    made = np.zeros(shape, np.float32)
    across = 1 if axis == 0 else 0  # the axis that slabs are cut along
    step = max(SLAB_BYTES * shape[across] // made.nbytes, 1)
    along = [1, 1, 1]
    along[axis] = -1

    def fill(start: int) -> None:
        slab = [slice(None)] * 3
        slab[across] = slice(start, start + step)
        read = volume[tuple(slab)]
        into = made[tuple(slab)]
        for indices, weights in zip(taps.indices.T, taps.weights.T):
            part = read.take(indices, axis).astype(np.float32, copy=False)
            into += part * weights.reshape(along)

    with ThreadPoolExecutor(worker_count(None)) as pool:
        list(pool.map(fill, range(0, shape[across], step)))
    return made
