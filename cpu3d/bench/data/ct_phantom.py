"""Made-up CT: what a benchmark of loading needs of one, which is size, smooth tissue, noise and air. No anatomy."""

from typing import Tuple

import numpy as np

AIR_HU, TISSUE_HU, ORGAN_HU, NOISE_HU = -1024, 40, 110, 12

Shape3 = Tuple[int, int, int]


def ct_case(shape: Shape3, seed: int) -> Tuple[np.ndarray, np.ndarray]:
    """Image (X, Y, Z) int16 in Hounsfield units and label (X, Y, Z) uint8, 1 in an organ. A pure function of both.

    Air lies outside an ellipse that changes along Z, without noise, as scanners give it; inside, fat and tissue change
    smoothly under noise that no packer can shorten.
    """
    rng = np.random.default_rng([1, seed])
    x, y, z = np.ix_(*(np.linspace(-1, 1, n, dtype=np.float32) for n in shape))
    wide, high = 0.80 + 0.05 * np.cos(2 * z + seed), 0.60 + 0.05 * np.sin(3 * z)
    body = (x / wide) ** 2 + (y / high) ** 2 < 1
    centre = rng.uniform(-0.25, 0.25, 3).astype(np.float32)
    organ = ((x - centre[0]) / 0.22) ** 2 + ((y - centre[1]) / 0.20) ** 2 + ((z - centre[2]) / 0.30) ** 2 < 1
    value = 70 * np.sin(5 * x + rng.uniform(0, 6)) * np.cos(4 * y + rng.uniform(0, 6)) + 30 * np.sin(6 * z + 2 * x)
    value = (value + TISSUE_HU).astype(np.float32)
    value[organ] = ORGAN_HU
    value += NOISE_HU * rng.standard_normal(shape, dtype=np.float32)
    image = np.where(body, np.rint(value), AIR_HU).astype(np.int16)
    return image, (organ & body).astype(np.uint8)
