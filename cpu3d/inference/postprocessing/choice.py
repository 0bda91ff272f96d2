"""Which rules of post-processing the evidence of labelled cases chooses.

    choice = decide_from(evidences, regions)
    choice.chosen.words, choice.before["ET"].lesion_dice, choice.after["ET"].lesion_dice

As in nnU-Net (Isensee et al. 2021), something is removed only if that helps on cases that were not
trained on. What helps is judged by the sum of Dice and of the lesion-wise Dice of BraTS 2023
(`cpu3d.inference.scores`), both 1 for a region that a case lacks and the answer too. Chosen are, in
this order: whether to nest; then for each region, from the largest to the smallest, small
components of which the network is not sure; small components of which it is; the whole region where
little of it is left. Each choice needs evidence of its own:

- At least LEAST_CASES cases have the region. Where no case has it, every component is an island,
  and a rule would take the true lesions of other cases.
- The mean of that region rises, that of no other falls. Nesting must raise each region it cuts.
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
and rules of three phantoms took one in 5 % of other phantoms (docs/log.md)."""
SURE = 0.95  # probability

NONE_GAINS = "none gains"

# The bounds that are tried.
SHARES = (0.001, 0.003, 0.01, 0.03, 0.1)
REGION_MM3 = (50, 100, 200, 500, 1000)


@dataclass(frozen=True)
class Choice:
    """Rules, and the means of all cases before and after them."""

    chosen: PostProcessing
    before: Dict[str, Means]  # region, the largest first -> means of the raw answers
    after: Dict[str, Means]
    cases_with: Dict[str, int]  # region -> cases that have it


def decide_from(evidences: Sequence[Evidence], regions: Regions, *, alone: bool = False) -> Choice:
    """The post-processing that the rules at the top of this file choose on at least one case.

    `alone`: the network answers alone. The mean of several networks is less sure of what one of
    them misses, so that rules which ask how sure it is do not hold for it, and none is tried.
    """
    jury = _Jury(evidences, regions)
    chosen = PostProcessing(nested=jury.is_nesting_evident())
    without: Dict[str, str] = {}
    below = codes_below(regions)
    for name in larger_regions(regions):
        if name not in below:
            without[name] = "other regions would lose the same voxels"
        elif jury.cases_with[name] < LEAST_CASES:
            without[name] = too_few(jury.cases_with[name])
        else:
            chosen, why = jury.with_rule(chosen, name, alone)
            if name not in chosen.rules:
                without[name] = why
    before = means_of(evidences, PostProcessing(), regions)
    after = means_of(evidences, chosen, regions)
    for name, why in without.items():
        if why == NONE_GAINS and after[name].lesion_dice > before[name].lesion_dice:
            without[name] = "what larger regions lose is enough"
    off = "" if chosen.rules or chosen.nested else f"no rule for {reasons(without)}"
    chosen = replace(chosen, off=off, without=without)
    return Choice(chosen, before, after, jury.cases_with)


def too_few(cases: int) -> str:
    """The reason why a region that so many cases have has no rule."""
    return f"in {count(cases, 'validation case')}, {LEAST_CASES} are needed"


Cases = List[Dict[str, Scores]]  # the scores of each case under some rules


class _Jury:
    """Cases that judge rules."""

    def __init__(self, evidences: Sequence[Evidence], regions: Regions):
        self.evidences = evidences
        self.regions = regions
        self.cases_with = {}
        for name in regions:
            self.cases_with[name] = sum(evidence.has(name) for evidence in evidences)

    def is_nesting_evident(self) -> bool:
        """Whether nested answers gain in each region that nesting cuts, and do no harm."""
        larger = larger_regions(self.regions)
        cut = [name for name in larger if larger[name]]
        plain = self._scores(PostProcessing())
        nested = self._scores(PostProcessing(nested=True))
        gains = _gains(nested, plain)
        is_evident = [self.cases_with[name] >= LEAST_CASES and gains[name] > 0 for name in cut]
        is_harmless = min(gains.values()) >= 0 and not _is_lesion_lost(nested, plain)
        return bool(cut) and all(is_evident) and is_harmless

    def with_rule(
        self,
        chosen: PostProcessing,
        name: str,
        alone: bool,
    ) -> Tuple[PostProcessing, str]:
        """`chosen` with a rule for a region, and why there is none if there is none."""
        whys = []
        if alone:
            unsure = [Rule(share=share, stays_from=SURE) for share in SHARES]
            chosen, why = self._with_best(chosen, name, unsure, 0.0)
            whys.append(why)
        small = [Rule(share=share) for share in SHARES]
        chosen, why = self._with_best(chosen, name, small, RISK)
        whys.append(why)
        (rule,) = chosen.rules.get(name, (Rule(),))
        whole = [replace(rule, region_mm3=volume) for volume in REGION_MM3]
        chosen, why = self._with_best(chosen, name, whole, RISK)
        whys.append(why)
        return chosen, next((why for why in whys if why != NONE_GAINS), NONE_GAINS)

    def _with_best(
        self, chosen: PostProcessing, name: str, rules: Iterable[Rule], more_than: float
    ) -> Tuple[PostProcessing, str]:
        """`chosen` with the best of the rules for a region, and why if none is taken. All cases
        together must gain `more_than` this in the region, compared with `chosen`."""
        before = self._scores(chosen)
        gains_of: Dict[Rule, Dict[str, float]] = {}
        why = NONE_GAINS
        for rule in rules:
            gains = _gains(self._scores(_changed(chosen, name, rule)), before)
            if gains[name] <= 0:
                continue
            if gains[name] * len(self.evidences) <= more_than:
                why = "none gains as much as it risks"
            else:
                gains_of[rule] = gains
        harmless = {
            rule: sum(gains.values())
            for rule, gains in gains_of.items()
            if min(gains.values()) >= 0 and self._keeps_lesions(chosen, name, rule, before)
        }
        if not harmless:
            if gains_of:
                why = "each that gains takes a true lesion or lowers another region"
            return chosen, why
        most = max(harmless.values())
        equal = [rule for rule, gain in harmless.items() if round(most - gain, 9) <= 0]
        return _changed(chosen, name, equal[(len(equal) - 1) // 2]), ""

    def _keeps_lesions(self, chosen: PostProcessing, name: str, rule: Rule, before: Cases) -> bool:
        """Whether a rule for a region, also with larger bounds, leaves all that was found."""
        larger = replace(rule, share=MARGIN * rule.share, region_mm3=MARGIN * rule.region_mm3)
        tried = [self._scores(_changed(chosen, name, each)) for each in (rule, larger)]
        return not any(_is_lesion_lost(scores, before) for scores in tried)

    def _scores(self, chosen: PostProcessing) -> Cases:
        return [evidence.scores(chosen, self.regions) for evidence in self.evidences]


def _changed(chosen: PostProcessing, name: str, rule: Rule) -> PostProcessing:
    """`chosen` with this rule for a region."""
    return replace(chosen, rules={**chosen.rules, name: (rule,)})


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
    for case, was in zip(scores, before):
        for name in case:
            if (was[name].detected & ~case[name].detected).any():
                return True
    return False
