"""What a labelled case says about post-processing: enough to score any rule without the case.

    evidence = gather(probabilities, truth, regions, spacing_mm)  # of a case
    json.dumps(evidence.to_json())                                # and evidence_from_json
    means_of([evidence], PostProcessing({"WT": (Rule(mm3=50),)}), regions)["WT"].lesion_dice

Kept are the sizes of the predicted components and of the true lesions, and which of them touch:
some hundred numbers a case, so that the cases of all folds can decide together.
"""

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Dict, Optional, Sequence, Tuple

import numpy as np

from cpu3d.data.labels import region_mask
from cpu3d.data.region import bounding_box
from cpu3d.inference.postprocessing.rules import (
    PostProcessing,
    Regions,
    larger_regions,
    largest_probability,
    removed_by_all,
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

# Index of a true lesion or component, of a part of a predicted one, voxels that they share.
Pairs = Tuple[Tuple[int, int, int], ...]
# Index of a predicted component, voxels of a part of it.
Parts = Tuple[Tuple[int, int], ...]


@dataclass(frozen=True)
class Components:
    """The P predicted components of a region in a case, and the truth that they touch. Raises
    ValueError for numbers that do not belong together."""

    voxels: Tuple[int, ...]  # (P,)
    probability: Tuple[float, ...]  # (P,) the largest of the region in each
    inside: Dict[str, Tuple[int, ...]]
    """Larger region -> (P,) the index of its component that holds each."""
    lesion_voxels: Tuple[int, ...]
    """(L,) of the true lesions by the rule of BraTS."""
    lesion_pairs: Pairs
    """Of those that touch once the lesion is grown; voxels are shared without that."""
    component_voxels: Tuple[int, ...]
    """(C,) of the components of the truth."""
    component_pairs: Pairs
    parts: Optional[Parts] = None
    """What is left of the predicted components where voxels are annotated: rules judge a whole
    component, scores its parts. None: all of each, as its only part."""

    def __post_init__(self):
        count = len(self.voxels)
        if any(len(numbers) != count for numbers in (self.probability, *self.inside.values())):
            raise ValueError(f"each of {count} components must have one number, got more or fewer")
        if not all(0 <= index < count for index, _ in self.parts or ()):
            raise ValueError(f"parts must be of {count} components, got {self.parts}")
        self._check_pairs(self.lesion_pairs, len(self.lesion_voxels))
        self._check_pairs(self.component_pairs, len(self.component_voxels))

    def _check_pairs(self, pairs: Pairs, true_count: int) -> None:
        """Raise ValueError for a pair with an index out of range."""
        count = len(self.voxels if self.parts is None else self.parts)
        for true, predicted, _ in pairs:
            if not (0 <= true < true_count and 0 <= predicted < count):
                rule = f"pairs must be of {true_count} true and {count} predicted components"
                raise ValueError(f"{rule}, got {true} and {predicted}")


@dataclass(frozen=True)
class Evidence:
    """What is kept of a labelled case and its answer."""

    voxel_mm3: float
    plain: Dict[str, Components]  # by region
    nested: Optional[Dict[str, Components]] = None  # of nested answers; None if they are the same

    def to_json(self) -> Dict[str, Any]:
        """The content of `evidence_from_json`."""
        content = dataclasses.asdict(self)
        for answers in (content["plain"], content["nested"] or {}):
            for components in answers.values():
                if components["parts"] is None:
                    del components["parts"]
        return content

    def has(self, region: str) -> bool:
        """Whether the region is in the truth."""
        return bool(self.plain[region].component_voxels)

    def scores(self, chosen: PostProcessing, regions: Regions) -> Dict[str, "Scores"]:
        """Region, the largest first -> the scores of the label that `chosen` paints."""
        touching = self._plain
        if chosen.nested and not chosen.off:
            touching = self._nested
        scores = {}
        kept: Dict[str, np.ndarray] = {}
        for name, larger in larger_regions(regions).items():
            of_region = touching[name]
            sizes_mm3 = of_region.sizes_mm3
            stays = np.ones(len(sizes_mm3), bool)
            for other in larger:
                stays &= kept[other][of_region.inside[other]]
            if name in chosen.rules and not chosen.off:
                probability = of_region.probability[stays]
                stays[stays] = ~removed_by_all(chosen.rules[name], sizes_mm3[stays], probability)
            kept[name] = stays
            scores[name] = of_region.scores(stays)
        return scores

    @cached_property
    def _plain(self) -> Dict[str, "_Touching"]:
        return {
            name: _Touching(components, self.voxel_mm3) for name, components in self.plain.items()
        }

    @cached_property
    def _nested(self) -> Dict[str, "_Touching"]:
        if self.nested is None:
            return self._plain
        return {
            name: _Touching(components, self.voxel_mm3) for name, components in self.nested.items()
        }


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
    plain = PostProcessing().paint(answers, regions, spacing_mm)
    nested = PostProcessing(nested=True).paint(answers, regions, spacing_mm)
    components = _components(plain, answers, truth, spacing_mm, regions, ignored)
    if np.array_equal(plain, nested):
        return Evidence(voxel_mm3(spacing_mm), components)
    nested_components = _components(nested, answers, truth, spacing_mm, regions, ignored)
    return Evidence(voxel_mm3(spacing_mm), components, nested_components)


def evidence_from_json(content: Any, regions: Regions) -> Evidence:
    """Parsed JSON of `Evidence.to_json`. Raises ValueError if it is damaged or of other regions."""
    evidence = typed(content, Evidence)
    for components in (evidence.plain, evidence.nested):
        if components is None:
            continue
        if set(components) != set(regions):
            rule = f"evidence must be of the regions {', '.join(regions)}"
            raise ValueError(f"{rule}, got {', '.join(components) or 'none'}")
        for name, larger in larger_regions(regions).items():
            if set(components[name].inside) != set(larger):
                rule = f"evidence of {name} must tell where its components are in {larger}"
                raise ValueError(f"{rule}, got {list(components[name].inside)}")
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
        of_region = [case[name] for case in scores]
        means[name] = Means(
            lesion_dice=float(np.mean([case.lesion_dice for case in of_region])),
            false_positives=float(np.mean([case.false_positives for case in of_region])),
            dice=float(np.mean([case.dice for case in of_region])),
        )
    return means


class _Touching:
    """`Components` as arrays, to be scored many times."""

    def __init__(self, components: Components, mm3: float):
        lesions = np.array(components.lesion_voxels, np.int64)
        voxels = np.array(components.voxels, np.int64)
        self.sizes_mm3 = voxels * mm3  # (P,)
        parts = components.parts
        if parts is None:
            parts = tuple(enumerate(components.voxels))
        self.part_of, part_voxels = np.reshape(parts, (-1, 2)).astype(np.int64).T
        lesion, predicted, shared = np.reshape(components.lesion_pairs, (-1, 3)).astype(np.int64).T
        self.matching = Matching(
            truth_voxels=lesions,
            counted=lesions * mm3 > LESION_MM3,
            predicted_voxels=part_voxels,
            predicted_mm3=part_voxels * mm3,
            lesion=lesion,
            predicted=predicted,
            shared_voxels=shared,
        )
        self.probability = np.array(components.probability, float)
        self.inside = {name: np.array(index, np.int64) for name, index in components.inside.items()}
        # The truth's C components, and the pairs of them with predicted ones.
        self.true_voxels = np.array(components.component_voxels, np.int64)
        pairs = np.reshape(components.component_pairs, (-1, 3)).astype(np.int64)
        self.true, self.predicted, self.shared_voxels = pairs.T
        # Most rules leave the components that another one leaves.
        self._scored: Dict[bytes, Scores] = {}

    def scores(self, kept: np.ndarray) -> Scores:
        """The scores if only the predicted components of `kept` (P,) are left."""
        key = kept.tobytes()
        if key not in self._scored:
            self._scored[key] = self._scores(kept[self.part_of])
        return self._scored[key]

    def _scores(self, kept: np.ndarray) -> Scores:
        """The same, for parts of them."""
        pairs = kept[self.predicted]
        answered = np.bincount(
            self.true[pairs],
            weights=self.shared_voxels[pairs],
            minlength=len(self.true_voxels),
        )
        of_lesions = self.matching.lesions(kept)
        return Scores(
            lesion_dice=of_lesions.dice,
            false_positives=float(of_lesions.false_positives),
            dice=self.matching.dice(kept),
            detected=answered >= DETECTED_SHARE * self.true_voxels,
        )


def _components(
    label: np.ndarray,
    answers: np.ndarray,
    truth: np.ndarray,
    spacing_mm: Spacing,
    regions: Regions,
    ignored: Optional[np.ndarray],
) -> Dict[str, Components]:
    """Region, the largest first -> its components in a painted label."""
    # Lesions grow together inside of this box.
    box = bounding_box((label > 0) | (truth > 0)).slices(label.shape)
    numbered: Dict[str, np.ndarray] = {}
    components = {}
    for name, larger in larger_regions(regions).items():
        predicted = connected_components(region_mask(label[box], regions[name]))
        numbered[name] = predicted
        inside = {}
        for other in larger:
            index = np.zeros(predicted.max() + 1, np.int64)
            index[predicted] = numbered[other]  # index[0], of voxels in no component, means nothing
            inside[other] = tuple((index[1:] - 1).tolist())
        truth_mask = region_mask(truth[box], regions[name])
        scored = predicted
        parts = None
        if ignored is not None:
            scored = connected_components((predicted > 0) & ~ignored[box])
            holder = np.zeros(scored.max() + 1, np.int64)
            holder[scored] = predicted
            sizes = np.bincount(scored.ravel())
            parts = tuple(zip((holder[1:] - 1).tolist(), sizes[1:].tolist()))
        matching = match_lesions(truth_mask, scored, spacing_mm)
        true = connected_components(truth_mask)
        both = truth_mask & (scored > 0)
        touching = np.stack([true[both], scored[both]])
        pairs, shared = np.unique(touching, axis=1, return_counts=True)
        answer = answers[box][..., list(regions).index(name)]
        probability = largest_probability(answer, predicted)
        components[name] = Components(
            voxels=tuple(np.bincount(predicted.ravel())[1:].tolist()),
            probability=tuple(probability.tolist()),
            inside=inside,
            lesion_voxels=tuple(matching.truth_voxels.tolist()),
            lesion_pairs=_pairs(matching.lesion, matching.predicted, matching.shared_voxels),
            component_voxels=tuple(np.bincount(true.ravel())[1:].tolist()),
            component_pairs=_pairs(*(pairs - 1), shared),
            parts=parts,
        )
    return components


def _pairs(true: np.ndarray, predicted: np.ndarray, shared: np.ndarray) -> Pairs:
    """Indices (N,) of true and of predicted ones, and voxels (N,) that they share, as `Pairs`."""
    rows = np.stack([true, predicted, shared], axis=1).astype(int)
    return tuple(map(tuple, rows.tolist()))
