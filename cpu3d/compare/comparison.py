"""Runs of several variants beside each other: what is said of them, as plain values that are kept as JSON. Pure."""

import dataclasses
import statistics
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from cpu3d.compare.gather import RunResult
from cpu3d.compare.planned import Failed
from cpu3d.compare.statistics import LARGER_IS_BETTER, Difference, mean_and_sd_over_seeds, paired_difference
from cpu3d.errors import InputError
from cpu3d.inference.evaluate import METRICS

COSTS: Dict[str, Callable] = {
    "steps": statistics.median, "voxels": statistics.median, "train_s": statistics.median,
    "steps_s": statistics.median, "step_s": statistics.median, "validation_s": statistics.median,
    "case_train_s": statistics.median, "train_peak_bytes": max, "allocator_peak_bytes": max,
    "core_hours": statistics.median, "case_predict_s": statistics.median, "predict_peak_bytes": max,
    "card_peak_bytes": max,
}  # fmt: skip
"""Cost of a run -> how those of the seeds become one: seconds by the middle one, memory by the most."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Runs grouped by variant, and what follows from them."""

    runs: Dict[str, List[RunResult]]
    """Variant -> its runs by seed. The first variant is the baseline."""
    cases: List[str]
    """Scored in every run."""
    regions: List[str]
    """With the mean over them last, where there are several."""
    differences: Dict[str, Dict[str, Dict[str, Difference]]]
    """Variant -> region -> metric -> its difference to the baseline."""
    failed: Tuple[Failed, ...] = ()
    """Runs that are not among `runs`, and why."""
    by_time: bool = False
    """Whether the budget was wall time, so that voxels may differ and seconds may not."""

    @property
    def variants(self) -> List[str]:
        return list(self.runs)

    @property
    def baseline(self) -> str:
        return next(iter(self.runs))

    def values(self, variant: str, region: str, metric: str, seeds: Optional[Sequence[int]] = None) -> np.ndarray:
        """(seeds, cases) of a variant, of its own seeds or of some of them."""
        chosen = [run for run in self.runs[variant] if seeds is None or run.seed in seeds]
        return np.array([[run.scores[region][metric][case] for case in self.cases] for run in chosen])

    def shared_seeds(self, variant: str) -> List[int]:
        """Seeds that a variant and the baseline both have, which is what is paired."""
        own = {run.seed for run in self.runs[variant]}
        return [run.seed for run in self.runs[self.baseline] if run.seed in own]

    def cost(self, variant: str, name: str) -> Optional[float]:
        """One of COSTS for all runs of a variant; None where no run knows it."""
        known = [value for value in (getattr(run.costs, name) for run in self.runs[variant]) if value is not None]
        return COSTS[name](known) if known else None


def compare(
    results: Sequence[RunResult],
    *,
    baseline: Optional[str] = None,
    failed: Sequence[Failed] = (),
    by_time: bool = False,
) -> Comparison:
    """Put runs beside each other. The `baseline` is the first one's variant where none is named.

    Raises InputError for runs that were not scored on the same cases and regions, and for a variant that shares no seed
    with the baseline, as nothing can be paired then; one that lost its seeds to failures is left out instead.
    """
    baseline = baseline or results[0].variant
    runs: Dict[str, List[RunResult]] = {baseline: []}
    for result in results:
        runs.setdefault(result.variant, []).append(result)
    runs = {variant: sorted(own, key=lambda run: run.seed) for variant, own in runs.items()}
    if not runs[baseline]:
        raise InputError(f"the baseline {baseline} must have a run that ended well, got none", *map(str, failed))
    first = runs[baseline][0]
    cases, regions = list(next(iter(first.scores.values()))["dice"]), list(first.scores)
    problems = [
        f"run {result.folder} must be scored on the same {what} as {first.folder}, got {', '.join(sorted(found))} for "
        f"{', '.join(sorted(wanted))}; evaluate both on one store"
        for result in results
        for what, found, wanted in (
            ("regions", result.scores, regions),
            ("cases", next(iter(result.scores.values()))["dice"], cases),
        )
        if set(found) != set(wanted)
    ]
    if problems:
        raise InputError(*problems)
    lonely = unpaired({variant: [run.seed for run in own] for variant, own in runs.items()}, baseline)
    if lonely and not failed:
        raise InputError(*lonely.values())
    left_out = [
        Failed(variant, run.seed, f"{baseline} has no such seed") for variant in lonely for run in runs[variant]
    ]
    runs = {variant: own for variant, own in runs.items() if variant not in lonely}
    comparison = Comparison(runs, cases, regions, {}, (*failed, *left_out), by_time)
    return dataclasses.replace(comparison, differences=_differences(comparison))


def unpaired(seeds: Mapping[str, Sequence[int]], baseline: str) -> Dict[str, str]:
    """The variants that share no seed with the baseline, each with the problem. `seeds` is variant -> its seeds."""
    return {
        variant: f"variant {variant} must share a seed with {baseline}, got {list(own)} and {list(seeds[baseline])}; "
        "train one of each with the same --seed"
        for variant, own in seeds.items()
        if not set(own) & set(seeds[baseline])
    }


def to_json(comparison: Comparison) -> Dict[str, Any]:
    """The scores, differences and costs of a comparison."""
    return {
        "baseline": comparison.baseline,
        "cases": len(comparison.cases),
        "regions": comparison.regions,
        "variants": {
            variant: {
                "seeds": [run.seed for run in comparison.runs[variant]],
                "scores": {
                    region: {metric: _mean_and_sd(comparison.values(variant, region, metric)) for metric in METRICS}
                    for region in comparison.regions
                },
                "costs": {name: comparison.cost(variant, name) for name in COSTS},
            }
            for variant in comparison.variants
        },
        "differences": {
            variant: {
                region: {metric: dataclasses.asdict(difference) for metric, difference in of_metrics.items()}
                for region, of_metrics in of_regions.items()
            }
            for variant, of_regions in comparison.differences.items()
        },
        "runs": [
            {"variant": run.variant, "seed": run.seed, "folder": run.folder.name, **dataclasses.asdict(run.costs)}
            for of_variant in comparison.runs.values()
            for run in of_variant
        ],
        "failed": [str(one) for one in comparison.failed],
    }


# --- Private helpers ---


def _differences(comparison: Comparison) -> Dict[str, Dict[str, Dict[str, Difference]]]:
    found: Dict[str, Dict[str, Dict[str, Difference]]] = {}
    for variant in comparison.variants[1:]:
        seeds = comparison.shared_seeds(variant)
        found[variant] = {
            region: {
                metric: paired_difference(
                    comparison.values(variant, region, metric, seeds),
                    comparison.values(comparison.baseline, region, metric, seeds),
                    larger_is_better=LARGER_IS_BETTER[metric],
                )
                for metric in METRICS
            }
            for region in comparison.regions
        }
    return found


def _mean_and_sd(values: np.ndarray) -> Dict[str, Optional[float]]:
    mean, sd = mean_and_sd_over_seeds(values)
    return {"mean": mean, "sd": sd}
