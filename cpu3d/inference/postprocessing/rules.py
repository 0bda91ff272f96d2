"""Rules of post-processing: what of a region is removed from an answer, and what it becomes.

    chosen = PostProcessing({"ET": Rule(region_mm3=200)})
    label = chosen.paint(probabilities, regions, spacing_mm)

- *Components* of a region are connected by 26 neighbours. A rule removes those below a share of the
  region's largest component. A small component of which the network is sure may stay.
- A rule may also remove a whole region, of which too little is left in all: where nothing enhances,
  a network often answers with some voxels of ET (Isensee et al. 2020, "nnU-Net for brain tumor
  segmentation").
- What is removed takes the code of the next larger region that holds it: small ET becomes the rest
  of TC. The smaller regions within it go with it.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Sequence

import numpy as np
from scipy import ndimage

from cpu3d.data.labels import label_from_regions, painted_codes, region_mask
from cpu3d.data.region import bounding_box
from cpu3d.inference.scores import Spacing, connected_components, voxel_mm3

Regions = Mapping[str, Sequence[int]]  # region -> its label codes
ROUNDING = 1e-9  # sizes are exact to this share only


@dataclass(frozen=True)
class Rule:
    """Removes the small components of a region, and what is left if that is too little in all."""

    share: float = 0.0  # of the region's largest component: those below it go
    stays_from: Optional[float] = None
    """Probability: a small component in which a voxel has it or more stays. None: none does."""
    region_mm3: float = 0.0  # all that is left goes if it is below this

    def __str__(self) -> str:
        text = f"{100 * self.share:g} % of the largest part" if self.share else ""
        if self.stays_from is not None:
            text += f" where no probability reaches {self.stays_from:g}"
        if self.region_mm3:
            whole = f"{self.region_mm3:g} mm\u00b3 in all"
            text = f"{text}, or {whole}" if text else whole
        return text

    def removed(self, sizes_mm3: np.ndarray, probability: np.ndarray) -> np.ndarray:
        """(P,) which components of a region go that have these sizes and largest probabilities
        (P,)."""
        removed = sizes_mm3 < self.share * sizes_mm3.max(initial=0.0) * (1 - ROUNDING)
        if self.stays_from is not None:
            removed &= probability < self.stays_from
        if sizes_mm3[~removed].sum() < self.region_mm3 * (1 - ROUNDING):
            removed[:] = True
        return removed


def largest_probability(answer: np.ndarray, components: np.ndarray) -> np.ndarray:
    """(P,) the largest of a region's probabilities `(X, Y, Z)` in each of its
    `connected_components`."""
    numbers = np.arange(1, components.max(initial=0) + 1)
    return np.asarray(ndimage.maximum(answer, components, numbers), np.float64)


@dataclass(frozen=True)
class PostProcessing:
    """The changes to an answer when it is painted."""

    rules: Dict[str, Rule] = dataclasses.field(default_factory=dict)  # by region
    off: str = ""  # the reason why nothing is done, else empty

    def paint(self, answers: Any, regions: Regions, spacing_mm: Spacing) -> np.ndarray:
        """Paint probabilities `(X, Y, Z, R)` in the order of `regions` into a label `(X, Y, Z)`, as
        `label_from_regions` does, without what is removed. `spacing_mm` is as in `score_region`.
        `answers` stay as they are."""
        label = label_from_regions(answers, regions)
        if self.off or not self.rules:
            return label
        box = bounding_box(label > 0).slices(label.shape)
        for name, code_below in codes_below(regions).items():
            if name in self.rules:
                components = connected_components(region_mask(label[box], regions[name]))
                sizes_mm3 = np.bincount(components.ravel())[1:] * voxel_mm3(spacing_mm)
                answer = answers[..., list(regions).index(name)][box]
                probability = largest_probability(answer, components)
                removed = self.rules[name].removed(sizes_mm3, probability)
                is_removed = np.concatenate([[False], removed])  # by number; 0 is background
                label[box][is_removed[components]] = code_below
        return label

    @property
    def words(self) -> str:
        """In a line, as "removes parts of WT below 1 % of the largest part" or "off: " and why."""
        if self.off:
            return f"off: {self.off}"
        removed = [f"{name} below {rule}" for name, rule in self.rules.items()]
        return f"removes parts of {'; of '.join(removed)}"


RAW = PostProcessing(off="--raw")


def common_rules(several: Sequence[PostProcessing]) -> PostProcessing:
    """The removals that several runs have in common, for their joint answer; off if any of them is,
    for its reason. A rule that asks how sure a network is does not hold for several: where one of
    them misses a lesion, their mean is less sure of it."""
    off = [each for each in several if each.off]
    if off or len(several) == 1:
        return off[0] if off else several[0]
    rules = {}
    for name in several[0].rules:
        alike = [each.rules[name] for each in several if name in each.rules]
        if len(alike) == len(several) and all(rule.stays_from is None for rule in alike):
            share = min(rule.share for rule in alike)
            rules[name] = Rule(share, region_mm3=min(rule.region_mm3 for rule in alike))
    return PostProcessing(rules, "" if rules else "the runs have no rule in common")


def larger_regions(regions: Regions) -> Dict[str, List[str]]:
    """Region, that of the most codes first -> the regions that hold it and more, the smallest
    first."""
    members = {name: set(codes) for name, codes in regions.items()}
    names = sorted(regions, key=lambda name: -len(members[name]))
    larger = {}
    for name in names:
        larger[name] = [other for other in reversed(names) if members[other] > members[name]]
    return larger


def codes_below(regions: Regions) -> Dict[str, int]:
    """Region, the largest first -> the code of voxels removed from it: that of the next larger
    region, or background. Only for regions whose voxels can be removed without a change to any
    other region but those within them."""
    painted = painted_codes(regions)
    below = {}
    members = {name: set(codes) for name, codes in regions.items()}
    for name, larger in larger_regions(regions).items():
        code = painted.get(larger[0]) if larger else 0
        holders = {other for other in regions if code in members[other]}
        others = [codes for other, codes in members.items() if other != name]
        is_apart = all(
            codes > members[name] or codes < members[name] or codes.isdisjoint(members[name])
            for codes in others
        )
        if code is not None and is_apart and holders == set(larger):
            below[name] = code
    return below
