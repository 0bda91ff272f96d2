"""What a comparison cannot say, and what favours a side: sentences made of counts, settings and costs. Pure."""

from typing import List, Mapping, Sequence

from cpu3d.compare.statistics import RESAMPLES
from cpu3d.config import RunConfig
from cpu3d.data.words import count
from cpu3d.util.words import listed

FEW_SEEDS, FEW_CASES = 5, 10
"""Below these an interval is told to be a narrow one."""

UNEQUAL = 1.1
"""Times more voxels, or steps, than another variant that are worth a word: steps are whole, so budgets never match."""

METHOD = (
    f"Intervals: percentile bootstrap of {RESAMPLES:,} resamples of the paired differences, seeds and cases drawn with "
    "replacement and crossed (Owen 2007). With few seeds it is too narrow: of 3 seeds it is 2.7 times narrower than "
    "Student's t makes it. A difference counts where its interval leaves out 0 and it is larger than seeds alone may "
    "make it: t(0.975, n - 1) standard deviations of the n seeds' mean differences over the root of n.",
    "Both masks empty: Dice 1, HD95 0; one empty: Dice 0, HD95 the diagonal of the image, which makes means of HD95 "
    "jump.",
)
"""How it was reckoned, for every report."""


def caveats(seeds: int, cases: int) -> List[str]:
    """What so few seeds or cases leave open; belongs right beside what they are said to show."""
    lines = []
    if seeds == 1 and cases == 1:
        lines.append("One seed and one case: there is no interval, and no difference can be told from chance.")
    elif seeds == 1:
        lines.append(
            "One seed: intervals are over cases alone, how much a start matters is not known, and so nothing is told "
            "apart; more --seeds can."
        )
    elif cases == 1:
        lines.append("One case: intervals are over seeds alone, and say nothing of other cases.")
    if seeds > 1 and (seeds < FEW_SEEDS or 1 < cases < FEW_CASES):
        lines.append(
            f"{count(seeds, 'seed')} and {count(cases, 'case')}: so few make a bootstrap's interval too narrow; one "
            "that leaves out 0 counts only where the difference is also larger than seeds alone may make it."
        )
    return lines


def limits(
    configs: Mapping[str, RunConfig],
    *,
    steps: Mapping[str, float],
    voxels: Mapping[str, float],
    seconds: Mapping[str, float],
    by_time: bool,
    split: str,
    untouched: bool,
) -> List[str]:
    """What favours a side, and what the numbers cannot say. Everything is by variant, the baseline first.

    `configs` are those of a run of each variant, `steps` what it took, `voxels` what it saw, `seconds` those of its
    steps, which a budget `by_time` makes equal, where others make the voxels equal.
    """
    lines = favours(configs, steps)
    low, high = min(voxels.values()), max(voxels.values())
    if high > UNEQUAL * low:
        saw = f"from {low / 1e6:,.1f} to {high / 1e6:,.1f} million voxels"
        lines.append(f"In equal time variants saw {saw}." if by_time else f"Variants saw {saw}, unequally.")
    low, high = min(seconds.values()), max(seconds.values())
    if by_time and high > UNEQUAL * low:
        lines.append(f"The budget was equal time, and steps took from {low:,.0f} to {high:,.0f} s, unequally.")
    if not untouched:
        lines.append(f'The cases of split "{split}" were seen while training or choosing the weights.')
    lines.append("Intervals are of one difference each; of twenty that are all 0, one leaves it out.")
    lines.append("One data set, one network, one budget: the order may differ with more of any of them.")
    return lines


def favours(configs: Mapping[str, RunConfig], steps: Mapping[str, float]) -> List[str]:
    """What is not the same for all variants though it is not what is compared, a sentence each."""
    baseline, *others = configs
    lines = []
    for variant in others:
        if steps[variant] > UNEQUAL * steps[baseline] or steps[baseline] > UNEQUAL * steps[variant]:
            many, few = sorted((variant, baseline), key=lambda name: -steps[name])
            rates = [configs[name].learning_rate for name in (many, few)]
            alike = rates[0] == rates[1]
            rate = f"the same learning rate, {rates[0]:g}" if alike else f"learning rates of {listed(rates)}"
            lines.append(
                f"{many} takes {steps[many] / steps[few]:.3g} times the optimizer steps of {few}, {steps[many]:,.0f} "
                f"against {steps[few]:,.0f}, at {rate}, which {'is' if alike else 'are'} searched for neither."
            )
    shares = {variant: config.foreground if config.is_patch else 0 for variant, config in configs.items()}
    for share in sorted(set(shares.values()) - {0}) if len(set(shares.values())) > 1 else ():
        own = [variant for variant in shares if shares[variant] == share]
        lines.append(
            f"Of the patches of {listed(own)}, {share:.0%} are drawn around labelled voxels, which are so seen more "
            "often than in whole volumes of as many voxels."
        )
    patches = [variant for variant, config in configs.items() if config.is_patch]
    if 0 < len(patches) < len(configs):
        lines.append(
            "The budget is of steps alone: validation is outside it, and that of "
            f"{listed(patches)} is by a sliding window, as prediction is, which costs more than one pass."
        )
    devices = {variant: config.device for variant, config in configs.items()}
    if len(set(devices.values())) > 1:
        where = listed(f"{variant} on {device}" for variant, device in devices.items())
        lines.append(f"Trained on different devices, {where}: seconds and memory are of different machines.")
    dtypes = {variant: config.unet.dtype for variant, config in configs.items()}
    if len(set(dtypes.values())) > 1:
        how = listed(f"{variant} in {dtype}" for variant, dtype in dtypes.items())
        lines.append(f"Computed in different precision, {how}: some of a difference may be rounding.")
    return lines


def unlike_devices(configs: Sequence[RunConfig]) -> bool:
    """Whether these ran on devices of different kinds, a CPU and cards: their costs are then no ratio."""
    return len({config.device.partition(":")[0] for config in configs}) > 1
