"""The metrics of one case, per region: one table of them, METRICS, computed from boolean masks and a voxel spacing.

A metric is added in METRICS alone: `evaluate` computes it, and all tables and pages show it. Definitions are MONAI's,
comparable with published tables:

- *Surface* of a mask: its voxels with a face neighbour outside the mask; beyond the image is outside.
- *Surface distances*: from the centre of every surface voxel of one mask to the nearest one of the other, in mm.

Empty masks, by the rule of the BraTS challenge: both empty is right (Dice 1, HD95 0, surface Dice 1); one empty is as
wrong as can be (Dice 0, surface Dice 0, HD95 = the diagonal of the image grid: 373.13 mm for 240x240x155 at 1 mm).
"empty" of a region's scores says which it was, so that a mean can be read knowing what went into it.

DeepMind's `surface-distance` weighs surface elements by their area, which matters most for anisotropic voxels. Its only
release on PyPI (0.1) calls names that numpy 2 and today's scipy have dropped, so it is not used here; a k-d tree of
scipy over the surface voxels is exact and some sixty times faster than distance transforms of a whole BraTS volume.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Callable, Dict, Mapping, Optional, Sequence, Tuple

import numpy as np
from scipy.ndimage import binary_erosion
from scipy.spatial import cKDTree

from cpu3d.data.labels import region_mask
from cpu3d.data.region import bounding_box

TOLERANCE_MM = 1.0
"""Default tolerance of the surface Dice: one BraTS voxel, about what two raters differ by."""

RegionScores = Dict[str, Any]
"""Metric -> value of one region of one case; truth_voxels, prediction_voxels, truth_ml, prediction_ml; and "empty": ""
when neither mask is empty, else "both", "truth" or "prediction", which one is."""


@dataclass(frozen=True)
class Masks:
    """A truth and a prediction, boolean `(X, Y, Z)`, neither empty, cropped to the box around both."""

    truth: np.ndarray
    prediction: np.ndarray
    spacing_mm: Sequence[float]
    tolerance_mm: float

    @cached_property
    def distances_mm(self) -> Tuple[np.ndarray, np.ndarray]:
        """Surface distances: (truth to prediction, prediction to truth), float64, unordered."""
        return surface_distances_mm(self.truth, self.prediction, self.spacing_mm)


@dataclass(frozen=True)
class Metric:
    """A number that says how well a region was found. Cases are aggregated by their mean."""

    label: str
    """For people."""
    of: Callable[[Masks], float]
    best: float
    """Its value where both masks are empty."""
    worst: Optional[float]
    """Its value where one of them is; None is the diagonal of the image grid in mm."""
    description: str = ""
    """What it measures, in a sentence."""
    unit: str = ""
    digits: int = 3
    """After the point, in tables."""
    has_tolerance: bool = False
    """Whether it depends on the tolerance of an evaluation."""

    @property
    def larger_is_better(self) -> bool:
        """Whether it grows towards the right answer."""
        return self.worst is not None and self.best > self.worst

    @property
    def heading(self) -> str:
        """Label and unit, for the head of a column."""
        return f"{self.label}, {self.unit}" if self.unit else self.label


METRICS: Dict[str, Metric] = {
    "dice": Metric(
        "Dice",
        lambda masks: dice_coefficient(masks.truth, masks.prediction),
        1.0,
        0.0,
        "Twice the voxels that both masks share over the sum of both",
    ),
    "hd95_mm": Metric(
        "HD95",
        lambda masks: hausdorff95_mm(*masks.distances_mm),
        0.0,
        None,
        "The larger of the two directed 95th percentiles of surface distances, linear between ranks",
        unit="mm",
        digits=2,
    ),
    "surface_dice": Metric(
        "surface Dice",
        lambda masks: surface_dice_at(*masks.distances_mm, masks.tolerance_mm),
        1.0,
        0.0,
        "The share of all surface voxels, of both masks together, within the tolerance (<=) of the other surface",
        has_tolerance=True,
    ),
}
"""By their names in scores.json."""


def score_case(
    truth: np.ndarray,
    prediction: np.ndarray,
    regions: Mapping[str, Sequence[int]],
    spacing_mm: Sequence[float],
    tolerance_mm: float = TOLERANCE_MM,
) -> Dict[str, RegionScores]:
    """Score a predicted label against the true one, both `(X, Y, Z)` in the same codes, for each region's codes."""
    return {
        name: score_region(region_mask(truth, codes), region_mask(prediction, codes), spacing_mm, tolerance_mm)
        for name, codes in regions.items()
    }


def score_region(
    truth: np.ndarray, prediction: np.ndarray, spacing_mm: Sequence[float], tolerance_mm: float = TOLERANCE_MM
) -> RegionScores:
    """Score boolean masks `(X, Y, Z)` on the full image grid; voxels measure `spacing_mm`.

    The rule for empty masks is at the top of this file. Raises ValueError for masks of different shapes and for a
    spacing or tolerance that cannot be one.
    """
    _check(truth, prediction, spacing_mm, tolerance_mm)
    shape, box = truth.shape, bounding_box(truth | prediction).slices(truth.shape)
    masks = Masks(truth[box], prediction[box], spacing_mm, tolerance_mm)  # outside of it there is nothing
    voxels = {name: int(np.count_nonzero(getattr(masks, name))) for name in ("truth", "prediction")}
    absent = [name for name, count in voxels.items() if not count]
    values: Dict[str, float] = {}
    for name, metric in METRICS.items():
        if not absent:
            values[name] = metric.of(masks)
        elif len(absent) == 2:
            values[name] = metric.best
        else:
            values[name] = diagonal_mm(shape, spacing_mm) if metric.worst is None else metric.worst
    voxel_ml = float(np.prod(spacing_mm)) / 1000.0
    return {
        **values,
        **{f"{name}_voxels": count for name, count in voxels.items()},
        **{f"{name}_ml": count * voxel_ml for name, count in voxels.items()},
        "empty": "both" if len(absent) == 2 else "".join(absent),
    }


def metrics_in(scores: Mapping[str, Any]) -> Tuple[str, ...]:
    """The METRICS that a scores.json holds: those of later versions are not in files from before."""
    summary = next(iter(scores["summary"].values()))
    return tuple(name for name in METRICS if name in summary)


def metric_notes(names: Sequence[str], tolerance_mm: float) -> str:
    """What a table of these metrics says below it, as "HD95 in mm; surface Dice at 1 mm"."""
    metrics = [METRICS[name] for name in names]
    notes = [f"{one.label} in {one.unit}" for one in metrics if one.unit]
    return "; ".join([*notes, *(f"{one.label} at {tolerance_mm:g} mm" for one in metrics if one.has_tolerance)])


def dice_coefficient(truth: np.ndarray, prediction: np.ndarray) -> float:
    """Dice of two boolean masks, 2 |T and P| / (|T| + |P|), 0 to 1; 1 when both are empty."""
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
