"""Draws a CT of a body on a table: a liver with lesions among tissues of the same values.

Coordinates run from -1 to 1 across the volume: u to the right, v to the front, w up. Values are in
Hounsfield units."""

from typing import Iterable, Tuple

import numpy as np

from cpu3d.data.phantoms.shapes import Space, smooth_field, soft
from cpu3d.data.region import Array, Shape3

CT_CHANNELS = ("CT",)
CT_LABELS = {0: "background", 1: "liver", 2: "lesion"}
LIVER = 1
LESION = 2

AIR = -1000.0
TABLE = 150.0
FAT = -100.0
MUSCLE = 50.0
BONE = 600.0
WATER = 0.0
NOISE_HU = 10.0  # standard deviation, in air too
RANGE_HU = (-1024, 3071)  # 12 bits, as scanners give


def ct_case(shape: Shape3, seed: int, index: int) -> Tuple[Array, Array]:
    """Draw one case: image `(X, Y, Z)` int16 and label `(X, Y, Z)` uint8, axes R A S.

    A bladder is water of 0 HU, and vessels outside of the liver are as bright as the liver."""
    rng = np.random.default_rng([1, seed, index, 5])
    space = Space(shape)
    edge = space.voxel / 2

    def ball(centre: Iterable[float], radii: Iterable[float]) -> Array:
        """The distance from `centre` in units of `radii`."""
        return np.sqrt(space.ball(centre, radii))

    def within(distance: Array, radius: float) -> Array:
        """1 inside of a ball of a middling radius, 0 outside, with an edge of about a voxel."""
        return soft(1, distance, edge / radius + 0.02)

    wobble = smooth_field(rng, shape, 5)
    rough = smooth_field(rng, shape, 8)
    half_width, half_depth = rng.uniform((0.74, 0.52), (0.82, 0.6))
    trunk = ball((0, 0.1, 0), (half_width, half_depth, 1e3)) + 0.02 * wobble
    table_v = 0.1 - half_depth - 0.06
    table = soft(0.03, np.abs(space.v - table_v), edge) * soft(0.75, np.abs(space.u), edge)

    centre = np.array(rng.uniform((0.25, 0.1, -0.15), (0.35, 0.2, 0.15)))
    radii = np.array(rng.uniform((0.32, 0.24, 0.45), (0.38, 0.3, 0.6)))
    liver = within(ball(centre, radii) + 0.08 * rough, 0.3)
    lesions = np.zeros(shape, np.float32)
    for _ in range(rng.integers(1, 4)):
        radius = max(rng.uniform(0.07, 0.14), 1.6 * space.voxel)
        middle = centre + radii * rng.uniform(-0.5, 0.5, 3)
        lesion = within(ball(middle, (radius,) * 3) + 0.1 * wobble, radius)
        lesions = np.maximum(lesions, lesion * liver)

    liver_hu, lesion_hu = rng.uniform((95, 45), (125, 65))
    spine = within(ball((0, 0.1 - 0.6 * half_depth, 0), (0.12, 0.12, 1e3)), 0.12)
    bladder = within(ball((-0.35, 0.15, -0.3), (0.17, 0.14, 0.2)), 0.17)
    aorta = within(ball((-0.05, 0.02, 0), (0.06, 0.06, 1e3)), 0.06)
    layers = (
        (table, TABLE),
        (within(trunk, half_depth), FAT),
        (within(trunk / 0.88, half_depth), MUSCLE),
        (spine, BONE),
        (aorta, liver_hu),
        (bladder, WATER),
        (liver, liver_hu),
        (lesions, lesion_hu),
    )
    signal = np.full(shape, AIR, np.float32)
    for share, value in layers:
        signal += share * (value - signal)
    signal += NOISE_HU * rng.standard_normal(shape, np.float32)
    label = np.zeros(shape, np.uint8)
    label[liver > 0.5] = LIVER
    label[lesions > 0.5] = LESION
    return np.clip(np.rint(signal), *RANGE_HU).astype(np.int16), label
