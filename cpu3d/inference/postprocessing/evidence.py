"""What a labelled case says about post-processing: enough to score any rule without the case.

    evidence = gather(probabilities, truth, regions, spacing_mm)  # of a case
    evidence.scores(PostProcessing({"WT": Rule(share=0.1)}), regions)["WT"].lesion_dice

Kept are the sizes of the predicted components and of the true lesions, and which of them touch:
some hundred numbers a case, so that the cases of all folds can decide together.
"""

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Dict, Mapping, Optional, Sequence, Tuple

import numpy as np

from cpu3d.data.labels import label_from_regions, region_mask
from cpu3d.data.region import bounding_box
from cpu3d.inference.postprocessing.rules import (
    PostProcessing,
    Regions,
    larger_regions,
    largest_probability,
)
from cpu3d.inference.scores import (
    Matching,
    Spacing,
    connected_components,
    match_lesions,
    voxel_mm3,
)

DETECTED_SHARE = 0.1  # of its voxels: from there on a true lesion counts as found

Numbers = Tuple[int, ...]


@dataclass(frozen=True)
class Means:
    """Means of a region over cases, as `cpu3d.inference.scores` defines them."""

    lesion_dice: float
    false_positives: float
    dice: float


@dataclass(frozen=True, eq=False)
class Scores(Means):
    """Those of one case, if some of the predicted components are removed."""

    detected: np.ndarray
    """(C,) whether DETECTED_SHARE of each component of the truth, however small, is there."""


@dataclass(frozen=True)
class Components:
    """The P predicted components of a region in a case, and the truth that they touch. Rules judge
    a component; scores are of its parts that are annotated, Q in all."""

    voxels: Numbers  # (P,)
    probability: Tuple[float, ...]  # (P,) the largest of the region in each
    inside: Dict[str, Numbers]  # larger region -> (P,) the index of its component that holds each
    part_of: Numbers  # (Q,) index of the component
    lesions: Matching  # of true lesions by the rule of BraTS and parts
    truth: Matching  # of the components of the truth and parts

    def scores(self, kept: np.ndarray) -> Scores:
        """The scores if only the components of `kept` (P,) are left."""
        kept_parts = kept[list(self.part_of)]
        lesions = self.lesions.lesions(kept_parts)
        return Scores(
            lesion_dice=lesions.dice,
            false_positives=float(lesions.false_positives),
            dice=lesions.region_dice,
            detected=self.truth.lesions(kept_parts).found_share >= DETECTED_SHARE,
        )


@dataclass(frozen=True)
class Evidence:
    """What is kept of a labelled case and its answer."""

    voxel_mm3: float
    components: Dict[str, Components]  # by region

    def scores(self, chosen: PostProcessing, regions: Regions) -> Dict[str, Scores]:
        """Region, the largest first -> the scores of the label that `chosen` paints."""
        scores = {}
        kept: Dict[str, np.ndarray] = {}
        for name, larger in larger_regions(regions).items():
            components = self.components[name]
            stays = np.ones(len(components.voxels), bool)
            for other in larger:
                stays &= kept[other][list(components.inside[other])]
            if name in chosen.rules:
                sizes_mm3 = np.array(components.voxels)[stays] * self.voxel_mm3
                probability = np.array(components.probability)[stays]
                stays[stays] = ~chosen.rules[name].removed(sizes_mm3, probability)
            kept[name] = stays
            key = (name, stays.tobytes())
            if key not in self._scored:
                self._scored[key] = components.scores(stays)
            scores[name] = self._scored[key]
        return scores

    @cached_property
    def _scored(self) -> Dict[Tuple[str, bytes], Scores]:
        """By region and kept components: most rules leave what another one leaves."""
        return {}


def gather(
    answers: Any,
    truth: np.ndarray,
    regions: Regions,
    spacing_mm: Spacing,
    ignored: Optional[np.ndarray] = None,
) -> Evidence:
    """The evidence of probabilities `(X, Y, Z, R)` in the order of `regions` beside the true label
    `(X, Y, Z)`. `spacing_mm` and `ignored` are as in `score_region`."""
    if ignored is None:
        ignored = np.zeros(truth.shape, bool)
    truth = np.where(ignored, 0, truth)
    label = label_from_regions(answers, regions)
    # Lesions grow together inside of this box.
    box = bounding_box((label > 0) | (truth > 0)).slices(label.shape)
    numbered: Dict[str, np.ndarray] = {}
    components = {}
    for name, larger in larger_regions(regions).items():
        predicted = connected_components(region_mask(label[box], regions[name]))
        numbered[name] = predicted
        parts = connected_components((predicted > 0) & ~ignored[box])
        true = region_mask(truth[box], regions[name])
        answer = answers[..., list(regions).index(name)][box]
        components[name] = Components(
            voxels=tuple(np.bincount(predicted.ravel())[1:].tolist()),
            probability=tuple(largest_probability(answer, predicted).tolist()),
            inside={other: _holders(predicted, numbered[other]) for other in larger},
            part_of=_holders(parts, predicted),
            lesions=match_lesions(true, parts, spacing_mm),
            truth=match_lesions(true, parts, spacing_mm, growth_mm=0.0),
        )
    return Evidence(voxel_mm3(spacing_mm), components)


def means_of(cases: Sequence[Mapping[str, Means]]) -> Dict[str, Means]:
    """Region -> the means over cases, at least one, of the scores of each."""
    means = {}
    for name in cases[0]:
        values = {}
        for metric in dataclasses.fields(Means):
            values[metric.name] = float(
                np.mean([getattr(case[name], metric.name) for case in cases])
            )
        means[name] = Means(**values)
    return means


def _holders(components: np.ndarray, larger: np.ndarray) -> Numbers:
    """For each of numbered components the index of the larger one that holds it."""
    holder = np.zeros(components.max(initial=0) + 1, np.int64)
    holder[components] = larger  # holder[0], of voxels in no component, means nothing
    return tuple((holder[1:] - 1).tolist())
