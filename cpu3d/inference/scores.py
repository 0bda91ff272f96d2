"""Dice, HD95 and surface Dice of one case, per region: pure functions of boolean masks and a voxel spacing.

Definitions, those of MONAI's metrics and so comparable with published tables:

- *Surface* of a mask: its voxels with a face neighbour outside the mask; beyond the image is outside.
- *Surface distances*: from the centre of every surface voxel of one mask to the nearest one of the other, in mm.
- *HD95*: the larger of the two directed 95th percentiles (linear between ranks). BraTS ranks by this one, too.
- *Surface Dice*: the share of all surface voxels, of both masks together, within a tolerance (<=) of the other surface.

Empty masks, by the rule of the BraTS challenge: both empty is right (Dice 1, HD95 0, surface Dice 1); one empty is as
wrong as can be (Dice 0, surface Dice 0, HD95 = the diagonal of the image grid: 373.13 mm for 240x240x155 at 1 mm).
`RegionScores.empty` says which it was, so that a mean can be read knowing what went into it.

DeepMind's `surface-distance` weighs surface elements by their area, which matters most for anisotropic voxels. Its only
release on PyPI (0.1) calls names that numpy 2 and today's scipy have dropped, so it is not used here; a k-d tree of
scipy over the surface voxels is exact and some sixty times faster than distance transforms of a whole BraTS volume.
"""

from dataclasses import dataclass
from typing import Dict, Mapping, Sequence, Tuple

import numpy as np
from scipy.ndimage import binary_erosion
from scipy.spatial import cKDTree

from cpu3d.data.labels import region_mask
from cpu3d.data.region import bounding_box

TOLERANCE_MM = 1.0
"""Default tolerance of the surface Dice: one BraTS voxel, about what two raters differ by."""


@dataclass(frozen=True)
class RegionScores:
    """How well one region of one case was found."""

    dice: float
    """2 |T and P| / (|T| + |P|), 0 to 1."""
    hd95_mm: float
    """95th percentile Hausdorff distance; at most the diagonal of the image grid."""
    surface_dice: float
    """At the tolerance it was asked for, 0 to 1."""
    truth_voxels: int
    prediction_voxels: int
    truth_ml: float
    prediction_ml: float
    empty: str
    """"" when neither mask is empty, else "both", "truth" or "prediction": which one is."""


@dataclass(frozen=True)
class CaseScores:
    """One case's scores, region by region."""

    case_id: str
    regions: Dict[str, RegionScores]
    """In the order of the network's outputs."""

    @property
    def mean_dice(self) -> float:
        """Over the regions; what best, median and worst cases are told by."""
        return float(np.mean([scores.dice for scores in self.regions.values()]))


def score_case(
    case_id: str,
    truth: np.ndarray,
    prediction: np.ndarray,
    regions: Mapping[str, Sequence[int]],
    spacing_mm: Sequence[float],
    tolerance_mm: float = TOLERANCE_MM,
) -> CaseScores:
    """Score a predicted label against the true one, both `(X, Y, Z)` in the same codes, for each region's codes."""
    return CaseScores(
        case_id,
        {
            name: score_region(region_mask(truth, codes), region_mask(prediction, codes), spacing_mm, tolerance_mm)
            for name, codes in regions.items()
        },
    )


def score_region(
    truth: np.ndarray, prediction: np.ndarray, spacing_mm: Sequence[float], tolerance_mm: float = TOLERANCE_MM
) -> RegionScores:
    """Score boolean masks `(X, Y, Z)` on the full image grid; voxels measure `spacing_mm`.

    The rule for empty masks is at the top of this file. Raises ValueError for masks of different shapes and for a
    spacing or tolerance that cannot be one.
    """
    _check(truth, prediction, spacing_mm, tolerance_mm)
    voxel_ml = float(np.prod(spacing_mm)) / 1000.0
    shape, both = truth.shape, bounding_box(truth | prediction).slices(truth.shape)
    truth, prediction = truth[both], prediction[both]  # nothing outside: the same surfaces, fewer voxels to walk
    truth_voxels, prediction_voxels = int(np.count_nonzero(truth)), int(np.count_nonzero(prediction))
    if truth_voxels and prediction_voxels:
        empty = ""
        dice = dice_coefficient(truth, prediction)
        there, back = surface_distances_mm(truth, prediction, spacing_mm)
        hd95_mm, surface_dice = hausdorff95_mm(there, back), surface_dice_at(there, back, tolerance_mm)
    elif truth_voxels or prediction_voxels:
        empty = "prediction" if truth_voxels else "truth"
        dice, hd95_mm, surface_dice = 0.0, diagonal_mm(shape, spacing_mm), 0.0
    else:
        empty = "both"
        dice, hd95_mm, surface_dice = 1.0, 0.0, 1.0
    return RegionScores(
        dice=dice,
        hd95_mm=hd95_mm,
        surface_dice=surface_dice,
        truth_voxels=truth_voxels,
        prediction_voxels=prediction_voxels,
        truth_ml=truth_voxels * voxel_ml,
        prediction_ml=prediction_voxels * voxel_ml,
        empty=empty,
    )


def dice_coefficient(truth: np.ndarray, prediction: np.ndarray) -> float:
    """Dice of two boolean masks, 0 to 1; 1 when both are empty."""
    total = np.count_nonzero(truth) + np.count_nonzero(prediction)
    return float(2 * np.count_nonzero(truth & prediction) / total) if total else 1.0


def surface_distances_mm(
    truth: np.ndarray, prediction: np.ndarray, spacing_mm: Sequence[float]
) -> Tuple[np.ndarray, np.ndarray]:
    """Surface distances of two masks, neither empty: (truth to prediction, prediction to truth), float64, unordered."""
    points_t, points_p = (np.argwhere(_surface(mask)) * np.asarray(spacing_mm, float) for mask in (truth, prediction))
    return cKDTree(points_p).query(points_t)[0], cKDTree(points_t).query(points_p)[0]


def hausdorff95_mm(there: np.ndarray, back: np.ndarray) -> float:
    """The larger of the 95th percentiles of two lists of surface distances, neither empty."""
    return float(max(np.percentile(there, 95), np.percentile(back, 95)))


def surface_dice_at(there: np.ndarray, back: np.ndarray, tolerance_mm: float) -> float:
    """The share of all distances, of both lists together, that are at most `tolerance_mm`."""
    # Distances are roots of sums of squares: a tolerance of exactly 3 voxels of 0.1 mm must still hold three of them.
    within = tolerance_mm * (1 + 1e-9)
    return float((np.count_nonzero(there <= within) + np.count_nonzero(back <= within)) / (there.size + back.size))


def diagonal_mm(shape: Sequence[int], spacing_mm: Sequence[float]) -> float:
    """Length of the diagonal of an image grid: the HD95 given when one of two masks is empty."""
    return float(np.linalg.norm(np.asarray(shape, float) * np.asarray(spacing_mm, float)))


# --- Private helpers ---


def _surface(mask: np.ndarray) -> np.ndarray:
    return mask & ~binary_erosion(mask)


def _check(truth: np.ndarray, prediction: np.ndarray, spacing_mm: Sequence[float], tolerance_mm: float) -> None:
    if truth.dtype != bool or prediction.dtype != bool or truth.ndim != 3 or truth.shape != prediction.shape:
        raise ValueError(
            f"truth and prediction must be boolean masks of one 3D shape, got {truth.dtype} {truth.shape} "
            f"and {prediction.dtype} {prediction.shape}"
        )
    if len(spacing_mm) != 3 or not all(np.isfinite(s) and s > 0 for s in spacing_mm):
        raise ValueError(f"spacing_mm must be three positive numbers, got {tuple(spacing_mm)}")
    if not (np.isfinite(tolerance_mm) and tolerance_mm >= 0):
        raise ValueError(f"tolerance_mm must be a number from 0 on, got {tolerance_mm}")
