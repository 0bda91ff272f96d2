"""What a labelled case says about post-processing: enough to score any rule without the case.

    evidence = gather(probabilities, truth, regions, spacing_mm)  # of a case
    json.dumps(evidence.to_json())                                # and evidence_from_json
    means_of([evidence], PostProcessing({"WT": (Rule(mm3=50),)}), regions)["WT"].lesion_dice

Kept are the sizes of the predicted parts and of the true lesions, and which of them touch: some
hundred numbers a case, so that the cases of all folds can decide together.
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
    connected_parts,
    match_lesions,
    voxel_mm3,
)
from memory_estimator.common.files import typed

DETECTED_SHARE = 0.1  # of its voxels: from there on a true lesion counts as found

Pairs = Tuple[Tuple[int, int, int], ...]  # index of a true one, of a part, voxels that they share


@dataclass(frozen=True)
class Parts:
    """The P predicted parts of a region in a case, and the truth that they touch. Raises ValueError
    for numbers that do not belong together."""

    voxels: Tuple[int, ...]  # (P,)
    probability: Tuple[float, ...]  # (P,) the largest of the region in each part
    inside: Dict[str, Tuple[int, ...]]
    """Larger region -> (P,) the index of the part of it that holds each."""
    lesion_voxels: Tuple[int, ...]
    """(L,) of the true lesions by the rule of BraTS."""
    lesion_pairs: Pairs
    """Lesions, and parts that touch them once they are grown; voxels are shared without that."""
    component_voxels: Tuple[int, ...]
    """(C,) of the connected parts of the truth."""
    component_pairs: Pairs

    def __post_init__(self):
        parts = len(self.voxels)
        if any(len(numbers) != parts for numbers in (self.probability, *self.inside.values())):
            raise ValueError(f"each of {parts} parts must have one number, got more or fewer")
        for pairs, owners in (
            (self.lesion_pairs, len(self.lesion_voxels)),
            (self.component_pairs, len(self.component_voxels)),
        ):
            if any(not (0 <= owner < owners and 0 <= part < parts) for owner, part, _ in pairs):
                raise ValueError(f"pairs must be of {owners} and {parts} parts, got others")


@dataclass(frozen=True)
class Evidence:
    """What is kept of a labelled case and its answer."""

    voxel_mm3: float
    plain: Dict[str, Parts]  # region -> its parts
    nested: Optional[Dict[str, Parts]] = None  # those of nested answers; None if they are the same

    def to_json(self) -> Dict[str, Any]:
        """The content of `evidence_from_json`."""
        return dataclasses.asdict(self)

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
            parts = touching[name]
            stays = np.ones(len(parts.matching.part_mm3), bool)
            for other in larger:
                stays &= kept[other][parts.inside[other]]
            if name in chosen.rules and not chosen.off:
                left = parts.matching.part_mm3[stays], parts.probability[stays]
                stays[stays] = ~removed_by_all(chosen.rules[name], *left)
            kept[name] = stays
            scores[name] = parts.scores(stays)
        return scores

    @cached_property
    def _plain(self) -> Dict[str, "_Touching"]:
        return {name: _Touching(parts, self.voxel_mm3) for name, parts in self.plain.items()}

    @cached_property
    def _nested(self) -> Dict[str, "_Touching"]:
        if self.nested is None:
            return self._plain
        return {name: _Touching(parts, self.voxel_mm3) for name, parts in self.nested.items()}


@dataclass(frozen=True)
class Means:
    """Means of a region over cases, as `cpu3d.inference.scores` defines them."""

    lesion_dice: float
    false_positives: float
    dice: float


@dataclass(frozen=True, eq=False)
class Scores(Means):
    """Those of one case, if some of the predicted parts are removed."""

    detected: np.ndarray
    """(C,) whether DETECTED_SHARE of each connected part of the truth, however small, is there."""


def gather(
    answers: np.ndarray,
    truth: np.ndarray,
    regions: Regions,
    spacing_mm: Spacing,
) -> Evidence:
    """The evidence of probabilities `(X, Y, Z, R)` in the order of `regions` beside the true label
    `(X, Y, Z)`. `spacing_mm` is as in `score_region`."""
    plain = PostProcessing().paint(answers, regions, spacing_mm)
    nested = PostProcessing(nested=True).paint(answers, regions, spacing_mm)
    parts = _parts(plain, answers, truth, spacing_mm, regions)
    if np.array_equal(plain, nested):
        return Evidence(voxel_mm3(spacing_mm), parts)
    nested_parts = _parts(nested, answers, truth, spacing_mm, regions)
    return Evidence(voxel_mm3(spacing_mm), parts, nested_parts)


def evidence_from_json(content: Any, regions: Regions) -> Evidence:
    """Parsed JSON of `Evidence.to_json`. Raises ValueError if it is damaged or of other regions."""
    evidence = typed(content, Evidence)
    for parts in (evidence.plain, evidence.nested):
        if parts is None:
            continue
        if set(parts) != set(regions):
            rule = f"evidence must be of the regions {', '.join(regions)}"
            raise ValueError(f"{rule}, got {', '.join(parts) or 'none'}")
        for name, larger in larger_regions(regions).items():
            if set(parts[name].inside) != set(larger):
                rule = f"evidence of {name} must tell where its parts are in {larger}"
                raise ValueError(f"{rule}, got {list(parts[name].inside)}")
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
    """`Parts` as arrays, to be scored many times."""

    def __init__(self, parts: Parts, mm3: float):
        lesions = np.array(parts.lesion_voxels, np.int64)
        voxels = np.array(parts.voxels, np.int64)
        lesion, part, shared = np.reshape(parts.lesion_pairs, (-1, 3)).astype(np.int64).T
        counted = lesions * mm3 > LESION_MM3
        self.matching = Matching(lesions, counted, voxels, voxels * mm3, lesion, part, shared)
        self.probability = np.array(parts.probability, float)
        self.inside = {name: np.array(index, np.int64) for name, index in parts.inside.items()}
        self.component_voxels = np.array(parts.component_voxels, np.int64)
        pairs = np.reshape(parts.component_pairs, (-1, 3)).astype(np.int64)
        self.component, self.component_part, self.component_shared = pairs.T

    def scores(self, kept: np.ndarray) -> Scores:
        """The scores if only the parts of `kept` (P,) are left."""
        matching = self.matching
        pairs = kept[self.component_part]
        answered = np.bincount(
            self.component[pairs],
            weights=self.component_shared[pairs],
            minlength=len(self.component_voxels),
        )
        detected = answered >= DETECTED_SHARE * self.component_voxels
        of_lesions = matching.lesions(kept)
        dice = matching.dice(kept)
        return Scores(of_lesions.dice, float(of_lesions.false_positives), dice, detected)


def _parts(
    label: np.ndarray,
    answers: np.ndarray,
    truth: np.ndarray,
    spacing_mm: Spacing,
    regions: Regions,
) -> Dict[str, Parts]:
    """Region, the largest first -> its parts in a painted label."""
    # Lesions grow together inside of this box.
    box = bounding_box((label > 0) | (truth > 0)).slices(label.shape)
    numbered: Dict[str, np.ndarray] = {}
    parts_of = {}
    for name, larger in larger_regions(regions).items():
        parts = connected_parts(region_mask(label[box], regions[name]))
        numbered[name] = parts
        inside = {}
        for other in larger:
            index = np.zeros(parts.max() + 1, np.int64)
            index[parts] = numbered[other]  # index[0], of voxels in no part, means nothing
            inside[other] = tuple((index[1:] - 1).tolist())
        true = region_mask(truth[box], regions[name])
        matching = match_lesions(true, parts, spacing_mm)
        components = connected_parts(true)
        both = true & (parts > 0)
        touching = np.stack([components[both], parts[both]])
        pairs, shared = np.unique(touching, axis=1, return_counts=True)
        answer = answers[box][..., list(regions).index(name)]
        probability = largest_probability(answer, parts)
        parts_of[name] = Parts(
            voxels=tuple(matching.part_voxels.tolist()),
            probability=tuple(probability.tolist()),
            inside=inside,
            lesion_voxels=tuple(matching.truth_voxels.tolist()),
            lesion_pairs=_pairs(matching.lesion, matching.part, matching.shared_voxels),
            component_voxels=tuple(np.bincount(components.ravel())[1:].tolist()),
            component_pairs=_pairs(*(pairs - 1), shared),
        )
    return parts_of


def _pairs(owner: np.ndarray, part: np.ndarray, shared: np.ndarray) -> Pairs:
    """Indices (N,) of true ones and of parts, and voxels (N,) that they share, as in `Parts`."""
    return tuple(map(tuple, np.stack([owner, part, shared], axis=1).astype(int).tolist()))
