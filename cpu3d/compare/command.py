"""Train whole-volume and patch runs, or any variants, under one budget and compare them.

    ./run.sh compare --store store --out comparison
    ./run.sh compare --store store --out comparison --epochs 30 --filters 8 --dry-run
    ./run.sh compare --store store --out sizes --voxels 2e9 --variant whole "--mode whole" \\
        --variant patch-64 "--mode patch --patch 64 64 64" --variant half "--resolution 0.5"
    ./run.sh compare --runs runs/a-seed0 runs/a-seed1 runs/b-seed0 runs/b-seed1 --out seen

Every run is trained and scored in a process of its own, and validated 4 times (--validations N: N
times). The first variant is the baseline: every other variant is compared with it, case by case and
seed by seed. Options of `train` outside the quotes are for all variants, options inside the quotes
are for that variant.

Writes OUT/report.html, OUT/compare.json, ordinary run folders in OUT/runs and their output in
OUT/logs. The same command continues an interrupted comparison; with more --seeds it adds to a
finished one. A run that fails is left out and named, and the exit code is 1. Folders of --runs are
only read: each run must be trained to its end and scored. Runs whose folders have the same name
before "-seed" and the number are one variant, of that name. """

import itertools
import re
import shlex
from pathlib import Path
from typing import Iterator, List, Tuple

from cpu3d.chosen import SETTINGS
from cpu3d.compare.experiment import Kept, Options, planned, resumed, run_folder
from cpu3d.compare.results import plan_table, publish
from cpu3d.compare.run import Evaluation, PlannedRun, train_and_score
from cpu3d.compare.statistics import comparison_of, read_result
from cpu3d.compare.variants import Json
from cpu3d.data.store import Store, open_store
from cpu3d.errors import InputError, raise_if_any
from cpu3d.inference.runs import store_of_run
from cpu3d.inference.scores_file import UNTOUCHED, outdated_scores, warning
from cpu3d.run.config_json import load_config
from cpu3d.run.log import FINISHED, last_end, last_event
from cpu3d.util.atomic import writable_folder
from cpu3d.util.lock import locked
from cpu3d.util.progress import say
from memory_estimator.common.table import new_console

OPTIONS = (Options, SETTINGS)


def run(options: Options, settings: Json) -> int:
    raise_if_any(_problems(options, settings))
    console = new_console()
    failed = []
    if options.split != UNTOUCHED:
        say(f"warning: {warning(options.split)}")
    if options.runs:
        store, new, runs = _finished(options)
        budget = "that of the runs"
    else:
        store = open_store(options.store)
        store.check(record for split in store.manifest.split for record in store.cases(split))
        asked, plan, chosen = planned(options, settings, store)
        new = Kept(asked, list(options.seeds), plan)
        budget = chosen.words(plan[0]["name"])
    if options.dry_run:
        console.print(plan_table(resumed(new, options.out), budget))
        return 0
    out = writable_folder(options.out, "folder of --out").resolve()
    with locked(out, "comparison"):
        kept = resumed(new, out)
        kept.save(out)  # before anything else is in the folder: this file says whose it is
        if kept.plan:
            console.print(plan_table(kept, budget))
            runs = []
            # Seed by seed, so that the runs of a long comparison that is cut off can be compared.
            for seed, course in itertools.product(kept.seeds, kept.plan):
                folder = run_folder(out, course["name"], seed)
                words = (*course["options"], "--seed", str(seed))
                runs.append(PlannedRun(course["name"], seed, folder, words))
            folder = store.folder.resolve()
            failed = train_and_score(runs, folder, out, options.evaluation, force=options.force)
        lost = [(failure.variant, failure.seed) for failure in failed]
        done = [run for run in runs if (run.variant, run.seed) not in lost]
        results = [read_result(run, options.split, store) for run in done]
        comparison = comparison_of(results, runs[0].variant, failed)
        publish(comparison, kept, store, out, options, budget=budget)
    return 1 if failed else 0


# --- Private helpers ---


def _problems(options: Options, settings: Json) -> Iterator[str]:
    """Options that are missing, equal or do not go together."""
    chosen = dict(settings)
    for name in ("voxels", "minutes", "variant", "dry_run"):
        chosen[name] = getattr(options, name)
    budgets = [name for name in ("epochs", "voxels", "minutes") if chosen.get(name)]
    if not (options.runs or options.store):
        todo = "name one, or give --runs with folders to compare"
        yield f"--store must name a store, got none; {todo}"
    names = [name for name, _ in options.variant]
    for option, values in (("seeds", options.seeds), ("variant", names)):
        if len(set(values)) < len(values):
            yield f"--{option} must differ, got {', '.join(map(str, values))}; leave one out"
    if options.runs and any(chosen.values()):
        given = [f"--{name.replace('_', '-')}" for name, value in chosen.items() if value]
        rule = f"--runs must be without options of training, got {' and '.join(given)}"
        yield f"{rule}; leave them out, as nothing is trained"
    elif len(budgets) > 1:
        values = " and ".join(f"{chosen[name]:g}" for name in budgets)
        yield f"--{' and --'.join(budgets)} must be one budget, got {values}; leave all but one out"


def _finished(options: Options) -> Tuple[Store, Kept, List[PlannedRun]]:
    """The store, the comparison and the runs of --runs, the first one's variant first.

    Raises InputError, with all problems at once, for two runs of one variant and seed, and for runs
    that were not trained to their end or have no current scores."""
    runs = {}
    problems = []
    evaluation = options.evaluation
    for folder in (folder.resolve() for folder in options.runs):
        try:
            name = re.sub(r"[-_]?seed[-_]?\d+$", "", folder.name) or folder.name
            config = load_config(folder)
        except InputError as error:
            problems += error.problems
            continue
        run = PlannedRun(name, config.seed, folder, ())
        if str(run) in runs:
            both = f"{runs[str(run)].folder} and {folder}"
            rule = f"runs must differ in their name or seed, got {run} for {both}"
            problems.append(f"{rule}; leave one out")
        runs[str(run)] = run
        problems += _problems_of_run(folder, evaluation)
    raise_if_any(problems)
    ordered = list(runs.values())
    store = store_of_run(load_config(ordered[0].folder), options.store)
    asked = {"runs": [str(run.folder) for run in ordered], "evaluation": evaluation._asdict()}
    return store, Kept(asked, sorted({run.seed for run in ordered}), []), ordered


def _problems_of_run(folder: Path, evaluation: Evaluation) -> Iterator[str]:
    """Why a run cannot be compared: it was not trained to its end, or has no current scores."""
    end = last_end(folder).get("reason", "none")
    if end not in FINISHED:
        got = f"end: {end}"
        todo = "continue it with `train`"
        if last_event(folder).get("event") == "diverged":
            got = "diverged"
            todo = f"see `status --run {shlex.quote(str(folder))}`, or leave it out"
        yield f"run {folder} must have been trained to its end, got {got}; {todo}"
        return
    outdated = outdated_scores(folder, evaluation.split, evaluation.tolerance_mm)
    if outdated:
        words = ["evaluate", "--run", str(folder), "--split", evaluation.split]
        command = shlex.join([*words, "--tolerance", f"{evaluation.tolerance_mm!r}"])
        yield f"run {folder} must have current scores, got {outdated}; run `{command}`"
