"""The metrics of one case, per region: one table of them, METRICS, computed from boolean masks and
a voxel spacing.

A metric is added in METRICS alone: `evaluate` computes it, and all tables and pages show it.
Definitions are MONAI's, comparable with published tables:

- *Surface* of a mask: its voxels with a face neighbour outside the mask; beyond the image is
  outside. *Surface distances*: from the centre of every surface voxel of one mask to the nearest
  one of the other, in mm.

Lesions are those of BraTS 2023 for adult glioma (github.com/rachitsaluja/BraTS-2023-Metrics,
BraTS-GLI):

- *Components* of a mask are connected by 26 neighbours.
- *Lesions* are the components of the truth once it is grown by 3 mm: near components are one
  lesion. Those of at most 50 mm3 count neither as missed nor as false positives.
- A lesion is *detected* if, grown, it shares a voxel with a component of the prediction. All such
  components are its own, also those that are another lesion's too. A component of any size that no
  lesion has is a false positive.

Growing is in rounds of a voxel to 18 neighbours. The challenge, all of 1 mm, takes 3 rounds; here
an axis takes part in as many as 3 mm have voxels, rounded, so that lesions of other spacings are
the same ones.

Voxels are boxes, or on a sheared grid (a tilted gantry) parallelepipeds: functions take the spacing
along X, Y and Z, or the matrix of `ras_steps_mm`, whose columns are the steps along them.

Voxels that are not annotated are taken out of both masks, and every metric is of what is left: a
lesion or component is what hangs together of it. Where an annotated part ends is no surface: a
voxel is on the surface of a mask if a face neighbour that is annotated, or beyond the image, is
outside the mask. A mask that has no such voxel has the surface of what is left.

Empty masks are scored by the rule of the BraTS challenge: both empty is right, one empty as wrong
as possible (HD95 is 373.13 mm for 240x240x155 at 1 mm). Without a true lesion, sensitivity is 1
whatever was predicted, and lesion-wise Dice 1 without and 0 with false positives.

DeepMind's `surface-distance` is not used: its only release (0.1) calls names that numpy 2 and scipy
have dropped."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Callable, Dict, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np
from scipy.ndimage import binary_dilation, binary_erosion, generate_binary_structure, label
from scipy.spatial import cKDTree

from cpu3d.data.region import bounding_box, xyz

# Of the surface Dice, unless another is chosen: one BraTS voxel, about what two raters differ by.
TOLERANCE_MM = 1.0
LESION_GROWTH_MM = 3.0  # how far a true lesion reaches
LESION_MM3 = 50.0  # volume up to which a lesion does not count

Spacing = Union[Sequence[float], np.ndarray]  # mm of a voxel along X, Y, Z, or its steps (3, 3)


class Lesions(NamedTuple):
    """Counts of the lesions of a truth, their mean Dice, and that of the whole region."""

    true: int
    detected: int
    false_positives: int
    # the sum over true lesions, 0 of a missed one, over the count of these and of false positives
    dice: float
    region_dice: float
    found_share: np.ndarray  # (L,) of the voxels of each true lesion, however small


@dataclass(frozen=True)
class Matching:
    """The L true lesions and P predicted components of a region, and the N pairs of them that
    touch: all that the scores of any choice among the components need."""

    truth_voxels: Tuple[int, ...]  # (L,)
    counted: Tuple[bool, ...]  # (L,) whether the lesion is large enough to count
    predicted_voxels: Tuple[int, ...]  # (P,)
    # (N, 3) index of the lesion, index of the component, and the voxels of the component that lie
    # in the lesion before it was grown.
    pairs: Tuple[Tuple[int, int, int], ...]

    def lesions(self, kept: Optional[np.ndarray] = None) -> Lesions:
        """The scores if only the components of `kept` (P,) are predicted, by default all."""
        truth_voxels = np.array(self.truth_voxels, np.int64)
        predicted_voxels = np.array(self.predicted_voxels, np.int64)
        counted = np.array(self.counted, bool)
        if kept is None:
            kept = np.ones(len(predicted_voxels), bool)
        lesion, predicted, shared = np.array(self.pairs, np.int64).reshape(-1, 3).T
        stays = kept[predicted]
        lesion = lesion[stays]
        predicted = predicted[stays]
        count = len(truth_voxels)
        own = np.bincount(lesion, weights=predicted_voxels[predicted], minlength=count)
        found = np.bincount(lesion, weights=shared[stays], minlength=count)
        dice = 2 * found[counted] / (truth_voxels + own)[counted]
        false_positives = int(np.count_nonzero(kept)) - len(np.unique(predicted))
        judged = len(dice) + false_positives
        total = truth_voxels.sum() + predicted_voxels[kept].sum()
        return Lesions(
            true=len(dice),
            detected=int(np.count_nonzero(own[counted])),
            false_positives=false_positives,
            dice=float(dice.sum() / judged) if judged else 1.0,
            region_dice=float(2 * found.sum() / total) if total else 1.0,
            found_share=found / np.maximum(truth_voxels, 1),
        )


@dataclass(frozen=True)
class Masks:
    """A truth and a prediction, boolean `(X, Y, Z)`, cropped to the box around both."""

    truth: np.ndarray
    prediction: np.ndarray
    steps_mm: np.ndarray  # (3, 3), a column for each axis
    tolerance_mm: float
    diagonal_mm: float  # of the whole image grid
    empty: str  # which mask is: "", "truth", "prediction" or "both"
    ignored: Optional[np.ndarray] = None  # (X, Y, Z), in neither mask; None if no voxel is

    @cached_property
    def distances_mm(self) -> Tuple[np.ndarray, np.ndarray]:
        """Surface distances, neither mask empty: (truth to prediction, prediction to truth),
        float64, unordered."""
        true = np.argwhere(self._surface(self.truth)) @ self.steps_mm.T
        predicted = np.argwhere(self._surface(self.prediction)) @ self.steps_mm.T
        return cKDTree(predicted).query(true)[0], cKDTree(true).query(predicted)[0]

    def _surface(self, mask: np.ndarray) -> np.ndarray:
        """The surface voxels of a mask that is not empty."""
        if self.ignored is not None:
            surface = mask & ~binary_erosion(mask | self.ignored)
            if surface.any():
                return surface
        return mask & ~binary_erosion(mask)

    @cached_property
    def lesions(self) -> Lesions:
        predicted = connected_components(self.prediction)
        return match_lesions(self.truth, predicted, self.steps_mm).lesions()


def dice(masks: Masks) -> float:
    """Twice the voxels that both masks share over the sum of both; 1 if both are empty, 0 if one
    is."""
    total = np.count_nonzero(masks.truth) + np.count_nonzero(masks.prediction)
    if total:
        return float(2 * np.count_nonzero(masks.truth & masks.prediction) / total)
    return 1.0


def hausdorff95_mm(masks: Masks) -> float:
    """The larger of the two directed 95th percentiles of surface distances, linear between ranks; 0
    if both masks are empty, the diagonal of the image if one is."""
    if masks.empty:
        return 0.0 if masks.empty == "both" else masks.diagonal_mm
    return float(max(np.percentile(distances, 95) for distances in masks.distances_mm))


def surface_dice(masks: Masks) -> float:
    """The share of all surface voxels, of both masks together, within the tolerance (<=) of the
    other surface; 1 if both are empty, 0 if one is."""
    if masks.empty:
        return float(masks.empty == "both")
    # Distances are roots of sums of squares: a tolerance of exactly 3 voxels of 0.1 mm must still
    # hold three of them.
    within = np.concatenate(masks.distances_mm) <= masks.tolerance_mm * (1 + 1e-9)
    return float(np.count_nonzero(within) / within.size)


def lesion_dice(masks: Masks) -> float:
    """The mean Dice of true lesions and false positives, each alone, by the rule of BraTS 2023: a
    missed lesion and a false positive have 0; 1 if there are none."""
    return masks.lesions.dice


def lesion_sensitivity(masks: Masks) -> float:
    """The share of true lesions above 50 mm³ that were detected; 1 if there are none."""
    if masks.lesions.true:
        return masks.lesions.detected / masks.lesions.true
    return 1.0


def false_positives(masks: Masks) -> float:
    """The number of components of the prediction in a case that no true lesion, grown by 3 mm,
    touches."""
    return float(masks.lesions.false_positives)


@dataclass(frozen=True)
class Metric:
    """A number that says how well a region was segmented. Cases are aggregated by their mean."""

    label: str  # for people
    # Its docstring says in a sentence what the metric measures, also for empty masks.
    of: Callable[[Masks], float]
    larger_is_better: bool = True  # then it is a share, from 0 to 1
    unit: str = ""
    digits: int = 3  # after the point, in tables
    note: str = ""  # below tables; {tolerance_mm} is the evaluation's

    @property
    def heading(self) -> str:
        """Label and unit, for the head of a column."""
        return f"{self.label}, {self.unit}" if self.unit else self.label

    @property
    def labelled(self) -> str:
        """The label, which says so if less is better."""
        if self.larger_is_better:
            return self.label
        return f"{self.label} (less is better)"


# By their names in scores.json.
METRICS: Dict[str, Metric] = {
    "dice": Metric("Dice", dice),
    "hd95_mm": Metric("HD95", hausdorff95_mm, larger_is_better=False, unit="mm", digits=2),
    "surface_dice": Metric("surface Dice", surface_dice, note="at {tolerance_mm:g} mm"),
    "lesion_dice": Metric("lesion-wise Dice", lesion_dice, note="by the rule of BraTS 2023"),
    "lesion_sensitivity": Metric("lesion sensitivity", lesion_sensitivity),
    "false_positives": Metric("false positives", false_positives, larger_is_better=False, digits=2),
}


def steps_of(spacing_mm: Spacing) -> np.ndarray:
    """The steps along X, Y, Z as the columns of a matrix (3, 3), in mm, of a spacing or of such a
    matrix."""
    spacing = np.asarray(spacing_mm, float)
    return np.diag(spacing) if spacing.ndim == 1 else spacing


def voxel_mm3(spacing_mm: Spacing) -> float:
    """The volume of a voxel, of its spacing or of the upper triangular matrix of its steps."""
    return float(np.prod(np.diagonal(steps_of(spacing_mm))))


def score_region(
    truth: np.ndarray,
    prediction: np.ndarray,
    spacing_mm: Spacing,
    tolerance_mm: float = TOLERANCE_MM,
    ignored: Optional[np.ndarray] = None,
) -> Dict[str, Any]:
    """Score boolean masks `(X, Y, Z)` of one region on the full image grid; voxels measure
    `spacing_mm`, or have the steps (3, 3) of `ras_steps_mm`. Those of `ignored`, a mask of
    `ignored_voxels`, do not count.

    Metric -> value; truth_voxels, prediction_voxels, truth_ml, prediction_ml; true_lesions and
    detected_lesions, the counts behind the sensitivity; and "empty": which mask is, as in `Masks`.
    """
    if ignored is not None:
        truth = truth & ~ignored
        prediction = prediction & ~ignored
    voxels = {
        "truth": int(np.count_nonzero(truth)),
        "prediction": int(np.count_nonzero(prediction)),
    }
    without = [name for name, count in voxels.items() if not count]
    empty = "both" if len(without) == 2 else "".join(without)
    # Lesions that grow together do so inside of this box.
    box = bounding_box(truth | prediction).slices(truth.shape)
    steps_mm = steps_of(spacing_mm)
    # The longest one: a sheared grid has four of different length.
    diagonal_mm = float(np.linalg.norm(np.abs(steps_mm) @ truth.shape))
    if ignored is not None:  # with the neighbours of its outermost voxels
        box = xyz(slice(max(axis.start - 1, 0), axis.stop + 1) for axis in box)
        ignored = ignored[box]
    masks = Masks(truth[box], prediction[box], steps_mm, tolerance_mm, diagonal_mm, empty, ignored)
    voxel_ml = voxel_mm3(steps_mm) / 1000.0
    return {
        **{name: metric.of(masks) for name, metric in METRICS.items()},
        **{f"{name}_voxels": count for name, count in voxels.items()},
        **{f"{name}_ml": count * voxel_ml for name, count in voxels.items()},
        "true_lesions": masks.lesions.true,
        "detected_lesions": masks.lesions.detected,
        "empty": empty,
    }


def metric_notes(tolerance_mm: float) -> str:
    """The caption of a table of all metrics, as "HD95 in mm; surface Dice at 1 mm"."""
    notes = [f"{metric.label} in {metric.unit}" for metric in METRICS.values() if metric.unit]
    notes += [
        f"{metric.label} {metric.note.format(tolerance_mm=tolerance_mm)}"
        for metric in METRICS.values()
        if metric.note
    ]
    return "; ".join(notes)


def connected_components(mask: np.ndarray) -> np.ndarray:
    """The components of a mask `(X, Y, Z)`, numbered from 1 on; 0 is none."""
    return label(mask, generate_binary_structure(3, 3))[0]


def match_lesions(
    truth: np.ndarray,
    predicted: np.ndarray,
    spacing_mm: Spacing,
    growth_mm: float = LESION_GROWTH_MM,
) -> Matching:
    """Match a boolean truth `(X, Y, Z)` and a prediction's `connected_components` by the rule at
    the top of this file; with a `growth_mm` of 0 lesions are the components of the truth."""
    near = generate_binary_structure(3, 2)
    steps_mm = steps_of(spacing_mm)
    rounds = np.round(growth_mm / np.linalg.norm(steps_mm, axis=0)).astype(int)
    stops = sorted({0, *rounds})
    grown = truth
    for done, stop in zip(stops, stops[1:]):
        # An axis whose rounds are done keeps the middle of `near` alone, and does not grow.
        grows = [slice(None) if done < axis_rounds else slice(1, 2) for axis_rounds in rounds]
        grown = binary_dilation(grown, near[tuple(grows)], iterations=int(stop - done))
    lesions = connected_components(grown)  # with the voxels around them
    truth_voxels = np.bincount(lesions[truth])[1:]
    predicted_voxels = np.bincount(predicted.ravel())[1:]
    # Every lesion and predicted component that share a voxel, once: as one number of both.
    both = (predicted > 0) & grown
    base = np.int64(len(predicted_voxels) + 1)
    numbers, pair = np.unique(lesions[both] * base + predicted[both], return_inverse=True)
    shared = np.bincount(pair, weights=truth[both], minlength=len(numbers)).astype(int)
    pairs = np.stack([numbers // base - 1, numbers % base - 1, shared], 1)
    return Matching(
        truth_voxels=tuple(truth_voxels.tolist()),
        counted=tuple((truth_voxels * voxel_mm3(steps_mm) > LESION_MM3).tolist()),
        predicted_voxels=tuple(predicted_voxels.tolist()),
        pairs=tuple(map(tuple, pairs.tolist())),
    )
