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
from typing import (
    Any,
    Callable,
    Dict,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)

import numpy as np

from cpu3d.compare.run import Failed, PlannedRun
from cpu3d.compare.variants import Json
from cpu3d.data.store import Store, grid_size
from cpu3d.errors import InputError, raise_if_any
from cpu3d.inference.scores import METRICS
from cpu3d.inference.scores_file import PREDICTIONS, read_scores, scores_path
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
    of_cases = difference.mean(0)
    if not larger_is_better:
        of_cases = -of_cases
    better = int((of_cases > EQUAL).sum())
    worse = int((of_cases < -EQUAL).sum())
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
    bound = difference["seed_bound"]
    if difference["interval"] is None or bound is None:
        return False
    low, high = difference["interval"]
    return (low > 0 or high < 0) and abs(difference["mean"]) > bound


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
    if sd > EQUAL:
        return float(stdtrit(len(of_seeds) - 1, 0.975) * sd / np.sqrt(len(of_seeds)))
    return 0.0


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
    sd = None
    if len(of_seeds) > 1:
        sd = float(of_seeds.std(ddof=1))
    return float(of_seeds.mean()), sd


# --- The result of a run ---


class Cost(NamedTuple):
    """A cost of a run."""

    label: str
    show: Callable[[float], str]
    of: Callable[[Sequence[float]], float] = statistics.median  # of the seeds


def millions(voxels: float) -> str:
    """ "12.3 M"."""
    digits = 0 if voxels >= 1e8 else 1
    return f"{voxels / 1e6:,.{digits}f} M"


COSTS = {
    "steps": Cost("steps", "{:,.0f}".format),
    "voxels": Cost("voxels seen", millions),
    "step_s": Cost("a step in full", format_seconds),
    # Of a whole case's voxels.
    "case_train_s": Cost("a case trained once", format_seconds),
    # With the compilation in the first, and the waiting for data.
    "steps_s": Cost("all steps", format_seconds),
    "validation_s": Cost("validation", format_seconds),
    # Of all attempts; not known where the last one did not end.
    "train_s": Cost("training in all", format_seconds),
    "core_hours": Cost("core-hours", number),  # of all cores that the process had; None on a card
    "train_peak_bytes": Cost("peak memory, training", format_bytes, max),
    "allocator_peak_bytes": Cost("of it TensorFlow's allocator", format_bytes, max),
    "card_peak_bytes": Cost("card's memory, training", format_bytes, max),
    # The median over the cases: the first one compiles.
    "case_predict_s": Cost("a case predicted", format_seconds),
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
    config = load_config(run.folder)
    path = scores_path(run.folder, split)
    content = read_scores(path)
    history = History(iter_events(run.folder))
    scores: Scores = {}
    for region in content["regions"]:
        scores[region] = {}
        for name in METRICS:
            of_cases = {}
            for case in content["cases"]:
                of_cases[case["case_id"]] = float(case["regions"][region][name])
            scores[region][name] = of_cases
    host = history.starts[-1].get("host", {}) if history.starts else {}
    return RunResult(
        variant=run.variant,
        seed=run.seed,
        folder=run.folder,
        scores=with_mean(scores),
        costs=_costs(history, config, content, host.get("cores"), store),
        config=config,
        curve=_curve(history),
        host=host,
        predictions=path.parent / PREDICTIONS,
    )


def with_mean(scores: Scores) -> Scores:
    """The scores of several regions with the mean over them as one more; of one region as they
    are."""
    if len(scores) < 2:
        return scores
    mean: Dict[str, Dict[str, float]] = {}
    first, *_ = scores.values()
    for metric, of_cases in first.items():
        mean[metric] = {}
        for case in of_cases:
            values = [regions[metric][case] for regions in scores.values()]
            mean[metric][case] = statistics.fmean(values)
    return {**scores, MEAN: mean}


# --- Runs of several variants ---


@dataclass(frozen=True)
class Comparison:
    """Runs grouped by variant."""

    baseline: str  # a variant
    runs: Dict[str, List[RunResult]]  # variant -> its runs by seed; in the order of tables
    cases: List[str]
    regions: List[str]  # if there are several, with the mean over them last
    failed: Tuple[Failed, ...] = ()  # runs that are not among `runs`, and why

    def values(
        self, variant: str, region: str, metric: str, like: Optional[str] = None
    ) -> np.ndarray:
        """Scores (seeds, cases) of a variant: of all its seeds, or of those that the variant `like`
        has too."""
        runs = self.runs[variant]
        if like is not None:
            seeds = {run.seed for run in self.runs[like]}
            runs = [run for run in runs if run.seed in seeds]
        rows = []
        for run in runs:
            of_cases = run.scores[region][metric]
            rows.append([of_cases[case] for case in self.cases])
        return np.array(rows)

    def to_json(self) -> Dict[str, Any]:
        """The scores, differences and costs, as in compare.json and the records."""
        variants = {}
        differences = {}
        runs = []
        for variant, own in self.runs.items():
            variants[variant] = {
                "seeds": [run.seed for run in own],
                "scores": self._of_all(self._score, variant),
                "costs": {name: self._cost(variant, name) for name in COSTS},
            }
            if variant != self.baseline:
                differences[variant] = self._of_all(self._difference, variant)
            for run in own:
                about = {
                    "variant": run.variant,
                    "seed": run.seed,
                    "folder": run.folder.name,
                    "learning_rate": run.config.peak_rate,
                }
                runs.append({**about, **run.costs})
        return {
            "baseline": self.baseline,
            "cases": len(self.cases),
            "regions": self.regions,
            "variants": variants,
            "differences": differences,
            "runs": runs,
            "failed": [str(failure) for failure in self.failed],
        }

    def _of_all(
        self, value_of: Callable[[str, str, str], Any], variant: str
    ) -> Dict[str, Dict[str, Any]]:
        """Region -> metric -> the value of a variant."""
        values: Dict[str, Dict[str, Any]] = {}
        for region in self.regions:
            values[region] = {metric: value_of(variant, region, metric) for metric in METRICS}
        return values

    def _score(self, variant: str, region: str, metric: str) -> Dict[str, Optional[float]]:
        mean, sd = mean_and_sd(self.values(variant, region, metric).mean(1))
        return {"mean": mean, "sd": sd}

    def _difference(self, variant: str, region: str, metric: str) -> Dict[str, Any]:
        own = self.values(variant, region, metric, like=self.baseline)
        baseline = self.values(self.baseline, region, metric, like=variant)
        return paired_difference(own, baseline, larger_is_better=METRICS[metric].larger_is_better)

    def _cost(self, variant: str, name: str) -> Optional[float]:
        costs = [run.costs.get(name) for run in self.runs[variant]]
        known = [cost for cost in costs if cost is not None]
        return COSTS[name].of(known) if known else None


def comparison_of(
    results: Sequence[RunResult], baseline: str, failed: Sequence[Failed] = ()
) -> Comparison:
    """The comparison of these runs, with those of the variant `baseline` first.

    Raises InputError for runs that were not scored on the same cases and regions, and for a variant
    that shares no seed with the baseline, as nothing can be paired then; a variant whose shared
    seeds failed is left out instead."""
    runs: Dict[str, List[RunResult]] = {baseline: []}
    for result in results:
        runs.setdefault(result.variant, []).append(result)
    for own in runs.values():
        own.sort(key=lambda run: run.seed)
    if not runs[baseline]:
        rule = f"the baseline {baseline} must have a run that succeeded, got none"
        raise InputError(rule, *map(str, failed))
    first = runs[baseline][0]
    problems = []
    for result in results:
        problems += _differences_in_scope(result, first)
    raise_if_any(problems)
    seeds = {variant: {run.seed for run in own} for variant, own in runs.items()}
    lonely = [variant for variant, own in seeds.items() if not own & seeds[baseline]]
    left_out = list(failed)
    for variant in lonely:
        if not failed:
            got = f"{sorted(seeds[variant])} and {sorted(seeds[baseline])}"
            rule = f"variant {variant} must share a seed with {baseline}, got {got}"
            problems.append(f"{rule}; train one of each with the same --seed")
        for run in runs.pop(variant):
            left_out.append(Failed(variant, run.seed, f"{baseline} has no such seed"))
    raise_if_any(problems)
    return Comparison(
        baseline=baseline,
        runs=runs,
        cases=_cases_of(first),
        regions=list(first.scores),
        failed=tuple(left_out),
    )


# --- Private helpers ---


def _cases_of(result: RunResult) -> List[str]:
    region, *_ = result.scores
    return list(result.scores[region]["dice"])


def _differences_in_scope(result: RunResult, first: RunResult) -> Iterator[str]:
    """Why a run cannot be compared with the first: other regions, or other cases."""
    for kind, names, wanted in (
        ("regions", sorted(result.scores), sorted(first.scores)),
        ("cases", sorted(_cases_of(result)), sorted(_cases_of(first))),
    ):
        if names != wanted:
            rule = f"run {result.folder} must be scored on the same {kind} as {first.folder}"
            got = f"got {', '.join(names)} for {', '.join(wanted)}"
            yield f"{rule}, {got}; evaluate both on one store"


def _curve(history: History) -> List[Point]:
    """A run's validations, each with what the steps up to it have cost."""
    order = np.argsort(history.steps["step"], kind="stable")
    done = history.steps["step"][order]

    def until_now(name: str) -> np.ndarray:
        """The sums of a column over no step, one, two and so on."""
        return np.concatenate([[0], np.cumsum(np.nan_to_num(history.steps[name][order]))])

    validations = history.validations
    steps = np.searchsorted(done, validations["step"], side="right")  # before each validation
    voxels = until_now("voxels")[steps]
    seconds = until_now("step_s")[steps]
    points = []
    for seen, took_s, dice in zip(voxels, seconds, validations["mean_dice"]):
        points.append(Point(int(seen), float(took_s), float(dice)))
    return points


def _costs(
    history: History, config: RunConfig, scores: Json, cores: Optional[int], store: Store
) -> Dict[str, Optional[float]]:
    """A run's COSTS, from its log and the content of scores.json."""
    costs = history.costs(config.coarse_steps)
    on_cpu = config.device == "cpu"
    if config.is_patch:
        whole = grid_size(store, extent=config.extent, multiple=config.unet.divisors)
    else:
        whole = config.grid
    values: Dict[str, Optional[float]] = dict.fromkeys(COSTS)
    values.update(
        steps=costs.steps,
        voxels=costs.voxels,
        step_s=costs.step_s,
        steps_s=costs.steps_s,
        validation_s=costs.validation_s,
        train_s=costs.train_s,
        train_peak_bytes=costs.peak_rss_bytes,
        case_predict_s=median(numbers(scores["cases"], "predict_s")),
        predict_peak_bytes=scores.get("peak_rss_bytes"),
    )
    if costs.step_s is not None:
        voxel_s = costs.step_s / (config.batch * math.prod(config.grid))
        values["case_train_s"] = voxel_s * math.prod(whole)
    if on_cpu:
        values["allocator_peak_bytes"] = costs.allocator_peak_bytes
    else:
        values["card_peak_bytes"] = costs.allocator_peak_bytes
    if on_cpu and cores and costs.train_s is not None:
        values["core_hours"] = costs.train_s * cores / 3600
    return values
