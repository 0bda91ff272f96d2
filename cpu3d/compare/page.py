"""One self-contained page of a comparison: what was compared, what came out, what it cost, where it went wrong."""

import dataclasses
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from cpu3d.compare import pictures, tables
from cpu3d.compare.comparison import COSTS, Comparison
from cpu3d.compare.error_maps import BOTH, FIRST, SECOND, error_maps, label_colours
from cpu3d.compare.gather import MEAN
from cpu3d.compare.limits import METHOD, caveats, limits
from cpu3d.compare.runner import Evaluation
from cpu3d.compare.statistics import mean_and_sd_over_seeds
from cpu3d.compare.verdict import NAMES, cost_words, verdict
from cpu3d.data.store import Store
from cpu3d.inference.evaluate import UNTOUCHED, warning
from cpu3d.report.page import flat, render_page
from cpu3d.util.atomic import atomic_write
from cpu3d.util.versions import versions
from cpu3d.util.words import number
from memory_estimator.units import GIB

NOT_SETTINGS = ("seed", "unet.seed", "store", "store_channels", "label_names", "region_codes", "save_minutes")
"""Of a run's configuration: what does not tell variants apart, or belongs to the store."""

OF_PATCHES = ("foreground", "patches_per_case")
"""Of a run's configuration: what says nothing of a run on whole volumes."""


def write_page(
    path: Path, comparison: Comparison, store: Optional[Store], evaluation: Evaluation, *, title: str, budget: str
) -> Path:
    """Write the page atomically. `store` is None where it is not there any more: then there are no error maps."""
    page = render(comparison, store, evaluation, title=title, budget=budget, out=path.parent)
    with atomic_write(path, "w") as file:
        file.write(page)
    return path


def render(
    comparison: Comparison,
    store: Optional[Store],
    evaluation: Evaluation,
    *,
    title: str,
    budget: str,
    out: Optional[Path] = None,
) -> str:
    """The page as HTML. Folders in `out` are named from there, so that a page says nothing of the machine."""
    several = len(comparison.variants) > 1
    common, differing = settings(comparison)
    headline = MEAN if MEAN in comparison.regions else comparison.regions[0]
    facts = _facts(comparison, store, evaluation, budget)
    return render_page(
        Path(__file__).with_name("page.html.j2"),
        title=title,
        facts=facts,
        scored=dict(facts)["scored"],
        warning="" if evaluation.split == UNTOUCHED else warning(evaluation.split),
        readings=reading(comparison),
        limits=cautions(comparison, evaluation.split),
        method=METHOD,
        tiles=[
            (
                variant,
                colour,
                "mean Dice" if headline == MEAN else f"{headline} Dice",
                tables.spread(*mean_and_sd_over_seeds(comparison.values(variant, headline, "dice")), "dice"),
            )
            for variant, colour in pictures.colours(comparison).items()
        ],
        plus_minus=tables.PLUS_MINUS,
        variants=comparison.variants,
        baseline=comparison.baseline,
        metrics=list(NAMES.values()),
        scores_caption=tables.scores_caption(evaluation.tolerance_mm),
        differences_caption=tables.DIFFERENCES,
        costs_caption=tables.COSTS,
        score_rows=tables.score_rows(comparison),
        difference_rows=_difference_rows(comparison) if several else [],
        forests=[(f"Differences in {words}", pictures.forest(comparison, metric)) for metric, words in NAMES.items()]
        if several
        else [],
        strips=[
            (f"{NAMES['dice']} of every case, {region}", pictures.case_strips(comparison, region, "dice"))
            for region in comparison.regions
        ],
        curves=pictures.all_curves(comparison),
        best_steps=tables.best_steps(comparison),
        cost_rows=tables.cost_rows(comparison),
        cost_pictures=pictures.all_costs(comparison),
        maps=error_maps(comparison, store),
        label_colours=[
            (colour, name) for colour, name in label_colours(comparison.runs[comparison.baseline][0].config).values()
        ],
        error_colours=((FIRST, f"{comparison.baseline} alone"), (SECOND, "the other alone"), (BOTH, "both")),
        common=common,
        differing=differing,
        runs=_run_rows(comparison, out),
        hosts=_hosts(comparison),
        versions=versions(),
    )  # fmt: skip


def reading(comparison: Comparison) -> List[str]:
    """The comparison in words: what differs, what so few seeds or cases leave open, what failed, what it costs."""
    failed = [str(one) for one in comparison.failed]
    if len(comparison.variants) < 2:
        return failed
    seeds = min(len(comparison.shared_seeds(variant)) for variant in comparison.variants)
    costs = {name: {cost: comparison.cost(name, cost) for cost in COSTS} for name in comparison.variants}
    devices = {name: runs[0].config.device for name, runs in comparison.runs.items()}
    return [
        *verdict(comparison.differences, comparison.baseline),
        *caveats(seeds, len(comparison.cases)),
        *failed,
        *cost_words(costs, comparison.baseline, devices),
    ]


def cautions(comparison: Comparison, split: str) -> List[str]:
    """What favours a side and what the numbers cannot say, in words."""
    costs = {
        name: {variant: comparison.cost(variant, name) for variant in comparison.variants}
        for name in ("steps", "voxels", "steps_s")
    }
    return limits(
        {variant: runs[0].config for variant, runs in comparison.runs.items()},
        steps=costs["steps"],
        voxels=costs["voxels"],
        seconds=costs["steps_s"],
        by_time=comparison.by_time,
        split=split,
        untouched=split == UNTOUCHED,
    )


def settings(comparison: Comparison) -> Tuple[List[Tuple[str, str]], List[Tuple[str, List[str]]]]:
    """Settings in common as (name, value), and those that differ as (name, a value for each variant)."""
    of_variant = []
    for runs in comparison.runs.values():
        config = runs[0].config
        one = dict(flat(dataclasses.asdict(config)))
        one.update({"foreground": f"{config.foreground:.3g}"} if config.is_patch else dict.fromkeys(OF_PATCHES, "-"))
        of_variant.append(one)
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


def _run_rows(comparison: Comparison, out: Optional[Path]) -> List[List[str]]:
    """A row for each run: variant, seed, steps, the best weights' step, validations, seconds, GiB, folder."""
    return [
        [
            run.variant,
            str(run.seed),
            f"{run.costs.steps:,}",
            f"{tables.best_step(run):,}" if run.curve else "-",
            str(len(run.curve)),
            number(run.costs.train_s),
            number(run.costs.train_peak_bytes, GIB),
            _beside(run.folder, out),
        ]
        for runs in comparison.runs.values()
        for run in runs
    ]


def _beside(folder: Path, out: Optional[Path]) -> str:
    folder = Path(folder).resolve()
    return str(folder.relative_to(out.resolve()) if out and out.resolve() in folder.parents else folder)


def _hosts(comparison: Comparison) -> List[Dict[str, Any]]:
    """Every host that trained a run, once."""
    hosts: List[Dict[str, Any]] = []
    runs: Sequence = [run for of_variant in comparison.runs.values() for run in of_variant]
    for run in runs:
        if run.host and run.host not in hosts:
            hosts.append(run.host)
    return hosts
