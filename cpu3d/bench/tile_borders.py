"""How far the voxels of a volume are from the borders of its tiles, and what that makes of two answers' difference.

distance = border_distance(region.size, patch_grid(whole(region.size), window, overlap))
figures = by_distance(distance[brain], np.abs(one - other)[brain])
"""

from typing import Dict, List, Sequence, Union

import numpy as np

from cpu3d.data.region import Region, Shape3

FIGURES = ("mean", "p99", "max")


def border_distance(shape: Shape3, tiles: Sequence[Region]) -> np.ndarray:
    """Voxels between each voxel of a volume and the nearest border of a tile: int16 (X, Y, Z), 0 right at a border.

    A border is a plane between two voxels, where a tile begins or ends inside the volume; the volume's own outer faces
    are none. Tiles are those of a grid, `cpu3d.data.patches.patch_grid`, so that each plane cuts the whole volume; they
    may reach outside of it. Without any plane, as under a single tile, all are as far away as the longest side.
    """
    along = []
    for axis, length in enumerate(shape):
        planes = {edge for tile in tiles for edge in (tile.start[axis], tile.stop[axis]) if 0 < edge < length}
        voxels = np.arange(length)
        nearest = np.full(length, max(shape), np.int16)
        for plane in planes:
            # Of voxels plane - 1 and plane, on its two sides, each is 0 away.
            nearest = np.minimum(nearest, np.where(voxels < plane, plane - 1 - voxels, voxels - plane))
        along.append(nearest.astype(np.int16))
    return np.minimum(np.minimum(along[0][:, None, None], along[1][None, :, None]), along[2][None, None, :])


def by_distance(distance: np.ndarray, difference: np.ndarray) -> List[Dict[str, Union[int, float]]]:
    """For every distance that occurs the voxels there and the mean, 99th percentile and maximum of their differences.

    `distance` is (N), of N voxels; `difference` (N, R) has R values of each, which count alike.
    """
    order = np.argsort(distance, kind="stable")
    values, first = np.unique(distance[order], return_index=True)
    groups = np.split(difference[order], first[1:])
    return [{"distance": int(value), "voxels": len(group), **figures(group)} for value, group in zip(values, groups)]


def figures(difference: np.ndarray) -> Dict[str, float]:
    """FIGURES of differences. Raises ValueError for none."""
    return {
        "mean": float(difference.mean(dtype=np.float64)),
        "p99": float(np.percentile(difference, 99)),
        "max": float(difference.max()),
    }
