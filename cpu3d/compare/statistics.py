"""The results of the runs: scores and costs of each, and paired differences between variants with
their intervals.

A difference is taken on the same case and seed. Its interval is a percentile bootstrap that
resamples seeds and cases crossed (Owen 2007, "The pigeonhole bootstrap", Annals of Applied
Statistics 1:386), so it holds for other cases and other seeds. With few seeds it is narrower than
Student's t: 9.2 times with 2 seeds, 2.7 times with 3, 1.6 times with 5. So a difference counts if
the interval does not contain 0 and the mean is significant in a t-test of the seeds' means. With
one seed no difference counts. Nothing is corrected for the number of differences."""

import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from cpu3d.compare.plan import Json
from cpu3d.compare.run import Failed, PlannedRun
from cpu3d.data.store import Store, grid_size
from cpu3d.errors import InputError, raise_if_any
from cpu3d.inference.evaluate import PREDICTIONS, read_scores, scores_path
from cpu3d.inference.scores import METRICS
from cpu3d.run.config_json import load_config
from cpu3d.run.log import iter_events
from cpu3d.run.summary import History, median, numbers
from cpu3d.settings import RunConfig
from cpu3d.util.records import number
from memory_estimator.common.units import format_bytes, format_seconds

RESAMPLES = 10_000
SEED = 20_201  # of the resamples: the same values give the same interval
EQUAL = 1e-9  # a case with at most this difference is equal
MEAN = "mean"  # instead of a region's name: the mean over the regions
Scores = Dict[str, Dict[str, Dict[str, float]]]  # region, or MEAN, -> metric -> case id -> value


def paired_difference(
    values: np.ndarray, baseline: np.ndarray, *, larger_is_better: bool = True
) -> Dict[str, Any]:
    """The difference of two arrays (seeds, cases) of one shape, neither empty, as in compare.json
    and the records.

    "interval" is over cases and seeds (over cases alone for one seed, over seeds for one case),
    None for a single pair. "better", "worse" and "equal" count cases, by the mean over their seeds.
    Seeds alone make a mean larger than "seed_bound" once in 20 times, by Student's t; None for one
    seed."""
    difference = values - baseline
    seeds, cases = difference.shape
    of_cases = difference.mean(0) * (1 if larger_is_better else -1)
    better, worse = int((of_cases > EQUAL).sum()), int((of_cases < -EQUAL).sum())
    return {
        "mean": float(difference.mean()),
        "interval": bootstrap_mean(difference),
        "seeds": seeds,
        "cases": cases,
        "better": better,
        "worse": worse,
        "equal": cases - better - worse,
        "seed_bound": seed_bound(difference.mean(1)),
    }


def counts(difference: Mapping[str, Any]) -> bool:
    """Whether the interval of a difference leaves out 0 and its mean exceeds the "seed_bound"."""
    bound, (low, high) = difference["seed_bound"], difference["interval"] or (0, 0)
    return (low > 0 or high < 0) and bound is not None and abs(difference["mean"]) > bound


def seed_bound(of_seeds: Sequence[float]) -> Optional[float]:
    """The smallest significant mean of the seeds' differences: half of Student's 95 % interval.
    None for one seed.

    t(0.975, n - 1) * sd / sqrt(n): of 3 seeds 2.48 standard deviations, of 5 seeds 1.24.
    """
    from scipy.special import stdtrit  # on use: importing this module stays cheap

    _, sd = mean_and_sd(of_seeds)
    if sd is None:
        return None
    # Rounding alone makes equal differences differ by less than EQUAL, which is no deviation.
    return (
        float(stdtrit(len(of_seeds) - 1, 0.975) * sd / np.sqrt(len(of_seeds)))
        if sd > EQUAL
        else 0.0
    )


def bootstrap_mean(values: np.ndarray) -> Optional[Tuple[float, float]]:
    """The 95 % bootstrap interval of the mean of `values` (seeds, cases); None for a single
    value."""
    seeds, cases = values.shape
    if values.size == 1:
        return None
    if np.ptp(values) == 0:
        return float(values.flat[0]), float(values.flat[0])  # exact, unlike sums of shares
    rng = np.random.default_rng(SEED)
    # A resample is known by how often each seed and case was drawn: its mean is a product of three
    # arrays.
    of_seeds = rng.multinomial(seeds, np.full(seeds, 1 / seeds), size=RESAMPLES) / seeds
    of_cases = rng.multinomial(cases, np.full(cases, 1 / cases), size=RESAMPLES) / cases
    means = ((of_seeds @ values) * of_cases).sum(1)
    return tuple(map(float, np.quantile(means, ((1 - 0.95) / 2, (1 + 0.95) / 2))))


def mean_and_sd(of_seeds: Sequence[float]) -> Tuple[float, Optional[float]]:
    """The mean of a value for each seed, and their standard deviation (n - 1); None for a single
    seed."""
    of_seeds = np.asarray(of_seeds, float)
    return float(of_seeds.mean()), float(of_seeds.std(ddof=1)) if len(of_seeds) > 1 else None


# --- The result of a run ---


class Cost(NamedTuple):
    """A cost of a run."""

    label: str
    show: Callable[[float], str]
    of: Callable[[Sequence[float]], float] = (
        statistics.median
    )  # of the seeds; memory by the largest


def millions(voxels: float) -> str:
    """ "12.3 M"."""
    return f"{voxels / 1e6:,.{0 if voxels >= 1e8 else 1}f} M"


COSTS = {
    "steps": Cost("steps", "{:,.0f}".format),
    "voxels": Cost("voxels seen", millions),
    "step_s": Cost("a step in full", format_seconds),
    "case_train_s": Cost(
        "a case trained once", format_seconds
    ),  # of a whole case's voxels; unknown without a store
    "steps_s": Cost(
        "all steps", format_seconds
    ),  # with the compilation in the first, and the waiting for data
    "validation_s": Cost("validation", format_seconds),
    "train_s": Cost(
        "training in all", format_seconds
    ),  # of all attempts; not known where the last one did not end
    "core_hours": Cost("core-hours", number),  # of all cores that the process had; None on a card
    "train_peak_bytes": Cost("peak memory, training", format_bytes, max),
    "allocator_peak_bytes": Cost("of it TensorFlow's allocator", format_bytes, max),
    "card_peak_bytes": Cost("card's memory, training", format_bytes, max),
    "case_predict_s": Cost(
        "a case predicted", format_seconds
    ),  # the median over the cases: the first one compiles
    "predict_peak_bytes": Cost("peak memory, prediction", format_bytes, max),
}
"""Name in compare.json and the records -> cost. Seconds are of the wall clock, memory is the
largest resident set."""


class Point(NamedTuple):
    """A validation during training, after so many voxels, and seconds of steps alone."""

    voxels: int
    seconds: float
    mean_dice: float


@dataclass(frozen=True)
class RunResult:
    """A trained and scored run."""

    variant: str
    seed: int
    folder: Path
    scores: Scores
    costs: Dict[str, Optional[float]]  # by COSTS; None is not known
    config: RunConfig
    curve: Sequence[Point]  # the validations, in order
    host: Dict[str, Any]  # of the last attempt; empty if the log has none
    predictions: Path  # folder of the label maps that were scored


def read_result(run: PlannedRun, split: str, store: Store) -> RunResult:
    """Read a run that was trained and scored on `split` of `store`.

    Raises InputError if the run was not trained or scored, or its files are damaged.
    """
    config, path = load_config(run.folder), scores_path(run.folder, split)
    content = read_scores(path)
    history = History(iter_events(run.folder))
    cases = {case["case_id"]: case["regions"] for case in content["cases"]}
    regions = {
        region: {
            name: {case: float(of[region][name]) for case, of in cases.items()} for name in METRICS
        }
        for region in content["regions"]
    }
    host = history.starts[-1].get("host", {}) if history.starts else {}
    costs = _costs(history, config, content, host.get("cores"), store)
    about = (run.variant, run.seed, run.folder, with_mean(regions), costs, config)
    return RunResult(*about, _curve(history), host, path.parent / PREDICTIONS)


def with_mean(scores: Scores) -> Scores:
    """The scores of several regions with the mean over them as one more; of one region as they
    are."""
    if len(scores) < 2:
        return scores
    mean = {
        metric: {
            case: statistics.fmean(of[metric][case] for of in scores.values()) for case in values
        }
        for metric, values in next(iter(scores.values())).items()
    }
    return {**scores, MEAN: mean}


# --- Runs of several variants ---


@dataclass(frozen=True)
class Comparison:
    """Runs grouped by variant."""

    runs: Dict[
        str, List[RunResult]
    ]  # variant -> its runs by seed; the first variant is the baseline
    cases: List[str]
    regions: List[str]  # if there are several, with the mean over them last
    failed: Tuple[Failed, ...] = ()  # runs that are not among `runs`, and why

    @property
    def baseline(self) -> str:
        return next(iter(self.runs))

    def values(
        self, variant: str, region: str, metric: str, like: Optional[str] = None
    ) -> np.ndarray:
        """Scores (seeds, cases) of a variant: of all its seeds, or of those that the variant `like`
        has too."""
        shared = {run.seed for run in self.runs[like or variant]}
        chosen = [run for run in self.runs[variant] if run.seed in shared]
        return np.array(
            [[run.scores[region][metric][case] for case in self.cases] for run in chosen]
        )

    def to_json(self) -> Dict[str, Any]:
        """The scores, differences and costs, as in compare.json and the records."""

        def of_all(
            value_of: Callable[[str, str, str], Any], variant: str
        ) -> Dict[str, Dict[str, Any]]:
            return {
                name: {metric: value_of(variant, name, metric) for metric in METRICS}
                for name in self.regions
            }

        return {
            "baseline": self.baseline,
            "cases": len(self.cases),
            "regions": self.regions,
            "variants": {
                variant: {
                    "seeds": [run.seed for run in runs],
                    "scores": of_all(self._score, variant),
                    "costs": {name: self._cost(variant, name) for name in COSTS},
                }
                for variant, runs in self.runs.items()
            },
            "differences": {
                variant: of_all(self._difference, variant) for variant in list(self.runs)[1:]
            },
            "runs": [
                {
                    "variant": run.variant,
                    "seed": run.seed,
                    "folder": run.folder.name,
                    "learning_rate": run.config.peak_rate,
                    **run.costs,
                }
                for runs in self.runs.values()
                for run in runs
            ],
            "failed": [str(failure) for failure in self.failed],
        }

    def _score(self, *key: str) -> Dict[str, Optional[float]]:
        return dict(zip(("mean", "sd"), mean_and_sd(self.values(*key).mean(1))))

    def _difference(self, variant: str, region: str, metric: str) -> Dict[str, Any]:
        own = self.values(variant, region, metric, like=self.baseline)
        baseline = self.values(self.baseline, region, metric, like=variant)
        return paired_difference(own, baseline, larger_is_better=METRICS[metric].larger_is_better)

    def _cost(self, variant: str, name: str) -> Optional[float]:
        known = [
            value
            for value in (run.costs.get(name) for run in self.runs[variant])
            if value is not None
        ]
        return COSTS[name].of(known) if known else None


def comparison_of(
    results: Sequence[RunResult], baseline: str, failed: Sequence[Failed] = ()
) -> Comparison:
    """The comparison of these runs, with those of the variant `baseline` first.

    Raises InputError for runs that were not scored on the same cases and regions, and for a variant
    that shares no seed with the baseline, as nothing can be paired then; a variant whose shared
    seeds failed is left out instead."""
    runs: Dict[str, List[RunResult]] = {
        name: [] for name in (baseline, *(result.variant for result in results))
    }
    for result in sorted(results, key=lambda run: run.seed):
        runs[result.variant].append(result)
    if not runs[baseline]:
        raise InputError(
            f"the baseline {baseline} must have a run that succeeded, got none", *map(str, failed)
        )
    first = runs[baseline][0]
    cases = list(next(iter(first.scores.values()))["dice"])
    raise_if_any(
        f"run {result.folder} must be scored on the same {kind} as {first.folder}, got {', '.join(sorted(names))} for "
        f"{', '.join(sorted(wanted))}; evaluate both on one store"
        for result in results
        for kind, names, wanted in (
            ("regions", result.scores, first.scores),
            ("cases", next(iter(result.scores.values()))["dice"], cases),
        )
        if set(names) != set(wanted)
    )
    seeds = {variant: {run.seed for run in own} for variant, own in runs.items()}
    lonely = [variant for variant, own in seeds.items() if not own & seeds[baseline]]
    raise_if_any(
        f"variant {variant} must share a seed with {baseline}, got {sorted(seeds[variant])} and "
        f"{sorted(seeds[baseline])}; train one of each with the same --seed"
        for variant in ([] if failed else lonely)
    )
    left_out = [
        Failed(variant, run.seed, f"{baseline} has no such seed")
        for variant in lonely
        for run in runs.pop(variant)
    ]
    return Comparison(runs, cases, list(first.scores), (*failed, *left_out))


# --- Private helpers ---


def _curve(history: History) -> List[Point]:
    """A run's validations, each with what the steps up to it have cost."""
    order = np.argsort(history.steps["step"], kind="stable")
    done = history.steps["step"][order]
    voxels, seconds = (
        np.concatenate([[0], np.cumsum(np.nan_to_num(history.steps[name][order]))])
        for name in ("voxels", "step_s")
    )
    validations = history.validations
    until = np.searchsorted(done, validations["step"], side="right")  # how many steps
    return [
        Point(int(seen), float(took), float(dice))
        for seen, took, dice in zip(voxels[until], seconds[until], validations["mean_dice"])
    ]


def _costs(
    history: History, config: RunConfig, scores: Json, cores: Optional[int], store: Store
) -> Dict[str, Optional[float]]:
    """A run's COSTS, from its log and the content of scores.json."""
    costs, on_cpu = history.costs(config.coarse_steps), config.device == "cpu"
    whole = (
        grid_size(store, extent=config.extent, multiple=config.unet.divisor)
        if config.is_patch
        else config.grid
    )
    values = {
        **vars(costs),
        "case_train_s": costs.step_s
        and costs.step_s / (config.batch * math.prod(config.grid)) * math.prod(whole),
        "core_hours": costs.train_s * cores / 3600
        if costs.train_s is not None and cores and on_cpu
        else None,
        "train_peak_bytes": costs.peak_rss_bytes,
        "allocator_peak_bytes": costs.allocator_peak_bytes if on_cpu else None,
        "card_peak_bytes": None if on_cpu else costs.allocator_peak_bytes,
        "case_predict_s": median(numbers(scores["cases"], "predict_s")),
        "predict_peak_bytes": scores.get("peak_rss_bytes"),
    }
    return {name: values[name] for name in COSTS}
