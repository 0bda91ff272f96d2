"""What a comparison says, in words that follow from its numbers and say no more. Pure functions."""

from typing import Dict, List, Mapping, Optional, Sequence

from cpu3d.compare.gather import MEAN
from cpu3d.compare.statistics import LARGER_IS_BETTER, Difference

FEW_SEEDS, FEW_CASES = 5, 10
"""Below these an interval is told to be a narrow one."""

UNEQUAL = 1.1
"""Times more voxels than another variant saw that are worth a word: steps are whole, so budgets never match quite."""

NAMES = {"dice": "Dice", "hd95_mm": "HD95", "surface_dice": "surface Dice"}


def verdict(differences: Mapping[str, Mapping[str, Mapping[str, Difference]]], baseline: str) -> List[str]:
    """A sentence for all that differs from the baseline by more than its interval, and one for all that does not.

    `differences` is variant -> region -> metric -> Difference.
    """
    return [line for variant, regions in differences.items() for line in _of_variant(variant, regions, baseline)]


def cost_words(costs: Mapping[str, Mapping[str, Optional[float]]], baseline: str) -> List[str]:
    """What every variant takes of the baseline's seconds and memory. `costs` is variant -> name -> value."""
    lines = []
    for variant, own in costs.items():
        parts = []
        for name, words in (
            ("case_train_s", "the seconds to train a case once"),
            ("train_peak_bytes", "the memory to train"),
            ("case_predict_s", "the seconds to predict one"),
            ("predict_peak_bytes", "the memory to predict"),
        ):
            if variant != baseline and own.get(name) and costs[baseline].get(name):
                parts.append(f"{own[name] / costs[baseline][name]:.2f} x {words}")
        if parts:
            lines.append(f"{variant} takes, against {baseline}, {_listed(parts)}.")
    return lines


def limits(seeds: int, cases: int, *, split: str, untouched: bool, voxels: Sequence[float]) -> List[str]:
    """What the numbers cannot say, given how many there are. `voxels` are those that a run of each variant saw."""
    lines = []
    if seeds == 1 and cases == 1:
        lines.append("One seed and one case: there is no interval, and no difference can be told from chance.")
    elif seeds == 1:
        lines.append("One seed: intervals are over cases alone, and how much a start matters is not known.")
    elif cases == 1:
        lines.append("One case: intervals are over seeds alone, and say nothing of other cases.")
    if 1 < seeds < FEW_SEEDS or 1 < cases < FEW_CASES:
        lines.append(
            f"{_count(seeds, 'seed')} and {_count(cases, 'case')}: so few make a bootstrap's interval too narrow; read "
            "one that just leaves out 0 as undecided."
        )
    lines.append("Intervals are of one difference each; of twenty that are all 0, one leaves it out.")
    if max(voxels) > UNEQUAL * min(voxels):
        lines.append(
            f"Variants saw from {min(voxels) / 1e6:,.1f} to {max(voxels) / 1e6:,.1f} million voxels, unequally."
        )
    if not untouched:
        lines.append(f'The cases of split "{split}" were seen while training or choosing the weights.')
    lines.append("One data set, one network, one budget: the order may differ with more of any of them.")
    return lines


# --- Private helpers ---


def _of_variant(variant: str, regions: Mapping[str, Mapping[str, Difference]], baseline: str) -> List[str]:
    lines, unclear = [], {}
    names = sorted(regions, key=lambda region: region != MEAN)  # the mean first
    single = all(one.interval is None for metrics in regions.values() for one in metrics.values())
    for metric in NAMES:
        moved: Dict[str, List[str]] = {}
        for region in names:
            difference = regions[region][metric]
            if difference.is_clear or (single and difference.mean):
                way = _way(metric, difference.mean)
                moved.setdefault(way, []).append(f"by {_size(difference, metric)} in {region} {NAMES[metric]}")
            else:
                unclear.setdefault(metric, []).append(region)
        lines += [f"{variant} {way} than {baseline} {_listed(parts)}." for way, parts in moved.items()]
    if unclear:
        everywhere = all(len(unclear.get(metric, ())) == len(regions) for metric in NAMES)
        where = [f"{NAMES[metric]} ({_which(some, regions)})" for metric, some in unclear.items()]
        same = all(regions[region][metric].mean == 0 for metric, some in unclear.items() for region in some)
        lines.append(
            f"{variant}: no difference to {baseline}{'' if same else ' beyond the interval'} in "
            f"{'any score' if everywhere else _listed(where)}{_dice_of(regions, unclear)}."
        )
    if single:
        lines.append(f"{variant}: one case of one seed has no interval, so none of this can be told from chance.")
    return lines


def _way(metric: str, mean: float) -> str:
    if LARGER_IS_BETTER[metric]:
        return "scores higher" if mean > 0 else "scores lower"
    return "is further off" if mean > 0 else "is closer"


def _size(difference: Difference, metric: str) -> str:
    """ "0.210 (0.101 to 0.334)": how large, without its sign."""
    digits, unit = (1, " mm") if metric == "hd95_mm" else (3, "")
    size = f"{abs(difference.mean):.{digits}f}{unit}"
    if difference.interval is None:
        return size
    low, high = sorted(map(abs, difference.interval))
    return f"{size} ({low:.{digits}f} to {high:.{digits}f})"


def _which(some: Sequence[str], regions: Mapping[str, Mapping[str, Difference]]) -> str:
    return "all" if len(some) == len(regions) > 1 else ", ".join(some)


def _dice_of(regions: Mapping[str, Mapping[str, Difference]], unclear: Dict[str, List[str]]) -> str:
    """The interval of the mean Dice, or of the only region's, where that is among what is unclear."""
    region = MEAN if MEAN in regions else next(iter(regions))
    difference = regions[region]["dice"]
    if region not in unclear.get("dice", ()) or difference.interval is None or not any(difference.interval):
        return ""
    low, high = difference.interval
    return f"; {region} Dice {difference.mean:+.3f} ({low:+.3f} to {high:+.3f})"


def _listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
