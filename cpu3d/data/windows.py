"""Sliding windows: a network applied to a volume tile by tile, the overlapping outputs averaged by
Gaussian weights."""

import itertools
import math
from typing import Any, Callable, List

import numpy as np

from cpu3d.data.region import Array, Region, Shape3, xyz

OVERLAP = 0.5  # least share of a window that its neighbour covers too: nnU-Net's
SIGMA_SHARE = 1 / 8  # deviation of a tile's weights in sizes of the window, as in nnU-Net and MONAI


def sliding_window(
    network: Callable[[Any], Any], image: Any, patch: Shape3, overlap: float = OVERLAP
) -> Array:
    """Return the logits float32 (X, Y, Z, R) of `image` (1, X, Y, Z, C), an array or tensor no
    smaller than `patch` on any axis.

    `network` takes a tile (1, *patch, C) and gives its logits (1, *patch, R). Tiles are the fewest
    evenly spread ones that overlap by at least `overlap`; the first and last end with the volume.
    Their logits are averaged by Gaussian weights, as a voxel at a tile's border has the fewest
    neighbours. It is a running mean: where all tiles agree, the result is their logits to the bit.
    """
    shape = xyz(int(n) for n in image.shape[1:4])
    gaussians = [
        np.exp(-0.5 * ((np.arange(n) - (n - 1) / 2) / (n * SIGMA_SHARE)) ** 2) for n in patch
    ]
    weight = np.einsum("x,y,z->xyz", *gaussians).astype(np.float32)
    weights = np.zeros(shape, np.float32)
    mean = np.empty(0)  # made with the first tile, whose regions it has
    starts = [_starts(n, wanted, overlap) for n, wanted in zip(shape, patch)]
    for start in itertools.product(*starts):
        tile = Region(xyz(start), patch).slices(shape)
        logits = np.array(network(image[(slice(None), *tile)]), np.float32)[0]
        if not mean.size:
            mean = np.zeros((*shape, logits.shape[-1]), np.float32)
        weights[tile] += weight
        logits -= mean[tile]
        logits *= (weight / weights[tile])[..., None]
        mean[tile] += logits
    return mean


def window_count(shape: Shape3, patch: Shape3, overlap: float = OVERLAP) -> int:
    """Count the tiles of a volume of `shape`, padded to the patch where it is smaller."""
    return math.prod(
        len(_starts(max(n, wanted), wanted, overlap)) for n, wanted in zip(shape, patch)
    )


def _starts(n: int, wanted: int, overlap: float) -> List[int]:
    """First voxels of the fewest evenly spread patches of `wanted` voxels that cover `n` with at
    least `overlap`."""
    room = n - wanted
    step = max(int(wanted * (1 - overlap)), 1)  # the most between two of them
    steps = math.ceil(room / step)
    return [i * room // max(steps, 1) for i in range(steps + 1)]
