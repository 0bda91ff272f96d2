"""What a resolution study comes to, in sentences that its numbers decide. No TensorFlow.

Two arms are told apart where the 95 % interval of their difference, over seeds and cases, leaves out zero and where the
difference is more than seeds alone may make (`seed_bound`): of two or three seeds the interval sees too little. Nothing
is corrected for the number of arms, so a narrow finding is a hint.
"""

from typing import List, Optional, Sequence, Tuple

import numpy as np

from cpu3d.compare.learning_rates import is_at_an_end, winner
from cpu3d.compare.statistics import Difference, paired_difference
from cpu3d.compare.study import Arm, Study, spread
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


def difference(one: Arm, other: Arm) -> Difference:
    """Mean Dice of `one` less that of `other`, paired by seed and case."""
    return paired_difference(*(np.array([run.by_case() for run in arm.runs]) for arm in (one, other)))


def seed_bound(arms: Sequence[Arm]) -> Optional[float]:
    """The difference of two arms' mean Dice that seeds alone exceed once in 20 times; None with one seed.

    Fisher's least significant difference, from the standard deviation over seeds pooled over `arms`.
    """
    from scipy.stats import t  # on use: it is slow to import

    seeds, noise = len(arms[0].runs), _pooled([arm.over_seeds() for arm in arms])
    return None if noise is None else float(t.ppf(0.975, len(arms) * (seeds - 1)) * noise * np.sqrt(2 / seeds))


def told_apart(best: Arm, others: Sequence[Arm]) -> List[Arm]:
    """Those of `others` whose difference from `best` is more than chance."""
    bound = seed_bound([best, *others]) or 0.0
    found = [(arm, difference(best, arm)) for arm in others]
    return [arm for arm, gap in found if gap.is_clear and abs(gap.mean) > bound]


def rates_as_good(arm: Arm, noise: Optional[float]) -> List[float]:
    """The rates of the arm's search whose Dice is within `noise` of the best: the search cannot tell them apart."""
    best = winner(arm.trials).dice
    return [trial.rate for trial in arm.trials if trial.dice is not None and best - trial.dice <= (noise or 0)]


def seed_noise(arms: Sequence[Arm]) -> Optional[float]:
    """Standard deviation over seeds of the best validation Dice, pooled over arms; None with one seed."""
    return _pooled([[run.val_dice for run in arm.runs if run.val_dice is not None] for arm in arms])


# --- Private helpers ---


def _over_resolution(arms: Sequence[Arm]) -> str:
    best, others = _best_and_others(arms)
    apart = told_apart(best, others)
    level = [arm for arm in others if arm not in apart]
    if len(level) == len(others):
        bound = seed_bound(arms)
        noise = "cases" if bound is None else f"seeds and cases (seeds alone may make {bound:.3f})"
        return (
            f"within the noise of {noise}, no resolution from {arms[0].resolution:g} to "
            f"{arms[-1].resolution:g} is told apart: the highest mean is {best.dice:.3f} at {best.resolution:g}, "
            f"{_lower(best, others)}."
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
    if told_apart(best, others):
        return f"with equal data batch {best.batch} is best, with {best.dice:.3f}: {_lower(best, others)}."
    bound = seed_bound(arms)
    names, noise = _listed([arm.batch for arm in arms]), "" if bound is None else f" (seeds alone may make {bound:.3f})"
    return f"batches {names} are not told apart{noise}; {best.batch} has {best.dice:.3f}, {_lower(best, others)}."


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
    text = "the best learning rate is " + _listed([f"{arm.rate:g} at {arm.resolution:g}" for arm in searched])
    ratios = [
        f"{_times(arm.rate / finest.rate)} at {arm.resolution:g}" for arm in searched[:-1] if arm.rate != finest.rate
    ]
    text += f", which is {_listed(ratios)} what it is at {finest.resolution:g}"
    noise = seed_noise(arms)
    good = [set(rates_as_good(arm, noise)) for arm in searched]
    if noise is not None and set.intersection(*good):
        both = _listed([f"{rate:g}" for rate in sorted(set.intersection(*good))])
        return text + f"; within seed noise, {noise:.3f}, {both} would have done at every resolution."
    return text + (f"; no one rate is within seed noise, {noise:.3f}, of the best at all of them." if noise else ".")


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
        parts.append(f"the process peaks at {_listed(peaks)} GiB")
    return [", ".join(parts) + "."]


def _caveats(study: Study) -> List[str]:
    lines = []
    if len(study.seeds) == 1:
        lines.append("One seed: how much of this is chance cannot be said; more --seeds can.")
    ends = [arm for arm in study.arms if arm.trials and is_at_an_end(arm.trials)]
    if ends:
        where = _listed([f"{arm.resolution:g} (batch {arm.batch})" for arm in ends])
        lines.append(f"The best learning rate is at an end of what was tried at {where}: a better one may lie beyond.")
    return lines


def _pooled(groups: Sequence[Sequence[float]]) -> Optional[float]:
    """The standard deviation within groups of equal size."""
    found = [deviation for deviation in map(spread, groups) if deviation is not None]
    return float(np.sqrt(np.mean(np.square(found)))) if found else None


def _times(ratio: float) -> str:
    return {2.0: "twice", 0.5: "half"}.get(round(ratio, 3), f"{ratio:.3g} times")


def _listed(items: Sequence) -> str:
    words = [str(item) for item in items]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]
