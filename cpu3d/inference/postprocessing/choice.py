"""Which rules of post-processing the evidence of labelled cases chooses.

    choice = decide_from(evidences, regions)
    choice.chosen.words, choice.before["ET"].lesion_dice, choice.after["ET"].lesion_dice

As in nnU-Net (Isensee et al. 2021), something is removed only if that helps on cases that were not
trained on. Here the measure is the lesion-wise Dice of BraTS 2023 (`cpu3d.inference.scores`). The
choices are, in this order, whether to nest, and the rule of each region from the largest to the
smallest. A choice needs evidence of its own:

- At least LEAST_CASES cases have the region. Where no case has it, every part is an island, and a
  rule would take the true lesions of other cases.
- The mean of that region rises, that of no other falls. Nesting must raise each region it cuts.
- No true lesion that was found is lost in any case and region: neither a connected part of the
  truth, of any size, that shares a voxel with the answer, nor a lesion by the rule of BraTS.

Of these rules the one with the highest mean over all regions is taken; of equal rules a share, and
of several the middle one: as far from losing a lesion as from leaving an island in a new case.
"""

from dataclasses import dataclass
from typing import Dict, List, Mapping, Sequence, Tuple

import numpy as np

from cpu3d.inference.postprocessing.evidence import Evidence, Means, Scores, means_of
from cpu3d.inference.postprocessing.rules import (
    PostProcessing,
    Regions,
    Rule,
    codes_below,
    larger_regions,
    reasons,
)
from cpu3d.util.records import count

LEAST_CASES = 3  # cases that must have a region before anything of it is removed

# The rules that are tried.
RULES = (
    *(Rule(share=share) for share in (0.001, 0.003, 0.01, 0.03, 0.1)),
    *(Rule(mm3=mm3) for mm3 in (50, 100, 200, 400, 800)),
)


@dataclass(frozen=True)
class Choice:
    """Rules, and the means of all cases before and after them."""

    chosen: PostProcessing
    before: Dict[str, Means]  # region, the largest first -> means of the raw answers
    after: Dict[str, Means]
    cases_with: Dict[str, int]  # region -> cases that have it


Cases = List[Dict[str, Scores]]  # the scores of each case under some rules


def decide_from(evidences: Sequence[Evidence], regions: Regions) -> Choice:
    """The post-processing that the rules at the top of this file choose on at least one case."""

    def scores(**changes) -> Cases:
        tried = PostProcessing(**changes)
        return [evidence.scores(tried, regions) for evidence in evidences]

    larger = larger_regions(regions)
    cases_with = {name: sum(evidence.has(name) for evidence in evidences) for name in regions}
    plain = scores()
    nested = scores(nested=True)
    nest = _is_nesting_evident(nested, plain, larger, cases_with)
    best = nested if nest else plain
    below = codes_below(regions)
    rules: Dict[str, Tuple[Rule, ...]] = {}
    without: Dict[str, str] = {}
    for name in larger:
        if name not in below:
            without[name] = "other regions would lose the same voxels"
            continue
        if cases_with[name] < LEAST_CASES:
            without[name] = too_few(cases_with[name])
            continue
        tried = {rule: scores(nested=nest, rules={**rules, name: (rule,)}) for rule in RULES}
        gaining = [rule for rule in RULES if _gains(tried[rule], best)[name] > 0]
        harmless = [rule for rule in gaining if _is_harmless(tried[rule], best)]
        if harmless:
            gains = {rule: sum(_gains(tried[rule], best).values()) for rule in harmless}
            rule = _middle_of_best(gains)
            rules[name] = (rule,)
            best = tried[rule]
        elif gaining:
            without[name] = "each that gains takes a true lesion or lowers another region"
        else:
            without[name] = "none gains"
    off = "" if rules or nest else f"no rule for {reasons(without)}"
    chosen = PostProcessing(rules, nest, off, without)
    before = means_of(evidences, PostProcessing(), regions)
    return Choice(chosen, before, means_of(evidences, chosen, regions), cases_with)


def too_few(cases: int) -> str:
    """The reason why a region of so many cases has no rule."""
    return f"in {count(cases, 'validation case')}, {LEAST_CASES} are needed"


def _is_nesting_evident(
    nested: Cases,
    plain: Cases,
    larger: Mapping[str, Sequence[str]],
    cases_with: Mapping[str, int],
) -> bool:
    """Whether nested answers gain in each region that nesting cuts, and do no harm."""
    cut = [name for name in larger if larger[name]]
    if not cut or not _is_harmless(nested, plain):
        return False
    gains = _gains(nested, plain)
    return all(cases_with[name] >= LEAST_CASES and gains[name] > 0 for name in cut)


def _middle_of_best(gains: Mapping[Rule, float]) -> Rule:
    """Of rules with their gains the best; of equal ones a share, and of several the middle one."""
    most = max(gains.values())
    equal = [rule for rule, gain in gains.items() if round(most - gain, 9) <= 0]
    shares = [rule for rule in equal if rule.share] or equal
    return shares[(len(shares) - 1) // 2]


def _gains(scores: Cases, other: Cases) -> Dict[str, float]:
    """Region -> the gain in its mean lesion-wise Dice."""
    gains = {}
    for name in scores[0]:
        differences = [case[name].lesion_dice - before[name].lesion_dice for case, before in zip(scores, other)]
        gains[name] = round(float(np.mean(differences)), 9)
    return gains


def _is_harmless(scores: Cases, other: Cases) -> bool:
    """Whether the mean of no region falls and no true lesion that was found is lost."""
    lost = [
        (before[name].detected & ~case[name].detected).any() for case, before in zip(scores, other) for name in case
    ]
    return min(_gains(scores, other).values()) >= 0 and not any(lost)
