"""The resolution study: which resolution, at which batch, with the learning rate searched for each (source S2).

    ./run.sh compare --store store --out study --resolutions 0.5 0.75 1 --batches 1 4 --epochs 30 --seeds 0 1 2

Every arm, a resolution at a batch, sees every training case equally often and is scored on the full original grid. Its
learning rate is searched first: short runs at the start rate times --search-factors, the best by validation Dice (never
test) wins, and where that is at an end one more factor is tried, twice at most. Rerun to continue, or to add seeds,
resolutions, batches and rates.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from rich.console import Console

from cpu3d.compare.plan import Kept, check_same, load
from cpu3d.compare.planned import Evaluation
from cpu3d.compare.study.page import render_study
from cpu3d.compare.study.result import Study, to_json
from cpu3d.compare.study.runs import Plan, PlannedArm, arms_of, full_runs, plan_arms, search
from cpu3d.compare.study.tables import plan_table, print_study
from cpu3d.compare.study.verdict import sentences
from cpu3d.compare.variants import common_settings
from cpu3d.config import RunConfig
from cpu3d.data.store import Store, open_store
from cpu3d.errors import InputError
from cpu3d.host.gpu import HostGpus
from cpu3d.inference.evaluate import UNTOUCHED, warning
from cpu3d.recipes import RECIPES
from cpu3d.training_options import with_settings
from cpu3d.util.atomic import atomic_write, writable_folder
from cpu3d.util.lock import locked
from cpu3d.util.records import append_record
from cpu3d.util.versions import versions
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
        "--search-share", type=float, metavar="S",
        help=f"part of a full run's steps that a run of the search takes (default: {SEARCH_SHARE:g})",
    )  # fmt: skip


def out_of_place(args: argparse.Namespace) -> List[str]:
    """A problem for each option of a study that was given without --resolutions, and would do nothing."""
    if args.resolutions:
        return []
    names = ("batches", "learning_rates", "search_factors", "search_share")
    return [
        f"--{name.replace('_', '-')} must come with --resolutions, which are what is studied; leave it out"
        for name in names
        if getattr(args, name) is not None
    ]


def run_study(args: argparse.Namespace) -> int:
    """Carry out the study that `compare` was asked for. Restartable; what is of another study is refused.

    Seeds, resolutions, batches and rates that are asked for are added to those of the folder, and all are reported.
    """
    store = open_store(args.store)
    store.check_split()
    # Those to score too: they would be told of after hours of training.
    store.check(record for split in store.manifest.split for record in store.cases(split))
    settings, recipe = common_settings(args)
    _check(args, store, settings)
    host, base = read_host(), _base(settings, recipe)
    plan = Plan(
        epochs=getattr(args, "epochs", base.epochs),
        seeds=tuple(args.seeds),
        search_share=args.search_share or SEARCH_SHARE,
        search_factors=tuple(args.search_factors or SEARCH_FACTORS),
        learning_rates=tuple(args.learning_rates or ()),
        validations=args.validations,
        evaluation=Evaluation(args.split, args.tolerance),
        force=args.force,
    )
    resolutions, batches = sorted(set(args.resolutions)), sorted(set(args.batches or [base.batch]))
    arms = plan_arms(store, host, HostGpus(), settings, recipe, base, resolutions, batches, plan)
    named_rates = bool(args.learning_rates or args.search_factors)

    def taken_up() -> Tuple[Kept, Plan, List[PlannedArm]]:
        return _taken_up(args.out, _asked(store, settings, recipe, plan), plan, arms, more=named_rates)

    if args.dry_run:
        _, whole, planned = taken_up()
        _say_plan(planned, whole)
        return 0
    out, source = writable_folder(args.out, "folder of --out").resolve(), store.folder.resolve()
    with locked(out, "comparison"):
        kept, whole, planned = taken_up()
        kept.save(out)
        _say_plan(planned, whole)
        trials = search(planned, whole, source, out)
        found = full_runs(planned, trials, whole, source, out)
        about = {**_about(store, host, whole, settings, base), "title": args.title or _title(store)}
        study = Study(tuple(found), about)
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
    Console(stderr=True).print(f"written: {out / 'report.html'}", highlight=False, markup=False, soft_wrap=True)
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
    if args.search_share is not None and not 0 < args.search_share <= 1:
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


def _taken_up(
    folder: Path, asked: Dict[str, Any], plan: Plan, arms: Sequence[PlannedArm], *, more: bool
) -> Tuple[Kept, Plan, List[PlannedArm]]:
    """The study in `folder` with what is added to it, or a new one. Results are of all arms and seeds, or none.

    Raises InputError where it is another study.
    """
    kept = load(folder, PlannedArm)
    if kept:
        # The search keeps its seed, whichever seeds are added.
        asked = {**asked, "search_seed": kept.seeds[0]}
        check_same(asked, kept, folder)
        added = [seed for seed in plan.seeds if seed not in kept.seeds]
        plan = dataclasses.replace(plan, seeds=(*kept.seeds, *added))
    planned = arms_of(kept.plan if kept else (), arms, plan, more=more)
    content = [vars(arm) for arm in planned]
    same = kept is not None and kept.seeds == list(plan.seeds) and len(kept.plan) == len(content)
    return Kept(asked, list(plan.seeds), content, kept.results if same else None), plan, planned


def _say_plan(arms: Sequence[PlannedArm], plan: Plan) -> None:
    messages = Console(stderr=True)
    messages.print(plan_table(arms, plan))
    if plan.evaluation.split != UNTOUCHED:
        messages.print(f"[bold yellow]{warning(plan.evaluation.split)}")


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
