"""The results of a comparison: results.json, report.html, a record, tables of the terminal and the
docs.

    comparison = Comparison.of(answers, "whole", {})
    publish(comparison, about, store, out, record=None)

Every table is made from the results in results.json and the records, so all places show the same
rows."""

import itertools
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence

import numpy as np

from cpu3d.data.store import Store
from cpu3d.errors import InputError
from cpu3d.experiments.statistics import is_significant, paired_difference
from cpu3d.inference.scores import METRICS, metric_notes
from cpu3d.inference.scores_file import PREDICTIONS, read_scores, scores_path
from cpu3d.pages.viewer import viewer
from cpu3d.report.pictures import Figures, strips
from cpu3d.report.runs import RunFiles, read_run, runs_table, write_page
from cpu3d.report.sections import Element, shown_cases
from cpu3d.run.folds import read_folds
from cpu3d.run.summary import median, numbers
from cpu3d.util.atomic import write_json
from cpu3d.util.progress import say
from cpu3d.util.records import append_record, count, plus_minus, versions
from memory_estimator.common.table import Bold, Table, new_console
from memory_estimator.common.units import format_bytes, format_seconds

Json = Dict[str, Any]

SCHEMA = 1
RESULTS = "results.json"
MEAN = "mean"  # instead of a region's name: the mean over the regions

DIFFERENCES = (
    "The other setting less the baseline, on the same case and seed: the mean, in brackets the "
    "range that is meant to hold the true mean in 95 of 100 such experiments (bootstrap over seeds "
    "and cases, too narrow with few seeds), and the cases that are better / worse / equal. A "
    "difference counts, in bold, if its range does not contain 0 and it exceeds what the choice of "
    "the seeds would make once in 20 times (Student's t); with one seed none counts."
)
COSTS_OF = (
    "Of one run: the median for times, the largest for memory, which is the largest resident set "
    "of the process."
)


class Cost(NamedTuple):
    """A cost of a run."""

    label: str
    show: Callable[[float], str]
    of: Callable[[Sequence[float]], float] = statistics.median  # of the runs of a variant


COSTS = {
    "steps": Cost("steps", "{:,.0f}".format),
    "voxels": Cost("voxels seen", lambda voxels: f"{voxels / 1e6:,.1f} M"),
    "step_s": Cost("a step in full", format_seconds),
    # With the compilation in the first, and the waiting for data.
    "steps_s": Cost("all steps", format_seconds),
    "validation_s": Cost("validation", format_seconds),
    # Of all attempts; not known where the last one did not end.
    "train_s": Cost("training in all", format_seconds),
    "train_peak_bytes": Cost("peak memory, training", format_bytes, max),
    "allocator_peak_bytes": Cost("TensorFlow's allocator", format_bytes, max),
    # The median over the cases: the first one compiles.
    "case_predict_s": Cost("a case predicted", format_seconds),
    "predict_peak_bytes": Cost("peak memory, prediction", format_bytes, max),
}
"""Name in results.json and the records -> cost. Seconds are of the wall clock."""


@dataclass(frozen=True)
class Answer:
    """What a variant has answered with a seed: by one run, or by all folds."""

    variant: str
    seed: int
    folder: Path  # of the run, or of the folds
    runs: Dict[str, RunFiles]  # by their names on the page
    scores: Json  # as scores.json has them
    split: str

    @property
    def cases(self) -> List[str]:
        return [case["case_id"] for case in self.scores["cases"]]

    @property
    def regions(self) -> List[str]:
        """The regions, if there are several with the mean over them last."""
        names = list(self.scores["regions"])
        return [*names, MEAN] if len(names) > 1 else names

    def values(self, region: str, metric: str) -> Dict[str, float]:
        """Case id -> a score of a region, or of their mean."""
        names = self.scores["regions"] if region == MEAN else [region]
        values = {}
        for case in self.scores["cases"]:
            region_scores = [case["regions"][name][metric] for name in names]
            values[case["case_id"]] = statistics.fmean(region_scores)
        return values

    def costs(self, run: RunFiles) -> Dict[str, Optional[float]]:
        """The COSTS of one of its runs. None is not known."""
        known = {
            **vars(run.history.costs(run.config.coarse_steps)),
            "case_predict_s": median(numbers(self.scores["cases"], "predict_s")),
            "predict_peak_bytes": self.scores.get("peak_rss_bytes"),
        }
        known["train_peak_bytes"] = known["peak_rss_bytes"]
        return {name: known[name] for name in COSTS}


def read_answer(variant: str, seed: int, folder: Path, split: str) -> Answer:
    """Read what was trained in a folder, of one run or of folds, and scored on `split`. Raises
    InputError if it was not trained or scored, or its files are damaged."""
    name = f"{variant}, seed {seed}"
    folders = {name: folder}
    folds = read_folds(folder)
    if folds:
        folders = {f"{name}, fold {fold}": run for fold, run in folds.runs(folder).items()}
    runs = {name: read_run(run, variant) for name, run in folders.items()}
    return Answer(variant, seed, folder, runs, read_scores(scores_path(folder, split)), split)


@dataclass(frozen=True)
class Comparison:
    """Answers grouped by variant."""

    baseline: str  # a variant
    answers: Dict[str, List[Answer]]  # variant -> by seed; the baseline first
    failed: List[str]  # lines on runs that are left out

    @classmethod
    def of(
        cls, answers: Sequence[Answer], baseline: str, failed: Mapping[str, str]
    ) -> "Comparison":
        """Compare these answers; `failed` is the name of a run without an answer -> why.

        Raises InputError if the baseline has none; a variant that shares no seed with it is left
        out."""
        lines = [f"{name}, is left out: {why}." for name, why in failed.items()]
        by_variant: Dict[str, List[Answer]] = {baseline: []}
        for answer in sorted(answers, key=lambda answer: answer.seed):
            by_variant.setdefault(answer.variant, []).append(answer)
        if not by_variant[baseline]:
            raise InputError(f"the baseline {baseline} must have a run, got none", *lines)
        seeds = {answer.seed for answer in by_variant[baseline]}
        paired = {}
        for variant, own in by_variant.items():
            if seeds & {answer.seed for answer in own}:
                paired[variant] = own
            else:
                lines.append(f"{variant} is left out: it shares no seed with {baseline}.")
        return cls(baseline, paired, lines)

    @property
    def first(self) -> Answer:
        return self.answers[self.baseline][0]

    def values(
        self, variant: str, region: str, metric: str, like: Optional[str] = None
    ) -> np.ndarray:
        """Scores (seeds, cases) of a variant: of all its seeds, or of those that the variant `like`
        has too."""
        seeds = {answer.seed for answer in self.answers[like or variant]}
        rows = []
        for answer in self.answers[variant]:
            if answer.seed in seeds:
                case_scores = answer.values(region, metric)
                rows.append([case_scores[case] for case in self.first.cases])
        return np.array(rows)

    def dice(self, region: str) -> Dict[str, np.ndarray]:
        """Variant -> Dice of every case, the mean over its seeds."""
        return {name: self.values(name, region, "dice").mean(0) for name in self.answers}

    def to_json(self) -> Json:
        """The scores, differences and costs, as in results.json and the records."""
        variants = {}
        differences: Json = {}
        runs: List[Json] = []
        for variant, own in self.answers.items():
            own_runs = []
            for answer in own:
                for run in answer.runs.values():
                    about = {"variant": variant, "seed": answer.seed, "fold": run.config.fold}
                    rate = run.config.peak_rate
                    own_runs.append({**about, "learning_rate": rate, **answer.costs(run)})
            runs += own_runs
            costs = {}
            for name, cost in COSTS.items():
                known = numbers(own_runs, name)
                costs[name] = cost.of(known) if known else None
            variants[variant] = {
                "seeds": [answer.seed for answer in own],
                "scores": self._of_all(variant, self._score),
                "costs": costs,
            }
            if variant != self.baseline:
                differences[variant] = self._of_all(variant, self._difference)
        return {
            "baseline": self.baseline,
            "cases": len(self.first.cases),
            "regions": self.first.regions,
            "variants": variants,
            "differences": differences,
            "runs": runs,
            "failed": self.failed,
        }

    def _of_all(self, variant: str, value_of: Callable[[str, str, str], Json]) -> Json:
        """Region -> metric -> a value of a variant."""
        return {
            region: {metric: value_of(variant, region, metric) for metric in METRICS}
            for region in self.first.regions
        }

    def _score(self, variant: str, region: str, metric: str) -> Json:
        seed_means = self.values(variant, region, metric).mean(1)
        sd = float(seed_means.std(ddof=1)) if len(seed_means) > 1 else None
        return {"mean": float(seed_means.mean()), "sd": sd}

    def _difference(self, variant: str, region: str, metric: str) -> Json:
        own = self.values(variant, region, metric, like=self.baseline)
        baseline = self.values(self.baseline, region, metric, like=variant)
        better = METRICS[metric].larger_is_better
        return paired_difference(own, baseline, larger_is_better=better)


# --- What is published ---


def publish(
    comparison: Comparison, about: Json, store: Store, out: Path, record: Optional[Path]
) -> None:
    """Write results.json, the page and the record, and print the tables. A record names no folder
    and no case."""
    runs: Dict[str, RunFiles] = {}
    for answer in itertools.chain(*comparison.answers.values()):
        runs.update(answer.runs)
    start = next(iter(runs.values())).last_start
    content = {
        **about,
        "host": start.get("host", {}),
        "versions": start.get("versions") or versions(),
        **comparison.to_json(),
    }
    write_json(out / RESULTS, {"schema": SCHEMA, **content})
    split = comparison.first.split
    facts = [
        ("scored", f'{count(content["cases"], "case")} of "{split}", full original grids'),
        ("budget", content["budget"]),
        *(("left out", line) for line in content["failed"]),
    ]
    tables = results_tables(content)
    write_page(
        out / "report.html",
        title=content["title"],
        command="./run.sh compare",
        runs=runs,
        store=store,
        about=facts,
        sections={
            "What was trained": [runs_table(runs, runs, {})],
            "Scores": [*tables[:-1], _strips(comparison)],
            "Cases": [_cases(comparison, store)],
            "Memory and time": tables[-1:],
        },
    )
    if record:
        append_record(record, "compare", content)
    for table in tables:
        new_console().print(table)
    say(f"written: {out / 'report.html'}", *content["failed"])


def _cases(comparison: Comparison, store: Store) -> Element:
    """The best, median and worst case by the mean over all variants, with the prediction of each
    one's first seed."""
    dice = comparison.dice(comparison.first.regions[-1])  # the mean over them, or the only one
    means = np.mean(list(dice.values()), axis=0)
    scores = {}
    for case in np.argsort(-means, kind="stable"):
        each = [f"{name} {values[case]:.3f}" for name, values in dice.items()]
        scores[comparison.first.cases[case]] = f"mean Dice: {', '.join(each)}"
    predictions = {}
    for name, (answer, *_) in comparison.answers.items():
        path = scores_path(answer.folder, answer.split)
        predictions[f"{name}, seed {answer.seed}"] = path.parent / PREDICTIONS
    regions = comparison.first.scores["regions"]
    return viewer(shown_cases(store, scores, regions, predictions))


def _strips(comparison: Comparison) -> Figures:
    """Dice of every case by variant, the mean over its seeds; a picture for each region."""
    figures = []
    for region in comparison.first.regions:
        title = f"Dice of every case, {region}"
        drawn = strips(comparison.dice(region), title=title, y_label="Dice", y_range=(-0.02, 1.02))
        figures.append((title, drawn))
    return figures


# --- Tables of results ---


def results_tables(record: Json) -> List[Table]:
    """The tables of the terminal and the docs, the table of costs last."""
    tables = [_scores_table(record)]
    if record["differences"]:
        tables.append(_differences_table(record))
    return [*tables, _costs_table(record)]


def _scores_table(record: Json) -> Table:
    """The mean over cases and seeds of every region and variant, and the deviation of the seeds."""
    rows = []
    for region, variant in itertools.product(record["regions"], record["variants"]):
        scores = record["variants"][variant]["scores"][region]
        cells = []
        for name, metric in METRICS.items():
            cells.append(plus_minus(scores[name]["mean"], scores[name]["sd"], metric.digits))
        rows.append((region, variant, *cells))
    cases = count(record["cases"], "case")
    notes = metric_notes(record["evaluation"]["tolerance_mm"])
    scored = (
        "Scored are the weights of the validation at full resolution with the highest mean Dice"
    )
    if record.get("folds"):
        scored = "Each case is scored by the fold that held it out, by its last weights, raw"
    return Table(
        ("region", "variant", *(metric.label for metric in METRICS.values())),
        rows,
        title="Scores",
        caption=f"Mean over {cases}, full grids, and seeds \u00b1 standard deviation of the "
        f"seeds\u2019 means. {notes}. {scored}.",
        names=2,
    )


def _differences_table(record: Json) -> Table:
    """Every difference to the baseline; those that count are bold."""
    rows = []
    for variant, regions in record["differences"].items():
        for region, differences in regions.items():
            for name, difference in differences.items():
                metric = METRICS[name]
                text = f"{difference['mean']:+.{metric.digits}f}"
                if difference["interval"]:
                    low, high = difference["interval"]
                    text += f" ({low:+.{metric.digits}f} to {high:+.{metric.digits}f})"
                if is_significant(difference):
                    text = Bold(text)
                cases = " / ".join(str(difference[kind]) for kind in ("better", "worse", "equal"))
                rows.append((region, variant, metric.labelled, text, cases))
    columns = ("region", "variant", "score", "difference", "cases")
    title = f"Differences to {record['baseline']}"
    return Table(columns, rows, title=title, caption=DIFFERENCES, names=3)


def _costs_table(record: Json) -> Table:
    """The learning rates of each variant's runs, and the costs of a run; a cost that no run knows
    has no row."""
    rates: Dict[str, Dict[str, None]] = {variant: {} for variant in record["variants"]}
    for run in record["runs"]:
        rates[run["variant"]][f"{run['learning_rate']:g}"] = None  # each once
    rows = [("learning rate", *map(", ".join, rates.values()))]
    for name, cost in COSTS.items():
        values = [
            variant_content["costs"].get(name) for variant_content in record["variants"].values()
        ]
        if any(value is not None for value in values):
            cells = ["-" if value is None else cost.show(value) for value in values]
            rows.append((cost.label, *cells))
    return Table(("", *record["variants"]), rows, title="Costs of a run", caption=COSTS_OF)
