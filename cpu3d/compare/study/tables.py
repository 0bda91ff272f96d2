"""The resolution study as rows of text: one table for the terminal, the page and the docs."""

from typing import List, Sequence, Tuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cpu3d.compare.statistics import mean_and_sd
from cpu3d.compare.study.learning_rates import EXTENSIONS
from cpu3d.compare.study.result import Arm, Study
from cpu3d.compare.study.runs import Plan, PlannedArm
from cpu3d.compare.study.verdict import sentences
from cpu3d.data.words import by, count
from cpu3d.report.page import duration, gib
from cpu3d.util.words import number, plus_minus, seconds

SCORES = (
    "Mean over cases, then mean \u00b1 standard deviation over seeds; HD95 in mm. Rate: the learning rate of the full "
    "runs, which the search chose. Bold: each batch\u2019s highest mean Dice, told apart from the others or not."
)
"""Caption of the scores, on every page."""

COSTS = (
    "Medians over seeds. Grid: the voxels that the network sees. Training: wall time of a full run, validations "
    "included. Peak memory: the largest resident set of the training process, with validation and, in read mode ram, "
    "the files kept in memory; on a card what TensorFlow\u2019s allocator held there."
)
"""Caption of the costs, on every page."""


def plan_table(arms: Sequence[PlannedArm], plan: Plan) -> Table:
    """What is about to happen, a line an arm."""
    table = Table(
        title=f"{count(arms, 'arm')} x {count(plan.seeds, 'seed')}, {plan.epochs:g} epochs each", title_justify="left"
    )
    for name in ("resolution", "batch", "sees", "steps", "rates to search", "a step", "memory"):
        table.add_column(name, justify="right")
    whole = []
    for arm in arms:
        searched = len(arm.rates) if len(arm.rates) > 1 else 0
        table.add_row(
            f"{arm.resolution:g}",
            str(arm.batch),
            by(arm.grid, " x "),
            f"{arm.steps:,}",
            (f"{searched} x {arm.search_steps:,} steps: " if searched else "none: ")
            + ", ".join(f"{rate:g}" for rate in arm.rates),
            f"{arm.step_s:.2f} s" if arm.step_s else "not known",
            gib(arm.peak_bytes) if arm.peak_bytes else "not known",
        )
        whole.append(arm.step_s and arm.step_s * (len(plan.seeds) * arm.steps + searched * arm.search_steps))
    if all(whole):
        more = any(arm.goes_beyond and len(arm.rates) > 1 for arm in arms)
        extended = f", and up to {EXTENSIONS} trials more an arm" if more else ""
        table.caption = f"steps of all runs: about {duration(sum(whole))}{extended}; validation and scoring aside"
    return table


def score_table(study: Study) -> Tuple[List[str], List[List[str]]]:
    """Names of the columns, and a row an arm, by batch and then by resolution: means over cases, then over seeds."""
    mean = ["mean Dice"] if len(study.regions) > 1 else []
    metrics = [f"{name} {metric}" for metric in ("Dice", "HD95, mm") for name in study.regions]
    header = ["resolution", "batch", "rate", *mean, *metrics]
    return header, [_scores(arm, study.regions) for arm in _in_order(study)]


def cost_table(study: Study) -> Tuple[List[str], List[List[str]]]:
    """Names of the columns, and a row an arm in the same order: medians over seeds."""
    header = ["resolution", "batch", "grid", "steps", "s a step", "training", "peak memory", "s to predict a case"]
    return header, [_costs(arm) for arm in _in_order(study)]


def best_rows(study: Study) -> List[int]:
    """Which of the rows have their batch's highest mean Dice."""
    best = [max(study.at_batch(batch), key=lambda arm: arm.dice) for batch in study.batches]
    return [number for number, arm in enumerate(_in_order(study)) if arm in best]


def search_rows(study: Study) -> List[Tuple[Arm, List[Tuple[str, str, bool]]]]:
    """Each arm that was searched, and (rate, Dice, whether the full runs have it) of its trials."""
    return [
        (
            arm,
            [
                (f"{trial.rate:g}", "diverged" if trial.dice is None else f"{trial.dice:.4f}", trial.rate == arm.rate)
                for trial in arm.trials
            ],
        )
        for arm in _in_order(study)
        if arm.trials
    ]


def print_study(study: Study, console: Console) -> None:
    """The table, without the columns that a terminal has no room for, and the verdict."""
    table = Table(
        title=escape(study.about["title"]), caption="mean \u00b1 sd over seeds; training with its validations"
    )
    (names, scores), (more, costs) = score_table(study), cost_table(study)
    kept = [column for column, name in enumerate(names) if "HD95" not in name]
    also = [more.index(name) for name in ("s a step", "training", "peak memory")]
    for name in [names[column] for column in kept] + [more[column] for column in also]:
        table.add_column(name, justify="right")
    best = best_rows(study)
    for row, (left, right) in enumerate(zip(scores, costs)):
        cells = [left[column] for column in kept] + [right[column] for column in also]
        table.add_row(*cells, style="bold" if row in best else None)
    console.print(table)
    for line in sentences(study):
        console.print(line, highlight=False, markup=False)


# --- Private helpers ---


def _in_order(study: Study) -> List[Arm]:
    return [arm for batch in study.batches for arm in study.at_batch(batch)]


def _scores(arm: Arm, regions: List[str]) -> List[str]:
    def over_seeds(digits: int, *what: str) -> str:
        return plus_minus(*mean_and_sd(arm.over_seeds(*what)), digits)

    return [
        f"{arm.resolution:g}",
        str(arm.batch),
        f"{arm.rate:g}",
        *([over_seeds(3)] if len(regions) > 1 else []),
        *(over_seeds(3, "dice", name) for name in regions),
        *(over_seeds(1, "hd95_mm", name) for name in regions),
    ]


def _costs(arm: Arm) -> List[str]:
    return [
        f"{arm.resolution:g}",
        str(arm.batch),
        by(arm.grid, " \u00d7 "),
        f"{arm.steps:,}",
        number(arm.median("step_s")),
        seconds(arm.median("train_s")),
        gib(arm.median("peak_bytes")),
        number(arm.median("predict_s")),
    ]
