"""What a resolution study comes to, in sentences that its numbers decide. No TensorFlow.

Two arms are told apart by the rule that tells variants apart, `cpu3d.compare.statistics.Difference.is_clear`: the 95 %
interval of their difference, over seeds and cases, leaves out zero, and seeds alone do not make as much. With one seed
nothing is. Nothing is corrected for the number of arms, so a narrow finding is a hint.
"""

from typing import List, Optional, Sequence, Tuple

import numpy as np

from cpu3d.compare.limits import caveats
from cpu3d.compare.statistics import Difference, mean_and_sd, paired_difference
from cpu3d.compare.study.learning_rates import is_at_an_end, winner
from cpu3d.compare.study.result import Arm, Study
from cpu3d.inference.evaluate import UNTOUCHED
from cpu3d.util.words import listed
from memory_estimator.units import GIB


def sentences(study: Study) -> List[str]:
    """The verdict: Dice over resolution for each batch, over batches for each resolution, rates, cost, and caveats."""
    several = len(study.batches) > 1
    lines = []
    for batch in study.batches:
        arms = study.at_batch(batch)
        if len(arms) > 1:
            lines.append((f"Batch {batch}: " if several else "") + _over_resolution(arms))
            lines.append((f"Batch {batch}: " if several else "") + _rates(arms))
    for resolution in study.resolutions if several else ():
        arms = study.at_resolution(resolution)
        if len(arms) > 1:
            lines.append(f"Resolution {resolution:g}: {_over_batch(arms)}")
    lines += _cost(study.at_batch(study.batches[0]))
    lines += _caveats(study)
    return [line[0].upper() + line[1:] for line in lines if line]


def limits(study: Study) -> List[str]:
    """What the numbers cannot say, given how they were come by."""
    about, lines = study.about, []
    at_first = study.at_batch(study.batches[0])
    low, high = at_first[0], at_first[-1]
    if low is not high and low.median("train_s") and high.median("train_s"):
        times = high.median("train_s") / low.median("train_s")
        lines.append(
            f"Equal data is not equal time: a run at resolution {high.resolution:g} took {times:.2g} times the seconds "
            f"of one at {low.resolution:g}, which could have trained on."
        )
    many, few = study.arms[0], study.arms[-1]  # by batch
    if many.steps != few.steps:
        lines.append(
            f"Equal data is not equally many steps: {many.steps:,} at batch {many.batch}, {few.steps:,} at {few.batch}."
        )
    if any(arm.trials for arm in study.arms):
        lines.append(
            f"The search has one seed, {100 * about['search_share']:g} % of a full run's steps and the "
            f"{about['cases']['val']} validation cases: what suits a short run may not suit a full one."
        )
    if len(study.arms) > 2:
        lines.append(
            f"The best of {len(study.arms)} arms is picked by the scores that are shown, which flatters it; intervals "
            "are of one difference each, and of twenty that are all 0, one leaves it out."
        )
    if about["split"] != UNTOUCHED:
        lines.append(f'The cases of split "{about["split"]}" were seen while training or choosing the weights.')
    lines.append("One data set, one network, one length of training: the order may differ with more of any of them.")
    return lines


def difference(one: Arm, other: Arm) -> Difference:
    """Mean Dice of `one` less that of `other`, paired by seed and case."""
    return paired_difference(*(np.array([run.by_case() for run in arm.runs]) for arm in (one, other)))


def told_apart(best: Arm, others: Sequence[Arm]) -> List[Arm]:
    """Those of `others` whose difference from `best` is more than chance."""
    return [arm for arm in others if difference(best, arm).is_clear]


def rates_as_good(arm: Arm, noise: Optional[float]) -> List[float]:
    """The rates of the arm's search whose Dice is within `noise` of the best: the search cannot tell them apart."""
    best = winner(arm.trials).dice
    return [
        trial.rate
        for trial in arm.trials
        if trial.dice is not None and trial.rate not in arm.diverged and best - trial.dice <= (noise or 0)
    ]


def seed_noise(arms: Sequence[Arm]) -> Optional[float]:
    """Standard deviation over seeds of the full runs' best validation Dice, pooled over arms; None with one seed.

    The search has one seed, so how much its short runs vary is not known; they may well vary more.
    """
    return _pooled([[run.val_dice for run in arm.runs if run.val_dice is not None] for arm in arms])


# --- Private helpers ---


def _over_resolution(arms: Sequence[Arm]) -> str:
    best, others = _best_and_others(arms)
    highest = f"the highest mean is {best.dice:.3f} at resolution {best.resolution:g}"
    if len(best.runs) == 1:
        return f"{highest}, {_lower(best, others)}; one seed, so nothing is told apart."
    apart = told_apart(best, others)
    level = [arm for arm in others if arm not in apart]
    if len(level) == len(others):
        return (
            f"within the noise of seeds and cases ({_noise(best, others)}), no resolution from "
            f"{arms[0].resolution:g} to {arms[-1].resolution:g} is told apart: {highest}, {_lower(best, others)}."
        )
    at = arms.index(best)
    beside = arms[max(at - 1, 0) : at] + arms[at + 1 : at + 2]
    steps = np.diff([arm.dice for arm in arms])
    shape = "is highest at"  # and no more than that where a neighbour may be as good
    if not any(arm in level for arm in beside):
        if 0 < at < len(arms) - 1:
            shape = "peaks at"
        elif (steps > 0).all():
            shape = "rises to"
        elif (steps < 0).all():
            shape = "falls from"
    text = f"Dice {shape} resolution {best.resolution:g}, with {best.dice:.3f}: {_lower(best, apart)}"
    return text + (f"; not told apart from it: {_lower(best, level)}." if level else ".")


def _over_batch(arms: Sequence[Arm]) -> str:
    best, others = _best_and_others(arms)
    if len(best.runs) == 1:
        highest = f"the highest mean is {best.dice:.3f} with batch {best.batch}"
        return f"{highest}, {_lower(best, others)}; one seed, so nothing is told apart."
    apart = told_apart(best, others)
    level = [arm for arm in others if arm not in apart]
    if not apart:
        names = listed(arm.batch for arm in arms)
        return (
            f"batches {names} are not told apart ({_noise(best, others)}); {best.batch} has {best.dice:.3f}, "
            f"{_lower(best, others)}."
        )
    text = f"with equal data batch {best.batch} is best, with {best.dice:.3f}: {_lower(best, apart)}"
    return text + (f"; not told apart from it: {_lower(best, level)}." if level else ".")


def _noise(best: Arm, others: Sequence[Arm]) -> str:
    """What seeds alone may make of the differences to the best: the most of them."""
    return f"seeds alone may make {max(difference(best, arm).seed_bound or 0 for arm in others):.3f}"


def _best_and_others(arms: Sequence[Arm]) -> Tuple[Arm, List[Arm]]:
    best = max(arms, key=lambda arm: arm.dice)
    return best, [arm for arm in arms if arm is not best]


def _lower(best: Arm, others: Sequence[Arm]) -> str:
    """ "0.5 is 0.041 lower (95 % 0.020 to 0.063)", for each; by its batch where the resolution is the same."""
    parts = []
    for other in others:
        found = difference(best, other)
        between = " (95 % {:.3f} to {:.3f})".format(*found.interval) if found.interval else ""
        name = f"batch {other.batch}" if other.resolution == best.resolution else f"{other.resolution:g}"
        parts.append(f"{name} is {found.mean:.3f} lower{between}")
    return ", ".join(parts)


def _rates(arms: Sequence[Arm]) -> str:
    searched = [arm for arm in arms if arm.trials]
    if len(searched) < 2:
        return ""
    rates = [arm.rate for arm in searched]
    if len(set(rates)) == 1:
        return f"the best learning rate is {rates[0]:g} at every resolution."
    finest = searched[-1]
    text = "the best learning rate is " + listed([f"{arm.rate:g} at {arm.resolution:g}" for arm in searched])
    ratios = [
        f"{_times(arm.rate / finest.rate)} at {arm.resolution:g}" for arm in searched[:-1] if arm.rate != finest.rate
    ]
    text += f", which is {listed(ratios)} what it is at {finest.resolution:g}"
    noise = seed_noise(arms)
    good = [set(rates_as_good(arm, noise)) for arm in searched]
    if noise is None:
        return text + "; one seed, so how much of that is chance is not known."
    full = "and short ones may vary more"
    if set.intersection(*good):
        both = listed(f"{rate:g}" for rate in sorted(set.intersection(*good)))
        return text + (
            f"; within the seed noise of full runs (Dice {noise:.3f}) {both} would have done at every resolution, "
            f"{full}."
        )
    return text + f"; no one rate is within the seed noise of full runs (Dice {noise:.3f}) of the best at all, {full}."


def _cost(arms: Sequence[Arm]) -> List[str]:
    if len(arms) < 2:
        return []
    low, high = arms[0], arms[-1]
    parts = [
        f"a step takes {low.median('step_s'):.2g} s at resolution {low.resolution:g} and {high.median('step_s'):.2g} s "
        f"at {high.resolution:g}"
    ]
    if low.median("peak_bytes") and high.median("peak_bytes"):
        peaks = [f"{arm.median('peak_bytes') / GIB:.2f}" for arm in (low, high)]
        parts.append(f"training peaks at {listed(peaks)} GiB")
    return [", ".join(parts) + "."]


def _caveats(study: Study) -> List[str]:
    lines = caveats(len(study.seeds), len(study.arms[0].runs[0].by_case())) if len(study.arms) > 1 else []
    for arm in study.arms:
        if arm.diverged:
            lost = listed(f"{rate:g}" for rate in arm.diverged)
            lines.append(
                f"At {_place(arm)} {lost} won the search but diverged in full length; {arm.rate:g}, the next best, is "
                "what was run."
            )
    ends = [arm for arm in study.arms if arm.trials and is_at_an_end(arm.trials)]
    if ends:
        where = listed(f"{arm.resolution:g} (batch {arm.batch})" for arm in ends)
        lines.append(f"The best learning rate is at an end of what was tried at {where}: a better one may lie beyond.")
    return lines


def _place(arm: Arm) -> str:
    return f"resolution {arm.resolution:g}, batch {arm.batch},"


def _pooled(groups: Sequence[Sequence[float]]) -> Optional[float]:
    """The standard deviation within groups of equal size."""
    found = [deviation for _, deviation in map(mean_and_sd, filter(None, groups)) if deviation is not None]
    return float(np.sqrt(np.mean(np.square(found)))) if found else None


def _times(ratio: float) -> str:
    return {2.0: "twice", 0.5: "half"}.get(round(ratio, 3), f"{ratio:.3g} times")
