"""One self-contained page of a comparison: what was compared, what came out, what it cost, where it went wrong."""

import dataclasses
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from cpu3d.atomic import atomic_write
from cpu3d.compare import pictures, tables
from cpu3d.compare.comparison import COSTS, Comparison
from cpu3d.compare.error_maps import BOTH, FIRST, SECOND, error_maps
from cpu3d.compare.gather import MEAN
from cpu3d.compare.runner import Evaluation
from cpu3d.compare.statistics import RESAMPLES
from cpu3d.compare.verdict import NAMES, cost_words, limits, verdict
from cpu3d.data.store import Store
from cpu3d.evaluate import UNTOUCHED, warning
from cpu3d.page import flat, render_page
from cpu3d.versions import versions
from memory_estimator.figure import PALETTE

NOT_SETTINGS = ("seed", "unet.seed", "store", "store_channels", "label_names", "region_codes", "save_minutes")
"""Of a run's configuration: what does not tell variants apart, or belongs to the store."""


def write_page(
    path: Path, comparison: Comparison, store: Optional[Store], evaluation: Evaluation, *, title: str, budget: str
) -> Path:
    """Write the page atomically. `store` is None where it is not there any more: then there are no error maps."""
    page = render(comparison, store, evaluation, title=title, budget=budget)
    with atomic_write(path, "w") as file:
        file.write(page)
    return path


def render(comparison: Comparison, store: Optional[Store], evaluation: Evaluation, *, title: str, budget: str) -> str:
    """The page as HTML."""
    metrics = ["dice", "hd95_mm", "surface_dice"]
    several = len(comparison.variants) > 1
    seeds = min(len(comparison.shared_seeds(variant)) for variant in comparison.variants)
    common, differing = settings(comparison)
    headline = MEAN if MEAN in comparison.regions else comparison.regions[0]
    return render_page(
        Path(__file__).with_name("page.html.j2"),
        title=title,
        facts=_facts(comparison, store, evaluation, budget),
        warning="" if evaluation.split == UNTOUCHED else warning(evaluation.split),
        readings=reading(comparison),
        limits=limits(
            seeds,
            len(comparison.cases),
            split=evaluation.split,
            untouched=evaluation.split == UNTOUCHED,
            voxels=[comparison.cost(variant, "voxels") for variant in comparison.variants],
        ),
        tiles=[
            (variant, colour, "mean Dice" if headline == MEAN else f"{headline} Dice", dice)
            for (variant, colour), dice in zip(
                pictures.colours(comparison).items(),
                (tables.spread(*_mean_sd(comparison, variant, headline), "dice") for variant in comparison.variants),
            )
        ],
        variants=comparison.variants,
        baseline=comparison.baseline,
        metrics=[NAMES[metric] for metric in metrics],
        tolerance_mm=evaluation.tolerance_mm,
        resamples=RESAMPLES,
        score_rows=tables.score_rows(comparison),
        difference_rows=_difference_rows(comparison) if several else [],
        forests=[(f"Differences in {NAMES[m]}", pictures.forest(comparison, m)) for m in metrics] if several else [],
        strips=[
            (f"{NAMES[metric]} of every case, {region}", pictures.case_strips(comparison, region, metric))
            for metric in metrics[:1]
            for region in comparison.regions
        ],
        curves=pictures.all_curves(comparison),
        cost_rows=tables.cost_rows(comparison),
        cost_pictures=pictures.all_costs(comparison),
        maps=error_maps(comparison, store, evaluation.split),
        label_colours=_label_colours(comparison),
        error_colours=((FIRST, f"{comparison.baseline} alone"), (SECOND, "the other alone"), (BOTH, "both")),
        common=common,
        differing=differing,
        runs=[
            (run.variant, run.seed, str(run.folder), run.costs)
            for runs in comparison.runs.values()
            for run in runs
        ],
        hosts=_hosts(comparison),
        versions=versions(),
    )  # fmt: skip


def reading(comparison: Comparison) -> List[str]:
    """The comparison in words."""
    costs = {name: {cost: comparison.cost(name, cost) for cost in COSTS} for name in comparison.variants}
    return [*verdict(comparison.differences, comparison.baseline), *cost_words(costs, comparison.baseline)]


def settings(comparison: Comparison) -> Tuple[List[Tuple[str, str]], List[Tuple[str, List[str]]]]:
    """Settings in common as (name, value), and those that differ as (name, a value for each variant)."""
    of_variant = [dict(flat(dataclasses.asdict(runs[0].config))) for runs in comparison.runs.values()]
    common, differing = [], []
    for name in sorted({name for one in of_variant for name in one}):
        if name.startswith(NOT_SETTINGS):
            continue
        values = [one.get(name, "-") for one in of_variant]
        if len(set(values)) == 1:
            common.append((name, values[0]))
        else:
            differing.append((name, values))
    return common, differing


# --- Private helpers ---


def _facts(
    comparison: Comparison, store: Optional[Store], evaluation: Evaluation, budget: str
) -> List[Tuple[str, str]]:
    config = comparison.runs[comparison.baseline][0].config
    manifest = store.manifest if store else None
    seeds = sorted({run.seed for runs in comparison.runs.values() for run in runs})
    kind = "untouched" if evaluation.split == UNTOUCHED else "NOT untouched"
    counts = ", ".join(f"{len(ids)} {name}" for name, ids in manifest.split.items()) if manifest else "not there now"
    return [
        ("data", f"{manifest.name}: {counts}" if manifest else counts),
        ("scored", f"{len(comparison.cases)} {kind} cases, full original grids"),
        ("budget", budget),
        ("seeds", ", ".join(map(str, seeds))),
        ("split hash", config.split_hash + (f", fold {config.fold}" if config.fold else "")),
        ("baseline", comparison.baseline),
    ]


def _mean_sd(comparison: Comparison, variant: str, region: str) -> Tuple[float, Optional[float]]:
    return tables.mean_and_sd_over_seeds(comparison.values(variant, region, "dice"))


def _difference_rows(comparison: Comparison) -> List[Tuple[str, str, List[Tuple[str, str, bool]]]]:
    """(variant, region, (difference, cases, whether it is clear) for each metric)."""
    return [
        (
            variant,
            region,
            [
                (tables.in_words(one[metric], metric), tables.cases(one[metric]), one[metric].is_clear)
                for metric in NAMES
            ],
        )
        for variant, regions in comparison.differences.items()
        for region, one in regions.items()
    ]


def _label_colours(comparison: Comparison) -> List[Tuple[str, str]]:
    """(colour, name) of the label codes that the maps draw."""
    config = comparison.runs[comparison.baseline][0].config
    codes = sorted({code for of_region in config.region_codes.values() for code in of_region})
    return [
        (PALETTE[position % len(PALETTE)], config.label_names.get(code, f"code {code}"))
        for position, code in enumerate(codes)
    ]


def _hosts(comparison: Comparison) -> List[Dict[str, Any]]:
    """Every host that trained a run, once."""
    hosts: List[Dict[str, Any]] = []
    runs: Sequence = [run for of_variant in comparison.runs.values() for run in of_variant]
    for run in runs:
        if run.host and run.host not in hosts:
            hosts.append(run.host)
    return hosts
