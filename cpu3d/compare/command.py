"""Train whole-volume and patch runs, or any variants, under one budget and compare them.

    ./run.sh compare --store store --out comparison
    ./run.sh compare --store store --out comparison --epochs 30 --filters 8 --dry-run
    ./run.sh compare --store store --out sizes --voxels 2e9 --variant whole "--mode whole" \\
        --variant patch-64 "--mode patch --patch 64 64 64"
    ./run.sh compare --runs runs/first-seed0 runs/first-seed1 runs/other-seed0 runs/other-seed1 --out seen
    ./run.sh compare --store store --out resolutions --resolutions 0.5 0.75 1

Every run is trained and scored in a process of its own. What is learnt, on which cases, with which network and for how
long is the same for all; the first variant is the baseline that the others are paired with, case by case and seed by
seed. Options of `train` given to compare are for all variants; those of one are in its own quotes.

Leaves OUT/report.html, OUT/compare.json, ordinary run folders in OUT/runs and what they said in OUT/logs. The same
command continues one that was cut off; with more --seeds it adds to one that is done.
"""

import argparse
import dataclasses
import json
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from rich.console import Console

from cpu3d.atomic import writable_folder
from cpu3d.bench.record import append_record
from cpu3d.compare import folders, resolutions, tables
from cpu3d.compare.budget import WARM_STEPS, Budget, budget_of
from cpu3d.compare.comparison import Comparison, compare, to_json
from cpu3d.compare.gather import read_run
from cpu3d.compare.page import reading, write_page
from cpu3d.compare.plan import Kept, asked_for, check_same, courses, load, planned_runs, run_options, with_minutes
from cpu3d.compare.runner import Evaluation, PlannedRun, carry_out, evaluate_folder
from cpu3d.compare.variants import Resolved, Variant, common_settings, parse_variant, resolved, usual_variants
from cpu3d.data.records import SPLITS
from cpu3d.data.store import Store, open_store
from cpu3d.errors import InputError
from cpu3d.evaluate import UNTOUCHED, warning
from cpu3d.host.gpu import read_gpus
from cpu3d.lock import locked
from cpu3d.scores import TOLERANCE_MM
from cpu3d.training_options import add_training_options, chosen_settings
from cpu3d.versions import versions
from memory_estimator.host import read_host

NEVER = 10**6
"""Epochs between the validations of a run that is only to be timed."""


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
    parser.add_argument(
        "--validations", type=int, default=4, metavar="N", help="of every run, evenly spread (default: 4)"
    )
    parser.add_argument("--split", choices=SPLITS, default=UNTOUCHED, help="cases to score (default: test)")
    parser.add_argument(
        "--tolerance", type=float, default=TOLERANCE_MM, metavar="MM",
        help=f"tolerance of the surface Dice in mm (default: {TOLERANCE_MM})",
    )  # fmt: skip
    parser.add_argument("--title", metavar="TEXT", help="of the page and the record (default: the data's name)")
    parser.add_argument("--record", type=Path, metavar="FILE", help="append the result to this .jsonl file")
    parser.add_argument("--json", action="store_true", help="print compare.json instead of tables")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    parser.add_argument("--force", action="store_true", help="train although it may not fit the memory that is free")
    resolutions.add_arguments(parser)
    add_training_options(parser)


def run(args: argparse.Namespace) -> int:
    _check(args)
    if args.resolutions:
        return resolutions.run_study(args)
    if args.runs:
        return _compare_folders(args)
    return _compare_variants(args)


# --- Private helpers: what is compared ---


def _check(args: argparse.Namespace) -> None:
    """Raise InputError for options that do not go together, all at once."""
    problems = []
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
        settings = chosen_settings(args)
        given = [f"--{name.replace('_', '-')}" for name in settings]
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
    evaluation = Evaluation(args.split, args.tolerance)
    variants = _variants(args, store)
    found = _resolve(variants, store)
    epochs = getattr(args, "epochs", None)
    budget = budget_of(epochs, args.voxels, args.minutes, found[0].config.epochs)
    asked = asked_for(variants, budget, args.validations, evaluation, store.manifest.split_hash)
    kept = load(args.out)
    if kept:
        check_same(asked, kept, args.out)
        added = [seed for seed in args.seeds if seed not in kept.seeds]
        kept = dataclasses.replace(kept, seeds=[*kept.seeds, *added])
    else:
        kept = Kept(asked, list(args.seeds), courses(found, budget, args.validations))
    messages = Console(stderr=True)
    messages.print(tables.plan_table(kept.plan, kept.seeds, str(budget)))
    if args.split != UNTOUCHED:
        messages.print(f"[bold yellow]{warning(args.split)}")
    if args.dry_run:
        return 0
    out = writable_folder(args.out, "folder of --out").resolve()
    with locked(out, "comparison"):
        kept.save(out)
        if any(course["steps"] is None for course in kept.plan):
            kept = _timed(kept, budget, store, out, args)
            kept.save(out)
            messages.print(tables.plan_table(kept.plan, kept.seeds, str(budget)))
        runs = planned_runs(kept.plan, kept.seeds, out)
        carry_out(runs, store.folder.resolve(), out, evaluation, force=args.force)
        comparison = compare([read_run(one.variant, one.seed, one.folder, args.split) for one in runs])
        _report(args, comparison, kept, store, evaluation, f"{budget} each", out)
    return 0


def _variants(args: argparse.Namespace, store: Store) -> List[Variant]:
    """The variants as they were asked for."""
    common, recipe = common_settings(args)
    if not args.variant:
        return usual_variants(common, recipe, store, read_host(), read_gpus())
    return [parse_variant(name, options, common, recipe) for name, options in args.variant]


def _resolve(variants: Sequence[Variant], store: Store) -> List[Resolved]:
    """Every variant on this store and host. Raises InputError with the problems of all of them."""
    host, gpus, found, problems = read_host(), read_gpus(), [], []
    for variant in variants:
        try:
            found.append(resolved(variant, store, host, gpus))
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError(*problems)
    return found


def _timed(kept: Kept, budget: Budget, store: Store, out: Path, args: argparse.Namespace) -> Kept:
    """The plan with the steps that fill the minutes, told by a short run of every variant."""
    folder = out / "warm-up"
    runs = [
        PlannedRun(course["name"], 0, folder / course["name"], run_options(course, 0, WARM_STEPS, NEVER))
        for course in kept.plan
    ]
    carry_out(runs, store.folder.resolve(), out, force=args.force)
    step_s = {one.variant: read_run(one.variant, 0, one.folder, None).costs.step_s for one in runs}
    shutil.rmtree(folder)
    return dataclasses.replace(kept, plan=with_minutes(kept.plan, budget.amount, step_s, args.validations))


def _compare_folders(args: argparse.Namespace) -> int:
    found = folders.grouped([folder.resolve() for folder in args.runs])
    evaluation = Evaluation(args.split, args.tolerance)
    store = open_store(args.store or read_run(*found[0], None).config.store)
    asked = {"runs": [str(folder) for _, _, folder in found], "evaluation": vars(evaluation)}
    messages = Console(stderr=True)
    for variant, seed, folder in found:
        messages.print(f"{variant}, seed {seed}: {folder}", highlight=False, markup=False, soft_wrap=True)
    kept = load(args.out)
    if kept:
        check_same(asked, kept, args.out)
    if args.dry_run:
        return 0
    out = writable_folder(args.out, "folder of --out").resolve()
    with locked(out, "comparison"):
        for number, (variant, seed, folder) in enumerate(found, 1):
            label = f"{number}/{len(found)} {variant}, seed {seed}"
            evaluate_folder(folder, store.folder.resolve(), out, evaluation, label)
        comparison = compare([read_run(variant, seed, folder, args.split) for variant, seed, folder in found])
        kept = Kept(asked, sorted({seed for _, seed, _ in found}), [])
        _report(args, comparison, kept, store, evaluation, "that of the runs", out)
    return 0


# --- Private helpers: what is said ---


def _report(
    args: argparse.Namespace,
    comparison: Comparison,
    kept: Kept,
    store: Store,
    evaluation: Evaluation,
    budget: str,
    out: Path,
) -> None:
    """Keep the results, write the page and the record, print the tables."""
    title = args.title or f"{' against '.join(comparison.variants)}: {store.manifest.name}"
    results, lines = to_json(comparison), reading(comparison)
    kept = dataclasses.replace(kept, results={**results, "reading": lines})
    kept.save(out)
    page = write_page(out / "report.html", comparison, store, evaluation, title=title, budget=budget)
    if args.record:
        append_record(args.record, "compare", _record(comparison, kept, store, title, budget))
    console = Console()
    if args.json:
        json.dump(vars(kept), sys.stdout, indent=1)
        print()
    else:
        console.print(tables.scores_table(comparison))
        if comparison.differences:
            console.print(tables.differences_table(comparison))
        console.print(tables.costs_table(comparison))
        for line in lines:
            console.print(f"- {line}", highlight=False, markup=False)
    Console(stderr=True).print(f"written: {page}", highlight=False, markup=False, soft_wrap=True)


def _record(comparison: Comparison, kept: Kept, store: Store, title: str, budget: str) -> Dict[str, Any]:
    """What a line of records/compare.jsonl holds: no paths, and nothing of one case."""
    host: Optional[Dict[str, Any]] = comparison.runs[comparison.baseline][0].host or None
    split: Dict[str, int] = {name: len(ids) for name, ids in store.manifest.split.items()}
    shape: Tuple[int, ...] = tuple(store.manifest.largest_shape)
    return {
        "title": title,
        "host": host or read_host().summary(),
        "versions": versions(),
        "data": {"name": store.manifest.name, "split": split, "shape": shape},
        "budget": budget,
        "seeds": kept.seeds,
        "evaluation": kept.asked["evaluation"],
        "options": {course["name"]: shlex.join(course["options"]) for course in kept.plan},
        **(kept.results or {}),
    }
