"""Train variants, such as whole volumes and patches, under one budget and compare them.

    ./run.sh compare --store store --out sizes --epochs 20 --variant whole "--mode whole" \\
        --variant patch-64 "--mode patch --patch 64 64 64" --variant wide "--filters 32" --dry-run
    ./run.sh compare --store store --out crossed --folds 5 --variant plain "--augment light" \\
        --variant turned "--augment nnunet"

Every run is trained and scored in a process of its own, and validated 4 times (--validations N: N
times). The first variant is the baseline: every other variant is compared with it, case by case and
seed by seed. Options of `train` outside the quotes are for all variants, options inside the quotes
are for that variant.

The best weights are scored on the test cases. With --folds all folds are trained,
and each case is scored by the fold that held it out, with its last weights and without
post-processing.

Writes OUT/report.html, OUT/results.json, and ordinary run folders, or folders of folds, in
OUT/runs. The same command continues an interrupted comparison. A run that fails is left out and
named, and the exit code is 1."""

import dataclasses
import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, Iterator, List, Optional, Tuple

from cpu3d.data.manifest import Manifest
from cpu3d.data.store import Store, open_store
from cpu3d.errors import InputError, raise_if_any
from cpu3d.experiments.folds import publish_folds
from cpu3d.experiments.results import Comparison, publish, read_answer
from cpu3d.experiments.runner import PlannedRun, carry_out
from cpu3d.experiments.variants import (
    COLUMNS,
    DECIDED,
    Json,
    VariantPlan,
    parse_variant,
    planned_variants,
    refuse_settings,
    without,
)
from cpu3d.inference.out_of_fold import SPLIT
from cpu3d.inference.scores import TOLERANCE_MM
from cpu3d.inference.scores_file import UNTOUCHED
from cpu3d.run.folds import COMPARISON, SCHEMA, Folds, fold_folder, fold_names, save_folds
from cpu3d.settings import SETTINGS, as_options, recipe_settings
from cpu3d.util.atomic import is_untouched, writable_folder, write_json
from cpu3d.util.lock import locked
from cpu3d.util.records import count, listed
from memory_estimator.common.files import read_record, typed
from memory_estimator.common.schema import option
from memory_estimator.common.table import Table, new_console
from memory_estimator.common.units import format_seconds

VALIDATIONS = 4  # of every run, unless a number is chosen


@dataclass(frozen=True)
class Options:
    """The options of `compare` beside those of training, which are for all variants."""

    out: Path = option(help="folder to write; an existing comparison is continued", metavar="DIR")
    store: Path = option(help="store that `prepare` has written", metavar="DIR")
    variant: Tuple[Tuple[str, str], ...] = option(
        help='a way to train, such as: patch-64 "--mode patch --patch 64 64 64"; repeat for each',
        metavar=("NAME", "OPTIONS"),
        repeat=True,
    )
    minutes: Optional[float] = option(
        None, "budget of every run: minutes of its steps", "M", above=0
    )
    seeds: Tuple[int, ...] = option(
        (0, 1, 2), help="one run a variant for each seed", metavar="S", at_least=0
    )
    folds: Optional[int] = option(
        None, "train all K folds of each, and score each case by the fold that held it out", "K",
        at_least=2,
    )  # fmt: skip
    record: Optional[Path] = option(
        None, help="append the result to this .jsonl file", metavar="FILE"
    )
    dry_run: bool = option(False, help="print the plan and stop")
    force: bool = option(False, help="train even if a job may not fit the free memory")

    @property
    def names_of_folds(self) -> List[str]:
        """The folds to train, as "2/5"; [""] for none."""
        return fold_names(self.folds) if self.folds else [""]


OPTIONS = (Options, SETTINGS)


@dataclass(frozen=True)
class SavedComparison:
    """The content of compare.json."""

    asked: Json  # a later call must ask for the same
    plan: List[VariantPlan]  # one a variant
    split: str  # the cases that are scored
    runs: Dict[str, str]  # of the last call: their folders in this one, by their names


def run(options: Options, settings: Json) -> int:
    """Carry out `compare`."""
    raise_if_any(_problems(options, settings))
    store = open_store(options.store)
    if not (options.folds or store.manifest.split[UNTOUCHED]):
        raise InputError(
            "--store must hold test cases, got none; give --folds, or prepare with another --split"
        )
    store.check(record for split in store.manifest.split for record in store.cases(split))
    saved = _saved_comparison(options, settings, store)
    new_console().print(_plan_table(saved, options))
    if options.dry_run:
        return 0
    out = writable_folder(options.out, "folder of --out").resolve()
    with locked(out, "comparison"):
        planned: List[Tuple[VariantPlan, int, List[PlannedRun]]] = []
        # Seed by seed, so that the runs of a long comparison that is cut off can be compared.
        for seed in options.seeds:
            for variant in saved.plan:
                planned.append((variant, seed, _planned_runs(variant, seed, out, options)))
        folder = store.folder.resolve()
        every_run = [run for *_, runs in planned for run in runs]
        places = {run.name: str(run.folder.relative_to(out)) for run in every_run}
        saved = dataclasses.replace(saved, runs=places)
        write_json(out / COMPARISON, {"schema": SCHEMA, **dataclasses.asdict(saved)})
        if options.folds:  # each a folder of folds, which `predict` and `status` take together
            for variant, seed, runs in planned:
                place = writable_folder(runs[0].folder.parent, "folder of folds")
                chosen = {**variant.settings, "seed": seed}
                save_folds(place, Folds(options.folds, str(folder), chosen))
        failed = carry_out(every_run, folder, out)
        answers = []
        for variant, seed, runs in planned:
            if any(run.name in failed for run in runs):
                continue
            place = out / "runs" / f"{variant.name}-seed{seed}"
            if options.folds:
                publish_folds(place)
            answers.append(read_answer(variant.name, seed, place, saved.split))
        left_out = {name: error.why for name, error in failed.items()}
        comparison = Comparison.of(answers, saved.plan[0].name, left_out)
        about = _about(saved, options, store.manifest)
        publish(comparison, about, store, out, options.record)
    return 1 if failed else 0


# --- Private helpers ---


def _problems(options: Options, settings: Json) -> Iterator[str]:
    """Options that are missing, equal or do not go together."""
    epochs = settings.get("epochs")
    names = [name for name, _ in options.variant]
    for name, values in (("seeds", options.seeds), ("variant", names)):
        if len(set(values)) < len(values):
            yield f"--{name} must differ, got {listed(values)}; leave one out"
    if epochs and options.minutes:
        got = f"got {epochs} and {options.minutes:g}"
        yield f"--epochs and --minutes must be one budget, {got}; leave one out"


def _saved_comparison(options: Options, settings: Json, store: Store) -> SavedComparison:
    """The comparison as it is begun, or was begun in the folder --out.

    Raises InputError for settings that compare itself decides, for a compare.json that is damaged,
    and for a folder of other files or of another comparison."""
    refuse_settings("compare", settings, DECIDED)
    common = without(settings, ("epochs", "validations"))
    variants = {name: parse_variant(name, words, common) for name, words in options.variant}
    baseline = next(iter(variants))
    epochs = settings.get("epochs", recipe_settings(variants[baseline]).epochs)
    budget = f"the voxels of {epochs:,} epochs of {baseline}"
    if options.minutes:
        budget = f"{options.minutes:,g} minutes of steps"
    validations = settings.get("validations", VALIDATIONS)
    asked = {
        "variants": variants,
        "split_hash": store.manifest.split_hash,
        "folds": options.folds,
        "validations": validations,
        "budget": budget,
    }
    asked = json.loads(json.dumps(asked))  # as it is saved, without tuples
    path = options.out / COMPARISON
    if path.is_file():
        todo = "choose another --out"
        saved = read_record(
            path, SCHEMA, lambda content: typed(content, SavedComparison), todo, InputError
        )
        differing = [name for name in asked if saved.asked.get(name) != asked[name]]
        if [variant.name for variant in saved.plan] != list(variants):
            differing.append("plan")
        if differing:
            raise InputError(
                f"--out {options.out} must be a comparison that was begun with these options, got "
                f"another {listed(differing)}; choose another --out"
            )
        return saved
    if options.out.is_dir() and not is_untouched(options.out, COMPARISON):
        raise InputError(
            f"--out {options.out} must be empty or hold a {COMPARISON}, got "
            f"{min(path.name for path in options.out.iterdir())} in it; choose another"
        )
    length = {"epochs": epochs, "minutes": options.minutes}
    plan = planned_variants(
        variants, store, options.names_of_folds, validations, **length, force=options.force
    )
    return SavedComparison(asked, plan, SPLIT if options.folds else UNTOUCHED, {})


def _planned_runs(variant: VariantPlan, seed: int, out: Path, options: Options) -> List[PlannedRun]:
    """The run of a variant and a seed, or its folds."""
    words = [*as_options(variant.settings), "--seed", str(seed)]
    if options.force:
        words.append("--force")
    folder = out / "runs" / f"{variant.name}-seed{seed}"
    name = f"{variant.name}, seed {seed}"
    runs = []
    for fold in options.names_of_folds:
        run = PlannedRun(
            name=f"{name}, fold {fold}" if fold else name,
            folder=fold_folder(folder, fold) if fold else folder,
            options=(*words, "--fold", fold) if fold else tuple(words),
            steps=variant.steps or 0,
            is_fold=bool(fold),
        )
        runs.append(run)
    return runs


def _about(saved: SavedComparison, options: Options, manifest: Manifest) -> Json:
    """What results.json and a record tell of a comparison beside its results."""
    variants = {variant.name: shlex.join(as_options(variant.settings)) for variant in saved.plan}
    split = {name: len(ids) for name, ids in manifest.split.items()}
    return {
        "title": f"{' against '.join(variants)}: {manifest.name}",
        "data": {"name": manifest.name, "split": split, "shape": manifest.largest_shape},
        "budget": saved.asked["budget"],
        "seeds": list(options.seeds),
        "folds": options.folds,
        "evaluation": {"split": saved.split, "tolerance_mm": TOLERANCE_MM},
        "options": variants,
    }


def _plan_table(saved: SavedComparison, options: Options) -> Table:
    """The planned runs, a row a variant."""
    plan = saved.plan
    seconds = [variant.run_s for variant in plan]
    total = "unknown"
    if None not in seconds:
        runs = len(options.seeds) * len(options.names_of_folds)
        total = format_seconds(sum(seconds) * runs)
    each = f"{count(plan, 'variant')} x {count(options.seeds, 'seed')}"
    if options.folds:
        each += f" x {options.folds} folds"
    return Table(
        COLUMNS,
        [tuple(variant.row) for variant in plan],
        title=f"{each}, each for {saved.asked['budget']}",
        caption=f"predicted: {total} of steps, without validation and scoring",
    )
