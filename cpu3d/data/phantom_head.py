"""The head of a phantom: its box, smooth random fields, and how much of each voxel is fluid, grey or white matter.

Coordinates run from -1 to 1 across the head's box, whatever its voxels: u to the right, v to the front, w up.
"""

from typing import Dict, Sequence, Tuple

import numpy as np

SHARES = (135 / 240, 174 / 240, 136 / 155)
"""Of a volume's voxels along each axis that a middling head takes."""

SMALLEST, LARGEST = 0.96, 1.04
"""Of a middling head along any axis."""


class Head:
    """The grid of a head and its smooth random fields."""

    def __init__(self, box: Tuple[int, int, int], rng: np.random.Generator):
        self.box = box
        self.rng = rng
        axes = [((np.arange(n) + 0.5) / n * 2 - 1).astype(np.float32) for n in box]
        self.u, self.v, self.w = np.ix_(*axes)
        """Right, front and up: each -1..1 along its own axis, length 1 along the others."""
        wobble = self.field(5)
        # Narrower in front and flatter below, as a brain is.
        narrow = 1 + 0.10 * self.v + 0.05 * self.v**2
        lower = np.where(self.w < 0, 1.0 + 0.10 * self.w, 1.0).astype(np.float32)
        self.radius = np.sqrt((self.u * narrow) ** 2 + self.v**2 + (self.w * lower) ** 2) + 0.035 * wobble
        self.brain = self.radius < 0.97
        self.voxel = 2 / min(box)

    def field(self, cells: int) -> np.ndarray:
        """A smooth random field of about unit spread, with `cells` cubic B-spline cells along every axis."""
        values = self.rng.standard_normal((cells + 3,) * 3, dtype=np.float32)
        for axis in (2, 1, 0):  # the last step is the large one, and along the first axis it moves whole planes
            values = _interpolate(values, axis, self.box[axis], cells)
        return values * np.float32(2.6)  # a spline averages: 2.6 brings the spread back to one

    def ball(self, centre: Sequence[float], radii: Sequence[float]) -> np.ndarray:
        """Squared distance from `centre` in units of `radii`: below 1 within the ellipsoid."""
        u, v, w = (((x - c) / r) ** 2 for x, c, r in zip((self.u, self.v, self.w), centre, radii))
        return (u + v + w).astype(np.float32)


def head_box(shape: Tuple[int, int, int], rng: np.random.Generator):
    """Size and first voxel of the head: 135x174x136 of 240x240x155, give or take, and near the middle."""
    share = np.array(SHARES) * rng.uniform(SMALLEST, LARGEST, 3)
    box = tuple(round(float(n * s)) for n, s in zip(shape, share))
    start = tuple(int((n - size) * rng.uniform(0.4, 0.6)) for n, size in zip(shape, box))
    return box, start


def tissues(head: Head, rng: np.random.Generator) -> Dict[str, np.ndarray]:
    """How much of each voxel is fluid, grey or white matter, vessel or bright cap; soft edges are partial volume."""
    u, v, w = head.u, head.v, head.w
    depth = np.clip(0.97 - head.radius, 0, None)
    # Sulci are the zero surfaces of a field: a line of fluid with a ribbon of cortex on both sides, fading with depth.
    bend = head.field(15)
    cerebellum = soft(0.10, np.maximum(w + 0.42 + 0.25 * v, 0) + np.maximum(v + 0.15, 0), 0.03)
    bend = np.abs(bend * (1 - cerebellum) + head.field(26) * cerebellum)
    fissure = np.abs(u) + 0.02 * np.abs(head.field(6)) + 0.6 * np.maximum(0.05 - np.maximum(w, 0.6 * v), 0)
    fluid = np.maximum(soft(0.17, bend + 0.7 * depth, 0.09), soft(0.022, fissure, 0.010))
    fluid = np.maximum(fluid, soft(0.02, depth, 0.012))
    grey = np.maximum(soft(0.80, bend + 1.9 * depth, 0.12), soft(0.07, depth, 0.02))
    grey = np.maximum(grey, soft(0.055, fissure, 0.02))
    for side in (-1, 1):
        grey = np.maximum(grey, soft(1, head.ball((side * 0.17, -0.05, 0.02), (0.12, 0.16, 0.13)), 0.15))
        grey = np.maximum(grey, soft(1, head.ball((side * 0.34, 0.10, 0.04), (0.09, 0.22, 0.16)), 0.15))
    warp = 0.25 * head.field(6)
    size = rng.uniform(0.85, 1.25)
    ventricle = np.full(head.box, 9.0, np.float32)
    for side in (-1, 1):
        lean = 0.10 + 0.05 * np.abs(v - 0.1) - 0.06 * (v > 0.2) * (v - 0.2)
        body = (
            ((u - side * lean) / (0.075 * size)) ** 2
            + ((v - 0.02) / 0.42) ** 2
            + ((w - 0.22 + 0.25 * v**2) / (0.11 * size)) ** 2
        )
        horn = head.ball((side * 0.26, -0.36, 0.02), (0.065 * size, 0.16, 0.14))
        ventricle = np.minimum(ventricle, np.minimum(body, horn))
    ventricle = np.minimum(ventricle, head.ball((0, -0.02, -0.02), (0.025, 0.14, 0.16)))
    ventricle = ventricle + warp
    inside = soft(1, ventricle, 0.25)
    caps = soft(1.9, ventricle, 0.35) * (1 - inside) * np.clip(0.45 + 0.5 * head.field(7), 0, 1)
    fluid = np.maximum(fluid, inside)
    grey = grey * (1 - fluid)
    vessel = soft(0.10, np.hypot(head.field(9), head.field(9)), 0.05) * (head.radius > 0.45)
    sinus = soft(1, (u / 0.035) ** 2 + ((head.radius - 0.93) / 0.05) ** 2 + 8 * np.maximum(0.1 - w, 0), 0.3)
    spots = soft(-1.9, -head.field(12), 0.15) * (1 - fluid)
    return {
        "fluid": fluid,
        "grey": grey,
        "white": 1 - fluid - grey,
        "vessel": np.maximum(vessel, sinus),
        "caps": np.maximum(caps, 0.8 * spots),
        "ventricle": inside,
        "texture": 0.6 * head.field(18) + 0.4 * head.field(8),
    }


def soft(limit: float, values: np.ndarray, width: float) -> np.ndarray:
    """1 well below `limit`, 0 well above, a straight ramp over `width` on both sides: cheaper than a sigmoid."""
    return np.clip((limit - values) * np.float32(0.5 / width) + np.float32(0.5), 0, 1)


# --- Private helpers ---


def _interpolate(values: np.ndarray, axis: int, size: int, cells: int) -> np.ndarray:
    """Bring `cells + 3` uniform cubic B-spline coefficients along `axis` to `size` voxels, sampled at their middles.

    Four multiplications and additions, because a matrix product's rounding changes with its library's threads.
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
