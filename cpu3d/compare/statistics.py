"""Paired differences and their intervals: pure functions of arrays (seeds, cases).

A difference is taken on the same case and the same seed, so what makes a case hard and a start lucky is in both.

The interval is a percentile bootstrap that resamples seeds and cases crossed: every resample draws seeds with
replacement, draws cases with replacement, and averages over all pairs (Owen 2007, "The pigeonhole bootstrap", Annals of
Applied Statistics 1:386). It speaks of other cases and of other seeds alike. No bootstrap is exact for crossed data
(McCullagh 2000); with many of both this one is a little too wide where cases and seeds interact. With few it is too
narrow: of n values it sees (n - 1) / n of the variance, and it knows nothing of Student's t, so that what 3 seeds add
is 2.7 times as wide by Student's t as by the bootstrap (2 seeds: 9.2 times, 5 seeds: 1.6 times); and five cases are a
poor picture of a clinic.

So one rule says what counts as a difference, everywhere: the interval leaves out 0, and the mean is larger than seeds
alone may make it, which is what a t-test of the seeds' means asks. With one seed nothing counts. Intervals are of one
difference each; nothing is corrected for their number.
"""

from dataclasses import dataclass
from typing import Any, Dict, Mapping, Optional, Sequence, Tuple

import numpy as np

RESAMPLES = 10_000

SEED = 20_201
"""Of the resamples: the same values give the same interval."""

SHARE = 0.95

EQUAL = 1e-9
"""A case whose difference is no larger is equal."""

LARGER_IS_BETTER: Dict[str, bool] = {"dice": True, "hd95_mm": False, "surface_dice": True}


@dataclass(frozen=True)
class Difference:
    """A variant less the baseline, on the same cases and seeds."""

    mean: float
    interval: Optional[Tuple[float, float]]
    """95 %, over cases and seeds; over one of them where there is a single one of the other; None for a single pair."""
    seeds: int
    cases: int
    better: int
    """Cases that are better than with the baseline, on the mean over their seeds."""
    worse: int
    equal: int
    seed_bound: Optional[float] = None
    """Seeds alone make a mean larger than this once in 20 times, by Student's t; None with one seed, and in records
    from before there was a bound."""

    @property
    def leaves_out_zero(self) -> bool:
        """Whether the interval does. With few seeds that is not enough."""
        return self.interval is not None and (self.interval[0] > 0 or self.interval[1] < 0)

    @property
    def is_clear(self) -> bool:
        """Whether it counts as a difference: the interval leaves out 0, and seeds alone do not make as much."""
        return self.leaves_out_zero and self.seed_bound is not None and abs(self.mean) > self.seed_bound


def difference_from_json(content: Mapping[str, Any]) -> Difference:
    """The way back from `dataclasses.asdict`, of older records too."""
    interval = content["interval"]
    return Difference(**{**content, "interval": tuple(interval) if interval else None})


def paired_difference(values: np.ndarray, baseline: np.ndarray, *, larger_is_better: bool = True) -> Difference:
    """The difference of two arrays (seeds, cases) of one shape, neither empty. Raises ValueError for others."""
    values, baseline = np.asarray(values, float), np.asarray(baseline, float)
    if values.ndim != 2 or values.shape != baseline.shape or not values.size:
        raise ValueError(f"values must be (seeds, cases) as the baseline's {baseline.shape}, got {values.shape}")
    difference = values - baseline
    of_cases = difference.mean(0) * (1 if larger_is_better else -1)
    better, worse = int((of_cases > EQUAL).sum()), int((of_cases < -EQUAL).sum())
    return Difference(
        mean=float(difference.mean()),
        interval=bootstrap_mean(difference),
        seeds=difference.shape[0],
        cases=difference.shape[1],
        better=better,
        worse=worse,
        equal=difference.shape[1] - better - worse,
        seed_bound=seed_bound(difference.mean(1)),
    )


def seed_bound(of_seeds: Sequence[float]) -> Optional[float]:
    """What the mean of the seeds' differences must exceed: half of Student's 95 % interval. None for one seed.

    t(0.975, n - 1) * sd / sqrt(n): of 3 seeds 2.48 standard deviations, of 5 seeds 1.24.
    """
    from scipy.special import stdtrit  # on use: importing this module stays cheap

    _, sd = mean_and_sd(of_seeds)
    if sd is None:
        return None
    # Rounding alone spreads equal differences by less than EQUAL, which is no spread.
    return float(stdtrit(len(of_seeds) - 1, 0.975) * sd / np.sqrt(len(of_seeds))) if sd > EQUAL else 0.0


def bootstrap_mean(values: np.ndarray, *, share: float = SHARE) -> Optional[Tuple[float, float]]:
    """The interval of the mean of `values` (seeds, cases) that holds `share` of the resamples' means.

    None where there is a single value, of which no resample can differ.
    """
    values = np.asarray(values, float)
    seeds, cases = values.shape
    if values.size == 1:
        return None
    if np.ptp(values) == 0:
        return float(values.flat[0]), float(values.flat[0])  # to the bit, which sums of shares are not
    rng = np.random.default_rng(SEED)
    # How often each seed and each case was drawn says all of a resample: its mean is a product of three arrays.
    of_seeds = rng.multinomial(seeds, np.full(seeds, 1 / seeds), size=RESAMPLES) / seeds
    of_cases = rng.multinomial(cases, np.full(cases, 1 / cases), size=RESAMPLES) / cases
    means = ((of_seeds @ values) * of_cases).sum(1)
    low, high = np.quantile(means, ((1 - share) / 2, (1 + share) / 2))
    return float(low), float(high)


def mean_and_sd(of_seeds: Sequence[float]) -> Tuple[float, Optional[float]]:
    """The mean of a value for each seed, and their standard deviation (n - 1); None for a single seed."""
    of_seeds = np.asarray(of_seeds, float)
    return float(of_seeds.mean()), float(of_seeds.std(ddof=1)) if len(of_seeds) > 1 else None


def mean_and_sd_over_seeds(values: np.ndarray) -> Tuple[float, Optional[float]]:
    """The mean of all `values` (seeds, cases), and how the seeds' means differ."""
    return mean_and_sd(np.asarray(values, float).mean(1))
