"""Train whole-volume and patch runs, or any variants, under one budget and compare them.

    ./run.sh compare --store store --out comparison
    ./run.sh compare --store store --out comparison --epochs 30 --filters 8 --dry-run
    ./run.sh compare --store store --out sizes --voxels 2e9 --variant whole "--mode whole" \\
        --variant patch-64 "--mode patch --patch 64 64 64"
    ./run.sh compare --runs runs/first-seed0 runs/first-seed1 runs/other-seed0 runs/other-seed1 --out seen
    ./run.sh compare --store store --out resolutions --resolutions 0.5 0.75 1

Every run is trained and scored in a process of its own, and validated 4 times, or --validations. The first variant is
the baseline that the others are paired with, case by case and seed by seed. Options of `train` given to compare are for
all variants; those of one are in its own quotes.

Leaves OUT/report.html, OUT/compare.json, ordinary run folders in OUT/runs and what they printed in OUT/logs. The same
command continues one that was cut off; with more --seeds, --resolutions or --batches it adds to one that is done. A run
that fails is left out and named, and the exit code is 1. Folders of --runs are only read: scores that they lack are in
OUT/evaluations.
"""

import dataclasses
import functools
import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Optional, Tuple

from rich.console import Console

from cpu3d.compare.plan import VALIDATIONS, Json, Kept, load_same, planned, planned_run
from cpu3d.compare.report import plan_table, publish
from cpu3d.compare.run import Evaluation, Runner, grouped, is_evaluated
from cpu3d.compare.statistics import compare, read_run
from cpu3d.data.records import SPLITS
from cpu3d.data.store import open_store
from cpu3d.errors import InputError, refuse
from cpu3d.inference.evaluate import UNTOUCHED, warning
from cpu3d.inference.runs import store_of_run
from cpu3d.inference.scores import TOLERANCE_MM
from cpu3d.settings import SETTINGS, load_config
from cpu3d.util.atomic import writable_folder
from cpu3d.util.lock import locked
from cpu3d.util.progress import say
from memory_estimator.common.schema import option

a_budget = functools.partial(option, None, above=0, below=math.inf)


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
    resolutions: Tuple[float, ...] = option(
        (), help="instead of variants: whole volumes at these shares of the store's resolution", above=0, at_most=1
    )
    batches: Tuple[int, ...] = option((), help="of --resolutions, each at each (default: the recipe's)", above=0)
    runs: Tuple[Path, ...] = option((), help="compare these run folders; nothing is trained", metavar="DIR")
    voxels: Optional[float] = a_budget("budget of every run: voxels seen", metavar="V")
    minutes: Optional[float] = a_budget("budget of every run: wall time of its steps", metavar="M")
    seeds: Tuple[int, ...] = option((0, 1, 2), metavar="S", at_least=0)
    split: str = option(UNTOUCHED, help="cases to score", choices=SPLITS)
    tolerance: float = option(
        TOLERANCE_MM, help="tolerance of the surface Dice in mm", metavar="MM", at_least=0, below=math.inf
    )
    title: Optional[str] = option(None, help="of the page and the record (default: the data's name)", metavar="TEXT")
    record: Optional[Path] = option(None, help="append the result to this .jsonl file", metavar="FILE")
    dry_run: bool = option(False, help="print the plan and stop")
    force: bool = option(False, help="train although memory may not hold it; compare --runs that were cut off")


OPTIONS = (Options, SETTINGS)


def run(options: Options, settings: Json) -> int:
    _check(options, settings)
    evaluation = Evaluation(options.split, options.tolerance)
    if options.split != UNTOUCHED:
        Console(stderr=True).print(f"[bold yellow]{warning(options.split)}")
    if options.runs:
        return _compare_folders(options, evaluation)
    return _train_and_compare(options, settings, evaluation)


# --- Private helpers ---


def _check(options: Options, settings: Json) -> None:
    """Raise InputError for options that do not go together, all at once."""
    chosen = [one.name for one in dataclasses.fields(Options) if getattr(options, one.name) != one.default]
    own = [name for name in ("variant", "voxels", "minutes") if name in chosen]
    axes = [name for name in ("resolutions", "batches") if name in chosen]
    names, validations = [name for name, _ in options.variant], settings.get("validations", VALIDATIONS)
    if options.runs:
        wrong = [*(name for name in settings if name != "validations"), *own, *axes]
        rule = "come without --runs, where nothing is trained"
    elif options.resolutions:
        wrong = [*(name for name in ("mode", "resolution", "batch") if name in settings), *own]
        rule = "come without --resolutions, which trains whole volumes at --batches for --epochs"
    else:
        wrong = axes
        rule = "come with --resolutions"
    got = "both" if options.runs or options.resolutions else "it alone"
    budgets = [name for name in ("epochs", "voxels", "minutes") if name in {*settings, *chosen}]
    problems = [
        f"--{name.replace('_', '-')} must {must}, got {got}; {advice}"
        for name, holds, must, got, advice in (
            ("store", options.runs or options.store, "name a store", "none", "or give --runs with folders to compare"),
            ("validations", validations >= 1, "be at least 1", validations, "the last step is always validated"),
            ("seeds", len(set(options.seeds)) == len(options.seeds), "differ", list(options.seeds), "leave one out"),
            ("variant", len(set(names)) == len(names), "have names of their own", ", ".join(names), "rename one"),
            (" and --".join(budgets), wrong or len(budgets) < 2, "be one budget", "several", "leave all but one out"),
            *((name, False, rule, got, "leave it out") for name in wrong),
        )
        if not holds
    ]
    refuse(problems)


def _train_and_compare(options: Options, settings: Json, evaluation: Evaluation) -> int:
    store = open_store(options.store)
    store.check_split()
    store.check(record for split in store.manifest.split for record in store.cases(split))
    asked, plan, budget = planned(options, settings, store, evaluation)
    words = budget.words(plan[0]["name"])

    def taken_up() -> Kept:
        """What the folder holds with what is added, or a new plan. Results are of all seeds and variants or none."""
        before = load_same(asked, options.out) or Kept({}, [], [])
        seeds = list(dict.fromkeys((*before.seeds, *options.seeds)))
        names = [course["name"] for course in before.plan]
        now = [*before.plan, *(course for course in plan if course["name"] not in names)]
        same = before.seeds == seeds and len(before.plan) == len(now)
        Console(stderr=True).print(plan_table(now, seeds, words).rich())
        return Kept(asked, seeds, now, before.results if same else None)

    if options.dry_run:
        taken_up()
        return 0
    out = writable_folder(options.out, "folder of --out").resolve()
    runner = Runner(store.folder.resolve(), out, evaluation, options.force)
    with locked(out, "comparison"):
        kept = taken_up()
        kept.save(out)
        # Seed by seed, so that what is there when a long comparison is cut off can be compared.
        order = itertools.product(kept.seeds, kept.plan)
        runs = [planned_run(course, seed, out, minutes=budget.amount) for seed, course in order]
        failed = runner.carry_out(runs)
        lost = [one[:2] for one in failed]
        ended = [run for run in runs if (run.variant, run.seed) not in lost]
        results = [read_run(run.variant, run.seed, run.folder, options.split, store=store) for run in ended]
        comparison = compare(results, baseline=kept.plan[0]["name"], failed=failed)
        publish(comparison, kept, store, out, options, budget=words)
    return 1 if failed else 0


def _compare_folders(options: Options, evaluation: Evaluation) -> int:
    found = grouped([folder.resolve() for folder in options.runs], force=options.force)
    asked = {"runs": [str(folder) for _, _, folder in found], "evaluation": evaluation._asdict()}
    for variant, seed, folder in found:
        say(f"{variant}, seed {seed}: {folder}")
    if options.dry_run:
        load_same(asked, options.out)
        return 0
    out = writable_folder(options.out, "folder of --out").resolve()
    kept = Kept(asked, sorted({seed for _, seed, _ in found}), [])
    # Scores that suit are used where they are; others are the user's, and ours are written beside the page.
    places = {
        folder: folder if is_evaluated(folder, evaluation) else out / "evaluations" / f"{variant}-seed{seed}"
        for variant, seed, folder in found
    }
    missing = [folder for folder, place in places.items() if not is_evaluated(folder, evaluation, place)]
    try:
        store = store_of_run(load_config(found[0][2]), options.store)
    except InputError:
        if options.store or options.record or missing:
            raise
        store = None  # it is gone, and no run needs it
    runner = Runner(store.folder.resolve() if store else Path(), out, evaluation)
    with locked(out, "comparison"):
        if not load_same(asked, out):
            kept.save(out)  # whose folder it is, before anything else is in it
        results = []
        for number, (variant, seed, folder) in enumerate(found, 1):
            if folder in missing:
                runner.evaluate(folder, places[folder], f"{number}/{len(found)} {variant}, seed {seed}")
            results.append(read_run(variant, seed, folder, options.split, store=store, scored=places[folder]))
        publish(compare(results), kept, store, out, options, budget="that of the runs")
    return 0
