"""The resolution study as rows of text: one table for the terminal, the page and the docs."""

from typing import List, Optional, Tuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cpu3d.compare.study import Arm, Study, spread
from cpu3d.compare.study_verdict import sentences
from cpu3d.page import gib


def score_table(study: Study) -> Tuple[List[str], List[List[str]]]:
    """Names of the columns, and a row an arm, by batch and then by resolution: means over cases, then over seeds."""
    mean = ["mean Dice"] if len(study.regions) > 1 else []
    metrics = [f"{name} {metric}" for metric in ("Dice", "HD95") for name in study.regions]
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
    """Each arm that was searched, and (rate, Dice, whether it won) of its trials."""
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


def with_spread(values: List[float], digits: int) -> str:
    """ "0.812 ± 0.004", the mean and the standard deviation of the seeds; the mean alone of one."""
    deviation = spread(values)
    more = "" if deviation is None else f" \u00b1 {deviation:.{digits}f}"
    return f"{sum(values) / len(values):.{digits}f}{more}"


def print_study(study: Study, console: Console) -> None:
    """The table, without the columns that a terminal has no room for, and the verdict."""
    table = Table(title=escape(study.about["title"]), caption="mean \u00b1 sd over seeds")
    (names, scores), (more, costs) = score_table(study), cost_table(study)
    kept = [number for number, name in enumerate(names) if "HD95" not in name]
    also = [more.index(name) for name in ("s a step", "training", "peak memory")]
    for name in [names[number] for number in kept] + [more[number] for number in also]:
        table.add_column(name, justify="right")
    best = best_rows(study)
    for number, (left, right) in enumerate(zip(scores, costs)):
        cells = [left[column] for column in kept] + [right[column] for column in also]
        table.add_row(*cells, style="bold" if number in best else None)
    console.print(table)
    for line in sentences(study):
        console.print(line, highlight=False, markup=False)


# --- Private helpers ---


def _in_order(study: Study) -> List[Arm]:
    return [arm for batch in study.batches for arm in study.at_batch(batch)]


def _scores(arm: Arm, regions: List[str]) -> List[str]:
    mean = [with_spread(arm.over_seeds(), 3)] if len(regions) > 1 else []
    return [
        f"{arm.resolution:g}",
        str(arm.batch),
        f"{arm.rate:g}",
        *mean,
        *(with_spread(arm.over_seeds("dice", name), 3) for name in regions),
        *(with_spread(arm.over_seeds("hd95_mm", name), 1) for name in regions),
    ]


def _costs(arm: Arm) -> List[str]:
    return [
        f"{arm.resolution:g}",
        str(arm.batch),
        " \u00d7 ".join(map(str, arm.grid)),
        f"{arm.steps:,}",
        f"{arm.median('step_s'):.2g}",
        _seconds(arm.median("train_s")),
        gib(arm.median("peak_bytes")),
        "-" if arm.median("predict_s") is None else f"{arm.median('predict_s'):.2g}",
    ]


def _seconds(value: Optional[float]) -> str:
    if value is None:
        return "-"
    return f"{value:.0f} s" if value < 600 else f"{value / 60:.0f} min" if value < 6000 else f"{value / 3600:.1f} h"
