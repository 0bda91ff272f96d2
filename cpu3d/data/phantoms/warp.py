"""Warped copies of a real case with other intensities: they show how fast a network learns the look
of a real tumour, not how well it does on other patients."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Tuple

import numpy as np
from scipy.ndimage import map_coordinates

from cpu3d.data.cases.case import LoadedCase, load_case
from cpu3d.data.datasets.dataset import Dataset
from cpu3d.data.datasets.layouts import labels_in_use, read_dataset
from cpu3d.data.phantoms.shapes import smooth_field
from cpu3d.data.region import Array, Region, xyz
from cpu3d.errors import InputError, raise_if_any

# Largest, either way.
ANGLE = 0.15  # radians around each axis
SCALE = 0.08  # share of the size along each axis
SHIFT = 0.03  # share of the brain's box
# Of the deformation.
BEND = 0.018  # its deviation, as a share of the brain's box
BENDS = 6  # cells of its field along an axis
# Of a channel.
GAMMA = 0.25  # largest logarithm, either way
UNEVEN = 0.16  # spread of the field's logarithm
NOISE = (0.05, 0.2)  # least and most, in deviations
MARGIN = 0.15  # share of the brain's box that is added to each of its sides: no copy is larger


@functools.lru_cache(maxsize=1)
def case_to_warp(folder: Path) -> Tuple[Dataset, LoadedCase]:
    """A data set of one case and that case. Raises InputError for another number of cases, a case
    without a label or with an empty one, and as `load_case`."""
    dataset = read_dataset(folder)
    raise_if_any(problem for problems in dataset.problems.values() for problem in problems)
    if len(dataset.cases) != 1:
        rule = f"--warp {folder} must be the folder of one case with a label"
        raise InputError(f"{rule}, got {len(dataset.cases)} cases; name another")
    case = load_case(dataset.cases[0], channels=dataset.channels, labels=dataset.labels)
    label_voxels = case.record.label_voxels
    if set(label_voxels) <= {0}:
        rule = f"--warp {folder} must have a label with voxels"
        raise InputError(f"{rule}, got background alone; name another case")
    labels = labels_in_use(dataset.layout, dataset.labels, label_voxels)
    return replace(dataset, labels=labels), case


def warped_case(folder: Path, seed: int, index: int) -> Tuple[Array, Array]:
    """Copy `index` of the case in `folder`: image `(X, Y, Z, C)` int16, label `(X, Y, Z)` uint8, on
    its grid, R A S.

    Turned, scaled, shifted and bent; every channel with a gain, gamma, uneven field and noise of
    its own. Brain voxels are at least 1, the background stays 0."""
    rng = np.random.default_rng([seed, index])
    case = case_to_warp(folder)[1]
    image = np.zeros(case.image.shape, np.int16)
    label = np.zeros(case.record.shape, np.uint8)
    start = np.array(case.record.box.start)
    size = np.array(case.record.box.size)
    margin = np.ceil(MARGIN * size).astype(int)
    enlarged = Region(xyz((start - margin).tolist()), xyz((size + 2 * margin).tolist()))
    around = enlarged.slices(case.record.shape)
    places = _places(around, start + (size - 1) / 2, size, rng)
    label[around] = map_coordinates(case.label, places, order=0)
    for channel in range(image.shape[-1]):
        source = case.image[..., channel].astype(np.float32)
        inside = source != 0
        source[inside] = (source[inside] - source[inside].mean()) / source[inside].std()
        share = map_coordinates(inside.astype(np.float32), places, order=1)
        brain = share >= 0.5
        # Of the brain's voxels alone.
        level = 1 + 0.2 * map_coordinates(source, places, order=1)[brain] / share[brain]
        level = np.maximum(level, 0.01) ** np.exp(rng.uniform(-GAMMA, GAMMA))
        uneven = np.exp(UNEVEN * smooth_field(rng, xyz(brain.shape), 3)[brain])
        level *= uneven * rng.uniform(0.7, 1.4)
        level += 0.2 * rng.uniform(*NOISE) * rng.standard_normal(level.size, np.float32)
        image[(*around, channel)][brain] = np.clip(np.rint(1000 * level), 1, 32767)
    return image, label


def _places(box: Tuple[slice, ...], centre: Array, size: Array, rng: np.random.Generator) -> Array:
    """(3, x, y, z): the voxel of the source from which each voxel of the copy's `box` comes."""
    turn = np.eye(3)
    for (a, b), angle in zip(((0, 1), (0, 2), (1, 2)), rng.uniform(-ANGLE, ANGLE, 3)):
        plane = np.eye(3)
        plane[a, a] = np.cos(angle)
        plane[a, b] = -np.sin(angle)
        plane[b, a] = np.sin(angle)
        plane[b, b] = np.cos(angle)
        turn = turn @ plane
    affine = (turn * rng.uniform(1 - SCALE, 1 + SCALE, 3)).astype(np.float32)
    offset = (centre + rng.uniform(-SHIFT, SHIFT, 3) * size).astype(np.float32)
    from_centre = [np.arange(cut.start, cut.stop) - c for cut, c in zip(box, centre)]
    axes = np.ix_(*(along.astype(np.float32) for along in from_centre))
    shape = xyz(along.size for along in axes)
    places = np.empty((3, *shape), np.float32)
    for axis in range(3):
        u, v, w = (weight * along for weight, along in zip(affine[axis], axes))
        bend = smooth_field(rng, shape, BENDS) * np.float32(BEND * size[axis])
        places[axis] = offset[axis] + u + v + w + bend
    return places
