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
import itertools
from pathlib import Path
from typing import Iterator

from rich.console import Console

from cpu3d.compare.plan import Json, Kept, Options, extended, load_same, planned, planned_run
from cpu3d.compare.report import plan_table, publish
from cpu3d.compare.run import Evaluation, Runner, grouped, is_evaluated
from cpu3d.compare.statistics import compare, read_run
from cpu3d.data.store import open_store
from cpu3d.errors import InputError, refuse
from cpu3d.inference.evaluate import UNTOUCHED, warning
from cpu3d.inference.runs import store_of_run
from cpu3d.settings import SETTINGS, load_config
from cpu3d.util.atomic import writable_folder
from cpu3d.util.lock import locked
from cpu3d.util.progress import say

OPTIONS = (Options, SETTINGS)


def run(options: Options, settings: Json) -> int:
    refuse(_problems(options, settings))
    evaluation = Evaluation(options.split, options.tolerance)
    if options.split != UNTOUCHED:
        Console(stderr=True).print(f"[bold yellow]{warning(options.split)}")
    if options.runs:
        return _compare_folders(options, evaluation)
    return _train_and_compare(options, settings, evaluation)


# --- Private helpers ---


def _problems(options: Options, settings: Json) -> Iterator[str]:
    """Options that are missing, equal or do not go together."""
    chosen = {field.name for field in dataclasses.fields(Options) if getattr(options, field.name) != field.default}
    budgets = [name for name in ("epochs", "voxels", "minutes") if name in {*settings, *chosen}]
    names, seeds = [name for name, _ in options.variant], options.seeds
    if not (options.runs or options.store):
        yield "--store must name a store, got none; or give --runs with folders to compare"
    if settings.get("validations", 1) < 1:
        yield f"--validations must be at least 1, got {settings['validations']}; the last step is always validated"
    for option, values in (("seeds", seeds), ("variant", names)):
        if len(set(values)) < len(values):
            yield f"--{option} must differ, got {', '.join(map(str, values))}; leave one out"
    own, axes = ("variant", "voxels", "minutes"), ("resolutions", "batches")
    if options.runs:
        rule, excluded = "be left out with --runs, where nothing is trained", [*settings, *own, *axes]
    elif options.resolutions:
        rule = "be left out with --resolutions, which trains whole volumes at --batches for --epochs"
        excluded = ["mode", "resolution", "batch", *own]
    else:
        rule, excluded = "come with --resolutions", axes
    wrong = [name for name in excluded if name in {*settings, *chosen} and name != "validations"]
    yield from (f"--{name.replace('_', '-')} must {rule}, got it; see --help" for name in wrong)
    if len(budgets) > 1 and not wrong:
        yield f"--{' and --'.join(budgets)} must be one budget, got several; leave all but one out"


def _train_and_compare(options: Options, settings: Json, evaluation: Evaluation) -> int:
    store = open_store(options.store)
    store.check(record for split in store.manifest.split for record in store.cases(split))
    asked, plan, budget = planned(options, settings, store, evaluation)
    words = budget.words(plan[0]["name"])

    def taken_up() -> Kept:
        kept = extended(load_same(asked, options.out), asked, options.seeds, plan)
        Console(stderr=True).print(plan_table(kept.plan, kept.seeds, words).rich())
        return kept

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
        lost = [failure[:2] for failure in failed]
        ended = [run for run in runs if (run.variant, run.seed) not in lost]
        results = [read_run(run.variant, run.seed, run.folder, options.split, store=store) for run in ended]
        comparison = compare(results, baseline=kept.plan[0]["name"], failed=failed)
        publish(comparison, kept, store, out, options, budget=words)
    return 1 if failed else 0


def _compare_folders(options: Options, evaluation: Evaluation) -> int:
    runs = grouped([folder.resolve() for folder in options.runs], force=options.force)
    asked = {"runs": [str(folder) for _, _, folder in runs], "evaluation": evaluation._asdict()}
    for variant, seed, folder in runs:
        say(f"{variant}, seed {seed}: {folder}")
    before = load_same(asked, options.out)
    if options.dry_run:
        return 0
    out = writable_folder(options.out, "folder of --out").resolve()
    # Current scores are used where they are; others are the user's, and ours are written beside the page.
    places = {
        folder: folder if is_evaluated(folder, evaluation) else out / "evaluations" / f"{variant}-seed{seed}"
        for variant, seed, folder in runs
    }
    missing = [folder for folder, place in places.items() if not is_evaluated(folder, evaluation, place)]
    try:
        store = store_of_run(load_config(runs[0][2]), options.store)
    except InputError:
        if options.store or options.record or missing:
            raise
        store = None  # it is gone, and no run needs it
    runner = Runner(store.folder.resolve() if store else Path(), out, evaluation)
    kept = before or Kept(asked, sorted({seed for _, seed, _ in runs}), [])
    with locked(out, "comparison"):
        kept.save(out)  # whose folder it is, before anything else is in it
        results = []
        for number, (variant, seed, folder) in enumerate(runs, 1):
            if folder in missing:
                runner.evaluate(folder, places[folder], f"{number}/{len(runs)} {variant}, seed {seed}")
            results.append(read_run(variant, seed, folder, options.split, store=store, scored=places[folder]))
        publish(compare(results), kept, store, out, options, budget="that of the runs")
    return 0
