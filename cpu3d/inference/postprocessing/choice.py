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
from typing import Dict, Iterable, List, Sequence, Tuple

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
from cpu3d.settings import LEAST_CASES
from cpu3d.util.records import count

MARGIN = 3  # true lesions must be larger than this many times the bound
RISK = 0.1
"""What rules by size may cost as many new cases, in lesion-wise Dice: a lesion of two is a half,
and rules of three phantoms took one in 5 % of other phantoms (records/log.md)."""
SURE = 0.95  # probability

NONE_GAINS = "none gains"

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
    """The post-processing that the rules at the top of this file choose on at least one case.

    `alone`: the network answers alone. The mean of several networks is less sure of what one of
    them misses, so that rules which ask how sure it is do not hold for it, and none is tried.
    """
    search = RuleSearch(evidences, regions)
    rules: Rules = {}
    without: Dict[str, str] = {}
    cases_with = {}
    below = codes_below(regions)
    for name in larger_regions(regions):
        cases_with[name] = sum(evidence.has(name) for evidence in evidences)
        if name not in below:
            without[name] = "other regions would lose the same voxels"
        elif cases_with[name] < LEAST_CASES:
            without[name] = too_few(cases_with[name])
        else:
            rules, why = search.with_rule(rules, name, alone)
            if name not in rules:
                without[name] = why
    before = means_of(evidences, PostProcessing(), regions)
    after = means_of(evidences, PostProcessing(rules), regions)
    for name, why in without.items():
        if why == NONE_GAINS and after[name].lesion_dice > before[name].lesion_dice:
            without[name] = "what larger regions lose is enough"
    off = "" if rules else f"no rule for {reasons(without)}"
    return Choice(PostProcessing(rules, off, without), before, after, cases_with)


def too_few(cases: int) -> str:
    """The reason why a region that so many cases have has no rule."""
    return f"in {count(cases, 'validation case')}, {LEAST_CASES} are needed"


class RuleSearch:
    """Tries rules on cases."""

    def __init__(self, evidences: Sequence[Evidence], regions: Regions):
        self.evidences = evidences
        self.regions = regions

    def with_rule(self, rules: Rules, name: str, alone: bool) -> Tuple[Rules, str]:
        """`rules` with one for a region, and why there is none if there is none."""
        whys = []
        if alone:
            unsure = [Rule(share, SURE) for share in SHARES]
            rules, why = self._with_best(rules, name, unsure, 0.0)
            whys.append(why)
        small = [Rule(share) for share in SHARES]
        rules, why = self._with_best(rules, name, small, RISK)
        whys.append(why)
        rule = rules.get(name, Rule())
        whole = [replace(rule, region_mm3=volume) for volume in REGION_MM3]
        rules, why = self._with_best(rules, name, whole, RISK)
        whys.append(why)
        return rules, next((why for why in whys if why != NONE_GAINS), NONE_GAINS)

    def _with_best(
        self, rules: Rules, name: str, tried: Iterable[Rule], more_than: float
    ) -> Tuple[Rules, str]:
        """`rules` with the best of those tried for a region, and why if none is taken. All cases
        together must gain `more_than` this in the region."""
        before = self._scores(rules)
        why = NONE_GAINS
        gain_of: Dict[Rule, float] = {}
        for rule in tried:
            scores = self._scores({**rules, name: rule})
            gains = _gains(scores, before)
            larger = replace(rule, share=MARGIN * rule.share, region_mm3=MARGIN * rule.region_mm3)
            if gains[name] <= 0:
                continue
            if gains[name] * len(self.evidences) <= more_than:
                if why == NONE_GAINS:
                    why = "none gains as much as it risks"
            elif (
                min(gains.values()) < 0
                or _is_lesion_lost(scores, before)
                or _is_lesion_lost(self._scores({**rules, name: larger}), before)
            ):
                why = "each that gains takes a true lesion or lowers another region"
            else:
                gain_of[rule] = sum(gains.values())
        if not gain_of:
            return rules, why
        most = max(gain_of.values())
        equal = [rule for rule, gain in gain_of.items() if round(most - gain, 9) <= 0]
        return {**rules, name: equal[(len(equal) - 1) // 2]}, ""

    def _scores(self, rules: Rules) -> Cases:
        chosen = PostProcessing(rules)
        return [evidence.scores(chosen, self.regions) for evidence in self.evidences]


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
