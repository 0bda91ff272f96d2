"""Warped copies of a real case and its label, a pure function of the case, a seed and an index.

A copy is turned, scaled, shifted and deformed by a smooth random field; every channel gets a gain, gamma, uneven field
and noise of its own; the background stays zero. Copies show how fast a network learns what a real tumour looks like,
not how well it does on other patients.
"""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Tuple

import numpy as np
from scipy.ndimage import map_coordinates

from cpu3d.data.region import Region, Shape3
from cpu3d.data.stores.case import LoadedCase, load_case
from cpu3d.data.stores.layouts import Dataset, labels_in_use, read_dataset
from cpu3d.errors import InputError, refuse

ANGLE, SCALE, SHIFT = 0.15, 0.08, 0.03
"""Largest, either way: radians around each axis, share of the size along each axis, share of the brain's box."""

BEND, BENDS = 0.018, 6
"""Standard deviation of the deformation as a share of the brain's box, and cells of its field along every axis."""

GAMMA, UNEVEN, NOISE = 0.25, 0.16, (0.05, 0.2)
"""Of a channel: largest logarithm of gamma, spread of the field's logarithm, noise in deviations."""

MARGIN = 0.15
"""Share of the brain's box that is added to each of its sides: no copy is larger."""


@functools.lru_cache(maxsize=1)
def case_to_warp(folder: Path) -> Tuple[Dataset, LoadedCase]:
    """A data set of one case and that case. Raises InputError for another number of cases, a case without a label or
    with an empty one, and as `load_case`."""
    dataset = read_dataset(folder)
    refuse(problem for problems in dataset.problems.values() for problem in problems)
    if len(dataset.cases) != 1 or not dataset.cases[0].label:
        got = f"{len(dataset.cases)} cases" if len(dataset.cases) != 1 else "one without a label"
        raise InputError(f"--warp {folder} must be the folder of one case with a label, got {got}; name another")
    case = load_case(dataset.cases[0], channels=dataset.channels, labels=dataset.labels)
    if not case.label.any():
        raise InputError(f"--warp {folder} must have a label with voxels, got background alone; name another case")
    return replace(dataset, labels=labels_in_use(dataset.layout, dataset.labels, case.record.label_voxels)), case


def warped_case(folder: Path, seed: int, index: int) -> Tuple[np.ndarray, np.ndarray]:
    """Copy `index` of the case in `folder`: image `(X, Y, Z, C)` int16, label `(X, Y, Z)` uint8, on its grid, R A S.

    Brain voxels are at least 1.
    """
    _, case = case_to_warp(folder)
    rng = np.random.default_rng([seed, index])
    image, label = np.zeros(case.image.shape, np.int16), np.zeros(case.label.shape, np.uint8)
    start, size = np.array(case.record.box.start), np.array(case.record.box.size)
    margin = np.ceil(MARGIN * size).astype(int)
    around = Region(tuple(start - margin), tuple(size + 2 * margin)).slices(label.shape)
    places = _places(around, start + (size - 1) / 2, size, rng)
    label[around] = map_coordinates(case.label, places, order=0)
    for channel in range(image.shape[-1]):
        source = case.image[..., channel].astype(np.float32)
        inside = source != 0
        source[inside] = (source[inside] - source[inside].mean()) / source[inside].std()
        share = map_coordinates(inside.astype(np.float32), places, order=1)
        brain = share >= 0.5
        level = 1 + 0.2 * map_coordinates(source, places, order=1)[brain] / share[brain]  # of the brain's voxels alone
        level = np.maximum(level, 0.01) ** np.exp(rng.uniform(-GAMMA, GAMMA))
        level *= np.exp(UNEVEN * smooth_field(rng, brain.shape, 3)[brain]) * rng.uniform(0.7, 1.4)
        level += 0.2 * rng.uniform(*NOISE) * rng.standard_normal(level.size, np.float32)
        image[(*around, channel)][brain] = np.clip(np.rint(1000 * level), 1, 32767)
    return image, label


def _places(box: Tuple[slice, ...], centre: np.ndarray, size: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """(3, x, y, z): the voxel of the source from which each voxel of the copy's `box` comes."""
    turn = np.eye(3)
    for (a, b), angle in zip(((0, 1), (0, 2), (1, 2)), rng.uniform(-ANGLE, ANGLE, 3)):
        plane = np.eye(3)
        plane[[a, a, b, b], [a, b, a, b]] = np.cos(angle), -np.sin(angle), np.sin(angle), np.cos(angle)
        turn = turn @ plane
    affine = turn * rng.uniform(1 - SCALE, 1 + SCALE, 3)
    offset = centre + rng.uniform(-SHIFT, SHIFT, 3) * size
    axes = [(np.arange(one.start, one.stop) - c).astype(np.float32) for one, c in zip(box, centre)]
    places = np.empty((3, *map(len, axes)), np.float32)
    for axis, (row, start, extent) in enumerate(zip(affine.astype(np.float32), offset.astype(np.float32), size)):
        u, v, w = (weight * along for weight, along in zip(row, np.ix_(*axes)))
        bend = smooth_field(rng, places.shape[1:], BENDS) * np.float32(BEND * extent)
        places[axis] = start + u + v + w + bend
    return places


def smooth_field(rng: np.random.Generator, shape: Shape3, cells: int) -> np.ndarray:
    """A smooth random field of about unit spread, float32, with `cells` cubic B-spline cells along every axis."""
    values = rng.standard_normal((cells + 3,) * 3, dtype=np.float32)
    for axis in (2, 1, 0):  # the largest step last: along the first axis it moves whole planes
        values = _interpolate(values, axis, shape[axis], cells)
    return values * np.float32(2.6)  # the spline averages: 2.6 restores the spread


def _interpolate(values: np.ndarray, axis: int, size: int, cells: int) -> np.ndarray:
    """`cells + 3` uniform cubic B-spline coefficients along `axis`, sampled at the middles of `size` voxels.

    No matrix product: its rounding changes with the threads.
    """
    position = (np.arange(size) + 0.5) / size * cells
    cell = np.minimum(position.astype(int), cells - 1)
    t = position - cell
    weights = ((1 - t) ** 3, 3 * t**3 - 6 * t**2 + 4, -3 * t**3 + 3 * t**2 + 3 * t + 1, t**3)
    along = [1, 1, 1]
    along[axis] = size
    result = np.float32(0)
    for offset, weight in enumerate(weights):
        part = values.take(cell + offset, axis)
        part *= (weight / 6).astype(np.float32).reshape(along)
        part += result
        result = part
    return result
