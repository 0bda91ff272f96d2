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
told, and the exit code is 1. Folders of --runs are only read: scores that they lack are in OUT/evaluations.
"""

import argparse
import dataclasses
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

from rich.console import Console

from cpu3d.compare import tables, timing
from cpu3d.compare.budget import Budget, budget_of
from cpu3d.compare.comparison import compare
from cpu3d.compare.folders import Grouped, grouped
from cpu3d.compare.gather import read_run
from cpu3d.compare.outcome import report
from cpu3d.compare.plan import Json, Kept, asked_for, check_same, courses, load, planned_runs, with_minutes
from cpu3d.compare.planned import Evaluation, is_evaluated
from cpu3d.compare.runner import carry_out_all, evaluate_folder
from cpu3d.compare.study import command as study
from cpu3d.compare.variants import Resolved, Variant, common_settings, parse_variant, resolved, usual_variants
from cpu3d.config import load_config
from cpu3d.data.records import SPLITS
from cpu3d.data.store import Store, open_store
from cpu3d.errors import InputError
from cpu3d.host.gpu import HostGpus
from cpu3d.inference.evaluate import UNTOUCHED, warning
from cpu3d.inference.predictors import store_of_run
from cpu3d.inference.scores import TOLERANCE_MM
from cpu3d.training_options import add_training_options, chosen_settings
from cpu3d.util.atomic import writable_folder
from cpu3d.util.lock import locked
from memory_estimator.host import read_host

VALIDATIONS = 4
"""Of every run, where no number is asked for."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--store", type=Path, metavar="DIR", help="store that `prepare` has written")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write; continued where it is")
    parser.add_argument(
        "--variant", nargs=2, action="append", metavar=("NAME", "OPTIONS"), default=[],
        help='a way to train, such as: patch-64 "--mode patch --patch 64 64 64"; again for each '
        "(default: whole volumes, and patches of half their size)",
    )  # fmt: skip
    parser.add_argument(
        "--runs", type=Path, nargs="+", metavar="DIR", help="compare these run folders; nothing is trained"
    )
    parser.add_argument(
        "--voxels", type=float, metavar="V", help="budget of every run: voxels seen, instead of --epochs"
    )
    parser.add_argument("--minutes", type=float, metavar="M", help="budget of every run: wall time of its steps")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="S", help="default: 0 1 2")
    parser.add_argument("--split", choices=SPLITS, default=UNTOUCHED, help="cases to score (default: test)")
    parser.add_argument(
        "--tolerance", type=float, default=TOLERANCE_MM, metavar="MM",
        help=f"tolerance of the surface Dice in mm (default: {TOLERANCE_MM})",
    )  # fmt: skip
    parser.add_argument("--title", metavar="TEXT", help="of the page and the record (default: the data's name)")
    parser.add_argument("--record", type=Path, metavar="FILE", help="append the result to this .jsonl file")
    parser.add_argument("--json", action="store_true", help="print compare.json instead of tables")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    parser.add_argument(
        "--force", action="store_true",
        help="train although it may not fit the memory that is free; compare --runs that were cut off or had unequal "
        "budgets",
    )  # fmt: skip
    study.add_arguments(parser)
    add_training_options(parser)
    parser.set_defaults(validations=VALIDATIONS)


def run(args: argparse.Namespace) -> int:
    _check(args)
    if args.resolutions:
        return study.run_study(args)
    if args.runs:
        return _compare_folders(args)
    return _compare_variants(args)


# --- Private helpers: what is compared ---


def _check(args: argparse.Namespace) -> None:
    """Raise InputError for options that do not go together, all at once."""
    problems = study.out_of_place(args)
    if not (args.runs or args.store):
        problems.append("--store must name a store to train on, got none; or give --runs with folders to compare")
    if args.validations < 1:
        problems.append(f"--validations must be at least 1, got {args.validations}; the last step is always validated")
    if len(set(args.seeds)) < len(args.seeds) or min(args.seeds) < 0:
        problems.append(f"--seeds must be different numbers from 0 on, got {args.seeds}; leave one out")
    names = [name for name, _ in args.variant]
    problems += [
        f"--variant must have names of their own, got {name} twice; rename one"
        for name in sorted({name for name in names if names.count(name) > 1})
    ]
    if args.runs:
        given = [f"--{name.replace('_', '-')}" for name in chosen_settings(args) if name != "validations"]
        given += [option for option, value in _only_to_train(args).items() if value]
        if given:
            problems.append(f"--runs must come without {', '.join(given)}, which are for training; leave them out")
    if problems:
        raise InputError(*problems)


def _only_to_train(args: argparse.Namespace) -> Dict[str, Any]:
    budget = {"--voxels": args.voxels, "--minutes": args.minutes}
    return {"--variant": args.variant, "--recipe": args.recipe, "--resolutions": args.resolutions, **budget}


def _compare_variants(args: argparse.Namespace) -> int:
    store = open_store(args.store)
    store.check_split()
    # Those to score too: they would be told of after hours of training.
    store.check(record for split in store.manifest.split for record in store.cases(split))
    evaluation = Evaluation(args.split, args.tolerance)
    variants = _variants(args, store)
    found = _resolve(variants, store)
    budget = budget_of(getattr(args, "epochs", None), args.voxels, args.minutes, found[0].config.epochs)
    asked = asked_for(variants, budget, args.validations, evaluation, store.manifest.split_hash)
    words = budget.words(variants[0].name)
    if args.dry_run:
        _say_plan(_kept(args, asked, found, budget), words, args.split)
        return 0
    out, source = writable_folder(args.out, "folder of --out").resolve(), store.folder.resolve()
    with locked(out, "comparison"):
        kept = _kept(args, asked, found, budget)
        kept.save(out)
        _say_plan(kept, words, args.split)
        if any(course["steps"] is None for course in kept.plan):
            step_s = timing.step_seconds(kept.plan, source, out, force=args.force)
            kept = dataclasses.replace(kept, plan=with_minutes(kept.plan, budget.amount, step_s, args.validations))
            kept.save(out)
            _say_plan(kept, words, args.split)
        timing.forget(out)  # after what it told is kept
        runs = planned_runs(kept.plan, kept.seeds, out)
        failed = carry_out_all(runs, source, out, evaluation, force=args.force)
        lost = {(one.variant, one.seed) for one in failed}
        comparison = compare(
            [
                read_run(run.variant, run.seed, run.folder, args.split, store=store)
                for run in runs
                if (run.variant, run.seed) not in lost
            ],
            baseline=variants[0].name,
            failed=failed,
            by_time=budget.kind == "minutes",
        )
        report(args, comparison, kept, store, evaluation, f"{words} each", out)
    return 1 if failed else 0


def _kept(args: argparse.Namespace, asked: Json, found: Sequence[Resolved], budget: Budget) -> Kept:
    """What the folder holds with the seeds that are added, or a new plan. Results are of all seeds or none."""
    kept = load(args.out)
    if not kept:
        return Kept(asked, list(args.seeds), courses(found, budget, args.validations))
    check_same(asked, kept, args.out)
    added = [seed for seed in args.seeds if seed not in kept.seeds]
    return dataclasses.replace(kept, seeds=[*kept.seeds, *added], results=None) if added else kept


def _variants(args: argparse.Namespace, store: Store) -> List[Variant]:
    """The variants as they were asked for."""
    common, recipe = common_settings(args)
    if not args.variant:
        return usual_variants(common, recipe, store, read_host(), HostGpus())
    return [parse_variant(name, options, common, recipe) for name, options in args.variant]


def _resolve(variants: Sequence[Variant], store: Store) -> List[Resolved]:
    """Every variant on this store and host. Raises InputError with the problems of all of them."""
    host, gpus, found, problems = read_host(), HostGpus(), [], []
    for variant in variants:
        try:
            found.append(resolved(variant, store, host, gpus))
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError(*problems)
    return found


def _say_plan(kept: Kept, budget: str, split: str) -> None:
    messages = Console(stderr=True)
    messages.print(tables.plan_table(kept.plan, kept.seeds, budget))
    _warn(split)


def _warn(split: str) -> None:
    if split != UNTOUCHED:
        Console(stderr=True).print(f"[bold yellow]{warning(split)}")


def _compare_folders(args: argparse.Namespace) -> int:
    found = grouped([folder.resolve() for folder in args.runs], force=args.force)
    evaluation = Evaluation(args.split, args.tolerance)
    store = _store_of_folders(args, found, evaluation)
    asked = {"runs": [str(folder) for _, _, folder in found], "evaluation": vars(evaluation)}
    messages = Console(stderr=True)
    for variant, seed, folder in found:
        messages.print(f"{variant}, seed {seed}: {folder}", highlight=False, markup=False, soft_wrap=True)
    _warn(args.split)
    if args.dry_run:
        _check_is_of(args.out, asked)
        return 0
    out = writable_folder(args.out, "folder of --out").resolve()
    kept = Kept(asked, sorted({seed for _, seed, _ in found}), [])
    with locked(out, "comparison"):
        if not _check_is_of(out, asked):
            kept.save(out)  # whose folder it is, before anything else is in it
        results = []
        for number, (variant, seed, folder) in enumerate(found, 1):
            # Scores that suit are used where they are; others are the user's, and ours are written beside the page.
            suits = is_evaluated(folder, evaluation)
            scored = folder if suits else _scored_folder(out, variant, seed)
            if store and not suits and not is_evaluated(folder, evaluation, scored):
                label = f"{number}/{len(found)} {variant}, seed {seed}"
                evaluate_folder(folder, scored, store.folder.resolve(), out, evaluation, label)
            results.append(read_run(variant, seed, folder, args.split, store=store, scored=scored))
        report(args, compare(results), kept, store, evaluation, "that of the runs", out)
    return 0


def _check_is_of(out: Path, asked: Json) -> bool:
    """Whether a folder is that of this comparison; False for one to be made. Raises InputError for another's."""
    kept = load(out)
    if kept:
        check_same(asked, kept, out)
    return kept is not None


def _scored_folder(out: Path, variant: str, seed: int) -> Path:
    return out.resolve() / "evaluations" / f"{variant}-seed{seed}"


def _store_of_folders(args: argparse.Namespace, found: Grouped, evaluation: Evaluation) -> Optional[Store]:
    """The store of the runs; None where it is gone and no run needs it, as all are scored and no record is asked for.

    Raises InputError where it is gone otherwise.
    """
    try:
        return store_of_run(load_config(found[0][2]), args.store)
    except InputError:
        scored = all(
            is_evaluated(folder, evaluation)
            or is_evaluated(folder, evaluation, _scored_folder(args.out, variant, seed))
            for variant, seed, folder in found
        )
        if args.store or args.record or not scored:
            raise
    return None
