"""A network over a volume larger than its patch: one tile after another, blended by Gaussian weights.

    logits = sliding_window(network, image, (128, 128, 128))

A tile's border has seen the least around it, so the middle of a tile counts most: a Gaussian whose standard deviation
is an eighth of the patch, as in nnU-Net (Isensee et al. 2021). The mean over tiles is a running one, mean += (answer -
mean) * weight / weights so far: where all tiles agree the result is their answer to the bit, not to rounding.
"""

from typing import Any, Callable

import numpy as np

from cpu3d.data.region import Shape3, whole
from cpu3d.data.sampling import OVERLAP, patch_grid

SIGMA_SHARE = 1 / 8
"""Standard deviation of the weights in sizes of the patch: nnU-Net's and MONAI's."""


def sliding_window(network: Callable[[Any], Any], image: Any, patch: Shape3, overlap: float = OVERLAP) -> np.ndarray:
    """Logits float32 (X, Y, Z, R) of `image` (1, X, Y, Z, C), an array or tensor no smaller than `patch` on any axis.

    `network` takes a tile (1, *patch, C) and gives its logits (1, *patch, R). Tiles are those of `patch_grid`, each
    covered by the next one along an axis by at least the share `overlap`. In memory: the answer, a weight a voxel, and
    one tile's own. Raises ValueError for an image smaller than the patch.
    """
    shape = tuple(int(n) for n in image.shape[1:4])
    if any(n < want for n, want in zip(shape, patch)):
        raise ValueError(f"image must be at least as large as the patch {tuple(patch)}, got {shape}; pad it")
    weight = gaussian(patch)
    weights = np.zeros(shape, np.float32)
    mean = None
    for tile in patch_grid(whole(shape), patch, overlap):
        here = tile.slices(shape)
        answer = np.array(network(image[(slice(None), *here)]), np.float32)[0]
        if mean is None:
            mean = np.zeros((*shape, answer.shape[-1]), np.float32)
        weights[here] += weight
        answer -= mean[here]
        answer *= (weight / weights[here])[..., None]
        mean[here] += answer
    return mean


def gaussian(patch: Shape3) -> np.ndarray:
    """Weights float32 (X, Y, Z) of a tile's voxels: 1 in the middle, positive everywhere."""
    axes = [np.exp(-0.5 * ((np.arange(n) - (n - 1) / 2) / (n * SIGMA_SHARE)) ** 2) for n in patch]
    return np.einsum("x,y,z->xyz", *axes).astype(np.float32)
