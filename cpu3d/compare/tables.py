"""A plan and a comparison as tables for the terminal, and their numbers in words."""

from typing import Any, Dict, List, Mapping, Optional, Sequence

from rich.markup import escape
from rich.table import Table

from cpu3d.compare.budget import step_voxels
from cpu3d.compare.comparison import Comparison
from cpu3d.compare.gather import RunResult
from cpu3d.compare.statistics import Difference, mean_and_sd_over_seeds
from cpu3d.compare.verdict import NAMES
from cpu3d.data.words import by, count
from cpu3d.report.page import duration, gib
from cpu3d.util.words import plus_minus, seconds
from memory_estimator.units import GIB

DIGITS = {"dice": 3, "hd95_mm": 2, "surface_dice": 3}
"""Of a metric, after the point."""

PLUS_MINUS = "\u00b1 is the standard deviation of the seeds\u2019 means"

DIFFERENCES = (
    "On the same case and seed: mean (95 % interval), and cases better / worse / equal. Bold: counts as a difference, "
    "as the interval leaves out 0 and seeds alone do not make as much."
)
"""Caption of the differences, on every page."""

COSTS = (
    "Of one run: the middle one of the seeds for times, the largest for memory. Every run had a process of its own. "
    "A case trained: as many voxels as a whole case has. A step: the median. "
    "Core-hours: the wall time on all cores that the process had. Training in all has validation and saving in it. "
    "Memory of training is the largest resident set of its process, with validation and, in read mode ram, which is "
    "usual for patches, the files kept in memory; that of prediction has the scoring in it. A card\u2019s memory is "
    "what TensorFlow\u2019s allocator held there at most."
)
"""Caption of the costs, on every page."""


def scores_caption(tolerance_mm: float) -> str:
    """Caption of the scores, on every page."""
    return (
        f"Mean over cases and seeds; {PLUS_MINUS}. HD95 in mm; surface Dice at {tolerance_mm:g} mm. Scored are the "
        "weights of the validation with the highest mean Dice."
    )


def plan_table(plan: Sequence[Mapping[str, Any]], seeds: Sequence[int], budget: str) -> Table:
    """What is about to happen, a line a variant; `plan` is that of compare.json."""
    table = Table(
        title=f"{count(plan, 'variant')} x {count(seeds, 'seed')}, each for {budget}",
        title_justify="left",
    )
    table.add_column("variant", overflow="fold")
    for column in ("sees", "steps", "voxels", "policy", "a step", "a run", "memory"):
        table.add_column(column, justify="right", no_wrap=True)
    for course in plan:
        steps, step_s, batch = course["steps"], course["step_s"], course["batch"]
        table.add_row(
            escape(course["name"]),
            by(course["grid"]) + (f" x {batch}" if batch > 1 else ""),
            f"{steps:,}" if steps else "by time",
            millions(course["voxels"]) if steps else "by time",
            course["policy"],
            f"{step_s:.2f} s" if step_s else "?",
            duration(steps * step_s) if steps and step_s else "?",
            f"{course['peak_bytes'] / GIB:.1f} GiB" if course["peak_bytes"] else "?",
        )
    known = [course["steps"] * course["step_s"] for course in plan if course["steps"] and course["step_s"]]
    if len(known) == len(plan):
        whole = duration(sum(known) * len(seeds))
        table.caption = f"predicted: {whole} for all steps, validation and scoring aside"
    return table


def scores_table(comparison: Comparison) -> Table:
    """The mean over cases and seeds, and how the seeds differ."""
    seeds = max(len(runs) for runs in comparison.runs.values())
    table = Table(
        title=f"Scores on {count(comparison.cases, 'case')}, full grids",
        caption="mean \u00b1 sd over seeds; HD95 in mm" if seeds > 1 else "mean; one seed; HD95 in mm",
    )
    table.add_column("variant")
    table.add_column("region")
    for name in NAMES.values():
        table.add_column(name, justify="right", no_wrap=True)
    for row in score_rows(comparison):
        table.add_row(*map(escape, row))
    return table


def score_rows(comparison: Comparison) -> List[List[str]]:
    """Variant, region, then each metric."""
    return [
        [variant, region, *(
            spread(*mean_and_sd_over_seeds(comparison.values(variant, region, metric)), metric) for metric in NAMES
        )]
        for region in comparison.regions
        for variant in comparison.variants
    ]  # fmt: skip


def differences_table(comparison: Comparison) -> Table:
    """Every difference to the baseline."""
    table = Table(
        title=f"Paired differences to {escape(comparison.baseline)}",
        caption="95 % interval by bootstrap over cases and seeds; cases better / worse / equal; bold counts",
    )
    for column in ("variant", "region", ""):
        table.add_column(column)
    for column in ("difference", "cases"):
        table.add_column(column, justify="right", no_wrap=True)
    for variant, regions in comparison.differences.items():
        for region, metrics in regions.items():
            for metric, name in NAMES.items():
                one, last = metrics[metric], name == [*NAMES.values()][-1]
                first = (escape(variant), escape(region)) if metric == "dice" else ("", "")
                size = f"[bold]{in_words(one, metric)}" if one.is_clear else in_words(one, metric)
                table.add_row(*first, name, size, cases(one), end_section=last)
    return table


def costs_table(comparison: Comparison) -> Table:
    """What a run of each variant took."""
    table = Table(title="Costs of a run: the middle seed's seconds, the largest peak", title_justify="left")
    rows = cost_rows(comparison)
    table.add_column("")
    for variant in comparison.variants:
        table.add_column(escape(variant), justify="right", no_wrap=True)
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table


def cost_rows(comparison: Comparison) -> Dict[str, List[str]]:
    """What -> a cell for each variant."""
    rows = (
        ("steps", "steps", lambda value: f"{value:,.0f}"),
        ("voxels seen", "voxels", millions),
        ("a step", "step_s", seconds),
        ("a case trained once", "case_train_s", seconds),
        ("all steps", "steps_s", seconds),
        ("validation", "validation_s", seconds),
        ("training in all", "train_s", seconds),
        ("core-hours", "core_hours", lambda value: f"{value:.3g}"),
        ("peak memory, training", "train_peak_bytes", gib),
        ("of it TensorFlow's allocator", "allocator_peak_bytes", gib),
        ("card's memory, training", "card_peak_bytes", gib),
        ("a case predicted", "case_predict_s", seconds),
        ("peak memory, prediction", "predict_peak_bytes", gib),
    )
    cells: Dict[str, List[str]] = {}
    for words, name, show in rows:
        values = [comparison.cost(variant, name) for variant in comparison.variants]
        if any(value is not None for value in values):
            cells[words] = ["-" if value is None else show(value) for value in values]
    return cells


def best_steps(comparison: Comparison) -> List[str]:
    """For each variant the steps that its runs' best weights are of, seed by seed, and the number of validations."""
    lines = []
    for variant in comparison.variants:
        runs = [run for run in comparison.runs[variant] if run.curve]
        if runs:
            steps = ", ".join(f"{best_step(run):,}" for run in runs)
            counts = sorted({len(run.curve) for run in runs})
            lines.append(
                f"{variant}: {steps} of {max(run.costs.steps for run in runs):,} steps, "
                f"{' or '.join(map(str, counts))} validation{'s' * (counts != [1])} a run"
            )
    return lines


def best_step(run: RunResult) -> int:
    """The step of the first validation with the highest mean Dice, whose weights are scored. Needs a validation."""
    return max(run.curve, key=lambda point: point.mean_dice).voxels // step_voxels(run.config)


def millions(voxels: float) -> str:
    """ "12.3 M"."""
    return f"{voxels / 1e6:,.{0 if voxels >= 1e8 else 1}f} M"


def spread(mean: float, sd: Optional[float], metric: str) -> str:
    """ "0.912 ± 0.004"."""
    return plus_minus(mean, sd, DIGITS[metric])


def in_words(difference: Difference, metric: str) -> str:
    """ "-0.210 (-0.330 to -0.100)"."""
    digits = DIGITS[metric]
    if difference.interval is None:
        return f"{difference.mean:+.{digits}f}"
    low, high = difference.interval
    return f"{difference.mean:+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})"


def cases(difference: Difference) -> str:
    """Better, worse and equal ones."""
    return f"{difference.better} / {difference.worse} / {difference.equal}"
