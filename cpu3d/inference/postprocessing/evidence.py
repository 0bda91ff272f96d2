"""What a labelled case says about post-processing: enough to score any rule without the case.

    evidence = gather(probabilities, truth, regions, spacing_mm)  # of a case
    json.dumps(evidence.to_json())                                # and evidence_from_json
    means_of([evidence], PostProcessing({"WT": Rule(share=0.1)}), regions)["WT"].lesion_dice

Kept are the sizes of the predicted components and of the true lesions, and which of them touch:
some hundred numbers a case, so that the cases of all folds can decide together.
"""

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Dict, Optional, Sequence, Tuple

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
    LESION_MM3,
    Matching,
    Spacing,
    connected_components,
    match_lesions,
    voxel_mm3,
)
from memory_estimator.common.files import typed

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
    a component; scores are of its parts that are annotated, Q in all. Raises ValueError for numbers
    that do not belong together."""

    voxels: Numbers  # (P,)
    probability: Tuple[float, ...]  # (P,) the largest of the region in each
    inside: Dict[str, Numbers]  # larger region -> (P,) the index of its component that holds each
    part_of: Numbers  # (Q,) index of the component
    part_voxels: Numbers  # (Q,)
    lesion_voxels: Numbers  # (L,) of the true lesions by the rule of BraTS
    # Of lesions, once grown, and parts that touch: their indices, and the voxels that they share.
    lesion: Numbers
    lesion_part: Numbers
    lesion_shared: Numbers
    true_voxels: Numbers  # (C,) of the components of the truth
    # The same of these components, without growth.
    true: Numbers
    true_part: Numbers
    true_shared: Numbers

    def __post_init__(self):
        lengths = [
            (self.voxels, self.probability, *self.inside.values()),
            (self.part_of, self.part_voxels),
            (self.lesion, self.lesion_part, self.lesion_shared),
            (self.true, self.true_part, self.true_shared),
        ]
        if any(len({len(numbers) for numbers in alike}) > 1 for alike in lengths):
            raise ValueError("evidence must have as many numbers of each kind, got more or fewer")
        for indices, items in (
            (self.part_of, self.voxels),
            (self.lesion, self.lesion_voxels),
            (self.lesion_part, self.part_of),
            (self.true, self.true_voxels),
            (self.true_part, self.part_of),
        ):
            wrong = [index for index in indices if not 0 <= index < len(items)]
            if wrong:
                raise ValueError(f"an index must be below {len(items)}, got {wrong[0]}")

    def scores(self, kept: np.ndarray, mm3: float) -> Scores:
        """The scores if only the components of `kept` (P,) are left. `mm3` is a voxel's volume."""
        kept_parts = kept[list(self.part_of)]
        lesions = np.array(self.lesion_voxels, np.int64)
        part_voxels = np.array(self.part_voxels, np.int64)
        matching = Matching(
            truth_voxels=lesions,
            counted=lesions * mm3 > LESION_MM3,
            predicted_voxels=part_voxels,
            lesion=np.array(self.lesion, np.int64),
            predicted=np.array(self.lesion_part, np.int64),
            shared_voxels=np.array(self.lesion_shared, np.int64),
        )
        of_lesions = matching.lesions(kept_parts)
        pairs = kept_parts[list(self.true_part)]
        answered = np.bincount(
            np.array(self.true, np.int64)[pairs],
            weights=np.array(self.true_shared)[pairs],
            minlength=len(self.true_voxels),
        )
        return Scores(
            lesion_dice=of_lesions.dice,
            false_positives=float(of_lesions.false_positives),
            dice=matching.dice(kept_parts),
            detected=answered >= DETECTED_SHARE * np.array(self.true_voxels),
        )


@dataclass(frozen=True)
class Evidence:
    """What is kept of a labelled case and its answer."""

    voxel_mm3: float
    components: Dict[str, Components]  # by region

    def to_json(self) -> Dict[str, Any]:
        """The content of `evidence_from_json`."""
        return dataclasses.asdict(self)

    def has(self, region: str) -> bool:
        """Whether the region is in the truth."""
        return bool(self.components[region].true_voxels)

    def scores(self, chosen: PostProcessing, regions: Regions) -> Dict[str, Scores]:
        """Region, the largest first -> the scores of the label that `chosen` paints."""
        scores = {}
        kept: Dict[str, np.ndarray] = {}
        for name, larger in larger_regions(regions).items():
            own = self.components[name]
            stays = np.ones(len(own.voxels), bool)
            for other in larger:
                stays &= kept[other][list(own.inside[other])]
            rule = chosen.rules.get(name)
            if rule and not chosen.off:
                sizes_mm3 = np.array(own.voxels)[stays] * self.voxel_mm3
                stays[stays] = ~rule.removed(sizes_mm3, np.array(own.probability)[stays])
            kept[name] = stays
            key = (name, stays.tobytes())
            if key not in self._scored:
                self._scored[key] = own.scores(stays, self.voxel_mm3)
            scores[name] = self._scored[key]
        return scores

    @cached_property
    def _scored(self) -> Dict[Tuple[str, bytes], Scores]:
        """By region and kept components: most rules leave what another one leaves."""
        return {}


def gather(
    answers: np.ndarray,
    truth: np.ndarray,
    regions: Regions,
    spacing_mm: Spacing,
    ignored: Optional[np.ndarray] = None,
) -> Evidence:
    """The evidence of probabilities `(X, Y, Z, R)` in the order of `regions` beside the true label
    `(X, Y, Z)`. `spacing_mm` and `ignored` are as in `score_region`."""
    if ignored is not None:
        truth = np.where(ignored, 0, truth)
    label = label_from_regions(answers, regions)
    # Lesions grow together inside of this box.
    box = bounding_box((label > 0) | (truth > 0)).slices(label.shape)
    annotated = np.ones(label[box].shape, bool)
    if ignored is not None:
        annotated = ~ignored[box]
    numbered: Dict[str, np.ndarray] = {}
    components = {}
    for name, larger in larger_regions(regions).items():
        predicted = connected_components(region_mask(label[box], regions[name]))
        numbered[name] = predicted
        truth_mask = region_mask(truth[box], regions[name])
        parts = connected_components((predicted > 0) & annotated)
        matching = match_lesions(truth_mask, parts, spacing_mm)
        true = connected_components(truth_mask)
        both = truth_mask & (parts > 0)
        touching = np.stack([true[both], parts[both]])
        pairs, shared = np.unique(touching, axis=1, return_counts=True)
        answer = answers[box][..., list(regions).index(name)]
        components[name] = Components(
            voxels=_sizes(predicted),
            probability=tuple(largest_probability(answer, predicted).tolist()),
            inside={other: _holders(predicted, numbered[other]) for other in larger},
            part_of=_holders(parts, predicted),
            part_voxels=_sizes(parts),
            lesion_voxels=_numbers(matching.truth_voxels),
            lesion=_numbers(matching.lesion),
            lesion_part=_numbers(matching.predicted),
            lesion_shared=_numbers(matching.shared_voxels),
            true_voxels=_sizes(true),
            true=_numbers(pairs[0] - 1),
            true_part=_numbers(pairs[1] - 1),
            true_shared=_numbers(shared),
        )
    return Evidence(voxel_mm3(spacing_mm), components)


def evidence_from_json(content: Any, regions: Regions) -> Evidence:
    """Parsed JSON of `Evidence.to_json`. Raises ValueError if it is damaged or of other regions."""
    evidence: Evidence = typed(content, Evidence)
    larger = larger_regions(regions)
    inside = {name: set(own.inside) for name, own in evidence.components.items()}
    if inside != {name: set(larger[name]) for name in regions}:
        rule = f"evidence must be of the regions {', '.join(regions)}, each in its larger ones"
        raise ValueError(f"{rule}, got {inside}")
    return evidence


def means_of(
    evidences: Sequence[Evidence],
    chosen: PostProcessing,
    regions: Regions,
) -> Dict[str, Means]:
    """Region, the largest first -> the means over cases, at least one, of the labels that `chosen`
    paints."""
    scores = [evidence.scores(chosen, regions) for evidence in evidences]
    means = {}
    for name in larger_regions(regions):
        values = {}
        for metric in dataclasses.fields(Means):
            values[metric.name] = float(
                np.mean([getattr(case[name], metric.name) for case in scores])
            )
        means[name] = Means(**values)
    return means


def _numbers(array: np.ndarray) -> Numbers:
    return tuple(array.astype(int).tolist())


def _sizes(components: np.ndarray) -> Numbers:
    """The voxels of each of numbered components."""
    return _numbers(np.bincount(components.ravel())[1:])


def _holders(components: np.ndarray, larger: np.ndarray) -> Numbers:
    """For each of numbered components the index of the larger one that holds it."""
    holder = np.zeros(components.max(initial=0) + 1, np.int64)
    holder[components] = larger  # holder[0], of voxels in no component, means nothing
    return _numbers(holder[1:] - 1)
