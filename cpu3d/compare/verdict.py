"""What a comparison says, in words that follow from its numbers and say no more. Pure functions."""

from typing import Dict, List, Mapping, Optional, Sequence, Tuple

from cpu3d.compare.gather import MEAN
from cpu3d.compare.statistics import LARGER_IS_BETTER, Difference
from cpu3d.util.words import listed

NAMES = {"dice": "Dice", "hd95_mm": "HD95", "surface_dice": "surface Dice"}


def verdict(differences: Mapping[str, Mapping[str, Mapping[str, Difference]]], baseline: str) -> List[str]:
    """Sentences for what differs from the baseline, for what may or may not, and for what does not.

    `differences` is variant -> region -> metric -> Difference. What counts as a difference is `Difference.is_clear`;
    one whose interval leaves out 0 and that seeds alone may make is told to be undecided.
    """
    return [line for variant, regions in differences.items() for line in _of_variant(variant, regions, baseline)]


def cost_words(
    costs: Mapping[str, Mapping[str, Optional[float]]], baseline: str, devices: Mapping[str, str]
) -> List[str]:
    """What every variant takes of the baseline's seconds and memory. `costs` is variant -> name -> value.

    `devices` is variant -> "cpu" or "gpu:0": on another kind of device than the baseline's there is no ratio.
    """
    lines = []
    for variant, own in costs.items():
        if variant == baseline:
            continue
        kinds = [devices[name].partition(":")[0] for name in (variant, baseline)]
        if len(set(kinds)) > 1:
            lines.append(
                f"{variant} was trained on {devices[variant]} and {baseline} on {devices[baseline]}: their seconds and "
                "memory are in the table of costs, and no ratio is made of them."
            )
            continue
        parts = []
        for name, words in (
            ("case_train_s", "the seconds to train a case once"),
            ("train_peak_bytes" if kinds[0] == "cpu" else "card_peak_bytes", "the memory to train"),
            ("case_predict_s", "the seconds to predict one"),
            ("predict_peak_bytes", "the memory to predict"),
        ):
            if own.get(name) and costs[baseline].get(name):
                parts.append(f"{own[name] / costs[baseline][name]:.2f} x {words}")
        if parts:
            lines.append(f"{variant} takes, against {baseline}, {listed(parts)}.")
    return lines


# --- Private helpers ---


def _of_variant(variant: str, regions: Mapping[str, Mapping[str, Difference]], baseline: str) -> List[str]:
    lines, undecided, unclear = [], [], {}
    names = sorted(regions, key=lambda region: region != MEAN)  # the mean first
    single = all(one.interval is None for metrics in regions.values() for one in metrics.values())
    for metric in NAMES:
        moved: Dict[str, List[str]] = {}
        for region in names:
            difference = regions[region][metric]
            if difference.is_clear or (single and difference.mean):
                way = _way(metric, difference.mean)
                moved.setdefault(way, []).append(f"by {_size(difference, metric)} in {region} {NAMES[metric]}")
            elif difference.leaves_out_zero:
                undecided.append((f"{region} {NAMES[metric]}, {_way(metric, difference.mean)} by ", difference, metric))
            else:
                unclear.setdefault(metric, []).append(region)
        lines += [f"{variant} {way} than {baseline} {listed(parts)}." for way, parts in moved.items()]
    if undecided:
        lines.append(f"{variant} against {baseline}, undecided: {_undecided(undecided)}.")
    if unclear:
        everywhere = all(len(unclear.get(metric, ())) == len(regions) for metric in NAMES)
        where = [f"{NAMES[metric]} ({_which(some, regions)})" for metric, some in unclear.items()]
        same = all(regions[region][metric].mean == 0 for metric, some in unclear.items() for region in some)
        lines.append(
            f"{variant}: no difference to {baseline}{'' if same else ' beyond the interval'} in "
            f"{'any score' if everywhere else listed(where)}{_dice_of(regions, unclear)}."
        )
    if single:
        lines.append(f"{variant}: one case of one seed has no interval, so none of this can be told from chance.")
    return lines


def _undecided(found: Sequence[Tuple[str, Difference, str]]) -> str:
    """Each with its size and interval, and with what seeds alone may make where there are several."""
    if all(one.seed_bound is None for _, one, _ in found):
        parts = [words + _size(one, metric) for words, one, metric in found]
        return f"{'; '.join(parts)}; the intervals leave out 0, but are over cases alone, of one seed"
    parts = [
        f"{words}{_size(one, metric)} where seeds alone may make {_bound(one, metric)}" for words, one, metric in found
    ]
    return "; ".join(parts)


def _bound(difference: Difference, metric: str) -> str:
    if difference.seed_bound is None:
        return "any"
    return f"{difference.seed_bound:.1f} mm" if metric == "hd95_mm" else f"{difference.seed_bound:.3f}"


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
