"""Train whole-volume and patch runs, or any variants, under one budget and compare them.

    ./run.sh compare --store store --out comparison
    ./run.sh compare --store store --out comparison --epochs 30 --filters 8 --dry-run
    ./run.sh compare --store store --out sizes --voxels 2e9 --variant whole "--mode whole" \\
        --variant patch-64 "--mode patch --patch 64 64 64"
    ./run.sh compare --runs runs/first-seed0 runs/first-seed1 runs/other-seed0 runs/other-seed1 --out seen
    ./run.sh compare --store store --out resolutions --resolutions 0.5 0.75 1

Every run is trained and scored in a process of its own. What is learnt, on which cases, with which network and for how
long is the same for all, and each is validated 4 times, or --validations. The first variant is the baseline that the
others are paired with, case by case and seed by seed. Options of `train` given to compare are for all variants; those
of one are in its own quotes.

Leaves OUT/report.html, OUT/compare.json, ordinary run folders in OUT/runs and what they said in OUT/logs. The same
command continues one that was cut off; with more --seeds it adds to one that is done. A run that fails is left out and
named, and the exit code is 1. Folders of --runs are only read: scores that they lack are in OUT/evaluations.
"""

import argparse
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Optional, Sequence, Tuple

from rich.console import Console

from cpu3d.compare.plan import (
    Budget,
    Grouped,
    Json,
    Kept,
    Resolved,
    asked_for,
    budget_of,
    common_settings,
    courses,
    grouped,
    load_same,
    parse_variant,
    planned_runs,
    resolve_variants,
    timed_options,
    usual_variants,
    with_minutes,
)
from cpu3d.compare.report import plan_table, publish
from cpu3d.compare.resolutions import SEARCH_SHARE, run_study
from cpu3d.compare.run import (
    Evaluation,
    carry_out,
    evaluate_folder,
    forget_timing,
    is_evaluated,
    read_run,
    step_seconds,
)
from cpu3d.compare.statistics import compare
from cpu3d.config import load_config
from cpu3d.data.records import SPLITS
from cpu3d.data.store import Store, open_store
from cpu3d.errors import InputError
from cpu3d.inference.evaluate import UNTOUCHED, warning
from cpu3d.inference.runs import store_of_run
from cpu3d.inference.scores import TOLERANCE_MM
from cpu3d.training_options import add_training_options, chosen_settings
from cpu3d.util.atomic import writable_folder
from cpu3d.util.lock import locked
from memory_estimator.schema import add_options, check, given, option

VALIDATIONS = 4
"""Of every run, where no number is asked for."""

STUDY = "resolution study"


@dataclass(frozen=True)
class Options:
    """The options of `compare` but those of training, which are for all variants."""

    out: Path = option(help="folder to write; continued where it is", metavar="DIR")
    store: Optional[Path] = option(None, help="store that `prepare` has written", metavar="DIR")
    variant: Tuple[Tuple[str, str], ...] = option(
        (),
        help='a way to train, such as: patch-64 "--mode patch --patch 64 64 64"; again for each '
        "(default: whole volumes, and patches of half their size)",
        metavar=("NAME", "OPTIONS"),
        repeat=True,
    )
    runs: Tuple[Path, ...] = option((), help="compare these run folders; nothing is trained", metavar="DIR")
    voxels: Optional[float] = option(None, help="budget of every run: voxels seen, instead of --epochs", metavar="V")
    minutes: Optional[float] = option(None, help="budget of every run: wall time of its steps", metavar="M")
    seeds: Tuple[int, ...] = option((0, 1, 2), metavar="S", at_least=0)
    split: str = option(UNTOUCHED, help="cases to score", choices=SPLITS)
    tolerance: float = option(TOLERANCE_MM, help="tolerance of the surface Dice in mm", metavar="MM")
    title: Optional[str] = option(None, help="of the page and the record (default: the data's name)", metavar="TEXT")
    record: Optional[Path] = option(None, help="append the result to this .jsonl file", metavar="FILE")
    json: bool = option(False, help="print compare.json instead of tables")
    dry_run: bool = option(False, help="print the plan and stop")
    force: bool = option(
        False,
        help="train although it may not fit the memory that is free; compare --runs that were cut off or had unequal "
        "budgets",
    )
    resolutions: Tuple[float, ...] = option(
        (),
        help="train at these shares of the store's resolution, instead of variants, such as 0.5 0.75 1",
        metavar="R",
        group=STUDY,
        above=0,
        at_most=1,
    )
    batches: Tuple[int, ...] = option(
        (), help="effective batches, the second axis (default: the recipe's)", metavar="N", group=STUDY, at_least=1
    )
    learning_rates: Tuple[float, ...] = option(
        (), help="rates to search, for all; one alone is no search", metavar="R", group=STUDY, above=0, one_of="rates"
    )
    search_factors: Tuple[float, ...] = option(
        (),
        help="search these multiples of --learning-rate, scaled to the batch (default: 0.5 1 2)",
        metavar="F",
        group=STUDY,
        above=0,
        one_of="rates",
    )
    search_share: Optional[float] = option(
        None,
        help=f"part of a full run's steps that a run of the search takes (default: {SEARCH_SHARE:g})",
        metavar="S",
        group=STUDY,
        above=0,
        at_most=1,
    )
    validations: int = VALIDATIONS
    """Of every run; an option of training."""

    def checked_store(self) -> Store:
        """The store of --store, whose files of every case are as the manifest says, those to score among them."""
        store = open_store(self.store)
        store.check_split()
        store.check(record for split in store.manifest.split for record in store.cases(split))
        return store


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, Options)
    add_training_options(parser)


def run(args: argparse.Namespace) -> int:
    settings = chosen_settings(args)
    options = _checked(args, settings)
    if options.runs:
        return _compare_folders(options)
    common, recipe = common_settings(args)
    if options.resolutions:
        return run_study(options, common, recipe, settings.get("epochs"))
    return _compare_variants(options, common, recipe, settings.get("epochs"))


# --- Private helpers ---


def _checked(args: argparse.Namespace, settings: Dict[str, Any]) -> Options:
    """The options. Raises InputError for values out of range, and for options that do not go together, all at once."""
    options = Options(**{**given(Options, args), "validations": settings.get("validations", VALIDATIONS)})
    check(options, InputError)
    problems = []
    if not (options.runs or options.store):
        problems.append("--store must name a store to train on, got none; or give --runs with folders to compare")
    if options.validations < 1:
        problems.append(
            f"--validations must be at least 1, got {options.validations}; the last step is always validated"
        )
    if len(set(options.seeds)) < len(options.seeds):
        problems.append(f"--seeds must be different numbers, got {list(options.seeds)}; leave one out")
    names = [name for name, _ in options.variant]
    problems += [
        f"--variant must have names of their own, got {name} twice; rename one"
        for name in sorted({name for name in names if names.count(name) > 1})
    ]
    for_training = ["--" + name.replace("_", "-") for name in settings if name != "validations"]
    for_training += ["--recipe"] if args.recipe else []
    asked = [name for name in ("variant", "voxels", "minutes", "resolutions") if getattr(options, name)]
    if options.runs and (for_training or asked):
        words = ", ".join([*for_training, *(f"--{name}" for name in asked)])
        problems.append(f"--runs must come without {words}, which are for training; leave them out")
    if options.resolutions:
        wrong = [f"--{name}" for name in ("resolution", "batch") if name in settings]
        wrong += ["--mode patch"] if settings.get("mode", "whole") != "whole" else []
        wrong += [f"--{name}" for name in ("variant", "voxels", "minutes") if getattr(options, name)]
        problems += [
            f"{one} must come without --resolutions, which trains whole volumes at --batches for --epochs; leave it out"
            for one in wrong
        ]
    else:
        problems += [
            f"--{name.replace('_', '-')} must come with --resolutions, which are what is studied; leave it out"
            for name in ("batches", "learning_rates", "search_factors", "search_share")
            if getattr(options, name)
        ]
    if problems:
        raise InputError(*problems)
    return options


def _compare_variants(options: Options, common: Dict[str, Any], recipe: Optional[str], epochs: Optional[float]) -> int:
    store, evaluation = options.checked_store(), Evaluation(options.split, options.tolerance)
    variants = [parse_variant(name, words, common, recipe) for name, words in options.variant]
    variants = variants or usual_variants(common, recipe, store)
    found = resolve_variants(variants, store)
    budget = budget_of(epochs, options.voxels, options.minutes, found[0].config.epochs)
    asked = asked_for(variants, budget, options.validations, evaluation, store.manifest.split_hash)
    words, baseline = budget.words(variants[0].name), variants[0].name
    if options.dry_run:
        _say_plan(_kept(options, asked, found, budget), words, options.split)
        return 0
    out, source = writable_folder(options.out, "folder of --out").resolve(), store.folder.resolve()
    with locked(out, "comparison"):
        kept = _kept(options, asked, found, budget)
        kept.save(out)
        _say_plan(kept, words, options.split)
        if any(course["steps"] is None for course in kept.plan):
            step_s = step_seconds(timed_options(kept.plan), source, out, force=options.force)
            plan = with_minutes(kept.plan, budget.amount, step_s, options.validations)
            kept = dataclasses.replace(kept, plan=plan)
            kept.save(out)
            _say_plan(kept, words, options.split)
        forget_timing(out)  # after the steps that follow from it are kept
        runs = planned_runs(kept.plan, kept.seeds, out)
        failed = carry_out(runs, source, out, evaluation, force=options.force, keep_going=True)
        lost = {(one.variant, one.seed) for one in failed}
        results = [
            read_run(run.variant, run.seed, run.folder, options.split, store=store)
            for run in runs
            if (run.variant, run.seed) not in lost
        ]
        comparison = compare(results, baseline=baseline, failed=failed)
        publish(comparison, kept, store, evaluation, out, budget=f"{words} each", options=options)
    return 1 if failed else 0


def _kept(options: Options, asked: Json, found: Sequence[Resolved], budget: Budget) -> Kept:
    """What the folder holds with the seeds that are added, or a new plan. Results are of all seeds or none."""
    kept = load_same(asked, options.out)
    if not kept:
        return Kept(asked, list(options.seeds), courses(found, budget, options.validations))
    added = [seed for seed in options.seeds if seed not in kept.seeds]
    return dataclasses.replace(kept, seeds=[*kept.seeds, *added], results=None) if added else kept


def _say_plan(kept: Kept, budget: str, split: str) -> None:
    messages = Console(stderr=True)
    messages.print(plan_table(kept.plan, kept.seeds, budget).rich())
    _warn(split)


def _warn(split: str) -> None:
    if split != UNTOUCHED:
        Console(stderr=True).print(f"[bold yellow]{warning(split)}")


def _compare_folders(options: Options) -> int:
    found = grouped([folder.resolve() for folder in options.runs], force=options.force)
    evaluation = Evaluation(options.split, options.tolerance)
    store = _store_of_folders(options, found, evaluation)
    asked = {"runs": [str(folder) for _, _, folder in found], "evaluation": vars(evaluation)}
    messages = Console(stderr=True)
    for variant, seed, folder in found:
        messages.print(f"{variant}, seed {seed}: {folder}", highlight=False, markup=False, soft_wrap=True)
    _warn(options.split)
    if options.dry_run:
        load_same(asked, options.out)
        return 0
    out = writable_folder(options.out, "folder of --out").resolve()
    kept = Kept(asked, sorted({seed for _, seed, _ in found}), [])
    with locked(out, "comparison"):
        if not load_same(asked, out):
            kept.save(out)  # whose folder it is, before anything else is in it
        results = []
        for number, (variant, seed, folder) in enumerate(found, 1):
            # Scores that suit are used where they are; others are the user's, and ours are written beside the page.
            suits = is_evaluated(folder, evaluation)
            scored = folder if suits else _scored_folder(out, variant, seed)
            if store and not suits and not is_evaluated(folder, evaluation, scored):
                label = f"{number}/{len(found)} {variant}, seed {seed}"
                evaluate_folder(folder, scored, store.folder.resolve(), out, evaluation, label)
            results.append(read_run(variant, seed, folder, options.split, store=store, scored=scored))
        publish(compare(results), kept, store, evaluation, out, budget="that of the runs", options=options)
    return 0


def _scored_folder(out: Path, variant: str, seed: int) -> Path:
    return out.resolve() / "evaluations" / f"{variant}-seed{seed}"


def _store_of_folders(options: Options, found: Grouped, evaluation: Evaluation) -> Optional[Store]:
    """The store of the runs; None where it is gone and no run needs it, as all are scored and no record is asked for.

    Raises InputError where it is gone otherwise.
    """
    try:
        return store_of_run(load_config(found[0][2]), options.store)
    except InputError:
        scored = all(
            is_evaluated(folder, evaluation)
            or is_evaluated(folder, evaluation, _scored_folder(options.out, variant, seed))
            for variant, seed, folder in found
        )
        if options.store or options.record or not scored:
            raise
    return None
