"""Augmentation as a loader without a graph does it: NumPy and SciPy, on the CPU, in the loader's thread."""

from typing import Optional, Tuple

import numpy as np

from cpu3d.data.augment import AugmentConfig, AugmentParams

WITH_TURNS = AugmentConfig(rotation_deg=15.0, scaling=0.1)
"""Flips, intensity, rotation and zoom: what S1's images undergo, give or take the shifts."""


def augmented(
    image: np.ndarray, label: np.ndarray, params: AugmentParams, planes: Optional[np.ndarray]
) -> Tuple[np.ndarray, np.ndarray]:
    """Image (X, Y, Z, C) float32 and label (X, Y, Z) after what was drawn; rotation and zoom by `planes`, if given.

    One interpolation through the volume a channel, where the graph takes two through planes: the results differ by the
    rounding of these, the work is the usual one. Voxels that are 0 stay 0.
    """
    image = np.where(image == 0, np.float32(0), image * np.float32(params.gain) + np.float32(params.offset))
    if planes is not None:
        image, label = _turned(image, label, planes)
    axes = tuple(axis for axis, mirrored in enumerate(params.flips) if mirrored)
    return np.ascontiguousarray(np.flip(image, axes)), np.ascontiguousarray(np.flip(label, axes))


# --- Private helpers ---


def _turned(image: np.ndarray, label: np.ndarray, planes: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
    from scipy.ndimage import affine_transform

    xy, yz = np.eye(3), np.eye(3)
    xy[:2, :2], yz[1:, 1:] = planes.reshape(2, 2, 2)
    matrix = xy @ yz
    centre = (np.array(label.shape) - 1) / 2
    more = {"matrix": matrix, "offset": centre - matrix @ centre}
    out = np.empty_like(image)
    for channel in range(image.shape[3]):
        out[..., channel] = affine_transform(image[..., channel], order=1, **more)
    return out, affine_transform(label, order=0, **more)
