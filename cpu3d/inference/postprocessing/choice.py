"""Which rules of post-processing the evidence of labelled cases chooses.

    choice = best_rules(evidences, regions)
    choice.chosen.words, choice.before["ET"].lesion_dice, choice.after["ET"].lesion_dice

As in nnU-Net (Isensee et al. 2021), something is removed only if that helps on cases that were not
trained on. What helps is judged by the sum of Dice and of the lesion-wise Dice of BraTS 2023
(`cpu3d.inference.scores`), both 1 for a region that a case lacks and the answer too. Tried are, for
each region from the largest to the smallest, in this order: small components of which the network
is not sure; small components of which it is; the whole region where little of it is left. Each
choice needs evidence of its own:

- At least LEAST_CASES cases have the region. Where no case has it, every component is an island,
  and a rule would take the true lesions of other cases.
- The mean of that region rises, that of no other falls.
- No true lesion that was found is lost in any case and region, not even with bounds MARGIN times as
  large: no component of the truth, however small, of which the answer had a tenth.
- Small components of which the network is sure, and whole regions, might be true in the next case.
  So the cases must gain more by their rule, all together, than RISK.

Of these rules the one with the highest mean over all regions is taken, and of several equal ones
the middle one: as far from losing a lesion as from leaving an island in a new case.
"""

from dataclasses import dataclass, replace
from typing import Dict, List, Sequence

import numpy as np

from cpu3d.inference.postprocessing.evidence import Evidence, Means, Scores, means_of
from cpu3d.inference.postprocessing.rules import (
    PostProcessing,
    Regions,
    Rule,
    codes_below,
    larger_regions,
)
from cpu3d.settings import LEAST_CASES

MARGIN = 3  # true lesions must be larger than this many times the bound
RISK = 0.1
"""What rules by size may cost as many new cases, in lesion-wise Dice: a lesion of two is a half,
and rules of three phantoms took one in 5 % of other phantoms (records/log.md)."""
SURE = 0.95  # probability

# The bounds that are tried.
SHARES = (0.001, 0.003, 0.01, 0.03, 0.1)
REGION_MM3 = (50, 100, 200, 500, 1000)

Rules = Dict[str, Rule]
Cases = List[Dict[str, Scores]]  # the scores of each case under some rules


@dataclass(frozen=True)
class Choice:
    """Rules, and the means of all cases before and after them."""

    chosen: PostProcessing
    before: Dict[str, Means]  # region, the largest first -> means of the raw answers
    after: Dict[str, Means]
    cases_with: Dict[str, int]  # region -> cases that have it


def best_rules(evidences: Sequence[Evidence], regions: Regions, *, alone: bool = False) -> Choice:
    """Choose post-processing by the rules at the top of this file, on at least one case.

    `alone`: the network answers alone. The mean of several networks is less sure of what one of
    them misses, so that rules which ask how sure it is do not hold for it, and none is tried.
    """
    before = _scores(evidences, {}, regions)
    rules: Rules = {}
    cases_with = {}
    removable = codes_below(regions)
    for name in larger_regions(regions):
        cases_with[name] = sum(
            bool(evidence.components[name].truth.truth_voxels) for evidence in evidences
        )
        if name not in removable or cases_with[name] < LEAST_CASES:
            continue
        if alone:
            unsure = [Rule(share, SURE) for share in SHARES]
            rules = _with_best(evidences, regions, rules, name, unsure, 0.0)
        small = [Rule(share) for share in SHARES]
        rules = _with_best(evidences, regions, rules, name, small, RISK)
        rule = rules.get(name, Rule())
        whole = [replace(rule, region_mm3=volume) for volume in REGION_MM3]
        rules = _with_best(evidences, regions, rules, name, whole, RISK)
    return Choice(
        chosen=PostProcessing(rules, "" if rules else "no rule gains on the labelled cases"),
        before=means_of(before),
        after=means_of(_scores(evidences, rules, regions)),
        cases_with=cases_with,
    )


def _with_best(
    evidences: Sequence[Evidence],
    regions: Regions,
    rules: Rules,
    name: str,
    tried: Sequence[Rule],
    least_gain: float,
) -> Rules:
    """`rules` with the best of those `tried` for a region, if there is one: all cases together must
    gain more than `least_gain` in the region."""
    before = _scores(evidences, rules, regions)
    gain_of: Dict[Rule, float] = {}
    for rule in tried:
        larger = replace(rule, share=MARGIN * rule.share, region_mm3=MARGIN * rule.region_mm3)
        gains = _gains(_scores(evidences, {**rules, name: rule}, regions), before)
        if (
            gains[name] * len(evidences) > least_gain
            and min(gains.values()) >= 0
            and not _is_lesion_lost(_scores(evidences, {**rules, name: larger}, regions), before)
        ):
            gain_of[rule] = sum(gains.values())
    most = max(gain_of.values(), default=0.0)
    equal = [rule for rule, gain in gain_of.items() if round(most - gain, 9) <= 0]
    return {**rules, name: equal[(len(equal) - 1) // 2]} if equal else rules


def _scores(evidences: Sequence[Evidence], rules: Rules, regions: Regions) -> Cases:
    return [evidence.scores(PostProcessing(rules), regions) for evidence in evidences]


def _gains(scores: Cases, before: Cases) -> Dict[str, float]:
    """Region -> the gain in the mean over cases of Dice and lesion-wise Dice together."""
    gains = {}
    for name in scores[0]:
        differences = [
            case[name].lesion_dice + case[name].dice - was[name].lesion_dice - was[name].dice
            for case, was in zip(scores, before)
        ]
        gains[name] = round(float(np.mean(differences)), 9)
    return gains


def _is_lesion_lost(scores: Cases, before: Cases) -> bool:
    """Whether any true lesion that was found is not found any more."""
    return any(
        (was[name].detected & ~case[name].detected).any()
        for case, was in zip(scores, before)
        for name in case
    )
