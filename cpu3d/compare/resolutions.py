"""The resolution study: which resolution, at which batch, with the learning rate searched for each (source S2).

    ./run.sh compare --store store --out study --resolutions 0.5 0.75 1 --batches 1 4 --epochs 30 --seeds 0 1 2

Every arm, a resolution at a batch, sees every training case equally often and is scored on the full original grid. Its
learning rate is searched first: short runs at the start rate times --search-factors, the best by validation Dice (never
test) wins, and where that is at an end one more factor is tried, twice at most. Rerun to continue.
"""

import argparse
import dataclasses
import json
import sys
from typing import Any, Dict, List, Optional, Sequence

from rich.console import Console
from rich.table import Table

from cpu3d.atomic import atomic_write, writable_folder
from cpu3d.bench.record import append_record
from cpu3d.compare.learning_rates import EXTENSIONS
from cpu3d.compare.plan import Kept, check_same, load
from cpu3d.compare.runner import Evaluation
from cpu3d.compare.study import Study, to_json
from cpu3d.compare.study_page import render_study
from cpu3d.compare.study_runs import Plan, PlannedArm, first_rates, full_runs, plan_arms, search
from cpu3d.compare.study_tables import print_study
from cpu3d.compare.study_verdict import sentences
from cpu3d.compare.variants import common_settings
from cpu3d.config import RunConfig
from cpu3d.data.store import Store, open_store
from cpu3d.errors import InputError
from cpu3d.evaluate import UNTOUCHED, warning
from cpu3d.host.gpu import read_gpus
from cpu3d.lock import locked
from cpu3d.page import duration, gib
from cpu3d.recipes import RECIPES
from cpu3d.training_options import with_settings
from cpu3d.versions import versions
from memory_estimator.host import Host, read_host

RECORD = "resolutions"
"""The kind of its records."""

SEARCH_FACTORS = (0.5, 1.0, 2.0)

SEARCH_SHARE = 0.25


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the study alone; data, budget, seeds and training options are compare's."""
    group = parser.add_argument_group("resolution study")
    add = group.add_argument
    add(
        "--resolutions", type=float, nargs="+", metavar="R",
        help="train at these shares of the store's resolution, instead of variants, such as 0.5 0.75 1",
    )  # fmt: skip
    add(
        "--batches", type=int, nargs="+", metavar="N", help="effective batches, the second axis (default: the recipe's)"
    )
    rates = group.add_mutually_exclusive_group()
    rates.add_argument(
        "--learning-rates", type=float, nargs="+", metavar="R", help="rates to search, for all; one alone is no search"
    )
    rates.add_argument(
        "--search-factors", type=float, nargs="+", metavar="F",
        help="search these multiples of --learning-rate, scaled to the batch (default: 0.5 1 2)",
    )  # fmt: skip
    add(
        "--search-share", type=float, default=SEARCH_SHARE, metavar="S",
        help=f"part of a full run's steps that a run of the search takes (default: {SEARCH_SHARE:g})",
    )  # fmt: skip


def run_study(args: argparse.Namespace) -> int:
    """Carry out the study that `compare` was asked for. Restartable; what is of another study is refused."""
    store = open_store(args.store)
    store.check_split()
    settings, recipe = common_settings(args)
    _check(args, store, settings)
    host, base = read_host(), _base(settings, recipe)
    plan = Plan(
        epochs=getattr(args, "epochs", base.epochs),
        seeds=tuple(args.seeds),
        search_share=args.search_share,
        search_factors=tuple(args.search_factors or SEARCH_FACTORS),
        learning_rates=tuple(args.learning_rates or ()),
        validations=args.validations,
        evaluation=Evaluation(args.split, args.tolerance),
        force=args.force,
    )
    resolutions, batches = sorted(set(args.resolutions)), sorted(set(args.batches or [base.batch]))
    arms = plan_arms(store, host, read_gpus(), settings, recipe, base, resolutions, batches, plan)
    asked, kept = _asked(store, settings, recipe, plan), load(args.out)
    if kept:
        check_same(asked, kept, args.out)
        arms = _as_planned(arms, kept)
    messages = Console(stderr=True)
    messages.print(_plan_table(arms, plan))
    if args.split != UNTOUCHED:
        messages.print(f"[bold yellow]{warning(args.split)}")
    if args.dry_run:
        return 0
    out, source = writable_folder(args.out, "folder of --out").resolve(), store.folder.resolve()
    with locked(out, "comparison"):
        kept = Kept(asked, list(plan.seeds), [vars(arm) for arm in arms], kept.results if kept else None)
        kept.save(out)
        trials = search(arms, plan, source, out)
        found = full_runs(arms, trials, plan, source, out)
        study = Study(tuple(found), {**_about(store, host, plan, settings, base), "title": args.title or _title(store)})
        kept = dataclasses.replace(kept, results={**to_json(study), "reading": sentences(study)})
        kept.save(out)
        with atomic_write(out / "report.html", "w") as file:
            file.write(render_study(study))
    if args.record:
        append_record(args.record, RECORD, {"title": study.about["title"], **kept.results})
    if args.json:
        json.dump(vars(kept), sys.stdout, indent=1)
        print()
    else:
        print_study(study, Console())
    messages.print(f"written: {out / 'report.html'}", highlight=False, markup=False, soft_wrap=True)
    return 0


# --- Private helpers ---


def _check(args: argparse.Namespace, store: Store, settings: Dict[str, Any]) -> None:
    """Raise InputError for every option that a study cannot take."""
    problems = []
    odd = [value for value in args.resolutions if not 0 < value <= 1]
    if odd:
        problems.append(f"--resolutions must be above 0 and at most 1, got {odd[0]:g}; 1 is the store's own")
    for name, what in (("batches", "at least 1"), ("learning_rates", "positive"), ("search_factors", "positive")):
        odd = [value for value in getattr(args, name) or () if not value > 0]
        if odd:
            problems.append(f"--{name.replace('_', '-')} must be {what}, got {odd[0]:g}; leave it out")
    if not 0 < args.search_share <= 1:
        problems.append(f"--search-share must be above 0 and at most 1, got {args.search_share:g}; 0.25 is usual")
    for name, instead in (("resolution", "--resolutions"), ("batch", "--batches")):
        if name in settings:
            problems.append(f"--{name} must be left to {instead}, got {settings[name]}; leave it out")
    if settings.get("mode", "whole") != "whole":
        problems.append(
            f"--mode must be whole with --resolutions, got {settings['mode']}; patches are of full resolution"
        )
    if args.variant:
        problems.append("--variant must come without --resolutions, which are what is compared; leave one out")
    for name in ("voxels", "minutes"):
        if getattr(args, name) is not None:
            problems.append(
                f"--{name} must come without --resolutions, which sees every case equally often; use --epochs"
            )
    if not store.cases("val"):
        problems.append(
            f"split val of {store.folder} must hold cases, as rates are chosen on them; prepare with --split"
        )
    if problems:
        raise InputError(*problems)


def _base(settings: Dict[str, Any], recipe: Optional[str]) -> RunConfig:
    """The recipe under the common settings: where epochs, batch and learning rate start from."""
    try:
        return with_settings(RECIPES[recipe or "brats-regions"](), settings)
    except ValueError as error:
        raise InputError(str(error)) from None


def _asked(store: Store, settings: Dict[str, Any], recipe: Optional[str], plan: Plan) -> Dict[str, Any]:
    """What may not change when a study goes on. More resolutions, batches, seeds and rates may be asked for."""
    return {
        "study": RECORD,
        "split_hash": store.manifest.split_hash,
        "recipe": recipe,
        "settings": settings,
        "epochs": plan.epochs,
        "validations": plan.validations,
        "evaluation": vars(plan.evaluation),
        "search_share": plan.search_share,
        "search_seed": plan.seeds[0],
    }


def _as_planned(arms: Sequence[PlannedArm], kept: Kept) -> List[PlannedArm]:
    """The arms, those that were planned before as they were: what the host decides may be another thing today."""
    before = {}
    for content in kept.plan:
        parts = {name: tuple(content[name]) for name in ("grid", "options")}
        before[content["resolution"], content["batch"]] = PlannedArm(**{**content, **parts})
    return [before.get((arm.resolution, arm.batch), arm) for arm in arms]


def _plan_table(arms: Sequence[PlannedArm], plan: Plan) -> Table:
    table = Table(
        title=f"{len(arms)} arms x {len(plan.seeds)} seeds, {plan.epochs:g} epochs each", title_justify="left"
    )
    for name in ("resolution", "batch", "sees", "steps", "rates to search", "a step", "memory"):
        table.add_column(name, justify="right")
    seconds = []
    for arm in arms:
        rates = first_rates(arm, plan)
        searched = len(rates) if len(rates) > 1 else 0
        table.add_row(
            f"{arm.resolution:g}",
            str(arm.batch),
            " x ".join(map(str, arm.grid)),
            f"{arm.steps:,}",
            (f"{searched} x {arm.search_steps:,} steps: " if searched else "none: ")
            + ", ".join(f"{r:g}" for r in rates),
            f"{arm.step_s:.2f} s" if arm.step_s else "not known",
            gib(arm.peak_bytes) if arm.peak_bytes else "not known",
        )
        seconds.append(arm.step_s and arm.step_s * (len(plan.seeds) * arm.steps + searched * arm.search_steps))
    if all(seconds):
        extended = "" if plan.learning_rates else f", and up to {EXTENSIONS} trials more an arm"
        table.caption = f"steps of all runs: about {duration(sum(seconds))}{extended}; validation and scoring aside"
    return table


def _title(store: Store) -> str:
    return f"Which resolution? {store.manifest.name}"


def _about(store: Store, host: Host, plan: Plan, settings: Dict[str, Any], base: RunConfig) -> Dict[str, Any]:
    """What the page and the record say of data, settings, host and versions; no paths."""
    manifest = store.manifest
    return {
        "data": manifest.name,
        "shape": list(manifest.largest_shape),
        "brain_box": list(manifest.largest_box),
        "cases": {name: len(ids) for name, ids in manifest.split.items()},
        "settings": settings,
        "network": f"{base.unet.network}, {base.unet.depth} levels, {base.unet.filters} filters, {base.unet.norm} norm",
        "optimizer": base.optimizer,
        "epochs": plan.epochs,
        "seeds": list(plan.seeds),
        "validations": plan.validations,
        "search_share": plan.search_share,
        "search_factors": list(plan.search_factors),
        "learning_rates": list(plan.learning_rates),
        "split": plan.evaluation.split,
        "tolerance_mm": plan.evaluation.tolerance_mm,
        "host": host.summary(),
        "versions": versions(),
    }
